#pragma once
/// \file
/// An op on sharded tensors, and who carries it out.
///
/// A call goes to the first of these that there is: what the user registered for the op, what is registered for the
/// kind of spec of the first sharded tensor among the arguments, what is built in for every kind. Else it is an
/// `Error(unsupported)` that names the op and its arguments. Ops are global, as PyTorch's functions are. Register on
/// all ranks alike, and before ops are called. An op of one's own is an `Op` that nothing is built in for:
///
///     const Op<ShardedTensor(const ShardedTensor&, double)> scale("scale");
///     scale.register_for(ChunkShardingSpec::kKind, [](const ShardedTensor& x, double factor) { ... });
///
/// Law: the sharded tensors of one call are of one group, `Error(invalid_argument)` otherwise, before anything is done.
/// PyTorch: ShardedTensor.__torch_function__ in torch/distributed/_shard/sharded_tensor/api.py.

#include <ATen/core/Tensor.h>

#include <array>
#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/tensor/sharded_tensor.h"

namespace tessera {

// How arguments are named in errors. Options of an op have a `describe` of their own beside them.
std::string describe(const ShardedTensor& tensor);
std::string describe(const ShardedTensor::ToOptions& options);
std::string describe(const at::Tensor& tensor);
std::string describe(const at::Scalar& scalar);
std::string describe(const std::string& text);
std::string describe(const std::vector<std::int64_t>& list);
std::string describe(bool value);
std::string describe(std::int64_t value);
std::string describe(double value);
template <typename... Alternatives>
std::string describe(const std::variant<Alternatives...>& argument) {
  return std::visit([](const auto& value) { return describe(value); }, argument);
}

namespace op_detail {

/// The sharded tensors among the arguments of one call.
class Tensors {
 public:
  explicit Tensors(std::string_view op) : op_(op) {}
  /// Throws `Error(invalid_argument)` if it is of another group than the ones before.
  void add(const ShardedTensor& tensor);
  template <typename... Alternatives>
  void add(const std::variant<Alternatives...>& argument) {
    std::visit([this](const auto& value) { this->add(value); }, argument);
  }
  template <typename Other>
  void add(const Other& /*argument*/) {}
  /// Throws `Error(invalid_argument)` if there is none.
  const ShardedTensor& first() const;

 private:
  std::string_view op_;
  const ShardedTensor* first_ = nullptr;
};

[[noreturn]] void fail_unsupported(std::string_view op, std::span<const std::string> arguments,
                                   const ShardedTensor& on);

}  // namespace op_detail

template <typename Signature>
class Op;

template <typename Result, typename... Args>
class Op<Result(Args...)> {
 public:
  using Function = std::function<Result(Args...)>;

  explicit Op(std::string name, Function built_in = nullptr) : name_(std::move(name)), built_in_(std::move(built_in)) {}
  /// Built in for specs of one kind alone.
  Op(std::string name, std::string_view kind, Function built_in) : name_(std::move(name)) {
    register_for(kind, std::move(built_in));
  }

  const std::string& name() const { return name_; }

  Result operator()(Args... args) const {
    op_detail::Tensors tensors(name_);
    (tensors.add(args), ...);
    const Function function = find(tensors.first().sharding_spec().kind());
    if (!function) {
      const std::array<std::string, sizeof...(Args)> arguments = {describe(args)...};
      op_detail::fail_unsupported(name_, arguments, tensors.first());
    }
    return function(args...);
  }

  /// Carries the op out whatever the spec, instead of all others; null takes it back.
  void register_custom(Function function) const {
    const std::lock_guard lock(mutex_);
    custom_ = std::move(function);
  }
  /// Carries the op out for specs of this kind (`ShardingSpec::kind`), instead of what was there; null takes it away.
  void register_for(std::string_view kind, Function function) const {
    const std::lock_guard lock(mutex_);
    by_kind_[std::string(kind)] = std::move(function);
  }

 private:
  Function find(std::string_view kind) const {
    const std::lock_guard lock(mutex_);
    if (custom_) return custom_;
    const auto of_kind = by_kind_.find(kind);
    return of_kind != by_kind_.end() && of_kind->second ? of_kind->second : built_in_;
  }

  std::string name_;
  Function built_in_;
  mutable std::mutex mutex_;
  mutable Function custom_;
  mutable std::map<std::string, Function, std::less<>> by_kind_;
};

}  // namespace tessera

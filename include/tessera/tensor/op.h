#pragma once
/// \file
/// An op on sharded tensors whose implementation can be replaced.
///
/// A call runs the first of these that exists: the implementation that the user registered for the op, the one that is
/// registered for the kind of spec of the first sharded tensor among the arguments, the one built in for every kind.
/// Otherwise it throws `Error(unsupported)` naming the op and its arguments. Ops are global, as PyTorch's functions
/// are. Register the same on all ranks, before ops are called.
///
/// `op_of` returns the Op of a built-in function; an op of your own is an Op without a built-in implementation:
///
///     op_of(ops::softmax).register_for("MySpec", [](const ShardedTensor& x, std::int64_t dim) { ... });
///     const Op<ShardedTensor(const ShardedTensor&, double)> scale("scale");
///     scale.register_for(ChunkShardingSpec::kKind, [](const ShardedTensor& x, double factor) { ... });
///
/// Law: the sharded tensors of one call are of one group; otherwise it throws `Error(invalid_argument)` before anything
/// runs. Ranks do not compare their calls. If an op throws on one rank, the others throw as soon as they wait for this
/// rank. Exceptions of LibTorch are thrown as `Error(invalid_argument)`. PyTorch: ShardedTensor.__torch_function__ in
/// torch/distributed/_shard/sharded_tensor/api.py.

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

// Return an argument as errors name it. The options of an op have a `describe` of their own.
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

template <typename Signature>
class Op;

namespace detail {

/// Collects the sharded tensors among the arguments of one call.
class ShardedArguments {
 public:
  explicit ShardedArguments(std::string_view op) : op_(op) {}
  /// Throws `Error(invalid_argument)` if `tensor` is of another group than the previous ones.
  void add(const ShardedTensor& tensor);
  template <typename... Alternatives>
  void add(const std::variant<Alternatives...>& argument) {
    std::visit([this](const auto& value) { this->add(value); }, argument);
  }
  template <typename Other>
  void add(const Other& /*argument*/) {}
  /// Throws `Error(invalid_argument)` if there is none.
  const ShardedTensor& first() const;
  /// Throws the exception that is being handled, LibTorch's as `Error`, and lets the other ranks know of it.
  [[noreturn]] void rethrow() const;

 private:
  std::string_view op_;
  const ShardedTensor* first_ = nullptr;
};

[[noreturn]] void fail_unsupported(std::string_view op, std::span<const std::string> arguments,
                                   const ShardedTensor& on);
[[noreturn]] void fail_not_an_op();

/// The ops that are built in, by their functions.
template <typename Signature>
std::map<Signature*, const Op<Signature>*>& built_in_ops() {
  static std::map<Signature*, const Op<Signature>*> ops;
  return ops;
}

}  // namespace detail

template <typename Result, typename... Args>
class Op<Result(Args...)> {
 public:
  using Function = std::function<Result(Args...)>;

  explicit Op(std::string name, Function built_in = nullptr) : name_(std::move(name)), built_in_(std::move(built_in)) {}
  /// Creates an op that is built in only for specs of one kind.
  Op(std::string name, std::string_view kind, Function built_in) : name_(std::move(name)) {
    register_for(kind, std::move(built_in));
  }

  const std::string& name() const { return name_; }

  Result operator()(Args... args) const {
    detail::ShardedArguments tensors(name_);
    try {
      (tensors.add(args), ...);
      const Function function = find(tensors.first().sharding_spec().kind());
      if (!function) {
        const std::array<std::string, sizeof...(Args)> arguments = {describe(args)...};
        detail::fail_unsupported(name_, arguments, tensors.first());
      }
      return function(args...);
    } catch (...) {
      tensors.rethrow();
    }
  }

  /// Replaces all implementations of the op, for every spec; null undoes this.
  void register_custom(Function function) const {
    const std::lock_guard lock(mutex_);
    custom_ = std::move(function);
  }
  /// Sets the implementation for specs of this kind (`ShardingSpec::kind`); null removes it.
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

/// Returns the op that a function of `tessera::ops` calls. Throws `Error(invalid_argument)` for any other function.
template <typename Signature>
const Op<Signature>& op_of(Signature* function) {
  const auto& ops = detail::built_in_ops<Signature>();
  const auto op = ops.find(function);
  if (op == ops.end()) detail::fail_not_an_op();
  return *op->second;
}

}  // namespace tessera

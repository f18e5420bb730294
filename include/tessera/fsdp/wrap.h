#pragma once
/// \file
/// The parts of a model that are sharded each by itself.
///
/// A model says which of its sub-modules may be *units* by holding them in a `Wrap`; nothing else of it changes:
///
///     struct ModelImpl : torch::nn::Module {
///       fsdp::Wrap<Block> first{Block(64)}, ...;          // or fsdp::Wrap<torch::nn::Linear>(3, 4)
///       at::Tensor forward(at::Tensor x) { return second(first(x)); }
///     };
///
/// A wrapped module is of a class derived from the module's own, with its names and its `forward`, so it can be held
/// and called wherever the module could, `Sequential` and `AnyModule` included. It does what the module does until a
/// FullyShardedDataParallel makes it a unit: then each call of it puts its parameters together before and takes them
/// apart after. `forward` must be one function; where it is overloaded, say which by WrapImpl's second argument, and a
/// default argument must be given.

#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tessera/fsdp/tensors_in.h"

namespace tessera::fsdp {

class Unit;

/// What a wrapped module is besides its own.
class Wrappable {
 public:
  Wrappable() = default;
  /// A copy of a module is no unit.
  Wrappable(const Wrappable&) {}
  Wrappable& operator=(const Wrappable&) = delete;
  virtual ~Wrappable() = default;

  /// Null unless it is a unit. It belongs to the FullyShardedDataParallel.
  Unit* unit() const { return unit_; }

 private:
  friend class Unit;
  Unit* unit_ = nullptr;
};

/// One call of a unit's forward: whole from the constructor to `end`. A collective of the unit's group. If `forward`
/// throws, the unit is sharded again.
class UnitCall {
 public:
  explicit UnitCall(Unit& unit);
  ~UnitCall();
  UnitCall(const UnitCall&) = delete;
  UnitCall& operator=(const UnitCall&) = delete;

  /// Whatever `forward` takes must be shown first, and what it returns last.
  void input(at::Tensor& tensor);
  void output(at::Tensor& tensor);
  void end();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

namespace detail {

// How an argument is kept between the hook and the call: references to what may be changed stay such.
template <typename T>
using Kept = std::conditional_t<std::is_lvalue_reference_v<T> && !std::is_const_v<std::remove_reference_t<T>>, T,
                                std::remove_cvref_t<T>>;

// So that what a caller still has is not changed.
template <typename T>
using ByValue = std::conditional_t<std::is_lvalue_reference_v<T>, const std::remove_reference_t<T>&, T>;

/// Calls `forward(arguments...)` as a call of `unit`.
template <typename Result, typename... Args, typename Forward>
Result call_unit(Unit& unit, const Forward& forward, Args&&... arguments) {
  std::tuple<Kept<Args>...> kept(std::forward<Args>(arguments)...);
  UnitCall call(unit);
  for_each_tensor(kept, [&](at::Tensor& tensor) { call.input(tensor); });
  const auto run = [&]() -> Result {
    return std::apply([&](auto&... items) -> Result { return forward(static_cast<Args&&>(items)...); }, kept);
  };
  if constexpr (std::is_void_v<Result>) {
    run();
    call.end();
  } else {
    Result result = run();
    for_each_tensor(result, [&](at::Tensor& tensor) { call.output(tensor); });
    call.end();
    return result;
  }
}

}  // namespace detail

template <typename Impl, typename Forward = decltype(&Impl::forward)>
class WrapImpl;

template <typename Impl, typename Class, typename Result, typename... Args>
class WrapImpl<Impl, Result (Class::*)(Args...)> : public Impl, public Wrappable {
 public:
  using Impl::Impl;
  Result forward(Args... arguments) {
    const auto forward = [this](Args... args) -> Result { return Impl::forward(std::forward<Args>(args)...); };
    if (unit() == nullptr) return forward(std::forward<Args>(arguments)...);
    return detail::call_unit<Result, Args...>(*unit(), forward, std::forward<Args>(arguments)...);
  }
};

template <typename Impl, typename Class, typename Result, typename... Args>
class WrapImpl<Impl, Result (Class::*)(Args...) const> : public WrapImpl<Impl, Result (Class::*)(Args...)> {
 public:
  using WrapImpl<Impl, Result (Class::*)(Args...)>::WrapImpl;
};

/// The holder: constructed as the module's own.
template <typename Module>
class Wrap : public torch::nn::ModuleHolder<WrapImpl<typename Module::ContainedType>> {
 public:
  using torch::nn::ModuleHolder<WrapImpl<typename Module::ContainedType>>::ModuleHolder;
};

}  // namespace tessera::fsdp

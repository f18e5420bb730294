#pragma once
/// \file
/// Holders that mark submodules which can be sharded as separate units.
///
/// A model marks its possible *units* by holding them in a `Wrap`. Nothing else in the model changes:
///
///     struct ModelImpl : torch::nn::Module {
///       fsdp::Wrap<Block> first{Block(64)}, ...;          // or fsdp::Wrap<torch::nn::Linear>(3, 4)
///       at::Tensor forward(at::Tensor x) { return second(first(x)); }
///     };
///
/// The class of a wrapped module derives from the module's class, with the same names and the same `forward`. So it can
/// be stored and called like the module itself, also in `Sequential` and `AnyModule`. It behaves like the module until
/// a FullyShardedDataParallel makes it a unit. Each call then unshards the parameters before forward and reshards them
/// after it. `forward` must be a single function: if it is overloaded, select one by the second template argument of
/// WrapImpl. Calls must pass all arguments, because default arguments are lost.

#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tessera/fsdp/tensors_in.h"

namespace tessera::fsdp {

class Unit;

/// The base class of wrapped modules, which links a module to its unit.
class Wrappable {
 public:
  Wrappable() = default;
  /// A copy of a module is not a unit.
  Wrappable(const Wrappable&) {}
  Wrappable& operator=(const Wrappable&) = delete;
  virtual ~Wrappable() = default;

  /// Null unless the module is a unit. Owned by the FullyShardedDataParallel.
  Unit* unit() const { return unit_; }

 private:
  friend class Unit;
  Unit* unit_ = nullptr;
};

/// One call of a unit's forward. The unit is unsharded from the constructor to `end`. If `forward` throws, call `fail`;
/// the destructor shards the unit again. A collective of the unit's group.
class UnitCall {
 public:
  explicit UnitCall(Unit& unit);
  ~UnitCall();
  UnitCall(const UnitCall&) = delete;
  UnitCall& operator=(const UnitCall&) = delete;

  /// Converts an argument of `forward` to the dtype and device that the options require. Called before `forward`.
  void input(at::Tensor& tensor);
  /// Registers the hooks of backward on a result of `forward`. Called before `end`.
  void output(at::Tensor& tensor);
  void end();
  /// Lets the other ranks know that this rank leaves forward by an exception. Called in its handler.
  void fail() noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

namespace detail {

// The type in which an argument is stored until the call: mutable references stay references, others are values.
template <typename T>
using Kept = std::conditional_t<std::is_lvalue_reference_v<T> && !std::is_const_v<std::remove_reference_t<T>>, T,
                                std::remove_cvref_t<T>>;

// Prevents changes to an lvalue of the caller.
template <typename T>
using ByValue = std::conditional_t<std::is_lvalue_reference_v<T>, const std::remove_reference_t<T>&, T>;

/// Calls `forward(arguments...)` as a call of `unit`.
template <typename Result, typename... Args, typename Forward>
Result call_unit(Unit& unit, const Forward& forward, Args&&... arguments) {
  std::tuple<Kept<Args>...> kept(std::forward<Args>(arguments)...);
  UnitCall call(unit);
  const auto run = [&]() -> Result {
    return std::apply([&](auto&... items) -> Result { return forward(static_cast<Args&&>(items)...); }, kept);
  };
  try {
    for_each_tensor(kept, [&](at::Tensor& tensor) { call.input(tensor); });
    if constexpr (std::is_void_v<Result>) {
      run();
      call.end();
    } else {
      Result result = run();
      for_each_tensor(result, [&](at::Tensor& tensor) { call.output(tensor); });
      call.end();
      return result;
    }
  } catch (...) {
    call.fail();
    throw;
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

/// The holder of a wrapped module. Its constructor takes the arguments of the module's own holder.
template <typename Module>
class Wrap : public torch::nn::ModuleHolder<WrapImpl<typename Module::ContainedType>> {
 public:
  using torch::nn::ModuleHolder<WrapImpl<typename Module::ContainedType>>::ModuleHolder;
};

}  // namespace tessera::fsdp

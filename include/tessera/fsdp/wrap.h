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
/// after it. During a forward of the model, a call through the module's own class, such as
/// `layers[i]->as<Block>()->forward(x)`, works too: the first op that takes one of the unit's parameters unshards it.
/// Only `cast_forward_inputs` requires a call through the wrapped class.
///
/// Overloaded functions and templates named `forward` can be wrapped, but not stored in Sequential and AnyModule,
/// unless the second template argument of WrapImpl selects an overload. Default arguments of `forward` are those of the
/// module in calls of the holder, `wrap(x)`; `wrap->forward(x, y)` must pass all arguments. A module without `forward`,
/// such as ModuleList, cannot be wrapped; wrap the modules in it.

#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tessera/fsdp/activation_checkpoint.h"
#include "tessera/fsdp/tensors_in.h"
#include "tessera/fsdp/unshard_handle.h"
#include "tessera/tensor/torch_types.h"

namespace tessera::fsdp {

class Unit;

/// The base class of wrapped modules, which links a module to its unit.
class Wrappable {
 public:
  Wrappable() = default;
  /// A copy of a module is not a unit. Its calls are checkpointed as those of the module.
  Wrappable(const Wrappable& other) : checkpoints_activations_(other.checkpoints_activations_) {}
  Wrappable& operator=(const Wrappable&) = delete;
  virtual ~Wrappable() = default;

  /// Null unless the module is a unit. Owned by the FullyShardedDataParallel.
  Unit* unit() const { return unit_; }
  /// Sets whether calls are checkpointed; see apply_activation_checkpointing.
  void checkpoint_activations(bool on) { checkpoints_activations_ = on; }
  bool checkpoints_activations() const { return checkpoints_activations_; }
  /// Starts to gather the unit before it is called, for example by a forward that computes something else first; see
  /// ShardedModule::unshard. Has no effect unless the module is a unit.
  UnshardHandle unshard();

 protected:
  /// Throws `Error(invalid_argument)` if the module is a unit, unless `function` is permitted in summon_full_params.
  void check_not_sharded(std::string_view function, bool permitted_when_summoned) const;
  /// Throws `Error(unsupported)`: calls of this module cannot be checkpointed.
  [[noreturn]] static void refuse_checkpoint(const torch::nn::Module& module);

 private:
  friend class Unit;
  Unit* unit_ = nullptr;
  bool checkpoints_activations_ = false;
};

/// One call of a unit's forward. The unit is unsharded from the constructor to `end`. If `forward` throws, call
/// `rethrow`; the destructor shards the unit again. A collective of the unit's group.
class UnitCall {
 public:
  explicit UnitCall(Unit& unit);
  ~UnitCall();
  UnitCall(const UnitCall&) = delete;
  UnitCall& operator=(const UnitCall&) = delete;

  /// Converts an argument of `forward` to the dtype and device that the options require. Call it before `forward`.
  void input(at::Tensor& tensor);
  /// Registers the hooks of backward on a result of `forward`. Call it before `end`.
  void output(at::Tensor& tensor);
  void end();
  /// Reports to the other ranks that this rank leaves forward by an exception. Call it in the handler of that
  /// exception. Throws the exception again, or the reason for it if the unit could not be unsharded.
  [[noreturn]] void rethrow();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

namespace detail {

// The type in which an argument is stored until the call: values where tensors may be replaced, else references.
// Mutable references stay references.
template <typename T>
using Kept = std::conditional_t<std::is_lvalue_reference_v<T> && (!std::is_const_v<std::remove_reference_t<T>> ||
                                                                  !may_hold_tensors<std::remove_cvref_t<T>>()),
                                T, std::remove_cvref_t<T>>;

template <typename...>
inline constexpr bool kNever = false;  // in a static_assert that fails where it is instantiated

// Prevents changes to an lvalue of the caller.
template <typename T>
using ByValue = std::conditional_t<std::is_lvalue_reference_v<T>, const std::remove_reference_t<T>&, T>;

// What a call of a unit does with an argument or a result of one type, whichever function it calls.
template <typename T>
void convert_inputs(UnitCall& call, T& argument) {
  if constexpr (!std::is_const_v<T>) {
    for_each_tensor(argument, [&](at::Tensor& tensor) { call.input(tensor); });
  }
}
template <typename T>
void register_outputs(UnitCall& call, T& result) {
  if constexpr (std::is_const_v<T>) {
    auto tensors = result;  // not replaced
    register_outputs(call, tensors);
  } else {
    for_each_tensor(result, [&](at::Tensor& tensor) { call.output(tensor); });
  }
}

/// Calls `forward(arguments...)` as a call of `unit`.
template <typename Result, typename... Args, typename Forward>
Result call_unit(Unit& unit, const Forward& forward, Args&&... arguments) {
  static_assert(std::is_void_v<Result> || is_visited<std::remove_cvref_t<Result>>(),
                "the result of forward has a type whose tensors a unit cannot find: define visit_tensors for it, see "
                "tessera/fsdp/tensors_in.h");
  std::tuple<Kept<Args>...> kept(std::forward<Args>(arguments)...);
  UnitCall call(unit);
  const auto run = [&](auto&... items) -> Result {
    (convert_inputs(call, items), ...);
    if constexpr (std::is_void_v<Result>) {
      forward(static_cast<Args&&>(items)...);
      call.end();
    } else {
      Result result = forward(static_cast<Args&&>(items)...);
      register_outputs(call, result);
      call.end();
      return result;
    }
  };
  try {
    return std::apply(run, kept);
  } catch (...) {
    call.rethrow();
  }
}

/// The same for a function whose parameters are not known. Lvalues of the caller stay as they are, unless the function
/// takes mutable references.
template <typename Result, typename Forward, typename... Args>
Result call_unit_with(Unit& unit, const Forward& forward, Args&&... arguments) {
  if constexpr (std::is_invocable_v<const Forward&, ByValue<Args>...>) {
    return call_unit<Result, ByValue<Args>...>(unit, forward, std::forward<Args>(arguments)...);
  } else {
    return call_unit<Result, Args...>(unit, forward, std::forward<Args>(arguments)...);
  }
}

// Whether `T` has any member named forward: a name that a class inherits twice is ambiguous.
struct NamedForward {
  int forward;
};
template <typename T>
struct WithTwo : T, NamedForward {};
template <typename T>
concept HasForward = !requires {
  &WithTwo<T>::forward;
};

// The type of a pointer to the only function named forward; void if there are several or it is a template.
template <typename T>
consteval auto forward_of() {
  if constexpr (requires { &T::forward; }) {
    return std::type_identity<decltype(&T::forward)>{};
  } else {
    return std::type_identity<void>{};
  }
}
template <typename T>
using ForwardOf = typename decltype(forward_of<T>())::type;

// A module that exists and whose parameters, buffers and submodules a wrapped module shares.
template <typename Impl>
struct Existing {
  const Impl& module;
};

/// What wrapped modules of class `Impl` have in common.
template <typename Impl>
class WrapBase : public Impl, public Wrappable {
  static_assert(HasForward<Impl>, "this module has no forward, so it cannot be wrapped: wrap the modules in it");

 public:
  using Impl::Impl;
  explicit WrapBase(Existing<Impl> existing) : Impl(existing.module) {
    static_cast<torch::nn::Module&>(*this) = existing.module;  // a virtual base of LibTorch's modules
  }
  /// Shares the parameters, buffers and submodules of `module`.
  template <typename Holder>
  requires std::derived_from<std::remove_cvref_t<Holder>, torch::nn::ModuleHolder<Impl>>
  // NOLINTNEXTLINE(bugprone-forwarding-reference-overload): it takes holders only
  explicit WrapBase(Holder&& module) : WrapBase(Existing<Impl>{*module}) {}

  /// Calls forward, whose default arguments may be left out.
  template <typename... Args>
  decltype(auto) call(Args&&... arguments) {
    Impl& module = *this;
    const auto forward =
        [&module](auto&&... args) -> decltype(module.Impl::forward(std::forward<decltype(args)>(args)...)) {
      return module.Impl::forward(std::forward<decltype(args)>(args)...);
    };
    if constexpr (std::is_invocable_v<decltype(forward), Args...>) {
      using Result = std::invoke_result_t<decltype(forward), Args...>;
      const auto run = [&](auto&&... args) -> std::invoke_result_t<decltype(forward), decltype(args)...> {
        return run_forward<Result, decltype(args)...>(forward, std::forward<decltype(args)>(args)...);
      };
      if (unit() == nullptr) return static_cast<Result>(run(std::forward<Args>(arguments)...));
      return call_unit_with<Result>(*unit(), run, std::forward<Args>(arguments)...);
    } else {
      static_assert(kNever<Args...>, "the module's forward does not take these arguments");
    }
  }

  /// Save, load and move the module as its own class does. These throw `Error(invalid_argument)` if it is sharded,
  /// except `save` and `load` in summon_full_params.
  void save(torch::serialize::OutputArchive& archive) const override {
    check_not_sharded("torch::save", /*permitted_when_summoned=*/true);
    Impl::save(archive);
  }
  void load(torch::serialize::InputArchive& archive) override {
    check_not_sharded("torch::load", /*permitted_when_summoned=*/true);
    Impl::load(archive);
  }
  void to(torch::Device target_device, torch::Dtype target_dtype, bool non_blocking = false) override {
    check_not_sharded("to", /*permitted_when_summoned=*/false);
    Impl::to(target_device, target_dtype, non_blocking);
  }
  void to(torch::Dtype target_dtype, bool non_blocking = false) override {
    check_not_sharded("to", /*permitted_when_summoned=*/false);
    Impl::to(target_dtype, non_blocking);
  }
  void to(torch::Device target_device, bool non_blocking = false) override {
    check_not_sharded("to", /*permitted_when_summoned=*/false);
    Impl::to(target_device, non_blocking);
  }

 protected:
  /// Calls `forward`, which calls that of the module. Checkpoints the call if checkpoints_activations() is set.
  template <typename Result, typename... Args, typename Forward>
  Result run_forward(const Forward& forward, Args&&... arguments) {
    if (!checkpoints_activations()) return forward(std::forward<Args>(arguments)...);
    if constexpr (can_checkpoint<Result, Args...>()) {
      const auto again = [forward, alive = this->weak_from_this().lock()](auto&&... args) -> Result {
        return forward(std::forward<decltype(args)>(args)...);
      };
      using Shared = std::function<Result(Args...)>;  // so that modules with the same arguments share the code
      if constexpr (std::is_invocable_v<Shared&, decltype(as_argument<Args>(std::declval<OwnedOf<Args>&>()))...>) {
        return checkpoint_call<Args...>(this, Shared(again), std::forward<Args>(arguments)...);
      } else {
        return checkpoint_call<Args...>(this, again, std::forward<Args>(arguments)...);
      }
    } else {
      refuse_checkpoint(*this);
    }
  }
};

// Declares forward like `Forward`, a pointer to the module's.
template <typename Impl, typename Forward>
class WrapForward : public WrapBase<Impl> {
  static_assert(std::is_void_v<Forward>, "forward must be a function without & and volatile qualifiers");

 public:
  using WrapBase<Impl>::WrapBase;
  template <typename... Args>
  decltype(auto) forward(Args&&... arguments) {
    return this->call(std::forward<Args>(arguments)...);
  }
};
template <typename Impl, typename Class, typename Result, typename... Args>
class WrapForward<Impl, Result (Class::*)(Args...)> : public WrapBase<Impl> {
 public:
  using WrapBase<Impl>::WrapBase;
  Result forward(Args... arguments) {
    const auto forward = [this](Args... args) -> Result { return Impl::forward(std::forward<Args>(args)...); };
    const auto run = [&](Args... args) -> Result {
      return this->template run_forward<Result, Args...>(forward, std::forward<Args>(args)...);
    };
    if (this->unit() == nullptr) return run(std::forward<Args>(arguments)...);
    return call_unit<Result, Args...>(*this->unit(), run, std::forward<Args>(arguments)...);
  }
};
template <typename Impl, typename Class, typename Result, typename... Args>
class WrapForward<Impl, Result (Class::*)(Args...) const> : public WrapForward<Impl, Result (Class::*)(Args...)> {
 public:
  using WrapForward<Impl, Result (Class::*)(Args...)>::WrapForward;
};
template <typename Impl, typename Class, typename Result, typename... Args>
class WrapForward<Impl, Result (Class::*)(Args...) noexcept> : public WrapForward<Impl, Result (Class::*)(Args...)> {
 public:
  using WrapForward<Impl, Result (Class::*)(Args...)>::WrapForward;
};
template <typename Impl, typename Class, typename Result, typename... Args>
class WrapForward<Impl, Result (Class::*)(Args...) const noexcept>
    : public WrapForward<Impl, Result (Class::*)(Args...)> {
 public:
  using WrapForward<Impl, Result (Class::*)(Args...)>::WrapForward;
};

}  // namespace detail

/// A wrapped module of class `Impl`. `Forward` is the type of a pointer to the forward to wrap, or void for all.
template <typename Impl, typename Forward = detail::ForwardOf<Impl>>
class WrapImpl : public detail::WrapForward<Impl, Forward> {
 public:
  using detail::WrapForward<Impl, Forward>::WrapForward;
  /// Returns a wrapped copy, or a plain one if `Impl` is not copy-constructible. Throws `Error(invalid_argument)` if
  /// the module is sharded, except in summon_full_params.
  std::shared_ptr<torch::nn::Module> clone(const OptionalDevice& device = {}) const override {
    this->check_not_sharded("clone", /*permitted_when_summoned=*/true);
    std::shared_ptr<torch::nn::Module> copy = Impl::clone(device);
    if constexpr (std::is_copy_constructible_v<Impl>) {
      auto wrapped = std::make_shared<WrapImpl>(detail::Existing<Impl>{dynamic_cast<const Impl&>(*copy)});
      wrapped->checkpoint_activations(this->checkpoints_activations());
      return wrapped;
    } else {
      return copy;
    }
  }
};

/// The holder of a wrapped module. Its constructor takes the arguments of the module's own holder, or such a holder.
template <typename Module>
class Wrap : public torch::nn::ModuleHolder<WrapImpl<typename Module::ContainedType>> {
  using Impl = typename Module::ContainedType;

 public:
  using torch::nn::ModuleHolder<WrapImpl<Impl>>::ModuleHolder;

  template <typename... Args>
  decltype(auto) operator()(Args&&... arguments) {
    return this->get()->call(std::forward<Args>(arguments)...);
  }
  /// A member of the module's own holder type can hold the wrapped module.
  operator Module() const { return Module(std::shared_ptr<Impl>(this->ptr())); }  // NOLINT(google-explicit-constructor)
};

}  // namespace tessera::fsdp

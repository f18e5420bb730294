#pragma once
/// \file
/// A reference to a function, for parameters that are called before their function returns.

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <type_traits>

namespace tessera {

/// A reference to a callable object: two pointers, copied like them. Unlike a `std::function` it owns nothing, so it
/// must not be used after the object is gone: take it as a parameter, and do not store it. Null if it is made of a null
/// pointer or an empty std::function; a call then throws std::bad_function_call. C++26: std::function_ref.
template <typename Signature>
class FunctionRef;

template <typename Result, typename... Args>
class FunctionRef<Result(Args...)> {
 public:
  FunctionRef(std::nullptr_t) : object_(nullptr), call_(&call_null) {}  // NOLINT: converts implicitly
  /// Refers to `function`: a lambda, an object with operator(), a plain function or a pointer to one.
  template <typename F>
  requires(!std::same_as<std::remove_cvref_t<F>, FunctionRef> && std::is_invocable_r_v<Result, F&, Args...>)
      FunctionRef(F&& function)  // NOLINT: converts implicitly, and never moves
      : object_(address_of(function)), call_(object_ != nullptr ? &call<std::remove_reference_t<F>> : &call_null) {}

  explicit operator bool() const { return object_ != nullptr; }
  Result operator()(Args... args) const { return call_(object_, static_cast<Args&&>(args)...); }

 private:
  template <typename F>
  static void* address_of(F& function) {
    if constexpr (std::is_function_v<F>) {
      return reinterpret_cast<void*>(&function);  // NOLINT: as dlsym does
    } else {
      if constexpr (std::is_pointer_v<F>) {
        if (function == nullptr) return nullptr;
      } else if constexpr (requires { function.operator bool(); }) {
        if (!function) return nullptr;
      }
      return const_cast<void*>(static_cast<const void*>(std::addressof(function)));  // NOLINT: `call` restores const
    }
  }
  template <typename F>
  static Result call(void* object, Args... args) {
    F& function = *reinterpret_cast<F*>(object);  // NOLINT: what address_of got
    if constexpr (std::is_void_v<Result>) {
      function(static_cast<Args&&>(args)...);
    } else {
      return function(static_cast<Args&&>(args)...);
    }
  }
  static Result call_null(void* /*object*/, Args... /*args*/) { throw std::bad_function_call(); }

  void* object_;
  Result (*call_)(void* object, Args... args);
};

}  // namespace tessera

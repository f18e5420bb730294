#pragma once
// What the cases of a table call.

#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>

namespace tessera::testing {

// A std::function that stores a lambda without captures as a plain function. Compilers then generate one class for all
// of them, where a std::function has one for each, of some twenty functions.
template <typename Signature>
class CaseFunction : public std::function<Signature> {
 public:
  template <typename F>
  requires(!std::same_as<F, CaseFunction>) CaseFunction(F f)
      : std::function<Signature>(stored(std::move(f))) {}  // NOLINT: converts implicitly

 private:
  template <typename F>
  static auto stored(F f) {
    if constexpr (std::is_convertible_v<F, Signature*>) {
      return static_cast<Signature*>(f);
    } else {
      return f;
    }
  }
};

}  // namespace tessera::testing

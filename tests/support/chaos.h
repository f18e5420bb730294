#pragma once
// How many cases the campaigns try.

#include <algorithm>
#include <cstddef>
#include <cstdlib>

namespace tessera::testing {

// Returns how many times as long as in `make test`: `make chaos` sets TESSERA_CHAOS.
inline int chaos_factor() {
  const char* text = std::getenv("TESSERA_CHAOS");
  return text == nullptr ? 1 : std::max(std::atoi(text), 1);
}

// Returns `stride` in a build with AddressSanitizer or ThreadSanitizer, and 1 in others. A loop over all cases of a
// kind takes one of so many there, where each takes many times as long; other builds take them all. A prime visits all
// bits.
constexpr std::size_t stride_if_sanitized([[maybe_unused]] std::size_t stride) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return stride;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
  return stride;
#else
  return 1;
#endif
#else
  return 1;
#endif
}

// Tells which cases a test takes of those that it goes through: all of them, or one of `stride` in a sanitized build.
// A prime stride that divides none of the numbers of choices takes each choice in some case.
class SampleIfSanitized {
 public:
  explicit SampleIfSanitized(std::size_t stride, std::size_t begin = 0)
      : stride_(stride_if_sanitized(stride)), next_(begin) {}
  bool takes_next() { return next_++ % stride_ == 0; }

 private:
  std::size_t stride_, next_;
};

}  // namespace tessera::testing

#pragma once
// How many cases the campaigns try.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>

namespace tessera::testing {

// Returns how many times as long as in `make test`: `make chaos` sets TESSERA_CHAOS.
inline int chaos_factor() {
  const char* text = std::getenv("TESSERA_CHAOS");
  return text == nullptr ? 1 : std::max(std::atoi(text), 1);
}

// Returns `stride` in a build with AddressSanitizer or ThreadSanitizer, and 1 in others. A loop over all cases of a
// kind takes one of so many there, where each takes many times as long; other builds take them all.
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

// Tells which cases a test takes of those that it goes through: all of them, or in a sanitized build the first and one
// of each `stride` of the others. That one is drawn, since a fixed rhythm can miss a choice of an inner loop every
// time. Draws depend on the name of the test: its ranks take the same cases, its other instances others.
class SampleIfSanitized {
 public:
  // `round` makes the samples differ where a test goes through the same cases several times.
  explicit SampleIfSanitized(std::size_t stride, std::size_t round = 0)
      : stride_(stride_if_sanitized(stride)),
        draws_(static_cast<unsigned>(
            std::hash<std::string>()(::testing::UnitTest::GetInstance()->current_test_info()->name()) + round)) {}
  bool takes_next() {
    const std::size_t number = number_++;
    if (number == 0) return true;
    const std::size_t place = (number - 1) % stride_;
    if (place == 0) taken_ = draws_() % stride_;
    return place == taken_;
  }

 private:
  std::size_t stride_, number_ = 0, taken_ = 0;
  std::mt19937 draws_;
};

}  // namespace tessera::testing

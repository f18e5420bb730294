#include "comm/work.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

// Ends between the end of a wait and the question whether it has.
class LateWork : public ::c10d::Work {
 public:
  explicit LateWork(std::exception_ptr failure = nullptr) : failure_(std::move(failure)) {}
  bool wait(milliseconds /*timeout*/ = kNoTimeout) override {
    if (!isCompleted()) {
      finish(failure_);
      throw std::runtime_error("Operation timed out!");
    }
    if (failure_) std::rethrow_exception(failure_);
    return true;
  }

 private:
  std::exception_ptr failure_;
};

class EndlessWork : public ::c10d::Work {
 public:
  bool wait(milliseconds /*timeout*/ = kNoTimeout) override { throw std::runtime_error("Operation timed out!"); }
};

TEST(WaitForTest, WhatEndsJustAfterTheLimitHasEnded) {
  EXPECT_TRUE(wait_for(*c10::make_intrusive<LateWork>(), milliseconds(1)));
}

TEST(WaitForTest, WhatFailsJustAfterTheLimitHasFailed) {
  const auto work = c10::make_intrusive<LateWork>(std::make_exception_ptr(std::logic_error("broken pipe")));
  EXPECT_THROW(wait_for(*work, milliseconds(1)), std::logic_error);
}

TEST(WaitForTest, WhatHasNotEnded) { EXPECT_FALSE(wait_for(*c10::make_intrusive<EndlessWork>(), milliseconds(1))); }

}  // namespace
}  // namespace tessera::comm

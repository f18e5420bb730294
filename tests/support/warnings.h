#pragma once
// Collects LibTorch's warnings of a thread.

#include <c10/util/Exception.h>
#include <torch/version.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::testing {

// The warnings of all threads that have a WarningGuard for it.
class Warnings : public c10::WarningHandler {
 public:
#if TORCH_VERSION_MAJOR < 2
  void process(const c10::SourceLocation& /*source*/, const std::string& text, bool /*verbatim*/) override {
    add(text);
  }
#else
  void process(const c10::Warning& warning) override { add(warning.msg()); }
#endif
  // Returns how many contain `words`.
  std::ptrdiff_t count(const std::string& words) const {
    return std::count_if(texts_.begin(), texts_.end(),
                         [&](const std::string& text) { return text.find(words) != std::string::npos; });
  }
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  void add(const std::string& text) {
    const std::lock_guard lock(mutex_);
    texts_.push_back(text);
  }
  std::mutex mutex_;
  std::vector<std::string> texts_;
};

// Sends the warnings of this thread to `warnings` during its lifetime.
class WarningGuard {
 public:
  explicit WarningGuard(Warnings& warnings) : guard_(&warnings) {}

 private:
#if TORCH_VERSION_MAJOR < 2
  c10::Warning::WarningHandlerGuard guard_;
#else
  c10::WarningUtils::WarningHandlerGuard guard_;
#endif
};

}  // namespace tessera::testing

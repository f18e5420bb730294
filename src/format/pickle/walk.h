#pragma once
// Guards a recursive walk over a tree that may be hostile: too deep, inside itself, or small and endless by sharing
// (ten lists, each holding the one before ten times, or one long text a thousand times).

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

class Walk {
 public:
  // `operation` is for messages: "repr of a pickled value".
  explicit Walk(std::string_view operation) : operation_(operation) {}

  // One container on the way down. The walk goes into it only if `entered()`; if not, it is inside itself.
  class Step {
   public:
    // `parts`: how many values the container holds.
    Step(Walk& walk, NodeRef container, std::size_t parts) : walk_(walk) {
      if (++walk.depth_ > kDepth) fail(ErrorCode::corrupt, "{}: nests deeper than {}", walk.operation_, kDepth);
      auto [known, is_new] = walk.known_.try_emplace(container.identity(), false);
      inside_ = known->second ? nullptr : &known->second;
      if (inside_) *inside_ = true;
      repeats_ = !is_new && inside_;
      walk.repeating_ += repeats_ ? 1 : 0;
      walk.values_.count(walk.repeating_ != 0, parts + 1, walk.operation_);
    }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;
    ~Step() {
      --walk_.depth_;
      walk_.repeating_ -= repeats_ ? 1 : 0;
      if (inside_) *inside_ = false;
    }
    bool entered() const { return inside_ != nullptr; }

   private:
    Walk& walk_;
    bool* inside_;
    bool repeats_;
  };

  // `text`, of which so many bytes are copied out. Short text costs little more than fetching it did in the pickle.
  void copy_text(NodeRef text, std::size_t bytes) {
    if (bytes > kShortText) bytes_.count(!texts_.insert(text.identity()).second, bytes, operation_);
  }

 private:
  static constexpr std::size_t kDepth = WalkLimits().depth;
  static constexpr std::size_t kShortText = 64;

  // What is seen once costs no more than the pickle did; what comes again may cost some times as much.
  class Budget {
   public:
    Budget(std::uint64_t allowance, std::string_view unit) : allowance_(allowance), unit_(unit) {}
    void count(bool is_repeated, std::uint64_t amount, std::string_view operation) {
      (is_repeated ? repeated_ : once_) += amount;
      const std::uint64_t limit = allowance_ + 8 * once_;
      if (repeated_ > limit)
        fail(ErrorCode::corrupt, "{}: shared parts stand for more than {} {}", operation, limit, unit_);
    }

   private:
    std::uint64_t allowance_, once_ = 0, repeated_ = 0;
    std::string_view unit_;
  };

  std::string_view operation_;
  std::size_t depth_ = 0;
  Budget values_{100'000, "values"};
  Budget bytes_{16 << 20, "bytes of text"};
  std::unordered_set<std::uint64_t> texts_;
  std::size_t repeating_ = 0;                      // how many containers on the way down were walked before
  std::unordered_map<std::uint64_t, bool> known_;  // and whether we are inside
};

}  // namespace tessera::pickle

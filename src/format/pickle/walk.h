#pragma once
// Guards a recursive walk over a tree that may be hostile: too deep, containing itself, or expanded by sharing (ten
// lists that each hold the previous one ten times, or one long text a thousand times).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

// The first visit costs no more than the pickle did. Repeated visits may cost a multiple of that.
class SharingBudget {
 public:
  SharingBudget(std::uint64_t allowance, std::string_view unit) : allowance_(allowance), unit_(unit) {}
  // `operation` is used in messages.
  void count(bool is_repeated, std::uint64_t amount, std::string_view operation) {
    (is_repeated ? repeated_ : once_) += amount;
    const std::uint64_t limit = allowance_ + 8 * once_;
    if (repeated_ > limit)
      fail(ErrorCode::corrupt, "{}: shared parts stand for {} {}, expected at most {}", operation, repeated_, unit_,
           limit);
  }
  // Returns the amount of repeated visits, without one that was refused.
  std::uint64_t repeated() const { return std::min(repeated_, allowance_ + 8 * once_); }

 private:
  std::uint64_t allowance_, once_ = 0, repeated_ = 0;
  std::string_view unit_;
};

// Text that is copied or compared. Law: each such operation on text that may be long is charged first, because many
// values can share it: references to one node, but also globals and bytearrays that were made from one string. So text
// is known by its address. Short text costs little more than it did in the pickle.
class TextBudget {
 public:
  static bool is_short(std::size_t bytes) { return bytes <= 64; }

  void charge(std::string_view text, std::size_t bytes, std::string_view operation) {
    charge(address_of(text), bytes, operation);
  }
  // For the name of a global.
  void charge(const GlobalName& name, std::size_t bytes, std::string_view operation) {
    charge(name.module.size() > name.name.size() ? name.module : name.name, bytes, operation);
  }
  // For text that is compared: it is repeated if both texts are.
  void charge_both(std::string_view a, std::string_view b, std::string_view operation) {
    if (is_short(a.size())) return;
    const bool a_is_new = known_.insert(address_of(a)).second, b_is_new = known_.insert(address_of(b)).second;
    bytes_.count(!a_is_new && !b_is_new, a.size(), operation);
  }
  std::uint64_t repeated_bytes() const { return bytes_.repeated(); }

 private:
  static std::uint64_t address_of(std::string_view text) { return reinterpret_cast<std::uint64_t>(text.data()); }
  void charge(std::uint64_t address, std::size_t bytes, std::string_view operation) {
    if (!is_short(bytes)) bytes_.count(!known_.insert(address).second, bytes, operation);
  }

  SharingBudget bytes_{16 << 20, "bytes of text"};
  std::unordered_set<std::uint64_t, NumberHash> known_;  // addresses
};

class Walk {
 public:
  // `operation` is used in messages: "repr of a pickled value".
  explicit Walk(std::string_view operation) : operation_(operation) {}

  // One container on the path. The walk enters it only if `entered()`; otherwise it contains itself.
  class Step {
   public:
    // `parts` is the number of values in the container.
    Step(Walk& walk, NodeRef container, std::size_t parts) : walk_(walk) {
      if (++walk.depth_ > kDepth) {
        fail(ErrorCode::corrupt, "{}: nests deeper than the limit, expected at most {} levels", walk.operation_,
             kDepth);
      }
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

  // Charges for `text`, of which this many bytes are copied.
  void copy_text(std::string_view text, std::size_t bytes) { texts_.charge(text, bytes, operation_); }
  void copy_text(ByteView text, std::size_t bytes) { copy_text(as_text(text), bytes); }

  std::uint64_t repeated_values() const { return values_.repeated(); }
  std::uint64_t repeated_text_bytes() const { return texts_.repeated_bytes(); }

 private:
  static constexpr std::size_t kDepth = WalkLimits().depth;

  std::string_view operation_;
  std::size_t depth_ = 0;
  SharingBudget values_{100'000, "values"};
  TextBudget texts_;
  std::size_t repeating_ = 0;  // number of containers on the path that were walked before
  std::unordered_map<std::uint64_t, bool, NumberHash> known_;  // identity -> whether the walk is inside of it
};

}  // namespace tessera::pickle

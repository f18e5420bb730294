#pragma once
// Shared parts of the `.metadata` reader: messages, the memory budget, and the values that fields hold.
//
// In messages, `subject` is the tensor or object that is being read ("tensor 'x'"), empty at the top level; `field` is
// its field.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "format/dcp/names.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/name_index.h"
#include "tessera/format/pickle_value.h"

namespace tessera::dcp {

// No value has this identity. (That of None is 0.)
inline constexpr std::uint64_t kNoIdentity = ~std::uint64_t{0};

// Returns the name of a value for messages: "int", "global torch.float32", "a torch.Size object".
std::string describe(pickle::NodeRef value);

class Input {
 public:
  Input(std::string file, std::uint64_t file_bytes)
      : file_(std::move(file)), memory_limit_((16 * file_bytes) + (1 << 20)), memory_left_(memory_limit_) {}

  // Charges the memory that a file of this size can need. A pickle can store a value once and refer to it often.
  void charge(std::uint64_t bytes) {
    if (bytes > memory_left_) too_large();
    memory_left_ -= bytes;
  }

  [[noreturn]] void fail_at(ErrorCode code, std::string_view name, std::string_view field, std::string_view found,
                            std::string_view expected) const;
  [[noreturn]] void wrong_value(std::string_view name, std::string_view field, pickle::NodeRef found,
                                std::string_view expected) const {
    fail_at(ErrorCode::corrupt, name, field, describe(found), expected);
  }

  // Returns an int that is not negative.
  std::int64_t count(pickle::NodeRef value, std::string_view name, std::string_view field) const {
    if (!value.is(pickle::Kind::integer) || value.integer() < 0) wrong_count(value, name, field);
    return value.integer();
  }
  bool boolean(pickle::NodeRef value, std::string_view name, std::string_view field) const {
    if (!value.is(pickle::Kind::boolean)) wrong_value(name, field, value, "a bool");
    return value.boolean();
  }
  std::string_view string(pickle::NodeRef value, std::string_view name, std::string_view field) const {
    if (!value.is(pickle::Kind::string)) wrong_value(name, field, value, "a str");
    return value.string();
  }

  // Appends the members of a torch.Size (or tuple, or list) of counts to `out` and returns their number.
  std::size_t counts(pickle::NodeRef value, std::string_view name, std::string_view field,
                     std::vector<std::int64_t>& out);

 private:
  [[noreturn]] void too_large() const;
  [[noreturn]] void wrong_count(pickle::NodeRef value, std::string_view name, std::string_view field) const;
  pickle::NodeRef members_of_size(pickle::NodeRef value);

  std::string file_;
  std::uint64_t memory_limit_, memory_left_;
  std::uint64_t size_class_ = kNoIdentity;  // of the global torch.Size seen last
};

// Maps strings to numbers. A pickle fetches most strings from its memo, so identity is compared before contents are
// hashed.
class StringNumbers {
 public:
  static constexpr std::uint32_t kNone = UINT32_MAX;

  void reserve(std::size_t count) { numbers_.reserve(count); }
  // Returns whether `text` was new; assigns it `number` if so. `text` must outlive this object.
  bool add(std::string_view text, std::uint32_t number) { return numbers_.add(text, number); }
  std::uint32_t find(pickle::NodeRef string) {
    Slot& slot = slots_[(string.identity() * 0x9e3779b97f4a7c15u) >> (64 - kSlotBits)];
    if (slot.identity != string.identity()) {
      const auto found = numbers_.find(string.string());
      slot = {string.identity(), found ? static_cast<std::uint32_t>(*found) : kNone};
    }
    return slot.number;
  }
  // As `find`, but assigns the number `next` to a new string.
  std::uint32_t find_or_add(pickle::NodeRef string, std::uint32_t next) {
    const std::uint32_t number = find(string);
    if (number != kNone) return number;
    add(string.string(), next);
    slots_[(string.identity() * 0x9e3779b97f4a7c15u) >> (64 - kSlotBits)].number = next;
    return next;
  }

 private:
  static constexpr int kSlotBits = 12;
  struct Slot {
    std::uint64_t identity = kNoIdentity;
    std::uint32_t number = kNone;
  };
  std::vector<Slot> slots_ = std::vector<Slot>(std::size_t{1} << kSlotBits);
  NameIndex numbers_;
};

}  // namespace tessera::dcp

#pragma once
// Hashes for containers whose keys are from files.
//
// Law: no file can be made whose keys collide, because the hashes depend on numbers that are random in each process. So
// a search takes constant time, and the order of an unordered container differs between processes. `std::hash` of
// libstdc++ has a fixed seed for text and is the identity for integers.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace tessera {

struct HashKeys {
  std::uint64_t start, factor;  // the factor is odd
};
// Returns the keys of this process.
const HashKeys& hash_keys();

// Returns both halves of a product in one: every bit of `value` affects every bit of it, in a way that depends on the
// factor.
inline std::uint64_t mixed_product(std::uint64_t value, std::uint64_t factor) {
  __extension__ typedef unsigned __int128 Wide;  // NOLINT(modernize-use-using): ISO C++ has no such type
  const Wide product = static_cast<Wide>(value) * factor;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

// These are not noexcept: libstdc++ then stores the hash with each key, rather than computing it again.

class TextHash {
 public:
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const {
    std::uint64_t hash = keys_.start ^ text.size(), word = 0;
    for (; text.size() > sizeof word; text.remove_prefix(sizeof word)) {
      std::memcpy(&word, text.data(), sizeof word);
      hash = mixed_product(hash ^ word, keys_.factor);
    }
    word = 0;
    if (!text.empty()) std::memcpy(&word, text.data(), text.size());
    return mixed_product(hash ^ word, keys_.factor);
  }

 private:
  HashKeys keys_ = hash_keys();
};

class NumberHash {
 public:
  std::size_t operator()(std::uint64_t number) const { return mixed_product(number ^ keys_.start, keys_.factor); }

 private:
  HashKeys keys_ = hash_keys();
};

template <typename Value>
using TextMap = std::unordered_map<std::string, Value, TextHash, std::equal_to<>>;
using TextSet = std::unordered_set<std::string, TextHash, std::equal_to<>>;

}  // namespace tessera

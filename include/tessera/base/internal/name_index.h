#pragma once
// Finds the number of a name among names that something else owns.
//
// As std::unordered_map<std::string_view, std::size_t>, but without an allocation for each name: a checkpoint has many.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/base/internal/text_hash.h"

namespace tessera {

class NameIndex {
 public:
  // Makes room for `count` names.
  void reserve(std::size_t count) {
    names_.reserve(count);
    if (2 * count > places_.size()) place_all(std::bit_ceil(2 * count));
  }
  // Returns whether `name` is new; gives it `number` if so. `name` must outlive this object.
  bool add(std::string_view name, std::size_t number) {
    if (2 * (names_.size() + 1) > places_.size()) place_all(std::bit_ceil(4 * (names_.size() + 1)));
    const std::uint64_t hash = hash_(name);
    std::size_t& place = places_[place_of(name, hash)];
    if (place != 0) return false;
    names_.push_back({name, hash, number});
    place = names_.size();
    return true;
  }
  std::optional<std::size_t> find(std::string_view name) const {
    if (names_.empty()) return std::nullopt;
    const std::size_t place = places_[place_of(name, hash_(name))];
    return place == 0 ? std::nullopt : std::optional(names_[place - 1].number);
  }
  bool contains(std::string_view name) const { return find(name).has_value(); }

 private:
  struct Named {
    std::string_view name;
    std::uint64_t hash;
    std::size_t number;
  };

  // Returns where `name` is in `places_`, or where it would be: the first free place from that of its hash on.
  std::size_t place_of(std::string_view name, std::uint64_t hash) const {
    for (std::size_t i = hash & (places_.size() - 1);; i = (i + 1) & (places_.size() - 1)) {
      if (places_[i] == 0) return i;
      const Named& found = names_[places_[i] - 1];
      if (found.hash == hash && found.name == name) return i;
    }
  }
  void place_all(std::size_t places) {
    places_.assign(places, 0);
    for (std::size_t n = 0; n < names_.size(); ++n) places_[place_of(names_[n].name, names_[n].hash)] = n + 1;
  }

  TextHash hash_;
  std::vector<Named> names_;         // in the order in which they were added
  std::vector<std::size_t> places_;  // by hash, a power of two of them: 1 + a position in `names_`, 0 if free
};

}  // namespace tessera

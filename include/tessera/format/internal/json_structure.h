#pragma once
/// \file
/// JSON texts of untrusted files in a time that is proportional to their size. nlohmann's parser takes the square of
/// the members of an ordered object, and with a callback the square of the objects of a list.

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::json {

/// Properties of a JSON text that its parsed form no longer shows.
struct Structure {
  std::optional<std::string> duplicate_key;  ///< the first key that occurs twice in one object
  std::size_t depth = 0;                     ///< how many arrays and objects are nested in each other, at most
};

/// Returns the structure of `text`, up to the first error if it is not JSON. Takes a bounded stack.
Structure structure_of(std::string_view text);

struct OrderedJson {
  nlohmann::ordered_json value;  ///< discarded if the text is not JSON
  Structure structure;
};

/// Parses `text` and keeps the order of members. Those with a key that occurs twice are all there.
OrderedJson parse_ordered(std::string_view text);

/// Adds a member to an object that does not have the key. nlohmann's `operator[]` looks for it among all others.
void add_member(nlohmann::ordered_json& object, std::string key, nlohmann::ordered_json value);

}  // namespace tessera::json

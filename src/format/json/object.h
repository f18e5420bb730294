#pragma once
// JSON objects that are built key by key. nlohmann's ordered object searches all of its keys at each insertion; this
// one has an index.

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "tessera/base/internal/text_hash.h"

namespace tessera {

class JsonObject {
 public:
  // Among equal keys the last value counts, at the position of the first, as in Python's dict.
  void set(std::string key, nlohmann::ordered_json value) {
    const auto [known, is_new] = places_.try_emplace(key, members_.size());
    if (is_new) {
      members_.emplace_back(std::move(key), std::move(value));
    } else {
      members_.begin()[static_cast<std::ptrdiff_t>(known->second)].second = std::move(value);
    }
  }
  nlohmann::ordered_json take() { return nlohmann::ordered_json(std::move(members_)); }

 private:
  nlohmann::ordered_json::object_t members_;
  TextMap<std::size_t> places_;
};

}  // namespace tessera

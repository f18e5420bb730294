#pragma once
// Values pickled by real Python (tests/golden/pickle), and pickles written by hand.

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "format/python/base64.h"
#include "support/paths.h"
#include "tessera/base/bytes.h"
#include "tessera/format/pickle_reader.h"
#include "tessera/format/pickle_writer.h"

namespace tessera::testing {

struct PickledValue {
  std::string name, repr;
  bool understood = false;
  std::vector<Bytes> pickles;  // by protocol, 0 to 5
};

inline std::vector<PickledValue> read_pickled_values() {
  std::ifstream file(tessera::testing::source_dir() + "/tests/golden/pickle/values.json");
  const auto document = nlohmann::json::parse(file);
  std::vector<PickledValue> values;
  for (const auto& json : document.at("values")) {
    PickledValue value{json.at("name"),
                       json.at("repr").is_null() ? "" : json.at("repr").get<std::string>(),
                       json.at("understood"),
                       {}};
    for (const auto& text : json.at("pickles")) value.pickles.push_back(base64_decode(text.get<std::string>()).value());
    values.push_back(std::move(value));
  }
  return values;
}

// Reads a pickle written as a string literal. The tree keeps the literal's bytes.
inline pickle::ReadResult read_pickle(std::string_view text, const pickle::ReadLimits& limits = {}) {
  const ByteView bytes = as_bytes(text);
  return pickle::read(std::make_shared<const Bytes>(bytes.begin(), bytes.end()), "test.pkl", limits);
}

inline Bytes write_pickle(pickle::NodeRef value, int protocol) {
  Bytes out;
  pickle::Writer writer(out, protocol);
  writer.value(value);
  writer.stop();
  return out;
}

}  // namespace tessera::testing

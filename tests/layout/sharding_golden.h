#pragma once
// What PyTorch says of sharding specs: see tests/golden/sharding/generate.py.

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/layout/shard_metadata.h"

namespace tessera::testing {

inline const nlohmann::json& sharding_cases(const char* name) {
  static const nlohmann::json cases = [] {
    std::ifstream in(std::filesystem::path(TESSERA_SOURCE_DIR) / "tests" / "golden" / "sharding" / "cases.json");
    return nlohmann::json::parse(in);
  }();
  return cases.at(name);
}

// Of [offsets, sizes] or [offsets, sizes, placement].
inline std::vector<ShardMetadata> shards_of(const nlohmann::json& json) {
  std::vector<ShardMetadata> shards;
  for (const nlohmann::json& shard : json) {
    std::optional<RemoteDevice> placement;
    if (shard.size() > 2) placement.emplace(shard[2].get<std::string>());
    shards.emplace_back(shard[0].get<std::vector<std::int64_t>>(), shard[1].get<std::vector<std::int64_t>>(),
                        std::move(placement));
  }
  return shards;
}

}  // namespace tessera::testing

#pragma once
// PyTorch's sharding specs and their shards: see tests/golden/sharding/generate.py.

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/paths.h"
#include "tessera/layout/shard_metadata.h"

namespace tessera::testing {

inline const nlohmann::json& sharding_cases(const char* name) {
  static const nlohmann::json cases = [] {
    std::ifstream in(std::filesystem::path(tessera::testing::source_dir()) / "tests" / "golden" / "sharding" /
                     "cases.json");
    return nlohmann::json::parse(in);
  }();
  return cases.at(name);
}

// Converts [offsets, sizes] or [offsets, sizes, placement].
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

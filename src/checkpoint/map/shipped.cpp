#include "checkpoint/map/shipped.h"

#include <array>
#include <utility>

#include "checkpoint/map/rules.h"

namespace tessera::checkpoint {
namespace {

// Sorted by name. A file in assets/maps has the name and ".json".
const std::array<std::pair<std::string_view, const std::string_view*>, 6> kShippedMaps = {{
    {"gpt2-hf-to-nanogpt", &maps::kGpt2HfToNanogpt},
    {"gpt2-nanogpt-to-hf", &maps::kGpt2NanogptToHf},
    {"llama-hf-to-megatron", &maps::kLlamaHfToMegatron},
    {"llama-hf-to-torchtitan", &maps::kLlamaHfToTorchtitan},
    {"llama-megatron-to-hf", &maps::kLlamaMegatronToHf},
    {"llama-torchtitan-to-hf", &maps::kLlamaTorchtitanToHf},
}};

}  // namespace

std::optional<std::string_view> shipped_map(std::string_view name) {
  for (const auto& [known, text] : kShippedMaps) {
    if (known == name) return *text;
  }
  return std::nullopt;
}

std::vector<std::string> TensorMap::shipped_maps() {
  std::vector<std::string> names;
  names.reserve(kShippedMaps.size());
  for (const auto& known : kShippedMaps) names.emplace_back(known.first);
  return names;
}

}  // namespace tessera::checkpoint

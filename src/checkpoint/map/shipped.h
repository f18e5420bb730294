#pragma once
// Tessera's own maps, as the build embeds them from assets/maps.

#include <string_view>

namespace tessera::checkpoint::maps {

extern const std::string_view kLlamaTorchtitanToHf, kLlamaHfToTorchtitan;
extern const std::string_view kLlamaMegatronToHf, kLlamaHfToMegatron;
extern const std::string_view kGpt2NanogptToHf, kGpt2HfToNanogpt;

}  // namespace tessera::checkpoint::maps

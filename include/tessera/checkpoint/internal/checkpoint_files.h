#pragma once
// What names tell about files of checkpoints.

#include <array>
#include <string_view>

#include "tessera/checkpoint/internal/file_names.h"

namespace tessera::checkpoint {

// Endings of files of torch.save.
inline constexpr std::array<std::string_view, 4> kTorchEndings = {".pt", ".pth", ".bin", ".ckpt"};

// The index of torch.save files, as the HuggingFace tools call it.
inline constexpr std::string_view kTorchIndexFileName = "pytorch_model.bin.index.json";

inline bool has_torch_ending(std::string_view name) {
  for (const std::string_view ending : kTorchEndings) {
    if (name.ends_with(ending)) return true;
  }
  return false;
}

// Returns the ending of `name` if it is one that files of a checkpoint have, else nothing: ".pt" of "step-1.pt".
inline std::string_view checkpoint_file_ending(std::string_view name) {
  if (name.ends_with(kSafetensorsSuffix)) return name.substr(name.size() - kSafetensorsSuffix.size());
  return has_torch_ending(name) ? name.substr(name.rfind('.')) : std::string_view();
}

}  // namespace tessera::checkpoint

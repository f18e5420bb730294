#pragma once
/// \file
/// The sidecar `.tessera.json`: size and CRC-32 of every file of a checkpoint, including `.metadata`. PyTorch ignores
/// it. See docs/formats/sidecar.md.

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "tessera/base/bytes.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

inline constexpr std::string_view kSidecarFileName = ".tessera.json";

struct Sidecar {
  struct FileFacts {
    std::uint64_t size_bytes = 0;
    std::uint32_t crc32 = 0;
    bool operator==(const FileFacts&) const = default;
  };
  std::map<std::string, FileFacts> files;  ///< by relative path
  bool operator==(const Sidecar&) const = default;
};

/// Returns the path of a checkpoint's sidecar: in its directory, or `<file>.tessera.json` for a single file.
std::filesystem::path sidecar_path(const std::filesystem::path& checkpoint);

/// Reads the sidecar of a checkpoint; returns nothing if there is none. If a save was killed after it replaced
/// `.metadata` and before it renamed the sidecar, reads `.tessera.json.tmp`, which that save left. Throws
/// `Error(corrupt)` if the sidecar is damaged and `Error(unsupported)` for another version.
std::optional<Sidecar> read_sidecar(const std::filesystem::path& checkpoint);
std::optional<Sidecar> read_sidecar(const Storage& storage);

/// Returns the contents of a sidecar file. Deterministic.
Bytes write_sidecar(const Sidecar& sidecar);

}  // namespace tessera::checkpoint

#pragma once
/// \file
/// `.tessera.json`: size and CRC-32 of every file of a checkpoint, `.metadata` included. PyTorch ignores it. See
/// docs/formats/sidecar.md.

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

/// Where the sidecar of a checkpoint lies: in its directory, or beside a single file as `<file>.tessera.json`.
std::filesystem::path sidecar_path(const std::filesystem::path& checkpoint);

/// The sidecar of a checkpoint; nothing if there is none. Where a save was killed just after it had replaced
/// `.metadata`, that is the one which it had ready, `.tessera.json.tmp`. Throws `Error(corrupt)` for one that is
/// damaged.
std::optional<Sidecar> read_sidecar(const std::filesystem::path& checkpoint);
std::optional<Sidecar> read_sidecar(const Storage& storage);

Bytes write_sidecar(const Sidecar& sidecar);

}  // namespace tessera::checkpoint

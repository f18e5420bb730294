#pragma once
/// \file
/// The sidecar `.tessera.json`: the size of every file of a checkpoint, including `.metadata`, and the CRC-32 of the
/// file and of each of its blocks. PyTorch ignores it. See docs/formats/sidecar.md.

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

inline constexpr std::string_view kSidecarFileName = ".tessera.json";
/// Larger sidecars are refused: 1 GiB describes 16 TiB of data.
inline constexpr std::uint64_t kMaxSidecarBytes = 1ull << 30;

struct Sidecar {
  /// The block size of the files that this version writes. A read of part of a file is compared block by block.
  static constexpr std::uint64_t kBlockBytes = std::uint64_t{128} << 10;

  struct FileFacts {
    std::uint64_t size_bytes = 0;
    std::uint32_t crc32 = 0;
    /// The file is divided into blocks of this size; the last block may be shorter. 0 if the file is one block.
    std::uint64_t block_bytes = 0;
    /// The CRC-32 of each block; empty if the file is one block.
    std::vector<std::uint32_t> block_crcs;

    /// Returns the number of blocks, and the CRC-32 and the range of block `i`.
    std::size_t blocks() const { return block_crcs.empty() ? 1 : block_crcs.size(); }
    std::uint32_t block_crc(std::size_t i) const { return block_crcs.empty() ? crc32 : block_crcs[i]; }
    std::uint64_t block_begin(std::size_t i) const { return block_crcs.empty() ? 0 : i * block_bytes; }
    std::uint64_t block_end(std::size_t i) const { return i + 1 == blocks() ? size_bytes : (i + 1) * block_bytes; }
    bool operator==(const FileFacts&) const = default;
  };
  std::map<std::string, FileFacts> files;  ///< by relative path
  bool operator==(const Sidecar&) const = default;
};

/// The size and the checksums of a file, computed piece by piece.
class FileSums {
 public:
  void add(ByteView bytes);
  std::uint64_t size_bytes() const { return size_bytes_; }
  Sidecar::FileFacts facts() const;

 private:
  std::uint64_t size_bytes_ = 0;
  std::vector<std::uint32_t> crcs_;  // of blocks of Sidecar::kBlockBytes, of which the last may not be complete
};

/// Returns the facts of a file with these contents.
Sidecar::FileFacts facts_of(ByteView contents);

/// Returns the facts of a file from the CRC-32 of all its blocks of `Sidecar::kBlockBytes`.
Sidecar::FileFacts facts_of_blocks(std::uint64_t size_bytes, std::vector<std::uint32_t> block_crcs);

/// Returns the path of a checkpoint's sidecar: in its directory, also if `checkpoint` is an index in it, or
/// `<file>.tessera.json` for a single file.
std::filesystem::path sidecar_path(const std::filesystem::path& checkpoint);

/// Reads the sidecar of a checkpoint; returns nothing if there is none. If a save was killed after it replaced
/// `.metadata` and before it renamed the sidecar, reads `.tessera.json.tmp`, which that save left. The sidecar of a
/// single file describes that file under its present name, even if the two were renamed. Throws `Error(corrupt)` if the
/// sidecar is damaged and `Error(unsupported)` for a version later than 2.
std::optional<Sidecar> read_sidecar(const std::filesystem::path& checkpoint);
std::optional<Sidecar> read_sidecar(const Storage& storage);

/// Returns whether a sidecar lists `.metadata`, and as it is in the storage.
bool describes_metadata(const Storage& storage, const Sidecar& sidecar);

/// Reads the sidecar that a killed save left under its temporary name, if it is that of the present `.metadata`.
std::optional<Sidecar> read_interrupted_sidecar(const Storage& storage);

/// Parses the contents of a sidecar file. `name` is used in messages. Throws as `read_sidecar`.
Sidecar parse_sidecar(ByteView contents, const std::string& name);

/// Returns the contents of a sidecar file. Deterministic. Size: about 80 bytes per file, and 8 bytes per block.
/// `generation` is that of the save that writes it; readers ignore it. Throws `Error(invalid_argument)` for the name of
/// a file that is not UTF-8, which JSON cannot represent.
Bytes write_sidecar(const Sidecar& sidecar, std::optional<std::int64_t> generation = std::nullopt);

/// Returns the generation in the contents of a sidecar, or in their first 1024 bytes; nothing if they have none, or if
/// they end before it does.
///
/// Law: sidecar_generation(write_sidecar(sidecar, generation)) == generation.
std::optional<std::int64_t> sidecar_generation(ByteView contents);

/// Returns the contents of the sidecar of a single file, whose facts are the only ones in `sidecar`. As readers ignore
/// the name in it, one that is not UTF-8 is escaped.
Bytes write_file_sidecar(const Sidecar& sidecar);

}  // namespace tessera::checkpoint

#pragma once
/// \file
/// The subset of zip that torch.save uses: stored entries, one disk, zip64. See docs/formats/zip.md.
///
/// The reader trusts nothing. The directory and each entry's local header must agree. Entries and records must cover
/// the archive from its first byte to its last, without gaps or overlaps, and the directory must list them in this
/// order. Names must be relative paths that are unique without case, because PyTorch finds entries without it and takes
/// the folder of the first record. Law: if any single bit outside of the entries' data of a torch.save archive is
/// flipped, the archive is refused. Deflated, encrypted and split archives throw `Error(unsupported)`; everything else
/// throws `Error(corrupt)` with the byte offset in the source. Source: PKWARE APPNOTE.TXT 6.3; PyTorch's writer:
/// caffe2/serialize/inline_container.cc.

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/file.h"

namespace tessera::zip {

struct Entry {
  std::string name;
  std::uint32_t crc32 = 0;
  std::uint64_t size_bytes = 0;
  std::uint64_t header_offset_bytes = 0;  ///< of the local header, in the source
  std::uint64_t data_offset_bytes = 0;    ///< of the data, in the source
};

/// The entries of an archive, ordered by data offset.
struct Directory {
  std::vector<Entry> entries;
  std::vector<std::uint32_t> by_name;  ///< the indices of `entries`, ordered by name without case
  /// Returns the entry named `name`, or null. O(log n).
  const Entry* find(std::string_view name) const;
};

/// Returns whether a file with these first bytes (4 or more) starts like a zip archive.
bool looks_like_zip(ByteView first_bytes);
/// Returns the same for the file `source`. Cost: one read of 4 bytes.
bool looks_like_zip(const ByteSource& source);

/// Reads the directory of the archive in the `length_bytes` at `offset_bytes` of `source`. Checks every local header
/// and, where flagged, every data descriptor. Does not read the data. Cost: one read for an archive of up to 64 KiB;
/// otherwise one read of its end and about one read of 4 KiB per larger entry. Memory is proportional to the directory,
/// which may have up to 1 GiB.
Directory read_directory(const ByteSource& source, std::uint64_t offset_bytes, std::uint64_t length_bytes);

/// The layout of an archive of stored entries, computed from their sizes before any data exists. The CRCs may be
/// computed later: they follow the data, in the data descriptors and in the directory.
///
/// Layout of entries e_0 ... e_n-1: header(e_i) data(e_i) descriptor(e_i) ..., directory. Data starts at multiples of
/// 64 bytes from the start of the archive, padded by an extra field "FB". Laws: the bytes are those that PyTorch writes
/// for the same entries (except in the zip64 field of a local header, where PyTorch leaves the stored size 0);
/// `data_offset_bytes(i) + size == descriptor_offset_bytes(i)`; `total_bytes()` is the end of the directory.
class Layout {
 public:
  /// Appends an entry and returns its index. Throws `Error(invalid_argument)` if the name is empty, longer than 65535
  /// bytes or already used, regardless of case, or if the archive would exceed 2^63 - 1 bytes.
  std::size_t add(std::string name, std::uint64_t size_bytes);

  std::size_t size() const { return entries_.size(); }
  std::uint64_t header_offset_bytes(std::size_t i) const { return entries_[i].header_offset_bytes; }
  std::uint64_t data_offset_bytes(std::size_t i) const { return entries_[i].data_offset_bytes; }
  std::uint64_t descriptor_offset_bytes(std::size_t i) const {
    return entries_[i].data_offset_bytes + entries_[i].size_bytes;
  }
  /// The start of the directory.
  std::uint64_t directory_offset_bytes() const { return end_; }
  /// The size of the complete archive.
  std::uint64_t total_bytes() const;

  /// Returns the bytes from header_offset_bytes(i) to data_offset_bytes(i).
  Bytes header(std::size_t i) const;
  /// Returns the bytes between the data of entry i and the next header or the directory; none for an empty entry.
  Bytes descriptor(std::size_t i, std::uint32_t crc32) const;
  /// Returns the directory with the end records. `crcs[i]` is the CRC-32 of the data of entry i.
  Bytes directory(const std::vector<std::uint32_t>& crcs) const;

 private:
  // Depends on random numbers: names may be from a file.
  struct NameHash {
    std::size_t operator()(const std::string& name) const;
  };
  std::vector<Entry> entries_;
  std::unordered_set<std::string, NameHash> names_;  // without case
  std::uint64_t end_ = 0;
  std::uint64_t directory_bytes_ = 0;  // without the end records
};

}  // namespace tessera::zip

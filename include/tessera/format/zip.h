#pragma once
/// \file
/// The part of zip that torch.save uses: stored entries, one disk, zip64. See docs/formats/zip.md.
///
/// Reading trusts nothing: the directory and each entry's local header must agree; entries and records must follow one
/// another from the first byte of the archive to the last, with no gap and no overlap; names must differ and be
/// relative paths. Law: an archive that torch.save wrote is refused if any one bit outside of its entries' data is
/// another. Deflated, encrypted or split archives are `Error(unsupported)`, everything else `Error(corrupt)` with the
/// byte offset in the source. Source: PKWARE APPNOTE.TXT 6.3; what PyTorch writes:
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

/// What lies in an archive, in order of data offset.
struct Directory {
  std::vector<Entry> entries;
  std::vector<std::uint32_t> by_name;  ///< the indices of `entries`, in order of name
  /// The entry called `name`, or null. O(log n).
  const Entry* find(std::string_view name) const;
};

/// Whether a file with these first bytes (4 or more) begins like a zip archive.
bool looks_like_zip(ByteView first_bytes);

/// Reads the directory of the archive that is the `length_bytes` at `offset_bytes` of `source`, and checks every local
/// header and, where flagged, data descriptor. The data is not read. Cost: one read for an archive of up to 64 KiB,
/// else one of its end and about one of 4 KiB per larger entry; memory in proportion to the directory, which may have 1
/// GiB.
Directory read_directory(const ByteSource& source, std::uint64_t offset_bytes, std::uint64_t length_bytes);

/// Computes where everything lies in an archive of stored entries before any data is there, as sizes are all it takes;
/// CRCs may come after the data, in the data descriptors and the directory.
///
/// Layout, for entries e_0 ... e_n-1: header(e_i) data(e_i) descriptor(e_i) ..., directory. Data begins at multiples of
/// 64 bytes from the beginning of the archive (padded by an extra field "FB"). Laws: the bytes are those that PyTorch
/// writes for the same entries (up to the zip64 field of a local header, where PyTorch leaves the stored size 0);
/// `data_offset_bytes(i) + size == descriptor_offset_bytes(i)`; `total_bytes()` is where the directory ends.
class Layout {
 public:
  /// Adds an entry behind those there are; returns its index. Throws `Error(invalid_argument)` for a name that is there
  /// already, is empty or longer than 65535 bytes, and for an archive that would be larger than 2^63 - 1 bytes.
  std::size_t add(std::string name, std::uint64_t size_bytes);

  std::size_t size() const { return entries_.size(); }
  std::uint64_t header_offset_bytes(std::size_t i) const { return entries_[i].header_offset_bytes; }
  std::uint64_t data_offset_bytes(std::size_t i) const { return entries_[i].data_offset_bytes; }
  std::uint64_t descriptor_offset_bytes(std::size_t i) const {
    return entries_[i].data_offset_bytes + entries_[i].size_bytes;
  }
  /// Where the directory begins.
  std::uint64_t directory_offset_bytes() const { return end_; }
  /// The whole archive, in bytes.
  std::uint64_t total_bytes() const;

  /// The bytes from header_offset_bytes(i) to data_offset_bytes(i).
  Bytes header(std::size_t i) const;
  /// The bytes behind the data of entry i, up to the next header or the directory: none for an entry without data.
  Bytes descriptor(std::size_t i, std::uint32_t crc32) const;
  /// The directory, with the end records. `crcs[i]` is the CRC-32 of entry i's data.
  Bytes directory(const std::vector<std::uint32_t>& crcs) const;

 private:
  std::vector<Entry> entries_;
  std::unordered_set<std::string> names_;
  std::uint64_t end_ = 0;
  std::uint64_t directory_bytes_ = 0;  // of the directory without the end records
};

}  // namespace tessera::zip

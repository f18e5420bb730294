#pragma once
/// \file
/// A reader for any box of a stored tensor, which reads only the bytes that the box needs.

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/layout/redistribution.h"

namespace tessera::checkpoint {

/// A reader of one tensor. All members are thread-safe. Memory: a fixed amount per chunk of the tensor, and at most
/// `kSpanBytes` per running read.
class TensorReader {
 public:
  static constexpr std::uint64_t kSpanBytes = 16u << 20;

  /// If `sums_bytes` is false, no CRC-32 is computed while reading, and the verify functions below check nothing.
  TensorReader(std::shared_ptr<const Checkpoint> checkpoint, std::size_t tensor, bool sums_bytes = true);
  ~TensorReader();

  const TensorInfo& info() const { return *info_; }

  /// Fills `out` with the elements of `box` in row-major order. `out.size()` must be volume(box) * element size. Throws
  /// `Error(corrupt)` if a chunk is damaged or an element is in no chunk.
  void read(BoxView box, MutableByteView out) const;

  /// Reads `box`, which must be inside stored chunk `chunk`, to strided memory: element x goes to
  /// out + sum((x[d] - box.offsets[d]) * out_strides[d]) * element size, with strides in elements. Elements that are
  /// contiguous both in memory and in the file are read without a copy.
  void read_chunk(std::size_t chunk, BoxView box, std::uint8_t* out, std::span<const std::int64_t> out_strides) const;

  /// Verifies the checksum of every chunk that was read, unless the file's sidecar has vouched for each byte. A chunk
  /// of which every byte was read exactly once is not read again; other chunks are. Call it after the last read. Throws
  /// `Error(corrupt)` naming tensor, file and offset.
  void verify_checksums() const;
  /// Verifies the chunks of which every byte was read exactly once, and reads nothing. Throws as `verify_checksums`.
  void verify_complete_chunks() const;

  /// Returns the bytes read so far, including gaps between requested elements.
  std::uint64_t read_bytes() const { return read_bytes_; }

 private:
  struct Chunk;
  Chunk& located(std::size_t chunk) const;
  void check_checksum(std::size_t chunk, std::uint32_t found) const;
  void read_strided(const Chunk& chunk, const ByteSource& file, std::span<const std::int64_t> begin,
                    std::span<const std::int64_t> sizes, std::uint8_t* out, std::span<const std::int64_t> out_strides,
                    bool is_scattered) const;
  void read_recorded(const Chunk& chunk, const ByteSource& file, std::uint64_t offset_bytes, MutableByteView out,
                     bool is_scattered) const;

  std::shared_ptr<const Checkpoint> checkpoint_;
  std::size_t tensor_;
  const TensorInfo* info_;
  BoxIndex index_;
  bool sums_bytes_;
  std::unique_ptr<Chunk[]> chunks_;
  mutable std::atomic<std::uint64_t> read_bytes_ = 0;
};

}  // namespace tessera::checkpoint

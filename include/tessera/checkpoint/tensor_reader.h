#pragma once
/// \file
/// Reads any box of a stored tensor, and nothing but the bytes it needs.

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/layout/redistribution.h"

namespace tessera::checkpoint {

/// All members may be called by several threads at once. Memory: a fixed amount per chunk of the tensor, and at most
/// `kSpanBytes` per running read.
class TensorReader {
 public:
  static constexpr std::uint64_t kSpanBytes = 16u << 20;

  /// Without `sums_bytes`, what is read isn't summed for the checks below, which then pass.
  TensorReader(std::shared_ptr<const Checkpoint> checkpoint, std::size_t tensor, bool sums_bytes = true);
  ~TensorReader();

  const TensorInfo& info() const { return *info_; }

  /// Fills `out` with the elements of `box`, row-major. `out.size()` must be volume(box) * element size. Throws
  /// `Error(corrupt)` where a chunk is damaged or no chunk holds an element.
  void read(BoxView box, MutableByteView out) const;

  /// Reads those elements of stored chunk `chunk` that are `box`, which must lie within it, to strided memory: element
  /// x to out + sum((x[d] - box.offsets[d]) * out_strides[d]) * element size, strides in elements. What is contiguous
  /// there and in the file is read without a copy.
  void read_chunk(std::size_t chunk, BoxView box, std::uint8_t* out, std::span<const std::int64_t> out_strides) const;

  /// Throws `Error(corrupt)`, naming tensor, file and offset, if a chunk's bytes are not those of its checksum. What
  /// `read` has passed over in whole and once is not read again. Call it when everything wanted was read.
  void verify_checksums() const;
  /// The same of those chunks alone that were read whole, without reading anything.
  void verify_whole_chunks() const;

  /// Bytes of elements read so far, those between that were not wanted included.
  std::uint64_t read_bytes() const { return read_bytes_; }

 private:
  struct Chunk;
  Chunk& located(std::size_t chunk) const;
  void check_checksum(std::size_t chunk, std::uint32_t found) const;
  void read_strided(const Chunk& chunk, const ByteSource& file, std::span<const std::int64_t> begin,
                    std::span<const std::int64_t> sizes, std::uint8_t* out,
                    std::span<const std::int64_t> out_strides) const;
  void read_recorded(const Chunk& chunk, const ByteSource& file, std::uint64_t offset_bytes, MutableByteView out) const;

  std::shared_ptr<const Checkpoint> checkpoint_;
  std::size_t tensor_;
  const TensorInfo* info_;
  BoxIndex index_;
  bool sums_bytes_;
  std::unique_ptr<Chunk[]> chunks_;
  mutable std::atomic<std::uint64_t> read_bytes_ = 0;
};

}  // namespace tessera::checkpoint

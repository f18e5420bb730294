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

  TensorReader(std::shared_ptr<const Checkpoint> checkpoint, std::size_t tensor);
  ~TensorReader();

  const TensorInfo& info() const { return *info_; }

  /// Fills `out` with the elements of `box`, row-major. `out.size()` must be volume(box) * element size. Throws
  /// `Error(corrupt)` where a chunk is damaged or no chunk holds an element.
  void read(BoxView box, MutableByteView out) const;

  /// Throws `Error(corrupt)`, naming tensor, file and offset, if a chunk's bytes are not those of its checksum. What
  /// `read` has passed over in whole and once is not read again. Call it when everything wanted was read.
  void verify_checksums() const;

 private:
  struct Chunk;
  Chunk& located(std::size_t chunk) const;
  void read_strided(const Chunk& chunk, const File& file, std::span<const std::int64_t> begin,
                    std::span<const std::int64_t> sizes, std::uint8_t* out,
                    std::span<const std::int64_t> out_strides) const;
  void read_recorded(const Chunk& chunk, const File& file, std::uint64_t offset_bytes, MutableByteView out) const;

  std::shared_ptr<const Checkpoint> checkpoint_;
  std::size_t tensor_;
  const TensorInfo* info_;
  BoxIndex index_;
  std::unique_ptr<Chunk[]> chunks_;
};

}  // namespace tessera::checkpoint

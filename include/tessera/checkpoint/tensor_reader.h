#pragma once
/// \file
/// A reader for any box of a stored tensor, which reads only the bytes that the box needs.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/layout/redistribution.h"
#include "tessera/layout/tensor_view.h"

namespace tessera::checkpoint {

class ComputedTensors;

/// A reader of one tensor, stored or computed. All members are thread-safe. Memory: a fixed amount per chunk of the
/// tensor, or of those that it is computed from, and at most `kSpanBytes` per running read, twice that for a cast.
class TensorReader {
 public:
  static constexpr std::uint64_t kSpanBytes = 16u << 20;

  /// If `sums_bytes` is false, no CRC-32 is computed while reading, and the verify functions below check nothing.
  TensorReader(std::shared_ptr<const Checkpoint> checkpoint, std::size_t tensor, bool sums_bytes = true);
  ~TensorReader();

  /// Makes reads compare blocks of the sidecar of which only scattered parts are wanted, too, by reading them
  /// completely, unless the tensor is computed or the sidecar is of version 1 (see Checkpoint::compare_rest). Reads
  /// then throw `Error(cancelled)`. Must be called before the first read.
  void compare_parts(const Cancellation* cancellation) {
    compares_parts_ = true;
    cancellation_ = cancellation;
  }

  const TensorInfo& info() const { return *info_; }

  /// Fills `out` with the elements of `box` in row-major order. `out.size()` must be volume(box) * element size. Throws
  /// `Error(corrupt)` if a chunk is damaged or an element is in no chunk.
  void read(BoxView box, MutableByteView out) const;

  /// Reads `box`, which must be inside chunk `chunk`, to strided memory: element x goes to
  /// out + sum((x[d] - box.offsets[d]) * out_strides[d]) * element size, with strides in elements. Elements that are
  /// contiguous both in memory and in the file are read without a copy.
  void read_chunk(std::size_t chunk, BoxView box, std::uint8_t* out, std::span<const std::int64_t> out_strides) const;

  /// Reads the elements of `lattice`, which must be within the tensor: the element at place p goes to out + p * element
  /// size. Throws as `read`.
  void read_lattice(const Lattice& lattice, std::uint8_t* out) const;

  /// Returns whether the elements of a row, which differ in the last dimension alone, are in several rows of the stored
  /// tensors, as in a transpose. Then larger boxes are read faster.
  bool is_rearranged() const;

  /// Verifies the checksum of every chunk that was read, unless the file's sidecar has vouched for each byte. A chunk
  /// of which every byte was read exactly once is not read again; other chunks are. Call it after the last read. Throws
  /// `Error(corrupt)` naming tensor, file and offset. Of a computed tensor, only what has been read completely is
  /// verified, since other tensors may be computed from the same chunks; Checkpoint::compare_rest verifies the rest.
  void verify_checksums() const;
  /// Verifies the chunks of which every byte was read exactly once, and reads nothing. Throws as `verify_checksums`.
  /// Returns whether these are all chunks that were read.
  bool verify_complete_chunks() const;

  /// Returns the bytes read so far, including gaps between requested elements; of a computed tensor, without gaps.
  std::uint64_t read_bytes() const { return read_bytes_; }
  /// Returns how many of the elements read so far were beyond the range of a dtype that a map casts them to.
  std::int64_t elements_beyond_range() const { return beyond_range_; }

 private:
  struct Chunk;
  Chunk& located(std::size_t chunk) const;
  void check_checksum(std::size_t chunk, std::uint32_t found) const;
  // Calls read(chunk, file) with the chunk's place. Errors name the tensor and the chunk.
  template <typename Read>
  void with_chunk(std::size_t chunk, const Read& read) const;
  void read_part(std::size_t chunk, const Lattice& part, std::uint8_t* out) const;
  void read_from(std::size_t i, const Chunk& chunk, const ByteSource& file, const Lattice& part,
                 std::uint8_t* out) const;
  void read_computed(const Lattice& lattice, std::uint8_t* out) const;
  void read_cast(const TensorReader& input, std::span<const DType> casts, const Lattice& part, std::uint8_t* out) const;
  void read_strided(const Chunk& chunk, const ByteSource& file, std::int64_t first, std::span<const std::int64_t> sizes,
                    std::span<const std::int64_t> strides, std::uint8_t* out, std::span<const std::int64_t> out_strides,
                    bool is_scattered) const;
  void read_recorded(const Chunk& chunk, const ByteSource& file, std::uint64_t offset_bytes, MutableByteView out,
                     bool is_scattered) const;

  std::shared_ptr<const Checkpoint> checkpoint_;
  std::size_t tensor_;
  const TensorInfo* info_;
  BoxIndex index_;
  bool sums_bytes_;
  bool compares_parts_ = false;
  const Cancellation* cancellation_ = nullptr;
  std::unique_ptr<Chunk[]> chunks_;
  const ComputedTensors* computed_ = nullptr;  // null if the tensor is stored
  std::map<std::size_t, std::shared_ptr<const TensorReader>>
      input_readers_;  // by number of an input, if it is computed
  mutable std::atomic<std::uint64_t> read_bytes_ = 0;
  mutable std::atomic<std::int64_t> beyond_range_ = 0;
};

}  // namespace tessera::checkpoint

#pragma once
/// \file
/// A part of a stored tensor, selected as by a subscript of Python: `[0:2, :, -1]`.

#include <cstdint>
#include <string_view>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/dtype.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/tensor_reader.h"

namespace tessera::checkpoint {

/// The elements x of a tensor with x[d] = dims[d].begin + i * dims[d].step for 0 <= i < dims[d].size.
struct TensorSlice {
  struct Dim {
    std::int64_t begin = 0, size = 0, step = 1;  ///< step >= 1
    bool is_kept = true;                         ///< false if an int selects one index and drops the dimension
    bool operator==(const Dim&) const = default;
  };
  std::vector<Dim> dims;  ///< one for each dimension of the tensor

  /// Returns the slice of all elements.
  static TensorSlice full(const std::vector<std::int64_t>& shape);
  /// Returns the sizes of the kept dimensions.
  std::vector<std::int64_t> shape() const;
  std::int64_t elements() const;
  bool operator==(const TensorSlice&) const = default;
};

/// Parses a subscript, with or without its brackets: for each dimension an int or `begin:end:step`, of which each part
/// is optional, and at most one `...`, which stands for as many `:` as there are further dimensions. The rules are
/// PyTorch's: negative numbers count from the end, the bounds of a range are clamped, a step is at least 1. Throws
/// `Error(invalid_argument)` for other text, too many dimensions, and an int that is out of range.
TensorSlice parse_slice(std::string_view text, const std::vector<std::int64_t>& shape);

/// Returns whether `read_slice` can cast elements: as tessera::can_cast, and from float8_e8m0fnu to the types that
/// float32 can be cast to.
bool can_cast_slice(DType from, DType to);

/// Throws `Error(unsupported)` if the elements of `slice` exceed the size of the checkpoint's files by more than 64 MiB
/// and by more than 16 times that size. A tensor may repeat the elements that it stores (`torch.Tensor.expand`), and a
/// small file could then fill a disk. See ConvertOptions::expand.
void check_slice_size(const Checkpoint& checkpoint, std::size_t tensor, const TensorSlice& slice);

/// Calls `visit` with the elements of `slice` in row-major order, cast to `dtype`, in pieces of at most `limit_bytes`
/// (at least one element). Reads only the chunks and bytes that they need; with steps, also those between them.
/// Of checksums, verifies only those of a sidecar's blocks of which it reads no parts with gaps: call
/// `reader.verify_complete_chunks()` and `Checkpoint::compare_rest` afterwards. Throws as `TensorReader::read`,
/// `Error(unsupported)` unless `can_cast_slice`, and what `visit` throws.
void read_slice(const TensorReader& reader, const TensorSlice& slice, DType dtype, std::int64_t limit_bytes,
                FunctionRef<void(ByteView)> visit);

}  // namespace tessera::checkpoint

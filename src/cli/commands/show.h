#pragma once
// The text of a tensor's values, as `tessera show` prints it.

#include "cli/session.h"
#include "tessera/base/dtype.h"
#include "tessera/checkpoint/inspect/tensor_slice.h"
#include "tessera/checkpoint/tensor_reader.h"

namespace tessera::cli {

// Prints the elements of `slice` of a tensor of `checkpoint`, cast to `dtype`, in brackets. Unless `all`, prints of
// more than 1000 elements only the first and last three along each dimension, with "..." in place of the others, as
// NumPy does. Reads only what it prints, twice: all of it is compared with checksums before the first is printed.
void print_values(Session& session, const checkpoint::Checkpoint& checkpoint, const checkpoint::TensorReader& reader,
                  const checkpoint::TensorSlice& slice, DType dtype, bool all);

// Compares what was read of a tensor, and of the sidecar's blocks, with its checksums.
void compare_read(Session& session, const checkpoint::Checkpoint& checkpoint, const checkpoint::TensorReader& reader);

}  // namespace tessera::cli

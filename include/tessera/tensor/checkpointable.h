#pragma once
/// \file
/// A tensor of any kind that says itself which of its boxes this rank has, and where in memory.
///
/// What implements this is saved and loaded box by box like a sharded tensor, with nothing known of its kind: the local
/// part of a DTensor, a shard of a flat parameter. PyTorch: `_Checkpointable` in torch/distributed/_checkpointable.py,
/// whose `__create_write_items__` is size, properties and chunks here, `__create_chunk_list__` the chunks, and
/// `__get_tensor_shard__` the local tensor of one.
///
/// Laws: every local chunk lies in `size()`; local_tensor(i) has the sizes of local_chunks()[i] and the dtype of
/// `properties()`; the chunks of all ranks together cover the tensor. All of it stays as it is while a save or a load
/// runs, but for the elements, which a load writes.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/layout/box.h"
#include "tessera/layout/tensor_properties.h"

namespace tessera {

class Checkpointable {
 public:
  virtual ~Checkpointable() = default;

  /// Of the whole tensor, the same on all ranks.
  virtual const std::vector<std::int64_t>& size() const = 0;
  /// The same on all ranks.
  virtual TensorProperties properties() const = 0;
  /// The boxes that this rank has, several or none. Their order is this rank's own.
  virtual const std::vector<Box>& local_chunks() const = 0;
  /// The elements of local_chunks()[i]: no copy, strided, on any device. What is written to it is written to this.
  virtual at::Tensor local_tensor(std::size_t i) const = 0;

 protected:
  Checkpointable() = default;
  Checkpointable(const Checkpointable&) = default;
  Checkpointable& operator=(const Checkpointable&) = default;
};

}  // namespace tessera

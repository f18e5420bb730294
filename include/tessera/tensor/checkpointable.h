#pragma once
/// \file
/// A tensor of any kind that reports which of its boxes this rank has, and where they are in memory.
///
/// Implementations are saved and loaded box by box, like sharded tensors: the local part of a DTensor, a shard of a
/// flat parameter. PyTorch: `_Checkpointable` in torch/distributed/_checkpointable.py. `size`, `properties` and
/// `local_chunks` correspond to its `__create_write_items__`, `local_chunks` to `__create_chunk_list__`, and
/// `local_tensor` to `__get_tensor_shard__`.
///
/// Laws: every local chunk is within `size()`; local_tensor(i) has the sizes of local_chunks()[i] and the dtype of
/// `properties()`; the chunks of all ranks together cover the tensor. None of this changes while a save or a load runs,
/// except for the elements, which a load writes.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/layout/box.h"
#include "tessera/layout/tensor_properties.h"

namespace tessera {

class Checkpointable {
 public:
  virtual ~Checkpointable() = default;

  /// Returns the size of the full tensor, the same on all ranks.
  virtual const std::vector<std::int64_t>& size() const = 0;
  /// Returns the properties, the same on every rank that knows them. A rank without local chunks may return nullopt.
  virtual std::optional<TensorProperties> properties() const = 0;
  /// Returns the boxes that this rank has, any number, in an order of this rank's choice.
  virtual const std::vector<Box>& local_chunks() const = 0;
  /// Returns the elements of local_chunks()[i], which must exist: a strided view on any device. Writing to it writes to
  /// this tensor.
  virtual at::Tensor local_tensor(std::size_t i) const = 0;

 protected:
  Checkpointable() = default;
  Checkpointable(const Checkpointable&) = default;
  Checkpointable& operator=(const Checkpointable&) = default;
};

}  // namespace tessera

#pragma once
/// \file
/// Redistribution that runs while the program does something else.
///
///     PendingDTensor next = start_redistribute(weight);    // sends the shards
///     y = dtensor::matmul(x, previous);
///     const DTensor full = next.wait();                    // blocks until they have arrived
///
/// PyTorch: `redistribute(async_op=True)`, whose result waits at its first use. Here the wait is explicit.

#include <memory>

#include "tessera/tensor/dtensor.h"

namespace tessera {

/// A redistribution that has started and may still run. A reference; copies are the same redistribution. If it is never
/// waited for, it keeps its memory until it has ended.
class PendingDTensor {
 public:
  /// Returns the result, which autograd tracks. The first call blocks until the collectives complete, and throws as
  /// they do; later calls return the same. Until the first call returns, the elements of the original tensor must not
  /// change.
  DTensor wait() const;
  /// Returns whether `wait` has returned before.
  bool is_complete() const;
  const DeviceMesh& device_mesh() const;
  const MeshLayout& layout() const;  ///< of the result

 private:
  friend PendingDTensor start_redistribute(const DTensor& x, Placements placements);
  struct State;
  explicit PendingDTensor(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

/// Starts `x.redistribute(placements)` and returns while its last collective runs. It has only one, unless partial
/// tensors are reduced along several mesh dimensions or reduced and moved. The ranks compare their calls first. A
/// collective of the mesh's ranks, as is `PendingDTensor::wait`; other collectives may start in between. Throws as
/// `redistribute`, and `Error(unsupported)` if the local part is a LocalShardsWrapper. The gradient is redistributed as
/// that of `redistribute`, by backward.
PendingDTensor start_redistribute(const DTensor& x, Placements placements = {});

}  // namespace tessera

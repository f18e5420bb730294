#pragma once
/// \file
/// A tensor on a mesh of ranks: each rank has a local tensor, and the placements say what that is of the whole.
///
/// Law: the local tensor is of the size that `layout()` gives to this rank's coordinate. Without partial placements its
/// elements are those of `layout().local_boxes(coordinate)`, and ranks that have the same boxes have the same elements.
/// With partial ones the whole is what their reduction makes of the ranks' elements.
///
/// Gradients flow through the local tensors: `to_local` gives a tensor that autograd knows, and `redistribute` and ops
/// on DTensors are differentiable. The gradient of a local tensor is placed as the tensor is; but where that is
/// partial, it is the same on all ranks (see `grad_placements`).
///
/// A reference, as an at::Tensor is: copies are the same tensor. Functions that communicate are collectives of the
/// ranks of the mesh. On a rank that isn't in the mesh a DTensor has an empty local tensor, and they do nothing.
/// PyTorch: torch/distributed/tensor/_api.py.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/layout/mesh_layout.h"
#include "tessera/tensor/checkpointable.h"
#include "tessera/tensor/device_mesh.h"
#include "tessera/tensor/local_shards_wrapper.h"

namespace tessera {

struct FromLocalOptions {
  /// Of the whole. Without it every rank is taken to have as much as this one of what is cut.
  std::optional<std::vector<std::int64_t>> size;
  /// Whether to make sure, with a collective, that all ranks say the same and their local tensors fit, and to give
  /// ranks that replicate the elements of the one at coordinate 0 there.
  bool run_check = false;
};

class DTensor {
 public:
  /// The tensor of which each rank has `local`. Not a collective unless it checks. Placements count from the end where
  /// negative; without any, all replicate. Autograd's history of `local` stays.
  /// Throws `Error(invalid_argument)` if there isn't a placement for each mesh dimension, and for a local tensor that
  /// is not of the size that the whole gives it.
  static DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements = {},
                            const FromLocalOptions& options = {});
  /// The tensor of `size` of which each rank has some boxes, wherever they are: the placements say along which mesh
  /// dimensions they differ. It can be redistributed, saved and loaded, but not computed with.
  static DTensor from_local(const LocalShardsWrapper& local, const DeviceMesh& mesh, Placements placements,
                            std::vector<std::int64_t> size);

  /// As `from_local`, for what was computed.
  DTensor(const DeviceMesh& mesh, MeshLayout layout, at::Tensor local);

  const DeviceMesh& device_mesh() const;
  const Placements& placements() const;
  const MeshLayout& layout() const;
  const std::vector<std::int64_t>& size() const;
  std::int64_t size(std::int64_t dim) const;
  std::int64_t dim() const { return static_cast<std::int64_t>(size().size()); }
  std::int64_t numel() const;
  at::ScalarType scalar_type() const;
  bool requires_grad() const;
  DTensor& requires_grad_(bool requires_grad = true);
  /// The boxes that this rank has.
  const std::vector<Box>& local_chunks() const;

  /// The local tensor, which autograd knows: its gradient is placed as `grad_placements()`, or as is said here. Throws
  /// `Error(unsupported)` where it is a LocalShardsWrapper.
  at::Tensor to_local(const Placements& grad_placements = {}) const;
  const at::Tensor& local_tensor() const;  ///< without a choice
  /// Null unless the local part is one.
  const LocalShardsWrapper* local_shards() const;
  /// The whole, on every rank. A collective.
  at::Tensor full_tensor(const Placements& grad_placements = {}) const;
  /// The same tensor under other placements, by the cheapest way there is (see `plan_redistribution`). Without
  /// placements all replicate. The result has the same local tensor where nothing changes. A collective.
  DTensor redistribute(Placements placements = {}) const;

  /// The gradient of a leaf, placed as `grad_placements()`; undefined if there is none.
  std::optional<DTensor> grad() const;
  /// How the gradient of the local tensor is placed: as this tensor, but replicated where that is partial.
  Placements grad_placements() const;
  /// Without history; the same elements.
  DTensor detach() const;

  /// What a state dict holds of it: saved box by box, and loaded in place. Throws `Error(invalid_argument)` while it is
  /// partial: PyTorch saves what rank 0 happens to have.
  std::shared_ptr<Checkpointable> checkpointable() const;
  /// The DTensor whose `checkpointable()` that is; nothing if it is of another kind.
  static std::optional<DTensor> from_checkpointable(const std::shared_ptr<Checkpointable>& tensor);

  /// "DTensor of size [4, 6] as [S(0), R] on DeviceMesh(dp=2, tp=2)"
  std::string to_string() const;

 private:
  struct State;
  explicit DTensor(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

/// The tensor that the mesh's first rank has, cut; what others bring must have its size, dtype and device, and is not
/// looked at. A leaf that needs a gradient if `tensor` does. Without placements all replicate. A collective of the
/// mesh's ranks. Throws `Error(invalid_argument)` for partial placements, and on all ranks if their tensors differ.
DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements = {});

std::ostream& operator<<(std::ostream& out, const DTensor& tensor);

}  // namespace tessera

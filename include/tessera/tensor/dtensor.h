#pragma once
/// \file
/// A tensor distributed over a mesh of ranks: each rank has a local tensor, and placements relate it to the full
/// tensor.
///
/// Law: the local tensor has the size that `layout()` gives for this rank's coordinate. Without partial placements, its
/// elements are those of `layout().local_boxes(coordinate)`, and ranks with the same boxes have the same elements. With
/// partial placements, reducing the ranks' elements gives the full tensor.
///
/// Gradients flow through the local tensors: `to_local` returns a tensor that autograd tracks, and `redistribute` and
/// the ops on DTensors are differentiable. The gradient of a local tensor is placed as the tensor; for partial
/// placements it is replicated (see `grad_placements`).
///
/// A reference, as at::Tensor: copies are the same tensor. Functions that communicate are collectives of the mesh's
/// ranks. On a rank outside of the mesh, a DTensor has an empty local tensor (a scalar 0 if its size is []), and these
/// functions do nothing. Autograd tracks it there as well, with gradients of 0, so that all ranks may call backward().
/// PyTorch: torch/distributed/tensor/_api.py.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/layout/mesh_layout.h"
#include "tessera/tensor/checkpointable.h"
#include "tessera/tensor/device_mesh.h"
#include "tessera/tensor/local_shards_wrapper.h"

namespace tessera {

struct FromLocalOptions {
  /// Size of the full tensor. If not given, every rank is assumed to have shards of the same size as this rank.
  std::optional<std::vector<std::int64_t>> size;
  /// If true, a collective checks that all ranks pass the same arguments, that dtype, kind of device and requires_grad
  /// of the local tensors are equal and that their sizes fit, and broadcasts replicated elements from coordinate 0 of
  /// their mesh dimension.
  bool run_check = false;
  /// The placements of the local tensor's gradient, by default `DTensor::grad_placements()`. If set, the local tensor
  /// of the result is a view of the one that was passed.
  Placements grad_placements = {};
};

/// Options of `DTensor::redistribute`. PyTorch: its arguments.
struct RedistributeOptions {
  /// The dtype in which elements are sent, and of the result; by default that of the tensor.
  std::optional<at::ScalarType> forward_dtype = std::nullopt;
  /// The dtype in which the gradient is sent; by default that of the tensor, to which the gradient is converted after.
  std::optional<at::ScalarType> backward_dtype = std::nullopt;
  /// Whether the ranks compare their calls; see `redistribute`.
  bool compares_calls = true;
};

class DTensor {
 public:
  /// Creates a DTensor from each rank's local tensor. A collective only with `run_check`. Negative shard dimensions
  /// count from the end; empty `placements` replicate along every mesh dimension. Keeps the autograd history of
  /// `local`. Throws `Error(invalid_argument)` unless there is a placement for each mesh dimension and the local tensor
  /// has the size that the full size implies.
  static DTensor from_local(const at::Tensor& local, const DeviceMesh& mesh, Placements placements = {},
                            const FromLocalOptions& options = {});
  /// Creates a DTensor of `size` from each rank's boxes, which may be anywhere in it. The placements state along which
  /// mesh dimensions the ranks' boxes differ. The result can be redistributed, saved and loaded; ops refuse it. A rank
  /// without shards knows the tensor's dtype only if it is given; saves and loads do not need it. Does not communicate.
  /// Throws `Error(invalid_argument)` for a partial placement, a shard outside of `size`, a shard of another dtype than
  /// `dtype`, and as MeshLayout.
  static DTensor from_local(const LocalShardsWrapper& local, const DeviceMesh& mesh, Placements placements,
                            std::vector<std::int64_t> size, std::optional<at::ScalarType> dtype = std::nullopt);

  /// Creates a DTensor from a computed local tensor, as `from_local`.
  DTensor(const DeviceMesh& mesh, MeshLayout layout, at::Tensor local);

  const DeviceMesh& device_mesh() const;
  const Placements& placements() const;
  const MeshLayout& layout() const;
  const std::vector<std::int64_t>& size() const;
  std::int64_t size(std::int64_t dim) const;
  std::int64_t dim() const { return static_cast<std::int64_t>(size().size()); }
  std::int64_t numel() const;
  /// Throws `Error(unsupported)` on a rank that does not know it: see `from_local` of local shards.
  at::ScalarType scalar_type() const;
  /// Returns the device of the local tensor or shards; that of the mesh, without an index, if this rank has none.
  at::Device device() const;
  // These describe a full tensor that is stored as the local tensor is: with the same order of dimensions, and the same
  // gaps as a local tensor that is a slice of another. They throw `Error(unsupported)` if the local part is a
  // LocalShardsWrapper.
  std::vector<std::int64_t> stride() const;  ///< in elements
  std::int64_t storage_offset() const;       ///< in elements, of the first one
  bool is_contiguous() const;
  /// Returns whether the local tensor is in pinned memory. Throws as `stride`.
  bool is_pinned() const;
  bool requires_grad() const;
  DTensor& requires_grad_(bool requires_grad = true);
  /// Returns the boxes that this rank has.
  const std::vector<Box>& local_chunks() const;

  /// Returns the local tensor, tracked by autograd. Its gradient is taken to have the given placements, by default
  /// `grad_placements()`. Throws `Error(unsupported)` if the local part is a LocalShardsWrapper.
  at::Tensor to_local(const Placements& grad_placements = {}) const;
  const at::Tensor& local_tensor() const;  ///< the same, always with the default
  /// Returns the local part if it is a LocalShardsWrapper, otherwise null.
  const LocalShardsWrapper* local_shards() const;
  /// Returns the full tensor on every rank. A collective.
  at::Tensor full_tensor(const Placements& grad_placements = {}) const;
  /// Returns the same tensor with other placements, at the least cost (see `plan_redistribution`). Empty `placements`
  /// replicate. If nothing changes, the result shares the local tensor. A collective. If `compares_calls` is false, the
  /// ranks do not compare their calls, which saves a round trip; then a rank that passes other arguments is not noticed
  /// before the others wait for it. Tensor parallel layers pass false, because their calls follow from calls that were
  /// compared. May be differentiated any number of times.
  DTensor redistribute(Placements placements = {}, bool compares_calls = true) const;
  /// As above. Throws `Error(unsupported)` for another dtype of a LocalShardsWrapper.
  DTensor redistribute(Placements placements, const RedistributeOptions& options) const;

  /// Returns the gradient of a leaf, placed as `grad_placements()`; nullopt if there is none.
  std::optional<DTensor> grad() const;
  /// Returns the placements of the local tensor's gradient: those of this tensor, with partial ones replicated.
  Placements grad_placements() const;
  /// Returns a DTensor with the same elements and no autograd history.
  DTensor detach() const;
  /// Gives this tensor and all references to it another layout. `change` changes the local tensor in place, to the size
  /// that the layout implies. For ops that change a size in place, such as `squeeze_`. Throws as `to_local`.
  void change_in_place(MeshLayout layout, FunctionRef<void(const at::Tensor& local)> change) const;

  /// Returns the form in which state dicts hold this tensor: saved box by box and loaded in place. Throws
  /// `Error(invalid_argument)` if a placement is partial; PyTorch saves rank 0's elements then.
  std::shared_ptr<Checkpointable> checkpointable() const;
  /// Returns the DTensor whose `checkpointable()` this is; nullopt for another kind.
  static std::optional<DTensor> from_checkpointable(const std::shared_ptr<Checkpointable>& tensor);

  /// Returns "DTensor of size [4, 6] as [S(0), R] on DeviceMesh(dp=2, tp=2)".
  std::string to_string() const;

 private:
  struct State;
  explicit DTensor(std::shared_ptr<State> state) : state_(std::move(state)) {}
  DTensor redistributed(MeshLayout target, const RedistributeOptions& options) const;
  std::shared_ptr<State> state_;
};

/// Distributes the tensor of one rank over the mesh. The rank has the coordinate `src_data_rank` in every mesh
/// dimension; by default it is the mesh's first. The other ranks' tensors must have the same size, dtype, kind of
/// device and requires_grad; their elements are ignored. The result is a leaf that requires grad if `tensor` does, and
/// is on meta if `tensor` is. Empty `placements` replicate. A collective of the mesh's ranks. If `src_data_rank` is
/// nullopt, each rank instead takes its part of its own tensor, without communication. Throws `Error(invalid_argument)`
/// for partial placements, for a tensor that is not a leaf, and for a rank that a mesh dimension does not have; if the
/// ranks' tensors differ, every rank throws it. A rank outside of the mesh may pass an undefined tensor if it calls no
/// ops with the result, whose number of dimensions it does not know.
DTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements = {},
                          std::optional<std::int64_t> src_data_rank = 0);

/// Returns the size of the full tensor whose local tensor on this rank has `local_size`: the ranks' lengths add up
/// along the mesh dimensions that shard. Any lengths are permitted, while those of a DTensor follow from the full size.
/// A collective of the mesh's ranks. Every rank throws `Error(invalid_argument)` if the lengths of a dimension differ
/// along a mesh dimension that does not shard it, or there is not one placement for each mesh dimension. On a rank
/// outside of the mesh, returns `local_size`. PyTorch: compute_global_tensor_shape in
/// torch/distributed/tensor/_utils.py, on meshes of one dimension.
std::vector<std::int64_t> compute_global_tensor_shape(const std::vector<std::int64_t>& local_size,
                                                      const DeviceMesh& mesh, const Placements& placements);

std::ostream& operator<<(std::ostream& out, const DTensor& tensor);

}  // namespace tessera

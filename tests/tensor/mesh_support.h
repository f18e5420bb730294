#pragma once
// Expected local tensors of DTensors.

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>

#include <vector>

#include "layout/mesh_cases.h"
#include "tessera/layout/mesh_layout.h"
#include "tessera/tensor/device_mesh.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/internal/box_view.h"

namespace tessera::testing {

// Each element is its index plus 1.
inline at::Tensor indexed(const Sizes& size) {
  std::int64_t count = 1;
  for (const std::int64_t length : size) count *= length;
  return at::arange(1, count + 1, at::kDouble).view(size);
}

// Returns the elements of `full` that the rank at a coordinate has, box by box.
inline at::Tensor part_of(const at::Tensor& full, const MeshLayout& layout, const Sizes& coordinate) {
  at::Tensor part = at::empty(layout.local_shape(coordinate).sizes, full.options().requires_grad(false));
  for (const LocalBox& box : layout.local_boxes(coordinate)) {
    box_view(part, {box.local_offsets, box.box.sizes}).copy_(box_view(full.detach(), box.box));
  }
  return part;
}

// Returns a local tensor of `full` under `layout`. For partial placements the ranks' elements differ; reducing them
// gives `full`, exactly for small integers.
inline at::Tensor local_of(const at::Tensor& full, const MeshLayout& layout, const Sizes& coordinate) {
  at::Tensor part = part_of(full, layout, coordinate);
  for (std::size_t m = coordinate.size(); m-- > 0;) {  // the first is reduced first
    if (!layout.placements()[m].is_partial()) continue;
    const std::int64_t n = layout.mesh_shape()[m];
    switch (layout.placements()[m].reduce_op()) {
      case ReduceOp::sum:
        part = coordinate[m] == 0 ? part * n : -part;  // n * x - (n - 1) * x
        break;
      case ReduceOp::average:
        part = coordinate[m] == 0 ? part * (2 * n - 1) : -part;
        break;
      case ReduceOp::max:
        part = part - coordinate[m];
        break;
      case ReduceOp::min:
        part = part + coordinate[m];
        break;
      case ReduceOp::product:
        if (coordinate[m] != 0) part = at::ones_like(part);
        break;
    }
  }
  return part;
}

// Returns `full` as a DTensor with these placements.
inline DTensor on_mesh(const at::Tensor& full, const DeviceMesh& mesh, const Placements& placements) {
  const MeshLayout layout(full.sizes().vec(), mesh.shape(), placements);
  return DTensor::from_local(local_of(full, layout, *mesh.coordinate()), mesh, placements, {layout.size()});
}

}  // namespace tessera::testing

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "tensor/dtensor/local_outside.h"
#include "tensor/dtensor/mesh_exchange.h"
#include "tensor/dtensor/random_numbers.h"
#include "tensor/dtensor_ops/calls.h"
#include "tensor/torch_errors.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/tensor/dtensor_factories.h"
#include "tessera/tensor/internal/box_view.h"

namespace tessera::dtensor {

namespace {

using CreateLocal = FunctionRef<at::Tensor(const MeshLayout& layout, const at::TensorOptions& options)>;

// `create` returns the local tensor under a layout without partial placements.
DTensor created(const Sizes& size, const DeviceMesh& mesh, Placements placements, const at::TensorOptions& options,
                CreateLocal create) {
  if (placements.empty()) placements.resize(static_cast<std::size_t>(mesh.ndim()));
  const MeshLayout wanted(size, mesh.shape(), normalized(placements, size.size()));
  Placements unreduced = wanted.placements();
  for (Placement& placement : unreduced) {
    if (placement.is_partial()) placement = Placement::replicate();
  }
  const MeshLayout layout(size, mesh.shape(), unreduced);
  at::TensorOptions plain = options.requires_grad(false);
  if (!options.has_device()) plain = plain.device(mesh.device_type());
  try {
    const at::Tensor local = mesh.has_this_rank() ? create(layout, plain) : local_outside(layout.size(), plain);
    // No input is redistributed, which an ExplicitRedistributionContext would refuse.
    const DTensor result(mesh, wanted, redistribute_local(mesh, layout, wanted, local));
    return result.detach().requires_grad_(options.requires_grad());
  } catch (...) {
    rethrow_as_error(fmt::format("DTensor of size {}", shape_to_string(size)));
  }
}

}  // namespace

DTensor empty(const Sizes& size, const DeviceMesh& mesh, Placements placements, const at::TensorOptions& options) {
  return created(size, mesh, std::move(placements), options, [&](const MeshLayout& layout, const at::TensorOptions& o) {
    return at::empty(layout.local_shape(*mesh.coordinate()).sizes, o);
  });
}

DTensor full(const Sizes& size, const at::Scalar& value, const DeviceMesh& mesh, Placements placements,
             const at::TensorOptions& options) {
  // Also for ranks outside of the mesh, which do not see `value`.
  const at::TensorOptions typed = options.has_dtype() ? options : options.dtype(at::full({}, value).dtype());
  return created(size, mesh, std::move(placements), typed, [&](const MeshLayout& layout, const at::TensorOptions& o) {
    return at::full(layout.local_shape(*mesh.coordinate()).sizes, value, o);
  });
}

DTensor zeros(const Sizes& size, const DeviceMesh& mesh, Placements placements, const at::TensorOptions& options) {
  return full(size, 0, mesh, std::move(placements), options.dtype(options.dtype()));
}

DTensor ones(const Sizes& size, const DeviceMesh& mesh, Placements placements, const at::TensorOptions& options) {
  return full(size, 1, mesh, std::move(placements), options.dtype(options.dtype()));
}

namespace {

DTensor random(const Sizes& size, const DeviceMesh& mesh, PhiloxGenerator& generator, Placements placements,
               const at::TensorOptions& options, Distribution distribution) {
  DTensor result =
      created(size, mesh, std::move(placements), options, [&](const MeshLayout& layout, const at::TensorOptions& o) {
        return random_local(layout, *mesh.coordinate(), o, generator, distribution);
      });
  advance(generator, result.numel());
  return result;
}

at::TensorOptions options_of(const DTensor& like) {
  return at::TensorOptions().dtype(like.scalar_type()).device(like.device());
}

}  // namespace

DTensor rand(const Sizes& size, const DeviceMesh& mesh, PhiloxGenerator& generator, Placements placements,
             const at::TensorOptions& options) {
  return random(size, mesh, generator, std::move(placements), options, Distribution::uniform);
}

DTensor randn(const Sizes& size, const DeviceMesh& mesh, PhiloxGenerator& generator, Placements placements,
              const at::TensorOptions& options) {
  return random(size, mesh, generator, std::move(placements), options, Distribution::normal);
}

DTensor eye_(const DTensor& x) {
  if (x.dim() != 2)
    fail(ErrorCode::invalid_argument, "eye_ of size {}: expected two dimensions", shape_to_string(x.size()));
  const at::NoGradGuard no_grad;
  return call_in_place(
      "eye_", {&x, 1}, [](Inputs inputs) { return rules::elementwise("eye_", inputs, rules::Linearity::none); },
      [&](Inputs inputs) -> at::Tensor {
        const at::Tensor& local = inputs[0].local_tensor();
        local.zero_();
        for (const LocalBox& box : x.layout().local_boxes(*x.device_mesh().coordinate())) {
          const at::Tensor elements = box_view(local, {box.local_offsets, box.box.sizes});
          const std::int64_t first_column = box.box.offsets[0] - box.box.offsets[1];  // of row 0, within the box
          if (first_column > -elements.size(0) && first_column < elements.size(1))
            elements.diagonal(first_column).fill_(1);
        }
        return local;
      });
}

DTensor empty_like(const DTensor& like, const at::TensorOptions& options) {
  return empty(like.size(), like.device_mesh(), like.placements(), options_of(like).merge_in(options));
}
DTensor zeros_like(const DTensor& like, const at::TensorOptions& options) { return full_like(like, 0, options); }
DTensor ones_like(const DTensor& like, const at::TensorOptions& options) { return full_like(like, 1, options); }
DTensor full_like(const DTensor& like, const at::Scalar& value, const at::TensorOptions& options) {
  return full(like.size(), value, like.device_mesh(), like.placements(), options_of(like).merge_in(options));
}

DTensor rand_like(const DTensor& like, PhiloxGenerator& generator, const at::TensorOptions& options) {
  return rand(like.size(), like.device_mesh(), generator, like.placements(), options_of(like).merge_in(options));
}
DTensor randn_like(const DTensor& like, PhiloxGenerator& generator, const at::TensorOptions& options) {
  return randn(like.size(), like.device_mesh(), generator, like.placements(), options_of(like).merge_in(options));
}

namespace {

// Returns the greatest integer below `end` that the dtype has.
std::int64_t greatest_below(std::int64_t end, at::ScalarType dtype) {
  const std::int64_t last = end - 1;
  const int unused =
      static_cast<int>(std::bit_width(static_cast<std::uint64_t>(last < 0 ? ~last : last))) - digits_of(dtype);
  return unused > 0 ? last >> unused << unused : last;
}

}  // namespace

DTensor randint_like(const DTensor& like, PhiloxGenerator& generator, std::int64_t low, std::int64_t high,
                     const at::TensorOptions& options) {
  if (low >= high) fail(ErrorCode::invalid_argument, "randint_like from {} to {}: expected an end after it", low, high);
  const DeviceMesh& mesh = like.device_mesh();
  const double range = static_cast<double>(high) - static_cast<double>(low);
  const auto create = [&](const MeshLayout& layout, const at::TensorOptions& o) -> at::Tensor {
    const at::Tensor numbers =
        random_local(layout, *mesh.coordinate(), o.dtype(at::kDouble), generator, Distribution::uniform);
    const std::int64_t last = greatest_below(high, c10::typeMetaToScalarType(o.dtype()));
    return (numbers * range).floor().to(at::kLong).add(low).clamp_max(last).to(o);
  };
  DTensor result = created(like.size(), mesh, like.placements(), options_of(like).merge_in(options), create);
  advance(generator, result.numel());
  return result;
}

namespace {

// Returns the placements of a new tensor of `size`.
Placements placements_for(const DTensor& like, const Sizes& size) {
  return size == like.size() ? like.placements() : Placements();
}

}  // namespace

DTensor new_empty(const DTensor& like, const Sizes& size, const at::TensorOptions& options) {
  return empty(size, like.device_mesh(), placements_for(like, size), options_of(like).merge_in(options));
}
DTensor new_zeros(const DTensor& like, const Sizes& size, const at::TensorOptions& options) {
  return new_full(like, size, 0, options);
}
DTensor new_ones(const DTensor& like, const Sizes& size, const at::TensorOptions& options) {
  return new_full(like, size, 1, options);
}
DTensor new_full(const DTensor& like, const Sizes& size, const at::Scalar& value, const at::TensorOptions& options) {
  return full(size, value, like.device_mesh(), placements_for(like, size), options_of(like).merge_in(options));
}

namespace {

// Returns the strides of a dense tensor with dimensions in the order of `strides`.
Sizes dense_strides(const Sizes& size, const Sizes& strides) {
  Sizes inner(size.size());  // dimensions from the outermost to the innermost
  std::iota(inner.begin(), inner.end(), std::int64_t{0});
  const auto stride = [&](std::int64_t dim) { return strides[static_cast<std::size_t>(dim)]; };
  std::stable_sort(inner.begin(), inner.end(), [&](std::int64_t a, std::int64_t b) { return stride(a) > stride(b); });
  Sizes dense(size.size());
  std::int64_t next = 1;
  for (auto dim = inner.rbegin(); dim != inner.rend(); ++dim) {
    dense[static_cast<std::size_t>(*dim)] = next;
    next *= std::max<std::int64_t>(size[static_cast<std::size_t>(*dim)], 1);
  }
  return dense;
}

// Returns whether the tensor is sharded or replicated, with local tensors of one size.
bool is_even(const DTensor& x) {
  const Placements& placements = x.placements();
  return std::none_of(placements.begin(), placements.end(), [](const Placement& each) { return each.is_partial(); }) &&
         is_tensor_evenly_shardable(x.size(), x.device_mesh().shape(), placements);
}

}  // namespace

DTensor new_empty_strided(const DTensor& like, const Sizes& size, const Sizes& strides,
                          const at::TensorOptions& options) {
  if (strides.size() != size.size()) {
    fail(ErrorCode::invalid_argument, "new tensor of size {} with strides {}: expected a stride for each dimension",
         shape_to_string(size), shape_to_string(strides));
  }
  const bool is_placed = size == like.size() && is_even(like) && dense_strides(size, strides) == strides;
  const auto create = [&](const MeshLayout& layout, const at::TensorOptions& o) {
    const Sizes local = layout.local_shape(*like.device_mesh().coordinate()).sizes;
    return at::empty_strided(local, is_placed ? dense_strides(local, strides) : strides, o);
  };
  return created(size, like.device_mesh(), is_placed ? like.placements() : Placements(),
                 options_of(like).merge_in(options), create);
}

}  // namespace tessera::dtensor

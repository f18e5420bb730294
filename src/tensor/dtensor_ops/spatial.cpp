#include "tessera/tensor/dtensor_ops/spatial.h"

#include <ATen/ops/_upsample_bicubic2d_aa.h>
#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/_upsample_nearest_exact1d.h>
#include <ATen/ops/_upsample_nearest_exact2d.h>
#include <ATen/ops/_upsample_nearest_exact3d.h>
#include <ATen/ops/affine_grid_generator.h>
#include <ATen/ops/grid_sampler.h>
#include <ATen/ops/upsample_bicubic2d.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <ATen/ops/upsample_linear1d.h>
#include <ATen/ops/upsample_nearest1d.h>
#include <ATen/ops/upsample_nearest2d.h>
#include <ATen/ops/upsample_nearest3d.h>
#include <ATen/ops/upsample_trilinear3d.h>

#include <torch/version.h>

#if __has_include(<ATen/ops/_upsample_lanczos2d_aa.h>)
#include <ATen/ops/_upsample_lanczos2d_aa.h>
#define TESSERA_HAS_LANCZOS
#endif

#include <algorithm>
#include <numeric>

#include "tensor/dtensor_ops/calls.h"
#include "tensor/dtensor_rules/shared_dims.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_ops/convolution.h"

namespace tessera::dtensor {

namespace {

// Returns the number of dimensions after batch and channels.
std::size_t spatial_dims(const char* op, const DTensor& x, std::size_t sizes) {
  const std::size_t dims = x.size().size() - std::min<std::size_t>(x.size().size(), 2);
  const bool is_empty = std::count(x.size().begin() + std::min<std::ptrdiff_t>(x.dim(), 2), x.size().end(), 0) != 0;
  if (dims < 1 || dims > 3 || sizes != dims || is_empty) {
    fail(ErrorCode::invalid_argument,
         "{} of size {} with {} lengths: expected batch, channels and one to three dimensions with elements, and a "
         "length for each of those",
         op, shape_to_string(x.size()), sizes);
  }
  return dims;
}

// Adds the strategies under which the first input and the result are partial. Integers are rounded.
OpRule linear_in_first(OpRule rule, Inputs inputs) {
  const std::size_t first = 0;
  if (!at::isFloatingType(inputs[0].scalar_type())) return rule;
  rules::add_partials(rule, inputs, {&first, 1}, rules::Partials::linear);
  return rule;
}

// `f` takes a local tensor, and gives the dimensions after the channels the lengths `size`.
template <typename F>
DTensor resampled(const char* op, const DTensor& x, const Sizes& size, const F& f) {
  Sizes over(size.size());
  std::iota(over.begin(), over.end(), 2);
  const auto rule = [&](Inputs inputs) {
    OpRule given = rules::along_dims(inputs, over);
    std::copy(size.begin(), size.end(), given.output_size.begin() + 2);
    return linear_in_first(std::move(given), inputs);
  };
  return call(op, {&x, 1}, rule, [&](Inputs inputs) -> at::Tensor {
    const at::Tensor& local = inputs[0].local_tensor();
    if (local.numel() > 0) return f(local);
    Sizes result = {local.size(0), local.size(1)};  // ATen refuses tensors without channels
    result.insert(result.end(), size.begin(), size.end());
    return zeros_from(result, {local});
  });
}

at::Tensor nearest(const at::Tensor& t, const Sizes& size) {
  if (size.size() == 1) return at::upsample_nearest1d(t, size);
  return size.size() == 2 ? at::upsample_nearest2d(t, size) : at::upsample_nearest3d(t, size);
}

at::Tensor nearest_exact(const at::Tensor& t, const Sizes& size) {
  if (size.size() == 1) return at::_upsample_nearest_exact1d(t, size);
  return size.size() == 2 ? at::_upsample_nearest_exact2d(t, size) : at::_upsample_nearest_exact3d(t, size);
}

at::Tensor linear(const at::Tensor& t, const Sizes& size, bool align_corners) {
  if (size.size() == 1) return at::upsample_linear1d(t, size, align_corners);
  return size.size() == 2 ? at::upsample_bilinear2d(t, size, align_corners)
                          : at::upsample_trilinear3d(t, size, align_corners);
}

at::Tensor lanczos([[maybe_unused]] const at::Tensor& t, [[maybe_unused]] const Sizes& size,
                   [[maybe_unused]] bool align_corners) {
#ifdef TESSERA_HAS_LANCZOS
  return at::_upsample_lanczos2d_aa(t, size, align_corners);
#else
  fail(ErrorCode::unsupported, "interpolate: LibTorch {} has no lanczos interpolation, expected another one",
       TORCH_VERSION);
#endif
}

}  // namespace

DTensor interpolate(const DTensor& x, const Sizes& size, Interpolation mode, bool align_corners, bool antialias) {
  spatial_dims("interpolate", x, size.size());
  const bool is_cubic = mode == Interpolation::bicubic, is_lanczos = mode == Interpolation::lanczos;
  if ((align_corners || antialias) && !is_cubic && !is_lanczos && mode != Interpolation::linear) {
    fail(ErrorCode::invalid_argument, "interpolate with {}: expected linear, bicubic or lanczos interpolation",
         align_corners ? "align_corners" : "antialias");
  }
  if ((is_cubic || is_lanczos || antialias) && size.size() != 2) {
    fail(ErrorCode::invalid_argument, "interpolate of size {}: expected four dimensions for {}",
         shape_to_string(x.size()),
         antialias  ? "antialias"
         : is_cubic ? "bicubic interpolation"
                    : "lanczos interpolation");
  }
  if (is_lanczos && !antialias)
    fail(ErrorCode::invalid_argument, "interpolate without antialias: expected it for lanczos interpolation");
  if (mode == Interpolation::area) return adaptive_avg_pool(x, size);
  return resampled("interpolate", x, size, [&](const at::Tensor& t) {
    switch (mode) {
      case Interpolation::nearest_exact:
        return nearest_exact(t, size);
      case Interpolation::linear:
        return antialias ? at::_upsample_bilinear2d_aa(t, size, align_corners) : linear(t, size, align_corners);
      case Interpolation::bicubic:
        return antialias ? at::_upsample_bicubic2d_aa(t, size, align_corners)
                         : at::upsample_bicubic2d(t, size, align_corners);
      case Interpolation::lanczos:
        return lanczos(t, size, align_corners);
      default:
        return nearest(t, size);
    }
  });
}

namespace {

// ATen's numbers of the modes of grid_sampler.
std::int64_t number_of(Interpolation mode) {
  switch (mode) {
    case Interpolation::linear:
      return 0;
    case Interpolation::nearest:
      return 1;
    case Interpolation::bicubic:
      return 2;
    default:
      fail(ErrorCode::invalid_argument, "grid_sampler: expected nearest, linear or bicubic interpolation");
  }
}

// The rule of grid_sampler: batches are shared, x has channels, and the grid has the other dimensions of the result.
OpRule sampled(Inputs inputs) {
  const Sizes &of_x = inputs[0].size(), &of_grid = inputs[1].size();
  std::vector<rules::SharedDim> dims = {{0, {0, 0}}, {1, {1, std::nullopt}}};
  Sizes size = {of_x[0], of_x[1]};
  for (std::size_t d = 1; d + 1 < of_grid.size(); ++d) {
    dims.push_back({size.size(), {std::nullopt, d}});
    size.push_back(of_grid[d]);
  }
  return linear_in_first(rules::shared(inputs, size, dims), inputs);
}

}  // namespace

DTensor grid_sampler(const DTensor& x, const DTensor& grid, Interpolation mode, GridPadding padding,
                     bool align_corners) {
  const std::vector<DTensor> inputs = {x, grid};
  const std::int64_t dims = x.dim() - 2;
  const bool fits = (dims == 2 || dims == 3) && grid.dim() == x.dim() && grid.size(-1) == dims &&
                    grid.size(0) == x.size(0) && std::count(x.size().begin() + 2, x.size().end(), 0) == 0;
  if (!fits) {
    rules::refuse_sizes("grid_sampler", inputs,
                        "[n, channels, height, width] and [n, rows, columns, 2], or both with depth and 3 for 2, and "
                        "elements in each channel");
  }
  const std::int64_t number = number_of(mode);
  if (dims == 3 && mode == Interpolation::bicubic)
    fail(ErrorCode::invalid_argument, "grid_sampler of size {}: expected four dimensions for bicubic interpolation",
         shape_to_string(x.size()));
  return call("grid_sampler", inputs, sampled, [&](Inputs placed) -> at::Tensor {
    const std::vector<at::Tensor> locals = locals_of(placed);
    if (locals[0].numel() > 0 && locals[1].numel() > 0)
      return at::grid_sampler(locals[0], locals[1], number, static_cast<std::int64_t>(padding), align_corners);
    Sizes size = {locals[0].size(0), locals[0].size(1)};
    for (std::int64_t d = 1; d <= dims; ++d) size.push_back(locals[1].size(d));
    return zeros_from(size, locals);
  });
}

DTensor affine_grid_generator(const DTensor& theta, const Sizes& size, bool align_corners) {
  const auto dims = static_cast<std::int64_t>(size.size()) - 2;
  const bool fits = (dims == 2 || dims == 3) && theta.size() == Sizes{size[0], dims, dims + 1} &&
                    std::all_of(size.begin(), size.end(), [](std::int64_t length) { return length > 0; });
  if (!fits) {
    fail(ErrorCode::invalid_argument,
         "affine_grid_generator of size {} for images of size {}: expected [n, 2, 3] for [n, channels, height, width], "
         "or [n, 3, 4] with depth",
         shape_to_string(theta.size()), shape_to_string(size));
  }
  const auto rule = [&](Inputs inputs) {
    Sizes grid = {size[0]};
    grid.insert(grid.end(), size.begin() + 2, size.end());
    grid.push_back(dims);
    const std::vector<rules::SharedDim> kept = {{0, {0}}};
    return linear_in_first(rules::shared(inputs, grid, kept), inputs);
  };
  return call("affine_grid_generator", {&theta, 1}, rule, [&](Inputs inputs) {
    return even_if_empty(inputs[0].local_tensor(), {0}, [&](const at::Tensor& local) {
      Sizes here = size;
      here[0] = local.size(0);
      return at::affine_grid_generator(local, here, align_corners);
    });
  });
}

}  // namespace tessera::dtensor

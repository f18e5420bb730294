// Interpolation.

#include <ATen/ops/upsample_bicubic2d.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <ATen/ops/upsample_linear1d.h>
#include <ATen/ops/upsample_nearest1d.h>
#include <ATen/ops/upsample_nearest2d.h>
#include <ATen/ops/upsample_nearest3d.h>
#include <ATen/ops/upsample_trilinear3d.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>

#include "tensor/dtensor_ops/calls.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_ops/convolution.h"

namespace tessera::dtensor {

namespace {

// Returns the number of dimensions after batch and channels.
std::size_t spatial_dims(const char* op, const DTensor& x, std::size_t sizes) {
  const std::size_t dims = x.size().size() - std::min<std::size_t>(x.size().size(), 2);
  if (dims < 1 || dims > 3 || sizes != dims) {
    fail(
        ErrorCode::invalid_argument,
        "{} of size {} with {} lengths: expected batch, channels and one to three dimensions, and a length for each of "
        "those",
        op, shape_to_string(x.size()), sizes);
  }
  return dims;
}

// `f` takes a local tensor, and gives the dimensions after the channels the lengths `size`.
template <typename F>
DTensor spatial(const char* op, const DTensor& x, const Sizes& size, const F& f) {
  Sizes over(size.size());
  std::iota(over.begin(), over.end(), 2);
  const auto rule = [&](Inputs inputs) {
    OpRule given = rules::along_dims(inputs, over);
    std::copy(size.begin(), size.end(), given.output_size.begin() + 2);
    return given;
  };
  return call(op, {&x, 1}, rule, [&](Inputs inputs) -> at::Tensor {
    const at::Tensor& local = inputs[0].local_tensor();
    if (local.numel() > 0) return f(local);
    // ATen refuses tensors without channels.
    Sizes result = {local.size(0), local.size(1)};
    result.insert(result.end(), size.begin(), size.end());
    return at::zeros(result, local.options().requires_grad(false)).add(local.sum());  // tracked by autograd
  });
}

at::Tensor nearest(const at::Tensor& t, const Sizes& size) {
  if (size.size() == 1) return at::upsample_nearest1d(t, size);
  return size.size() == 2 ? at::upsample_nearest2d(t, size) : at::upsample_nearest3d(t, size);
}

at::Tensor linear(const at::Tensor& t, const Sizes& size, bool align_corners) {
  if (size.size() == 1) return at::upsample_linear1d(t, size, align_corners);
  return size.size() == 2 ? at::upsample_bilinear2d(t, size, align_corners)
                          : at::upsample_trilinear3d(t, size, align_corners);
}

}  // namespace

DTensor interpolate(const DTensor& x, const Sizes& size, Interpolation mode, bool align_corners) {
  spatial_dims("interpolate", x, size.size());
  if (mode == Interpolation::area) return adaptive_avg_pool(x, size);
  if (mode == Interpolation::bicubic && size.size() != 2) {
    fail(ErrorCode::invalid_argument, "interpolate of size {}: expected four dimensions for bicubic interpolation",
         shape_to_string(x.size()));
  }
  return spatial("interpolate", x, size, [&](const at::Tensor& t) {
    if (mode == Interpolation::nearest) return nearest(t, size);
    return mode == Interpolation::linear ? linear(t, size, align_corners)
                                         : at::upsample_bicubic2d(t, size, align_corners);
  });
}

}  // namespace tessera::dtensor

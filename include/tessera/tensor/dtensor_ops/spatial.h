#pragma once
/// \file
/// Resampling of images and signals that are DTensors: [n, channels, length], [n, channels, height, width] or
/// [n, channels, depth, height, width]. Included by tessera/tensor/dtensor_ops.h; pooling is in
/// tessera/tensor/dtensor_ops/convolution.h.
///
/// Shards of n and of the channels stay where they are; the ops unshard the dimensions after them. They are linear,
/// grid_sampler in x alone.

#include <cstdint>
#include <vector>

#include "tessera/tensor/dtensor.h"

namespace tessera::dtensor {

/// `nearest` rounds places down, `nearest_exact` to the nearest; `linear` is also bilinear and trilinear. `lanczos`
/// takes images without depth, always with `antialias`; LibTorch 1.13 and 2.6 lack it, and it throws
/// `Error(unsupported)`.
enum class Interpolation : std::uint8_t { nearest, nearest_exact, linear, bicubic, lanczos, area };
/// Resamples to `size`, the lengths after the channels. `align_corners` and `antialias`, which averages where x is made
/// smaller, are for linear, bicubic and lanczos interpolation, and `antialias` for images without depth: with others
/// they throw `Error(invalid_argument)`. PyTorch: nn.functional.interpolate.
DTensor interpolate(const DTensor& x, const std::vector<std::int64_t>& size,
                    Interpolation mode = Interpolation::nearest, bool align_corners = false, bool antialias = false);

/// What an image is outside of itself: 0, its edge, or its reflection.
enum class GridPadding : std::uint8_t { zeros, border, reflection };
/// Samples images x [n, channels, height, width] at the places that the grid [n, rows, columns, 2] gives for each pixel
/// of the result, [n, channels, rows, columns]: column and row in x from -1 to 1, at the centers of the outermost
/// pixels if `align_corners`, else at their outer edges. With depth, x has it before the height, the grid gives 3
/// numbers, the depth last, and mode bicubic is refused. `mode` is nearest, linear or bicubic. The result can be
/// sharded as the grid is. PyTorch: nn.functional.grid_sample.
DTensor grid_sampler(const DTensor& x, const DTensor& grid, Interpolation mode = Interpolation::linear,
                     GridPadding padding = GridPadding::zeros, bool align_corners = false);
/// Returns the grid for images of `size`, [n, channels, height, width] or with depth, that the matrices theta [n, 2,
/// 3], or [n, 3, 4], transform. PyTorch: nn.functional.affine_grid.
DTensor affine_grid_generator(const DTensor& theta, const std::vector<std::int64_t>& size, bool align_corners = false);

}  // namespace tessera::dtensor

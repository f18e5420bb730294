#pragma once
/// \file
/// Convolution and pooling of DTensors: [n, channels, spatial dimensions...] with one to three spatial dimensions.
///
/// Shards of n and of the channels stay where they are. A convolution also keeps shards of a spatial dimension: the
/// ranks exchange the elements at the edges of their shards. The ops are collectives of the mesh's ranks and throw as
/// `call` does. PyTorch: torch/distributed/tensor/_ops/_conv_ops.py and _tp_conv.py, which exchanges edges along the
/// last dimension, with the nearest ranks.

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::dtensor {

/// One number for each spatial dimension, or one for all.
struct ConvolutionOptions {
  std::vector<std::int64_t> stride = {1};
  std::vector<std::int64_t> padding = {0};
  std::vector<std::int64_t> dilation = {1};
  bool transposed = false;
  std::vector<std::int64_t> output_padding = {0};  ///< of a transposed convolution
  std::int64_t groups = 1;
};

/// Convolves x with weight, [out, in / groups, kernel...] or [in, out / groups, kernel...] if transposed, and adds bias
/// [out]. If the weight is sharded along the output's channels, so is the result; if it is sharded along those of x, as
/// x is, the result is partial. With groups, x, weight, bias and result are sharded by groups if the number of groups
/// is a multiple of the mesh's ranks. PyTorch: `conv1d`, `conv2d`, `conv3d` and their transposed forms.
DTensor convolution(const DTensor& x, const DTensor& weight, const std::optional<DTensor>& bias = std::nullopt,
                    const ConvolutionOptions& options = {});

/// One number for each spatial dimension, or one for all. An empty `stride` equals the kernel.
struct PoolingOptions {
  std::vector<std::int64_t> kernel;
  std::vector<std::int64_t> stride = {};
  std::vector<std::int64_t> padding = {0};
  std::vector<std::int64_t> dilation = {1};  ///< of max_pool
  bool ceil_mode = false;                    ///< keep a last window that does not fit
  bool count_include_pad = true;             ///< of avg_pool
};
// These unshard the spatial dimensions.
DTensor max_pool(const DTensor& x, const PoolingOptions& options);
DTensor avg_pool(const DTensor& x, const PoolingOptions& options);
/// Returns a tensor with these spatial sizes.
DTensor adaptive_avg_pool(const DTensor& x, const std::vector<std::int64_t>& size);
DTensor adaptive_max_pool(const DTensor& x, const std::vector<std::int64_t>& size);
// The same with the index of each maximum, in row-major order of the spatial dimensions. PyTorch: `return_indices`.
ValuesAndIndices max_pool_with_indices(const DTensor& x, const PoolingOptions& options);
ValuesAndIndices adaptive_max_pool_with_indices(const DTensor& x, const std::vector<std::int64_t>& size);
/// Returns a tensor with these spatial sizes. It has each element of x at the place that the same element of `indices`
/// gives, and 0 elsewhere: the inverse of a max_pool_with_indices whose windows do not overlap. Linear in x.
DTensor max_unpool(const DTensor& x, const DTensor& indices, const std::vector<std::int64_t>& size);
/// Max pooling to spatial sizes `size`, by windows of a fixed `kernel` at distances that vary. For two or three spatial
/// dimensions. `samples` [n, channels, spatial dimensions], numbers of [0, 1) of the dtype of x, decide where the
/// windows are: draw them by `rand`.
ValuesAndIndices fractional_max_pool(const DTensor& x, const std::vector<std::int64_t>& kernel,
                                     const std::vector<std::int64_t>& size, const DTensor& samples);

}  // namespace tessera::dtensor

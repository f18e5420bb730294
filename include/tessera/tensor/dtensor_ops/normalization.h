#pragma once
/// \file
/// Normalization of the channels of DTensors, and of rows that may be masked.
///
/// The ops are collectives of the mesh's ranks and throw as `call` does. layer_norm, rms_norm and softmax are in
/// tessera/tensor/dtensor_ops.h.

#include <cstdint>
#include <optional>

#include "tessera/tensor/dtensor.h"

namespace tessera::dtensor {

/// Divides the channels of x [n, channels, ...] into `groups` of equal size and normalizes each group of each batch
/// over its channels and the dimensions after them. weight and bias are [channels]. Computes half precision in float
/// and returns the dtype of x. Shards of n stay, and those of the channels if each rank has full groups, evenly.
DTensor group_norm(const DTensor& x, std::int64_t groups, const std::optional<DTensor>& weight = std::nullopt,
                   const std::optional<DTensor>& bias = std::nullopt, double eps = 1e-5);

struct BatchNormOptions {
  /// Statistics of earlier batches, [channels], both or none. In training they are updated in place, as they are
  /// placed: by `momentum` times the difference to those of x. Otherwise they normalize x.
  std::optional<DTensor> running_mean = std::nullopt, running_var = std::nullopt;
  bool training = false;
  double momentum = 0.1, eps = 1e-5;
};
/// Normalizes each channel of x [n, channels, ...] over all other dimensions. weight and bias are [channels]. Shards of
/// x stay where they are: the ranks exchange the mean and the variance of each channel, as PyTorch's SyncBatchNorm
/// does. Computes half precision in float and returns the dtype of x.
DTensor batch_norm(const DTensor& x, const std::optional<DTensor>& weight = std::nullopt,
                   const std::optional<DTensor>& bias = std::nullopt, const BatchNormOptions& options = {});

/// As `softmax`, but 0, without gradient, where all elements along `dim` are -infinity: rows that are masked entirely.
/// PyTorch: `_safe_softmax`.
DTensor safe_softmax(const DTensor& x, std::int64_t dim);

}  // namespace tessera::dtensor

#pragma once
/// \file
/// The built-in ops on sharded tensors: plain functions, differentiable.
///
/// Law: gathering the result of an op gives the result of the same op on the gathered arguments, up to rounding where
/// the op communicates. Random ops draw from each rank's own generator. Gradients flow to the local shards, and to
/// replicated inputs and parameters: a replicated parameter gets its full gradient on every rank.
///
/// The ops under "Any spec" take sharded tensors of every spec, with any number of shards on a rank, and communicate
/// only where stated. The ops under "Chunk specs" take tensors of a ChunkShardingSpec with one shard on each rank and
/// throw `Error(unsupported)` otherwise. Arguments that do not fit together are `Error(invalid_argument)`; where each
/// rank passes its own inputs, every rank throws.
///
/// Each function here can be overridden: `op_of(ops::relu).register_custom(...)`, see tessera/tensor/op.h. The ops on
/// DTensors (tessera/tensor/dtensor_ops.h) overload with these. PyTorch: torch/distributed/_shard/sharded_tensor/_ops,
/// torch/distributed/_shard/sharding_spec/chunk_sharding_spec_ops (linear, softmax, transpose, view, bmm, layer_norm
/// and chunk as of 1.13).

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tessera/tensor/op.h"
#include "tessera/tensor/partial_tensor.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera::ops {

using tessera::describe;

// ---- Any spec: element by element ----

ShardedTensor abs(const ShardedTensor& input);
ShardedTensor ceil(const ShardedTensor& input);
ShardedTensor cos(const ShardedTensor& input);
ShardedTensor erf(const ShardedTensor& input);
ShardedTensor exp(const ShardedTensor& input);
ShardedTensor expm1(const ShardedTensor& input);
ShardedTensor floor(const ShardedTensor& input);
ShardedTensor gelu(const ShardedTensor& input);
ShardedTensor isfinite(const ShardedTensor& input);
ShardedTensor isinf(const ShardedTensor& input);
ShardedTensor isnan(const ShardedTensor& input);
ShardedTensor log(const ShardedTensor& input);
ShardedTensor log1p(const ShardedTensor& input);
ShardedTensor nan_to_num(const ShardedTensor& input);
ShardedTensor neg(const ShardedTensor& input);
ShardedTensor reciprocal(const ShardedTensor& input);
ShardedTensor relu(const ShardedTensor& input);
ShardedTensor round(const ShardedTensor& input);
ShardedTensor rsqrt(const ShardedTensor& input);
ShardedTensor sigmoid(const ShardedTensor& input);
ShardedTensor sign(const ShardedTensor& input);
ShardedTensor silu(const ShardedTensor& input);
ShardedTensor sin(const ShardedTensor& input);
ShardedTensor sqrt(const ShardedTensor& input);
ShardedTensor square(const ShardedTensor& input);
ShardedTensor tanh(const ShardedTensor& input);

/// Zeros each element with probability `p` and divides the others by 1 - p. Copies the elements if not `training`.
ShardedTensor dropout(const ShardedTensor& input, double p, bool training);

/// An operand of an op: a sharded tensor or a number. At least one of two operands is a sharded tensor; two sharded
/// tensors must be of equal size and spec. The indices of devices in specs may differ, here and in the ops below.
using Operand = std::variant<ShardedTensor, at::Scalar>;
ShardedTensor add(const Operand& a, const Operand& b);
ShardedTensor sub(const Operand& a, const Operand& b);
ShardedTensor mul(const Operand& a, const Operand& b);
ShardedTensor div(const Operand& a, const Operand& b);

/// Replaces elements by `value` where `mask` is true. The mask is bool, replicated, and broadcast to the input's size.
ShardedTensor masked_fill(const ShardedTensor& input, const at::Tensor& mask, const at::Scalar& value);

// ---- Any spec: comparing and copying ----

/// Returns whether both are of one group and have equal metadata and elements. Of the indices of devices, compares
/// those of each rank's own shards. All ranks must call it; all get the same answer.
bool equal(const ShardedTensor& a, const ShardedTensor& b);
struct AllcloseOptions {
  double rtol = 1e-5, atol = 1e-8;
  bool equal_nan = false;
};
std::string describe(const AllcloseOptions& options);
/// As `equal`, but compares elements as at::allclose does.
bool allclose(const ShardedTensor& a, const ShardedTensor& b, const AllcloseOptions& options);

ShardedTensor clone(const ShardedTensor& input);
/// Returns a tensor with the same storage that does not require grad.
ShardedTensor detach(const ShardedTensor& input);
ShardedTensor to(const ShardedTensor& input, const ShardedTensor::ToOptions& options);

// Uninitialized, filled or random tensors of the size, spec, dtype and devices of `input`, not requiring grad.
ShardedTensor empty_like(const ShardedTensor& input);
ShardedTensor zeros_like(const ShardedTensor& input);
ShardedTensor ones_like(const ShardedTensor& input);
ShardedTensor rand_like(const ShardedTensor& input);
ShardedTensor randn_like(const ShardedTensor& input);
ShardedTensor full_like(const ShardedTensor& input, const at::Scalar& value);

// ---- Any spec: in place. These return their first argument. ----

/// Copies the elements of `source`, which must have the same shards. Differentiable: if `source` requires grad, `self`
/// does afterwards.
ShardedTensor copy_(const ShardedTensor& self, const ShardedTensor& source, bool non_blocking);
ShardedTensor requires_grad_(const ShardedTensor& self, bool requires_grad);
/// Fills with uniform numbers in [a, b).
ShardedTensor uniform_(const ShardedTensor& self, double a, double b);
ShardedTensor normal_(const ShardedTensor& self, double mean, double std);
ShardedTensor constant_(const ShardedTensor& self, double value);
/// As torch::nn::init::kaiming_uniform_ of the full tensor: the fan is that of the full tensor, not of a shard as in
/// PyTorch. `mode` is "fan_in" or "fan_out", `nonlinearity` a name that torch::nn::init::calculate_gain knows.
ShardedTensor kaiming_uniform_(const ShardedTensor& self, double a, const std::string& mode,
                               const std::string& nonlinearity);

// ---- Chunk specs ----

/// Swaps two dimensions. If one of them is sharded, the other is sharded afterwards.
ShardedTensor transpose(const ShardedTensor& input, std::int64_t dim0, std::int64_t dim1);
/// Returns the tensor with another shape, of which one size may be -1. The sharded dimension must split evenly both in
/// the old and in the new shape, into the same contiguous parts; otherwise throws `Error(unsupported)`.
ShardedTensor view(const ShardedTensor& input, const std::vector<std::int64_t>& shape);
/// Splits into `chunks` parts along `dim`, which must not be the sharded dimension.
std::vector<ShardedTensor> chunk(const ShardedTensor& input, std::int64_t chunks, std::int64_t dim);
/// Computes the softmax along `dim`. Communicates if `dim` is the sharded dimension: all ranks must call it.
ShardedTensor softmax(const ShardedTensor& input, std::int64_t dim);

/// `weight` and `bias` are of `normalized_shape` and replicated; either may be undefined.
struct LayerNormOptions {
  at::Tensor weight, bias;
  double eps = 1e-5;
};
std::string describe(const LayerNormOptions& options);
/// Normalizes over the last dimensions. Communicates if one of them is sharded, and in backward: all ranks must call
/// it.
ShardedTensor layer_norm(const ShardedTensor& input, const std::vector<std::int64_t>& normalized_shape,
                         const LayerNormOptions& options);

/// Multiplies [b, m, k] by [b, k, n]. Both tensors are sharded in dimension 0 with the same placements.
ShardedTensor bmm(const ShardedTensor& a, const ShardedTensor& b);

// ---- Layers whose weight is sharded. All ranks must call them, with inputs of one size and dtype. ----

using LinearResult = std::variant<ShardedTensor, PartialTensor>;
/// Computes input * weight^T + bias. The input [n, ..., in] of each rank is one part of a batch of size * n rows, where
/// size is that of the group. `weight` is [out, in]; `bias` is [out], replicated, and may be undefined.
///   weight sharded in dimension 0: returns a sharded tensor [size * n, ..., out], sharded in its last dimension as the
///     weight is
///   weight sharded in dimension 1: returns a PartialTensor [size * n, ..., out]
/// An input that is itself a sharded tensor [n, ..., in], sharded in its last dimension as the weight is in dimension
/// 1, is the full batch: returns a PartialTensor [n, ..., out]. A 1-D input is a batch of one row per rank.
LinearResult linear(const std::variant<at::Tensor, ShardedTensor>& input, const ShardedTensor& weight,
                    const at::Tensor& bias);

struct EmbeddingOptions {
  /// Lookups of this row contribute no gradient.
  std::optional<std::int64_t> padding_idx = std::nullopt;
  /// Rows that are looked up and have a larger norm are scaled down to this norm, in `weight` itself.
  std::optional<double> max_norm = std::nullopt;
  double norm_type = 2;
  // Error(unsupported), as in PyTorch.
  bool scale_grad_by_freq = false, sparse = false;
};
std::string describe(const EmbeddingOptions& options);
/// Returns the rows of `weight` [rows, columns], sharded in either dimension, at the indices `input` of this rank:
/// [input..., columns].
at::Tensor embedding(const at::Tensor& input, const ShardedTensor& weight, const EmbeddingOptions& options);

struct EmbeddingBagOptions : EmbeddingOptions {
  std::string mode = "mean";  ///< "sum", "mean" or "max"
  /// Where each bag begins in a 1-D input, which needs it. In a 2-D input each row is a bag.
  at::Tensor offsets;
  /// If true, the last offset is the size of the input and begins no bag.
  bool include_last_offset = false;
  /// Has the size of the input; for mode "sum".
  at::Tensor per_sample_weights;
};
std::string describe(const EmbeddingBagOptions& options);
/// Returns the sum, mean or maximum of each bag's rows of `weight`, sharded in either dimension: [bags, columns]. If
/// several rows of a bag have the same maximum, one of them gets the gradient. All ranks must pass the same number of
/// bags.
at::Tensor embedding_bag(const at::Tensor& input, const ShardedTensor& weight, const EmbeddingBagOptions& options);

}  // namespace tessera::ops

namespace tessera {

// Arithmetic, as ops::add, sub, mul and div.
ShardedTensor operator+(const ShardedTensor& a, const ShardedTensor& b);
ShardedTensor operator+(const ShardedTensor& a, const at::Scalar& b);
ShardedTensor operator+(const at::Scalar& a, const ShardedTensor& b);
ShardedTensor operator-(const ShardedTensor& a, const ShardedTensor& b);
ShardedTensor operator-(const ShardedTensor& a, const at::Scalar& b);
ShardedTensor operator-(const at::Scalar& a, const ShardedTensor& b);
ShardedTensor operator*(const ShardedTensor& a, const ShardedTensor& b);
ShardedTensor operator*(const ShardedTensor& a, const at::Scalar& b);
ShardedTensor operator*(const at::Scalar& a, const ShardedTensor& b);
ShardedTensor operator/(const ShardedTensor& a, const ShardedTensor& b);
ShardedTensor operator/(const ShardedTensor& a, const at::Scalar& b);
ShardedTensor operator/(const at::Scalar& a, const ShardedTensor& b);

}  // namespace tessera

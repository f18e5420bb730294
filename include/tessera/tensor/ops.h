#pragma once
/// \file
/// The ops that are built in.
///
/// Law: what an op gives, gathered, is what the same op gives on the gathered arguments, up to rounding where it
/// communicates; random ones draw from each rank's own generator. Gradients flow to the local shards, and to inputs and
/// parameters that every rank has whole: such a parameter gets the whole gradient on every rank.
///
/// Those under "Any spec" take sharded tensors of every spec, with any number of shards on a rank, and communicate only
/// where said; those under "Chunk specs" take ChunkShardingSpec with one shard on each rank, `Error(unsupported)`
/// otherwise. What doesn't fit together is `Error(invalid_argument)`, on all ranks where ranks bring their own inputs.
/// PyTorch: torch/distributed/_shard/sharded_tensor/_ops, torch/distributed/_shard/sharding_spec/
/// chunk_sharding_spec_ops (linear, softmax, transpose, view, bmm, layer_norm and chunk as of 1.13).

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

// ---- Any spec ----

using Unary = Op<ShardedTensor(const ShardedTensor& input)>;
extern const Unary abs, ceil, cos, erf, exp, expm1, floor, gelu, isfinite, isinf, isnan, log, log1p, nan_to_num, neg,
    reciprocal, relu, round, rsqrt, sigmoid, sign, silu, sin, sqrt, square, tanh;

/// Zero with probability `p`, else divided by 1 - p; as it is if not `training`.
extern const Op<ShardedTensor(const ShardedTensor& input, double p, bool training)> dropout;

/// One of both a sharded tensor, the other a number or a tensor of equal size and spec.
using Operand = std::variant<ShardedTensor, at::Scalar>;
using Binary = Op<ShardedTensor(const Operand& a, const Operand& b)>;
extern const Binary add, sub, mul, div;

/// `mask`, which every rank has whole, has bools and may be smaller, to be broadcast.
extern const Op<ShardedTensor(const ShardedTensor& input, const at::Tensor& mask, const at::Scalar& value)> masked_fill;

/// Whether both are of one group and have equal metadata and elements. All ranks must call it and get the same.
extern const Op<bool(const ShardedTensor& a, const ShardedTensor& b)> equal;
struct AllcloseOptions {
  double rtol = 1e-5, atol = 1e-8;
  bool equal_nan = false;
};
std::string describe(const AllcloseOptions& options);
extern const Op<bool(const ShardedTensor& a, const ShardedTensor& b, const AllcloseOptions& options)> allclose;

extern const Unary clone;
/// Of the same storage, not requiring grad.
extern const Unary detach;
extern const Op<ShardedTensor(const ShardedTensor& input, const ShardedTensor::ToOptions& options)> to;

// Uninitialised, filled or random, of the size, spec, dtype and devices of `input`, not requiring grad.
extern const Unary empty_like, zeros_like, ones_like, rand_like, randn_like;
extern const Op<ShardedTensor(const ShardedTensor& input, const at::Scalar& value)> full_like;

// In place; they return their first argument.

/// `source` has the same shards.
extern const Op<ShardedTensor(const ShardedTensor& self, const ShardedTensor& source, bool non_blocking)> copy_;
extern const Op<ShardedTensor(const ShardedTensor& self, bool requires_grad)> requires_grad_;
/// In [a, b).
extern const Op<ShardedTensor(const ShardedTensor& self, double a, double b)> uniform_;
extern const Op<ShardedTensor(const ShardedTensor& self, double mean, double std)> normal_;
extern const Op<ShardedTensor(const ShardedTensor& self, double value)> constant_;
/// As torch::nn::init::kaiming_uniform_ of the whole tensor: its fan counts, not that of a shard, unlike in PyTorch.
/// `mode` is "fan_in" or "fan_out", `nonlinearity` a name that torch::nn::init::calculate_gain knows.
extern const Op<ShardedTensor(const ShardedTensor& self, double a, const std::string& mode,
                              const std::string& nonlinearity)>
    kaiming_uniform_;

// ---- Chunk specs ----

/// Swaps two dimensions; the cut goes with its dimension.
extern const Op<ShardedTensor(const ShardedTensor& input, std::int64_t dim0, std::int64_t dim1)> transpose;
/// Another shape, of which one size may be -1. What was cut must be cut evenly into as many contiguous parts at the
/// same dimension of the new shape, `Error(unsupported)` otherwise.
extern const Op<ShardedTensor(const ShardedTensor& input, const std::vector<std::int64_t>& shape)> view;
/// `chunks` parts along `dim`, which is not the one that is cut.
extern const Op<std::vector<ShardedTensor>(const ShardedTensor& input, std::int64_t chunks, std::int64_t dim)> chunk;
/// Along `dim`. Communicates if that is the one that is cut: all ranks must call it.
extern const Op<ShardedTensor(const ShardedTensor& input, std::int64_t dim)> softmax;

/// `weight` and `bias`, of `normalized_shape`, every rank has whole; either may be undefined.
struct LayerNormOptions {
  at::Tensor weight, bias;
  double eps = 1e-5;
};
std::string describe(const LayerNormOptions& options);
/// Over the last dimensions. Communicates if one of them is cut, and in backward: all ranks must call it.
extern const Op<ShardedTensor(const ShardedTensor& input, const std::vector<std::int64_t>& normalized_shape,
                              const LayerNormOptions& options)>
    layer_norm;

/// Both 3-D and cut in dimension 0, with the same placements.
extern const Op<ShardedTensor(const ShardedTensor& a, const ShardedTensor& b)> bmm;

// ---- Layers whose weight is sharded. All ranks must call them, with inputs of one size and dtype. ----

/// input * weight^T + bias, where the input [n, ..., in] of each rank is one part of a batch of size * n. `weight` is
/// [out, in]; `bias`, [out] and whole on every rank, may be undefined.
///   weight cut in dimension 0: a sharded tensor [size * n, ..., out], cut in its last dimension as the weight was
///   weight cut in dimension 1: the summands of a tensor [size * n, ..., out]
/// An input that is itself sharded [n, ..., in], cut in its last dimension as the weight is in dimension 1, is the
/// whole batch: the summands of [n, ..., out]. A 1-D input is a batch of one row a rank.
using LinearResult = std::variant<ShardedTensor, PartialTensor>;
extern const Op<LinearResult(const std::variant<at::Tensor, ShardedTensor>& input, const ShardedTensor& weight,
                             const at::Tensor& bias)>
    linear;

struct EmbeddingOptions {
  /// Rows looked up at this index get no gradient.
  std::optional<std::int64_t> padding_idx = std::nullopt;
  /// Rows that are looked up and have a larger norm are scaled down to it, in `weight` itself.
  std::optional<double> max_norm = std::nullopt;
  double norm_type = 2;
  // Error(unsupported), as in PyTorch.
  bool scale_grad_by_freq = false, sparse = false;
};
std::string describe(const EmbeddingOptions& options);
/// Rows of `weight` [rows, columns], cut in either dimension, at the indices `input` of this rank: [input..., columns].
extern const Op<at::Tensor(const at::Tensor& input, const ShardedTensor& weight, const EmbeddingOptions& options)>
    embedding;

struct EmbeddingBagOptions : EmbeddingOptions {
  std::string mode = "mean";  ///< "sum", "mean" or "max"
  /// Where each bag begins in a 1-D input, which needs it; a 2-D input has a bag in each row.
  at::Tensor offsets;
  /// The last offset is the input's size and no bag.
  bool include_last_offset = false;
  /// Of the size of the input, for mode "sum".
  at::Tensor per_sample_weights;
};
std::string describe(const EmbeddingBagOptions& options);
/// Sums, means or maxima of rows of `weight`, cut in either dimension: [bags, columns]. Where several rows of a bag
/// have the same maximum, the gradient goes to one of them. All ranks must have equally many bags.
extern const Op<at::Tensor(const at::Tensor& input, const ShardedTensor& weight, const EmbeddingBagOptions& options)>
    embedding_bag;

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

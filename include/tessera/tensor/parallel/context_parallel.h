#pragma once
/// \file
/// Context parallelism: attention over a sequence whose tokens are distributed over the ranks of a group.
///
/// Each rank has the query, key and value of its tokens. Keys and values move around the ring of ranks: while the ranks
/// compute with those of one step, they send those of the next, and a running softmax combines the steps. No rank ever
/// has the keys of the full sequence, or more scores than a block of its own tokens and those of another rank.
///
///     at::Tensor x = context_parallel_shard(group, {ids}, {1}, order)[0];    // this rank's tokens
///     ...
///     y = ring_attention(group, query, key, value, length, {.is_causal = true, .order = order});
///
/// Laws: with the tokens of each rank put back in order, the result is softmax(query @ key^T * scale) @ value of the
/// full sequence, up to rounding, and so are the gradients. PyTorch:
/// torch/distributed/tensor/experimental/_context_parallel (ring attention, _HeadTailLoadBalancer).

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/comm/process_group.h"
#include "tessera/layout/interval.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {

/// The rule by which tokens are distributed over ranks.
enum class TokenOrder : std::uint8_t {
  /// Rank r has chunk r of as many chunks as ranks, as torch.chunk splits. With a causal mask, the last rank computes
  /// most.
  contiguous,
  /// The tokens are split in twice as many chunks as ranks. Of n ranks, rank r has chunk r and chunk 2n - 1 - r, in
  /// this order, so that with a causal mask all ranks compute the same amount.
  head_tail,
};

struct RingAttentionOptions {
  bool is_causal = false;                      ///< a token attends to those up to its own place in the sequence
  std::optional<double> scale = std::nullopt;  ///< by default 1 / sqrt(the last size of the query)
  TokenOrder order = TokenOrder::contiguous;
};

/// Returns the tokens of a rank of `ranks`, out of `length`, as intervals of the sequence in the order in which the
/// rank has them; none is empty.
std::vector<Interval> tokens_of_rank(std::int64_t length, int ranks, int rank, TokenOrder order);

/// Returns this rank's tokens of each tensor, of which each rank has all. `seq_dims[i]` is the dimension of tensor i
/// that is the sequence. Differentiable; does not communicate. Throws `Error(invalid_argument)` unless there is a
/// dimension for each.
std::vector<at::Tensor> context_parallel_shard(const ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                                               const std::vector<std::int64_t>& seq_dims, TokenOrder order);
/// Returns tensors with all tokens of the sequence, in order, on every rank; the inverse of `context_parallel_shard`.
/// Does not record gradients. A collective. Throws `Error(invalid_argument)` also for a tensor without this rank's
/// number of tokens of `length`.
std::vector<at::Tensor> context_parallel_unshard(const ProcessGroup& group, const std::vector<at::Tensor>& shards,
                                                 const std::vector<std::int64_t>& seq_dims, std::int64_t length,
                                                 TokenOrder order);

/// Returns this rank's rows of the attention over a sequence of `length`: [..., tokens, v] for a query and a key
/// [..., tokens, e] and a value [..., tokens, v] of this rank's tokens. Computes in float32, or float64 for such
/// inputs. Forward and backward are collectives of the group; each rank sends its keys and values (and in backward
/// their gradients, too) to the next one as often as there are other ranks. Every rank throws `Error(invalid_argument)`
/// for other sizes or dtypes, or if the ranks' arguments differ. Not differentiable twice.
at::Tensor ring_attention(const ProcessGroup& group, const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, std::int64_t length, const RingAttentionOptions& options = {});
/// As above, for tensors that are sharded along their second to last dimension (`Placement::shard(-2)`) along one mesh
/// dimension, whose tokens are in contiguous order. The placements must be equal; other mesh dimensions may shard the
/// leading dimensions or replicate. The result is placed as the query. Throws `Error(invalid_argument)` otherwise.
DTensor ring_attention(const DTensor& query, const DTensor& key, const DTensor& value,
                       const RingAttentionOptions& options = {});

}  // namespace tessera

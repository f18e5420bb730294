#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding_bag.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/searchsorted.h>

#include <limits>

#include "tensor/ops/built_in.h"
#include "tensor/ops/embedding.h"
#include "tensor/ops/rank_arguments.h"
#include "tessera/base/error.h"
#include "tessera/comm/functional.h"

namespace tessera::ops {

namespace {

enum class Mode : std::int64_t { sum = 0, mean = 1, max = 2 };  // LibTorch's numbers

Mode mode_of(const EmbeddingBagOptions& options) {
  if (options.mode == "sum") return Mode::sum;
  if (options.mode == "mean") return Mode::mean;
  if (options.mode == "max") return Mode::max;
  fail(ErrorCode::invalid_argument, "op 'embedding_bag': mode is '{}', expected 'sum', 'mean' or 'max'",
       printable(options.mode));
}

void check_bags(const at::Tensor& input, const EmbeddingBagOptions& options) {
  const auto refuse = [](const std::string& why) { fail(ErrorCode::invalid_argument, "op 'embedding_bag': {}", why); };
  const at::Tensor &offsets = options.offsets, &weights = options.per_sample_weights;
  if (input.dim() != 1 && input.dim() != 2) {
    refuse(fmt::format("input is {}, expected 1 or 2 dimensions", describe(input)));
  }
  if (weights.defined()) {
    if (mode_of(options) != Mode::sum)
      refuse(fmt::format("per_sample_weights with mode '{}', expected mode 'sum'", options.mode));
    if (weights.sizes() != input.sizes()) {
      refuse(fmt::format("per_sample_weights are {}, input is {}, expected the same size", describe(weights),
                         describe(input)));
    }
  }
  if (input.dim() == 2) {
    if (offsets.defined()) refuse("offsets with an input of 2 dimensions, expected an input of 1 dimension");
    if (options.include_last_offset) refuse("include_last_offset with an input of 2 dimensions, expected offsets");
    return;
  }
  if (!offsets.defined()) refuse("an input of 1 dimension without offsets, expected offsets");
  if (offsets.dim() != 1 || (offsets.scalar_type() != at::kLong && offsets.scalar_type() != at::kInt)) {
    refuse(fmt::format("offsets are {}, expected 1 dimension of int32 or int64", describe(offsets)));
  }
  if (options.include_last_offset && offsets.numel() == 0)
    refuse("include_last_offset with empty offsets, expected at least one");
  if (offsets.numel() == 0) return;
  const auto first = offsets[0].item<std::int64_t>(), last = offsets[-1].item<std::int64_t>();
  if (first != 0) refuse(fmt::format("the first offset is {}, expected 0", first));
  if (offsets.diff().lt(0).any().item<bool>()) refuse("offsets descend, expected ascending offsets");
  if (last > input.numel())
    refuse(fmt::format("an offset is {}, expected at most {}, the size of the input", last, input.numel()));
  if (options.include_last_offset && last != input.numel()) {
    refuse(fmt::format("the last offset is {}, expected the size of the input, {}", last, input.numel()));
  }
}

// Returns where each bag begins in the flat input.
at::Tensor offsets_of(const at::Tensor& input, const EmbeddingBagOptions& options) {
  if (input.dim() == 2) return at::arange(input.size(0), at::kLong).to(input.device()) * input.size(1);
  const at::Tensor offsets = options.offsets.to(at::kLong);
  return options.include_last_offset ? offsets.narrow(0, 0, offsets.size(0) - 1) : offsets;
}

// Returns the sum of `counted`, zeros and ones, over each bag's [offsets[i], offsets[i + 1]).
at::Tensor count_in_bags(const at::Tensor& counted, const at::Tensor& offsets) {
  const at::Tensor sums = at::cat({counted.new_zeros({1}), counted.cumsum(0)});
  const at::Tensor ends = at::cat(
      {offsets.narrow(0, std::min<std::int64_t>(1, offsets.size(0)), std::max<std::int64_t>(offsets.size(0) - 1, 0)),
       offsets.new_full({std::min<std::int64_t>(1, offsets.size(0))}, counted.size(0))});
  return sums.index_select(0, ends) - sums.index_select(0, offsets);
}

at::Tensor counted_indices(const at::Tensor& indices, const EmbeddingBagOptions& options) {
  const at::Tensor all = at::ones_like(indices);
  return options.padding_idx ? all.masked_fill(indices.eq(*options.padding_idx), 0) : all;
}

// Every rank reduces each bag over its own rows; the ranks' sums are added, their maxima compared.
at::Tensor row_wise(const at::Tensor& indices, const at::Tensor& offsets, const at::Tensor& all,
                    const at::Tensor& all_offsets, const at::Tensor& all_weights, const ShardedTensor& weight,
                    const Chunks& chunks, const EmbeddingBagOptions& options) {
  const Mode mode = mode_of(options);
  const ProcessGroup& group = weight.process_group();
  // Bags of only the indices that count and whose rows are on this rank.
  const at::Tensor counted = options.padding_idx ? all.masked_fill(all.eq(*options.padding_idx), -1) : all;
  const OwnRows own = own_rows(counted, chunks);
  const at::Tensor own_offsets = at::searchsorted(own.positions, all_offsets);
  const c10::optional<at::Tensor> own_weights =
      all_weights.defined() ? c10::make_optional(all_weights.index_select(0, own.positions)) : c10::nullopt;
  const Mode own_mode = mode == Mode::mean ? Mode::sum : mode;
  at::Tensor partial = std::get<0>(at::embedding_bag(weight.local_tensor(), own.rows, own_offsets, false,
                                                     static_cast<std::int64_t>(own_mode), false, own_weights));
  const at::Tensor counts = count_in_bags(counted_indices(indices, options), offsets).unsqueeze(1);
  if (mode != Mode::max) {
    const at::Tensor sums = functional::reduce_scatter(group, partial);
    return mode == Mode::mean ? sums / counts.clamp_min(1) : sums;
  }
  const std::int64_t bags = offsets.size(0), columns = weight.size()[1];
  const at::Tensor is_empty = count_in_bags(at::ones_like(own.rows), own_offsets).eq(0).unsqueeze(1);
  partial = partial.masked_fill(is_empty, -std::numeric_limits<double>::infinity());
  const std::vector<std::int64_t> splits(chunks.sizes.size(), bags);
  const at::Tensor maxima = functional::all_to_all(group, partial, splits, splits).view({-1, bags, columns});
  return std::get<0>(maxima.max(0)).masked_fill(counts.eq(0), 0);
}

}  // namespace

std::string describe(const EmbeddingBagOptions& options) {
  return fmt::format("EmbeddingBagOptions{{mode={}, offsets={}, include_last_offset={}, per_sample_weights={}, {}}}",
                     describe(options.mode), describe(options.offsets), options.include_last_offset,
                     describe(options.per_sample_weights), describe(static_cast<const EmbeddingOptions&>(options)));
}

const BuiltIn embedding_bag_op(
    embedding_bag, "embedding_bag", ChunkShardingSpec::kKind,
    [](const at::Tensor& input, const ShardedTensor& weight, const EmbeddingBagOptions& options) {
      const ProcessGroup& group = weight.process_group();
      Chunks chunks;
      agree_on_arguments("embedding_bag", group, {describe(input), describe(weight), describe(options)}, [&] {
        check_embedding("embedding_bag", weight, options);
        mode_of(options);
        chunks = chunks_of("embedding_bag", weight);
        check_indices("embedding_bag", input, weight);
        check_bags(input, options);
      });
      const Mode mode = mode_of(options);
      const at::Tensor indices = input.reshape({-1}).to(at::kLong), offsets = offsets_of(input, options);
      const at::Tensor all = functional::all_gather(group, indices);
      const at::Tensor own_begin = offsets + group.rank() * indices.size(0);
      const at::Tensor all_offsets = functional::all_gather(group, own_begin);
      at::Tensor all_weights;
      if (options.per_sample_weights.defined()) {
        all_weights = functional::all_gather(group, options.per_sample_weights.reshape({-1}));
      }
      renormalize(weight, chunks, all, options);
      if (chunks.dim == 0) return row_wise(indices, offsets, all, all_offsets, all_weights, weight, chunks, options);
      const at::Tensor results = std::get<0>(
          at::embedding_bag(weight.local_tensor(), all, all_offsets, false, static_cast<std::int64_t>(mode), false,
                            all_weights.defined() ? c10::make_optional(all_weights) : c10::nullopt, false,
                            options.padding_idx ? c10::make_optional(*options.padding_idx) : c10::nullopt));
      return distribute_columns(results, weight, chunks);
    });

at::Tensor embedding_bag(const at::Tensor& input, const ShardedTensor& weight, const EmbeddingBagOptions& options) {
  return embedding_bag_op(input, weight, options);
}

}  // namespace tessera::ops

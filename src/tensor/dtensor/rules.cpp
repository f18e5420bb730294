#include "tensor/dtensor/rules.h"

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::rules {

namespace {

const Placement R = Placement::replicate();
const Placement kSum = Placement::partial(ReduceOp::sum), kAverage = Placement::partial(ReduceOp::average);

Placement S(std::size_t dim) { return Placement::shard(static_cast<std::int64_t>(dim)); }

// Returns the shard placement of the dimension and every strided one that an input has for it.
std::vector<Placement> shards_of(std::span<const DTensor> inputs, std::size_t dim_of_first) {
  std::vector<Placement> shards = {S(dim_of_first)};
  for (const Placement& placement : inputs[0].placements()) {
    if (placement.is_strided() && placement.is_shard(static_cast<std::int64_t>(dim_of_first)))
      shards.push_back(placement);
  }
  return shards;
}

// Returns `shard` for another dimension.
Placement moved_to(const Placement& shard, std::size_t dim) {
  return Placement::strided_shard(static_cast<std::int64_t>(dim), shard.split_factor());
}

[[noreturn]] void refuse(const char* op, std::span<const DTensor> inputs) {
  std::string sizes;
  for (const DTensor& input : inputs) sizes += (sizes.empty() ? "" : " and ") + shape_to_string(input.size());
  fail(ErrorCode::invalid_argument, "{} of tensors of sizes {}: expected sizes that fit together", op, sizes);
}

}  // namespace

std::int64_t dim_from_front(const char* op, std::int64_t dim, std::int64_t dims) {
  if (dim < -dims || dim >= dims) {
    fail(ErrorCode::invalid_argument, "{} over dimension {} of a tensor of {} dimensions: expected {} to {}", op, dim,
         dims, -dims, dims - 1);
  }
  return dim < 0 ? dim + dims : dim;
}

Sizes dims_from_front(const char* op, const Sizes& dims, std::int64_t of) {
  Sizes result;
  for (const std::int64_t dim : dims) result.push_back(dim_from_front(op, dim, of));
  for (std::int64_t dim = 0; dims.empty() && dim < of; ++dim) result.push_back(dim);
  std::sort(result.begin(), result.end());
  if (std::adjacent_find(result.begin(), result.end()) != result.end()) {
    fail(ErrorCode::invalid_argument, "{} over dimensions {}, one of them twice: expected distinct dimensions", op,
         shape_to_string(dims));
  }
  return result;
}

OpRule elementwise(const char* op, std::span<const DTensor> inputs, bool is_linear) {
  OpRule rule;
  std::size_t dims = 0;
  for (const DTensor& input : inputs) dims = std::max(dims, input.size().size());
  rule.output_size.assign(dims, 1);
  for (const DTensor& input : inputs) {
    const std::size_t before = dims - input.size().size();
    for (std::size_t d = 0; d < input.size().size(); ++d) {
      std::int64_t& size = rule.output_size[before + d];
      if (size != 1 && input.size()[d] != 1 && input.size()[d] != size) refuse(op, inputs);
      if (input.size()[d] != 1) size = input.size()[d];
    }
  }
  rule.strategies.push_back({Placements(inputs.size(), R), R});
  for (std::size_t d = 0; d < dims; ++d) {
    // Inputs with this dimension are sharded along it; inputs that are broadcast along it are replicated.
    const auto sharded_with = [&](std::int64_t split_factor) {
      const Placement shard = Placement::strided_shard(static_cast<std::int64_t>(d), split_factor);
      OpStrategy strategy{{}, shard};
      for (const DTensor& input : inputs) {
        const std::size_t before = dims - input.size().size();
        const bool has = d >= before && input.size()[d - before] == rule.output_size[d];
        strategy.inputs.push_back(has ? moved_to(shard, d - before) : R);
      }
      return strategy;
    };
    rule.strategies.push_back(sharded_with(1));
    for (const DTensor& input : inputs) {
      for (const Placement& placement : input.placements()) {
        if (placement.is_strided()) rule.strategies.push_back(sharded_with(placement.split_factor()));
      }
    }
  }
  if (is_linear) {
    for (const Placement& partial : {kSum, kAverage}) {
      rule.strategies.push_back({Placements(inputs.size(), partial), partial});
    }
  }
  return rule;
}

OpRule matmul(std::span<const DTensor> inputs) {
  const DTensor &a = inputs[0], &b = inputs[1];
  const std::size_t dims = a.size().size();
  const bool is_batched = b.size().size() == 3;
  const bool fits = dims >= 2 && (is_batched ? dims == 3 && a.size()[0] == b.size()[0] : b.size().size() == 2) &&
                    a.size().back() == b.size()[b.size().size() - 2];
  if (!fits) refuse("matmul", inputs);
  OpRule rule{a.size(), {{{R, R}, R}}, true};
  rule.output_size.back() = b.size().back();
  const std::size_t last = dims - 1;
  for (std::size_t d = 0; d < last; ++d) {
    const bool is_batch = is_batched && d == 0;
    for (const Placement& shard : shards_of(inputs, d))
      rule.strategies.push_back({{shard, is_batch ? shard : R}, shard});
  }
  rule.strategies.push_back({{R, S(b.size().size() - 1)}, S(last)});
  rule.strategies.push_back({{S(last), S(b.size().size() - 2)}, kSum});
  rule.strategies.push_back({{kSum, R}, kSum});
  rule.strategies.push_back({{R, kSum}, kSum});
  return rule;
}

OpRule linear(std::span<const DTensor> inputs) {
  const DTensor &x = inputs[0], &weight = inputs[1];
  const bool has_bias = inputs.size() > 2;
  const bool fits = !x.size().empty() && weight.size().size() == 2 && x.size().back() == weight.size()[1] &&
                    (!has_bias || inputs[2].size() == Sizes{weight.size()[0]});
  if (!fits) refuse("linear", inputs);
  OpRule rule{x.size(), {}, true};
  rule.output_size.back() = weight.size()[0];
  const auto add = [&](const Placement& of_x, const Placement& of_weight, const Placement& of_bias,
                       const Placement& output) {
    rule.strategies.push_back({{of_x, of_weight}, output});
    if (has_bias) rule.strategies.back().inputs.push_back(of_bias);
  };
  const std::size_t last = x.size().size() - 1;
  add(R, R, R, R);
  for (std::size_t d = 0; d < last; ++d) {
    for (const Placement& shard : shards_of(inputs, d)) add(shard, R, R, shard);
  }
  add(R, S(0), S(0), S(last));
  add(S(last), S(1), kSum, kSum);
  return rule;
}

OpRule embedding(std::span<const DTensor> inputs) {
  const DTensor &weight = inputs[0], &ids = inputs[1];
  if (weight.size().size() != 2) refuse("embedding", inputs);
  OpRule rule{ids.size(), {{{R, R}, R}}, true};
  rule.output_size.push_back(weight.size()[1]);
  for (std::size_t d = 0; d < ids.size().size(); ++d) rule.strategies.push_back({{R, S(d)}, S(d)});
  rule.strategies.push_back({{S(1), R}, S(ids.size().size())});
  rule.strategies.push_back({{S(0), R}, kSum});
  return rule;
}

OpRule along_dims(std::span<const DTensor> inputs, const Sizes& unsharded_dims) {
  OpRule rule{inputs[0].size(), {{Placements(inputs.size(), R), R}}};
  for (std::size_t d = 0; d < rule.output_size.size(); ++d) {
    if (std::count(unsharded_dims.begin(), unsharded_dims.end(), static_cast<std::int64_t>(d)) != 0) continue;
    for (const Placement& shard : shards_of(inputs, d)) {
      OpStrategy strategy{Placements(inputs.size(), R), shard};
      strategy.inputs[0] = shard;
      rule.strategies.push_back(std::move(strategy));
    }
  }
  return rule;
}

OpRule reduction(const DTensor& input, const Sizes& dims, bool keepdim, std::optional<Placement> partial) {
  OpRule rule{{}, {{{R}, R}}};
  for (std::size_t d = 0; d < input.size().size(); ++d) {
    const bool is_reduced = std::count(dims.begin(), dims.end(), static_cast<std::int64_t>(d)) != 0;
    const std::size_t to = rule.output_size.size();
    if (!is_reduced || keepdim) rule.output_size.push_back(is_reduced ? 1 : input.size()[d]);
    if (is_reduced && !partial) continue;
    for (const Placement& shard : shards_of({&input, 1}, d)) {
      rule.strategies.push_back({{shard}, is_reduced ? *partial : moved_to(shard, to)});
    }
  }
  if (partial) rule.strategies.push_back({{*partial}, *partial});
  if (partial == kSum) rule.strategies.push_back({{kAverage}, kAverage});
  return rule;
}

OpRule transpose(const DTensor& input, std::int64_t dim0, std::int64_t dim1) {
  OpRule rule{input.size(), {{{R}, R}}};
  std::swap(rule.output_size[static_cast<std::size_t>(dim0)], rule.output_size[static_cast<std::size_t>(dim1)]);
  for (std::size_t d = 0; d < input.size().size(); ++d) {
    const auto from = static_cast<std::int64_t>(d);
    const auto to = static_cast<std::size_t>(from == dim0 ? dim1 : from == dim1 ? dim0 : from);
    for (const Placement& shard : shards_of({&input, 1}, d)) rule.strategies.push_back({{shard}, moved_to(shard, to)});
  }
  for (const Placement& placement : input.placements()) {
    if (placement.is_partial()) rule.strategies.push_back({{placement}, placement});
  }
  return rule;
}

}  // namespace tessera::rules

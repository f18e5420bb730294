#include "tensor/dtensor_rules/rules.h"

#include <algorithm>
#include <utility>

#include "tensor/dtensor_rules/shared_dims.h"
#include "tessera/base/error.h"

namespace tessera::rules {

namespace {

const Placement R = Placement::replicate();
const Placement kSum = Placement::partial(ReduceOp::sum), kAverage = Placement::partial(ReduceOp::average),
                kMax = Placement::partial(ReduceOp::max), kMin = Placement::partial(ReduceOp::min);

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

}  // namespace

void refuse_sizes(const char* op, std::span<const DTensor> inputs, std::string_view expected) {
  std::string sizes;
  for (const DTensor& input : inputs) sizes += (sizes.empty() ? "" : " and ") + shape_to_string(input.size());
  fail(ErrorCode::invalid_argument, "{} of tensors of sizes {}: expected {}", op, sizes, expected);
}

std::int64_t dim_from_front(const char* op, std::int64_t dim, std::int64_t dims) {
  if (dims == 0) {
    fail(ErrorCode::invalid_argument, "{} over dimension {} of a tensor of 0 dimensions: expected one or more", op,
         dim);
  }
  if (dim < -dims || dim >= dims) {
    fail(ErrorCode::invalid_argument, "{} over dimension {} of a tensor of {} dimensions: expected {} to {}", op, dim,
         dims, -dims, dims - 1);
  }
  return dim < 0 ? dim + dims : dim;
}

Sizes dims_from_front(const char* op, const Sizes& dims, std::int64_t of) {
  Sizes result;
  for (const std::int64_t dim : dims) {
    const bool is_none = of == 0 && (dim == 0 || dim == -1);
    result.push_back(is_none ? 0 : dim_from_front(op, dim, of));
  }
  for (std::int64_t dim = 0; dims.empty() && dim < of; ++dim) result.push_back(dim);
  std::sort(result.begin(), result.end());
  if (std::adjacent_find(result.begin(), result.end()) != result.end()) {
    fail(ErrorCode::invalid_argument, "{} over dimensions {}, one of them twice: expected distinct dimensions", op,
         shape_to_string(dims));
  }
  return of == 0 ? Sizes() : result;
}

std::optional<Sizes> broadcast(const Sizes& a, const Sizes& b) {
  if (a.size() < b.size()) return broadcast(b, a);
  Sizes result = a;
  for (std::size_t d = 0; d < b.size(); ++d) {
    std::int64_t& length = result[a.size() - b.size() + d];
    if (length != 1 && b[d] != 1 && b[d] != length) return std::nullopt;
    if (b[d] != 1) length = b[d];
  }
  return result;
}

namespace {

// Returns the strategies that keep partial inputs.
std::vector<OpStrategy> partial_strategies(Linearity linearity, std::size_t inputs) {
  std::vector<OpStrategy> all;
  const auto add = [&](std::vector<OpStrategy> more) { all.insert(all.end(), more.begin(), more.end()); };
  const std::vector<OpStrategy> linear = {{Placements(inputs, kSum), kSum}, {Placements(inputs, kAverage), kAverage}},
                                increasing = {{{kMax}, kMax}, {{kMin}, kMin}};
  switch (linearity) {
    case Linearity::none:
      break;
    case Linearity::linear:
      add(linear);
      break;
    case Linearity::sum:
      add(linear);
      add({{{kMax, R}, kMax}, {{R, kMax}, kMax}, {{kMin, R}, kMin}, {{R, kMin}, kMin}});
      break;
    case Linearity::difference:
      add(linear);
      add({{{kMax, R}, kMax}, {{R, kMin}, kMax}, {{kMin, R}, kMin}, {{R, kMax}, kMin}});
      break;
    case Linearity::product:
      add({{{kSum, R}, kSum}, {{R, kSum}, kSum}, {{kAverage, R}, kAverage}, {{R, kAverage}, kAverage}});
      break;
    case Linearity::quotient:
      add({{{kSum, R}, kSum}, {{kAverage, R}, kAverage}});
      break;
    case Linearity::maximum:
      add({{{kMax, kMax}, kMax}, {{kMin, R}, kMin}, {{R, kMin}, kMin}});
      break;
    case Linearity::minimum:
      add({{{kMin, kMin}, kMin}, {{kMax, R}, kMax}, {{R, kMax}, kMax}});
      break;
    case Linearity::increasing:
      add(increasing);
      break;
    case Linearity::increasing_linear:
      add(linear);
      add(increasing);
      break;
    case Linearity::decreasing_linear:
      add(linear);
      add({{{kMax}, kMin}, {{kMin}, kMax}});
      break;
    case Linearity::shifted:
      add({{{kAverage}, kAverage}});
      add(increasing);
      break;
  }
  return all;
}

}  // namespace

OpRule elementwise(const char* op, std::span<const DTensor> inputs, Linearity linearity) {
  Sizes size;
  for (const DTensor& input : inputs) {
    std::optional<Sizes> both = broadcast(size, input.size());
    if (!both) refuse_sizes(op, inputs, "sizes that broadcast to each other");
    size = *std::move(both);
  }
  std::vector<SharedDim> dims;
  for (std::size_t d = 0; d < size.size(); ++d) {
    SharedDim& dim = dims.emplace_back(SharedDim{d, {}});
    for (const DTensor& input : inputs) {
      const std::size_t before = size.size() - input.size().size();
      const bool is_broadcast = d < before || input.size()[d - before] != size[d];
      dim.inputs.push_back(is_broadcast ? std::nullopt : std::optional(d - before));
    }
  }
  OpRule rule = shared(inputs, size, dims);
  rule.may_shard = false;
  const bool selects = linearity == Linearity::maximum || linearity == Linearity::minimum;
  const bool keeps_extremes = std::all_of(inputs.begin(), inputs.end(), [&](const DTensor& input) {
    return !input.requires_grad() && (selects || at::isFloatingType(input.scalar_type()));
  });
  for (OpStrategy& strategy : partial_strategies(linearity, inputs.size())) {
    const bool is_extreme = strategy.output == kMax || strategy.output == kMin;
    if (keeps_extremes || !is_extreme) rule.strategies.push_back(std::move(strategy));
  }
  return rule;
}

OpRule embedding(std::span<const DTensor> inputs) {
  const DTensor &weight = inputs[0], &ids = inputs[1];
  if (weight.size().size() != 2) refuse_sizes("embedding", inputs, "a weight of two dimensions");
  OpRule rule{ids.size(), {{{R, R}, R}}, true};
  rule.output_size.push_back(weight.size()[1]);
  for (std::size_t d = 0; d < ids.size().size(); ++d) {
    for (const Placement& shard : shards_of(inputs.subspan(1), d)) rule.strategies.push_back({{R, shard}, shard});
  }
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

std::size_t first_of_cat(std::span<const DTensor> inputs) {
  const auto first = std::find_if(inputs.begin(), inputs.end(), [](const DTensor& x) { return x.size() != Sizes{0}; });
  return first == inputs.end() ? 0 : static_cast<std::size_t>(first - inputs.begin());
}

OpRule cat(std::span<const DTensor> inputs, std::size_t dim) {
  const DTensor& first = inputs[first_of_cat(inputs)];
  const auto is_left_out = [&](const DTensor& input) { return input.size() == Sizes{0} && first.size() != Sizes{0}; };
  OpRule rule{first.size(), {{Placements(inputs.size(), R), R}}};
  rule.output_size[dim] = 0;
  const auto refuse = [&] { refuse_sizes("cat", inputs, fmt::format("equal sizes except along dimension {}", dim)); };
  for (const DTensor& input : inputs) {
    if (is_left_out(input)) continue;
    Sizes size = input.size();
    if (size.size() != rule.output_size.size()) refuse();
    rule.output_size[dim] += std::exchange(size[dim], first.size()[dim]);
    if (size != first.size()) refuse();
  }
  const auto add = [&](const Placement& placement) {
    OpStrategy strategy{Placements(inputs.size(), placement), placement};
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (is_left_out(inputs[i])) strategy.inputs[i] = R;
    }
    rule.strategies.push_back(std::move(strategy));
  };
  for (std::size_t d = 0; d < rule.output_size.size(); ++d) {
    for (const Placement& shard : shards_of({&first, 1}, d)) {
      if (d != dim) add(shard);
    }
  }
  for (const Placement& placement : first.placements()) {
    if (placement.is_partial()) add(placement);
  }
  return rule;
}

OpRule attention(std::span<const DTensor> inputs, bool is_causal) {
  const Sizes &query = inputs[0].size(), &key = inputs[1].size(), &value = inputs[2].size();
  const std::size_t batches = query.size() - std::min<std::size_t>(query.size(), 2);
  const bool fits = query.size() >= 2 && key.size() == query.size() && value.size() == query.size() &&
                    std::equal(query.begin(), query.end() - 2, key.begin()) && key.back() == query.back() &&
                    std::equal(key.begin(), key.end() - 1, value.begin());
  if (!fits) refuse_sizes("scaled_dot_product_attention", inputs, "[..., q, d], [..., k, d] and [..., k, v]");
  OpRule rule{query, {{{R, R, R}, R}}, true};
  rule.output_size.back() = value.back();
  for (std::size_t d = 0; d < batches; ++d) {
    for (const Placement& shard : shards_of(inputs, d)) rule.strategies.push_back({{shard, shard, shard}, shard});
  }
  if (is_causal) return rule;
  for (const Placement& rows : shards_of(inputs, batches)) rule.strategies.push_back({{rows, R, R}, rows});
  return rule;
}

OpRule mapped(const DTensor& input, Sizes output_size, const DimMap& map, std::span<const ReduceOp> reduced) {
  OpRule rule{std::move(output_size), {{{R}, R}}};
  for (std::size_t d = 0; d < map.size(); ++d) {
    if (!map[d]) continue;
    for (const Placement& shard : shards_of({&input, 1}, d))
      rule.strategies.push_back({{shard}, moved_to(shard, *map[d])});
  }
  for (const Placement& placement : input.placements()) {
    const bool is_kept =
        placement.is_partial() && std::find(reduced.begin(), reduced.end(), placement.reduce_op()) == reduced.end();
    if (is_kept) rule.strategies.push_back({{placement}, placement});
  }
  return rule;
}

Placements mapped(const Placements& placements, const DimMap& map) {
  Placements result = placements;
  for (Placement& placement : result) {
    if (!placement.is_shard()) continue;
    const auto& dim = map[static_cast<std::size_t>(placement.dim())];
    // No rule permits it, but a check of rules tries all placements.
    if (!dim) {
      fail(ErrorCode::internal,
           "a DTensor op: the input is sharded along dimension {}, expected one that the result has", placement.dim());
    }
    placement = moved_to(placement, *dim);
  }
  return result;
}

}  // namespace tessera::rules

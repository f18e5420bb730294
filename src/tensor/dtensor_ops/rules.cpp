#include "tensor/dtensor_ops/rules.h"

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

namespace {

// Returns the sizes without the last two, broadcast to each other.
Sizes batch_sizes(std::span<const DTensor> inputs) {
  Sizes result;
  for (const DTensor& input : inputs) {
    const std::size_t dims = input.size().size() - 2;
    if (dims > result.size()) result.insert(result.begin(), dims - result.size(), 1);
    for (std::size_t d = 0; d < dims; ++d) {
      std::int64_t& size = result[result.size() - dims + d];
      const std::int64_t mine = input.size()[d];
      if (size != 1 && mine != 1 && mine != size) refuse("matmul", inputs);
      if (mine != 1) size = mine;
    }
  }
  return result;
}

// Returns the placement of an input if dimension `d` of `dims` leading dimensions of the result is sharded: replicated
// if the input is broadcast along it.
Placement batch_shard(const DTensor& input, std::size_t d, const Sizes& batches, const Placement& shard) {
  const std::size_t before = batches.size() + 2 - input.size().size();
  return d < before || input.size()[d - before] != batches[d] ? R : moved_to(shard, d - before);
}

}  // namespace

OpRule matmul(std::span<const DTensor> inputs) {
  const DTensor &a = inputs[0], &b = inputs[1];
  const std::size_t dims_a = a.size().size(), dims_b = b.size().size();
  if (dims_a < 2 || dims_b < 2 || a.size().back() != b.size()[dims_b - 2]) refuse("matmul", inputs);
  const Sizes batches = batch_sizes(inputs);
  OpRule rule{batches, {{{R, R}, R}}, true};
  rule.output_size.push_back(a.size()[dims_a - 2]);
  rule.output_size.push_back(b.size().back());
  const auto shards_with = [&](std::size_t d) {
    const std::size_t before = batches.size() + 2 - dims_a;
    std::vector<Placement> shards = {S(d)};
    if (d < before) return shards;
    for (const Placement& shard : shards_of(inputs, d - before)) shards.push_back(moved_to(shard, d));
    return shards;
  };
  for (std::size_t d = 0; d < batches.size(); ++d) {
    if (batches[d] == 1) continue;
    for (const Placement& shard : shards_with(d)) {
      rule.strategies.push_back({{batch_shard(a, d, batches, shard), batch_shard(b, d, batches, shard)}, shard});
    }
  }
  for (const Placement& rows : shards_of(inputs, dims_a - 2)) {
    rule.strategies.push_back({{rows, R}, moved_to(rows, batches.size())});
  }
  rule.strategies.push_back({{R, S(dims_b - 1)}, S(batches.size() + 1)});
  rule.strategies.push_back({{S(dims_a - 1), S(dims_b - 2)}, kSum});
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

OpRule cat(std::span<const DTensor> inputs, std::size_t dim) {
  OpRule rule{inputs[0].size(), {{Placements(inputs.size(), R), R}}};
  rule.output_size[dim] = 0;
  for (const DTensor& input : inputs) {
    Sizes size = input.size();
    if (size.size() != rule.output_size.size()) refuse("cat", inputs);
    rule.output_size[dim] += std::exchange(size[dim], inputs[0].size()[dim]);
    if (size != inputs[0].size()) refuse("cat", inputs);
  }
  const auto add = [&](const Placement& placement) {
    rule.strategies.push_back({Placements(inputs.size(), placement), placement});
  };
  for (std::size_t d = 0; d < rule.output_size.size(); ++d) {
    for (const Placement& shard : shards_of(inputs, d)) {
      if (d != dim) add(shard);
    }
  }
  for (const Placement& placement : inputs[0].placements()) {
    if (placement.is_partial()) add(placement);
  }
  return rule;
}

OpRule gather(std::span<const DTensor> inputs, std::size_t dim) {
  const DTensor &x = inputs[0], &index = inputs[1];
  if (x.size().size() != index.size().size()) refuse("gather", inputs);
  OpRule rule{index.size(), {{{R, R}, R}}, true};
  for (std::size_t d = 0; d < index.size().size(); ++d) {
    if (d != dim && index.size()[d] > x.size()[d]) refuse("gather", inputs);
    if (d != dim && index.size()[d] != x.size()[d]) continue;
    for (const Placement& shard : shards_of(inputs, d))
      rule.strategies.push_back({{d == dim ? R : shard, shard}, shard});
  }
  for (const Placement& shard : shards_of(inputs, dim)) rule.strategies.push_back({{shard, R}, kSum});
  return rule;
}

OpRule index_select(std::span<const DTensor> inputs, std::size_t dim) {
  if (inputs[1].size().size() != 1) refuse("index_select", inputs);
  OpRule rule{inputs[0].size(), {{{R, R}, R}}, true};
  rule.output_size[dim] = inputs[1].size()[0];
  for (std::size_t d = 0; d < rule.output_size.size(); ++d) {
    if (d == dim) {
      rule.strategies.push_back({{R, S(0)}, S(dim)});
    } else {
      for (const Placement& shard : shards_of(inputs, d)) rule.strategies.push_back({{shard, R}, shard});
    }
  }
  return rule;
}

OpRule attention(std::span<const DTensor> inputs, bool is_causal) {
  const Sizes &query = inputs[0].size(), &key = inputs[1].size(), &value = inputs[2].size();
  const std::size_t batches = query.size() - std::min<std::size_t>(query.size(), 2);
  const bool fits = query.size() >= 2 && key.size() == query.size() && value.size() == query.size() &&
                    std::equal(query.begin(), query.end() - 2, key.begin()) && key.back() == query.back() &&
                    std::equal(key.begin(), key.end() - 1, value.begin());
  if (!fits) refuse("scaled_dot_product_attention", inputs);
  OpRule rule{query, {{{R, R, R}, R}}, true};
  rule.output_size.back() = value.back();
  for (std::size_t d = 0; d < batches; ++d) {
    for (const Placement& shard : shards_of(inputs, d)) rule.strategies.push_back({{shard, shard, shard}, shard});
  }
  if (is_causal) return rule;
  for (const Placement& rows : shards_of(inputs, batches)) rule.strategies.push_back({{rows, R, R}, rows});
  return rule;
}

OpRule mapped(const DTensor& input, Sizes output_size, const DimMap& map) {
  OpRule rule{std::move(output_size), {{{R}, R}}};
  for (std::size_t d = 0; d < map.size(); ++d) {
    if (!map[d]) continue;
    for (const Placement& shard : shards_of({&input, 1}, d))
      rule.strategies.push_back({{shard}, moved_to(shard, *map[d])});
  }
  for (const Placement& placement : input.placements()) {
    if (placement.is_partial()) rule.strategies.push_back({{placement}, placement});
  }
  return rule;
}

Placements mapped(const Placements& placements, const DimMap& map) {
  Placements result = placements;
  for (Placement& placement : result) {
    if (placement.is_shard()) placement = moved_to(placement, *map[static_cast<std::size_t>(placement.dim())]);
  }
  return result;
}

namespace {

// Returns a number that divides the length of a dimension if the input's shards along it are even.
std::int64_t even_parts(const DTensor& input, std::size_t dim) {
  std::int64_t parts = 1;
  for (std::size_t m = 0; m < input.placements().size(); ++m) {
    const Placement& placement = input.placements()[m];
    if (placement.is_shard(static_cast<std::int64_t>(dim)))
      parts *= input.device_mesh().shape()[m] * placement.split_factor();
  }
  return parts;
}

// Returns the first dimension of a group [begin, end) that is longer than 1, or its last.
std::size_t first_of_group(const Sizes& size, std::size_t begin, std::size_t end) {
  std::size_t first = begin;
  while (first + 1 < end && size[first] == 1) ++first;
  return first;
}

}  // namespace

DimMap view_map(const DTensor& input, const Sizes& size) {
  const Sizes& from = input.size();
  DimMap map(from.size());
  if (input.numel() == 0) return map;
  for (std::size_t i = 0, o = 0; i < from.size() && o < size.size();) {
    const std::size_t begin = i, output_begin = o;
    std::int64_t volume = from[i++], output_volume = size[o++];
    while (volume != output_volume) {
      if (volume < output_volume) {
        volume *= from[i++];
      } else {
        output_volume *= size[o++];
      }
    }
    const std::size_t first = first_of_group(from, begin, i), output_first = first_of_group(size, output_begin, o);
    const std::int64_t parts = even_parts(input, first);
    if (from[first] == size[output_first] || (from[first] % parts == 0 && size[output_first] % parts == 0))
      map[first] = output_first;
  }
  return map;
}

}  // namespace tessera::rules

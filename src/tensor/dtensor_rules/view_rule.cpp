// How a view maps shards. Consecutive dimensions of the input and of the view form groups of equal volume. A rank has
// the elements of a group that are in its chunk of each of several equal parts of the group: a shard of a dimension of
// length b, with `before` elements in front of it in the group and a split factor f, has before * f parts. The same
// elements are a shard of that dimension of the view whose rows the parts and chunks end at.

#include <algorithm>
#include <functional>
#include <numeric>

#include "tensor/dtensor_rules/rules.h"

namespace tessera::rules {

namespace {

// Dimensions [begin, end) of the input that are [output_begin, output_end) of the view.
struct ViewGroup {
  std::size_t begin, end, output_begin, output_end;
  bool is_uneven = false;  // the ranks have different numbers of its elements
};

std::vector<ViewGroup> groups_of(const Sizes& from, const Sizes& to) {
  std::vector<ViewGroup> groups;
  for (std::size_t i = 0, o = 0; i < from.size() && o < to.size();) {
    const std::size_t begin = i, output_begin = o;
    std::int64_t volume = from[i++], output_volume = to[o++];
    while (volume != output_volume) {
      if (volume < output_volume) {
        volume *= from[i++];
      } else {
        output_volume *= to[o++];
      }
    }
    groups.push_back({begin, i, output_begin, o});
  }
  return groups;
}

std::int64_t product(const Sizes& size, std::size_t begin, std::size_t end) {
  return std::accumulate(size.begin() + static_cast<std::ptrdiff_t>(begin),
                         size.begin() + static_cast<std::ptrdiff_t>(end), std::int64_t{1}, std::multiplies<>());
}

// Returns the shard of the view whose rows are chunks of `parts` parts of the group, over `ranks` ranks.
std::optional<Placement> shard_of_parts(const Sizes& size, const ViewGroup& group, std::int64_t parts,
                                        std::int64_t ranks) {
  std::optional<Placement> found;
  for (std::size_t d = group.output_begin; d < group.output_end; ++d) {
    const std::int64_t before = product(size, group.output_begin, d), after = product(size, d + 1, group.output_end);
    if (parts % before != 0 || size[d] % (parts / before) != 0) continue;
    const std::int64_t factor = parts / before, rows = size[d] / factor;
    if (rows % ranks != 0 && after != 1) continue;
    found = Placement::strided_shard(static_cast<std::int64_t>(d), factor);
    if (size[d] != 1) break;
  }
  return found;
}

}  // namespace

std::vector<std::optional<Placement>> view_placements(const DTensor& input, const Sizes& size) {
  std::vector<std::optional<Placement>> result;
  Sizes from = input.size(), to = size;  // what the mesh dimensions so far leave of the tensor
  std::vector<ViewGroup> groups;
  if (input.numel() > 0) groups = groups_of(from, to);
  for (std::size_t m = 0; m < input.placements().size(); ++m) {
    const Placement& placement = input.placements()[m];
    if (!placement.is_shard()) {
      result.emplace_back(placement);
      continue;
    }
    result.emplace_back(std::nullopt);
    const auto dim = static_cast<std::size_t>(placement.dim());
    const auto group =
        std::find_if(groups.begin(), groups.end(), [&](const ViewGroup& g) { return g.begin <= dim && dim < g.end; });
    if (group == groups.end() || group->is_uneven || from[dim] % placement.split_factor() != 0) continue;
    const std::int64_t ranks = input.device_mesh().shape()[m];
    const bool is_even = from[dim] / placement.split_factor() % ranks == 0;
    if (!is_even && product(from, dim + 1, group->end) != 1) continue;
    const std::int64_t parts = product(from, group->begin, dim) * placement.split_factor();
    result[m] = shard_of_parts(to, *group, parts, ranks);
    if (!result[m]) continue;
    group->is_uneven = !is_even;
    if (!is_even) continue;
    from[dim] /= ranks;
    to[static_cast<std::size_t>(result[m]->dim())] /= ranks;
  }
  return result;
}

OpRule view(const DTensor& input, const Sizes& size) {
  const Placement replicated = Placement::replicate();
  OpRule rule{size, {{{replicated}, replicated}}};
  const std::vector<std::optional<Placement>> placements = view_placements(input, size);
  for (std::size_t m = 0; m < placements.size(); ++m) {
    if (placements[m]) rule.strategies.push_back({{input.placements()[m]}, *placements[m], m});
  }
  return rule;
}

}  // namespace tessera::rules

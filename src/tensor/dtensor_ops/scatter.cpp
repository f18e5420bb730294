// Ops with one index for each element, and what is shared by all ops that take indices.

#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index_reduce.h>
#include <ATen/ops/scatter.h>
#include <ATen/ops/scatter_add.h>
#include <ATen/ops/scatter_reduce.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <string>

#include "tensor/dtensor_ops/calls.h"
#include "tensor/dtensor_rules/shared_dims.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_factories.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::dtensor {

LocalPlaces local_places(const DTensor& x, std::int64_t dim, const at::Tensor& ids) {
  at::Tensor places = at::full_like(ids, -1);
  std::int64_t begin = 0;
  for (const Interval& interval :
       x.layout().local_intervals(static_cast<std::size_t>(dim), *x.device_mesh().coordinate())) {
    const at::Tensor is_here = ids.ge(interval.begin).logical_and(ids.lt(interval.end));
    places = at::where(is_here, ids.add(begin - interval.begin), places);
    begin += interval.size();
  }
  return {places.clamp_min(0), places.ge(0)};
}

std::string first_invalid(const at::Tensor& numbers, const at::Tensor& is_valid) {
  const at::Tensor first = numbers.to(at::kCPU).masked_select(is_valid.to(at::kCPU).logical_not()).select(0, 0);
  return at::isFloatingType(first.scalar_type()) ? fmt::format("{}", first.item<double>())
                                                 : fmt::format("{}", first.item<std::int64_t>());
}

LocalPlaces checked_places(const char* op, const DTensor& x, std::int64_t dim, const at::Tensor& ids,
                           std::int64_t lowest) {
  const std::int64_t length = x.size(dim);
  if (ids.numel() > 0) {
    const at::Tensor is_in = ids.ge(lowest).logical_and(ids.lt(length));
    if (!is_in.all().item<bool>()) {
      fail(ErrorCode::invalid_argument, "{} along dimension {}: index {} is out of range, expected {}", op, dim,
           first_invalid(ids, is_in),
           length > 0 ? fmt::format("{} to {}", lowest, length - 1) : "none, since the dimension has size 0");
    }
  }
  return local_places(x, dim, lowest < 0 ? at::where(ids.lt(0), ids.add(length), ids) : ids);
}

at::Tensor only_where(const at::Tensor& is_here, const at::Tensor& values) {
  return at::where(is_here, values, at::zeros({}, values.options().requires_grad(false)));
}

at::Tensor with_one_more(const at::Tensor& local, std::int64_t dim) {
  Sizes size = local.sizes().vec();
  size[static_cast<std::size_t>(dim)] = 1;
  return at::cat({local, at::zeros(size, local.options().requires_grad(false))}, dim);
}

namespace {

// Returns the dimensions but `dim` that are as long in all inputs.
std::vector<rules::SharedDim> other_dims(Inputs inputs, std::size_t dim) {
  std::vector<rules::SharedDim> others;
  for (std::size_t d = 0; d < inputs[0].size().size(); ++d) {
    const bool is_shared = d != dim && std::all_of(inputs.begin(), inputs.end(), [&](const DTensor& input) {
                             return input.size()[d] == inputs[0].size()[d];
                           });
    if (is_shared) others.push_back({d, std::vector<std::optional<std::size_t>>(inputs.size(), d)});
  }
  return others;
}

OpRule rule_of_gather(Inputs inputs, std::size_t dim) {
  const DTensor &x = inputs[0], &index = inputs[1];
  bool fits = x.size().size() == index.size().size();
  for (std::size_t d = 0; fits && d < x.size().size(); ++d) fits = d == dim || index.size()[d] <= x.size()[d];
  if (!fits) {
    rules::refuse_sizes(
        "gather", inputs,
        fmt::format("an index of {} dimensions, no longer than the tensor except along dimension {}", x.dim(), dim));
  }
  std::vector<rules::SharedDim> shared = other_dims(inputs, dim);
  shared.push_back({dim, {std::nullopt, dim}});
  OpRule rule = rules::shared(inputs, index.size(), shared);
  rules::add_partials(rule, inputs, std::array<std::size_t, 1>{0}, rules::Partials::any);
  if (volume(index.size()) > x.numel() || x.scalar_type() == at::kBool) return rule;
  for (const Placement& placement : x.placements()) {
    if (placement.is_shard(static_cast<std::int64_t>(dim)))
      rule.strategies.push_back({{placement, Placement::replicate()}, Placement::partial()});
  }
  return rule;
}

// Looks up the elements that this rank has; zeros for others.
at::Tensor gather_here(const DTensor& x, std::int64_t dim, const at::Tensor& index) {
  const at::Tensor& local = x.local_tensor();
  if (!is_sharded_along(x, dim)) return at::gather(local, dim, index);
  const LocalPlaces here = checked_places("gather", x, dim, index);
  return only_where(here.is_here,
                    at::gather(local.size(dim) == 0 ? with_one_more(local, dim) : local, dim, here.places));
}

// Calls f(x, ids, source) with local tensors. Elements for other ranks go to a place that is removed afterwards.
template <typename F>
at::Tensor written_here(const char* op, Inputs inputs, std::int64_t dim, const F& f) {
  const at::Tensor &local = inputs[0].local_tensor(), &ids = inputs[1].local_tensor(),
                   &source = inputs[2].local_tensor();
  if (!is_sharded_along(inputs[0], dim)) return f(local, ids, source);
  const LocalPlaces here = checked_places(op, inputs[0], dim, ids);
  const at::Tensor places = at::where(here.is_here, here.places, at::full_like(here.places, local.size(dim)));
  return f(with_one_more(local, dim), places, source).narrow(dim, 0, local.size(dim));
}

// For inputs {x, index, source}.
OpRule rule_of_scatter(const char* op, Inputs inputs, std::size_t dim, rules::Partials partials) {
  const DTensor &x = inputs[0], &index = inputs[1], &source = inputs[2];
  bool fits = index.size().size() == x.size().size() && source.size().size() == x.size().size();
  for (std::size_t d = 0; fits && d < x.size().size(); ++d) {
    fits = (d == dim || index.size()[d] <= x.size()[d]) && index.size()[d] <= source.size()[d];
  }
  if (!fits) {
    rules::refuse_sizes(op, inputs,
                        fmt::format("an index and a source of {} dimensions, the index no longer than the source, nor "
                                    "than the tensor except along dimension {}",
                                    x.dim(), dim));
  }
  std::vector<rules::SharedDim> shared = other_dims(inputs, dim);
  shared.push_back({dim, {dim, std::nullopt, std::nullopt}});
  OpRule rule = rules::shared(inputs, x.size(), shared);
  rules::add_partials(rule, inputs, std::array<std::size_t, 2>{0, 2}, partials);
  if (partials == rules::Partials::linear && index.size()[dim] == source.size()[dim] && x.scalar_type() != at::kBool) {
    // Each rank adds the elements of its indices.
    const Placement shard = Placement::shard(static_cast<std::int64_t>(dim));
    rule.strategies.push_back({{Placement::partial(), shard, shard}, Placement::partial()});
  }
  return rule;
}

template <typename F>
DTensor scattered(const char* op, const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source,
                  rules::Partials partials, const F& f) {
  const std::int64_t along = rules::dim_from_front(op, dim, x.dim());
  const std::vector<DTensor> inputs = {x, index, source};
  return call(
      op, inputs, [&](Inputs given) { return rule_of_scatter(op, given, static_cast<std::size_t>(along), partials); },
      [&](Inputs given) {
        return written_here(op, given, along, [&](const at::Tensor& to, const at::Tensor& ids, const at::Tensor& from) {
          return f(to, along, ids, from);
        });
      });
}

// Returns ATen's name of a reduction.
std::string name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::average:
      return "mean";
    case ReduceOp::product:
      return "prod";
    case ReduceOp::min:
      return "amin";
    case ReduceOp::max:
      break;
  }
  return "amax";
}

}  // namespace

DTensor gather(const DTensor& x, std::int64_t dim, const DTensor& index) {
  const std::int64_t along = rules::dim_from_front("gather", dim, x.dim());
  const std::vector<DTensor> both = {x, index};
  return call(
      "gather", both, [&](Inputs inputs) { return rule_of_gather(inputs, static_cast<std::size_t>(along)); },
      [&](Inputs inputs) { return gather_here(inputs[0], along, inputs[1].local_tensor()); });
}

DTensor scatter(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source) {
  return scattered("scatter", x, dim, index, source, rules::Partials::any,
                   [](const at::Tensor& to, std::int64_t along, const at::Tensor& ids, const at::Tensor& from) {
                     return at::scatter(to, along, ids, from);
                   });
}

DTensor scatter(const DTensor& x, std::int64_t dim, const DTensor& index, const at::Scalar& value) {
  return scatter(x, dim, index, full_like(index, value, at::TensorOptions(x.scalar_type())));
}

DTensor scatter_add(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source) {
  return scattered("scatter_add", x, dim, index, source, rules::Partials::linear,
                   [](const at::Tensor& to, std::int64_t along, const at::Tensor& ids, const at::Tensor& from) {
                     return at::scatter_add(to, along, ids, from);
                   });
}

DTensor scatter_reduce(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source, ReduceOp op,
                       bool includes_x) {
  if (op == ReduceOp::sum && includes_x) return scatter_add(x, dim, index, source);
  return scattered("scatter_reduce", x, dim, index, source, rules::Partials::none,
                   [&](const at::Tensor& to, std::int64_t along, const at::Tensor& ids, const at::Tensor& from) {
                     return at::scatter_reduce(to, along, ids, from, name_of(op), includes_x);
                   });
}

DTensor index_reduce(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source, ReduceOp op,
                     bool includes_x) {
  const std::int64_t along = rules::dim_from_front("index_reduce", dim, x.dim());
  if (op == ReduceOp::sum) {
    fail(ErrorCode::unsupported, "index_reduce by sum: expected another reduction, or call index_add");
  }
  const auto d = static_cast<std::size_t>(along);
  const auto rule = [&](Inputs inputs) {
    Sizes expected = x.size();
    expected[d] = index.numel();
    if (index.dim() != 1 || source.size() != expected) {
      rules::refuse_sizes("index_reduce", inputs,
                          "an index of one dimension and a source of size " + shape_to_string(expected));
    }
    std::vector<rules::SharedDim> shared;
    for (std::size_t other = 0; other < x.size().size(); ++other) {
      shared.push_back({other, {other, std::nullopt, other == d ? std::nullopt : std::optional(other)}});
    }
    return rules::shared(inputs, x.size(), shared);
  };
  const std::vector<DTensor> inputs = {x, index, source};
  return call("index_reduce", inputs, rule, [&](Inputs given) {
    return written_here("index_reduce", given, along,
                        [&](const at::Tensor& to, const at::Tensor& ids, const at::Tensor& from) {
                          return at::index_reduce(to, along, ids, from, name_of(op), includes_x);
                        });
  });
}

}  // namespace tessera::dtensor

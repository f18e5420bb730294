#include "tessera/tensor/dtensor_ops/convolution.h"

#include <ATen/ops/adaptive_avg_pool1d.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/adaptive_avg_pool3d.h>
#include <ATen/ops/adaptive_max_pool1d.h>
#include <ATen/ops/adaptive_max_pool2d.h>
#include <ATen/ops/adaptive_max_pool3d.h>
#include <ATen/ops/avg_pool1d.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/fractional_max_pool2d.h>
#include <ATen/ops/fractional_max_pool3d.h>
#include <ATen/ops/max_pool1d.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <ATen/ops/max_unpool2d.h>
#include <ATen/ops/max_unpool3d.h>

#include <algorithm>
#include <tuple>

#include "tensor/dtensor_ops/calls.h"
#include "tensor/dtensor_rules/shared_dims.h"
#include "tessera/base/error.h"
#include "tessera/comm/functional.h"
#include "tessera/layout/interval.h"

namespace tessera::dtensor {

namespace {

// Returns one number for each of `dims` spatial dimensions, all at least `least`.
Sizes spatial(const char* op, const char* option, const Sizes& numbers, std::size_t dims, std::int64_t least) {
  Sizes all = numbers.size() == 1 ? Sizes(dims, numbers[0]) : numbers;
  if (all.size() != dims || std::any_of(all.begin(), all.end(), [&](std::int64_t n) { return n < least; })) {
    fail(ErrorCode::invalid_argument, "{} with {} {}: expected one number >= {} or one for each of {} dimensions", op,
         option, shape_to_string(numbers), least, dims);
  }
  return all;
}

// Returns the number of spatial dimensions of x.
std::size_t spatial_dims(const char* op, const DTensor& x) {
  if (x.dim() < 3 || x.dim() > 5) {
    fail(ErrorCode::invalid_argument, "{} of size {}: expected [n, channels, ...] with one to three more dimensions",
         op, shape_to_string(x.size()));
  }
  return x.size().size() - 2;
}

// A convolution with one number for each spatial dimension.
struct Convolution {
  Sizes stride, padding, dilation, output_padding;
  bool transposed;
  std::int64_t groups;
  Sizes size;  // of the result

  Convolution(const DTensor& x, const DTensor& weight, const std::optional<DTensor>& bias,
              const ConvolutionOptions& options)
      : transposed(options.transposed), groups(options.groups) {
    const std::size_t dims = spatial_dims("convolution", x);
    stride = spatial("convolution", "stride", options.stride, dims, 1);
    padding = spatial("convolution", "padding", options.padding, dims, 0);
    dilation = spatial("convolution", "dilation", options.dilation, dims, 1);
    output_padding = spatial("convolution", "output_padding", options.output_padding, dims, 0);
    const Sizes &of_x = x.size(), &of_weight = weight.size();
    bool fits = of_weight.size() == of_x.size() && groups >= 1;
    std::int64_t out = 0;
    if (fits) {
      out = transposed ? of_weight[1] * groups : of_weight[0];
      fits = (transposed ? of_weight[0] : of_weight[1] * groups) == of_x[1] && of_x[1] % groups == 0 &&
             out % groups == 0 && (!bias || bias->size() == Sizes{out});
    }
    if (fits) {
      size = {of_x[0], out};
      for (std::size_t d = 0; d < dims; ++d) size.push_back(length_of(d, of_x[d + 2], of_weight[d + 2]));
      fits = std::all_of(size.begin() + 2, size.end(), [](std::int64_t n) { return n > 0; });
    }
    if (!fits) {
      fail(
          ErrorCode::invalid_argument,
          "convolution of size {} by weights of size {} and bias of {} in {} groups: expected [n, in, ...], weights {} "
          "of as many dimensions, a bias [out] or none, groups that divide in and out, and a kernel that fits",
          shape_to_string(of_x), shape_to_string(of_weight), bias ? shape_to_string(bias->size()) : "none", groups,
          transposed ? "[in, out / groups, ...]" : "[out, in / groups, ...]");
    }
  }

  std::int64_t length_of(std::size_t d, std::int64_t length, std::int64_t kernel) const {
    const std::int64_t reach = dilation[d] * (kernel - 1);
    return transposed ? (length - 1) * stride[d] - 2 * padding[d] + reach + output_padding[d] + 1
                      : (length + 2 * padding[d] - reach - 1) / stride[d] + 1;
  }
  // Returns the elements of x, from the front of its padding on, that elements `of` of the result need.
  Interval needed(std::size_t d, Interval of, std::int64_t kernel) const {
    if (of.begin == of.end) return {0, 0};
    return {of.begin * stride[d] - padding[d], (of.end - 1) * stride[d] - padding[d] + dilation[d] * (kernel - 1) + 1};
  }
};

OpRule rule_of_convolution(Inputs inputs, const Convolution& op) {
  const DTensor& x = inputs[0];
  const bool has_bias = inputs.size() > 2;
  const std::size_t out = op.transposed ? 1 : 0, in = 1 - out;  // dimensions of the weight
  const auto shared = [&](std::size_t output, std::optional<std::size_t> of_x, std::optional<std::size_t> of_weight,
                          std::optional<std::size_t> of_bias) {
    rules::SharedDim dim{output, {of_x, of_weight}};
    if (has_bias) dim.inputs.push_back(of_bias);
    return dim;
  };
  std::vector<rules::SharedDim> dims = {shared(0, 0, std::nullopt, std::nullopt)};
  if (op.groups == 1) dims.push_back(shared(1, std::nullopt, out, 0));
  if (op.groups > 1 && op.groups % x.device_mesh().size() == 0) dims.push_back(shared(1, 1, 0, 0));
  OpRule rule = rules::shared(inputs, op.size, dims);
  // Strided shards along several mesh dimensions could split a group.
  if (op.groups > 1) {
    std::erase_if(rule.strategies, [](const OpStrategy& strategy) {
      return strategy.output.is_strided() && strategy.output.is_shard(1);
    });
  }
  const auto add = [&](const Placement& of_x, const Placement& of_weight, const Placement& of_bias,
                       const Placement& output) {
    rule.strategies.push_back({{of_x, of_weight}, output});
    if (has_bias) rule.strategies.back().inputs.push_back(of_bias);
  };
  const Placement replicated = Placement::replicate(), sum = Placement::partial();
  if (op.groups == 1) add(Placement::shard(1), Placement::shard(static_cast<std::int64_t>(in)), sum, sum);
  if (op.transposed) return rule;
  // The ranks exchange edges along a spatial dimension that one mesh dimension shards.
  for (std::size_t m = 0; m < x.placements().size(); ++m) {
    const Placement& shard = x.placements()[m];
    const bool is_alone = std::count_if(x.placements().begin(), x.placements().end(), [&](const Placement& other) {
                            return shard.is_shard() && other.is_shard(shard.dim());
                          }) == 1;
    if (!is_alone || shard.dim() < 2 || shard.is_strided()) continue;
    add(shard, replicated, replicated, shard);
    rule.strategies.back().mesh_dim = m;
  }
  return rule;
}

// Returns the interval of each rank along mesh dimension `m`, of a dimension that it alone shards.
std::vector<Interval> intervals_of(const MeshLayout& layout, Sizes coordinate, std::size_t m, std::size_t dim) {
  std::vector<Interval> intervals;
  for (coordinate[m] = 0; coordinate[m] < layout.mesh_shape()[m]; ++coordinate[m]) {
    const std::vector<Interval> found = layout.local_intervals(dim, coordinate);
    intervals.push_back(found.empty() ? Interval{0, 0} : found[0]);
  }
  return intervals;
}

Interval shared_part(const Interval& a, const Interval& b) {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(std::min(a.end, b.end), begin)};
}

// Returns elements needed[rank] of dimension `dim`, of which rank r has has[r]. A collective; differentiable.
at::Tensor exchanged(const ProcessGroup& group, const at::Tensor& local, std::int64_t dim,
                     const std::vector<Interval>& has, const std::vector<Interval>& needed) {
  const auto mine = static_cast<std::size_t>(group.rank());
  const at::Tensor rows = local.transpose(0, dim);
  std::vector<at::Tensor> sent;
  Sizes in_splits, out_splits;
  for (std::size_t r = 0; r < has.size(); ++r) {
    const Interval out = shared_part(has[mine], needed[r]), in = shared_part(has[r], needed[mine]);
    sent.push_back(rows.narrow(0, out.size() > 0 ? out.begin - has[mine].begin : 0, out.size()));
    in_splits.push_back(out.size());
    out_splits.push_back(in.size());
  }
  return functional::all_to_all(group, at::cat(sent), out_splits, in_splits).transpose(0, dim);
}

at::Tensor convolution_here(Inputs inputs, const Convolution& op) {
  const DTensor& x = inputs[0];
  const DeviceMesh& mesh = x.device_mesh();
  const Sizes& coordinate = *mesh.coordinate();
  at::Tensor local = x.local_tensor();
  at::Tensor weight = inputs[1].local_tensor(), bias = inputs.size() > 2 ? inputs[2].local_tensor() : at::Tensor();
  const MeshLayout result(op.size, mesh.shape(), x.placements());
  Sizes padding = op.padding;
  const Sizes size = result.local_shape(coordinate).sizes;
  for (std::size_t m = 0; m < x.placements().size(); ++m) {
    const Placement& placement = x.placements()[m];
    if (!placement.is_shard() || placement.dim() < 2) continue;
    const auto dim = static_cast<std::size_t>(placement.dim()), d = dim - 2;
    std::vector<Interval> needed = intervals_of(result, coordinate, m, dim);
    for (Interval& interval : needed) interval = op.needed(d, interval, inputs[1].size()[dim]);
    const Interval own = needed[static_cast<std::size_t>(coordinate[m])];
    local = exchanged(mesh.group(static_cast<std::int64_t>(m)), local, placement.dim(),
                      intervals_of(x.layout(), coordinate, m, dim), needed);
    // What the rank needs beyond the ends of x is 0. A rank without a part of the result computes one element.
    Sizes sides(2 * (x.size().size() - dim), 0);
    sides[sides.size() - 2] = std::clamp<std::int64_t>(-own.begin, 0, own.size());
    sides[sides.size() - 1] = size[dim] == 0 ? op.needed(d, {0, 1}, inputs[1].size()[dim]).size()
                                             : std::clamp<std::int64_t>(own.end - x.size()[dim], 0, own.size());
    local = at::constant_pad_nd(local, sides, 0);
    padding[d] = 0;
  }
  const std::int64_t groups = op.groups * local.size(1) / std::max<std::int64_t>(x.size()[1], 1);
  // ATen takes no tensors without channels.
  const std::int64_t out = op.transposed ? 1 : 0, in = 1 - out;
  const bool has_output = weight.size(out) != 0;
  if (!has_output) {
    weight = with_one_more(weight, out);
    if (bias.defined()) bias = with_one_more(bias, 0);
  }
  if (local.size(1) == 0) {
    local = with_one_more(local, 1);
    weight = with_one_more(weight, in);
  }
  at::Tensor computed = at::convolution(local, weight, bias, op.stride, padding, op.dilation, op.transposed,
                                        op.output_padding, std::max<std::int64_t>(groups, 1));
  if (!has_output) computed = computed.narrow(1, 0, 0);
  for (std::size_t d = 2; d < size.size(); ++d) computed = computed.narrow(static_cast<std::int64_t>(d), 0, size[d]);
  return computed;
}

}  // namespace

DTensor convolution(const DTensor& x, const DTensor& weight, const std::optional<DTensor>& bias,
                    const ConvolutionOptions& options) {
  const Convolution op(x, weight, bias, options);
  return call(
      "convolution", inputs_of({&x, &weight}, {&bias}), [&](Inputs inputs) { return rule_of_convolution(inputs, op); },
      [&](Inputs inputs) { return convolution_here(inputs, op); });
}

// --- pooling

namespace {

using Tensors = std::vector<at::Tensor>;

// The size of x with other spatial sizes.
Sizes with_spatial(const DTensor& x, const Sizes& size) {
  Sizes all = {x.size()[0], x.size()[1]};
  all.insert(all.end(), size.begin(), size.end());
  return all;
}

// The rule of an op whose inputs and result, which has spatial sizes `size`, have the same batch and channels.
PlacementRule rule_of_pooling(const Sizes& size) {
  return [&size](Inputs inputs) {
    const std::vector<std::optional<std::size_t>> batch(inputs.size(), 0), channels(inputs.size(), 1);
    const std::vector<rules::SharedDim> kept = {{0, batch}, {1, channels}};
    return rules::shared(inputs, with_spatial(inputs[0], size), kept);
  };
}

// `f` takes a local tensor, and the result has spatial sizes `size`.
template <typename F>
DTensor pooled(const char* op, const DTensor& x, const Sizes& size, const F& f) {
  return call(op, {&x, 1}, rule_of_pooling(size), [&](Inputs inputs) {
    return even_if_empty(inputs[0].local_tensor(), {0, 1}, f);
  });
}

// As above, for an `f` that takes the local tensors of x and others, and returns values and places.
template <typename F>
ValuesAndIndices pooled_with_indices(const char* op, const std::vector<DTensor>& inputs, const Sizes& size,
                                     const F& f) {
  const auto compute = [&](Inputs placed) {
    return all_even_if_empty(locals_of(placed), {0, 1}, [&](const Tensors& locals) {
      const std::tuple<at::Tensor, at::Tensor> found = f(locals);
      return Tensors{std::get<0>(found), std::get<1>(found)};
    });
  };
  std::vector<DTensor> both = call_for_all(op, inputs, rule_of_pooling(size), {with_spatial(inputs[0], size)}, compute,
                                           {inputs[0].scalar_type(), at::kLong});
  return {both[0], both[1]};
}

struct Pooling {
  Sizes kernel, stride, padding, dilation, size;

  Pooling(const char* op, const DTensor& x, const PoolingOptions& options) {
    const std::size_t dims = spatial_dims(op, x);
    kernel = spatial(op, "kernel", options.kernel, dims, 1);
    stride = spatial(op, "stride", options.stride.empty() ? kernel : options.stride, dims, 1);
    padding = spatial(op, "padding", options.padding, dims, 0);
    dilation = spatial(op, "dilation", options.dilation, dims, 1);
    for (std::size_t d = 0; d < dims; ++d) {
      const std::int64_t length = x.size()[d + 2], rest = length + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1;
      if (rest < 0) {
        fail(ErrorCode::invalid_argument, "{} of size {} with a kernel {}: expected a kernel that fits", op,
             shape_to_string(x.size()), shape_to_string(kernel));
      }
      std::int64_t windows = rest / stride[d] + 1;
      if (options.ceil_mode && rest % stride[d] != 0 && windows * stride[d] < length + padding[d]) ++windows;
      size.push_back(windows);
    }
  }
};

}  // namespace

DTensor max_pool(const DTensor& x, const PoolingOptions& options) {
  const Pooling p("max_pool", x, options);
  return pooled("max_pool", x, p.size, [&](const at::Tensor& t) {
    const bool ceil = options.ceil_mode;
    return p.size.size() == 1   ? at::max_pool1d(t, p.kernel, p.stride, p.padding, p.dilation, ceil)
           : p.size.size() == 2 ? at::max_pool2d(t, p.kernel, p.stride, p.padding, p.dilation, ceil)
                                : at::max_pool3d(t, p.kernel, p.stride, p.padding, p.dilation, ceil);
  });
}

DTensor avg_pool(const DTensor& x, const PoolingOptions& options) {
  const Pooling p("avg_pool", x, options);
  return pooled("avg_pool", x, p.size, [&](const at::Tensor& t) {
    const bool ceil = options.ceil_mode, counts = options.count_include_pad;
    return p.size.size() == 1   ? at::avg_pool1d(t, p.kernel, p.stride, p.padding, ceil, counts)
           : p.size.size() == 2 ? at::avg_pool2d(t, p.kernel, p.stride, p.padding, ceil, counts)
                                : at::avg_pool3d(t, p.kernel, p.stride, p.padding, ceil, counts);
  });
}

DTensor adaptive_avg_pool(const DTensor& x, const Sizes& size) {
  const std::size_t dims = spatial_dims("adaptive_avg_pool", x);
  const Sizes to = spatial("adaptive_avg_pool", "size", size, dims, 1);
  return pooled("adaptive_avg_pool", x, to, [&](const at::Tensor& t) {
    return dims == 1   ? at::adaptive_avg_pool1d(t, to)
           : dims == 2 ? at::adaptive_avg_pool2d(t, to)
                       : at::adaptive_avg_pool3d(t, to);
  });
}

DTensor adaptive_max_pool(const DTensor& x, const Sizes& size) {
  return adaptive_max_pool_with_indices(x, size).values;
}

ValuesAndIndices max_pool_with_indices(const DTensor& x, const PoolingOptions& options) {
  const Pooling p("max_pool_with_indices", x, options);
  return pooled_with_indices("max_pool_with_indices", {x}, p.size, [&](const Tensors& locals) {
    const at::Tensor& t = locals[0];
    const bool ceil = options.ceil_mode;
    return p.size.size() == 1   ? at::max_pool1d_with_indices(t, p.kernel, p.stride, p.padding, p.dilation, ceil)
           : p.size.size() == 2 ? at::max_pool2d_with_indices(t, p.kernel, p.stride, p.padding, p.dilation, ceil)
                                : at::max_pool3d_with_indices(t, p.kernel, p.stride, p.padding, p.dilation, ceil);
  });
}

ValuesAndIndices adaptive_max_pool_with_indices(const DTensor& x, const Sizes& size) {
  const std::size_t dims = spatial_dims("adaptive_max_pool", x);
  const Sizes to = spatial("adaptive_max_pool", "size", size, dims, 1);
  return pooled_with_indices("adaptive_max_pool", {x}, to, [&](const Tensors& locals) {
    const at::Tensor& t = locals[0];
    return dims == 1   ? at::adaptive_max_pool1d(t, to)
           : dims == 2 ? at::adaptive_max_pool2d(t, to)
                       : at::adaptive_max_pool3d(t, to);
  });
}

DTensor max_unpool(const DTensor& x, const DTensor& indices, const Sizes& size) {
  const std::size_t dims = spatial_dims("max_unpool", x);
  const Sizes to = spatial("max_unpool", "size", size, dims, 1);
  const std::vector<DTensor> inputs = {x, indices};
  if (indices.size() != x.size()) rules::refuse_sizes("max_unpool", inputs, "indices of the size of the first tensor");
  const auto rule = [&](Inputs given) {
    OpRule pooling = rule_of_pooling(to)(given);
    const std::size_t of_x = 0;
    rules::add_partials(pooling, given, {&of_x, 1}, rules::Partials::linear);
    return pooling;
  };
  return call("max_unpool", inputs, rule, [&](Inputs placed) {
    return all_even_if_empty(locals_of(placed), {0, 1}, [&](const Tensors& locals) {
      const at::Tensor &t = locals[0], &places = locals[1];
      if (dims == 1) return Tensors{at::max_unpool2d(t.unsqueeze(3), places.unsqueeze(3), {to[0], 1}).squeeze(3)};
      return Tensors{dims == 2 ? at::max_unpool2d(t, places, to)
                               : at::max_unpool3d(t, places, to, {1, 1, 1}, {0, 0, 0})};
    })[0];
  });
}

ValuesAndIndices fractional_max_pool(const DTensor& x, const Sizes& kernel, const Sizes& size, const DTensor& samples) {
  const std::size_t dims = spatial_dims("fractional_max_pool", x);
  const Sizes of = spatial("fractional_max_pool", "kernel", kernel, dims, 1);
  const Sizes to = spatial("fractional_max_pool", "size", size, dims, 1);
  bool fits = dims > 1 && samples.size() == Sizes{x.size(0), x.size(1), static_cast<std::int64_t>(dims)};
  for (std::size_t d = 0; d < dims; ++d) fits = fits && of[d] - 1 <= x.size()[d + 2] - to[d];
  if (!fits) {
    fail(ErrorCode::invalid_argument,
         "fractional_max_pool of size {} to {} with a kernel {} and samples of size {}: expected two or three spatial "
         "dimensions, windows that fit, and [n, channels, spatial dimensions] samples",
         shape_to_string(x.size()), shape_to_string(to), shape_to_string(of), shape_to_string(samples.size()));
  }
  return pooled_with_indices("fractional_max_pool", {x, samples.detach()}, to, [&](const Tensors& locals) {
    const at::Tensor &t = locals[0], &drawn = locals[1];
    const at::Tensor is_in = drawn.ge(0).logical_and(drawn.lt(1));
    if (!is_in.all().item<bool>()) {
      fail(ErrorCode::invalid_argument, "fractional_max_pool: sample {} is out of range, expected a number of [0, 1)",
           first_invalid(drawn, is_in));
    }
    return dims == 2 ? at::fractional_max_pool2d(t, of, to, drawn) : at::fractional_max_pool3d(t, of, to, drawn);
  });
}

}  // namespace tessera::dtensor

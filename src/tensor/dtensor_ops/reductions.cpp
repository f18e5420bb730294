#include <ATen/TensorOperators.h>
#include <ATen/ops/all.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/any.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/prod.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/square.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tensor/dtensor/explicit_redistribution.h"
#include "tensor/dtensor_ops/calls.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/dtensor_ops/normalization.h"

namespace tessera::dtensor {

namespace {

// Returns the partial placement of a maximum or minimum, if every rank has elements to reduce and no gradient is
// needed: the gradient would have to know which rank's elements are the extremes.
std::optional<Placement> extreme(const DTensor& x, const Sizes& dims, ReduceOp op) {
  if (x.requires_grad()) return std::nullopt;
  for (std::int64_t i = 0; i < x.device_mesh().size(); ++i) {
    const LocalShape local = x.layout().local_shape(mesh_coordinate(x.device_mesh().shape(), i));
    for (const std::int64_t dim : dims) {
      if (local.sizes[static_cast<std::size_t>(dim)] == 0) return std::nullopt;
    }
  }
  return Placement::partial(op);
}

std::int64_t volume_of(const char* op, const DTensor& x, const Sizes& dims) {
  std::int64_t count = 1;
  for (const std::int64_t dim : rules::dims_from_front(op, dims, x.dim())) count *= x.size(dim);
  return count;
}

// Returns x without partial placements.
DTensor without_partials(const DTensor& x) { return redistributed_by_op(x, x.grad_placements()); }

// Returns x, widened, minus its maximum along `dim`, so that no exponential overflows.
DTensor shifted(const DTensor& x, std::int64_t dim) {
  const DTensor wide = widened(without_partials(x));
  return x.size(dim) == 0 ? wide : sub(wide, amax(wide.detach(), {dim}, true));
}

}  // namespace

void refuse_integers(const char* op, const DTensor& x) {
  if (at::isFloatingType(x.scalar_type()) || at::isComplexType(x.scalar_type())) return;
  fail(ErrorCode::invalid_argument, "{} of {}: expected a floating-point or complex dtype", op,
       c10::toString(x.scalar_type()));
}

namespace {

// Returns the last dimensions, whose sizes must be `normalized_shape`.
Sizes last_dims(const char* op, const DTensor& x, const Sizes& normalized_shape) {
  Sizes last(x.size().end() - static_cast<std::ptrdiff_t>(std::min(normalized_shape.size(), x.size().size())),
             x.size().end());
  if (last != normalized_shape || last.empty()) {
    fail(ErrorCode::invalid_argument, "{} of size {} over {}: expected the sizes of its last dimensions", op,
         shape_to_string(x.size()), shape_to_string(normalized_shape));
  }
  Sizes over(normalized_shape.size());
  std::iota(over.begin(), over.end(), x.dim() - static_cast<std::int64_t>(over.size()));
  return over;
}

}  // namespace

DTensor layer_norm(const DTensor& x, const Sizes& normalized_shape, const std::optional<DTensor>& weight,
                   const std::optional<DTensor>& bias, double eps) {
  const Sizes over = last_dims("layer_norm", x, normalized_shape);
  const std::vector<DTensor> inputs = inputs_of({&x}, {&weight, &bias});
  return along_dims("layer_norm", inputs, over, [&](Inputs local) {
    std::size_t next = 1;
    const at::Tensor scale = weight ? local[next++].local_tensor() : at::Tensor();
    return at::layer_norm(local[0].local_tensor(), normalized_shape, scale,
                          bias ? local[next].local_tensor() : at::Tensor(), eps);
  });
}

DTensor rms_norm(const DTensor& x, const Sizes& normalized_shape, const std::optional<DTensor>& weight,
                 std::optional<double> eps) {
  const Sizes over = last_dims("rms_norm", x, normalized_shape);
  const std::vector<DTensor> inputs = inputs_of({&x}, {&weight});
  return along_dims("rms_norm", inputs, over, [&](Inputs local) {
    const at::ScalarType dtype = x.scalar_type();
    const at::Tensor t = local[0].local_tensor().to(at::toOpMathType(dtype));
    const double added = eps.value_or(t.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                                     : std::numeric_limits<float>::epsilon());
    const at::Tensor result = t * at::rsqrt(at::square(t).mean(over, true) + added);
    return (weight ? result * local[1].local_tensor() : result).to(dtype);
  });
}

namespace {

// Throws unless x has channels and each of `parameters`, if it is there, has a number for each.
void check_channels(const char* op, const DTensor& x, std::initializer_list<const std::optional<DTensor>*> parameters) {
  bool fits = x.dim() >= 2;
  for (const std::optional<DTensor>* each : parameters) fits = fits && (!*each || (*each)->size() == Sizes{x.size(1)});
  if (!fits) rules::refuse_sizes(op, inputs_of({&x}, parameters), "[n, channels, ...] and parameters of [channels]");
}

// Returns numbers of channels so that they are broadcast to x.
DTensor for_channels(const DTensor& numbers, const DTensor& x) {
  Sizes size(x.size().size() - 1, 1);
  size[0] = x.size(1);
  return reshape(numbers, size);
}

// Returns the result of the dtype of x, whose parameters may have another one: those of float for an x of half
// precision.
DTensor with_weight_and_bias(const DTensor& x, const DTensor& normalized, const std::optional<DTensor>& weight,
                             const std::optional<DTensor>& bias) {
  const DTensor scaled = weight ? mul(normalized, for_channels(*weight, normalized)) : normalized;
  const DTensor result = bias ? add(scaled, for_channels(*bias, normalized)) : scaled;
  return result.scalar_type() == x.scalar_type() ? result : to(result, x.scalar_type());
}

}  // namespace

DTensor group_norm(const DTensor& x, std::int64_t groups, const std::optional<DTensor>& weight,
                   const std::optional<DTensor>& bias, double eps) {
  check_channels("group_norm", x, {&weight, &bias});
  if (groups < 1 || x.size(1) % groups != 0) {
    fail(ErrorCode::invalid_argument, "group_norm of size {} in {} groups: expected a number that divides the channels",
         shape_to_string(x.size()), groups);
  }
  const std::int64_t length = x.size(1) / groups * volume(Sizes(x.size().begin() + 2, x.size().end()));
  const DTensor normalized =
      layer_norm(view(widened(x), {x.size(0), groups, length}), {length}, std::nullopt, std::nullopt, eps);
  return with_weight_and_bias(x, view(normalized, x.size()), weight, bias);
}

DTensor batch_norm(const DTensor& x, const std::optional<DTensor>& weight, const std::optional<DTensor>& bias,
                   const BatchNormOptions& options) {
  const std::optional<DTensor>&running_mean = options.running_mean, &running_var = options.running_var;
  const bool training = options.training;
  refuse_integers("batch_norm", x);
  check_channels("batch_norm", x, {&weight, &bias, &running_mean, &running_var});
  const std::int64_t count = x.numel() / std::max<std::int64_t>(x.size(1), 1);
  const bool has_running = running_mean && running_var;
  if (running_mean.has_value() != running_var.has_value() || (!training && !has_running) || (training && count < 2)) {
    fail(ErrorCode::invalid_argument,
         "batch_norm of size {} {} training, with {} of running mean and variance: expected both or none, both without "
         "training, and more than one value for each channel in training",
         shape_to_string(x.size()), training ? "in" : "without",
         has_running                   ? "both"
         : running_mean || running_var ? "one"
                                       : "none");
  }
  const DTensor wide = widened(x);
  Sizes over(x.size().size() - 1, 0);
  std::iota(over.begin() + 1, over.end(), 2);
  const DTensor mean = training ? without_partials(dtensor::mean(wide, over, true)) : for_channels(*running_mean, x);
  const DTensor var = training ? without_partials(dtensor::var(wide, over, 0, true)) : for_channels(*running_var, x);
  const DTensor normalized = mul(sub(wide, mean), rsqrt(add(var, options.eps)));
  if (training && has_running) {
    const at::NoGradGuard no_grad;
    const auto update = [&, by = options.momentum](const DTensor& running, const DTensor& found) {
      copy_(running, add(mul(running, 1 - by), mul(reshape(found, running.size()), by)));
    };
    update(*running_mean, mean);
    update(*running_var, mul(var, static_cast<double>(count) / static_cast<double>(count - 1)));
  }
  return with_weight_and_bias(x, normalized, weight, bias);
}

DTensor softmax(const DTensor& x, std::int64_t dim) {
  refuse_integers("softmax", x);
  const Sizes over = rules::dims_from_front("softmax", {dim}, x.dim());
  if (!over.empty() && is_sharded_along(x, over[0])) {
    const DTensor exponentials = exp(shifted(x, over[0]));
    return to(div(exponentials, sum(exponentials, over, true)), x.scalar_type());
  }
  return along_dims("softmax", x, over, [&](const at::Tensor& t) { return at::softmax(t, dim); });
}

DTensor safe_softmax(const DTensor& x, std::int64_t dim) {
  const DTensor is_masked = all(eq(x.detach(), -std::numeric_limits<double>::infinity()), {dim}, true);
  return masked_fill(softmax(masked_fill(x, is_masked, 0), dim), is_masked, 0);
}

DTensor log_softmax(const DTensor& x, std::int64_t dim) {
  refuse_integers("log_softmax", x);
  const Sizes over = rules::dims_from_front("log_softmax", {dim}, x.dim());
  if (!over.empty() && is_sharded_along(x, over[0])) {
    const DTensor shift = shifted(x, over[0]);
    return to(sub(shift, log(sum(exp(shift), over, true))), x.scalar_type());
  }
  return along_dims("log_softmax", x, over, [&](const at::Tensor& t) { return at::log_softmax(t, dim); });
}

DTensor sum(const DTensor& x, const Sizes& dims, bool keepdim) {
  return reduction(
      "sum", x, dims, keepdim, Placement::partial(),
      [&](const at::Tensor& t, const Sizes& over) { return at::sum(t, over, keepdim); }, summed_dtypes(x));
}

DTensor nansum(const DTensor& x, const Sizes& dims, bool keepdim) {
  const DTensor numbers =
      unary("nansum", x, Linearity::none, [](const at::Tensor& t) { return t.masked_fill(t.isnan(), 0); });
  return sum(numbers, dims, keepdim);
}

DTensor mean(const DTensor& x, const Sizes& dims, bool keepdim) {
  refuse_integers("mean", x);
  const auto count = static_cast<double>(volume_of("mean", x, dims));
  return reduction("mean", x, dims, keepdim, Placement::partial(), [&](const at::Tensor& t, const Sizes& over) {
    return at::sum(t, over, keepdim, at::toOpMathType(t.scalar_type())).div(count).to(t.scalar_type());
  });
}

DTensor amax(const DTensor& x, const Sizes& dims, bool keepdim) {
  const std::optional<Placement> partial = extreme(x, rules::dims_from_front("amax", dims, x.dim()), ReduceOp::max);
  return reduction("amax", x, dims, keepdim, partial,
                   [&](const at::Tensor& t, const Sizes& over) { return at::amax(t, over, keepdim); });
}

DTensor amin(const DTensor& x, const Sizes& dims, bool keepdim) {
  const std::optional<Placement> partial = extreme(x, rules::dims_from_front("amin", dims, x.dim()), ReduceOp::min);
  return reduction("amin", x, dims, keepdim, partial,
                   [&](const at::Tensor& t, const Sizes& over) { return at::amin(t, over, keepdim); });
}

namespace {

// Returns |x|^2.
DTensor squared_magnitude(const DTensor& x) { return square(at::isComplexType(x.scalar_type()) ? abs(x) : x); }

// Returns the variance of widened(x).
DTensor wide_var(const DTensor& x, const Sizes& dims, std::int64_t correction, bool keepdim) {
  // Reduces the means, which are few: else the deviations of shards would be partial, and all of them be reduced.
  const DTensor wide = widened(x), deviations = sub(wide, without_partials(mean(wide, dims, true)));
  const double count = static_cast<double>(volume_of("var", x, dims) - correction);
  return div(sum(squared_magnitude(deviations), dims, keepdim), std::max(count, 0.0));
}

}  // namespace

DTensor var(const DTensor& x, const Sizes& dims, std::int64_t correction, bool keepdim) {
  return narrowed_as(x, wide_var(x, dims, correction, keepdim));
}

DTensor std(const DTensor& x, const Sizes& dims, std::int64_t correction, bool keepdim) {
  return narrowed_as(x, root(wide_var(x, dims, correction, keepdim), 2));
}

DTensor prod(const DTensor& x, const Sizes& dims, bool keepdim) {
  // The gradient needs the factors of the other ranks.
  const std::optional<Placement> partial =
      x.requires_grad() ? std::nullopt : std::optional(Placement::partial(ReduceOp::product));
  const auto compute = [&](at::Tensor t, const Sizes& over) {
    if (over.empty()) return at::prod(t);
    for (auto dim = over.rbegin(); dim != over.rend(); ++dim) t = at::prod(t, *dim, keepdim);
    return t;
  };
  return reduction("prod", x, dims, keepdim, partial, compute, summed_dtypes(x));
}

DTensor logsumexp(const DTensor& x, const Sizes& dims, bool keepdim) {
  if (volume_of("logsumexp", x, dims) == 0) return log(sum(exp(x), dims, keepdim));  // there is no maximum
  const DTensor wide = widened(x), greatest = amax(wide.detach(), dims, true);
  const DTensor shift = masked_fill(greatest, eq(abs(greatest), std::numeric_limits<double>::infinity()), 0);
  const DTensor result = add(log(sum(exp(sub(wide, shift)), dims, true)), shift);
  return narrowed_as(x, keepdim ? result : sum(result, dims));  // over dimensions of size 1
}

namespace {

// Reduces the mask of elements that are not 0 by `f` along one dimension after the other, and across ranks by `op`.
template <typename F>
DTensor reduced_mask(const char* name, const DTensor& x, const Sizes& dims, bool keepdim, ReduceOp op, const F& f) {
  const auto compute = [&](at::Tensor t, const Sizes& over) {
    for (auto dim = over.rbegin(); dim != over.rend(); ++dim) t = f(t, *dim);
    return t.to(at::kByte);
  };
  return to(reduction(name, ne(x, 0), dims, keepdim, Placement::partial(op), compute, {at::kByte}), at::kBool);
}

}  // namespace

DTensor any(const DTensor& x, const Sizes& dims, bool keepdim) {
  return reduced_mask("any", x, dims, keepdim, ReduceOp::max,
                      [&](const at::Tensor& t, std::int64_t dim) { return at::any(t, dim, keepdim); });
}

DTensor all(const DTensor& x, const Sizes& dims, bool keepdim) {
  return reduced_mask("all", x, dims, keepdim, ReduceOp::min,
                      [&](const at::Tensor& t, std::int64_t dim) { return at::all(t, dim, keepdim); });
}

namespace {

// Returns x^p of an x >= 0. A power has no gradient at 0 if p < 1: it takes that of the power of 1, times 0.
DTensor power(const DTensor& x, double p) {
  const DTensor base = without_partials(x), is_zero = eq(base.detach(), 0), safe = masked_fill(base, is_zero, 1);
  return masked_fill(p == 0.5 ? sqrt(safe) : pow(safe, p), is_zero,
                     p > 0 ? 0 : std::numeric_limits<double>::infinity());
}

}  // namespace

DTensor wide_powsum(const DTensor& x, double p, const Sizes& dims, bool keepdim) {
  if (!std::isfinite(p)) fail(ErrorCode::invalid_argument, "powsum of order {}: expected a finite number", p);
  const DTensor wide = widened(x);
  if (p == 0) return sum(to(ne(x.detach(), 0), c10::toRealValueType(wide.scalar_type())), dims, keepdim);
  if (p == 1) return sum(abs(wide), dims, keepdim);
  if (p == 2) return sum(squared_magnitude(wide), dims, keepdim);
  return sum(p > 1 ? pow(abs(wide), p) : power(abs(wide), p), dims, keepdim);
}

DTensor powsum(const DTensor& x, double p, const Sizes& dims, bool keepdim) {
  DTensor powers = wide_powsum(x, p, dims, keepdim);
  if (at::toOpMathType(x.scalar_type()) == x.scalar_type()) return powers;
  // Unlike `to`, this narrows each rank's part of the sum.
  return unary("powsum", powers, Linearity::linear, [&](const at::Tensor& t) { return t.to(x.scalar_type()); });
}

DTensor root(const DTensor& powers, double p) { return p == 0 || p == 1 ? powers : power(powers, 1 / p); }

void check_norm(const char* op, const DTensor& x, double p, const Sizes& dims) {
  if (std::isnan(p)) fail(ErrorCode::invalid_argument, "{} of order {}: expected a number", op, p);
  refuse_integers(op, x);
  if ((p < 0 || std::isinf(p)) && volume_of(op, x, dims) == 0) {
    fail(ErrorCode::invalid_argument, "{} of order {} of no elements, of size {}: expected one or more", op, p,
         shape_to_string(x.size()));
  }
}

DTensor vector_norm(const DTensor& x, double p, const Sizes& dims, bool keepdim) {
  check_norm("vector_norm", x, p, dims);
  if (std::isinf(p)) return p > 0 ? amax(abs(x), dims, keepdim) : amin(abs(x), dims, keepdim);
  return narrowed_as(x, root(wide_powsum(x, p, dims, keepdim), p));
}

DTensor histc(const DTensor& x, std::int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  double low = min.toDouble(), high = max.toDouble();
  if (bins < 1 || !(low <= high)) {
    fail(ErrorCode::invalid_argument,
         "histc in {} bins from {} to {}: expected one bin or more, and an ascending range", bins, low, high);
  }
  const DTensor values = x.detach();
  if (low == high && x.numel() > 0) {
    const at::Tensor least = amin(values).full_tensor(), greatest = amax(values).full_tensor();
    if (x.device_mesh().has_this_rank()) {
      low = least.item<double>();
      high = greatest.item<double>();
    }
  }
  if (low == high) {
    low -= 1;
    high += 1;
  }
  const auto rule = [&](Inputs inputs) {
    OpRule given =
        rules::reduction(inputs[0], rules::dims_from_front("histc", {}, x.dim()), false, Placement::partial());
    given.output_size = {bins};
    // Counts of partial sums are not those of the tensor.
    std::erase_if(given.strategies, [](const OpStrategy& strategy) { return strategy.inputs[0].is_partial(); });
    return given;
  };
  return call("histc", {&values, 1}, rule,
              [&](Inputs inputs) { return at::histc(inputs[0].local_tensor().contiguous(), bins, low, high); });
}

DTensor along_dims(const std::string& op, const std::vector<DTensor>& inputs, const Sizes& dims,
                   FunctionRef<at::Tensor(Inputs inputs)> compute) {
  if (inputs.empty()) fail(ErrorCode::invalid_argument, "{}: no inputs, expected at least one DTensor", op);
  const Sizes over = rules::dims_from_front(op.c_str(), dims, inputs[0].dim());
  return call(
      op, inputs, [&](Inputs given) { return rules::along_dims(given, over); }, compute);
}

bool equal(const DTensor& a, const DTensor& b) {
  const DeviceMesh& mesh = a.device_mesh();
  if (mesh.has_this_rank()) {
    mesh.group().check_call("equal of DTensors", [&](CallArguments& arguments) {
      for (const DTensor* tensor : {&a, &b}) {
        if (!(tensor->device_mesh() == mesh)) {
          fail(ErrorCode::invalid_argument, "equal: {} and {}, expected one mesh", a.to_string(), b.to_string());
        }
        static_cast<void>(tensor->local_tensor());  // throws if it is a LocalShardsWrapper
        arguments.add("tensor", tensor->to_string()).add("dtype", c10::toString(tensor->scalar_type()));
      }
    });
  }
  if (a.size() != b.size() || a.scalar_type() != b.scalar_type()) return false;
  const DTensor first = a.detach(), second = b.detach();
  const Placements reduced = first.grad_placements();
  const at::Tensor mine = redistributed_by_op(first, reduced).to_local(),
                   theirs = redistributed_by_op(second, reduced).to_local();
  if (!mesh.has_this_rank()) return true;
  const at::Tensor is_equal = at::full({1}, at::equal(mine, theirs) ? 1 : 0, at::kLong);
  mesh.group().start_all_reduce(is_equal, ReduceOp::min).wait();
  return is_equal.item<std::int64_t>() != 0;
}

}  // namespace tessera::dtensor

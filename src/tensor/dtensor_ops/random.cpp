// Random values in place, drawn from the elements of a tensor, and dropped at random.

#include <ATen/TensorOperators.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tensor/dtensor/random_numbers.h"
#include "tensor/dtensor_ops/calls.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_factories.h"

namespace tessera::dtensor {

namespace {

// Returns the dtype in which numbers are drawn to decide on elements of x, whose values may be integers.
at::ScalarType drawn_type(const DTensor& x) {
  return at::isFloatingType(x.scalar_type()) ? at::toOpMathType(x.scalar_type()) : at::kDouble;
}

// Fills x by f(numbers), in place. The numbers are drawn in `dtype`.
template <typename F>
DTensor initialized(const char* op, const DTensor& x, PhiloxGenerator& generator, Distribution distribution,
                    at::ScalarType dtype, const F& f) {
  const at::NoGradGuard no_grad;
  DTensor result = call_in_place(
      op, {&x, 1}, [&](Inputs inputs) { return rules::elementwise(op, inputs, Linearity::none); },
      [&](Inputs inputs) -> at::Tensor {
        const at::Tensor& local = inputs[0].local_tensor();
        local.copy_(f(random_local(x.layout(), *x.device_mesh().coordinate(),
                                   local.options().dtype(dtype).requires_grad(false), generator, distribution)));
        return local;
      });
  advance(generator, x.numel());
  return result;
}

}  // namespace

DTensor uniform_(const DTensor& x, PhiloxGenerator& generator, double low, double high) {
  if (!(low <= high))
    fail(ErrorCode::invalid_argument, "uniform_ from {} to {}: expected no more than the end", low, high);
  return initialized("uniform_", x, generator, Distribution::uniform, x.scalar_type(),
                     [&](const at::Tensor& numbers) { return numbers * (high - low) + low; });
}

DTensor normal_(const DTensor& x, PhiloxGenerator& generator, double mean, double std) {
  if (!(std >= 0)) fail(ErrorCode::invalid_argument, "normal_ with standard deviation {}: expected at least 0", std);
  return initialized("normal_", x, generator, Distribution::normal, x.scalar_type(),
                     [&](const at::Tensor& numbers) { return numbers * std + mean; });
}

DTensor log_normal_(const DTensor& x, PhiloxGenerator& generator, double mean, double std) {
  if (!(std > 0))
    fail(ErrorCode::invalid_argument, "log_normal_ with standard deviation {}: expected more than 0", std);
  return initialized("log_normal_", x, generator, Distribution::normal, x.scalar_type(),
                     [&](const at::Tensor& numbers) { return (numbers * std + mean).exp(); });
}

DTensor exponential_(const DTensor& x, PhiloxGenerator& generator, double rate) {
  if (!(rate > 0)) fail(ErrorCode::invalid_argument, "exponential_ with rate {}: expected more than 0", rate);
  return initialized("exponential_", x, generator, Distribution::exponential, x.scalar_type(),
                     [&](const at::Tensor& numbers) { return numbers / rate; });
}

DTensor geometric_(const DTensor& x, PhiloxGenerator& generator, double p) {
  if (!(p > 0 && p < 1)) {
    fail(ErrorCode::invalid_argument, "geometric_ with probability {}: expected more than 0 and less than 1", p);
  }
  const double rate = -std::log1p(-p);
  return initialized("geometric_", x, generator, Distribution::exponential, drawn_type(x),
                     [&](const at::Tensor& numbers) { return (numbers / rate).ceil(); });
}

DTensor kaiming_uniform_(const DTensor& x, PhiloxGenerator& generator, double a) {
  if (x.dim() < 2) {
    fail(ErrorCode::invalid_argument, "kaiming_uniform_ of size {}: expected two dimensions or more",
         shape_to_string(x.size()));
  }
  const double fan_in = static_cast<double>(x.numel()) / static_cast<double>(std::max<std::int64_t>(x.size(0), 1));
  const double bound = std::sqrt(6 / ((1 + a * a) * std::max(fan_in, 1.0)));
  return uniform_(x, generator, -bound, bound);
}

DTensor bernoulli_(const DTensor& x, PhiloxGenerator& generator, double p) {
  if (!(p >= 0 && p <= 1)) fail(ErrorCode::invalid_argument, "bernoulli_ with probability {}: expected 0 to 1", p);
  return initialized("bernoulli_", x, generator, Distribution::uniform, drawn_type(x),
                     [&](const at::Tensor& numbers) { return numbers.lt(p); });
}

DTensor bernoulli(const DTensor& x, PhiloxGenerator& generator) {
  DTensor result = unary("bernoulli", x.detach(), Linearity::none, [&](const at::Tensor& local) {
    if (local.is_meta()) return local;
    const at::Tensor is_in = local.ge(0).logical_and(local.le(1));
    if (!is_in.all().item<bool>()) {
      fail(ErrorCode::invalid_argument, "bernoulli: probability {} is out of range, expected 0 to 1",
           first_invalid(local, is_in));
    }
    return local;
  });
  const DeviceMesh& mesh = result.device_mesh();
  if (mesh.has_this_rank()) {
    const at::Tensor& local = result.local_tensor();
    const at::Tensor numbers =
        random_local(result.layout(), *mesh.coordinate(), local.options().dtype(at::toOpMathType(local.scalar_type())),
                     generator, Distribution::uniform);
    result = DTensor(mesh, result.layout(), numbers.lt(local).to(local.scalar_type()));
  }
  advance(generator, x.numel());
  return result;
}

namespace {

// Throws if no category of a row, or too few of them, can be drawn.
void check_weights(const at::Tensor& weights, std::int64_t least) {
  const at::Tensor sums = weights.sum(-1);
  const bool are_valid = weights.ge(0).all().item<bool>() && sums.isfinite().all().item<bool>() &&
                         weights.gt(0).sum(-1).ge(least).all().item<bool>();
  if (!are_valid) {
    fail(ErrorCode::invalid_argument,
         "multinomial: a row has weights that are negative or not finite, or too few above 0, expected finite weights "
         "of "
         "at least 0 and at least {} above 0",
         least);
  }
}

}  // namespace

DTensor multinomial(const DTensor& x, std::int64_t samples, PhiloxGenerator& generator, bool replacement) {
  const std::int64_t categories = x.dim() > 0 ? x.size(-1) : 0;
  if (x.dim() < 1 || x.dim() > 2 || !at::isFloatingType(x.scalar_type()) || samples < 1 ||
      categories < (replacement ? 1 : samples)) {
    fail(ErrorCode::invalid_argument,
         "multinomial of {} samples {} replacement from size {} of {}: expected floating-point weights [categories] or "
         "[rows, categories], and at least one sample, without replacement no more than the categories",
         samples, replacement ? "with" : "without", shape_to_string(x.size()), c10::toString(x.scalar_type()));
  }
  Sizes size = x.size();
  size.back() = samples;
  const auto rule = [&](Inputs inputs) {
    OpRule given = rules::along_dims(inputs, {x.dim() - 1});
    given.output_size = size;
    return with_dtypes(given, {at::kLong});
  };
  const DTensor weights_of_all = x.detach();
  DTensor result = call("multinomial", {&weights_of_all, 1}, rule, [&](Inputs inputs) -> at::Tensor {
    const DeviceMesh& mesh = inputs[0].device_mesh();
    const at::Tensor weights = inputs[0].local_tensor().to(at::kDouble);
    mesh.group().agree_on("multinomial", [&] { check_weights(weights, replacement ? 1 : samples); });
    if (!replacement) {
      // The category whose event comes first, of events that come at the rate of their weight; then the next one.
      const at::Tensor times =
          random_local(inputs[0].layout(), *mesh.coordinate(), weights.options(), generator, Distribution::exponential);
      return std::get<1>((weights / times).topk(samples, -1));
    }
    const MeshLayout drawn(size, mesh.shape(), inputs[0].placements());
    const at::Tensor numbers =
        random_local(drawn, *mesh.coordinate(), weights.options(), generator, Distribution::uniform);
    const at::Tensor sums = weights.cumsum(-1);
    return at::searchsorted(sums, numbers * sums.narrow(-1, categories - 1, 1), /*out_int32=*/false, /*right=*/true);
  });
  advance(generator, replacement ? volume(size) : x.numel());
  return result;
}

DTensor dropout(const DTensor& x, double p, PhiloxGenerator& generator) {
  if (!(p >= 0 && p <= 1)) fail(ErrorCode::invalid_argument, "dropout with probability {}: expected 0 to 1", p);
  refuse_integers("dropout", x);
  DTensor result = call(
      "dropout", {&x, 1}, [](Inputs inputs) { return rules::elementwise("dropout", inputs, Linearity::linear); },
      [&](Inputs inputs) -> at::Tensor {
        const at::Tensor& local = inputs[0].local_tensor();
        if (p == 1) return local * 0;
        // The same numbers for all ranks of a partial mesh dimension.
        const MeshLayout layout(x.size(), inputs[0].device_mesh().shape(), inputs[0].grad_placements());
        const at::Tensor numbers =
            random_local(layout, *inputs[0].device_mesh().coordinate(),
                         local.options().dtype(at::kFloat).requires_grad(false), generator, Distribution::uniform);
        return local * numbers.ge(p).to(local.scalar_type()) / (1 - p);
      });
  advance(generator, x.numel());
  return result;
}

namespace {

void check_slopes(double lower, double upper) {
  if (!(lower <= upper && std::isfinite(lower) && std::isfinite(upper)))
    fail(ErrorCode::invalid_argument, "rrelu with slopes from {} to {}: expected no more than the end", lower, upper);
}

}  // namespace

DTensor rrelu(const DTensor& x, double lower, double upper) {
  check_slopes(lower, upper);
  return leaky_relu(x, (lower + upper) / 2);
}

DTensor rrelu(const DTensor& x, PhiloxGenerator& generator, double lower, double upper) {
  check_slopes(lower, upper);
  DTensor result = call(
      "rrelu", {&x, 1}, [](Inputs inputs) { return rules::elementwise("rrelu", inputs, Linearity::none); },
      [&](Inputs inputs) -> at::Tensor {
        const at::Tensor& local = inputs[0].local_tensor();
        const at::Tensor numbers = random_local(inputs[0].layout(), *inputs[0].device_mesh().coordinate(),
                                                local.options().requires_grad(false), generator, Distribution::uniform);
        return at::where(local.le(0), local * (numbers * (upper - lower) + lower), local);
      });
  advance(generator, x.numel());
  return result;
}

PhiloxGenerator generator_of_first_rank(std::uint64_t seed, const DeviceMesh& mesh) {
  if (!mesh.has_this_rank()) return PhiloxGenerator(seed);
  Bytes bytes(sizeof(seed));
  std::memcpy(bytes.data(), &seed, sizeof(seed));
  bytes = mesh.group().broadcast_bytes(bytes, 0);
  std::memcpy(&seed, bytes.data(), sizeof(seed));
  return PhiloxGenerator(seed);
}

PhiloxGenerator manual_seed(std::uint64_t seed, const DeviceMesh& mesh) {
  if (mesh.has_this_rank())
    mesh.group().check_call("manual_seed", [&](CallArguments& arguments) { arguments.add("seed", seed); });
  return PhiloxGenerator(seed);
}

}  // namespace tessera::dtensor

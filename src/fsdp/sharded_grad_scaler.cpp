#include "tessera/fsdp/sharded_grad_scaler.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <type_traits>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::fsdp {

namespace {

// Returns a number whose highest bit is set if the value is inf or nan: all bits of the exponent are set then, and
// adding its lowest bit carries into the sign bit.
template <typename Float, typename Bits = std::conditional_t<sizeof(Float) == 4, std::uint32_t, std::uint64_t>>
Bits carry_of_exponent(Float value) {
  constexpr auto exponent = std::bit_cast<Bits>(std::numeric_limits<Float>::infinity());
  return (std::bit_cast<Bits>(value) & exponent) + (exponent & (~exponent + 1));
}

// Returns whether all elements are finite. A single pass without branches, so that compilers vectorize it.
template <typename T>
bool unscale_elements(T* elements, std::int64_t count, float inverse) {
  using Compute = at::opmath_type<T>;
  auto carries = carry_of_exponent(Compute(0));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<Compute>(elements[i]);
    carries |= carry_of_exponent(value);
    elements[i] = static_cast<T>(value * static_cast<Compute>(inverse));
  }
  return (carries >> (8 * sizeof(carries) - 1)) == 0;
}

bool unscale_on_cpu(const at::Tensor& gradient, float inverse) {
  if (!gradient.is_non_overlapping_and_dense()) {
    const at::Tensor copy = gradient.contiguous();
    const bool finite = unscale_on_cpu(copy, inverse);
    gradient.copy_(copy);
    return finite;
  }
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, gradient.scalar_type(), "unscale_", [&] {
    return unscale_elements(gradient.data_ptr<scalar_t>(), gradient.numel(), inverse);
  });
}

void check_gradients(const char* function, const torch::optim::Optimizer& optimizer) {
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const std::vector<at::Tensor>& params = optimizer.param_groups()[g].params();
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (!params[i].grad().defined() || params[i].grad().is_floating_point()) continue;
      fail(ErrorCode::unsupported,
           "{}: the gradient of parameter {} of group {} has dtype {}, expected a floating-point dtype", function, i, g,
           c10::toString(params[i].grad().scalar_type()));
    }
  }
}

template <typename Number>
void check_range(bool is_in, const char* function, const char* name, Number found, const char* expected) {
  if (!is_in) fail(ErrorCode::invalid_argument, "{}: {} is {}, expected {}", function, name, found, expected);
}

// The scale is stored in float32.
void check_scale(const char* function, const char* name, double scale) {
  using Limits = std::numeric_limits<float>;
  check_range(scale >= Limits::denorm_min() && scale <= Limits::max(), function, name, scale, "a float32 above 0");
}

// `name_of_scale` is that of init_scale in the message.
void check_options(const char* function, const char* name_of_scale, const GradScalerOptions& options) {
  check_scale(function, name_of_scale, options.init_scale);
  check_range(options.growth_factor >= 1.0 && std::isfinite(options.growth_factor), function, "growth_factor",
              options.growth_factor, "a finite number of at least 1");
  check_range(options.backoff_factor > 0.0 && options.backoff_factor <= 1.0, function, "backoff_factor",
              options.backoff_factor, "above 0 and at most 1");
  check_range(options.growth_interval >= 1, function, "growth_interval", options.growth_interval, "at least 1");
}

// Returns the elements of a parameter's gradient, undefined if it has none.
at::Tensor elements_of(const at::Tensor& parameter) {
  at::Tensor gradient = parameter.grad();
  if (!gradient.defined()) return {};
  if (!gradient.is_sparse()) return gradient;
  if (gradient.scalar_type() == at::kHalf && !gradient.is_coalesced()) {
    // Coalescing adds elements, and a sum of finite elements may overflow.
    gradient = gradient.to(at::kFloat).coalesce().to(at::kHalf);
    parameter.mutable_grad() = gradient;
  }
  return gradient._values();
}

at::Tensor scalar(double value, at::ScalarType dtype, at::Device device) {
  return at::full({}, value, at::TensorOptions().dtype(dtype).device(device));
}

}  // namespace

ShardedGradScaler::ShardedGradScaler(const ProcessGroup& group, const GradScalerOptions& options)
    : group_(group), options_(options) {
  if (!options.enabled) return;
  constexpr const char* kWhat = "scale gradients";
  // PyTorch too refuses a factor that changes nothing here alone: set later, it keeps the scale as it is.
  check_range(options.growth_factor > 1.0 && std::isfinite(options.growth_factor), kWhat, "growth_factor",
              options.growth_factor, "a finite number above 1");
  check_range(options.backoff_factor > 0.0 && options.backoff_factor < 1.0, kWhat, "backoff_factor",
              options.backoff_factor, "above 0 and below 1");
  check_options(kWhat, "init_scale", options);
}

void ShardedGradScaler::set_options(const char* function, const GradScalerOptions& options) {
  if (options.enabled) check_options(function, "init_scale", options);
  options_ = options;
}

void ShardedGradScaler::set_growth_factor(double factor) {
  GradScalerOptions options = options_;
  options.growth_factor = factor;
  set_options("set_growth_factor", options);
}

void ShardedGradScaler::set_backoff_factor(double factor) {
  GradScalerOptions options = options_;
  options.backoff_factor = factor;
  set_options("set_backoff_factor", options);
}

void ShardedGradScaler::set_growth_interval(std::int64_t interval) {
  GradScalerOptions options = options_;
  options.growth_interval = interval;
  set_options("set_growth_interval", options);
}

void ShardedGradScaler::check_scaled(const char* function) const {
  if (scale_.defined()) return;
  fail(ErrorCode::invalid_argument, "{}: there is no scale, expected a call of scale() before", function);
}

at::Tensor ShardedGradScaler::scale(const at::Tensor& output) {
  if (!options_.enabled) return output;
  if (!scale_.defined()) {
    scale_ = scalar(options_.init_scale, at::kFloat, output.device());
    growth_tracker_ = scalar(static_cast<double>(init_growth_tracker_), at::kInt, output.device());
  }
  return output.mul(scale_.to(output.device())).to(output.scalar_type());
}

std::vector<at::Tensor> ShardedGradScaler::scale(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scaled;
  scaled.reserve(outputs.size());
  for (const at::Tensor& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

void ShardedGradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  group_.check_call("unscale_ of a gradient scaler", [&](CallArguments& arguments) {
    check_scaled("unscale_");
    if (const Stage stage = optimizers_[&optimizer].stage; stage != Stage::ready) {
      fail(ErrorCode::invalid_argument, "unscale_: {} has been called for this optimizer, expected update() first",
           stage == Stage::unscaled ? "unscale_()" : "step()");
    }
    check_gradients("unscale_", optimizer);
    if (scale_.is_cpu()) arguments.add("scale", scale_.item<float>());  // elsewhere this would wait for the device
  });
  unscale(optimizer);
}

void ShardedGradScaler::unscale(torch::optim::Optimizer& optimizer) {
  OptimizerState& state = optimizers_[&optimizer];
  const c10::NoGradGuard no_grad;
  // In float64, because not every device divides float32 exactly.
  const at::Tensor inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  bool all_finite = true;                                                       // on the CPU
  std::map<std::pair<int, at::ScalarType>, std::vector<at::Tensor>> on_device;  // by device and dtype
  for (const torch::optim::OptimizerParamGroup& param_group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : param_group.params()) {
      const at::Tensor gradient = elements_of(parameter);
      if (!gradient.defined()) continue;
      if (gradient.is_cpu()) {
        all_finite &= unscale_on_cpu(gradient, inverse.item<float>());
      } else {
        on_device[{gradient.device().index(), gradient.scalar_type()}].push_back(gradient);
      }
    }
  }
  state.found_inf = at::full({1}, all_finite ? 0.0 : 1.0, scale_.options());
  for (const auto& [_, gradients] : on_device) {
    at::Tensor found_inf = at::zeros({1}, gradients[0].options().dtype(at::kFloat));
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse.to(found_inf.device()));
    state.found_inf.add_(found_inf.to(scale_.device()));
  }
  group_.start_all_reduce(state.found_inf, ReduceOp::max).wait();
  state.stage = Stage::unscaled;
}

bool ShardedGradScaler::step(torch::optim::Optimizer& optimizer, torch::optim::Optimizer::LossClosure closure) {
  if (!options_.enabled) {
    optimizer.step(std::move(closure));
    return true;
  }
  group_.check_call("step of a gradient scaler", [&](CallArguments& arguments) {
    if (closure) fail(ErrorCode::unsupported, "step: a closure was given, expected none while scaling is enabled");
    check_scaled("step");
    const Stage stage = optimizers_[&optimizer].stage;
    if (stage == Stage::stepped) {
      fail(ErrorCode::invalid_argument, "step: step() has been called for this optimizer, expected update() first");
    }
    if (stage == Stage::ready) check_gradients("step", optimizer);
    arguments.add("unscaled", stage == Stage::unscaled);
    if (scale_.is_cpu()) arguments.add("scale", scale_.item<float>());
  });
  OptimizerState& state = optimizers_[&optimizer];
  if (state.stage == Stage::ready) unscale(optimizer);
  const bool found_inf = state.found_inf.item<float>() != 0;
  if (!found_inf) optimizer.step();
  state.stage = Stage::stepped;
  return !found_inf;
}

void ShardedGradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) return;
  check_scaled("update");
  const c10::NoGradGuard no_grad;
  if (new_scale) {
    check_scale("update", "the new scale", *new_scale);
    scale_.fill_(*new_scale);
    optimizers_.clear();
    return;
  }
  at::Tensor found_inf;
  for (const auto& [_, state] : optimizers_) {
    if (!state.found_inf.defined()) continue;
    found_inf = found_inf.defined() ? found_inf.add(state.found_inf) : state.found_inf;
  }
  if (!found_inf.defined()) {
    fail(ErrorCode::invalid_argument,
         "update: no gradients were unscaled since the last update, expected step() before");
  }
  if (!scale_.is_cpu()) {
    at::_amp_update_scale_(scale_, growth_tracker_, found_inf, options_.growth_factor, options_.backoff_factor,
                           options_.growth_interval);
  } else {  // LibTorch 1.13 has this function on CUDA only
    const double scale = scale_.item<float>();
    const std::int64_t tracker =
        std::min<std::int64_t>(growth_tracker_.item<std::int64_t>() + 1, std::numeric_limits<std::int32_t>::max());
    const bool found = found_inf.item<float>() != 0, grows = !found && tracker == options_.growth_interval;
    const double factor = found ? options_.backoff_factor : grows ? options_.growth_factor : 1.0;
    if (const auto next = static_cast<float>(scale * factor); std::isfinite(next)) scale_.fill_(next);
    growth_tracker_.fill_(found || grows ? 0 : tracker);
  }
  optimizers_.clear();
}

double ShardedGradScaler::get_scale() const {
  if (!options_.enabled) return 1.0;
  return scale_.defined() ? scale_.item<double>() : options_.init_scale;
}

std::int64_t ShardedGradScaler::growth_tracker() const {
  return growth_tracker_.defined() ? growth_tracker_.item<std::int64_t>() : init_growth_tracker_;
}

StateDict ShardedGradScaler::state_dict() const {
  if (!options_.enabled) return {};
  return {{"scale", get_scale()},
          {"growth_factor", options_.growth_factor},
          {"backoff_factor", options_.backoff_factor},
          {"growth_interval", options_.growth_interval},
          {"_growth_tracker", growth_tracker()}};
}

void ShardedGradScaler::load_state_dict(const StateDict& state_dict) {
  if (!options_.enabled) return;
  constexpr char kWhat[] = "load a gradient scaler's state";
  if (state_dict.empty()) {
    fail(ErrorCode::invalid_argument, "{}: it is empty, expected the state of an enabled scaler", kWhat);
  }
  const auto value_of = [&](const char* key, bool may_be_float) -> const Value& {
    const Value* value = state_dict.find(key);
    if (value == nullptr)
      fail(ErrorCode::invalid_argument, "{}: '{}' is missing, expected {}", kWhat, key, may_be_float ? "float" : "int");
    if (!value->is<std::int64_t>() && !(may_be_float && value->is<double>())) {
      fail(ErrorCode::invalid_argument, "{}: '{}' has kind {}, expected {}", kWhat, key, kind_name(value->kind()),
           may_be_float ? "float" : "int");
    }
    return *value;
  };
  GradScalerOptions options = options_;
  options.init_scale = value_of("scale", true).number();
  options.growth_factor = value_of("growth_factor", true).number();
  options.backoff_factor = value_of("backoff_factor", true).number();
  options.growth_interval = value_of("growth_interval", false).get<std::int64_t>();
  const auto tracker = value_of("_growth_tracker", false).get<std::int64_t>();
  check_options(kWhat, "scale", options);
  check_range(tracker >= 0 && tracker <= std::numeric_limits<std::int32_t>::max(), kWhat, "_growth_tracker", tracker,
              "0 to 2147483647");
  init_growth_tracker_ = tracker;
  options_ = options;
  if (!scale_.defined()) return;
  scale_.fill_(options_.init_scale);
  growth_tracker_.fill_(init_growth_tracker_);
}

}  // namespace tessera::fsdp

// Ops that compare or copy tensors, create similar ones, or modify them in place.

#include <ATen/ops/allclose.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <functional>
#include <map>
#include <string>

#include "tensor/ops/built_in.h"
#include "tensor/ops/shards.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/tensor/ops.h"

namespace tessera::ops {

namespace {

bool compare(const ShardedTensor& a, const ShardedTensor& b,
             FunctionRef<bool(const at::Tensor&, const at::Tensor&)> same) {
  const std::string first = comparable_text(a.metadata()), second = comparable_text(b.metadata());
  a.process_group().check_call("compare sharded tensors",
                               [&](CallArguments& arguments) { arguments.add("first", first).add("second", second); });
  if (first != second) return false;  // the same on all ranks
  bool result = true;
  for (std::size_t i = 0; result && i < a.local_shards().size(); ++i) {
    const at::Tensor &x = a.local_shards()[i].tensor, &y = b.local_shards()[i].tensor;
    result = x.device() == y.device() && same(x, y);
  }
  const at::Tensor on_all = at::scalar_tensor(result, at::kInt);
  a.process_group().start_all_reduce(on_all, ReduceOp::min).wait();
  return on_all.item<int>() != 0;
}

auto filled_as(at::Tensor (*make)(const at::Tensor&)) {
  return [make](const ShardedTensor& input) {
    const at::NoGradGuard no_grad;
    return map_shards(input, make);
  };
}

// Calls `fill` on each shard without recording gradients, and returns the tensor.
template <typename F>
ShardedTensor fill_shards(const ShardedTensor& self, F&& fill) {
  const at::NoGradGuard no_grad;
  for (const Shard& shard : self.local_shards()) fill(shard.tensor);
  return self;
}

// Returns the gain of an activation, as torch::nn::init::calculate_gain.
double gain_of(const std::string& nonlinearity, double slope) {
  if (nonlinearity == "leaky_relu") return std::sqrt(2 / (1 + slope * slope));
  static const std::map<std::string, double, std::less<>> gains = {
      {"linear", 1},           {"conv1d", 1},           {"conv2d", 1},           {"conv3d", 1},
      {"conv_transpose1d", 1}, {"conv_transpose2d", 1}, {"conv_transpose3d", 1}, {"sigmoid", 1},
      {"tanh", 5.0 / 3},       {"relu", std::sqrt(2)},  {"selu", 3.0 / 4}};
  const auto gain = gains.find(nonlinearity);
  if (gain == gains.end()) {
    fail(ErrorCode::invalid_argument,
         "op 'kaiming_uniform_': unknown nonlinearity '{}', expected one that torch::nn::init::calculate_gain knows",
         printable(nonlinearity));
  }
  return gain->second;
}

}  // namespace

const BuiltIn equal_op(equal, "equal",
                       [](const ShardedTensor& a, const ShardedTensor& b) { return compare(a, b, at::equal); });

std::string describe(const AllcloseOptions& options) {
  return fmt::format("AllcloseOptions{{rtol={}, atol={}, equal_nan={}}}", options.rtol, options.atol,
                     options.equal_nan);
}

const BuiltIn allclose_op(allclose, "allclose",
                          [](const ShardedTensor& a, const ShardedTensor& b, const AllcloseOptions& options) {
                            return compare(a, b, [&](const at::Tensor& x, const at::Tensor& y) {
                              return at::allclose(x, y, options.rtol, options.atol, options.equal_nan);
                            });
                          });

const BuiltIn clone_op(clone, "clone", [](const ShardedTensor& input) {
  return map_shards(input, [](const at::Tensor& x) { return x.clone(); });
});

const BuiltIn detach_op(detach, "detach", [](const ShardedTensor& input) {
  std::vector<at::Tensor> tensors;
  for (const Shard& shard : input.local_shards()) tensors.push_back(shard.tensor.detach());
  return input.with_local_tensors(tensors, input.scalar_type(), false, input.is_pinned());  // it shares the memory
});

const BuiltIn to_op(to, "to", [](const ShardedTensor& input, const ShardedTensor::ToOptions& options) {
  return input.to(options);
});

const BuiltIn empty_like_op(empty_like, "empty_like", filled_as([](const at::Tensor& x) { return at::empty_like(x); }));
const BuiltIn zeros_like_op(zeros_like, "zeros_like", filled_as([](const at::Tensor& x) { return at::zeros_like(x); }));
const BuiltIn ones_like_op(ones_like, "ones_like", filled_as([](const at::Tensor& x) { return at::ones_like(x); }));
const BuiltIn rand_like_op(rand_like, "rand_like", filled_as([](const at::Tensor& x) { return at::rand_like(x); }));
const BuiltIn randn_like_op(randn_like, "randn_like", filled_as([](const at::Tensor& x) { return at::randn_like(x); }));
const BuiltIn full_like_op(full_like, "full_like", [](const ShardedTensor& input, const at::Scalar& value) {
  const at::NoGradGuard no_grad;
  return map_shards(input, [&](const at::Tensor& x) { return at::full_like(x, value); });
});

const BuiltIn copy_op(copy_, "copy_", [](const ShardedTensor& self, const ShardedTensor& source, bool non_blocking) {
  const auto shards_of = [](const ShardedTensor& tensor) {
    return comparable_text(ShardedTensorMetadata{tensor.metadata().shards_metadata, tensor.size(), {}});
  };
  if (self.metadata().shards_metadata != source.metadata().shards_metadata && shards_of(self) != shards_of(source)) {
    fail(ErrorCode::invalid_argument, "op 'copy_' of {} into {}: expected the same shards with the same placements",
         describe(source), describe(self));
  }
  for (std::size_t i = 0; i < self.local_shards().size(); ++i) {
    self.local_shards()[i].tensor.copy_(source.local_shards()[i].tensor, non_blocking);
  }
  ShardedTensor copied = self;
  if (result_requires_grad(source.requires_grad(), self.scalar_type())) copied.set_requires_grad(true);
  return copied;
});

const BuiltIn requires_grad_op(requires_grad_, "requires_grad_", [](ShardedTensor self, bool requires_grad) {
  self.set_requires_grad(requires_grad);
  return self;
});

const BuiltIn uniform_op(uniform_, "uniform_", [](const ShardedTensor& self, double a, double b) {
  return fill_shards(self, [&](const at::Tensor& x) { x.uniform_(a, b); });
});

const BuiltIn normal_op(normal_, "normal_", [](const ShardedTensor& self, double mean, double std) {
  return fill_shards(self, [&](const at::Tensor& x) { x.normal_(mean, std); });
});

const BuiltIn constant_op(constant_, "constant_", [](const ShardedTensor& self, double value) {
  return fill_shards(self, [&](const at::Tensor& x) { x.fill_(value); });
});

const BuiltIn kaiming_uniform_op(
    kaiming_uniform_, "kaiming_uniform_",
    [](const ShardedTensor& self, double a, const std::string& mode, const std::string& nonlinearity) {
      const ShardedTensor::Sizes& size = self.size();
      if (size.size() < 2) {
        fail(ErrorCode::invalid_argument, "op 'kaiming_uniform_' of {}: expected two dimensions or more",
             describe(self));
      }
      if (mode != "fan_in" && mode != "fan_out") {
        fail(ErrorCode::invalid_argument, "op 'kaiming_uniform_': mode is '{}', expected 'fan_in' or 'fan_out'",
             printable(mode));
      }
      double fan = static_cast<double>(mode == "fan_in" ? size[1] : size[0]);
      for (std::size_t d = 2; d < size.size(); ++d) fan *= static_cast<double>(size[d]);
      if (fan == 0) return self;
      const double bound = gain_of(nonlinearity, a) * std::sqrt(3 / fan);
      return fill_shards(self, [&](const at::Tensor& x) { x.uniform_(-bound, bound); });
    });

bool equal(const ShardedTensor& a, const ShardedTensor& b) { return equal_op(a, b); }
bool allclose(const ShardedTensor& a, const ShardedTensor& b, const AllcloseOptions& options) {
  return allclose_op(a, b, options);
}
ShardedTensor clone(const ShardedTensor& input) { return clone_op(input); }
ShardedTensor detach(const ShardedTensor& input) { return detach_op(input); }
ShardedTensor to(const ShardedTensor& input, const ShardedTensor::ToOptions& options) { return to_op(input, options); }
ShardedTensor empty_like(const ShardedTensor& input) { return empty_like_op(input); }
ShardedTensor zeros_like(const ShardedTensor& input) { return zeros_like_op(input); }
ShardedTensor ones_like(const ShardedTensor& input) { return ones_like_op(input); }
ShardedTensor rand_like(const ShardedTensor& input) { return rand_like_op(input); }
ShardedTensor randn_like(const ShardedTensor& input) { return randn_like_op(input); }
ShardedTensor full_like(const ShardedTensor& input, const at::Scalar& value) { return full_like_op(input, value); }
ShardedTensor copy_(const ShardedTensor& self, const ShardedTensor& source, bool non_blocking) {
  return copy_op(self, source, non_blocking);
}
ShardedTensor requires_grad_(const ShardedTensor& self, bool requires_grad) {
  return requires_grad_op(self, requires_grad);
}
ShardedTensor uniform_(const ShardedTensor& self, double a, double b) { return uniform_op(self, a, b); }
ShardedTensor normal_(const ShardedTensor& self, double mean, double std) { return normal_op(self, mean, std); }
ShardedTensor constant_(const ShardedTensor& self, double value) { return constant_op(self, value); }
ShardedTensor kaiming_uniform_(const ShardedTensor& self, double a, const std::string& mode,
                               const std::string& nonlinearity) {
  return kaiming_uniform_op(self, a, mode, nonlinearity);
}

}  // namespace tessera::ops

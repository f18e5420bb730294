// Comparison, copies, new tensors like another, and what changes a tensor in place.

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

#include "tensor/ops/shards.h"
#include "tessera/base/error.h"
#include "tessera/tensor/ops.h"

namespace tessera::ops {

namespace {

bool compare(const ShardedTensor& a, const ShardedTensor& b,
             const std::function<bool(const at::Tensor&, const at::Tensor&)>& same) {
  if (a.metadata() != b.metadata()) return false;  // which all ranks have alike
  bool result = true;
  for (std::size_t i = 0; result && i < a.local_shards().size(); ++i) {
    result = same(a.local_shards()[i].tensor, b.local_shards()[i].tensor);
  }
  const at::Tensor on_all = at::scalar_tensor(result, at::kInt);
  a.process_group().all_reduce(on_all, ReduceOp::min);
  return on_all.item<int>() != 0;
}

Unary like(std::string name, at::Tensor (*make)(const at::Tensor&)) {
  return Unary(std::move(name), [make](const ShardedTensor& input) {
    const at::NoGradGuard no_grad;
    return map_shards(input, make);
  });
}

// A copy of the handle, on each of whose shards `fill` was called without recording gradients.
template <typename F>
ShardedTensor fill_shards(const ShardedTensor& self, F&& fill) {
  const at::NoGradGuard no_grad;
  for (const Shard& shard : self.local_shards()) fill(shard.tensor);
  return self;
}

// What an activation does to the standard deviation, as torch::nn::init::calculate_gain.
double gain_of(const std::string& nonlinearity, double slope) {
  if (nonlinearity == "leaky_relu") return std::sqrt(2 / (1 + slope * slope));
  static const std::map<std::string, double, std::less<>> gains = {
      {"linear", 1},           {"conv1d", 1},           {"conv2d", 1},           {"conv3d", 1},
      {"conv_transpose1d", 1}, {"conv_transpose2d", 1}, {"conv_transpose3d", 1}, {"sigmoid", 1},
      {"tanh", 5.0 / 3},       {"relu", std::sqrt(2)},  {"selu", 3.0 / 4}};
  const auto gain = gains.find(nonlinearity);
  if (gain == gains.end()) {
    fail(ErrorCode::invalid_argument, "op 'kaiming_uniform_': unknown nonlinearity '{}'", printable(nonlinearity));
  }
  return gain->second;
}

}  // namespace

const Op<bool(const ShardedTensor&, const ShardedTensor&)> equal("equal",
                                                                 [](const ShardedTensor& a, const ShardedTensor& b) {
                                                                   return compare(a, b, at::equal);
                                                                 });

std::string describe(const AllcloseOptions& options) {
  return fmt::format("AllcloseOptions{{rtol={}, atol={}, equal_nan={}}}", options.rtol, options.atol,
                     options.equal_nan);
}

const Op<bool(const ShardedTensor&, const ShardedTensor&, const AllcloseOptions&)> allclose(
    "allclose", [](const ShardedTensor& a, const ShardedTensor& b, const AllcloseOptions& options) {
      return compare(a, b, [&](const at::Tensor& x, const at::Tensor& y) {
        return at::allclose(x, y, options.rtol, options.atol, options.equal_nan);
      });
    });

const Unary clone("clone", [](const ShardedTensor& input) {
  return map_shards(input, [](const at::Tensor& x) { return x.clone(); });
});

const Unary detach("detach", [](const ShardedTensor& input) {
  std::vector<at::Tensor> tensors;
  for (const Shard& shard : input.local_shards()) tensors.push_back(shard.tensor.detach());
  return input.with_local_tensors(tensors, input.scalar_type(), false);
});

const Op<ShardedTensor(const ShardedTensor&, const ShardedTensor::ToOptions&)> to(
    "to", [](const ShardedTensor& input, const ShardedTensor::ToOptions& options) { return input.to(options); });

const Unary empty_like = like("empty_like", [](const at::Tensor& x) { return at::empty_like(x); });
const Unary zeros_like = like("zeros_like", [](const at::Tensor& x) { return at::zeros_like(x); });
const Unary ones_like = like("ones_like", [](const at::Tensor& x) { return at::ones_like(x); });
const Unary rand_like = like("rand_like", [](const at::Tensor& x) { return at::rand_like(x); });
const Unary randn_like = like("randn_like", [](const at::Tensor& x) { return at::randn_like(x); });
const Op<ShardedTensor(const ShardedTensor&, const at::Scalar&)> full_like("full_like", [](const ShardedTensor& input,
                                                                                           const at::Scalar& value) {
  const at::NoGradGuard no_grad;
  return map_shards(input, [&](const at::Tensor& x) { return at::full_like(x, value); });
});

const Op<ShardedTensor(const ShardedTensor&, const ShardedTensor&, bool)> copy_("copy_", [](const ShardedTensor& self,
                                                                                            const ShardedTensor& source,
                                                                                            bool non_blocking) {
  if (self.metadata().shards_metadata != source.metadata().shards_metadata) {
    fail(ErrorCode::invalid_argument, "op 'copy_' of {} into {}: expected the same shards at the same places",
         describe(source), describe(self));
  }
  for (std::size_t i = 0; i < self.local_shards().size(); ++i) {
    self.local_shards()[i].tensor.copy_(source.local_shards()[i].tensor, non_blocking);
  }
  return self;
});

const Op<ShardedTensor(const ShardedTensor&, bool)> requires_grad_("requires_grad_",
                                                                   [](ShardedTensor self, bool requires_grad) {
                                                                     self.set_requires_grad(requires_grad);
                                                                     return self;
                                                                   });

const Op<ShardedTensor(const ShardedTensor&, double, double)> uniform_("uniform_", [](const ShardedTensor& self,
                                                                                      double a, double b) {
  return fill_shards(self, [&](const at::Tensor& x) { x.uniform_(a, b); });
});

const Op<ShardedTensor(const ShardedTensor&, double, double)> normal_("normal_", [](const ShardedTensor& self,
                                                                                    double mean, double std) {
  return fill_shards(self, [&](const at::Tensor& x) { x.normal_(mean, std); });
});

const Op<ShardedTensor(const ShardedTensor&, double)> constant_("constant_", [](const ShardedTensor& self,
                                                                                double value) {
  return fill_shards(self, [&](const at::Tensor& x) { x.fill_(value); });
});

const Op<ShardedTensor(const ShardedTensor&, double, const std::string&, const std::string&)> kaiming_uniform_(
    "kaiming_uniform_",
    [](const ShardedTensor& self, double a, const std::string& mode, const std::string& nonlinearity) {
      const ShardedTensor::Sizes& size = self.size();
      if (size.size() < 2) {
        fail(ErrorCode::invalid_argument, "op 'kaiming_uniform_' of {}: expected two dimensions or more",
             describe(self));
      }
      if (mode != "fan_in" && mode != "fan_out") {
        fail(ErrorCode::invalid_argument, "op 'kaiming_uniform_': mode '{}', expected 'fan_in' or 'fan_out'",
             printable(mode));
      }
      double fan = static_cast<double>(mode == "fan_in" ? size[1] : size[0]);
      for (std::size_t d = 2; d < size.size(); ++d) fan *= static_cast<double>(size[d]);
      if (fan == 0) return self;
      const double bound = gain_of(nonlinearity, a) * std::sqrt(3 / fan);
      return fill_shards(self, [&](const at::Tensor& x) { x.uniform_(-bound, bound); });
    });

}  // namespace tessera::ops

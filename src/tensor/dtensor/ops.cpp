#include "tessera/tensor/dtensor_ops.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/add.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/div.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/square.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "tensor/dtensor/rules.h"
#include "tessera/base/error.h"

namespace tessera::dtensor {

namespace {

using Inputs = std::span<const DTensor>;
using Sizes = std::vector<std::int64_t>;

template <typename F>
DTensor unary(const char* op, const DTensor& x, bool is_linear, const F& f) {
  return call(
      op, {&x, 1}, [&](Inputs inputs) { return rules::elementwise(op, inputs, is_linear); },
      [&](Inputs inputs) -> at::Tensor { return f(inputs[0].local_tensor()); });
}

template <typename F>
DTensor binary(const char* op, const DTensor& a, const DTensor& b, bool is_linear, const F& f) {
  const std::vector<DTensor> both = {a, b};
  return call(
      op, both, [&](Inputs inputs) { return rules::elementwise(op, inputs, is_linear); },
      [&](Inputs inputs) -> at::Tensor { return f(inputs[0].local_tensor(), inputs[1].local_tensor()); });
}

template <typename F>
DTensor along_dims(const char* op, const std::vector<DTensor>& inputs, const Sizes& unsharded_dims, const F& f) {
  return call(
      op, inputs, [&](Inputs given) { return rules::along_dims(given, unsharded_dims); }, f);
}

template <typename F>
DTensor reduction(const char* op, const DTensor& x, const Sizes& dims, bool keepdim, std::optional<Placement> partial,
                  const F& f) {
  const Sizes over = rules::dims_from_front(op, dims, x.dim());
  return call(
      op, {&x, 1}, [&](Inputs inputs) { return rules::reduction(inputs[0], over, keepdim, partial); },
      [&](Inputs inputs) -> at::Tensor { return f(inputs[0].local_tensor(), over); });
}

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

// Looks up the ids in this rank's rows; zeros for ids whose rows are on other ranks.
at::Tensor rows_here(const DTensor& weight, const at::Tensor& ids, std::int64_t padding_idx) {
  const at::Tensor& local = weight.local_tensor();
  const std::int64_t rows = weight.size()[0];
  weight.device_mesh().group().agree_on("embedding", [&] {
    const bool is_in = ids.numel() == 0 || (ids.ge(0).logical_and(ids.lt(rows))).all().item<bool>();
    if (!is_in) fail(ErrorCode::invalid_argument, "embedding: an id is out of range, expected 0 to {}", rows - 1);
  });
  at::Tensor places = at::full_like(ids, -1);
  std::int64_t begin = 0, padding_place = -1;
  for (const Interval& interval : weight.layout().local_intervals(0, *weight.device_mesh().coordinate())) {
    const at::Tensor is_here = ids.ge(interval.begin).logical_and(ids.lt(interval.end));
    places = at::where(is_here, ids.add(begin - interval.begin), places);
    if (padding_idx >= interval.begin && padding_idx < interval.end)
      padding_place = padding_idx - interval.begin + begin;
    begin += interval.size();
  }
  if (local.size(0) == 0) {
    Sizes size = ids.sizes().vec();
    size.push_back(local.size(1));
    return at::zeros(size, local.options().requires_grad(false)).add(local.sum());  // tracked by autograd
  }
  const at::Tensor is_here = places.ge(0).unsqueeze(-1);
  return at::embedding(local, places.clamp_min(0), padding_place).mul(is_here.to(local.scalar_type()));
}

}  // namespace

DTensor abs(const DTensor& x) {
  return unary("abs", x, false, [](const at::Tensor& t) { return at::abs(t); });
}
DTensor exp(const DTensor& x) {
  return unary("exp", x, false, [](const at::Tensor& t) { return at::exp(t); });
}
DTensor gelu(const DTensor& x) {
  return unary("gelu", x, false, [](const at::Tensor& t) { return at::gelu(t); });
}
DTensor log(const DTensor& x) {
  return unary("log", x, false, [](const at::Tensor& t) { return at::log(t); });
}
DTensor neg(const DTensor& x) {
  return unary("neg", x, true, [](const at::Tensor& t) { return at::neg(t); });
}
DTensor relu(const DTensor& x) {
  return unary("relu", x, false, [](const at::Tensor& t) { return at::relu(t); });
}
DTensor rsqrt(const DTensor& x) {
  return unary("rsqrt", x, false, [](const at::Tensor& t) { return at::rsqrt(t); });
}
DTensor silu(const DTensor& x) {
  return unary("silu", x, false, [](const at::Tensor& t) { return at::silu(t); });
}
DTensor sqrt(const DTensor& x) {
  return unary("sqrt", x, false, [](const at::Tensor& t) { return at::sqrt(t); });
}
DTensor tanh(const DTensor& x) {
  return unary("tanh", x, false, [](const at::Tensor& t) { return at::tanh(t); });
}
DTensor clone(const DTensor& x) {
  return unary("clone", x, true, [](const at::Tensor& t) { return t.clone(); });
}

DTensor sigmoid(const DTensor& x) {
  return unary("sigmoid", x, false, [](const at::Tensor& t) { return at::sigmoid(t); });
}
DTensor square(const DTensor& x) {
  return unary("square", x, false, [](const at::Tensor& t) { return at::square(t); });
}
DTensor to(const DTensor& x, at::ScalarType dtype) {
  return unary("to", x, at::isFloatingType(dtype), [&](const at::Tensor& t) { return t.to(dtype); });
}

DTensor add(const DTensor& a, const DTensor& b) {
  return binary("add", a, b, true, [](const at::Tensor& s, const at::Tensor& t) { return at::add(s, t); });
}
DTensor sub(const DTensor& a, const DTensor& b) {
  return binary("sub", a, b, true, [](const at::Tensor& s, const at::Tensor& t) { return at::sub(s, t); });
}
DTensor mul(const DTensor& a, const DTensor& b) {
  return binary("mul", a, b, false, [](const at::Tensor& s, const at::Tensor& t) { return at::mul(s, t); });
}
DTensor div(const DTensor& a, const DTensor& b) {
  return binary("div", a, b, false, [](const at::Tensor& s, const at::Tensor& t) { return at::div(s, t); });
}
DTensor maximum(const DTensor& a, const DTensor& b) {
  return binary("maximum", a, b, false, [](const at::Tensor& s, const at::Tensor& t) { return at::maximum(s, t); });
}
DTensor minimum(const DTensor& a, const DTensor& b) {
  return binary("minimum", a, b, false, [](const at::Tensor& s, const at::Tensor& t) { return at::minimum(s, t); });
}
DTensor add(const DTensor& a, const at::Scalar& b) {
  return unary("add", a, false, [&](const at::Tensor& t) { return at::add(t, b); });
}
DTensor mul(const DTensor& a, const at::Scalar& b) {
  return unary("mul", a, true, [&](const at::Tensor& t) { return at::mul(t, b); });
}
DTensor div(const DTensor& a, const at::Scalar& b) {
  return unary("div", a, true, [&](const at::Tensor& t) { return at::div(t, b); });
}
DTensor pow(const DTensor& a, const at::Scalar& exponent) {
  return unary("pow", a, false, [&](const at::Tensor& t) { return at::pow(t, exponent); });
}

DTensor matmul(const DTensor& a, const DTensor& b) {
  const std::vector<DTensor> both = {a, b};
  return call("matmul", both, rules::matmul,
              [](Inputs inputs) { return at::matmul(inputs[0].local_tensor(), inputs[1].local_tensor()); });
}

DTensor linear(const DTensor& x, const DTensor& weight, const std::optional<DTensor>& bias) {
  std::vector<DTensor> inputs = {x, weight};
  if (bias) inputs.push_back(*bias);
  return call("linear", inputs, rules::linear, [](Inputs local) {
    return at::linear(local[0].local_tensor(), local[1].local_tensor(),
                      local.size() > 2 ? local[2].local_tensor() : at::Tensor());
  });
}

DTensor embedding(const DTensor& weight, const DTensor& ids, std::int64_t padding_idx) {
  const std::vector<DTensor> both = {weight, ids};
  return call("embedding", both, rules::embedding, [&](Inputs inputs) {
    const Placements& placements = inputs[0].placements();
    const bool is_sharded =
        std::any_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_shard(0); });
    return is_sharded ? rows_here(inputs[0], inputs[1].local_tensor(), padding_idx)
                      : at::embedding(inputs[0].local_tensor(), inputs[1].local_tensor(), padding_idx);
  });
}

DTensor layer_norm(const DTensor& x, const Sizes& normalized_shape, const std::optional<DTensor>& weight,
                   const std::optional<DTensor>& bias, double eps) {
  Sizes last(x.size().end() - static_cast<std::ptrdiff_t>(std::min(normalized_shape.size(), x.size().size())),
             x.size().end());
  if (last != normalized_shape || last.empty()) {
    fail(ErrorCode::invalid_argument, "layer_norm of size {} over {}: expected the sizes of its last dimensions",
         shape_to_string(x.size()), shape_to_string(normalized_shape));
  }
  std::vector<DTensor> inputs = {x};
  if (weight) inputs.push_back(*weight);
  if (bias) inputs.push_back(*bias);
  Sizes over(normalized_shape.size());
  std::iota(over.begin(), over.end(), x.dim() - static_cast<std::int64_t>(over.size()));
  return along_dims("layer_norm", inputs, over, [&](Inputs local) {
    std::size_t next = 1;
    const at::Tensor scale = weight ? local[next++].local_tensor() : at::Tensor();
    return at::layer_norm(local[0].local_tensor(), normalized_shape, scale,
                          bias ? local[next].local_tensor() : at::Tensor(), eps);
  });
}

DTensor softmax(const DTensor& x, std::int64_t dim) {
  const std::int64_t over = rules::dim_from_front("softmax", dim, x.dim());
  return along_dims("softmax", {x}, {over}, [&](Inputs local) { return at::softmax(local[0].local_tensor(), over); });
}

DTensor log_softmax(const DTensor& x, std::int64_t dim) {
  const std::int64_t over = rules::dim_from_front("log_softmax", dim, x.dim());
  return along_dims("log_softmax", {x}, {over},
                    [&](Inputs local) { return at::log_softmax(local[0].local_tensor(), over); });
}

DTensor sum(const DTensor& x, const Sizes& dims, bool keepdim) {
  return reduction("sum", x, dims, keepdim, Placement::partial(),
                   [&](const at::Tensor& t, const Sizes& over) { return at::sum(t, over, keepdim); });
}

DTensor mean(const DTensor& x, const Sizes& dims, bool keepdim) {
  std::int64_t count = 1;
  for (const std::int64_t dim : rules::dims_from_front("mean", dims, x.dim())) count *= x.size(dim);
  return div(sum(x, dims, keepdim), count);
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

DTensor transpose(const DTensor& x, std::int64_t dim0, std::int64_t dim1) {
  const std::int64_t first = rules::dim_from_front("transpose", dim0, x.dim());
  const std::int64_t second = rules::dim_from_front("transpose", dim1, x.dim());
  return call(
      "transpose", {&x, 1}, [&](Inputs inputs) { return rules::transpose(inputs[0], first, second); },
      [&](Inputs inputs) { return inputs[0].local_tensor().transpose(first, second); });
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
  const at::Tensor mine = first.redistribute(reduced, false).to_local(),
                   theirs = second.redistribute(reduced, false).to_local();
  if (!mesh.has_this_rank()) return true;
  const at::Tensor is_equal = at::full({1}, at::equal(mine, theirs) ? 1 : 0, at::kLong);
  mesh.group().start_all_reduce(is_equal, ReduceOp::min).wait();
  return is_equal.item<std::int64_t>() != 0;
}

}  // namespace tessera::dtensor

namespace tessera {

DTensor operator+(const DTensor& a, const DTensor& b) { return dtensor::add(a, b); }
DTensor operator-(const DTensor& a, const DTensor& b) { return dtensor::sub(a, b); }
DTensor operator*(const DTensor& a, const DTensor& b) { return dtensor::mul(a, b); }
DTensor operator/(const DTensor& a, const DTensor& b) { return dtensor::div(a, b); }

}  // namespace tessera

#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/topk.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "tensor/dtensor_ops/calls.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_ops.h"

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

// Returns x minus its maximum along `dim`, so that no exponential overflows, in at least single precision.
DTensor shifted(const DTensor& x, std::int64_t dim) {
  const DTensor reduced = x.redistribute(x.grad_placements(), false);
  const bool is_half = x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16;
  const DTensor wide = is_half ? to(reduced, at::kFloat) : reduced;
  return sub(wide, amax(wide.detach(), {dim}, true));
}

}  // namespace

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
  if (is_sharded_along(x, over)) {
    const DTensor exponentials = exp(shifted(x, over));
    return to(div(exponentials, sum(exponentials, {over}, true)), x.scalar_type());
  }
  return along_dims("softmax", {x}, {over}, [&](Inputs local) { return at::softmax(local[0].local_tensor(), over); });
}

DTensor log_softmax(const DTensor& x, std::int64_t dim) {
  const std::int64_t over = rules::dim_from_front("log_softmax", dim, x.dim());
  if (is_sharded_along(x, over)) {
    const DTensor shift = shifted(x, over);
    return to(sub(shift, log(sum(exp(shift), {over}, true))), x.scalar_type());
  }
  return along_dims("log_softmax", {x}, {over},
                    [&](Inputs local) { return at::log_softmax(local[0].local_tensor(), over); });
}

DTensor sum(const DTensor& x, const Sizes& dims, bool keepdim) {
  return reduction("sum", x, dims, keepdim, Placement::partial(),
                   [&](const at::Tensor& t, const Sizes& over) { return at::sum(t, over, keepdim); });
}

DTensor mean(const DTensor& x, const Sizes& dims, bool keepdim) {
  return div(sum(x, dims, keepdim), volume_of("mean", x, dims));
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

DTensor var(const DTensor& x, const Sizes& dims, std::int64_t correction, bool keepdim) {
  const DTensor deviations = sub(x, mean(x, dims, true));
  const double count = static_cast<double>(volume_of("var", x, dims) - correction);
  return div(sum(square(deviations), dims, keepdim), std::max(count, 0.0));
}

DTensor vector_norm(const DTensor& x, double p, const Sizes& dims, bool keepdim) {
  if (!(p > 0)) fail(ErrorCode::invalid_argument, "vector_norm of order {}: expected an order greater than 0", p);
  if (std::isinf(p)) return amax(abs(x), dims, keepdim);
  if (p == 1) return sum(abs(x), dims, keepdim);
  const DTensor powers = sum(p == 2 ? square(x) : pow(abs(x), p), dims, keepdim);
  // The root has no gradient at 0: take that of the root of 1, times 0.
  const DTensor is_zero = eq(powers.detach(), 0);
  const DTensor safe = masked_fill(powers, is_zero, 1);
  return masked_fill(p == 2 ? sqrt(safe) : pow(safe, 1 / p), is_zero, 0);
}

DTensor argmax(const DTensor& x, std::int64_t dim, bool keepdim) {
  const std::int64_t over = rules::dim_from_front("argmax", dim, x.dim());
  return reduction("argmax", x.detach(), {over}, keepdim, std::nullopt,
                   [&](const at::Tensor& t, const Sizes&) { return at::argmax(t, over, keepdim); });
}

DTensor cumsum(const DTensor& x, std::int64_t dim) {
  const std::int64_t over = rules::dim_from_front("cumsum", dim, x.dim());
  return along_dims("cumsum", {x}, {over}, [&](Inputs local) { return at::cumsum(local[0].local_tensor(), over); });
}

TopK topk(const DTensor& x, std::int64_t k, std::int64_t dim, bool largest) {
  const std::int64_t over = rules::dim_from_front("topk", dim, x.dim());
  at::Tensor indices = at::full({0}, 0, at::kLong);  // on a rank outside of the mesh
  const auto rule = [&](Inputs inputs) {
    OpRule given = rules::along_dims(inputs, {over});
    given.output_size[static_cast<std::size_t>(over)] = k;
    return given;
  };
  DTensor values = call("topk", {&x, 1}, rule, [&](Inputs inputs) {
    at::Tensor found;
    std::tie(found, indices) = at::topk(inputs[0].local_tensor(), k, over, largest);
    return found;
  });
  DTensor places(values.device_mesh(), values.layout(), indices);
  return {std::move(values), std::move(places)};
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

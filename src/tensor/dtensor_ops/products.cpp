#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tensor/dtensor_ops/calls.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::dtensor {

DTensor matmul(const DTensor& a, const DTensor& b) {
  if (a.dim() == 1 && b.dim() >= 1) return squeeze(matmul(unsqueeze(a, 0), b), b.dim() == 1 ? 0 : -2);
  if (b.dim() == 1) return squeeze(matmul(a, unsqueeze(b, 1)), -1);
  const std::vector<DTensor> both = {a, b};
  return call("matmul", both, rules::matmul,
              [](Inputs inputs) { return at::matmul(inputs[0].local_tensor(), inputs[1].local_tensor()); });
}

DTensor addmm(const DTensor& x, const DTensor& a, const DTensor& b, const at::Scalar& beta, const at::Scalar& alpha) {
  return add(mul(x, beta), mul(matmul(a, b), alpha));
}

DTensor linear(const DTensor& x, const DTensor& weight, const std::optional<DTensor>& bias) {
  const std::vector<DTensor> inputs = inputs_of({&x, &weight}, {&bias});
  return call("linear", inputs, rules::linear, [](Inputs local) {
    return at::linear(local[0].local_tensor(), local[1].local_tensor(),
                      local.size() > 2 ? local[2].local_tensor() : at::Tensor());
  });
}

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

namespace {

// Looks up the ids in this rank's rows; zeros for ids whose rows are on other ranks.
at::Tensor rows_here(const DTensor& weight, const at::Tensor& ids, std::int64_t padding_idx) {
  const at::Tensor& local = weight.local_tensor();
  const std::int64_t rows = weight.size()[0];
  weight.device_mesh().group().agree_on("embedding", [&] {
    const bool is_in = ids.numel() == 0 || (ids.ge(0).logical_and(ids.lt(rows))).all().item<bool>();
    if (!is_in) fail(ErrorCode::invalid_argument, "embedding: an id is out of range, expected 0 to {}", rows - 1);
  });
  if (local.size(0) == 0) {
    Sizes size = ids.sizes().vec();
    size.push_back(local.size(1));
    return at::zeros(size, local.options().requires_grad(false)).add(local.sum());  // tracked by autograd
  }
  const LocalPlaces here = local_places(weight, 0, ids);
  const LocalPlaces padding = local_places(weight, 0, at::full({}, padding_idx, ids.options()));
  const std::int64_t padding_place = padding.is_here.item<bool>() ? padding.places.item<std::int64_t>() : -1;
  return at::embedding(local, here.places, padding_place).mul(here.is_here.unsqueeze(-1).to(local.scalar_type()));
}

}  // namespace

DTensor embedding(const DTensor& weight, const DTensor& ids, std::int64_t padding_idx) {
  const std::vector<DTensor> both = {weight, ids};
  return call("embedding", both, rules::embedding, [&](Inputs inputs) {
    return is_sharded_along(inputs[0], 0)
               ? rows_here(inputs[0], inputs[1].local_tensor(), padding_idx)
               : at::embedding(inputs[0].local_tensor(), inputs[1].local_tensor(), padding_idx);
  });
}

DTensor scaled_dot_product_attention(const DTensor& query, const DTensor& key, const DTensor& value, bool is_causal) {
  const std::vector<DTensor> inputs = {query, key, value};
  const auto rule = [&](Inputs given) { return rules::attention(given, is_causal); };
  return call("scaled_dot_product_attention", inputs, rule, [&](Inputs local) {
    const at::Tensor &q = local[0].local_tensor(), &k = local[1].local_tensor(), &v = local[2].local_tensor();
    at::Tensor scores = at::matmul(q, k.transpose(-2, -1)) / std::sqrt(static_cast<double>(q.size(-1)));
    if (is_causal) {
      const at::Tensor is_seen = at::ones({q.size(-2), k.size(-2)}, q.options().dtype(at::kBool)).tril();
      scores = scores.masked_fill(is_seen.logical_not(), -std::numeric_limits<double>::infinity());
    }
    return at::matmul(at::softmax(scores, -1), v);
  });
}

}  // namespace tessera::dtensor

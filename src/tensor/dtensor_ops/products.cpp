#include <ATen/TensorOperators.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensordot.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tensor/dtensor_ops/calls.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::dtensor {

DTensor matmul(const AnyTensor& a, const AnyTensor& b) {
  const std::vector<DTensor> both = on_one_mesh("matmul", {a, b});
  const std::int64_t left = both[0].dim(), right = both[1].dim();
  if (left == 1 && right >= 1) return squeeze(matmul(unsqueeze(both[0], 0), both[1]), right == 1 ? 0 : -2);
  if (right == 1) return squeeze(matmul(both[0], unsqueeze(both[1], 1)), -1);
  return call("matmul", both, rules::matmul,
              [](Inputs inputs) { return at::matmul(inputs[0].local_tensor(), inputs[1].local_tensor()); });
}

DTensor addmm(const AnyTensor& x, const AnyTensor& a, const AnyTensor& b, const at::Scalar& beta,
              const at::Scalar& alpha) {
  const std::vector<DTensor> inputs = on_one_mesh("addmm", {x, a, b});
  // As in ATen, x does not count if beta is 0, even if it is not finite.
  const auto zeros_as = [](const at::Tensor& t) { return zeros_from(t.sizes().vec(), {t}); };
  const DTensor added = beta.equal(0) ? unary("addmm", inputs[0], Linearity::linear, zeros_as) : mul(inputs[0], beta);
  return add(added, mul(matmul(inputs[1], inputs[2]), alpha));
}

DTensor scaled_mm(const DTensor& a, const DTensor& b, const AnyTensor& scale_a, const AnyTensor& scale_b,
                  at::ScalarType dtype) {
  for (const DTensor* each : {&a, &b}) {
    if (each->dim() == 2 && is_float8(each->scalar_type())) continue;
    fail(ErrorCode::invalid_argument,
         "scaled_mm of size {} of {}: expected matrices of 8-bit floating-point numbers, which LibTorch 1.13 lacks",
         shape_to_string(each->size()), c10::toString(each->scalar_type()));
  }
  const DTensor product = matmul(to(a, at::kFloat), to(b, at::kFloat));
  return to(mul(mul(product, scale_a), scale_b), dtype);
}

DTensor grouped_mm(const DTensor& a, const DTensor& b, const Sizes& ends) {
  const bool has_groups = a.dim() == 3 || b.dim() == 3;
  bool fits = (a.dim() == 2 || b.dim() == 2) && (a.dim() == 2 || a.dim() == 3) && (b.dim() == 2 || b.dim() == 3);
  // The dimension that is divided into groups.
  const std::int64_t of_a = b.dim() == 3 ? 0 : 1, of_b = a.dim() == 3 ? 1 : 0;
  std::int64_t length = 0;
  if (fits) {
    length = a.dim() == 2 ? a.size(of_a) : b.size(of_b);
    fits = a.size(-1) == b.size(-2) && !ends.empty() && ends.front() >= 0 && ends.back() <= length &&
           std::is_sorted(ends.begin(), ends.end()) &&
           (!has_groups || (a.dim() == 3 ? a : b).size(0) == static_cast<std::int64_t>(ends.size()));
  }
  if (!fits) {
    fail(ErrorCode::invalid_argument,
         "grouped_mm of sizes {} and {} with ends {}: expected two matrices, or one and groups of matrices, that fit "
         "together, and ascending ends within the dimension that they divide",
         shape_to_string(a.size()), shape_to_string(b.size()), shape_to_string(ends));
  }
  std::vector<DTensor> products;
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < ends.size(); begin = ends[i++]) {
    const auto group = [&](const DTensor& x, std::int64_t dim) {
      return x.dim() == 3 ? select(x, 0, static_cast<std::int64_t>(i)) : slice(x, dim, begin, ends[i]);
    };
    products.push_back(matmul(group(a, of_a), group(b, of_b)));
  }
  if (!has_groups) return stack(products);
  const std::int64_t along = b.dim() == 3 ? 0 : 1, rest = length - ends.back();
  const DTensor result = cat(products, along);
  return rest == 0 ? result : pad(result, along == 1 ? Sizes{0, rest} : Sizes{0, 0, 0, rest});
}

namespace {

template <typename F>
DTensor product(const char* op, const std::vector<DTensor>& inputs, const rules::ProductLabels& labels, const F& f) {
  return call(
      op, inputs, [&](Inputs given) { return rules::product(op, given, labels); },
      [&](Inputs given) -> at::Tensor { return f(locals_of(given)); });
}

}  // namespace

DTensor einsum(const std::string& equation, const std::vector<DTensor>& tensors) {
  std::vector<std::size_t> dims;
  dims.reserve(tensors.size());
  for (const DTensor& tensor : tensors) dims.push_back(tensor.size().size());
  return product("einsum", tensors, rules::einsum_labels(equation, dims),
                 [&](const std::vector<at::Tensor>& locals) { return at::einsum(equation, locals); });
}

DTensor tensordot(const DTensor& a, const DTensor& b, const Sizes& dims_a, const Sizes& dims_b) {
  if (dims_a.size() != dims_b.size()) {
    fail(ErrorCode::invalid_argument, "tensordot over dimensions {} and {}: expected as many of each",
         shape_to_string(dims_a), shape_to_string(dims_b));
  }
  rules::ProductLabels labels{{std::vector<int>(a.size().size()), std::vector<int>(b.size().size())}, {}};
  std::vector<int>&of_a = labels.factors[0], &of_b = labels.factors[1];
  for (std::size_t i = 0; i < dims_a.size(); ++i) {
    const auto d = static_cast<std::size_t>(rules::dim_from_front("tensordot", dims_a[i], a.dim()));
    const auto e = static_cast<std::size_t>(rules::dim_from_front("tensordot", dims_b[i], b.dim()));
    if (of_a[d] != 0 || of_b[e] != 0 || a.size()[d] != b.size()[e]) {
      fail(ErrorCode::invalid_argument,
           "tensordot of sizes {} and {} over dimensions {} and {}: expected pairs of dimensions of equal size, each "
           "once",
           shape_to_string(a.size()), shape_to_string(b.size()), shape_to_string(dims_a), shape_to_string(dims_b));
    }
    of_a[d] = of_b[e] = static_cast<int>(i) + 1;
  }
  int next = static_cast<int>(dims_a.size());
  for (std::vector<int>* factor : {&of_a, &of_b}) {
    for (int& label : *factor) {
      if (label != 0) continue;
      label = ++next;
      labels.result.push_back(label);
    }
  }
  return product("tensordot", {a, b}, labels, [&](const std::vector<at::Tensor>& locals) {
    return at::tensordot(locals[0], locals[1], dims_a, dims_b);
  });
}

DTensor linear(const DTensor& x, const DTensor& weight, const std::optional<DTensor>& bias) {
  const std::vector<DTensor> inputs = inputs_of({&x, &weight}, {&bias});
  return call("linear", inputs, rules::linear, [](Inputs local) {
    return at::linear(local[0].local_tensor(), local[1].local_tensor(),
                      local.size() > 2 ? local[2].local_tensor() : at::Tensor());
  });
}

namespace {

// Looks up the ids in this rank's rows; zeros for ids whose rows are on other ranks.
at::Tensor rows_here(const DTensor& weight, const at::Tensor& ids, std::int64_t padding_idx) {
  const at::Tensor& local = weight.local_tensor();
  const std::int64_t rows = weight.size()[0];
  weight.device_mesh().group().agree_on("embedding", [&] {
    if (ids.numel() == 0) return;
    const at::Tensor is_row = ids.ge(0).logical_and(ids.lt(rows));
    if (!is_row.all().item<bool>()) {
      fail(ErrorCode::invalid_argument, "embedding: id {} is out of range, expected {}", first_invalid(ids, is_row),
           rows > 0 ? fmt::format("0 to {}", rows - 1) : "none, since the weight has no rows");
    }
  });
  const LocalPlaces here = local_places(weight, 0, ids);
  const LocalPlaces padding = local_places(weight, 0, at::full({}, padding_idx, ids.options()));
  const std::int64_t padding_place = padding.is_here.item<bool>() ? padding.places.item<std::int64_t>() : -1;
  const at::Tensor read =
      at::embedding(local.size(0) == 0 ? with_one_more(local, 0) : local, here.places, padding_place);
  return only_where(here.is_here.unsqueeze(-1), read);
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
    // In half precision, scores overflow or are rounded by more than they differ. As in ATen since 2.5, and as
    // ring_attention, it computes in float.
    const auto wide = [&](std::size_t i) {
      return local[i].local_tensor().to(at::toOpMathType(local[i].scalar_type()));
    };
    const at::Tensor q = wide(0), k = wide(1), v = wide(2);
    at::Tensor scores = at::matmul(q, k.transpose(-2, -1)) / std::sqrt(static_cast<double>(q.size(-1)));
    if (is_causal) {
      const at::Tensor is_seen = at::ones({q.size(-2), k.size(-2)}, q.options().dtype(at::kBool)).tril();
      scores = scores.masked_fill(is_seen.logical_not(), -std::numeric_limits<double>::infinity());
    }
    return at::matmul(at::softmax(scores, -1), v).to(query.scalar_type());
  });
}

}  // namespace tessera::dtensor

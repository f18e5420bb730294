// Order statistics and scans along a dimension.

#include <ATen/ops/argmax.h>
#include <ATen/ops/argmin.h>
#include <ATen/ops/cummax.h>
#include <ATen/ops/cummin.h>
#include <ATen/ops/cumprod.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/kthvalue.h>
#include <ATen/ops/logcumsumexp.h>
#include <ATen/ops/max.h>
#include <ATen/ops/median.h>
#include <ATen/ops/min.h>
#include <ATen/ops/mode.h>
#include <ATen/ops/nanmedian.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/topk.h>

#include <tuple>

#include "tensor/dtensor_ops/calls.h"

namespace tessera::dtensor {

using Pair = std::tuple<at::Tensor, at::Tensor>;

DTensor cumsum(const DTensor& x, std::int64_t dim) {
  const Sizes over = rules::dims_from_front("cumsum", {dim}, x.dim());
  return along_dims(
      "cumsum", x, over, [&](const at::Tensor& t) { return at::cumsum(t, dim); }, summed_dtypes(x));
}

DTensor cumprod(const DTensor& x, std::int64_t dim) {
  const Sizes over = rules::dims_from_front("cumprod", {dim}, x.dim());
  return along_dims(
      "cumprod", x, over, [&](const at::Tensor& t) { return at::cumprod(t, dim); }, summed_dtypes(x));
}

DTensor logcumsumexp(const DTensor& x, std::int64_t dim) {
  const Sizes over = rules::dims_from_front("logcumsumexp", {dim}, x.dim());
  return along_dims("logcumsumexp", x, over, [&](const at::Tensor& t) { return at::logcumsumexp(t, dim); });
}

// --- of all elements

namespace {

template <typename F>
DTensor of_all(const char* op, const DTensor& x, const F& f, const DTypes& dtypes = {}) {
  return reduction(
      op, x, {}, false, std::nullopt, [&](const at::Tensor& t, const Sizes&) { return f(t); }, dtypes);
}

}  // namespace

DTensor median(const DTensor& x) {
  return of_all("median", x, [](const at::Tensor& t) { return at::median(t); });
}
DTensor nanmedian(const DTensor& x) {
  return of_all("nanmedian", x, [](const at::Tensor& t) { return at::nanmedian(t); });
}
DTensor argmax(const DTensor& x) {
  return of_all("argmax", x.detach(), [](const at::Tensor& t) { return at::argmax(t); }, {at::kLong});
}
DTensor argmin(const DTensor& x) {
  return of_all("argmin", x.detach(), [](const at::Tensor& t) { return at::argmin(t); }, {at::kLong});
}

// --- with indices along a dimension

namespace {

// `f` removes dimension `dim`, or leaves its length 1 with `keepdim`.
template <typename F>
ValuesAndIndices picked(const char* op, const DTensor& x, std::int64_t dim, bool keepdim, const F& f) {
  return with_indices(op, x, dim, keepdim ? std::optional<std::int64_t>(1) : std::nullopt,
                      [&](const at::Tensor& t, std::int64_t d) -> Pair { return f(t, d); });
}

// `f` leaves dimension `dim` as it is.
template <typename F>
ValuesAndIndices ordered(const char* op, const DTensor& x, std::int64_t dim, const F& f) {
  const Sizes over = rules::dims_from_front(op, {dim}, x.dim());
  return with_indices(op, x, dim, over.empty() ? 1 : x.size(over[0]),
                      [&](const at::Tensor& t, std::int64_t d) -> Pair { return f(t, d); });
}

}  // namespace

ValuesAndIndices max(const DTensor& x, std::int64_t dim, bool keepdim) {
  return picked("max", x, dim, keepdim, [&](const at::Tensor& t, std::int64_t d) { return at::max(t, d, keepdim); });
}
ValuesAndIndices min(const DTensor& x, std::int64_t dim, bool keepdim) {
  return picked("min", x, dim, keepdim, [&](const at::Tensor& t, std::int64_t d) { return at::min(t, d, keepdim); });
}
ValuesAndIndices median(const DTensor& x, std::int64_t dim, bool keepdim) {
  return picked("median", x, dim, keepdim,
                [&](const at::Tensor& t, std::int64_t d) { return at::median(t, d, keepdim); });
}
ValuesAndIndices nanmedian(const DTensor& x, std::int64_t dim, bool keepdim) {
  return picked("nanmedian", x, dim, keepdim,
                [&](const at::Tensor& t, std::int64_t d) { return at::nanmedian(t, d, keepdim); });
}
ValuesAndIndices mode(const DTensor& x, std::int64_t dim, bool keepdim) {
  return picked("mode", x, dim, keepdim, [&](const at::Tensor& t, std::int64_t d) { return at::mode(t, d, keepdim); });
}
ValuesAndIndices kthvalue(const DTensor& x, std::int64_t k, std::int64_t dim, bool keepdim) {
  return picked("kthvalue", x, dim, keepdim,
                [&](const at::Tensor& t, std::int64_t d) { return at::kthvalue(t, k, d, keepdim); });
}
ValuesAndIndices cummax(const DTensor& x, std::int64_t dim) {
  return ordered("cummax", x, dim, [](const at::Tensor& t, std::int64_t d) { return at::cummax(t, d); });
}
ValuesAndIndices cummin(const DTensor& x, std::int64_t dim) {
  return ordered("cummin", x, dim, [](const at::Tensor& t, std::int64_t d) { return at::cummin(t, d); });
}
ValuesAndIndices sort(const DTensor& x, std::int64_t dim, bool descending) {
  return ordered("sort", x, dim, [&](const at::Tensor& t, std::int64_t d) { return at::sort(t, d, descending); });
}
ValuesAndIndices topk(const DTensor& x, std::int64_t k, std::int64_t dim, bool largest) {
  return with_indices("topk", x, dim, k,
                      [&](const at::Tensor& t, std::int64_t d) -> Pair { return at::topk(t, k, d, largest); });
}

// Of the values along one dimension.
DTensor argmax(const DTensor& x, std::int64_t dim, bool keepdim) { return max(x.detach(), dim, keepdim).indices; }
DTensor argmin(const DTensor& x, std::int64_t dim, bool keepdim) { return min(x.detach(), dim, keepdim).indices; }

}  // namespace tessera::dtensor

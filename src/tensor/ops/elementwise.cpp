// One op for each element, independent of all others.

#include <ATen/Functions.h>

#include <string>

#include "tensor/ops/shards.h"
#include "tessera/tensor/ops.h"

namespace tessera::ops {

namespace {

Unary elementwise(std::string name, at::Tensor (*f)(const at::Tensor&)) {
  return Unary(std::move(name), [f](const ShardedTensor& input) { return map_shards(input, f); });
}

}  // namespace

const Unary abs = elementwise("abs", at::abs);
const Unary ceil = elementwise("ceil", at::ceil);
const Unary cos = elementwise("cos", at::cos);
const Unary erf = elementwise("erf", at::erf);
const Unary exp = elementwise("exp", at::exp);
const Unary expm1 = elementwise("expm1", at::expm1);
const Unary floor = elementwise("floor", at::floor);
const Unary gelu = elementwise("gelu", [](const at::Tensor& x) { return at::gelu(x); });
const Unary isfinite = elementwise("isfinite", at::isfinite);
const Unary isinf = elementwise("isinf", at::isinf);
const Unary isnan = elementwise("isnan", at::isnan);
const Unary log = elementwise("log", at::log);
const Unary log1p = elementwise("log1p", at::log1p);
const Unary nan_to_num = elementwise("nan_to_num", [](const at::Tensor& x) { return at::nan_to_num(x); });
const Unary neg = elementwise("neg", at::neg);
const Unary reciprocal = elementwise("reciprocal", at::reciprocal);
const Unary relu = elementwise("relu", at::relu);
const Unary round = elementwise("round", at::round);
const Unary rsqrt = elementwise("rsqrt", at::rsqrt);
const Unary sigmoid = elementwise("sigmoid", at::sigmoid);
const Unary sign = elementwise("sign", at::sign);
const Unary silu = elementwise("silu", at::silu);
const Unary sin = elementwise("sin", at::sin);
const Unary sqrt = elementwise("sqrt", at::sqrt);
const Unary square = elementwise("square", at::square);
const Unary tanh = elementwise("tanh", at::tanh);

const Op<ShardedTensor(const ShardedTensor&, double, bool)> dropout("dropout", [](const ShardedTensor& input, double p,
                                                                                  bool training) {
  return map_shards(input, [p, training](const at::Tensor& x) { return at::dropout(x, p, training); });
});

}  // namespace tessera::ops

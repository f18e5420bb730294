// Ops on each element independently.

#include <ATen/Functions.h>

#include <string>

#include "tensor/ops/built_in.h"
#include "tensor/ops/shards.h"
#include "tessera/tensor/ops.h"

namespace tessera::ops {

namespace {

auto on_elements(at::Tensor (*f)(const at::Tensor&)) {
  return [f](const ShardedTensor& input) { return map_shards(input, f); };
}

}  // namespace

const BuiltIn abs_op(abs, "abs", on_elements(at::abs));
const BuiltIn ceil_op(ceil, "ceil", on_elements(at::ceil));
const BuiltIn cos_op(cos, "cos", on_elements(at::cos));
const BuiltIn erf_op(erf, "erf", on_elements(at::erf));
const BuiltIn exp_op(exp, "exp", on_elements(at::exp));
const BuiltIn expm1_op(expm1, "expm1", on_elements(at::expm1));
const BuiltIn floor_op(floor, "floor", on_elements(at::floor));
const BuiltIn gelu_op(gelu, "gelu", on_elements([](const at::Tensor& x) { return at::gelu(x); }));
const BuiltIn isfinite_op(isfinite, "isfinite", on_elements(at::isfinite));
const BuiltIn isinf_op(isinf, "isinf", on_elements(at::isinf));
const BuiltIn isnan_op(isnan, "isnan", on_elements(at::isnan));
const BuiltIn log_op(log, "log", on_elements(at::log));
const BuiltIn log1p_op(log1p, "log1p", on_elements(at::log1p));
const BuiltIn nan_to_num_op(nan_to_num, "nan_to_num",
                            on_elements([](const at::Tensor& x) { return at::nan_to_num(x); }));
const BuiltIn neg_op(neg, "neg", on_elements(at::neg));
const BuiltIn reciprocal_op(reciprocal, "reciprocal", on_elements(at::reciprocal));
const BuiltIn relu_op(relu, "relu", on_elements(at::relu));
const BuiltIn round_op(round, "round", on_elements(at::round));
const BuiltIn rsqrt_op(rsqrt, "rsqrt", on_elements(at::rsqrt));
const BuiltIn sigmoid_op(sigmoid, "sigmoid", on_elements(at::sigmoid));
const BuiltIn sign_op(sign, "sign", on_elements(at::sign));
const BuiltIn silu_op(silu, "silu", on_elements(at::silu));
const BuiltIn sin_op(sin, "sin", on_elements(at::sin));
const BuiltIn sqrt_op(sqrt, "sqrt", on_elements(at::sqrt));
const BuiltIn square_op(square, "square", on_elements(at::square));
const BuiltIn tanh_op(tanh, "tanh", on_elements(at::tanh));

const BuiltIn dropout_op(dropout, "dropout", [](const ShardedTensor& input, double p, bool training) {
  return map_shards(input, [p, training](const at::Tensor& x) { return at::dropout(x, p, training); });
});

ShardedTensor abs(const ShardedTensor& input) { return abs_op(input); }
ShardedTensor ceil(const ShardedTensor& input) { return ceil_op(input); }
ShardedTensor cos(const ShardedTensor& input) { return cos_op(input); }
ShardedTensor erf(const ShardedTensor& input) { return erf_op(input); }
ShardedTensor exp(const ShardedTensor& input) { return exp_op(input); }
ShardedTensor expm1(const ShardedTensor& input) { return expm1_op(input); }
ShardedTensor floor(const ShardedTensor& input) { return floor_op(input); }
ShardedTensor gelu(const ShardedTensor& input) { return gelu_op(input); }
ShardedTensor isfinite(const ShardedTensor& input) { return isfinite_op(input); }
ShardedTensor isinf(const ShardedTensor& input) { return isinf_op(input); }
ShardedTensor isnan(const ShardedTensor& input) { return isnan_op(input); }
ShardedTensor log(const ShardedTensor& input) { return log_op(input); }
ShardedTensor log1p(const ShardedTensor& input) { return log1p_op(input); }
ShardedTensor nan_to_num(const ShardedTensor& input) { return nan_to_num_op(input); }
ShardedTensor neg(const ShardedTensor& input) { return neg_op(input); }
ShardedTensor reciprocal(const ShardedTensor& input) { return reciprocal_op(input); }
ShardedTensor relu(const ShardedTensor& input) { return relu_op(input); }
ShardedTensor round(const ShardedTensor& input) { return round_op(input); }
ShardedTensor rsqrt(const ShardedTensor& input) { return rsqrt_op(input); }
ShardedTensor sigmoid(const ShardedTensor& input) { return sigmoid_op(input); }
ShardedTensor sign(const ShardedTensor& input) { return sign_op(input); }
ShardedTensor silu(const ShardedTensor& input) { return silu_op(input); }
ShardedTensor sin(const ShardedTensor& input) { return sin_op(input); }
ShardedTensor sqrt(const ShardedTensor& input) { return sqrt_op(input); }
ShardedTensor square(const ShardedTensor& input) { return square_op(input); }
ShardedTensor tanh(const ShardedTensor& input) { return tanh_op(input); }
ShardedTensor dropout(const ShardedTensor& input, double p, bool training) { return dropout_op(input, p, training); }

}  // namespace tessera::ops

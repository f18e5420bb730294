#include <ATen/ops/abs.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/div.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/erf.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/le.h>
#include <ATen/ops/log.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/square.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>

#include "tensor/dtensor_ops/calls.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera {

namespace dtensor {

using at::Scalar;
using at::Tensor;
constexpr Linearity kNone = Linearity::none, kLinear = Linearity::linear;

DTensor abs(const DTensor& x) {
  return unary("abs", x, kNone, [](const Tensor& t) { return at::abs(t); });
}
DTensor cos(const DTensor& x) {
  return unary("cos", x, kNone, [](const Tensor& t) { return at::cos(t); });
}
DTensor erf(const DTensor& x) {
  return unary("erf", x, kNone, [](const Tensor& t) { return at::erf(t); });
}
DTensor exp(const DTensor& x) {
  return unary("exp", x, kNone, [](const Tensor& t) { return at::exp(t); });
}
DTensor gelu(const DTensor& x) {
  return unary("gelu", x, kNone, [](const Tensor& t) { return at::gelu(t); });
}
DTensor log(const DTensor& x) {
  return unary("log", x, kNone, [](const Tensor& t) { return at::log(t); });
}
DTensor neg(const DTensor& x) {
  return unary("neg", x, kLinear, [](const Tensor& t) { return at::neg(t); });
}
DTensor relu(const DTensor& x) {
  return unary("relu", x, kNone, [](const Tensor& t) { return at::relu(t); });
}
DTensor reciprocal(const DTensor& x) {
  return unary("reciprocal", x, kNone, [](const Tensor& t) { return at::reciprocal(t); });
}
DTensor rsqrt(const DTensor& x) {
  return unary("rsqrt", x, kNone, [](const Tensor& t) { return at::rsqrt(t); });
}
DTensor sigmoid(const DTensor& x) {
  return unary("sigmoid", x, kNone, [](const Tensor& t) { return at::sigmoid(t); });
}
DTensor silu(const DTensor& x) {
  return unary("silu", x, kNone, [](const Tensor& t) { return at::silu(t); });
}
DTensor sin(const DTensor& x) {
  return unary("sin", x, kNone, [](const Tensor& t) { return at::sin(t); });
}
DTensor sqrt(const DTensor& x) {
  return unary("sqrt", x, kNone, [](const Tensor& t) { return at::sqrt(t); });
}
DTensor square(const DTensor& x) {
  return unary("square", x, kNone, [](const Tensor& t) { return at::square(t); });
}
DTensor tanh(const DTensor& x) {
  return unary("tanh", x, kNone, [](const Tensor& t) { return at::tanh(t); });
}
DTensor clamp(const DTensor& x, const std::optional<Scalar>& min, const std::optional<Scalar>& max) {
  return unary("clamp", x, kNone, [&](Tensor t) {
    if (min) t = at::clamp_min(t, *min);
    if (max) t = at::clamp_max(t, *max);
    return t;
  });
}
DTensor clone(const DTensor& x) {
  return unary("clone", x, kLinear, [](const Tensor& t) { return t.clone(); });
}
DTensor to(const DTensor& x, at::ScalarType dtype) {
  const bool keeps_values = at::isFloatingType(dtype) && at::promoteTypes(x.scalar_type(), dtype) == dtype;
  return unary("to", x, keeps_values ? kLinear : kNone, [&](const Tensor& t) { return t.to(dtype); });
}
DTensor logical_not(const DTensor& x) {
  return unary("logical_not", x, kNone, [](const Tensor& t) { return at::logical_not(t); });
}

// --- of two tensors, and of a tensor and a number

DTensor add(const DTensor& a, const DTensor& b) {
  return binary("add", a, b, kLinear, [](const Tensor& s, const Tensor& t) { return at::add(s, t); });
}
DTensor sub(const DTensor& a, const DTensor& b) {
  return binary("sub", a, b, kLinear, [](const Tensor& s, const Tensor& t) { return at::sub(s, t); });
}
DTensor mul(const DTensor& a, const DTensor& b) {
  return binary("mul", a, b, kNone, [](const Tensor& s, const Tensor& t) { return at::mul(s, t); });
}
DTensor div(const DTensor& a, const DTensor& b) {
  return binary("div", a, b, kNone, [](const Tensor& s, const Tensor& t) { return at::div(s, t); });
}
DTensor maximum(const DTensor& a, const DTensor& b) {
  return binary("maximum", a, b, kNone, [](const Tensor& s, const Tensor& t) { return at::maximum(s, t); });
}
DTensor minimum(const DTensor& a, const DTensor& b) {
  return binary("minimum", a, b, kNone, [](const Tensor& s, const Tensor& t) { return at::minimum(s, t); });
}
DTensor eq(const DTensor& a, const DTensor& b) {
  return binary("eq", a, b, kNone, [](const Tensor& s, const Tensor& t) { return at::eq(s, t); });
}
DTensor ne(const DTensor& a, const DTensor& b) {
  return binary("ne", a, b, kNone, [](const Tensor& s, const Tensor& t) { return at::ne(s, t); });
}
DTensor lt(const DTensor& a, const DTensor& b) {
  return binary("lt", a, b, kNone, [](const Tensor& s, const Tensor& t) { return at::lt(s, t); });
}
DTensor le(const DTensor& a, const DTensor& b) {
  return binary("le", a, b, kNone, [](const Tensor& s, const Tensor& t) { return at::le(s, t); });
}
DTensor gt(const DTensor& a, const DTensor& b) {
  return binary("gt", a, b, kNone, [](const Tensor& s, const Tensor& t) { return at::gt(s, t); });
}
DTensor ge(const DTensor& a, const DTensor& b) {
  return binary("ge", a, b, kNone, [](const Tensor& s, const Tensor& t) { return at::ge(s, t); });
}

DTensor add(const DTensor& a, const Scalar& b) {
  return unary("add", a, kNone, [&](const Tensor& t) { return at::add(t, b); });
}
DTensor sub(const DTensor& a, const Scalar& b) {
  return unary("sub", a, kNone, [&](const Tensor& t) { return at::sub(t, b); });
}
DTensor mul(const DTensor& a, const Scalar& b) {
  return unary("mul", a, kLinear, [&](const Tensor& t) { return at::mul(t, b); });
}
DTensor div(const DTensor& a, const Scalar& b) {
  return unary("div", a, kLinear, [&](const Tensor& t) { return at::div(t, b); });
}
DTensor pow(const DTensor& a, const Scalar& exponent) {
  return unary("pow", a, kNone, [&](const Tensor& t) { return at::pow(t, exponent); });
}
DTensor eq(const DTensor& a, const Scalar& b) {
  return unary("eq", a, kNone, [&](const Tensor& t) { return at::eq(t, b); });
}
DTensor ne(const DTensor& a, const Scalar& b) {
  return unary("ne", a, kNone, [&](const Tensor& t) { return at::ne(t, b); });
}
DTensor lt(const DTensor& a, const Scalar& b) {
  return unary("lt", a, kNone, [&](const Tensor& t) { return at::lt(t, b); });
}
DTensor le(const DTensor& a, const Scalar& b) {
  return unary("le", a, kNone, [&](const Tensor& t) { return at::le(t, b); });
}
DTensor gt(const DTensor& a, const Scalar& b) {
  return unary("gt", a, kNone, [&](const Tensor& t) { return at::gt(t, b); });
}
DTensor ge(const DTensor& a, const Scalar& b) {
  return unary("ge", a, kNone, [&](const Tensor& t) { return at::ge(t, b); });
}

// --- of more

DTensor pointwise(const std::string& op, const std::vector<DTensor>& inputs,
                  const std::function<Tensor(Inputs inputs)>& compute) {
  return call(
      op, inputs, [&](Inputs given) { return rules::elementwise(op.c_str(), given, false); }, compute);
}

DTensor where(const DTensor& condition, const DTensor& a, const DTensor& b) {
  return pointwise("where", {condition, a, b}, [](Inputs inputs) {
    return at::where(inputs[0].local_tensor(), inputs[1].local_tensor(), inputs[2].local_tensor());
  });
}

DTensor masked_fill(const DTensor& x, const DTensor& mask, const Scalar& value) {
  return binary("masked_fill", x, mask, kNone, [&](const Tensor& t, const Tensor& m) {
    return at::where(m, at::full({}, value, t.options().requires_grad(false)), t);
  });
}

// --- in place

namespace {

template <typename F>
DTensor in_place(const char* op, const std::vector<DTensor>& inputs, Linearity linearity, const F& f) {
  return call_in_place(
      op, inputs, [&](Inputs given) { return rules::elementwise(op, given, linearity == Linearity::linear); }, f);
}

template <typename F>
DTensor unary_in_place(const char* op, const DTensor& x, Linearity linearity, const F& f) {
  return in_place(op, {x}, linearity, [&](Inputs inputs) -> Tensor {
    const Tensor& local = inputs[0].local_tensor();
    f(local);
    return local;
  });
}

template <typename F>
DTensor binary_in_place(const char* op, const DTensor& x, const DTensor& b, Linearity linearity, const F& f) {
  return in_place(op, {x, b}, linearity, [&](Inputs inputs) -> Tensor {
    const Tensor& local = inputs[0].local_tensor();
    f(local, inputs[1].local_tensor());
    return local;
  });
}

}  // namespace

DTensor add_(const DTensor& x, const DTensor& b) {
  return binary_in_place("add_", x, b, kLinear, [](const Tensor& s, const Tensor& t) { s.add_(t); });
}
DTensor sub_(const DTensor& x, const DTensor& b) {
  return binary_in_place("sub_", x, b, kLinear, [](const Tensor& s, const Tensor& t) { s.sub_(t); });
}
DTensor mul_(const DTensor& x, const DTensor& b) {
  return binary_in_place("mul_", x, b, kNone, [](const Tensor& s, const Tensor& t) { s.mul_(t); });
}
DTensor div_(const DTensor& x, const DTensor& b) {
  return binary_in_place("div_", x, b, kNone, [](const Tensor& s, const Tensor& t) { s.div_(t); });
}
DTensor copy_(const DTensor& x, const DTensor& from) {
  return binary_in_place("copy_", x, from, kLinear, [](const Tensor& s, const Tensor& t) { s.copy_(t); });
}
DTensor add_(const DTensor& x, const Scalar& b) {
  return unary_in_place("add_", x, kNone, [&](const Tensor& t) { t.add_(b); });
}
DTensor sub_(const DTensor& x, const Scalar& b) {
  return unary_in_place("sub_", x, kNone, [&](const Tensor& t) { t.sub_(b); });
}
DTensor mul_(const DTensor& x, const Scalar& b) {
  return unary_in_place("mul_", x, kLinear, [&](const Tensor& t) { t.mul_(b); });
}
DTensor div_(const DTensor& x, const Scalar& b) {
  return unary_in_place("div_", x, kLinear, [&](const Tensor& t) { t.div_(b); });
}
DTensor fill_(const DTensor& x, const Scalar& value) {
  return unary_in_place("fill_", x, kNone, [&](const Tensor& t) { t.fill_(value); });
}
DTensor masked_fill_(const DTensor& x, const DTensor& mask, const Scalar& value) {
  return binary_in_place("masked_fill_", x, mask, kNone,
                         [&](const Tensor& t, const Tensor& m) { t.masked_fill_(m, value); });
}
DTensor zero_(const DTensor& x) {
  return unary_in_place("zero_", x, kLinear, [](const Tensor& t) { t.zero_(); });
}

}  // namespace dtensor

DTensor operator+(const DTensor& a, const DTensor& b) { return dtensor::add(a, b); }
DTensor operator-(const DTensor& a, const DTensor& b) { return dtensor::sub(a, b); }
DTensor operator*(const DTensor& a, const DTensor& b) { return dtensor::mul(a, b); }
DTensor operator/(const DTensor& a, const DTensor& b) { return dtensor::div(a, b); }
DTensor operator+(const DTensor& a, const at::Scalar& b) { return dtensor::add(a, b); }
DTensor operator-(const DTensor& a, const at::Scalar& b) { return dtensor::sub(a, b); }
DTensor operator*(const DTensor& a, const at::Scalar& b) { return dtensor::mul(a, b); }
DTensor operator/(const DTensor& a, const at::Scalar& b) { return dtensor::div(a, b); }
DTensor operator+(const at::Scalar& a, const DTensor& b) { return dtensor::add(b, a); }
DTensor operator-(const at::Scalar& a, const DTensor& b) { return dtensor::add(dtensor::neg(b), a); }
DTensor operator*(const at::Scalar& a, const DTensor& b) { return dtensor::mul(b, a); }
DTensor operator/(const at::Scalar& a, const DTensor& b) { return dtensor::mul(dtensor::reciprocal(b), a); }
DTensor operator-(const DTensor& a) { return dtensor::neg(a); }

}  // namespace tessera

// Functions element by element that take options, in place or to a given tensor; those without are in elementary.cpp.

#include <ATen/Functions.h>

#include <numeric>

#include "tensor/dtensor_ops/calls.h"
#include "tensor/dtensor_rules/shared_dims.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera {

namespace dtensor {

using at::Scalar;
using at::Tensor;
constexpr Linearity kNone = Linearity::none, kLinear = Linearity::linear;

namespace {

// The rule of an op that computes nothing: the inputs may be partial in the same way.
OpRule copied(Inputs inputs) {
  OpRule rule = rules::elementwise("copy", inputs, kNone);
  std::vector<std::size_t> all(inputs.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  rules::add_partials(rule, inputs, all, rules::Partials::any);
  return rule;
}

// Of a product with a number.
Linearity scaled(double by) {
  if (by == 0) return kLinear;
  return by > 0 ? Linearity::increasing_linear : Linearity::decreasing_linear;
}
Linearity scaled(const Scalar& by) { return by.isComplex() ? kLinear : scaled(by.toDouble()); }

}  // namespace

DTensor clamp(const DTensor& x, const std::optional<Scalar>& min, const std::optional<Scalar>& max) {
  if (!min && !max) fail(ErrorCode::invalid_argument, "clamp: neither a minimum nor a maximum, expected one of them");
  return unary("clamp", x, Linearity::increasing, [&](Tensor t) {
    if (min) t = at::clamp_min(t, *min);
    if (max) t = at::clamp_max(t, *max);
    return t;
  });
}
DTensor clone(const DTensor& x) {
  return call("clone", {&x, 1}, copied, [](Inputs inputs) { return inputs[0].local_tensor().clone(); });
}
DTensor to(const DTensor& x, at::ScalarType dtype) {
  const bool keeps_values = at::isFloatingType(dtype) && !is_float8(dtype) && !is_float8(x.scalar_type()) &&
                            at::promoteTypes(x.scalar_type(), dtype) == dtype;
  return unary("to", x, keeps_values ? Linearity::increasing_linear : kNone,
               [&](const Tensor& t) { return t.to(dtype); });
}
MantissaAndExponent frexp(const DTensor& x) {
  const auto rule = [](Inputs inputs) { return rules::elementwise("frexp", inputs, kNone); };
  const auto compute = [](Inputs inputs) { return to_tensors(at::frexp(inputs[0].local_tensor())); };
  const std::vector<DTensor> both = call_for_all("frexp", {x}, rule, {x.size()}, compute, {x.scalar_type(), at::kInt});
  return {both[0], both[1]};
}
DTensor celu(const DTensor& x, const Scalar& alpha) {
  return unary("celu", x, kNone, [&](const Tensor& t) { return at::celu(t, alpha); });
}
DTensor elu(const DTensor& x, const Scalar& alpha) {
  return unary("elu", x, kNone, [&](const Tensor& t) { return at::elu(t, alpha); });
}
DTensor hardshrink(const DTensor& x, const Scalar& lambda) {
  return unary("hardshrink", x, kNone, [&](const Tensor& t) { return at::hardshrink(t, lambda); });
}
DTensor hardtanh(const DTensor& x, const Scalar& min, const Scalar& max) {
  return unary("hardtanh", x, Linearity::increasing, [&](const Tensor& t) { return at::hardtanh(t, min, max); });
}
DTensor leaky_relu(const DTensor& x, const Scalar& slope) {
  return unary("leaky_relu", x, kNone, [&](const Tensor& t) { return at::leaky_relu(t, slope); });
}
DTensor logit(const DTensor& x, std::optional<double> eps) {
  return unary("logit", x, kNone, [&](const Tensor& t) { return eps ? at::logit(t, *eps) : at::logit(t); });
}
DTensor mvlgamma(const DTensor& x, std::int64_t p) {
  return unary("mvlgamma", x, kNone, [&](const Tensor& t) { return at::mvlgamma(t, p); });
}
DTensor nan_to_num(const DTensor& x, double nan) {
  return unary("nan_to_num", x, kNone, [&](const Tensor& t) { return at::nan_to_num(t, nan); });
}
DTensor polygamma(std::int64_t n, const DTensor& x) {
  return unary("polygamma", x, kNone, [&](const Tensor& t) { return at::polygamma(n, t); });
}
DTensor softplus(const DTensor& x, const Scalar& beta, const Scalar& threshold) {
  return unary("softplus", x, kNone, [&](const Tensor& t) { return at::softplus(t, beta, threshold); });
}
DTensor softshrink(const DTensor& x, const Scalar& lambda) {
  return unary("softshrink", x, kNone, [&](const Tensor& t) { return at::softshrink(t, lambda); });
}
DTensor threshold(const DTensor& x, const Scalar& least, const Scalar& value) {
  return unary("threshold", x, kNone, [&](const Tensor& t) { return at::threshold(t, least, value); });
}
DTensor isclose(const AnyTensor& a, const AnyTensor& b, double rtol, double atol, bool equal_nan) {
  return binary("isclose", a, b, kNone,
                [&](const Tensor& s, const Tensor& t) { return at::isclose(s, t, rtol, atol, equal_nan); });
}

// --- of a tensor and a number

DTensor add(const DTensor& a, const Scalar& b) {
  return unary("add", a, Linearity::shifted, [&](const Tensor& t) { return at::add(t, b); });
}
DTensor sub(const DTensor& a, const Scalar& b) {
  return unary("sub", a, Linearity::shifted, [&](const Tensor& t) { return at::sub(t, b); });
}
DTensor mul(const DTensor& a, const Scalar& b) {
  return unary("mul", a, scaled(b), [&](const Tensor& t) { return at::mul(t, b); });
}
DTensor div(const DTensor& a, const Scalar& b) {
  return unary("div", a, scaled(b), [&](const Tensor& t) { return at::div(t, b); });
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
                  FunctionRef<Tensor(Inputs inputs)> compute) {
  return call(
      op, inputs, [&](Inputs given) { return rules::elementwise(op.c_str(), given, kNone); }, compute);
}

namespace {

template <typename F>
DTensor of_three(const char* op, const AnyTensor& a, const AnyTensor& b, const AnyTensor& c, const F& f) {
  return elementwise(op, on_one_mesh(op, {a, b, c}), kNone,
                     [&](const std::vector<Tensor>& t) -> Tensor { return f(t[0], t[1], t[2]); });
}

}  // namespace

DTensor where(const AnyTensor& condition, const AnyTensor& a, const AnyTensor& b) {
  return of_three("where", condition, a, b,
                  [](const Tensor& c, const Tensor& s, const Tensor& t) { return at::where(c, s, t); });
}
DTensor lerp(const AnyTensor& a, const AnyTensor& b, const AnyTensor& weight) {
  return of_three("lerp", a, b, weight,
                  [](const Tensor& s, const Tensor& t, const Tensor& w) { return at::lerp(s, t, w); });
}
DTensor addcmul(const AnyTensor& x, const AnyTensor& a, const AnyTensor& b, const Scalar& value) {
  return of_three("addcmul", x, a, b,
                  [&](const Tensor& t, const Tensor& u, const Tensor& v) { return at::addcmul(t, u, v, value); });
}
DTensor addcdiv(const AnyTensor& x, const AnyTensor& a, const AnyTensor& b, const Scalar& value) {
  return of_three("addcdiv", x, a, b,
                  [&](const Tensor& t, const Tensor& u, const Tensor& v) { return at::addcdiv(t, u, v, value); });
}
DTensor where(const AnyTensor& condition, const AnyTensor& a, const Scalar& b) {
  return binary("where", condition, a, kNone, [&](const Tensor& c, const Tensor& t) { return at::where(c, t, b); });
}
DTensor where(const AnyTensor& condition, const Scalar& a, const AnyTensor& b) {
  return binary("where", condition, b, kNone, [&](const Tensor& c, const Tensor& t) { return at::where(c, a, t); });
}
DTensor where(const DTensor& condition, const Scalar& a, const Scalar& b) {
  return unary("where", condition, kNone, [&](const Tensor& c) { return at::where(c, a, b); });
}

DTensor masked_fill(const AnyTensor& x, const AnyTensor& mask, const Scalar& value) {
  return binary("masked_fill", x, mask, kNone, [&](const Tensor& t, const Tensor& m) {
    return at::where(m, at::full({}, value, t.options().requires_grad(false)), t);
  });
}

// --- in place

namespace {

template <typename F>
DTensor in_place(const char* op, const std::vector<DTensor>& inputs, Linearity linearity, const F& f) {
  return call_in_place(
      op, inputs, [&](Inputs given) { return rules::elementwise(op, given, linearity); }, f);
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
DTensor binary_in_place(const char* op, const DTensor& x, const AnyTensor& b, Linearity linearity, const F& f) {
  return in_place(op, on_one_mesh(op, {x, b}), linearity, [&](Inputs inputs) -> Tensor {
    const Tensor& local = inputs[0].local_tensor();
    f(local, inputs[1].local_tensor());
    return local;
  });
}

}  // namespace

DTensor add_(const DTensor& x, const AnyTensor& b) {
  return binary_in_place("add_", x, b, Linearity::sum, [](const Tensor& s, const Tensor& t) { s.add_(t); });
}
DTensor sub_(const DTensor& x, const AnyTensor& b) {
  return binary_in_place("sub_", x, b, Linearity::difference, [](const Tensor& s, const Tensor& t) { s.sub_(t); });
}
DTensor mul_(const DTensor& x, const AnyTensor& b) {
  return binary_in_place("mul_", x, b, Linearity::product, [](const Tensor& s, const Tensor& t) { s.mul_(t); });
}
DTensor div_(const DTensor& x, const AnyTensor& b) {
  return binary_in_place("div_", x, b, Linearity::quotient, [](const Tensor& s, const Tensor& t) { s.div_(t); });
}

namespace {

DTensor copy_to(const char* op, const DTensor& x, const AnyTensor& from) {
  return call_in_place(op, on_one_mesh(op, {x, from}), copied, [](Inputs inputs) -> Tensor {
    const Tensor& local = inputs[0].local_tensor();
    local.copy_(inputs[1].local_tensor());
    return local;
  });
}

}  // namespace

DTensor copy_(const DTensor& x, const AnyTensor& from) { return copy_to("copy_", x, from); }
DTensor fill_(const DTensor& x, const Scalar& value) {
  if (value.isComplex() && !at::isComplexType(x.scalar_type()))
    fail(ErrorCode::invalid_argument, "fill_ of {} by a complex number: expected a complex dtype",
         c10::toString(x.scalar_type()));
  const Tensor number = at::full({}, value, at::TensorOptions(x.scalar_type()).device(x.device()));
  return copy_to("fill_", x, DTensor::from_local(number, x.device_mesh(), {}, {Sizes()}));
}
DTensor add_(const DTensor& x, const Scalar& b) {
  return unary_in_place("add_", x, Linearity::shifted, [&](const Tensor& t) { t.add_(b); });
}
DTensor sub_(const DTensor& x, const Scalar& b) {
  return unary_in_place("sub_", x, Linearity::shifted, [&](const Tensor& t) { t.sub_(b); });
}
DTensor mul_(const DTensor& x, const Scalar& b) {
  return unary_in_place("mul_", x, scaled(b), [&](const Tensor& t) { t.mul_(b); });
}
DTensor div_(const DTensor& x, const Scalar& b) {
  return unary_in_place("div_", x, scaled(b), [&](const Tensor& t) { t.div_(b); });
}
DTensor masked_fill_(const DTensor& x, const AnyTensor& mask, const Scalar& value) {
  return binary_in_place("masked_fill_", x, mask, kNone,
                         [&](const Tensor& t, const Tensor& m) { t.masked_fill_(m, value); });
}
DTensor zero_(const DTensor& x) {
  return call_in_place("zero_", {&x, 1}, copied, [](Inputs inputs) -> Tensor {
    const Tensor& local = inputs[0].local_tensor();
    local.zero_();
    return local;
  });
}

// --- to a given tensor

namespace {

// `rule` is that of the op, of `a` and `b`; `f` writes its result to the first local tensor.
template <typename Rule, typename F>
DTensor binary_out(const char* op, const DTensor& out, const AnyTensor& a, const AnyTensor& b, const Rule& rule,
                   const F& f) {
  return call_in_place(
      op, on_one_mesh(op, {out, a, b}),
      [&](Inputs inputs) {
        OpRule given = rule(inputs.subspan(1));
        for (OpStrategy& strategy : given.strategies) strategy.inputs.insert(strategy.inputs.begin(), strategy.output);
        return given;
      },
      [&](Inputs inputs) {
        Tensor to = inputs[0].local_tensor();
        return f(to, inputs[1].local_tensor(), inputs[2].local_tensor());
      });
}

template <typename F>
DTensor elementwise_out(const char* op, const DTensor& out, const AnyTensor& a, const AnyTensor& b, Linearity linearity,
                        const F& f) {
  return binary_out(
      op, out, a, b, [&](Inputs inputs) { return rules::elementwise(op, inputs, linearity); }, f);
}

}  // namespace

DTensor add_out(const DTensor& out, const AnyTensor& a, const AnyTensor& b) {
  return elementwise_out("add_out", out, a, b, Linearity::sum,
                         [](Tensor& to, const Tensor& s, const Tensor& t) { return at::add_out(to, s, t); });
}
DTensor sub_out(const DTensor& out, const AnyTensor& a, const AnyTensor& b) {
  return elementwise_out("sub_out", out, a, b, Linearity::difference,
                         [](Tensor& to, const Tensor& s, const Tensor& t) { return at::sub_out(to, s, t); });
}
DTensor mul_out(const DTensor& out, const AnyTensor& a, const AnyTensor& b) {
  return elementwise_out("mul_out", out, a, b, Linearity::product,
                         [](Tensor& to, const Tensor& s, const Tensor& t) { return at::mul_out(to, s, t); });
}
DTensor div_out(const DTensor& out, const AnyTensor& a, const AnyTensor& b) {
  return elementwise_out("div_out", out, a, b, Linearity::quotient,
                         [](Tensor& to, const Tensor& s, const Tensor& t) { return at::div_out(to, s, t); });
}
DTensor matmul_out(const DTensor& out, const AnyTensor& a, const AnyTensor& b) {
  return binary_out("matmul_out", out, a, b, rules::matmul,
                    [](Tensor& to, const Tensor& s, const Tensor& t) { return at::matmul_out(to, s, t); });
}

}  // namespace dtensor

DTensor operator+(const dtensor::AnyTensor& a, const dtensor::AnyTensor& b) { return dtensor::add(a, b); }
DTensor operator-(const dtensor::AnyTensor& a, const dtensor::AnyTensor& b) { return dtensor::sub(a, b); }
DTensor operator*(const dtensor::AnyTensor& a, const dtensor::AnyTensor& b) { return dtensor::mul(a, b); }
DTensor operator/(const dtensor::AnyTensor& a, const dtensor::AnyTensor& b) { return dtensor::div(a, b); }
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

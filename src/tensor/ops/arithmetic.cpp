#include <ATen/ScalarOps.h>
#include <ATen/ops/add.h>
#include <ATen/ops/div.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sub.h>

#include <string>

#include "tensor/ops/built_in.h"
#include "tensor/ops/shards.h"
#include "tessera/base/error.h"
#include "tessera/tensor/ops.h"

namespace tessera::ops {

namespace {

void check_alike(const std::string& op, const ShardedTensor& a, const ShardedTensor& b) {
  const ShardingSpec &of_a = a.sharding_spec(), &of_b = b.sharding_spec();
  if (a.size() == b.size() && (of_a == of_b || comparable_text(of_a) == comparable_text(of_b))) return;
  fail(ErrorCode::invalid_argument, "op '{}' of {} and {}: expected equal sizes and specs, nothing is broadcast", op,
       describe(a), describe(b));
}

// Returns the operand for shard i. A number is wrapped, so that type promotion treats it as a number.
at::Tensor operand(const Operand& of, std::size_t i) {
  if (const auto* scalar = std::get_if<at::Scalar>(&of)) return at::native::wrapped_scalar_tensor(*scalar);
  return std::get<ShardedTensor>(of).local_shards()[i].tensor;
}

at::Tensor sample(const Operand& of) {
  if (const auto* scalar = std::get_if<at::Scalar>(&of)) return at::native::wrapped_scalar_tensor(*scalar);
  return sample_of(std::get<ShardedTensor>(of));
}

auto on_elements(const std::string& name, at::Tensor (*f)(const at::Tensor&, const at::Tensor&)) {
  return [name, f](const Operand& a, const Operand& b) {
    const auto* left = std::get_if<ShardedTensor>(&a);
    const auto* right = std::get_if<ShardedTensor>(&b);
    if (left != nullptr && right != nullptr) check_alike(name, *left, *right);
    const ShardedTensor& like = left != nullptr ? *left : std::get<ShardedTensor>(b);
    const at::ScalarType dtype = f(sample(a), sample(b)).scalar_type();
    std::vector<at::Tensor> tensors;
    for (std::size_t i = 0; i < like.local_shards().size(); ++i) tensors.push_back(f(operand(a, i), operand(b, i)));
    const bool grad = (left != nullptr && left->requires_grad()) || (right != nullptr && right->requires_grad());
    return like.with_local_tensors(tensors, dtype, result_requires_grad(grad, dtype));
  };
}

}  // namespace

const BuiltIn add_op(add, "add",
                     on_elements("add", [](const at::Tensor& a, const at::Tensor& b) { return at::add(a, b); }));
const BuiltIn sub_op(sub, "sub",
                     on_elements("sub", [](const at::Tensor& a, const at::Tensor& b) { return at::sub(a, b); }));
const BuiltIn mul_op(mul, "mul",
                     on_elements("mul", [](const at::Tensor& a, const at::Tensor& b) { return at::mul(a, b); }));
const BuiltIn div_op(div, "div",
                     on_elements("div", [](const at::Tensor& a, const at::Tensor& b) { return at::div(a, b); }));

const BuiltIn masked_fill_op(
    masked_fill, "masked_fill", [](const ShardedTensor& input, const at::Tensor& mask, const at::Scalar& value) {
      const auto dims = static_cast<std::int64_t>(input.size().size());
      bool fits = mask.defined() && mask.scalar_type() == at::kBool && mask.dim() <= dims;
      for (std::int64_t d = 1; fits && d <= mask.dim(); ++d) {
        fits = mask.size(-d) == 1 || mask.size(-d) == input.size()[static_cast<std::size_t>(dims - d)];
      }
      if (!fits) {
        fail(ErrorCode::invalid_argument,
             "op 'masked_fill' of {} by {}: expected a mask of bools that can be broadcast", describe(input),
             describe(mask));
      }
      std::vector<at::Tensor> tensors;
      for (const Shard& shard : input.local_shards()) {
        at::Tensor part = mask;
        for (std::int64_t d = 1; d <= mask.dim(); ++d) {
          const auto of_shard = static_cast<std::size_t>(dims - d);
          if (part.size(-d) == 1) continue;
          const std::int64_t begin = std::min(shard.metadata.shard_offsets[of_shard], part.size(-d));
          part = part.narrow(-d, begin, shard.metadata.shard_sizes[of_shard]);
        }
        tensors.push_back(shard.tensor.masked_fill(part, value));
      }
      return input.with_local_tensors(tensors, input.scalar_type(),
                                      result_requires_grad(input.requires_grad(), input.scalar_type()));
    });

ShardedTensor add(const Operand& a, const Operand& b) { return add_op(a, b); }
ShardedTensor sub(const Operand& a, const Operand& b) { return sub_op(a, b); }
ShardedTensor mul(const Operand& a, const Operand& b) { return mul_op(a, b); }
ShardedTensor div(const Operand& a, const Operand& b) { return div_op(a, b); }
ShardedTensor masked_fill(const ShardedTensor& input, const at::Tensor& mask, const at::Scalar& value) {
  return masked_fill_op(input, mask, value);
}

}  // namespace tessera::ops

namespace tessera {

ShardedTensor operator+(const ShardedTensor& a, const ShardedTensor& b) { return ops::add(a, b); }
ShardedTensor operator+(const ShardedTensor& a, const at::Scalar& b) { return ops::add(a, b); }
ShardedTensor operator+(const at::Scalar& a, const ShardedTensor& b) { return ops::add(a, b); }
ShardedTensor operator-(const ShardedTensor& a, const ShardedTensor& b) { return ops::sub(a, b); }
ShardedTensor operator-(const ShardedTensor& a, const at::Scalar& b) { return ops::sub(a, b); }
ShardedTensor operator-(const at::Scalar& a, const ShardedTensor& b) { return ops::sub(a, b); }
ShardedTensor operator*(const ShardedTensor& a, const ShardedTensor& b) { return ops::mul(a, b); }
ShardedTensor operator*(const ShardedTensor& a, const at::Scalar& b) { return ops::mul(a, b); }
ShardedTensor operator*(const at::Scalar& a, const ShardedTensor& b) { return ops::mul(a, b); }
ShardedTensor operator/(const ShardedTensor& a, const ShardedTensor& b) { return ops::div(a, b); }
ShardedTensor operator/(const ShardedTensor& a, const at::Scalar& b) { return ops::div(a, b); }
ShardedTensor operator/(const at::Scalar& a, const ShardedTensor& b) { return ops::div(a, b); }

}  // namespace tessera

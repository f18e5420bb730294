#include "tessera/tensor/op.h"

#include <fmt/ranges.h>

#include <ATen/core/Formatting.h>

#include <sstream>

#include "tensor/torch_errors.h"
#include "tessera/base/error.h"
#include "tessera/comm/internal/step.h"

namespace tessera {

std::string describe(const ShardedTensor& tensor) {
  return fmt::format("ShardedTensor {} {} by {}", shape_to_string(tensor.size()),
                     dtype_name(tensor.metadata().tensor_properties.dtype), comparable_text(tensor.sharding_spec()));
}

std::string describe(const ShardedTensor::ToOptions& options) {
  return fmt::format("ToOptions{{device={}, dtype={}, copy={}}}", options.device ? options.device->str() : "None",
                     options.dtype ? c10::toString(*options.dtype) : "None", options.copy);
}

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "None";
  return fmt::format("Tensor {} {}", shape_to_string(tensor.sizes().vec()), c10::toString(tensor.scalar_type()));
}

std::string describe(const at::Scalar& scalar) {
  std::ostringstream text;
  text << scalar;
  return text.str();
}

std::string describe(const std::string& text) { return fmt::format("'{}'", printable(text)); }
std::string describe(const std::vector<std::int64_t>& list) { return shape_to_string(list); }
std::string describe(bool value) { return value ? "true" : "false"; }
std::string describe(std::int64_t value) { return fmt::format("{}", value); }
std::string describe(double value) { return fmt::format("{}", value); }

void detail::ShardedArguments::add(const ShardedTensor& tensor) {
  if (first_ == nullptr) {
    first_ = &tensor;
  } else if (!(first_->process_group() == tensor.process_group())) {
    fail(ErrorCode::invalid_argument, "op '{}': the sharded tensors are of two process groups, expected one", op_);
  }
}

const ShardedTensor& detail::ShardedArguments::first() const {
  if (first_ == nullptr)
    fail(ErrorCode::invalid_argument, "op '{}': none of its arguments is a sharded tensor, expected at least one", op_);
  return *first_;
}

void detail::ShardedArguments::rethrow() const {
  const std::string step = fmt::format("op '{}'", op_);
  if (first_ != nullptr) comm::leave_step(first_->process_group(), step, std::current_exception());
  rethrow_as_error(step);
}

void detail::fail_unsupported(std::string_view op, std::span<const std::string> arguments, const ShardedTensor& on) {
  fail(ErrorCode::unsupported,
       "op '{}' with arguments ({}) is not supported for {}, expected a spec that has an implementation; set one with "
       "register_for",
       op, fmt::join(arguments, ", "), on.sharding_spec().kind());
}

void detail::fail_not_an_op() {
  fail(ErrorCode::invalid_argument, "op_of: the function is not an op, expected a function of tessera::ops");
}

}  // namespace tessera

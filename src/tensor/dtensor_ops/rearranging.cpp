#include <ATen/ops/bucketize.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/one_hot.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/roll.h>

#include <array>

#include "tensor/dtensor/explicit_redistribution.h"
#include "tensor/dtensor_ops/calls.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::dtensor {

namespace {

// Returns the map that leaves every dimension but `unsharded` where it is.
rules::DimMap map_without(const DTensor& x, const Sizes& unsharded) {
  rules::DimMap map = same_dims(x);
  for (const std::int64_t dim : unsharded) map[static_cast<std::size_t>(dim)] = std::nullopt;
  return map;
}

// Returns ATen's name of a mode.
const char* name_of(PadMode mode) {
  switch (mode) {
    case PadMode::reflect:
      return "reflect";
    case PadMode::replicate:
      return "replicate";
    case PadMode::circular:
      return "circular";
    case PadMode::constant:
      break;
  }
  return "constant";
}

}  // namespace

DTensor flip(const DTensor& x, const Sizes& dims) {
  if (dims.empty()) return x;
  const Sizes over = rules::dims_from_front("flip", dims, x.dim());
  return mapped("flip", x, x.size(), map_without(x, over),
                [&](const at::Tensor& local, const Sizes&) { return at::flip(local, over); });
}

DTensor roll(const DTensor& x, const Sizes& shifts, const Sizes& dims) {
  if (dims.empty() && shifts.size() == 1) return view(roll(flatten(x), shifts, {0}), x.size());
  if (shifts.size() != dims.size() || dims.empty()) {
    fail(ErrorCode::invalid_argument, "roll by {} along dimensions {}: expected a number for each dimension",
         shape_to_string(shifts), shape_to_string(dims));
  }
  Sizes over;  // one may be there twice
  for (const std::int64_t dim : dims) over.push_back(rules::dim_from_front("roll", dim, x.dim()));
  return mapped("roll", x, x.size(), map_without(x, over),
                [&](const at::Tensor& local, const Sizes&) { return at::roll(local, shifts, over); });
}

DTensor pad(const DTensor& x, const Sizes& pad, PadMode mode, const at::Scalar& value) {
  const std::size_t dims = x.size().size();
  if (pad.size() % 2 != 0 || pad.size() / 2 > dims) {
    fail(ErrorCode::invalid_argument, "pad of size {} by {}: expected two numbers for each of the last dimensions",
         shape_to_string(x.size()), shape_to_string(pad));
  }
  Sizes size = x.size(), padded;
  for (std::size_t i = 0; i < pad.size(); i += 2) {
    const std::size_t dim = dims - 1 - i / 2;
    if (pad[i] == 0 && pad[i + 1] == 0) continue;
    size[dim] += pad[i] + pad[i + 1];
    padded.push_back(static_cast<std::int64_t>(dim));
    if (size[dim] < 0) {
      fail(ErrorCode::invalid_argument, "pad of size {} by {}: expected to remove at most what there is",
           shape_to_string(x.size()), shape_to_string(pad));
    }
  }
  const bool is_constant = mode == PadMode::constant;
  std::vector<ReduceOp> reduced;
  if (is_constant && !value.equal(0)) reduced = {ReduceOp::sum, ReduceOp::product};
  const rules::DimMap map = map_without(x, padded);
  return mapped(
      "pad", x, size, map,
      [&](const at::Tensor& local, const Sizes&) {
        return even_if_empty(local, kept_by(map), [&](const at::Tensor& t) {
          return is_constant ? at::constant_pad_nd(t, pad, value) : at::pad(t, pad, name_of(mode));
        });
      },
      reduced);
}

DTensor constant_pad_nd(const DTensor& x, const Sizes& pad, const at::Scalar& value) {
  return dtensor::pad(x, pad, PadMode::constant, value);
}

DTensor one_hot(const DTensor& x, std::int64_t classes) {
  if (classes == -1) {
    if (x.numel() == 0) fail(ErrorCode::invalid_argument, "one_hot of no element: expected the number of classes");
    const at::Tensor greatest = redistributed_by_op(amax(x)).local_tensor();
    classes = x.device_mesh().has_this_rank() ? greatest.item<std::int64_t>() + 1 : 0;
  }
  const auto rule = [&](Inputs inputs) {
    OpRule along = rules::along_dims(inputs, {});
    along.output_size.push_back(classes);
    return along;
  };
  return call("one_hot", {&x, 1}, rule, [&](Inputs inputs) { return at::one_hot(inputs[0].local_tensor(), classes); });
}

DTensor bucketize(const DTensor& x, const DTensor& boundaries, bool out_int32, bool right) {
  const auto compute = [&](Inputs inputs) {
    return at::bucketize(inputs[0].local_tensor(), inputs[1].local_tensor(), out_int32, right);
  };
  return along_dims("bucketize", std::vector<DTensor>{x, boundaries}, Sizes(), compute,
                    {out_int32 ? at::kInt : at::kLong});
}

}  // namespace tessera::dtensor

#include <ATen/ops/cat.h>

#include <algorithm>

#include "tensor/dtensor/explicit_redistribution.h"
#include "tensor/dtensor_ops/calls.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::dtensor {

namespace {

void check_any(const char* op, const std::vector<DTensor>& tensors) {
  if (tensors.empty()) fail(ErrorCode::invalid_argument, "{}: no tensors, expected at least one", op);
}

// Returns the map of an op that changes dimension `dim`, or removes it and so moves those after it.
rules::DimMap without(const DTensor& x, std::int64_t dim, bool removes) {
  rules::DimMap map = same_dims(x);
  const auto d = static_cast<std::size_t>(dim);
  for (std::size_t after = d + 1; removes && after < map.size(); ++after) map[after] = after - 1;
  map[d] = std::nullopt;
  return map;
}

// Returns x with no shard along `dim`.
DTensor unsharded(const DTensor& x, std::int64_t dim) {
  Placements placements = x.placements();
  for (Placement& placement : placements) {
    if (placement.is_shard(dim)) placement = Placement::replicate();
  }
  return redistributed_by_op(x, placements);
}

// Of LibTorch's numbers in slices and indices, which are symbolic in some versions.
template <typename Number>
std::int64_t to_number(const Number& number) {
  if constexpr (std::is_integral_v<Number>) {
    return number;
  } else {
    return number.expect_int();
  }
}

}  // namespace

DTensor cat(const std::vector<DTensor>& tensors, std::int64_t dim) {
  check_any("cat", tensors);
  const DTensor& first = tensors[rules::first_of_cat(tensors)];
  // As in ATen, any dimension is that of tensors of size [0] alone.
  const std::int64_t along = first.size() == Sizes{0} ? 0 : rules::dim_from_front("cat", dim, first.dim());
  at::ScalarType dtype = tensors[0].scalar_type();
  for (const DTensor& tensor : tensors) dtype = at::promoteTypes(dtype, tensor.scalar_type());
  return call(
      "cat", tensors,
      [&](Inputs inputs) { return with_dtypes(rules::cat(inputs, static_cast<std::size_t>(along)), {dtype}); },
      [&](Inputs inputs) { return at::cat(locals_of(inputs), along); });
}

DTensor stack(const std::vector<DTensor>& tensors, std::int64_t dim) {
  check_any("stack", tensors);
  const std::int64_t along = rules::dim_from_front("stack", dim, tensors[0].dim() + 1);
  std::vector<DTensor> rows;
  rows.reserve(tensors.size());
  for (const DTensor& tensor : tensors) rows.push_back(unsqueeze(tensor, along));
  return cat(rows, along);
}

SliceBounds slice_bounds(const char* op, const DTensor& x, std::int64_t dim, std::int64_t begin, std::int64_t end,
                         std::int64_t step) {
  const std::int64_t along = rules::dim_from_front(op, dim, x.dim()), length = x.size(along);
  if (step < 1) fail(ErrorCode::invalid_argument, "{} with step {}: expected a step of at least 1", op, step);
  const auto place = [&](std::int64_t n) { return std::clamp<std::int64_t>(n < 0 ? n + length : n, 0, length); };
  return {along, place(begin), std::max(place(end), place(begin))};
}

DTensor slice(const DTensor& x, std::int64_t dim, std::int64_t begin, std::int64_t end, std::int64_t step) {
  const SliceBounds bounds = slice_bounds("slice", x, dim, begin, end, step);
  const std::int64_t along = bounds.dim, first = bounds.begin, last = bounds.end;
  if (first == 0 && last == x.size(along) && step == 1) return x;
  Sizes size = x.size();
  size[static_cast<std::size_t>(along)] = (last - first + step - 1) / step;
  return mapped("slice", x, size, without(x, along, false),
                [&](const at::Tensor& local, const Sizes&) { return local.slice(along, first, last, step); });
}

DTensor narrow(const DTensor& x, std::int64_t dim, std::int64_t begin, std::int64_t length) {
  const std::int64_t along = rules::dim_from_front("narrow", dim, x.dim()), size = x.size(along);
  const std::int64_t first = begin < 0 ? begin + size : begin;
  if (first < 0 || length < 0 || first > size - length) {
    fail(ErrorCode::invalid_argument, "narrow dimension {} of size {} to {} elements from {}: expected them within it",
         along, size, length, begin);
  }
  return slice(x, along, first, first + length);
}

DTensor select(const DTensor& x, std::int64_t dim, std::int64_t index) {
  const std::int64_t along = rules::dim_from_front("select", dim, x.dim()), length = x.size(along);
  if (index < -length || index >= length) {
    fail(ErrorCode::invalid_argument, "select index {} of dimension {} of size {}: expected {} to {}", index, along,
         length, -length, length - 1);
  }
  Sizes size = x.size();
  size.erase(size.begin() + along);
  return mapped("select", x, size, without(x, along, true),
                [&](const at::Tensor& local, const Sizes&) { return local.select(along, index); });
}

std::vector<DTensor> unbind(const DTensor& x, std::int64_t dim) {
  const std::int64_t along = rules::dim_from_front("unbind", dim, x.dim());
  const DTensor full = unsharded(x, along);  // once, not for each part
  std::vector<DTensor> parts;
  for (std::int64_t i = 0; i < x.size(along); ++i) parts.push_back(select(full, along, i));
  return parts;
}

std::vector<DTensor> split(const DTensor& x, const Sizes& sizes, std::int64_t dim) {
  const std::int64_t along = rules::dim_from_front("split", dim, x.dim());
  std::int64_t end = 0;
  for (const std::int64_t size : sizes) {
    if (size < 0) fail(ErrorCode::invalid_argument, "split in {}: expected no negative size", shape_to_string(sizes));
    end += size;
  }
  if (end != x.size(along)) {
    fail(ErrorCode::invalid_argument, "split dimension {} of size {} in {}: expected sizes that add up to it", along,
         x.size(along), shape_to_string(sizes));
  }
  const DTensor full = unsharded(x, along);  // once, not for each part
  std::vector<DTensor> parts;
  std::int64_t begin = 0;
  for (const std::int64_t size : sizes) {
    parts.push_back(narrow(full, along, begin, size));
    begin += size;
  }
  return parts;
}

std::vector<DTensor> split(const DTensor& x, std::int64_t size, std::int64_t dim) {
  const std::int64_t length = x.size(rules::dim_from_front("split", dim, x.dim()));
  if (size < 1) fail(ErrorCode::invalid_argument, "split in parts of {}: expected at least 1", size);
  Sizes sizes(static_cast<std::size_t>(std::max<std::int64_t>((length + size - 1) / size, 1)), size);
  sizes.back() = length - size * static_cast<std::int64_t>(sizes.size() - 1);
  return split(x, sizes, dim);
}

std::vector<DTensor> chunk(const DTensor& x, std::int64_t chunks, std::int64_t dim) {
  const std::int64_t length = x.size(rules::dim_from_front("chunk", dim, x.dim()));
  if (chunks < 1) fail(ErrorCode::invalid_argument, "chunk in {}: expected at least 1 chunk", chunks);
  if (length == 0) return split(x, Sizes(static_cast<std::size_t>(chunks), 0), dim);
  return split(x, (length + chunks - 1) / chunks, dim);
}

namespace {

// Returns whether the index is a tensor that counts as a number.
bool is_number(const at::indexing::TensorIndex& i) {
  return i.is_tensor() && i.tensor().dim() == 0 &&
         at::isIntegralType(i.tensor().scalar_type(), /*includeBool=*/false) && !is_mask(i.tensor().scalar_type());
}

}  // namespace

DTensor index(const DTensor& x, const std::vector<at::indexing::TensorIndex>& indices) {
  const auto dims_of = [](const at::indexing::TensorIndex& i) -> std::int64_t {
    if (i.is_none() || i.is_ellipsis()) return 0;
    return i.is_tensor() && is_mask(i.tensor().scalar_type()) ? i.tensor().dim() : 1;
  };
  std::int64_t taken = 0;
  for (const at::indexing::TensorIndex& i : indices) taken += dims_of(i);
  if (taken > x.dim()) {
    fail(ErrorCode::invalid_argument, "index of {}: {} indices, expected at most {}", x.to_string(), taken, x.dim());
  }
  DTensor result = x;
  DTensorIndices tensors;
  std::int64_t dim = 0, indexed = 0;  // of `result`; those before `indexed` are in `tensors`
  for (const at::indexing::TensorIndex& i : indices) {
    if (i.is_none()) {
      result = unsqueeze(result, dim++);
    } else if (i.is_ellipsis()) {
      dim += x.dim() - taken;
    } else if (i.is_integer()) {
      result = select(result, dim, to_number(i.integer()));
    } else if (is_number(i)) {
      result = select(result, dim, i.tensor().item<std::int64_t>());
    } else if (i.is_slice()) {
      result =
          slice(result, dim, to_number(i.slice().start()), to_number(i.slice().stop()), to_number(i.slice().step()));
      ++dim;
    } else if (i.is_tensor()) {
      tensors.resize(tensors.size() + static_cast<std::size_t>(dim - indexed));
      tensors.emplace_back(DTensor::from_local(i.tensor(), x.device_mesh(), {}, {i.tensor().sizes().vec()}));
      dim += dims_of(i);
      indexed = dim;
    } else {
      fail(ErrorCode::unsupported, "index of {} by a bool: expected numbers, slices, None, Ellipsis and tensors",
           x.to_string());
    }
  }
  return tensors.empty() ? result : index(result, tensors);
}

}  // namespace tessera::dtensor

#include <algorithm>
#include <numeric>

#include "tensor/dtensor_ops/calls.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::dtensor {

namespace {

std::int64_t product(const Sizes& size) {
  return std::accumulate(size.begin(), size.end(), std::int64_t{1}, std::multiplies<>());
}

// Returns `size` with the length for its -1, if it has one.
Sizes inferred(const DTensor& x, Sizes size) {
  const auto refuse = [&](const char* expected) {
    fail(ErrorCode::invalid_argument, "view of size {} as {}: expected {}", shape_to_string(x.size()),
         shape_to_string(size), expected);
  };
  if (std::any_of(size.begin(), size.end(), [](std::int64_t n) { return n < -1; })) refuse("no size below -1");
  const auto unknown = std::find(size.begin(), size.end(), -1);
  if (unknown != size.end()) {
    if (std::find(unknown + 1, size.end(), -1) != size.end()) refuse("at most one -1");
    *unknown = 1;
    const std::int64_t others = product(size);
    *unknown = -1;
    if (others == 0 || x.numel() % others != 0) refuse("a size that the number of elements is divisible by");
    *unknown = x.numel() / others;
  }
  if (product(size) != x.numel()) refuse("as many elements");
  return size;
}

}  // namespace

DTensor view(const DTensor& x, Sizes size) {
  const Sizes to = inferred(x, std::move(size));
  return mapped("view", x, to, rules::view_map(x, to),
                [](const at::Tensor& local, const Sizes& local_size) { return local.reshape(local_size); });
}

DTensor reshape(const DTensor& x, Sizes size) { return view(x, std::move(size)); }

DTensor flatten(const DTensor& x, std::int64_t start_dim, std::int64_t end_dim) {
  if (x.dim() == 0) return view(x, {1});
  const std::int64_t first = rules::dim_from_front("flatten", start_dim, x.dim());
  const std::int64_t last = rules::dim_from_front("flatten", end_dim, x.dim());
  if (first > last) {
    fail(ErrorCode::invalid_argument, "flatten dimensions {} to {}: expected the first before the last", first, last);
  }
  Sizes size(x.size().begin(), x.size().begin() + first);
  size.push_back(product(Sizes(x.size().begin() + first, x.size().begin() + last + 1)));
  size.insert(size.end(), x.size().begin() + last + 1, x.size().end());
  return view(x, std::move(size));
}

DTensor permute(const DTensor& x, const Sizes& dims) {
  Sizes from;
  for (const std::int64_t dim : dims) from.push_back(rules::dim_from_front("permute", dim, x.dim()));
  if (rules::dims_from_front("permute", dims, x.dim()).size() != x.size().size()) {
    fail(ErrorCode::invalid_argument, "permute dimensions {} of a tensor of {}: expected each of them once",
         shape_to_string(dims), x.dim());
  }
  Sizes size;
  rules::DimMap map(from.size());
  for (std::size_t to = 0; to < from.size(); ++to) {
    const auto d = static_cast<std::size_t>(from[to]);
    size.push_back(x.size()[d]);
    map[d] = to;
  }
  return mapped("permute", x, size, map, [&](const at::Tensor& local, const Sizes&) { return local.permute(from); });
}

DTensor transpose(const DTensor& x, std::int64_t dim0, std::int64_t dim1) {
  const std::int64_t first = rules::dim_from_front("transpose", dim0, x.dim());
  const std::int64_t second = rules::dim_from_front("transpose", dim1, x.dim());
  Sizes size = x.size();
  rules::DimMap map = same_dims(x);
  std::swap(size[static_cast<std::size_t>(first)], size[static_cast<std::size_t>(second)]);
  std::swap(map[static_cast<std::size_t>(first)], map[static_cast<std::size_t>(second)]);
  return mapped("transpose", x, size, map,
                [&](const at::Tensor& local, const Sizes&) { return local.transpose(first, second); });
}

DTensor unsqueeze(const DTensor& x, std::int64_t dim) {
  const std::int64_t at = rules::dim_from_front("unsqueeze", dim, x.dim() + 1);
  Sizes size = x.size();
  size.insert(size.begin() + at, 1);
  rules::DimMap map = same_dims(x);
  for (std::size_t d = static_cast<std::size_t>(at); d < map.size(); ++d) map[d] = d + 1;
  return mapped("unsqueeze", x, size, map, [&](const at::Tensor& local, const Sizes&) { return local.unsqueeze(at); });
}

DTensor squeeze(const DTensor& x, std::int64_t dim) {
  const std::int64_t at = rules::dim_from_front("squeeze", dim, x.dim());
  if (x.size(at) != 1) return x;
  Sizes size = x.size();
  size.erase(size.begin() + at);
  rules::DimMap map = same_dims(x);
  for (std::size_t d = static_cast<std::size_t>(at); d < map.size(); ++d) map[d] = d - 1;
  map[static_cast<std::size_t>(at)] = std::nullopt;
  return mapped("squeeze", x, size, map, [&](const at::Tensor& local, const Sizes&) { return local.squeeze(at); });
}

DTensor expand(const DTensor& x, const Sizes& size) {
  const auto refuse = [&] {
    fail(ErrorCode::invalid_argument, "expand size {} to {}: expected to repeat only dimensions of size 1",
         shape_to_string(x.size()), shape_to_string(size));
  };
  if (size.size() < x.size().size()) refuse();
  const std::size_t before = size.size() - x.size().size();
  Sizes to = size;
  rules::DimMap map(x.size().size());
  for (std::size_t d = 0; d < to.size(); ++d) {
    if (d >= before && to[d] == -1) to[d] = x.size()[d - before];
    if (to[d] < 0) refuse();
    if (d < before) continue;
    if (to[d] == x.size()[d - before]) {
      map[d - before] = d;
    } else if (x.size()[d - before] != 1) {
      refuse();
    }
  }
  return mapped("expand", x, to, map,
                [](const at::Tensor& local, const Sizes& local_size) { return local.expand(local_size); });
}

}  // namespace tessera::dtensor

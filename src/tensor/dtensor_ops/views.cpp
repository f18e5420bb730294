#include <ATen/ops/as_strided.h>

#include <algorithm>
#include <numeric>

#include "tensor/dtensor_ops/calls.h"
#include "tensor/torch_errors.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::dtensor {

namespace {

// Returns `size` with the length for its -1, if it has one.
Sizes inferred(const DTensor& x, Sizes size) {
  const auto refuse_expecting = [&](const char* expected) {
    fail(ErrorCode::invalid_argument, "view of size {} as {}: expected {}", shape_to_string(x.size()),
         shape_to_string(size), expected);
  };
  if (std::any_of(size.begin(), size.end(), [](std::int64_t n) { return n < -1; }))
    refuse_expecting("no size below -1");
  const auto unknown = std::find(size.begin(), size.end(), -1);
  if (unknown != size.end()) {
    if (std::find(unknown + 1, size.end(), -1) != size.end()) refuse_expecting("at most one -1");
    *unknown = 1;
    const std::int64_t others = volume(size);
    *unknown = -1;
    if (others == 0 || x.numel() % others != 0) refuse_expecting("a size that the number of elements is divisible by");
    *unknown = x.numel() / others;
  }
  if (volume(size) != x.numel()) refuse_expecting("as many elements");
  return size;
}

}  // namespace

DTensor view(const DTensor& x, Sizes size) {
  const Sizes to = inferred(x, std::move(size));
  return call(
      "view", {&x, 1}, [&](Inputs inputs) { return rules::view(inputs[0], to); },
      [&](Inputs inputs) {
        const DeviceMesh& mesh = inputs[0].device_mesh();
        Placements placements;
        for (const std::optional<Placement>& placement : rules::view_placements(inputs[0], to)) {
          placements.push_back(placement.value_or(Placement::replicate()));
        }
        const MeshLayout layout(to, mesh.shape(), placements);
        return inputs[0].local_tensor().reshape(layout.local_shape(*mesh.coordinate()).sizes);
      });
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
  size.push_back(volume(Sizes(x.size().begin() + first, x.size().begin() + last + 1)));
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
  const Sizes first = rules::dims_from_front("transpose", {dim0}, x.dim());
  const Sizes second = rules::dims_from_front("transpose", {dim1}, x.dim());
  if (x.dim() == 0) return x;
  Sizes size = x.size();
  rules::DimMap map = same_dims(x);
  std::swap(size[static_cast<std::size_t>(first[0])], size[static_cast<std::size_t>(second[0])]);
  std::swap(map[static_cast<std::size_t>(first[0])], map[static_cast<std::size_t>(second[0])]);
  return mapped("transpose", x, size, map,
                [&](const at::Tensor& local, const Sizes&) { return local.transpose(dim0, dim1); });
}

DTensor t(const DTensor& x) {
  if (x.dim() > 2) {
    fail(ErrorCode::invalid_argument, "t of size {}: expected at most two dimensions", shape_to_string(x.size()));
  }
  return x.dim() < 2 ? x : transpose(x, 0, 1);
}

DTensor unsqueeze(const DTensor& x, std::int64_t dim) {
  const std::int64_t at = rules::dim_from_front("unsqueeze", dim, x.dim() + 1);
  Sizes size = x.size();
  size.insert(size.begin() + at, 1);
  rules::DimMap map = same_dims(x);
  for (std::size_t d = static_cast<std::size_t>(at); d < map.size(); ++d) map[d] = d + 1;
  return mapped("unsqueeze", x, size, map, [&](const at::Tensor& local, const Sizes&) { return local.unsqueeze(at); });
}

DTensor movedim(const DTensor& x, const Sizes& from, const Sizes& to) {
  if (from.size() != to.size() || from.empty()) {
    fail(ErrorCode::invalid_argument, "movedim from dimensions {} to {}: expected as many, at least one",
         shape_to_string(from), shape_to_string(to));
  }
  const Sizes sources = rules::dims_from_front("movedim", from, x.dim());  // throws if one is there twice
  static_cast<void>(rules::dims_from_front("movedim", to, x.dim()));
  Sizes order(x.size().size(), -1);
  for (std::size_t i = 0; i < from.size(); ++i) {
    order[static_cast<std::size_t>(rules::dim_from_front("movedim", to[i], x.dim()))] =
        rules::dim_from_front("movedim", from[i], x.dim());
  }
  std::int64_t next = 0;
  for (std::int64_t& dim : order) {
    if (dim != -1) continue;
    while (std::binary_search(sources.begin(), sources.end(), next)) ++next;
    dim = next++;
  }
  return permute(x, order);
}

namespace {

// What remains of x without those of `dims` that have size 1.
struct Squeezed {
  Sizes size;
  rules::DimMap map;

  Squeezed(const char* op, const DTensor& x, const Sizes& dims) : map(x.size().size()) {
    const Sizes from_front = dims.empty() ? Sizes() : rules::dims_from_front(op, dims, x.dim());
    for (std::size_t d = 0; d < map.size(); ++d) {
      const bool is_removed = x.size()[d] == 1 && std::count(from_front.begin(), from_front.end(), d) != 0;
      if (is_removed) continue;
      map[d] = size.size();
      size.push_back(x.size()[d]);
    }
  }
};

Sizes all_dims(const DTensor& x) {
  Sizes all(x.size().size());
  std::iota(all.begin(), all.end(), std::int64_t{0});
  return all;
}

}  // namespace

DTensor squeeze(const DTensor& x, const Sizes& dims) {
  const Squeezed to("squeeze", x, dims);
  if (to.size == x.size()) return x;
  return mapped("squeeze", x, to.size, to.map,
                [](const at::Tensor& local, const Sizes& local_size) { return local.reshape(local_size); });
}

DTensor squeeze(const DTensor& x, std::int64_t dim) { return squeeze(x, Sizes{dim}); }
DTensor squeeze(const DTensor& x) { return squeeze(x, all_dims(x)); }

DTensor squeeze_(const DTensor& x, const Sizes& dims) {
  const Squeezed to("squeeze_", x, dims);
  if (to.size == x.size()) return x;
  for (std::size_t d = to.map.size(); d-- > 0;) {
    if (to.map[d] || !is_sharded_along(x, static_cast<std::int64_t>(d))) continue;
    fail(ErrorCode::unsupported,
         "squeeze_ of dimension {} of {}, which is sharded, expected one that is not; redistribute it before", d,
         x.to_string());
  }
  const MeshLayout layout(to.size, x.device_mesh().shape(), rules::mapped(x.placements(), to.map));
  try {
    x.change_in_place(layout, [&](const at::Tensor& local) {
      for (std::size_t d = to.map.size(); d-- > 0;) {
        if (!to.map[d]) local.squeeze_(static_cast<std::int64_t>(d));
      }
    });
  } catch (...) {
    rethrow_as_error("squeeze_ of " + x.to_string());
  }
  return x;
}

DTensor squeeze_(const DTensor& x, std::int64_t dim) { return squeeze_(x, Sizes{dim}); }
DTensor squeeze_(const DTensor& x) { return squeeze_(x, all_dims(x)); }

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

DTensor broadcast_to(const DTensor& x, const Sizes& size) { return expand(x, size); }

DTensor repeat(const DTensor& x, const Sizes& times) {
  if (times.size() < x.size().size() || std::any_of(times.begin(), times.end(), [](std::int64_t n) { return n < 0; })) {
    fail(ErrorCode::invalid_argument, "repeat of size {} {} times: expected a number >= 0 for each dimension",
         shape_to_string(x.size()), shape_to_string(times));
  }
  const std::size_t before = times.size() - x.size().size();
  Sizes size = times;
  rules::DimMap map(x.size().size());
  for (std::size_t d = 0; d < map.size(); ++d) {
    size[before + d] *= x.size()[d];
    if (times[before + d] == 1) map[d] = before + d;
  }
  return mapped("repeat", x, size, map, [&](const at::Tensor& local, const Sizes&) { return local.repeat(times); });
}

DTensor tile(const DTensor& x, const Sizes& times) {
  Sizes all = times;
  if (all.size() < x.size().size()) all.insert(all.begin(), x.size().size() - all.size(), 1);
  return repeat(x, all);
}

DTensor unflatten(const DTensor& x, std::int64_t dim, const Sizes& sizes) {
  const std::int64_t at = rules::dim_from_front("unflatten", dim, x.dim());
  Sizes parts = sizes;
  const auto unknown = std::find(parts.begin(), parts.end(), -1);
  if (unknown != parts.end()) {
    *unknown = 1;
    const std::int64_t others = volume(parts);
    *unknown = others > 0 ? x.size(at) / others : 0;
  }
  if (volume(parts) != x.size(at)) {
    fail(ErrorCode::invalid_argument, "unflatten dimension {} of size {} as {}: expected sizes whose product it is", at,
         x.size(at), shape_to_string(sizes));
  }
  Sizes size = x.size();
  size.erase(size.begin() + at);
  size.insert(size.begin() + at, parts.begin(), parts.end());
  return view(x, std::move(size));
}

DTensor ravel(const DTensor& x) { return flatten(x); }

DTensor atleast_1d(const DTensor& x) { return x.dim() > 0 ? x : unsqueeze(x, 0); }
DTensor atleast_2d(const DTensor& x) { return x.dim() > 1 ? x : unsqueeze(atleast_1d(x), 0); }
DTensor atleast_3d(const DTensor& x) { return x.dim() > 2 ? x : unsqueeze(atleast_2d(x), -1); }

DTensor as_strided(const DTensor& x, const Sizes& size, const Sizes& strides,
                   std::optional<std::int64_t> storage_offset) {
  const std::int64_t offset = storage_offset.value_or(x.storage_offset());
  if (size == x.size() && strides == x.stride() && offset == x.storage_offset()) {
    return mapped("as_strided", x, size, same_dims(x), [](const at::Tensor& local, const Sizes&) { return local; });
  }
  if (!x.is_contiguous() || x.storage_offset() != 0) {
    fail(ErrorCode::unsupported,
         "as_strided of {} with strides {} and offset {}: expected a contiguous one without offset", x.to_string(),
         shape_to_string(x.stride()), x.storage_offset());
  }
  const rules::DimMap unsharded(x.size().size());
  return mapped("as_strided", x, size, unsharded, [&](const at::Tensor& local, const Sizes&) {
    return at::as_strided(local.contiguous(), size, strides, offset);
  });
}

DTensor contiguous(const DTensor& x) {
  return mapped("contiguous", x, x.size(), same_dims(x),
                [](const at::Tensor& local, const Sizes&) { return local.contiguous(); });
}

}  // namespace tessera::dtensor

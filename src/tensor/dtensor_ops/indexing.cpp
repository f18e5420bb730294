#include <ATen/ExpandUtils.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index.h>
#include <ATen/ops/index_put.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>

#include "tensor/dtensor/explicit_redistribution.h"
#include "tensor/dtensor_ops/calls.h"
#include "tensor/dtensor_rules/shared_dims.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::dtensor {

namespace {

// ATen's list of indices, whose type differs between versions.
template <typename List>
List list_taken_by(at::Tensor (*)(const at::Tensor&, const List&, const at::Tensor&, bool));
using IndexList = decltype(list_taken_by(&at::index_put));

constexpr std::size_t kNotIndexed = static_cast<std::size_t>(-1);

// Where the dimensions of x and those of its indices are in the result of `index`.
struct IndexedDims {
  std::vector<std::size_t> index_of;  // by dimension of x: the position among the tensors of indices, or kNotIndexed
  std::vector<Sizes> sizes;           // of the tensors of indices
  Sizes common;                       // to which they are broadcast
  std::size_t begin = 0;              // the dimension of the result where those of `common` begin
  // Whether `common` is known. Outside of the mesh, masks are not, and are taken to be true nowhere.
  bool is_known = true;

  // Returns the dimension of the result that dimension `d` of x is; nullopt if it is indexed.
  std::optional<std::size_t> kept(std::size_t d) const {
    if (index_of[d] != kNotIndexed) return std::nullopt;
    const auto before = static_cast<std::size_t>(
        std::count(index_of.begin(), index_of.begin() + static_cast<std::ptrdiff_t>(d), kNotIndexed));
    return before < begin ? before : before + common.size();
  }
  // Returns the dimension that is dimension `d` of `common` in a tensor of indices; nullopt if it is broadcast.
  std::optional<std::size_t> of_index(std::size_t i, std::size_t d) const {
    const std::size_t before = common.size() - sizes[i].size();
    if (d < before || sizes[i][d - before] != common[d]) return std::nullopt;
    return d - before;
  }
  // Returns the size of the result for an x of size `of_x` and indices that are broadcast to `of_indices`.
  Sizes result(at::IntArrayRef of_x, const Sizes& of_indices) const {
    Sizes size;
    for (std::size_t d = 0; d < index_of.size(); ++d) {
      if (index_of[d] == kNotIndexed) size.push_back(of_x[d]);
    }
    size.insert(size.begin() + static_cast<std::ptrdiff_t>(begin), of_indices.begin(), of_indices.end());
    return size;
  }
};

// Sets `common` to the size to which the tensors of indices are broadcast.
void broadcast_indices(const char* op, const DTensor& x, IndexedDims& dims) {
  for (const Sizes& size : dims.sizes) {
    std::optional<Sizes> both = rules::broadcast(dims.common, size);
    if (!both && !dims.is_known) {
      dims.common.assign(std::max(dims.common.size(), size.size()), 0);
      continue;
    }
    if (!both) {
      fail(ErrorCode::invalid_argument,
           "{} of {} by tensors of sizes {} and {}: expected sizes that broadcast to each other", op, x.to_string(),
           shape_to_string(dims.common), shape_to_string(size));
    }
    dims.common = *std::move(both);
  }
}

// `indices` are without masks; `is_known` as in the result.
IndexedDims indexed_dims(const char* op, const DTensor& x, const DTensorIndices& indices, bool is_known = true) {
  IndexedDims dims;
  dims.is_known = is_known;
  std::size_t first = kNotIndexed, last = 0;
  for (std::size_t d = 0; d < x.size().size(); ++d) {
    dims.index_of.push_back(kNotIndexed);
    if (d >= indices.size() || !indices[d]) continue;
    dims.index_of[d] = dims.sizes.size();
    dims.sizes.push_back(indices[d]->size());
    if (first == kNotIndexed) first = d;
    last = d;
  }
  broadcast_indices(op, x, dims);
  if (!dims.sizes.empty() && last - first + 1 == dims.sizes.size()) dims.begin = first;
  return dims;
}

// Returns a tensor of bool as indices of where it is true, one for each of its dimensions.
std::vector<DTensor> places_of(const DTensor& mask) {
  const DeviceMesh& mesh = mask.device_mesh();
  const at::Tensor full = redistributed_by_op(mask).local_tensor();
  const at::Tensor found = mesh.has_this_rank() ? full.nonzero() : at::zeros({0, mask.dim()}, at::kLong);
  std::vector<DTensor> places;
  for (const at::Tensor& column : found.unbind(1)) {
    places.push_back(DTensor::from_local(column.contiguous(), mesh, {}, {Sizes{found.size(0)}}));
  }
  return places;
}

// Returns one index or nullopt for each dimension of x, without tensors of bool.
DTensorIndices numbers_of(const char* op, const DTensor& x, const DTensorIndices& indices) {
  DTensorIndices numbers;
  for (const std::optional<DTensor>& index : indices) {
    const bool is_of_bool = index && is_mask(index->scalar_type());
    const std::size_t taken = is_of_bool ? index->size().size() : 1, begin = numbers.size();
    if (taken == 0) {
      fail(ErrorCode::invalid_argument, "{} of {} by a bool of no dimension: expected one dimension or more", op,
           x.to_string());
    }
    if (begin + taken > x.size().size()) {
      fail(ErrorCode::invalid_argument, "{} of {}: more dimensions are indexed than it has, expected at most {}", op,
           x.to_string(), x.dim());
    }
    if (!is_of_bool) {
      numbers.push_back(index);
      continue;
    }
    const auto from = x.size().begin() + static_cast<std::ptrdiff_t>(begin);
    if (!std::equal(index->size().begin(), index->size().end(), from)) {
      fail(ErrorCode::invalid_argument, "{} of {} by bools of size {}: expected the size of the dimensions from {} on",
           op, x.to_string(), shape_to_string(index->size()), begin);
    }
    for (DTensor& places : places_of(*index)) numbers.emplace_back(std::move(places));
  }
  numbers.resize(x.size().size());
  return numbers;
}

// Returns whether this rank knows how many places the indices have.
bool knows_places(const DTensor& x, const DTensorIndices& indices) {
  return x.device_mesh().has_this_rank() ||
         std::none_of(indices.begin(), indices.end(),
                      [](const std::optional<DTensor>& index) { return index && is_mask(index->scalar_type()); });
}

// Returns the inputs of a call: x, the tensors of indices, and `values` if there are any.
std::vector<DTensor> inputs_with(const DTensor& x, const DTensorIndices& indices, const DTensor* values) {
  std::vector<DTensor> inputs = {x};
  for (const std::optional<DTensor>& index : indices) {
    if (index) inputs.push_back(*index);
  }
  if (values != nullptr) inputs.push_back(*values);
  return inputs;
}

// The local places of indices: of those along a dimension that x is sharded along, which are on this rank.
struct LocalIndices {
  std::vector<std::optional<at::Tensor>> places;  // by dimension of x
  at::Tensor is_here;                             // undefined if all are
};

LocalIndices local_indices(const char* op, Inputs inputs, const IndexedDims& dims) {
  const DTensor& x = inputs[0];
  LocalIndices here;
  for (std::size_t d = 0; d < dims.index_of.size(); ++d) {
    here.places.emplace_back();
    if (dims.index_of[d] == kNotIndexed) continue;
    const at::Tensor& ids = inputs[1 + dims.index_of[d]].local_tensor();
    const auto dim = static_cast<std::int64_t>(d);
    if (!is_sharded_along(x, dim)) {
      here.places[d] = ids;
      continue;
    }
    LocalPlaces found = checked_places(op, x, dim, ids, -x.size(dim));
    here.places[d] = found.places;
    here.is_here = here.is_here.defined() ? here.is_here.logical_and(found.is_here) : found.is_here;
  }
  return here;
}

IndexList list_of(const std::vector<std::optional<at::Tensor>>& places) {
  IndexList list;
  for (const std::optional<at::Tensor>& place : places) {
    if (place) {
      list.push_back(*place);
    } else {
      list.push_back({});
    }
  }
  return list;
}

// Returns the elements that this rank has; zeros for others.
at::Tensor read_here(Inputs inputs, const IndexedDims& dims) {
  at::Tensor local = inputs[0].local_tensor();
  const LocalIndices here = local_indices("index", inputs, dims);
  if (!here.is_here.defined()) return at::index(local, list_of(here.places));
  for (std::size_t d = 0; d < here.places.size(); ++d) {
    const auto dim = static_cast<std::int64_t>(d);
    if (here.places[d] && local.size(dim) == 0) local = with_one_more(local, dim);  // a place to read
  }
  const at::Tensor read = at::index(local, list_of(here.places));
  const auto begin = read.sizes().begin() + static_cast<std::ptrdiff_t>(dims.begin);
  Sizes mask_size(begin, begin + static_cast<std::ptrdiff_t>(dims.common.size()));
  const at::Tensor is_here = here.is_here.expand(mask_size);
  mask_size.resize(read.sizes().size() - dims.begin, 1);
  return only_where(is_here.reshape(mask_size), read);
}

// Returns the dimensions that x and the result of `index` share.
std::vector<rules::SharedDim> kept_dims(Inputs inputs, const IndexedDims& dims) {
  std::vector<rules::SharedDim> kept;
  for (std::size_t d = 0; d < dims.index_of.size(); ++d) {
    if (!dims.kept(d)) continue;
    kept.push_back({*dims.kept(d), std::vector<std::optional<std::size_t>>(inputs.size())});
    kept.back().inputs[0] = d;
  }
  return kept;
}

OpRule rule_of_index(Inputs inputs, const IndexedDims& dims) {
  std::vector<rules::SharedDim> shared = kept_dims(inputs, dims);
  for (std::size_t d = 0; d < dims.common.size(); ++d) {
    rules::SharedDim dim{dims.begin + d, {std::nullopt}};
    for (std::size_t i = 0; i < dims.sizes.size(); ++i) dim.inputs.push_back(dims.of_index(i, d));
    if (dims.common[d] != 1) shared.push_back(std::move(dim));
  }
  const DTensor& x = inputs[0];
  const Sizes result = dims.result(x.size(), dims.common);
  OpRule rule = rules::shared(inputs, result, shared);
  rules::add_partials(rule, inputs, std::array<std::size_t, 1>{0}, rules::Partials::any);
  if (volume(result) > x.numel() || x.scalar_type() == at::kBool) return rule;
  for (const Placement& placement : x.placements()) {
    if (!placement.is_shard() || dims.kept(static_cast<std::size_t>(placement.dim()))) continue;
    rule.strategies.push_back({Placements(inputs.size()), Placement::partial()});
    rule.strategies.back().inputs[0] = placement;
  }
  return rule;
}

// Returns indices for dimension `dim` alone. `index` must have one dimension.
DTensorIndices along(const char* op, const DTensor& x, std::int64_t dim, const DTensor& index) {
  if (index.dim() != 1) {
    fail(ErrorCode::invalid_argument, "{} by indices of size {}: expected one dimension", op,
         shape_to_string(index.size()));
  }
  DTensorIndices indices(static_cast<std::size_t>(rules::dim_from_front(op, dim, x.dim())) + 1);
  indices.back() = index;
  return indices;
}

// Returns the numbers as a replicated tensor on the mesh of x.
DTensor replicated_on(const DTensor& x, const at::Tensor& numbers) {
  return DTensor::from_local(numbers, x.device_mesh(), {}, {numbers.sizes().vec()});
}

at::TensorOptions of_indices(const DTensor& x) { return at::TensorOptions(at::kLong).device(x.device()); }

// Returns the indices of the diagonal along two dimensions.
DTensorIndices of_diagonal(const char* op, const DTensor& x, std::int64_t offset, std::int64_t dim1,
                           std::int64_t dim2) {
  const std::int64_t rows = rules::dim_from_front(op, dim1, x.dim()),
                     columns = rules::dim_from_front(op, dim2, x.dim());
  if (rows == columns) {
    fail(ErrorCode::invalid_argument, "{} of {} along dimensions {} and {}: expected two dimensions", op, x.to_string(),
         dim1, dim2);
  }
  const std::int64_t row = std::max<std::int64_t>(-offset, 0), column = std::max<std::int64_t>(offset, 0);
  const std::int64_t count = std::max<std::int64_t>(std::min(x.size(rows) - row, x.size(columns) - column), 0);
  DTensorIndices indices(x.size().size());
  indices[static_cast<std::size_t>(rows)] = replicated_on(x, at::arange(count, of_indices(x)).add(row));
  indices[static_cast<std::size_t>(columns)] = replicated_on(x, at::arange(count, of_indices(x)).add(column));
  return indices;
}

}  // namespace

DTensor index(const DTensor& x, const DTensorIndices& indices) {
  const DTensorIndices numbers = numbers_of("index", x, indices);
  const IndexedDims dims = indexed_dims("index", x, numbers, knows_places(x, indices));
  if (dims.sizes.empty()) return x;
  return call(
      "index", inputs_with(x, numbers, nullptr), [&](Inputs inputs) { return rule_of_index(inputs, dims); },
      [&](Inputs inputs) { return read_here(inputs, dims); });
}

DTensor index_select(const DTensor& x, std::int64_t dim, const DTensor& index) {
  return dtensor::index(x, along("index_select", x, dim, index));
}

DTensor diagonal(const DTensor& x, std::int64_t offset, std::int64_t dim1, std::int64_t dim2) {
  const DTensorIndices places = of_diagonal("diagonal", x, offset, dim1, dim2);
  const auto begin = static_cast<std::int64_t>(indexed_dims("diagonal", x, places).begin);
  return movedim(index(x, places), {begin}, {-1});
}

// --- writing

namespace {

// Writes `values` to this rank's places.
at::Tensor write_here(const char* op, Inputs inputs, const IndexedDims& dims, bool accumulate, bool is_in_place) {
  const at::Tensor& local = inputs[0].local_tensor();
  at::Tensor values = inputs.back().local_tensor();
  LocalIndices here = local_indices(op, inputs, dims);
  if (here.is_here.defined()) {
    Sizes common = here.is_here.sizes().vec();
    for (const std::optional<at::Tensor>& place : here.places) {
      if (place) common = at::infer_size(common, place->sizes());
    }
    const at::Tensor chosen = here.is_here.expand(common).reshape({-1}).nonzero().squeeze(1);
    for (std::optional<at::Tensor>& place : here.places) {
      if (place) place = place->expand(common).reshape({-1}).index_select(0, chosen);
    }
    values = values.expand(dims.result(local.sizes(), common));
    values = values.reshape(dims.result(local.sizes(), {volume(common)}));
    values = values.index_select(static_cast<std::int64_t>(dims.begin), chosen);
  }
  const IndexList list = list_of(here.places);
  if (!is_in_place) return at::index_put(local, list, values, accumulate);
  at::Tensor written = local;
  return at::index_put_(written, list, values, accumulate);
}

OpRule rule_of_index_put(const char* op, Inputs inputs, const IndexedDims& dims, bool accumulate) {
  const DTensor &x = inputs[0], &values = inputs.back();
  const std::size_t last = inputs.size() - 1;
  const Sizes result = dims.result(x.size(), dims.common);
  const std::size_t before = result.size() - std::min(result.size(), values.size().size());
  // Returns the dimension of `values` that is dimension `d` of the result of `index`; nullopt if it is broadcast.
  const auto of_values = [&](std::size_t d) {
    return d < before || values.size()[d - before] != result[d] ? std::nullopt : std::optional(d - before);
  };
  bool fits = values.size().size() <= result.size();
  for (std::size_t d = before; fits && d < result.size(); ++d) fits = of_values(d) || values.size()[d - before] == 1;
  if (!fits && dims.is_known) {
    fail(ErrorCode::invalid_argument, "{} of values of size {} to {}: expected a size that broadcasts to {}", op,
         shape_to_string(values.size()), x.to_string(), shape_to_string(result));
  }
  std::vector<rules::SharedDim> shared = kept_dims(inputs, dims);
  for (rules::SharedDim& dim : shared) {
    dim.inputs[last] = of_values(dim.output);
    dim.output = *dim.inputs[0];
  }
  for (std::size_t d = 0; d < dims.index_of.size(); ++d) {
    if (dims.kept(d)) continue;
    shared.push_back({d, std::vector<std::optional<std::size_t>>(inputs.size())});
    shared.back().inputs[0] = d;
  }
  OpRule rule = rules::shared(inputs, x.size(), shared);
  rules::add_partials(rule, inputs, std::array<std::size_t, 2>{0, last},
                      accumulate ? rules::Partials::linear : rules::Partials::any);
  if (!accumulate || x.scalar_type() == at::kBool) return rule;
  // Each rank adds the values of its indices.
  const auto shard = [](std::optional<std::size_t> dim) {
    return dim ? Placement::shard(static_cast<std::int64_t>(*dim)) : Placement::replicate();
  };
  for (std::size_t d = 0; d < dims.common.size(); ++d) {
    if (dims.common[d] == 1) continue;
    OpStrategy strategy{{Placement::partial()}, Placement::partial()};
    for (std::size_t i = 0; i < dims.sizes.size(); ++i) strategy.inputs.push_back(shard(dims.of_index(i, d)));
    strategy.inputs.push_back(shard(of_values(dims.begin + d)));
    rule.strategies.push_back(std::move(strategy));
  }
  return rule;
}

enum class Where : std::uint8_t { elsewhere, in_place };

DTensor put(const char* op, const DTensor& x, const DTensorIndices& indices, const DTensor& values, bool accumulate,
            Where where) {
  const DTensorIndices numbers = numbers_of(op, x, indices);
  const IndexedDims dims = indexed_dims(op, x, numbers, knows_places(x, indices));
  if (dims.sizes.empty()) {
    fail(ErrorCode::invalid_argument, "{} of {}: no dimension is indexed, expected at least one", op, x.to_string());
  }
  const bool is_in_place = where == Where::in_place;
  const auto rule = [&](Inputs inputs) { return rule_of_index_put(op, inputs, dims, accumulate); };
  const auto compute = [&](Inputs inputs) { return write_here(op, inputs, dims, accumulate, is_in_place); };
  const std::vector<DTensor> inputs = inputs_with(x, numbers, &values);
  return is_in_place ? call_in_place(op, inputs, rule, compute) : call(op, inputs, rule, compute);
}

// For a `source` of the size of the elements that are written.
DTensor put_source(const char* op, const DTensor& x, const DTensorIndices& indices, const DTensor& source,
                   bool accumulate = false, Where where = Where::elsewhere) {
  const IndexedDims dims = indexed_dims(op, x, indices);
  const Sizes expected = dims.result(x.size(), dims.common);
  if (source.size() != expected) {
    fail(ErrorCode::invalid_argument, "{} of a source of size {} to {}: expected size {}", op,
         shape_to_string(source.size()), x.to_string(), shape_to_string(expected));
  }
  return put(op, x, indices, source, accumulate, where);
}

DTensor scaled(const DTensor& x, const at::Scalar& alpha) { return alpha.equal(1) ? x : mul(x, alpha); }

DTensor number(const DTensor& x, const at::Scalar& value) {
  return replicated_on(x, at::full({}, value, at::TensorOptions(x.scalar_type()).device(x.device())));
}

}  // namespace

DTensor index_put(const DTensor& x, const DTensorIndices& indices, const DTensor& values, bool accumulate) {
  return put("index_put", x, indices, values, accumulate, Where::elsewhere);
}
DTensor index_put_(const DTensor& x, const DTensorIndices& indices, const DTensor& values, bool accumulate) {
  return put("index_put_", x, indices, values, accumulate, Where::in_place);
}

DTensor index_add(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source,
                  const at::Scalar& alpha) {
  return put_source("index_add", x, along("index_add", x, dim, index), scaled(source, alpha), true);
}
DTensor index_add_(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source,
                   const at::Scalar& alpha) {
  return put_source("index_add_", x, along("index_add_", x, dim, index), scaled(source, alpha), true, Where::in_place);
}

DTensor index_copy(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source) {
  return put_source("index_copy", x, along("index_copy", x, dim, index), source);
}
DTensor index_copy_(const DTensor& x, std::int64_t dim, const DTensor& index, const DTensor& source) {
  return put_source("index_copy_", x, along("index_copy_", x, dim, index), source, false, Where::in_place);
}

DTensor index_fill(const DTensor& x, std::int64_t dim, const DTensor& index, const at::Scalar& value) {
  return put("index_fill", x, along("index_fill", x, dim, index), number(x, value), false, Where::elsewhere);
}
DTensor index_fill_(const DTensor& x, std::int64_t dim, const DTensor& index, const at::Scalar& value) {
  return put("index_fill_", x, along("index_fill_", x, dim, index), number(x, value), false, Where::in_place);
}

DTensor select_scatter(const DTensor& x, const DTensor& source, std::int64_t dim, std::int64_t index) {
  const std::int64_t along = rules::dim_from_front("select_scatter", dim, x.dim()), length = x.size(along);
  if (index < -length || index >= length) {
    fail(ErrorCode::invalid_argument, "select_scatter to index {} of dimension {} of size {}: expected {} to {}", index,
         along, length, -length, length - 1);
  }
  DTensorIndices indices(static_cast<std::size_t>(along) + 1);
  indices.back() = replicated_on(x, at::full({}, index, of_indices(x)));
  return put_source("select_scatter", x, indices, source);
}

DTensor slice_scatter(const DTensor& x, const DTensor& source, std::int64_t dim, std::int64_t begin, std::int64_t end,
                      std::int64_t step) {
  const SliceBounds bounds = slice_bounds("slice_scatter", x, dim, begin, end, step);
  DTensorIndices indices(static_cast<std::size_t>(bounds.dim) + 1);
  indices.back() = replicated_on(x, at::arange(bounds.begin, bounds.end, step, of_indices(x)));
  return put_source("slice_scatter", x, indices, source);
}

DTensor diagonal_scatter(const DTensor& x, const DTensor& source, std::int64_t offset, std::int64_t dim1,
                         std::int64_t dim2) {
  const DTensorIndices places = of_diagonal("diagonal_scatter", x, offset, dim1, dim2);
  if (source.dim() != x.dim() - 1) return put_source("diagonal_scatter", x, places, source);
  const auto begin = static_cast<std::int64_t>(indexed_dims("diagonal_scatter", x, places).begin);
  return put_source("diagonal_scatter", x, places, movedim(source, {-1}, {begin}));
}

}  // namespace tessera::dtensor

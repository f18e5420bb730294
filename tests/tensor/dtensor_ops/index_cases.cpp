// Ops on DTensors that take indices, beside those of ATen.

#include <ATen/ATen.h>

#include "tensor/dtensor_ops/op_cases.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::testing {

namespace {

using Values = const std::vector<DTensor>&;
using Tensors = const std::vector<at::Tensor>&;
using at::indexing::TensorIndex;
using dtensor::DTensorIndices;

// Returns a DTensor of indices on the mesh of `on`, sharded along its first dimension on the mesh's last.
DTensor numbers(const DTensor& on, const at::Tensor& full) {
  const DeviceMesh& mesh = on.device_mesh();
  Placements placements(static_cast<std::size_t>(mesh.ndim()));
  if (full.dim() > 0) placements.back() = Placement::shard(0);
  return DTensor::from_local(full, mesh, {}, {full.sizes().vec()}).redistribute(placements);
}
DTensor same(const DTensor& on, const at::Tensor& full) {
  return DTensor::from_local(full, on.device_mesh(), {}, {full.sizes().vec()});
}

// ATen's list of indices, whose type differs between versions. An undefined tensor takes all of a dimension.
template <typename List>
List list_taken_by(at::Tensor (*)(const at::Tensor&, const List&, const at::Tensor&, bool));
auto aten_indices(const std::vector<at::Tensor>& indices) {
  decltype(list_taken_by(&at::index_put)) list;
  for (const at::Tensor& index : indices) {
    if (index.defined()) {
      list.push_back(index);
    } else {
      list.push_back({});
    }
  }
  return list;
}

const at::Tensor kSomeRows = at::tensor({4, 0, -5, 3, 1, -1}, at::kLong),
                 kSomeColumns = at::tensor({0, 3, 1}, at::kLong);

std::vector<OpCase> reading_cases() {
  const at::Tensor table = kSomeRows.view({2, 3}), mask = at::tensor({1, 0, 1, 1, 0}, at::kLong).to(at::kBool),
                   cells = at::arange(20).view({5, 4}).remainder(3).eq(0), some = at::tensor({3, 1}, at::kLong),
                   one = at::full({}, 1, at::kLong), two = at::tensor({0, 2}, at::kLong);
  return {
      {"index_rows",
       {{5, 4}},
       [=](Values v) { return dtensor::index(v[0], {numbers(v[0], table)}); },
       [=](Tensors a) { return a[0].index({table}); }},
      {"index_number_as_tensor",
       {{4, 2, 3}},
       [=](Values v) {
         return dtensor::index(v[0], std::vector<TensorIndex>{one, at::indexing::Slice(), two});
       },
       [=](Tensors a) {
         return a[0][1].index({at::indexing::Slice(), two});
       }},
      {"index_few_rows",
       {{5, 4}},
       [=](Values v) { return dtensor::index(v[0], {same(v[0], some)}); },
       [=](Tensors a) { return a[0].index({some}); }},
      {"index_columns",
       {{5, 4}},
       [=](Values v) {
         return dtensor::index(v[0], {std::nullopt, same(v[0], kSomeColumns)});
       },
       [=](Tensors a) {
         return a[0].index({TensorIndex(at::indexing::Slice()), kSomeColumns});
       }},
      {"index_both",
       {{5, 4}},
       [=](Values v) {
         return dtensor::index(v[0], {numbers(v[0], table), same(v[0], kSomeColumns)});
       },
       [=](Tensors a) {
         return a[0].index({table, kSomeColumns});
       }},
      {"index_around_a_dimension",
       {{5, 3, 4}},
       [=](Values v) {
         return dtensor::index(v[0], {numbers(v[0], table), std::nullopt, same(v[0], kSomeColumns)});
       },
       [=](Tensors a) {
         return a[0].index({table, TensorIndex(at::indexing::Slice()), kSomeColumns});
       }},
      {"index_by_bools",
       {{5, 4}},
       [=](Values v) { return dtensor::index(v[0], {numbers(v[0], mask)}); },
       [=](Tensors a) { return a[0].index({mask}); }},
      {"index_cells",
       {{5, 4, 2}},
       [=](Values v) { return dtensor::index(v[0], DTensorIndices{numbers(v[0], cells)}); },
       [=](Tensors a) { return a[0].index({cells}); }},
      {"index_mixed",
       {{5, 4, 3}},
       [=](Values v) {
         return dtensor::index(v[0], {at::indexing::None, mask, at::indexing::Slice(1), 2});
       },
       [=](Tensors a) {
         return a[0].index({at::indexing::None, mask, at::indexing::Slice(1), 2});
       }},
      {"index_mixed_tensors",
       {{5, 4, 3}},
       [=](Values v) {
         return dtensor::index(v[0], {some, at::indexing::Ellipsis, at::tensor({2, 0}, at::kLong)});
       },
       [=](Tensors a) {
         return a[0].index({some, at::indexing::Ellipsis, at::tensor({2, 0}, at::kLong)});
       }},
      {"index_by_nothing",
       {{5, 4}},
       [=](Values v) { return dtensor::index(v[0], {same(v[0], at::zeros({0}, at::kLong))}); },
       [=](Tensors a) { return a[0].index({at::zeros({0}, at::kLong)}); }},
      {"index_select_few",
       {{5, 4}},
       [=](Values v) { return dtensor::index_select(v[0], -2, numbers(v[0], some)); },
       [=](Tensors a) { return a[0].index_select(0, some); }},
      {"gather_few",
       {{5, 4}},
       [=](Values v) {
         return dtensor::gather(v[0], 0, numbers(v[0], some.view({2, 1})));
       },
       [=](Tensors a) {
         return a[0].gather(0, some.view({2, 1}));
       }},
      {"diagonals",
       {{5, 4, 3}},
       [](Values v) { return dtensor::diagonal(v[0], -2) * dtensor::sum(dtensor::diagonal(v[0], 1, -1, 0)); },
       [](Tensors a) { return a[0].diagonal(-2) * a[0].diagonal(1, -1, 0).sum(); }},
  };
}

std::vector<OpCase> writing_cases() {
  const at::Tensor ids = at::tensor({4, 0, 2}, at::kLong), twice = at::tensor({1, 1, -3}, at::kLong),
                   table = at::tensor({4, 0, 2, 1}, at::kLong).view({2, 2}), columns = at::tensor({3, 1}, at::kLong),
                   one = at::full({}, 3, at::kLong), cells = at::arange(20).view({5, 4}).remainder(3).eq(0);
  const auto put = [](Tensors a, const std::vector<at::Tensor>& indices, bool accumulate) {
    return at::index_put(a[0], aten_indices(indices), a[1], accumulate);
  };
  return {
      {"index_put_rows",
       {{5, 4}, {3, 4}},
       [=](Values v) { return dtensor::index_put(v[0], {numbers(v[0], ids)}, v[1]); },
       [=](Tensors a) { return put(a, {ids}, false); }},
      {"index_put_twice",
       {{5, 4}, {3, 4}},
       [=](Values v) { return dtensor::index_put(v[0], {numbers(v[0], twice)}, v[1], true); },
       [=](Tensors a) { return put(a, {twice}, true); }},
      {"index_put_number",
       {{5, 4}, {}},
       [=](Values v) {
         return dtensor::index_put(v[0], {same(v[0], one), same(v[0], one.sub(1))}, v[1]);
       },
       [=](Tensors a) {
         return put(a, {one, one.sub(1)}, false);
       }},
      {"index_put_row_to_several",
       {{5, 4}, {4}},
       [=](Values v) {
         return dtensor::index_put(v[0], {numbers(v[0], ids)}, v[1]) +
                dtensor::index_put(v[0], {numbers(v[0], twice)}, v[1], true);
       },
       [=](Tensors a) { return put(a, {ids}, false) + put(a, {twice}, true); }},
      {"index_put_of_a_middle_dimension",
       {{3, 5, 4}, {2, 2, 4}},
       [=](Values v) {
         return dtensor::index_put(v[0], {std::nullopt, numbers(v[0], table)}, v[1], true);
       },
       [=](Tensors a) {
         return put(a, {at::Tensor(), table}, true);
       }},
      {"index_put_around_a_dimension",
       {{5, 3, 4}, {2, 2, 3}},
       [=](Values v) {
         return dtensor::index_put(v[0], {numbers(v[0], table), std::nullopt, same(v[0], columns)}, v[1]);
       },
       [=](Tensors a) {
         return put(a, {table, at::Tensor(), columns}, false);
       }},
      {"index_put_by_bools",
       {{5, 4, 2}, {7, 2}},
       [=](Values v) { return dtensor::index_put(v[0], {numbers(v[0], cells)}, v[1]); },
       [=](Tensors a) { return put(a, {cells}, false); }},
      {"index_add",
       {{5, 4}, {3, 4}},
       [=](Values v) { return dtensor::index_add(v[0], 0, numbers(v[0], twice.abs()), v[1], 2.5); },
       [=](Tensors a) { return a[0].index_add(0, twice.abs(), a[1], 2.5); }},
      {"index_add_columns",
       {{5, 4}, {5, 2}},
       [=](Values v) { return dtensor::index_add(v[0], -1, same(v[0], columns), v[1]); },
       [=](Tensors a) { return a[0].index_add(-1, columns, a[1]); }},
      {"index_copy",
       {{5, 4}, {3, 4}},
       [=](Values v) { return dtensor::index_copy(v[0], 0, numbers(v[0], ids), v[1]); },
       [=](Tensors a) { return a[0].index_copy(0, ids, a[1]); }},
      {"index_fill",
       {{5, 4}},
       [=](Values v) { return dtensor::index_fill(v[0], 1, numbers(v[0], columns), 7); },
       [=](Tensors a) { return a[0].index_fill(1, columns, 7); }},
      {"index_reduce",
       {{5, 4}, {3, 4}},
       [=](Values v) {
         return dtensor::index_reduce(v[0], 0, numbers(v[0], twice.abs()), v[1], ReduceOp::max) +
                dtensor::index_reduce(v[0], 0, numbers(v[0], twice.abs()), v[1], ReduceOp::average, false);
       },
       [=](Tensors a) {
         return a[0].index_reduce(0, twice.abs(), a[1], "amax") +
                a[0].index_reduce(0, twice.abs(), a[1], "mean", false);
       }},
      {"select_scatter",
       {{5, 4}, {4}},
       [](Values v) { return dtensor::select_scatter(v[0], v[1], 0, -2); },
       [](Tensors a) { return at::select_scatter(a[0], a[1], 0, -2); }},
      {"slice_scatter",
       {{5, 4}, {2, 4}},
       [](Values v) { return dtensor::slice_scatter(v[0], v[1], 0, 1, -1, 2); },
       [](Tensors a) { return at::slice_scatter(a[0], a[1], 0, 1, 4, 2); }},
      {"diagonal_scatter",
       {{5, 4}, {3}},
       [](Values v) { return dtensor::diagonal_scatter(v[0], v[1], -2); },
       [](Tensors a) { return at::diagonal_scatter(a[0], a[1], -2); }},
      {"diagonal_scatter_around_a_dimension",
       {{5, 3, 4}, {3, 3}},
       [](Values v) { return dtensor::diagonal_scatter(v[0], v[1], 1, 0, 2); },
       [](Tensors a) { return at::diagonal_scatter(a[0], a[1], 1, 0, 2); }},
  };
}

std::vector<OpCase> scatter_cases() {
  const at::Tensor rows = at::tensor({4, 0, 0, 3, 1, 2, 2, 2}, at::kLong).view({2, 4}), few = rows.narrow(1, 0, 3),
                   unique = at::tensor({4, 0, 2, 3, 1, 2, 0, 1}, at::kLong).view({2, 4}),
                   columns = at::tensor({3, 1, 0, 0, 1, 3, 2, 1, 1, 3}, at::kLong).view({5, 2});
  return {
      {"scatter",
       {{5, 4}, {2, 4}},
       [=](Values v) { return dtensor::scatter(v[0], 0, numbers(v[0], unique), v[1]); },
       [=](Tensors a) { return a[0].scatter(0, unique, a[1]); }},
      {"scatter_number",
       {{5, 4}},
       [=](Values v) { return dtensor::scatter(v[0], -1, numbers(v[0], columns), 7); },
       [=](Tensors a) { return a[0].scatter(-1, columns, 7); }},
      {"scatter_add",
       {{5, 4}, {2, 4}},
       [=](Values v) { return dtensor::scatter_add(v[0], 0, numbers(v[0], rows), v[1]); },
       [=](Tensors a) { return a[0].scatter_add(0, rows, a[1]); }},
      {"scatter_add_few",
       {{5, 4}, {3, 4}},
       [=](Values v) { return dtensor::scatter_add(v[0], 0, numbers(v[0], few), v[1]); },
       [=](Tensors a) { return a[0].scatter_add(0, few, a[1]); },
       false},  // ATen has no gradient for an index that is smaller than the source
      {"scatter_add_columns",
       {{5, 4}, {5, 2}},
       [=](Values v) { return dtensor::scatter_add(v[0], 1, numbers(v[0], columns), v[1]); },
       [=](Tensors a) { return a[0].scatter_add(1, columns, a[1]); }},
      {"scatter_reduce",
       {{5, 4}, {2, 4}},
       [=](Values v) {
         const DTensor index = numbers(v[0], rows);
         return dtensor::scatter_reduce(v[0], 0, index, v[1], ReduceOp::min) +
                dtensor::scatter_reduce(v[0], 0, index, v[1], ReduceOp::product) +
                dtensor::scatter_reduce(v[0], 0, index, v[1], ReduceOp::sum, false) +
                dtensor::scatter_reduce(v[0], 0, index, v[1], ReduceOp::sum);
       },
       [=](Tensors a) {
         return a[0].scatter_reduce(0, rows, a[1], "amin") + a[0].scatter_reduce(0, rows, a[1], "prod") +
                a[0].scatter_reduce(0, rows, a[1], "sum", false) + a[0].scatter_reduce(0, rows, a[1], "sum");
       }},
  };
}

}  // namespace

std::vector<OpCase> index_cases() {
  std::vector<OpCase> all;
  for (const auto& more : {reading_cases(), writing_cases(), scatter_cases()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

}  // namespace tessera::testing

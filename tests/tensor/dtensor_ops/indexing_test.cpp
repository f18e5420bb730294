#include "tessera/tensor/dtensor_ops/indexing.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/dtensor_ops/op_cases.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera {
namespace {

using testing::cross;
using testing::indexed;
using testing::on_mesh;
using testing::P;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

class DTensorIndexingTest : public ::testing::TestWithParam<Sizes> {};

TEST_P(DTensorIndexingTest, GivesWhatItGivesOnTheFullTensors) {
  testing::expect_as_on_full_tensors(testing::index_cases(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Meshes, DTensorIndexingTest, ::testing::Values(Sizes{1}, Sizes{4}, Sizes{2, 2}),
                         [](const ::testing::TestParamInfo<Sizes>& test) { return testing::mesh_name(test.param); });

TEST(DTensorIndexTest, StridedShardsAndAveragesGiveTheSame) {
  testing::expect_as_on_full_tensors_if_strided(testing::index_cases());
}

TEST(DTensorIndexTest, WritesInPlaceWhereTheTensorIs) {
  const at::Tensor full = indexed({5, 4}), ids = at::tensor({4, 0, 2}, at::kLong), source = indexed({3, 4}) * 10;
  run_local(4, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2});
    const at::Tensor columns = at::tensor({3, 1}, at::kLong);
    const DTensor index = distribute_tensor(ids, mesh, {R, R}), of_columns = distribute_tensor(columns, mesh, {R, R});
    for (const Placements& placements : cross({R, S0, S1, P, Placement::partial(ReduceOp::max)}, 2)) {
      for (const Placements& of_source : {Placements{R, R}, Placements{S0, P}}) {
        const auto expect = [&](const char* op, const at::Tensor& expected, const auto& write) {
          const DTensor x = on_mesh(full, mesh, placements), alias = x;
          const bool adds = std::string(op) == "add";
          const bool is_max = placements[0].is_partial() && placements[0] != P;
          const bool is_also_max = placements[1].is_partial() && placements[1] != P;
          const at::Tensor local = x.local_tensor();
          if (adds && (is_max || is_also_max)) {
            EXPECT_ERROR(write(x), ErrorCode::unsupported, "in place, this would change the placements");
            return;
          }
          EXPECT_TRUE(write(x).local_tensor().is_same(local)) << op;
          EXPECT_EQ(alias.placements(), placements);
          EXPECT_TRUE(at::allclose(alias.full_tensor(), expected))
              << op << to_string(placements) << to_string(of_source);
        };
        const DTensor from = on_mesh(source, mesh, of_source);
        expect("add", full.index_add(0, ids, source, 2),
               [&](const DTensor& x) { return dtensor::index_add_(x, 0, index, from, 2); });
        expect("copy", full.index_copy(0, ids, source),
               [&](const DTensor& x) { return dtensor::index_copy_(x, 0, index, from); });
        expect("fill", full.index_fill(0, ids, -1),
               [&](const DTensor& x) { return dtensor::index_fill_(x, 0, index, -1); });
        expect("put columns", full.index_copy(1, columns, source.view({6, 2}).narrow(0, 0, 5)), [&](const DTensor& x) {
          return dtensor::index_put_(x, {std::nullopt, of_columns},
                                     dtensor::slice(dtensor::view(from, {6, 2}), 0, 0, 5));
        });
        expect("put", full.index_copy(0, ids, source),
               [&](const DTensor& x) { return dtensor::index_put_(x, {index}, from); });
      }
    }
  });
}

// PyTorch unshards a dimension that is indexed.
TEST(DTensorIndexTest, ShardsStayWhereTheyAre) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const auto on = [&](const Sizes& size, const Placement& placement) {
      return distribute_tensor(indexed(size), mesh, {placement});
    };
    const auto ids = [&](std::vector<std::int64_t> numbers, const Placement& placement) {
      return distribute_tensor(at::tensor(numbers), mesh, {placement});
    };
    const DTensor two = ids({3, 1}, R), two_sharded = ids({3, 1}, S0), rows = on({2, 4}, R);
    using Indices = dtensor::DTensorIndices;
    EXPECT_EQ(dtensor::index(on({6, 4}, S1), Indices{two}).placements(), Placements{S1});
    EXPECT_EQ(dtensor::index(on({6, 4}, S1), {std::nullopt, two}).placements(), Placements{P});
    EXPECT_EQ(dtensor::index(on({6, 4}, R), Indices{two_sharded}).placements(), Placements{S0});
    EXPECT_EQ(dtensor::index(on({6, 4}, R), {std::nullopt, two_sharded}).placements(), Placements{S1});
    EXPECT_EQ(dtensor::index(on({6, 4, 4}, S1), {two, std::nullopt, two}).placements(), Placements{S1});
    EXPECT_EQ(dtensor::index_put(on({6, 4}, S0), {two}, rows).placements(), Placements{S0});
    EXPECT_EQ(dtensor::index_put(on({6, 4}, S1), {two}, on({2, 4}, S1)).placements(), Placements{S1});
    EXPECT_EQ(dtensor::index_put(on({6, 4}, R), {two_sharded}, on({2, 4}, S0), true).placements(), Placements{P});
    const DTensor sum = dtensor::sum(on({2, 6, 4}, S0), {0}), sum_of_rows = dtensor::sum(on({2, 2, 4}, S0), {0});
    EXPECT_EQ(dtensor::index_put(sum, {two}, sum_of_rows).placements(), Placements{P});
    EXPECT_EQ(dtensor::index_add(sum, 0, two, sum_of_rows).placements(), Placements{P});
    EXPECT_EQ(dtensor::index_copy(sum, 0, two, sum_of_rows).placements(), Placements{P});
    EXPECT_EQ(dtensor::index_fill(sum, 0, two, 3).placements(), Placements{P});
    EXPECT_EQ(dtensor::index_fill(on({6, 4}, S0), 0, two, 3).placements(), Placements{S0});
    EXPECT_EQ(dtensor::scatter(on({6, 4}, S0), 0, dtensor::unsqueeze(two, 0), on({1, 2}, R)).placements(),
              Placements{S0});
    EXPECT_EQ(dtensor::index_reduce(on({6, 4}, S0), 0, two, rows, ReduceOp::max).placements(), Placements{S0});
    EXPECT_EQ(dtensor::slice_scatter(on({6, 4}, S0), rows, 0, 1, 3).placements(), Placements{S0});
    EXPECT_EQ(dtensor::diagonal_scatter(on({6, 4}, S0), on({4}, R)).placements(), Placements{S0});
  });
}

TEST(DTensorIndexTest, AnElementThatIsNotReadMayBeInfinite) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor full = indexed({4, 2});
    full[0].fill_(INFINITY);
    const DTensor x = distribute_tensor(full, mesh, {S0}), ids = distribute_tensor(at::tensor({2, 3}, at::kLong), mesh);
    EXPECT_TRUE(at::equal(dtensor::index_select(x, 0, ids).full_tensor(), full.narrow(0, 2, 2)));
    EXPECT_TRUE(at::equal(dtensor::embedding(x, ids).full_tensor(), full.narrow(0, 2, 2)));
    const DTensor places = dtensor::view(ids, {2, 1});
    EXPECT_TRUE(at::equal(dtensor::gather(x, 0, places).full_tensor(), full.gather(0, places.local_tensor())));
  });
}

TEST(DTensorIndexTest, WhatDoesNotFitIsRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor x = distribute_tensor(indexed({4, 6}), mesh, {S0});
    const auto ids = [&](const std::vector<std::int64_t>& numbers) {
      return distribute_tensor(at::tensor(numbers), mesh);
    };
    const DTensor rows = distribute_tensor(indexed({2, 6}), mesh), two = ids({3, 1});
    EXPECT_ERROR(dtensor::index(x, {two, two, two}), ErrorCode::invalid_argument,
                 "index of DTensor of size [4, 6] as [S(0)] on DeviceMesh(2): more dimensions are indexed than it has, "
                 "expected at most 2");
    EXPECT_ERROR(dtensor::index(x, {dtensor::gt(distribute_tensor(indexed({}), mesh), 1)}), ErrorCode::invalid_argument,
                 "by a bool of no dimension: expected one dimension or more");
    EXPECT_ERROR(dtensor::index(x, {two, ids({0, 1, 2})}), ErrorCode::invalid_argument,
                 "by tensors of sizes [2] and [3]: expected sizes that broadcast to each other");
    EXPECT_ERROR(dtensor::index(x, {dtensor::gt(distribute_tensor(indexed({3}), mesh), 1)}),
                 ErrorCode::invalid_argument, "by bools of size [3]: expected the size of the dimensions from 0 on");
    EXPECT_ERROR(dtensor::index_put(x, {}, rows), ErrorCode::invalid_argument, "index_put of DTensor of size [4, 6]");
    EXPECT_ERROR(dtensor::index_put(x, {two}, distribute_tensor(indexed({3, 6}), mesh)), ErrorCode::invalid_argument,
                 "index_put of values of size [3, 6] to DTensor of size [4, 6] as [S(0)] on DeviceMesh(2): expected a "
                 "size that broadcasts to [2, 6]");
    for (const std::int64_t wrong : {4, -5}) {
      EXPECT_ERROR(
          dtensor::index_put(x, {ids({0, wrong})}, rows), ErrorCode::invalid_argument,
          "index_put along dimension 0: index " + std::to_string(wrong) + " is out of range, expected -4 to 3");
      EXPECT_ERROR(dtensor::index_select(x.redistribute({S1}), 0, ids({0, wrong})), ErrorCode::invalid_argument,
                   "index(");
    }
    EXPECT_ERROR(dtensor::gather(x, 0, dtensor::view(ids({-1}), {1, 1})), ErrorCode::invalid_argument,
                 "gather along dimension 0: index -1 is out of range, expected 0 to 3");
    EXPECT_ERROR(dtensor::gather(x, 0, dtensor::view(ids({1, 2, 3, 0, 1, 2, 3}), {1, 7})), ErrorCode::invalid_argument,
                 "gather of tensors of sizes [4, 6] and [1, 7]: expected an index of 2 dimensions, no longer than the "
                 "tensor except along dimension 0");
    EXPECT_ERROR(dtensor::index_add(x, 0, rows, rows), ErrorCode::invalid_argument,
                 "index_add by indices of size [2, 6]: expected one dimension");
    EXPECT_ERROR(dtensor::index_copy(x, 1, two, rows), ErrorCode::invalid_argument,
                 "index_copy of a source of size [2, 6] to DTensor of size [4, 6]");
    EXPECT_ERROR(dtensor::index_reduce(x, 0, two, rows, ReduceOp::sum), ErrorCode::unsupported, "call index_add");
    EXPECT_ERROR(dtensor::index_reduce(x, 1, two, rows, ReduceOp::max), ErrorCode::invalid_argument,
                 "index_reduce of tensors of sizes [4, 6] and [2] and [2, 6]: expected an index of one dimension and a "
                 "source of size [4, 2]");
    EXPECT_ERROR(dtensor::select_scatter(x, rows, 0, 4), ErrorCode::invalid_argument, "expected -4 to 3");
    EXPECT_ERROR(dtensor::slice_scatter(x, rows, 0, 1, 4), ErrorCode::invalid_argument, "expected size [3, 6]");
    EXPECT_ERROR(dtensor::slice_scatter(x, rows, 0, 1, 4, 0), ErrorCode::invalid_argument, "a step of at least 1");
    EXPECT_ERROR(dtensor::diagonal(x, 0, 1, -1), ErrorCode::invalid_argument, "expected two dimensions");
    EXPECT_ERROR(dtensor::diagonal_scatter(x, rows), ErrorCode::invalid_argument, "expected size [4]");
    EXPECT_ERROR(dtensor::scatter(x, 0, two, rows), ErrorCode::invalid_argument, "scatter of tensors of sizes",
                 "expected an index and a source of 2 dimensions");
    EXPECT_ERROR(dtensor::index_put(x, {two}, dtensor::to(rows, at::kFloat)), ErrorCode::invalid_argument, "dtype");
  });
}

}  // namespace
}  // namespace tessera

#include "tessera/tensor/dtensor_ops.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/error_matchers.h"
#include "tensor/dtensor_ops/op_cases.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor_op.h"
#include "tessera/tensor/dtensor_ops/lists.h"
#include "tessera/tensor/dtensor_ops/normalization.h"

namespace tessera {
namespace {

using testing::cross;
using testing::indexed;
using testing::local_of;
using testing::OpCase;
using testing::P;
using testing::part_of;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

const Placement S2 = Placement::shard(2);

class DTensorOpTest : public ::testing::TestWithParam<std::tuple<OpCase, Sizes>> {};

TEST_P(DTensorOpTest, GivesWhatItGivesOnTheWhole) {
  const auto& [op, shape] = GetParam();
  testing::expect_as_on_full_tensors({op}, shape);
}

std::vector<std::tuple<OpCase, Sizes>> parameters() {
  std::vector<std::tuple<OpCase, Sizes>> all;
  for (const OpCase& op : testing::op_cases()) {
    for (const Sizes& mesh : {Sizes{1}, Sizes{2}, Sizes{3}, Sizes{2, 2}}) all.emplace_back(op, mesh);
  }
  for (const auto& more : {testing::more_op_cases(), testing::math_cases()}) {
    for (const OpCase& op : more) {
      for (const Sizes& mesh : {Sizes{3}, Sizes{2, 2}}) all.emplace_back(op, mesh);
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Ops, DTensorOpTest, ::testing::ValuesIn(parameters()),
                         [](const ::testing::TestParamInfo<std::tuple<OpCase, Sizes>>& test) {
                           return std::get<0>(test.param).name + testing::mesh_name(std::get<1>(test.param));
                         });

TEST(DTensorOpsTest, StridedShardsAndAveragesGiveTheSame) {
  std::vector<OpCase> ops = testing::op_cases();
  for (const auto& more : {testing::more_op_cases(), testing::math_cases()})
    ops.insert(ops.end(), more.begin(), more.end());
  testing::expect_as_on_full_tensors_if_strided(ops);
}

TEST(DTensorOpsTest, TheCheapestPlacementIsTaken) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const auto on = [&](const Sizes& size, const Placement& placement) {
      return distribute_tensor(indexed(size), mesh, {placement});
    };
    const DTensor x = on({6, 4}, R);
    EXPECT_EQ(dtensor::linear(x, on({8, 4}, S0), on({8}, S0)).placements(), Placements{S1});
    EXPECT_EQ(dtensor::linear(on({6, 8}, S1), on({4, 8}, S1), on({4}, R)).placements(), Placements{P});
    EXPECT_EQ(dtensor::linear(on({6, 4}, S0), on({8, 4}, R), on({8}, R)).placements(), Placements{S0});
    EXPECT_EQ(dtensor::matmul(on({3, 5, 4}, S0), on({3, 4, 2}, S0)).placements(), Placements{S0});
    EXPECT_EQ(dtensor::matmul(on({3, 5, 4}, S1), on({3, 4, 2}, R)).placements(), Placements{S1});
    EXPECT_EQ(dtensor::matmul(on({3, 5, 4}, R), on({3, 4, 2}, S2)).placements(), Placements{S2});
    EXPECT_EQ(dtensor::add(x, on({6, 4}, S1)).placements(), Placements{S1});
    EXPECT_EQ(dtensor::sum(on({6, 4}, S1), {0}).placements(), Placements{S0});
    EXPECT_EQ(dtensor::sum(on({6, 4}, S1), {1}).placements(), Placements{P});
    EXPECT_EQ(dtensor::amax(on({6, 4}, S1), {1}).placements(), Placements{Placement::partial(ReduceOp::max)});
    EXPECT_EQ(dtensor::transpose(on({6, 4}, S1), 0, 1).placements(), Placements{S0});
    EXPECT_EQ(dtensor::relu(x).placements(), Placements{R});
    // Heads stay sharded through views, products and softmax.
    EXPECT_EQ(dtensor::view(on({3, 8}, S1), {3, 4, 2}).placements(), Placements{S1});
    EXPECT_EQ(dtensor::view(on({3, 4, 2}, S1), {3, 8}).placements(), Placements{S1});
    EXPECT_EQ(dtensor::view(on({3, 6}, S1), {3, 3, 2}).placements(), Placements{R});
    EXPECT_EQ(dtensor::view(on({1, 6, 2}, S1), {6, 2}).placements(), Placements{S0});
    EXPECT_EQ(dtensor::permute(on({2, 3, 4}, S2), {2, 0, 1}).placements(), Placements{S0});
    EXPECT_EQ(dtensor::matmul(on({2, 4, 3, 5}, S1), on({2, 4, 5, 3}, S1)).placements(), Placements{S1});
    EXPECT_EQ(
        dtensor::scaled_dot_product_attention(on({4, 3, 5}, S0), on({4, 3, 5}, S0), on({4, 3, 5}, S0)).placements(),
        Placements{S0});
    EXPECT_EQ(dtensor::log_softmax(on({6, 4}, S1), 1).placements(), Placements{S1});
    EXPECT_EQ(dtensor::cat({on({6, 4}, S1), on({2, 4}, S1)}).placements(), Placements{S1});
    EXPECT_EQ(dtensor::slice(on({6, 4}, S1), 0, 2, 5).placements(), Placements{S1});
    EXPECT_EQ(dtensor::select(on({6, 4}, S1), 0, 2).placements(), Placements{S0});
    const DTensor ids = distribute_tensor(at::zeros({6, 1}, at::kLong), mesh, {R});
    EXPECT_EQ(dtensor::gather(on({6, 40}, S1), 1, ids).placements(), Placements{P});
    const DTensor sum = dtensor::sum(on({6, 4}, S0), {0});
    EXPECT_EQ(dtensor::add(sum, sum).placements(), Placements{P});
    EXPECT_EQ(dtensor::relu(sum).placements(), Placements{R});
  });
}

TEST(DTensorOpsTest, RowsOfAnEmbeddingAreThoseOfTheRankThatHasThem) {
  for (const Sizes& shape : {Sizes{2}, Sizes{3}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      const at::Tensor ids = at::tensor({0, 6, 3, 3, 1, 5, 2, 4}, at::kLong).view({2, 4});
      at::Tensor full = indexed({7, 6}).set_requires_grad(true);
      const at::Tensor expected = at::embedding(full, ids), weights = indexed({2, 4, 6});
      (expected * weights).sum().backward();
      for (const Placements& of_weight : cross({R, S0, S1, Placement::strided_shard(0, 2)}, shape.size())) {
        for (const Placements& of_ids : cross({R, S0, S1}, shape.size())) {
          const DTensor weight = distribute_tensor(full, mesh, of_weight);
          const at::Tensor found = dtensor::embedding(weight, distribute_tensor(ids, mesh, of_ids)).full_tensor();
          ASSERT_TRUE(at::equal(found, expected)) << to_string(of_weight) << to_string(of_ids);
          (found * weights).sum().backward();
          ASSERT_TRUE(
              at::allclose(weight.grad()->to_local(), part_of(full.grad(), weight.layout(), *mesh.coordinate())))
              << to_string(of_weight) << to_string(of_ids);
        }
      }
      // More ranks than rows, and an id out of range on one rank only.
      const DTensor one = distribute_tensor(indexed({1, 2}), mesh, Placements(shape.size(), S0));
      const DTensor zero = distribute_tensor(at::zeros({3}, at::kLong), mesh, {});
      EXPECT_TRUE(at::equal(dtensor::embedding(one, zero).full_tensor(), indexed({1, 2}).expand({3, 2})));
      const DTensor weight = distribute_tensor(full, mesh, Placements(shape.size(), S0));
      const at::Tensor wrong = at::full({2}, group.rank() == 1 ? 7 : 0, at::kLong);
      EXPECT_ERROR(dtensor::embedding(weight, DTensor::from_local(wrong, mesh)), ErrorCode::invalid_argument,
                   "embedding: id 7 is out of range, expected 0 to 6");
    });
  }
}

TEST(DTensorOpsTest, ReductionsInHalfPrecisionAreComputedInFloat) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    for (const Placement& placement : {R, S0}) {
      const auto on = [&](const at::Tensor& full) { return distribute_tensor(full.to(at::kHalf), mesh, {placement}); };
      const auto number = [](const DTensor& found) {
        EXPECT_EQ(found.scalar_type(), at::kHalf);
        return found.full_tensor().item<double>();
      };
      EXPECT_EQ(number(dtensor::mean(on(at::ones({100000})))), 1);
      const DTensor far_apart = on(at::tensor({10.0, -10.0}).repeat({2000}));
      EXPECT_NEAR(number(dtensor::var(far_apart)), 100, 0.1);
      EXPECT_NEAR(number(dtensor::std(far_apart)), 10, 0.01);
      EXPECT_NEAR(number(dtensor::vector_norm(on(at::full({10000}, 1e-4)))), 0.01, 1e-4);
      EXPECT_NEAR(number(dtensor::vector_norm(on(at::full({4}, 300.0)))), 600, 0.5);
      EXPECT_NEAR(number(dtensor::powsum(on(at::full({40000}, 1e-3)), 2)), 0.04, 1e-4);
      EXPECT_NEAR(number(dtensor::logsumexp(on(at::zeros({70000})))), std::log(70000), 0.01);
      const DTensor targets = distribute_tensor(at::zeros({70000}, at::kLong), mesh, {placement});
      EXPECT_EQ(number(dtensor::nll_loss(on(at::full({70000, 2}, -2.0)), targets)), 2);
    }
  });
}

TEST(DTensorOpsTest, AnRmsNormInHalfPrecisionIsComputedInFloat) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor wide = indexed({2, 8}).to(at::kFloat);
    wide[0][3] = 300;
    const DTensor x = distribute_tensor(wide.to(at::kHalf), mesh, {S0});
    const DTensor found = dtensor::rms_norm(x, {8}, distribute_tensor(at::full({8}, 2.0, at::kFloat), mesh));
    EXPECT_EQ(found.scalar_type(), at::kHalf);
    const at::Tensor expected = wide * (wide.square().sum(1, true) / 8).rsqrt() * 2;
    EXPECT_TRUE(at::allclose(found.full_tensor().to(at::kFloat), expected, 1e-3, 1e-3));
  });
}

TEST(DTensorOpsTest, NormsOfChannelsInHalfPrecisionTakeParametersOfFloat) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor full = (at::sin(indexed({4, 6, 3})) * 3).to(at::kBFloat16), wide = full.to(at::kFloat),
                     scales = indexed({6}).to(at::kFloat) / 7, shifts = scales - 0.4;
    const DTensor x = distribute_tensor(full, mesh, {S0}), weight = distribute_tensor(scales, mesh),
                  bias = distribute_tensor(shifts, mesh);
    const auto expect_near = [](const DTensor& found, const at::Tensor& expected) {
      EXPECT_EQ(found.scalar_type(), at::kBFloat16);
      EXPECT_TRUE(at::allclose(found.full_tensor().to(at::kFloat), expected, 1e-2, 1e-3)) << expected;
    };
    expect_near(dtensor::group_norm(x, 2, weight, bias), at::group_norm(wide, 2, scales, shifts));
    expect_near(dtensor::batch_norm(x, weight, bias, {.training = true}),
                at::batch_norm(wide, scales, shifts, {}, {}, true, 0.1, 1e-5, false));
    expect_near(dtensor::batch_norm(x, weight, bias, {.running_mean = bias, .running_var = weight}),
                at::batch_norm(wide, scales, shifts, shifts, scales, false, 0.1, 1e-5, false));
  });
}

TEST(DTensorOpsTest, ScoresInHalfPrecisionDoNotOverflow) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    // Products of rows are 160000, and all weights are equal.
    const at::Tensor rows = at::full({2, 8, 64}, 50.0, at::kHalf), values = indexed({2, 8, 2}).to(at::kHalf);
    for (const Placement& placement : {R, S0}) {
      const DTensor query = distribute_tensor(rows, mesh, {placement});
      const DTensor found =
          dtensor::scaled_dot_product_attention(query, query, distribute_tensor(values, mesh, {placement}));
      EXPECT_EQ(found.scalar_type(), at::kHalf);
      const at::Tensor means = indexed({2, 8, 2}).mean(1, true).expand({2, 8, 2});
      EXPECT_TRUE(at::allclose(found.full_tensor().to(at::kDouble), means, 1e-3));
    }
  });
}

TEST(DTensorOpsTest, IntegersAreRefusedOnAnyPlacement) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor numbers = distribute_tensor(at::full({6}, 2, at::kLong), mesh);
    for (const Placement& placement : {R, S0, S1}) {
      const DTensor x = distribute_tensor(at::full({4, 6}, 50000, at::kInt), mesh, {placement});
      const auto refused = [](const char* op, const auto& f) {
        EXPECT_ERROR(f(), ErrorCode::invalid_argument,
                     std::string(op) + " of Int: expected a floating-point or complex dtype");
      };
      refused("softmax", [&] { return dtensor::softmax(x, 1); });
      refused("softmax", [&] { return dtensor::safe_softmax(x, 1); });
      refused("log_softmax", [&] { return dtensor::log_softmax(x, 1); });
      refused("vector_norm", [&] { return dtensor::vector_norm(x); });
      refused("foreach_norm", [&] { return dtensor::foreach_norm({x})[0]; });
      refused("get_total_norm", [&] { return dtensor::get_total_norm({x}); });
      refused("batch_norm", [&] {
        return dtensor::batch_norm(x, std::nullopt, std::nullopt, {.running_mean = numbers, .running_var = numbers});
      });
    }
  });
}

TEST(DTensorOpsTest, NormsOfNegativeOrderAreThoseOfATen) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    for (const Placement& placement : {R, S0}) {
      const DTensor large = distribute_tensor(at::full({4}, 1e30F, at::kFloat), mesh, {placement});
      EXPECT_EQ(dtensor::vector_norm(large, -2).full_tensor().item<double>(), INFINITY);
      const DTensor x = distribute_tensor(at::zeros({0, 4}, at::kDouble), mesh, {placement});
      for (const double p : {-2.0, -double{INFINITY}, double{INFINITY}}) {
        EXPECT_EQ(dtensor::vector_norm(x, p, {1}).full_tensor().numel(), 0);
        EXPECT_ERROR(dtensor::vector_norm(x, p), ErrorCode::invalid_argument, "vector_norm of order ",
                     " of no elements, of size [0, 4]: expected one or more");
        EXPECT_ERROR(dtensor::vector_norm(x, p, {0}), ErrorCode::invalid_argument, " of no elements, of size [0, 4]");
      }
    }
  });
}

TEST(DTensorOpsTest, ChunksOfNothingAreAsManyAsOfATen) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    for (const Sizes& size : {Sizes{0, 4}, Sizes{4, 0}}) {
      const at::Tensor full = at::zeros(size, at::kDouble);
      for (const Placement& placement : {R, S0, S1}) {
        for (const std::int64_t dim : {0, 1}) {
          const std::vector<at::Tensor> expected = full.chunk(3, dim);
          const std::vector<DTensor> found = dtensor::chunk(distribute_tensor(full, mesh, {placement}), 3, dim);
          ASSERT_EQ(found.size(), expected.size());
          for (std::size_t i = 0; i < found.size(); ++i) EXPECT_EQ(found[i].size(), expected[i].sizes().vec());
        }
      }
    }
  });
}

TEST(DTensorOpsTest, ReductionsOfNothingAreThoseOfATen) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    for (const Sizes& size : {Sizes{0, 4}, Sizes{3, 0}}) {
      const at::Tensor full = at::zeros(size, at::kDouble);
      for (const Placement& placement : {R, S0, S1}) {
        const DTensor x = distribute_tensor(full, mesh, {placement});
        EXPECT_TRUE(at::equal(dtensor::any(x).full_tensor(), full.any()));
        EXPECT_TRUE(at::equal(dtensor::all(x).full_tensor(), full.all()));
        for (const std::int64_t dim : {0, 1}) {
          EXPECT_TRUE(at::equal(dtensor::any(x, {dim}).full_tensor(), full.any(dim)));
          EXPECT_TRUE(at::equal(dtensor::all(x, {dim}, true).full_tensor(), full.all(dim, true)));
          EXPECT_TRUE(at::equal(dtensor::logsumexp(x, {dim}).full_tensor(), at::logsumexp(full, Sizes{dim})));
          EXPECT_EQ(dtensor::safe_softmax(x, dim).full_tensor().sizes(), size);
        }
      }
    }
  });
}

TEST(DTensorOpsTest, ATensorWithoutDimensionsTakesDimension0) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor full = at::full({}, 3.0, at::kDouble);
    for (const Placement& placement : {R, P}) {
      const DTensor x = testing::on_mesh(full, mesh, {placement});
      for (const std::int64_t dim : {0, -1}) {
        for (const DTensor& same :
             {dtensor::sum(x, {dim}), dtensor::mean(x, {dim}), dtensor::prod(x, {dim}, true), dtensor::amax(x, {dim}),
              dtensor::cumsum(x, dim), dtensor::cumprod(x, dim), dtensor::max(x, dim).values,
              dtensor::min(x, dim, true).values, dtensor::sort(x, dim).values, dtensor::topk(x, 1, dim).values,
              dtensor::kthvalue(x, 1, dim).values, dtensor::mode(x, dim).values, dtensor::flip(x, {dim}),
              dtensor::transpose(x, dim, 0), dtensor::squeeze(x, dim), dtensor::vector_norm(x, 2, {dim}),
              dtensor::softmax(x, dim) * 3, dtensor::log_softmax(x, dim) + 3}) {
          EXPECT_TRUE(at::equal(same.full_tensor(), full)) << same.to_string();
        }
        EXPECT_EQ(dtensor::argmax(x, dim).full_tensor().item<std::int64_t>(), 0);
        EXPECT_TRUE(dtensor::any(x, {dim}).full_tensor().item<bool>());
      }
      EXPECT_ERROR(dtensor::sum(x, {1}), ErrorCode::invalid_argument,
                   "sum over dimension 1 of a tensor of 0 dimensions");
      EXPECT_ERROR(dtensor::select(x, 0, 0), ErrorCode::invalid_argument, "select over dimension 0 of a tensor of 0");
    }
  });
}

TEST(DTensorOpsTest, EqualIsTheSameOnAllRanks) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {3});
    const at::Tensor full = indexed({4, 6});
    for (const Placement& a : {R, S0, S1, P}) {
      for (const Placement& b : {R, S0, S1, P}) {
        const auto of = [&](const at::Tensor& tensor, const Placement& placement) {
          const MeshLayout layout({4, 6}, {3}, {placement});
          return DTensor::from_local(local_of(tensor, layout, *mesh.coordinate()), mesh, {placement}, {Sizes{4, 6}});
        };
        EXPECT_TRUE(dtensor::equal(of(full, a), of(full, b)));
        at::Tensor other = full.clone();
        other[3][5] = 0;
        EXPECT_FALSE(dtensor::equal(of(full, a), of(other, b)));
      }
    }
    EXPECT_FALSE(dtensor::equal(distribute_tensor(full, mesh), distribute_tensor(full.t().contiguous(), mesh)));
  });
}

TEST(DTensorOpsTest, OnesOwnOpHasARuleOfItsOwn) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor x = distribute_tensor(indexed({4, 6}), mesh, {S0});
    const auto sorted = [&](const DTensor& tensor) {
      return call("sort_rows", {&tensor, 1}, [](std::span<const DTensor> inputs) {
        return std::get<0>(at::sort(inputs[0].local_tensor(), -1, true));
      });
    };
    EXPECT_ERROR(sorted(x), ErrorCode::unsupported,
                 "sort_rows(DTensor of size [4, 6] as [S(0)] on DeviceMesh(2)) has no placement rule");
    group.barrier();
    if (group.rank() == 0) {
      register_placement_rule("sort_rows", [](std::span<const DTensor> inputs) {
        return OpRule{inputs[0].size(), {{{R}, R}, {{S0}, S0}}, /*may_shard=*/true};
      });
    }
    group.barrier();
    EXPECT_EQ(sorted(x).placements(), Placements{S0});
    EXPECT_EQ(sorted(x.redistribute({S1})).placements(), Placements{S0});
    EXPECT_TRUE(at::equal(sorted(x).full_tensor(), indexed({4, 6}).flip({1})));
    group.barrier();
    if (group.rank() == 0) register_placement_rule("sort_rows", nullptr);
    group.barrier();
    EXPECT_ERROR(sorted(x), ErrorCode::unsupported, "has no placement rule");
  });
}

TEST(DTensorOpsTest, WhatDoesntFitIsRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2}, {"dp"}), other(group, {2}, {"tp"});
    const DTensor x = distribute_tensor(indexed({4, 6}), mesh, {S0});
    EXPECT_ERROR(x + distribute_tensor(indexed({4, 6}), other, {S0}), ErrorCode::invalid_argument,
                 "add(DTensor of size [4, 6] as [S(0)] on DeviceMesh(dp=2), DTensor of size [4, 6] as [S(0)] on "
                 "DeviceMesh(tp=2)): the tensors are on different meshes, expected one mesh");
    EXPECT_ERROR(x + distribute_tensor(indexed({4, 5}), mesh, {S0}), ErrorCode::invalid_argument,
                 "add of tensors of sizes [4, 6] and [4, 5]: expected sizes that broadcast to each other");
    EXPECT_ERROR(dtensor::matmul(x, x), ErrorCode::invalid_argument,
                 "matmul of tensors of sizes [4, 6] and [4, 6]: expected [..., m, k] and [..., k, n]");
    const auto zeros = [&](const Sizes& size) { return distribute_tensor(at::zeros(size, at::kDouble), mesh); };
    EXPECT_ERROR(dtensor::matmul(zeros({2, 4, 6}), zeros({3, 6, 4})), ErrorCode::invalid_argument,
                 "expected [..., m, k] and [..., k, n] whose other dimensions broadcast to each other");
    EXPECT_ERROR(
        dtensor::einsum("ij,jk->ik", {x, x}), ErrorCode::invalid_argument,
        "einsum of tensors of sizes [4, 6] and [4, 6]: expected equal lengths, or 1, of the dimensions of one");
    EXPECT_ERROR(dtensor::linalg_solve(zeros({2, 4, 4}), zeros({3, 4, 1})), ErrorCode::invalid_argument,
                 "expected [..., n, n] and [..., n, columns] whose other dimensions broadcast to each other");
    EXPECT_ERROR(dtensor::scaled_dot_product_attention(x, x, zeros({3, 6})), ErrorCode::invalid_argument,
                 "expected [..., q, d], [..., k, d] and [..., k, v]");
    EXPECT_ERROR(dtensor::embedding(zeros({3}), x), ErrorCode::invalid_argument, "expected a weight of two dimensions");
    EXPECT_ERROR(dtensor::linear(x, distribute_tensor(indexed({3, 5}), mesh)), ErrorCode::invalid_argument,
                 "linear of tensors of sizes [4, 6] and [3, 5]: expected [..., in] and [out, in]");
    EXPECT_ERROR(dtensor::softmax(x, 2), ErrorCode::invalid_argument, "softmax over dimension 2 of a tensor of 2");
    EXPECT_ERROR(dtensor::sum(x, {0, -2}), ErrorCode::invalid_argument, "one of them twice");
    EXPECT_ERROR(dtensor::layer_norm(x, {4}), ErrorCode::invalid_argument, "layer_norm of size [4, 6] over [4]");
    EXPECT_ERROR(dtensor::view(x, {5, -1}), ErrorCode::invalid_argument, "view of size [4, 6] as [5, -1]");
    EXPECT_ERROR(dtensor::view(x, {-1, -1}), ErrorCode::invalid_argument, "expected at most one -1");
    EXPECT_ERROR(dtensor::permute(x, {0}), ErrorCode::invalid_argument, "expected each of them once");
    EXPECT_ERROR(dtensor::expand(x, {4, 7}), ErrorCode::invalid_argument,
                 "expected to repeat only dimensions of size 1");
    EXPECT_ERROR(dtensor::cat({}), ErrorCode::invalid_argument, "cat: no tensors");
    EXPECT_ERROR(dtensor::cat({x, dtensor::transpose(x, 0, 1)}), ErrorCode::invalid_argument,
                 "cat of tensors of sizes [4, 6] and [6, 4]: expected equal sizes except along dimension 0");
    EXPECT_ERROR(dtensor::split(x, Sizes{1, 2}), ErrorCode::invalid_argument, "expected sizes that add up to it");
    EXPECT_ERROR(dtensor::narrow(x, 1, 4, 3), ErrorCode::invalid_argument, "expected them within it");
    EXPECT_ERROR(dtensor::select(x, 0, 4), ErrorCode::invalid_argument, "expected -4 to 3");
    EXPECT_ERROR(dtensor::slice(x, 0, 0, 4, 0), ErrorCode::invalid_argument, "expected a step of at least 1");
    EXPECT_ERROR(dtensor::index(x, {0, 0, 0}), ErrorCode::invalid_argument, "3 indices, expected at most 2");
    EXPECT_ERROR(dtensor::index(x, {at::indexing::TensorIndex(true)}), ErrorCode::unsupported, "by a bool");
    EXPECT_ERROR(dtensor::topk(x, 5, 0), ErrorCode::invalid_argument, "topk(DTensor of size [4, 6]");
    EXPECT_ERROR(dtensor::vector_norm(x, NAN), ErrorCode::invalid_argument, "expected a number");
    const DTensor wrong = distribute_tensor(at::full({4}, 6, at::kLong), mesh);
    EXPECT_ERROR(dtensor::cross_entropy(x, wrong), ErrorCode::invalid_argument, "gather(");
    EXPECT_ERROR(dtensor::cross_entropy(x.redistribute({S1}), wrong), ErrorCode::invalid_argument,
                 "index 6 is out of range, expected 0 to 5");
    dtensor::LossOptions weighted;
    weighted.weight = zeros({5});
    EXPECT_ERROR(dtensor::cross_entropy(x, wrong, weighted), ErrorCode::invalid_argument,
                 "with weights of size [5]: expected size [6], one for each class");
    EXPECT_ERROR(dtensor::cross_entropy(x, x), ErrorCode::invalid_argument, "expected targets of size [4] of Long");
    EXPECT_ERROR(x + dtensor::to(x, at::kLong).redistribute({R}) / distribute_tensor(at::ones({5}), mesh),
                 ErrorCode::invalid_argument, "div of tensors of sizes");
    const DTensor shards =
        DTensor::from_local(LocalShardsWrapper({indexed({2, 6})}, {{2 * group.rank(), 0}}), mesh, {S0}, {4, 6});
    EXPECT_ERROR(dtensor::relu(shards), ErrorCode::unsupported, "relu is not supported for LocalShardsWrapper");
  });
}

}  // namespace
}  // namespace tessera

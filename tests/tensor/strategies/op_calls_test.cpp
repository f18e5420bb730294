#include "tessera/tensor/dtensor/op_calls.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/layout/placements.h"
#include "tessera/layout/redistribution_cost.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/dtensor_ops/lists.h"

namespace tessera {
namespace {

using ::testing::Contains;
using testing::cross;
using ::testing::ElementsAre;
using testing::indexed;
using ::testing::IsSupersetOf;
using ::testing::Not;
using testing::on_mesh;
using testing::P;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

const Placement kAverageOf = Placement::partial(ReduceOp::average), kGreatest = Placement::partial(ReduceOp::max),
                kLeast = Placement::partial(ReduceOp::min);

std::vector<std::string> texts_of(const OpRule& rule) {
  std::vector<std::string> texts;
  for (const OpStrategy& strategy : rule.strategies) texts.push_back(to_string(strategy));
  return texts;
}

// Returns the rule without the strategies that take partial inputs.
OpRule without_partial_inputs(OpRule rule) {
  std::erase_if(rule.strategies, [](const OpStrategy& strategy) {
    return std::any_of(strategy.inputs.begin(), strategy.inputs.end(),
                       [](const Placement& placement) { return placement.is_partial(); });
  });
  return rule;
}

// The rule of an einsum of two tensors whose dimensions are 4 long.
OpRule einsum_rule(const std::string& equation) {
  const DeviceMesh mesh;
  const std::size_t comma = equation.find(','), arrow = equation.find("->");
  const auto of = [&](std::size_t dims) { return DTensor::from_local(at::ones(Sizes(dims, 4)), mesh); };
  const std::vector<DTensor> factors = {of(comma), of(arrow - comma - 1)};
  return record_op_calls([&] { dtensor::einsum(equation, factors); }).at(0).rule;
}

TEST(OpRuleTest, StrategiesOfProductsAreThoseOfPyTorch) {
  EXPECT_THAT(texts_of(einsum_rule("mk,kn->mn")),
              ElementsAre("R, R -> R", "S(0), R -> S(0)", "S(1), S(0) -> P(sum)", "R, S(1) -> S(1)",
                          "P(sum), R -> P(sum)", "R, P(sum) -> P(sum)", "P(avg), R -> P(avg)", "R, P(avg) -> P(avg)"));
  const auto of_shards = [](const char* equation) { return texts_of(without_partial_inputs(einsum_rule(equation))); };
  EXPECT_THAT(of_shards("abc,abc->abc"),
              ElementsAre("R, R -> R", "S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "S(2), S(2) -> S(2)"));
  EXPECT_THAT(of_shards("bmk,bkn->bmn"), ElementsAre("R, R -> R", "S(0), S(0) -> S(0)", "S(1), R -> S(1)",
                                                     "S(2), S(1) -> P(sum)", "R, S(2) -> S(2)"));
  EXPECT_THAT(of_shards("bcmk,bckn->bcmn"), ElementsAre("R, R -> R", "S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)",
                                                        "S(2), R -> S(2)", "S(3), S(2) -> P(sum)", "R, S(3) -> S(3)"));
  EXPECT_THAT(of_shards("abc,ab->abc"),
              ElementsAre("R, R -> R", "S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "S(2), R -> S(2)"));
  EXPECT_THAT(of_shards("abd,bf->abfd"),
              ElementsAre("R, R -> R", "S(0), R -> S(0)", "S(1), S(0) -> S(1)", "S(2), R -> S(3)", "R, S(1) -> S(2)"));
  EXPECT_THAT(of_shards("bcd,abcd->abcd"), ElementsAre("R, R -> R", "S(0), S(1) -> S(1)", "S(1), S(2) -> S(2)",
                                                       "S(2), S(3) -> S(3)", "R, S(0) -> S(0)"));
}

TEST(OpRuleTest, AProductIsLinearInEachFactorAndASumInAllTermsTogether) {
  const std::vector<std::string> product = texts_of(einsum_rule("abcd,abcd->abcd"));
  EXPECT_EQ(product.size(), 9u);
  EXPECT_THAT(product, IsSupersetOf({"P(sum), R -> P(sum)", "R, P(sum) -> P(sum)", "P(avg), R -> P(avg)",
                                     "R, P(avg) -> P(avg)", "S(3), S(3) -> S(3)"}));
  EXPECT_THAT(product, Not(Contains("P(sum), P(sum) -> P(sum)")));  // (1 + 1) * (1 + 1) is not 1 * 1 + 1 * 1
  const DTensor x = DTensor::from_local(at::ones({4, 4}), DeviceMesh());
  const std::vector<OpCall> calls = record_op_calls([&] { x + x; });
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0].op, "add");
  EXPECT_EQ(calls[0].inputs, (std::vector<Placements>{{R}, {R}}));
  EXPECT_EQ(calls[0].outputs, (std::vector<Placements>{{R}}));
  EXPECT_THAT(texts_of(calls[0].rule),
              ElementsAre("R, R -> R", "S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "P(sum), P(sum) -> P(sum)",
                          "P(avg), P(avg) -> P(avg)", "P(max), R -> P(max)", "R, P(max) -> P(max)",
                          "P(min), R -> P(min)", "R, P(min) -> P(min)"));
}

// Counts as in PyTorch's tests; on n mesh dimensions there is a strategy for each.
TEST(OpRuleTest, StrategiesAreExpandedToMeshesOfSeveralDimensions) {
  const auto count = [](const char* equation, std::size_t mesh_dims) {
    return expand_to_mesh(without_partial_inputs(einsum_rule(equation)), mesh_dims).size();
  };
  EXPECT_EQ(count("mk,kn->mn", 1), 4u);
  EXPECT_EQ(count("mk,kn->mn", 2), 16u);
  EXPECT_EQ(count("bmk,bkn->bmn", 1), 5u);
  EXPECT_EQ(count("bmk,bkn->bmn", 2), 25u);
  EXPECT_EQ(count("bmk,kn->bmn", 2), 25u);
  EXPECT_EQ(count("bmk,k->bm", 2), 16u);
  EXPECT_EQ(count("abcd,abcd->abcd", 1), 5u);
  EXPECT_EQ(count("bcd,abcd->abcd", 1), 5u);
  EXPECT_EQ(expand_to_mesh(einsum_rule("mk,kn->mn"), 3).size(), 512u);
  EXPECT_EQ(expand_to_mesh(OpRule{}, 2).size(), 0u);
  OpRule first_dim_only{{4}, {{{R}, R}, {{S0}, S0, 0}}};
  EXPECT_THAT(expand_to_mesh(first_dim_only, 2),
              ElementsAre(MeshStrategy{{{R, R}}, {{R, R}}}, MeshStrategy{{{S0, R}}, {{S0, R}}}));
}

TEST(OpRuleTest, NoTensorIsPartialInTwoKindsOtherThanSumsAndAverages) {
  const OpRule rule{{4},
                    {{{P}, P}, {{kAverageOf}, kAverageOf}, {{kGreatest}, kGreatest}, {{kGreatest}, kLeast}, {{R}, R}}};
  const std::vector<MeshStrategy> all = expand_to_mesh(rule, 2);
  for (const MeshStrategy& strategy : all) {
    EXPECT_FALSE(mixes_partials(strategy.inputs[0])) << to_string(strategy.inputs[0]);
    EXPECT_FALSE(mixes_partials(strategy.outputs[0])) << to_string(strategy.outputs[0]);
  }
  for (const Placements& kept : {Placements{P, P}, {P, kAverageOf}, {kAverageOf, P}, {kGreatest, kGreatest}, {R, P}})
    EXPECT_THAT(all, Contains(MeshStrategy{{kept}, {kept}})) << to_string(kept);
  EXPECT_EQ(all.size(), 9u + 3 + 3);  // sums, averages and replicated ones; maxima; maxima that give minima
  // foreach_add on three dimensions: each kind by itself, or sums with averages.
  const DTensor x = DTensor::from_local(at::ones({8, 8, 8}), DeviceMesh());
  const OpRule add = record_op_calls([&] { dtensor::foreach_add({x}, {x}); }).at(0).rule;
  const auto cube = [](std::size_t n) { return n * n * n; };
  const std::size_t shards = 4, of_sums = 1, of_averages = 1, of_maxima = 2, of_minima = 2;
  EXPECT_EQ(expand_to_mesh(add, 3).size(), cube(shards + of_sums + of_averages) + cube(shards + of_maxima) +
                                               cube(shards + of_minima) - 2 * cube(shards));
}

// Returns what redistributing the inputs costs.
double cost_of_inputs(const std::vector<DTensor>& inputs, const std::vector<Placements>& wanted) {
  double cost = 0;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    cost +=
        estimated_cost(inputs[i].size(), inputs[i].device_mesh().shape(), inputs[i].placements(), wanted[i]).total();
  }
  return cost;
}

// Returns whether a strategy makes partial tensors of others along a mesh dimension, which takes no communication but
// postpones it.
bool makes_partials(const MeshStrategy& strategy, const std::vector<DTensor>& inputs) {
  for (std::size_t m = 0; m < inputs[0].placements().size(); ++m) {
    bool has_partial = false, has_other = false;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const Placement& wanted = strategy.inputs[i][m];
      has_partial = has_partial || wanted.is_partial();
      has_other = has_other || wanted.is_shard() || (wanted.is_partial() && wanted == inputs[i].placements()[m]);
    }
    if (has_partial && !has_other) return true;
  }
  return false;
}

// Tensors on meta, whose redistributions send nothing.
TEST(OpChoiceTest, NoOtherStrategiesOnTheMeshCostLess) {
  struct Case {
    Sizes mesh;
    std::size_t step;  // every how many combinations
    Placements choices;
  };
  for (const auto& [shape, step, choices] : {Case{{4}, 1, {S0, S1, R, P, kAverageOf}},
                                             {{2, 2}, 1, {S0, S1, R, P}},
                                             {{2, 1, 2}, 59, {S0, S1, R, P}},
                                             {{2, 2, 2}, 59, {S0, S1, R, P}}}) {
    run_local(static_cast<int>(mesh_size(shape)),
              [&, &shape = shape, &step = step, &choices = choices](const ProcessGroup& group) {
                const DeviceMesh mesh(group, shape);
                if (group.rank() != 0) return;
                for (const auto& [rows, columns] : {std::pair(64, 32), {8192, 4096}}) {
                  const auto on = [&](const Sizes& size, const Placements& placements) {
                    const MeshLayout layout(size, shape, placements);
                    return DTensor(mesh, layout, at::empty(layout.local_shape(*mesh.coordinate()).sizes, at::kMeta));
                  };
                  const std::vector<Placements> all = cross(choices, shape.size());
                  for (std::size_t n = 0; n < all.size() * all.size(); n += step) {
                    const std::vector<DTensor> inputs = {on({rows, columns}, all[n / all.size()]),
                                                         on({columns, rows}, all[n % all.size()])};
                    const OpCall call = record_op_calls([&] { dtensor::matmul(inputs[0], inputs[1]); }).at(0);
                    double least = std::numeric_limits<double>::infinity();
                    for (const MeshStrategy& strategy : expand_to_mesh(call.rule, shape.size())) {
                      if (!makes_partials(strategy, inputs))
                        least = std::min(least, cost_of_inputs(inputs, strategy.inputs));
                    }
                    ASSERT_NEAR(cost_of_inputs(inputs, call.inputs), least, 1e-3)
                        << inputs[0] << inputs[1] << to_string(call.inputs[0]) << to_string(call.inputs[1]);
                  }
                }
              });
  }
}

TEST(OpChoiceTest, AlongAMeshDimensionOfOneRankNothingIsCopied) {
  for (const Sizes& shape : {Sizes{1}, Sizes{2, 1}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      for (const Placement& last : {R, S0, S1, P, kGreatest}) {
        Placements placements(shape.size(), R);
        placements.back() = last;
        const DTensor x = on_mesh(indexed({4, 6}), mesh, placements);
        const void* taken = nullptr;
        const DTensor result = dtensor::pointwise("probe", {x}, [&](std::span<const DTensor> inputs) {
          taken = inputs[0].local_tensor().data_ptr();
          return inputs[0].local_tensor().sqrt();
        });
        EXPECT_EQ(taken, x.local_tensor().data_ptr()) << to_string(placements);
        EXPECT_TRUE(at::equal(result.full_tensor(), indexed({4, 6}).sqrt()));
      }
    });
  }
}

TEST(OpChoiceTest, CollectivesCostTimeByThemselves) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {4});
    const DTensor bias = on_mesh(indexed({8}), mesh, {S0}), a = on_mesh(indexed({50, 6}), mesh, {P}),
                  b = on_mesh(indexed({6, 8}), mesh, {S1});
    const auto cost = [&](const Placement& of_bias, const Placement& of_a, const Placement& of_b) {
      return cost_of_inputs({bias, a, b}, {{of_bias}, {of_a}, {of_b}});
    };
    // One all-reduce costs less than a reduce-scatter and two all-gathers, which send fewer elements. An all-gather of
    // the smaller factor costs least.
    EXPECT_LT(cost(S0, R, S1), cost(R, S0, R));
    EXPECT_LT(cost(P, P, R), cost(S0, R, S1));
    const CommDebugMode mode(group);
    const DTensor result = dtensor::addmm(bias, a, b);
    EXPECT_EQ(mode.total(), 1);
    EXPECT_EQ(result.placements(), Placements{P});
    EXPECT_TRUE(at::allclose(result.full_tensor(), at::addmm(indexed({8}), indexed({50, 6}), indexed({6, 8}))));
  });
}

TEST(OpChoiceTest, MeshDimensionsAreChosenTogether) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2});
    const at::Tensor full = indexed({8, 8});
    const auto chosen = [&](const DTensor& a, const DTensor& b) {
      std::optional<DTensor> result;
      const OpCall call = record_op_calls([&] { result = dtensor::matmul(a, b); }).at(0);
      EXPECT_TRUE(at::allclose(result->full_tensor(), at::matmul(full, full)));
      return call.inputs;
    };
    // A shard of a shard, whose product is a partial sum, sends nothing.
    EXPECT_EQ(chosen(on_mesh(full, mesh, {S0, R}), on_mesh(full, mesh, {R, S0})),
              (std::vector<Placements>{{S0, S1}, {R, S0}}));
    // Nothing is sent along either mesh dimension alone, but the sum would be partial in two kinds.
    const DTensor sum = on_mesh(full, mesh, {P, R}), greatest = on_mesh(full, mesh, {R, kGreatest});
    const DTensor both = sum + greatest;
    EXPECT_FALSE(mixes_partials(both.placements()));
    EXPECT_TRUE(at::allclose(both.full_tensor(), full * 2));
    // The second mesh dimension's shards would be others if the first one split before.
    const DTensor x = on_mesh(full, mesh, {R, S0}), y = on_mesh(full, mesh, {S0, R});
    const CommDebugMode mode(group);
    const DTensor added = x + y;
    EXPECT_LE(mode.total(), 2);
    EXPECT_TRUE(at::equal(added.full_tensor(), full * 2));
  });
}

TEST(OpChoiceTest, PartialTensorsOfTwoKindsAreRefusedOnAllRanks) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2});
    const char* message = "on a mesh of shape [2, 2]: partial tensors of several kinds, expected one kind";
    EXPECT_ERROR(DTensor::from_local(indexed({4}), mesh, {P, kGreatest}), ErrorCode::invalid_argument, message);
    EXPECT_ERROR(distribute_tensor(indexed({4}), mesh).redistribute({kLeast, kGreatest}), ErrorCode::invalid_argument,
                 message);
    const Placements wanted = group.rank() == 3 ? Placements{P, kGreatest} : Placements{P, P};
    EXPECT_ERROR(distribute_tensor(indexed({4}), mesh).redistribute(wanted), ErrorCode::invalid_argument, message);
    EXPECT_EQ(distribute_tensor(indexed({4}), mesh).redistribute({P, kAverageOf}).placements(),
              (Placements{P, kAverageOf}));
  });
}

// --- ops of several results, or of none

using Locals = std::span<const DTensor>;

// The least and the greatest element.
std::vector<DTensor> least_and_greatest(const DTensor& x) {
  const PlacementRule rule = [](Locals inputs) {
    OpRule given{{}, {{{R}, R}}};
    given.more_output_sizes.emplace_back();
    for (std::int64_t d = 0; d < inputs[0].dim(); ++d)
      given.strategies.push_back({{Placement::shard(d)}, kLeast, std::nullopt, {kGreatest}});
    return given;
  };
  return call_with_results("least_and_greatest", {&x, 1}, rule, [](Locals inputs) {
    const at::Tensor& local = inputs[0].local_tensor();
    return std::vector<at::Tensor>{local.min(), local.max()};
  });
}

TEST(OpResultsTest, EachResultHasItsPlacement) {
  run_local(4, [](const ProcessGroup& group) {
    const at::Tensor full = indexed({4, 8});
    for (const Sizes& shape : {Sizes{4}, Sizes{2, 2}}) {
      const DeviceMesh mesh(group, shape);
      for (const Placements& placements : cross({R, S0, S1, P}, shape.size())) {
        const std::vector<DTensor> both = least_and_greatest(on_mesh(full, mesh, placements));
        ASSERT_EQ(both.size(), 2u);
        for (std::size_t m = 0; m < shape.size(); ++m) {
          EXPECT_EQ(both[0].placements()[m], placements[m].is_shard() ? kLeast : R);
          EXPECT_EQ(both[1].placements()[m], placements[m].is_shard() ? kGreatest : R);
        }
        EXPECT_EQ(both[0].full_tensor().item<double>(), 1);
        EXPECT_EQ(both[1].full_tensor().item<double>(), 32);
      }
    }
  });
}

TEST(OpResultsTest, OtherResultsThanTheRuleHasAreRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor x = on_mesh(indexed({4}), mesh, {S0});
    const auto of = [&](std::size_t results, const OpRule& rule, const DTensor& input) {
      return call_with_results(
          "of_many", {&input, 1}, [&](Locals) { return rule; },
          [&](Locals inputs) { return std::vector<at::Tensor>(results, inputs[0].local_tensor()); });
    };
    OpRule rule{{4}, {{{R}, R}, {{S0}, S0}}};
    rule.more_output_sizes = {{4}};
    EXPECT_EQ(of(2, rule, x)[1].placements(), Placements{S0});  // as the first
    EXPECT_ERROR(of(1, rule, x), ErrorCode::invalid_argument, "1 results, expected 2 as its placement rule has");
    EXPECT_ERROR(of(3, rule, x), ErrorCode::invalid_argument, "3 results, expected 2");
    rule.strategies[1].more_outputs = {S0, S0};
    EXPECT_ERROR(
        of(2, rule, x), ErrorCode::invalid_argument,
        "placement rule of of_many: a strategy has placements [S(0), S(0)] of further results, expected one for "
        "each of 1");
    rule.strategies[1].more_outputs = {P};
    rule.more_output_sizes = {{2}};
    EXPECT_EQ(of(2, rule, x)[1].placements(), Placements{P});
    EXPECT_ERROR(
        of(2, rule, x.detach().requires_grad_()), ErrorCode::invalid_argument,
        "an input requires grad, and its results are placed as [S(0)] and [P(sum)], expected the same or shards");
    // A registered rule takes the further sizes of the op's own.
    group.barrier();
    if (group.rank() == 0) register_placement_rule("least_and_greatest", [](Locals) { return OpRule{{}, {{{R}, R}}}; });
    group.barrier();
    EXPECT_EQ(least_and_greatest(x)[1].placements(), Placements{R});
    group.barrier();
    if (group.rank() == 0) register_placement_rule("least_and_greatest", nullptr);
    group.barrier();
    EXPECT_EQ(least_and_greatest(x)[1].placements(), Placements{kGreatest});
  });
}

TEST(OpResultsTest, AnOpMayHaveNoResult) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::of_ranks(group, {2}, {0, 2});
    const PlacementRule rule = [](Locals) { return OpRule{{}, {{{R}, R}, {{S0}, R}}}; };
    const auto size_seen = [&](const DTensor& x) {
      Sizes seen;
      call_without_result("look", {&x, 1}, rule, [&](Locals inputs) { seen = inputs[0].local_tensor().sizes().vec(); });
      return seen;
    };
    const at::Tensor full = indexed({4, 6});
    const Sizes none;
    const bool is_in = mesh.has_this_rank();
    EXPECT_EQ(size_seen(distribute_tensor(full, mesh, {S0}).requires_grad_()), is_in ? Sizes({2, 6}) : none);
    EXPECT_EQ(size_seen(distribute_tensor(full, mesh, {S1}).requires_grad_()), is_in ? Sizes({4, 6}) : none);
    const DTensor x = distribute_tensor(full, mesh, {S0});
    const auto fails = [&] {
      call_without_result("look", {&x, 1}, rule, [](Locals inputs) { inputs[0].local_tensor().select(0, 9); });
    };
    if (is_in) {
      EXPECT_ERROR(fails(), ErrorCode::invalid_argument, "look(DTensor of size [4, 6] as [S(0)]");
    }
  });
}

}  // namespace
}  // namespace tessera

#include "tessera/tensor/dtensor/rule_check.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/chaos.h"
#include "support/error_matchers.h"
#include "tensor/case_function.h"
#include "tensor/dtensor_ops/op_cases.h"
#include "tensor/mesh_support.h"
#include "tensor/strategies/local_values.h"
#include "tessera/comm/functional.h"
#include "tessera/tensor/dtensor/op_calls.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera {
namespace {

using testing::CaseFunction;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::indexed;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::Not;
using testing::OpCase;
using testing::P;
using testing::R;
using testing::S0;
using testing::S1;
using testing::SampleIfSanitized;
using testing::Sizes;
using testing::stride_if_sanitized;
using ::testing::UnorderedElementsAreArray;

using Operands = std::vector<DTensor>;
using Results = std::vector<at::Tensor>;

// Returns "add: S(0), S(0) -> S(0)", without strategies with strided shards.
std::vector<std::string> lines_of(const std::vector<RuleCheck::Finding>& findings) {
  std::vector<std::string> lines;
  for (const RuleCheck::Finding& finding : findings) {
    const std::string strategy = to_string(finding.strategy);
    if (strategy.find("_S") == std::string::npos) lines.push_back(finding.op + ": " + strategy);
  }
  return lines;
}

at::Tensor mixed_signs(const Sizes& size, double shift = 0) { return at::sin(indexed(size) * 1.7 + shift) * 3; }

// An op of this rule, which computes `f` on local tensors.
template <typename F>
auto own_op(const std::string& name, const std::vector<OpStrategy>& strategies, const F& f) {
  return [=](const Operands& inputs) {
    Results full;
    for (const DTensor& input : inputs) full.push_back(at::empty(input.size(), input.local_tensor().options()));
    const Sizes size = f(full).sizes().vec();
    call(
        name, inputs,
        [&](std::span<const DTensor>) {
          return OpRule{size, strategies, true};
        },
        [&](std::span<const DTensor> placed) {
          Results locals;
          for (const DTensor& each : placed) locals.push_back(each.local_tensor());
          return f(locals);
        });
  };
}

// PyTorch: test_exhaustive_binary_op_rules, with averages, minima and products.
TEST(RuleCheckTest, AllStrategiesOfABinaryOpAreFound) {
  struct Case {
    std::string name;
    CaseFunction<DTensor(const DTensor&, const DTensor&)> ours;
    std::vector<std::string> right;
  };
  const std::vector<std::string> shards = {"S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)"};
  for (const auto& [name, ours, partial] :
       {Case{"add",
             [](const DTensor&a, const DTensor&b) { return dtensor::add(a, b); },
             {"P(sum), P(sum) -> P(sum)", "P(avg), P(avg) -> P(avg)", "P(avg), R -> P(avg)", "R, P(avg) -> P(avg)",
              "P(max), R -> P(max)", "R, P(max) -> P(max)", "P(min), R -> P(min)", "R, P(min) -> P(min)"}},
        Case{"sub",
             [](const DTensor&a, const DTensor&b) { return dtensor::sub(a, b); },
             {"P(sum), P(sum) -> P(sum)", "P(avg), P(avg) -> P(avg)", "P(avg), R -> P(avg)", "R, P(avg) -> P(avg)",
              "P(max), R -> P(max)", "R, P(max) -> P(min)", "P(min), R -> P(min)", "R, P(min) -> P(max)"}},
        Case{"mul",
             [](const DTensor&a, const DTensor&b) { return dtensor::mul(a, b); },
             {"P(sum), R -> P(sum)", "R, P(sum) -> P(sum)", "P(avg), R -> P(avg)", "R, P(avg) -> P(avg)",
              "P(product), P(product) -> P(product)"}},
        Case{"div",
             [](const DTensor&a, const DTensor&b) { return dtensor::div(a, b); },
             {"P(sum), R -> P(sum)", "P(avg), R -> P(avg)", "P(product), P(product) -> P(product)"}},
        Case{"maximum",
             [](const DTensor&a, const DTensor&b) { return dtensor::maximum(a, b); },
             {"P(max), P(max) -> P(max)", "P(max), R -> P(max)", "R, P(max) -> P(max)", "P(min), R -> P(min)",
              "R, P(min) -> P(min)"}}}) {
    const RuleCheck check =
        check_placement_rules({mixed_signs({8, 4}), mixed_signs({8, 4}, 2)},
                              [&ours = ours](const Operands& inputs) { ours(inputs[0], inputs[1]); });
    std::vector<std::string> expected;
    for (const std::string& strategy : shards) expected.push_back(name + ": " + strategy);
    for (const std::string& strategy : partial) expected.push_back(name + ": " + strategy);
    EXPECT_THAT(lines_of(check.right), UnorderedElementsAreArray(expected)) << name;
    EXPECT_THAT(lines_of(check.wrong), IsEmpty()) << to_string(check);
    for (const std::string& line : lines_of(check.missing))  // the others of `right` are listed or cost nothing
      EXPECT_EQ(line, name + ": P(product), P(product) -> P(product)");
    EXPECT_THAT(check.skipped, IsEmpty());
  }
}

TEST(RuleCheckTest, AWrongStrategyIsReported) {
  const auto abs =
      own_op("my_abs", {{{R}, R}, {{S0}, S0}, {{S1}, S0}, {{P}, P}}, [](const Results& x) { return x[0].abs(); });
  const RuleCheck check = check_placement_rules({mixed_signs({4, 6})}, abs);
  EXPECT_THAT(lines_of(check.right), IsSupersetOf({"my_abs: S(0) -> S(0)", "my_abs: S(1) -> S(1)"}));
  ASSERT_THAT(lines_of(check.wrong), ElementsAre("my_abs: S(1) -> S(0)", "my_abs: P(sum) -> P(sum)"));
  EXPECT_THAT(check.wrong[0].problem, HasSubstr("a local result has size [4, 3], expected [2, 6]"));
  EXPECT_THAT(check.wrong[1].problem, HasSubstr("the result differs by"));
  EXPECT_THAT(lines_of(check.missing), ElementsAre("my_abs: S(1) -> S(1)", "my_abs: P(product) -> P(product)"));
  EXPECT_THAT(to_string(check), HasSubstr("my_abs: P(sum) -> P(sum) is wrong: the result differs by"));
  EXPECT_THAT(to_string(check), HasSubstr("my_abs: S(1) -> S(1) is missing"));
  // Averages of magnitudes, products of sums, and maxima of partial maxima.
  const auto wrong_of = [](const std::vector<OpStrategy>& strategies, const auto& f, std::size_t inputs) {
    RuleCheckOptions options;
    options.finds_missing = false;
    const std::vector<at::Tensor> all = {mixed_signs({4, 6}), mixed_signs({4, 6}, 1)};
    return check_placement_rules({all.begin(), all.begin() + static_cast<std::ptrdiff_t>(inputs)},
                                 own_op("own", strategies, f), options)
        .wrong.size();
  };
  const Placement max = Placement::partial(ReduceOp::max), average = Placement::partial(ReduceOp::average);
  EXPECT_EQ(wrong_of(
                {{{R}, R}, {{average}, average}}, [](const Results& x) { return x[0].abs(); }, 1),
            1u);
  EXPECT_EQ(wrong_of(
                {{{R, R}, R}, {{P, P}, P}}, [](const Results& x) { return x[0] * x[1]; }, 2),
            1u);
  EXPECT_EQ(wrong_of(
                {{{R, R}, R}, {{max, max}, max}}, [](const Results& x) { return x[0] + x[1]; }, 2),
            1u);
  EXPECT_EQ(wrong_of(
                {{{R, R}, R}, {{max, R}, max}}, [](const Results& x) { return x[0] * x[1]; }, 2),
            1u);
  EXPECT_EQ(wrong_of(
                {{{R}, R}, {{max}, max}, {{max}, R}}, [](const Results& x) { return x[0].argmin(1); }, 1),
            2u);
  EXPECT_EQ(wrong_of(
                {{{R, R}, R}, {{S0, R}, S0}}, [](const Results& x) { return x[0] + x[1]; }, 2),
            1u);
  // A product with positive numbers alone keeps maxima: the signs are tried both ways.
  const RuleCheck positive = check_placement_rules(
      {indexed({4, 2}), indexed({4, 2})},
      own_op("scale", {{{R, R}, R}, {{max, R}, max}}, [](const Results& x) { return x[0] * x[1]; }));
  EXPECT_THAT(lines_of(positive.wrong), ElementsAre("scale: P(max), R -> P(max)"));
}

TEST(RuleCheckTest, MissingStrategiesAreThoseThatNoOtherCovers) {
  const Placement max = Placement::partial(ReduceOp::max), min = Placement::partial(ReduceOp::min),
                  average = Placement::partial(ReduceOp::average);
  const auto neg = [](const Results& x) { return -x[0]; };
  EXPECT_THAT(lines_of(check_placement_rules({mixed_signs({4})}, own_op("my_neg", {{{R}, R}}, neg)).missing),
              ElementsAre("my_neg: S(0) -> S(0)", "my_neg: P(sum) -> P(sum)", "my_neg: P(avg) -> P(avg)",
                          "my_neg: P(min) -> P(max)", "my_neg: P(max) -> P(min)"));
  const std::vector<OpStrategy> all = {{{R}, R},     {{S0}, S0},  {{P}, P}, {{average}, average},
                                       {{min}, max}, {{max}, min}};
  EXPECT_THAT(lines_of(check_placement_rules({mixed_signs({4})}, own_op("my_neg", all, neg)).missing), IsEmpty());
  // Replicated inputs become averages without communication.
  EXPECT_THAT(lines_of(check_placement_rules(
                           {mixed_signs({4}), mixed_signs({4}, 1)},
                           own_op("my_add", {{{R, R}, R}, {{S0, S0}, S0}, {{P, P}, P}, {{average, average}, average}},
                                  [](const Results& x) { return x[0] + x[1]; }))
                           .missing),
              ElementsAre("my_add: P(min), R -> P(min)", "my_add: P(max), R -> P(max)", "my_add: R, P(min) -> P(min)",
                          "my_add: R, P(max) -> P(max)"));
  // One rank has all of a dimension of length 1.
  EXPECT_THAT(lines_of(check_placement_rules(
                           {mixed_signs({1, 4, 1})},
                           own_op("my_abs", {{{R}, R}}, [](const Results& x) { return x[0].abs().squeeze(0); }))
                           .missing),
              ElementsAre("my_abs: S(1) -> S(0)", "my_abs: P(product) -> P(product)"));
}

TEST(RuleCheckTest, NotANumberEqualsItself) {
  const auto log = own_op("my_log", {{{R}, R}, {{S0}, S0}}, [](const Results& x) { return x[0].log(); });
  const RuleCheck check = check_placement_rules({-indexed({8})}, log);
  EXPECT_THAT(lines_of(check.right), Contains("my_log: S(0) -> S(0)"));
  EXPECT_THAT(check.wrong, IsEmpty()) << to_string(check);
  EXPECT_THAT(lines_of(check.right), Not(Contains("my_log: P(max) -> P(max)")));  // logarithms of negative parts
}

TEST(RuleCheckTest, IntegersAreSummedAndBoolsAreNot) {
  const at::Tensor numbers = at::tensor({5, -3, 2, 7, -1, 4}, at::kLong);
  const RuleCheck sum = check_placement_rules({numbers}, [](const Operands& inputs) { dtensor::sum(inputs[0]); });
  EXPECT_THAT(lines_of(sum.right), IsSupersetOf({"sum: S(0) -> P(sum)", "sum: P(sum) -> P(sum)"}));
  EXPECT_THAT(sum.wrong, IsEmpty()) << to_string(sum);
  const auto count_less = own_op("count_less", {{{R, R}, R}, {{R, S0}, P}}, [](const Results& x) {
    return x[0].unsqueeze(1).gt(x[1].unsqueeze(0)).sum(1);  // as bucketize
  });
  const RuleCheck counts = check_placement_rules({numbers, at::tensor({-2, 0, 3, 6}, at::kLong)}, count_less);
  EXPECT_THAT(lines_of(counts.right), IsSupersetOf({"count_less: R, S(0) -> P(sum)", "count_less: S(0), R -> S(0)"}));
  EXPECT_THAT(counts.wrong, IsEmpty()) << to_string(counts);
  const auto is_positive = own_op("is_positive", {{{R}, R}, {{S0}, P}}, [](const Results& x) { return x[0] > 0; });
  const RuleCheck bools = check_placement_rules({mixed_signs({4})}, is_positive);
  EXPECT_THAT(lines_of(bools.wrong), ElementsAre("is_positive: S(0) -> P(sum)"));
  for (const std::string& line : lines_of(bools.right)) EXPECT_THAT(line, Not(HasSubstr("-> P"))) << line;
}

TEST(RuleCheckTest, WhatCannotBeJudgedIsSkipped) {
  const std::vector<OpStrategy> any = {{{R}, R}, {{P}, P}};
  const auto skipped = [&](const at::Tensor& input, const auto& f) {
    return check_placement_rules({input}, own_op("own", any, f)).skipped;
  };
  EXPECT_THAT(skipped(mixed_signs({4}), [](const Results& x) { return at::zeros_like(x[0]); }),
              ElementsAre(HasSubstr("own: its result has no elements or only zeros")));
  EXPECT_THAT(skipped(at::ones({0, 3}), [](const Results& x) { return x[0] + 1; }),
              ElementsAre(HasSubstr("own: its result has no elements")));
  EXPECT_THAT(skipped(mixed_signs({40}), [](const Results& x) { return at::rand_like(x[0]); }),
              ElementsAre("own: it does not give the same result in every call"));
  const RuleCheck communicates = check_placement_rules({mixed_signs({4, 4})}, [](const Operands& inputs) {
    call(
        "total", inputs,
        [](std::span<const DTensor>) {
          return OpRule{{4}, {{{R}, R}, {{S0}, R}}};
        },
        [](std::span<const DTensor> placed) {
          const at::Tensor sum = placed[0].local_tensor().sum(0);
          const DeviceMesh& mesh = placed[0].device_mesh();
          return placed[0].placements()[0].is_shard() ? functional::all_reduce(mesh.group(), sum) : sum;
        });
  });
  EXPECT_THAT(communicates.wrong, IsEmpty()) << to_string(communicates);
  EXPECT_THAT(lines_of(communicates.right), ElementsAre("total: S(0) -> R"));
  EXPECT_THAT(communicates.skipped, ElementsAre("total: missing strategies are not looked for, since it communicates"));
  EXPECT_THAT(to_string(communicates), HasSubstr("skipped total: "));
  RuleCheckOptions few;
  few.most_combinations = 3;
  EXPECT_THAT(
      check_placement_rules({mixed_signs({4, 4})}, own_op("own", any, [](const Results& x) { return x[0] * 2; }), few)
          .skipped,
      ElementsAre(HasSubstr("too many combinations")));
}

TEST(RuleCheckTest, EachOpIsCheckedByItself) {
  const RuleCheck check = check_placement_rules({mixed_signs({4, 6})}, [](const Operands& inputs) {
    dtensor::split(dtensor::relu(inputs[0] * 2), 3, 1);
    dtensor::topk(inputs[0], 2, 1);
    DTensor x = dtensor::clone(inputs[0]);
    dtensor::add_(x, inputs[0]);
  });
  EXPECT_THAT(check.wrong, IsEmpty()) << to_string(check);
  EXPECT_THAT(lines_of(check.right),
              IsSupersetOf({"mul: S(0) -> S(0)", "relu: S(1) -> S(1)", "relu: P(max) -> P(max)", "topk: S(0) -> S(0)",
                            "add_: S(0), S(0) -> S(0)", "add_: P(sum), P(sum) -> P(sum)"}));
  // Of several results, each is compared.
  const auto both = [](const Operands& inputs) {
    OpRule rule{inputs[0].size(), {{{R}, R}, {{S0}, S0}, {{S1}, S1, std::nullopt, {S0}}}};
    rule.more_output_sizes = {rule.output_size};
    call_with_results(
        "two", inputs, [&](std::span<const DTensor>) { return rule; },
        [](std::span<const DTensor> x) {
          return Results{x[0].local_tensor() * 2, x[0].local_tensor().abs()};
        });
  };
  const RuleCheck two = check_placement_rules({mixed_signs({4, 6})}, both);
  ASSERT_THAT(lines_of(two.wrong), ElementsAre("two: S(1) -> S(1), S(0)"));
  EXPECT_THAT(two.wrong[0].problem, HasSubstr("result 1: a local result has size [4, 3]"));
  EXPECT_THAT(lines_of(two.missing), ElementsAre("two: S(1) -> S(1), S(1)"));
}

TEST(RuleCheckTest, MistakesAreErrors) {
  const auto nothing = [](const Operands&) {};
  EXPECT_ERROR(check_placement_rules({}, nothing), ErrorCode::invalid_argument,
               "0 inputs and 2 ranks, expected at least 1 input and at least 2 ranks");
  RuleCheckOptions alone;
  alone.ranks = 1;
  EXPECT_ERROR(check_placement_rules({at::ones({2})}, nothing, alone), ErrorCode::invalid_argument, "and 1 ranks");
  EXPECT_ERROR(check_placement_rules({at::ones({2, 3})}, [](const Operands& x) { dtensor::matmul(x[0], x[0]); }),
               ErrorCode::invalid_argument, "matmul of tensors of sizes [2, 3] and [2, 3]");
}

// Every op of the cases, in every call that it makes.
TEST(RuleCheckTest, NoBuiltInRuleHasAWrongStrategy) {
  std::vector<OpCase> ops;
  for (const auto& more : {testing::op_cases(), testing::more_op_cases(), testing::math_cases(), testing::index_cases(),
                           testing::rearranging_cases(), testing::spatial_cases()}) {
    ops.insert(ops.end(), more.begin(), more.end());
  }
  SampleIfSanitized sample(7);
  std::erase_if(ops, [&](const OpCase& /*op*/) { return !sample.takes_next(); });
  RuleCheckOptions options;
  options.finds_missing = false;
  const RuleCheck check = check_placement_rules(
      {at::ones({1})},
      [&](const Operands& one) {
        for (const OpCase& op : ops) {
          Operands inputs;
          for (const Sizes& size : op.sizes) {
            const at::Tensor full = at::sin(indexed(size).add(static_cast<double>(inputs.size()) * 7)).add(1.5);
            inputs.push_back(DTensor::from_local(full, one[0].device_mesh()));
          }
          op.ours(inputs);
        }
      },
      options);
  EXPECT_THAT(check.wrong, IsEmpty()) << to_string(check);
  EXPECT_GT(check.right.size(), 300 / stride_if_sanitized(5));
}

TEST(LocalValueTest, PartialValuesReduceToTheTensorAndDifferBetweenInputs) {
  const auto of_all = [](const at::Tensor& full, const Placement& placement, std::size_t input, std::int64_t ranks) {
    Results locals;
    for (std::int64_t rank = 0; rank < ranks; ++rank)
      locals.push_back(local_value(full, placement, ranks, rank, input));
    return locals;
  };
  const Tolerance tolerance{1e-9, 1e-9};
  for (const at::Tensor& full :
       {mixed_signs({4, 3}), mixed_signs({}), at::zeros({4, 3}), at::ones({3, 4}), at::tensor({5, -3, 2, 7}, at::kLong),
        at::tensor({5, -3}, at::kChar), at::complex(mixed_signs({3, 2}), mixed_signs({3, 2}, 1))}) {
    for (const Placement& placement : placements_to_try(full)) {
      for (const std::int64_t ranks : {2, 3}) {
        const Tolerance of_type = full.scalar_type() == at::kFloat ? Tolerance{1e-5, 1e-5} : tolerance;
        const auto found = difference(full, placement, of_all(full, placement, 0, ranks), of_type);
        EXPECT_FALSE(found) << placement << full << *found;
        if (!placement.is_partial()) continue;
        const Results first = of_all(full, placement, 0, ranks), second = of_all(full, placement, 1, ranks);
        EXPECT_FALSE(at::equal(first[0], first[1])) << placement << full;
        if (full.dim() > 0) {
          EXPECT_FALSE(at::equal(first[0], second[0])) << placement << full;
        }
      }
    }
  }
  // Along every dimension, the rank that has an extreme alternates; the others are in part out of the range of all
  // elements.
  const at::Tensor full = mixed_signs({4, 4});
  const at::Tensor local = local_value(full, Placement::partial(ReduceOp::max), 2, 0, 0), has = local.eq(full);
  EXPECT_TRUE(has.narrow(0, 0, 3).ne(has.narrow(0, 1, 3)).all().item<bool>());
  EXPECT_TRUE(has.narrow(1, 0, 3).ne(has.narrow(1, 1, 3)).all().item<bool>());
  const at::Tensor others = local.masked_select(has.logical_not());
  EXPECT_LT(others.min().item<double>(), full.min().item<double>());
  EXPECT_GT(others.max().item<double>(), full.min().item<double>());
  // Summands have other signs than the tensor.
  const at::Tensor summand = local_value(full, P, 2, 0, 0);
  EXPECT_TRUE(summand.sign().ne(full.sign()).any().item<bool>());
}

TEST(LocalValueTest, PlacementsAreThoseThatATensorCanHave) {
  const auto count = [](const at::Tensor& full) { return placements_to_try(full).size(); };
  EXPECT_EQ(placements_to_try(at::ones({4, 3}))[2], S1);
  EXPECT_EQ(count(at::ones({4, 3})), 3u + 5);
  EXPECT_EQ(count(at::ones({4, 3}, at::kLong)), 3u + 5);
  EXPECT_EQ(count(at::ones({})), 1u + 5);
  EXPECT_EQ(count(at::ones({}, at::kLong)), 1u + 5);
  EXPECT_EQ(count(at::ones({1, 4})), 2u + 5);
  EXPECT_EQ(count(at::ones({4, 3}, at::kBool)), 3u);
  EXPECT_EQ(count(at::ones({}, at::kBool)), 1u);
  EXPECT_EQ(count(at::ones({2}, at::kComplexDouble)), 2u + 3);
}

}  // namespace
}  // namespace tessera

#include "tessera/comm/comm_debug_mode.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/functional.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

TEST(CommDebugModeTest, CountsTheCollectivesOfThisRankByName) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor part = at::ones({2}), full = at::ones({4});
    const CommDebugMode outer(group);
    group.all_reduce(part);
    {
      const CommDebugMode mode(group);
      EXPECT_THAT(mode.counts(), IsEmpty());
      group.all_reduce(part);
      group.all_reduce(part);
      group.start_all_gather_into(full, part).wait();
      group.reduce_scatter_into(part, full);
      group.broadcast(part, 0);
      EXPECT_THAT(mode.counts(), ElementsAre(Pair("all_gather_into", 1), Pair("all_reduce", 2), Pair("broadcast", 1),
                                             Pair("reduce_scatter_into", 1)));
      EXPECT_EQ(mode.total(), 5);
      EXPECT_EQ(mode.comparisons(), 4);  // start_* does not compare
      group.barrier();
      EXPECT_EQ(mode.total(), 5);
      EXPECT_EQ(mode.comparisons(), 5);
    }
    EXPECT_THAT(outer.counts(), ElementsAre(Pair("all_gather_into", 1), Pair("all_reduce", 3), Pair("broadcast", 1),
                                            Pair("reduce_scatter_into", 1)));
  });
}

TEST(CommDebugModeTest, CoversEveryGroupOfTheWorldAndTheBackwardPass) {
  run_local(3, [](const ProcessGroup& group) {
    const std::optional<ProcessGroup> two = group.subgroup(std::vector<int>{0, 1});
    const std::optional<ProcessGroup> first = group.subgroup(std::vector<int>{0});
    const CommDebugMode mode(group), of_alone(ProcessGroup{});
    if (two) {
      const CommDebugMode of_subgroup(*two);
      const at::Tensor x = at::ones({2}).requires_grad_();
      functional::reduce_scatter(*two, x).sum().backward();
      EXPECT_THAT(of_subgroup.counts(), ElementsAre(Pair("all_gather_into", 1), Pair("reduce_scatter_into", 1)));
      EXPECT_EQ(mode.counts(), of_subgroup.counts());
    } else {
      EXPECT_EQ(mode.total(), 0);
    }
    const std::int64_t before = mode.total();
    if (first) first->all_reduce(at::ones({2}));
    group.all_reduce(at::zeros({0}));
    EXPECT_EQ(mode.total(), before);  // neither communicates
    EXPECT_THAT(of_alone.counts(), IsEmpty());
    EXPECT_EQ(of_alone.comparisons(), 0);
  });
}

TEST(CommDebugModeTest, WhatConnectsTheRanksOfASubgroupIsNotCounted) {
  run_local(3, [](const ProcessGroup& group) {
    const CommDebugMode mode(group);
    group.subgroup(std::vector<int>{0, 1});
    EXPECT_THAT(mode.counts(), IsEmpty());
  });
}

TEST(CommDebugModeTest, SeveralTensorsAreSummedByOneCollective) {
  run_local(3, [](const ProcessGroup& group) {
    const at::Tensor a = at::ones({2, 3}).mul(group.rank() + 1).requires_grad_(), b = at::ones({}),
                     c = at::ones({6, 2}).t();
    const CommDebugMode mode(group);
    const std::vector<at::Tensor> sums = functional::all_reduce_coalesced(group, std::vector<at::Tensor>{a, b, c});
    EXPECT_THAT(mode.counts(), ElementsAre(Pair("all_reduce", 1)));
    ASSERT_EQ(sums.size(), 3u);
    EXPECT_TRUE(at::equal(sums[0], at::full({2, 3}, 6.0)));
    EXPECT_TRUE(at::equal(sums[1], at::full({}, 3.0)));
    EXPECT_TRUE(at::equal(sums[2], at::full({2, 6}, 3.0)));
    EXPECT_EQ(b.item<float>(), 1) << "the inputs stay as they are";
    (sums[0].sum() * 2).backward();
    EXPECT_TRUE(at::equal(a.grad(), at::full({2, 3}, 6.0)));
    EXPECT_TRUE(functional::all_reduce_coalesced(group, {}).empty());
  });
}

}  // namespace
}  // namespace tessera

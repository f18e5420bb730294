#include "tessera/layout/placements.h"

#include <gtest/gtest.h>

#include "layout/mesh_cases.h"
#include "support/error_matchers.h"
#include "tessera/layout/mesh_layout.h"

namespace tessera {
namespace {

using testing::P;
using testing::R;
using testing::S0;
using testing::S1;

const std::vector<ReduceOp> kKinds = {ReduceOp::sum, ReduceOp::average, ReduceOp::product, ReduceOp::min,
                                      ReduceOp::max};

TEST(PlacementTextTest, WhatIsPrintedIsRead) {
  EXPECT_EQ(parse_placement("R"), R);
  EXPECT_EQ(parse_placement("S(0)"), S0);
  EXPECT_EQ(parse_placement(" S(2) "), Placement::shard(2));
  EXPECT_EQ(parse_placement("S(-1)"), Placement::shard(-1));
  EXPECT_EQ(parse_placement("_S(1, 2)"), Placement::strided_shard(1, 2));
  EXPECT_EQ(parse_placement("_S(1,2)"), Placement::strided_shard(1, 2));
  Placements all = {R, S0, S1, Placement::shard(-3), Placement::strided_shard(0, 2)};
  for (const ReduceOp op : kKinds) {
    EXPECT_EQ(parse_placement(to_string(Placement::partial(op))), Placement::partial(op));
    all.push_back(Placement::partial(op));
    EXPECT_EQ(parse_placements(to_string(all)), all);
  }
  EXPECT_EQ(parse_placements("S(0), _S(1, 2),R"), (Placements{S0, Placement::strided_shard(1, 2), R}));
  EXPECT_EQ(parse_placements(" [ ] "), Placements{});
  EXPECT_EQ(parse_placements(""), Placements{});
}

TEST(PlacementTextTest, OtherTextIsRefused) {
  for (const char* text : {"", "r", "R()", "S", "S()", "S(", "S(a)", "S(1", "S(1) x", "S(99999999999999999999)", "P",
                           "P()", "P(mean)", "_S(1)", "_S(1, 0)", "_S(1, 2, 3)", "_S(, 2)", "S(0)R"}) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, text);
    EXPECT_ERROR(parse_placement(text), ErrorCode::invalid_argument,
                 "expected R, S(dim), _S(dim, factor) or P(sum|avg|product|min|max)");
  }
  for (const char* text : {"R,", "[R,]", ",R", "R;R", "R R"}) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, text);
    EXPECT_ERROR(parse_placements(text), ErrorCode::invalid_argument, "placement \"");
  }
  for (const char* text : {"[R", "R]", "["}) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, text);
    EXPECT_ERROR(parse_placements(text), ErrorCode::invalid_argument, "expected both brackets");
  }
}

TEST(MixedPartialsTest, OnlySumsAndAveragesCommute) {
  for (const ReduceOp a : kKinds) {
    for (const ReduceOp b : kKinds) {
      const auto adds = [](ReduceOp op) { return op == ReduceOp::sum || op == ReduceOp::average; };
      const bool commute = a == b || (adds(a) && adds(b));
      const Placements both = {Placement::partial(a), S0, Placement::partial(b)};
      EXPECT_EQ(mixes_partials(both), !commute) << to_string(both);
      if (commute) {
        EXPECT_EQ(MeshLayout({4, 4}, {2, 2, 2}, both).placements(), both);
      } else {
        EXPECT_ERROR(MeshLayout({4, 4}, {2, 2, 2}, both), ErrorCode::invalid_argument,
                     to_string(both) + " on a mesh of shape [2, 2, 2]: partial tensors of several kinds");
      }
    }
  }
  EXPECT_FALSE(mixes_partials(Placements{R, S0, P}));
  EXPECT_FALSE(mixes_partials(Placements{}));
}

}  // namespace
}  // namespace tessera

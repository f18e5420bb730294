#include "tessera/layout/mesh_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "layout/mesh_cases.h"
#include "support/error_matchers.h"
#include "support/paths.h"

namespace tessera {
namespace {

using testing::each_index;
using testing::Sizes;

// PyTorch's results: see tests/golden/dtensor/generate.py.
const nlohmann::json& golden(const char* name) {
  static const nlohmann::json cases = [] {
    std::ifstream in(std::filesystem::path(tessera::testing::source_dir()) / "tests" / "golden" / "dtensor" /
                     "cases.json");
    return nlohmann::json::parse(in);
  }();
  return cases.at(name);
}

Placements placements_of(const nlohmann::json& items) {
  Placements placements;
  for (const nlohmann::json& item : items) {
    const auto kind = item[0].get<std::string>();
    if (kind == "R") placements.push_back(Placement::replicate());
    if (kind == "S") placements.push_back(Placement::shard(item[1]));
    if (kind == "_S") placements.push_back(Placement::strided_shard(item[1], item[2]));
    if (kind == "P") placements.push_back(Placement::partial(item[1] == "max" ? ReduceOp::max : ReduceOp::sum));
  }
  return placements;
}

TEST(MeshLayoutTest, LocalShapesAreThoseOfPyTorch) {
  for (const nlohmann::json& item : golden("layouts")) {
    const auto mesh_shape = item[1].get<Sizes>();
    const Placements placements = placements_of(item[2]);
    if (mixes_partials(placements)) continue;  // later versions refuse them, too
    for (std::int64_t i = 0; i < mesh_size(mesh_shape); ++i) {
      const LocalShape found = compute_local_shape_and_global_offset(item[0].get<Sizes>(), mesh_shape,
                                                                     mesh_coordinate(mesh_shape, i), placements);
      const nlohmann::json& expected = item[3][static_cast<std::size_t>(i)];
      EXPECT_EQ(found.sizes, expected[0].get<Sizes>()) << item.dump() << " rank " << i;
      EXPECT_EQ(found.offsets, expected[1].get<Sizes>()) << item.dump() << " rank " << i;
    }
  }
}

TEST(MeshLayoutTest, StridedShardsHaveTheElementsThatPyTorchGivesThem) {
  for (const nlohmann::json& item : golden("strided")) {
    const MeshLayout layout({item[0].get<std::int64_t>()}, item[1].get<Sizes>(), placements_of(item[2]));
    for (std::int64_t i = 0; i < mesh_size(layout.mesh_shape()); ++i) {
      Sizes indices;
      for (const Interval& interval : layout.local_intervals(0, mesh_coordinate(layout.mesh_shape(), i))) {
        for (std::int64_t x = interval.begin; x < interval.end; ++x) indices.push_back(x);
      }
      EXPECT_EQ(indices, item[3][static_cast<std::size_t>(i)].get<Sizes>()) << item.dump() << " rank " << i;
    }
  }
}

rc::Gen<MeshLayout> layouts() {
  return rc::gen::exec([] {
    const auto size = *rc::gen::resize(3, rc::gen::nonEmpty(rc::gen::container<Sizes>(rc::gen::inRange(0, 9))));
    const auto mesh_shape = *rc::gen::resize(3, rc::gen::nonEmpty(rc::gen::container<Sizes>(rc::gen::inRange(1, 4))));
    Placements placements;
    for (std::size_t m = 0; m < mesh_shape.size(); ++m) {
      const auto dim = *rc::gen::inRange<std::int64_t>(0, static_cast<std::int64_t>(size.size()));
      placements.push_back(*rc::gen::element(Placement::replicate(), Placement::partial(), Placement::shard(dim),
                                             Placement::strided_shard(dim, *rc::gen::inRange(1, 4))));
    }
    return MeshLayout(size, mesh_shape, placements);
  });
}

RC_GTEST_PROP(MeshLayoutTest, ShardsPartitionTheTensorForEachReplica, ()) {
  const MeshLayout layout = *layouts();
  std::map<Sizes, std::multiset<Sizes>> elements;  // by the coordinate in dimensions that do not shard
  for (std::int64_t i = 0; i < mesh_size(layout.mesh_shape()); ++i) {
    const Sizes coordinate = mesh_coordinate(layout.mesh_shape(), i);
    RC_ASSERT(mesh_index(layout.mesh_shape(), coordinate) == i);
    Sizes replica;
    for (std::size_t m = 0; m < coordinate.size(); ++m) {
      if (!layout.placements()[m].is_shard()) replica.push_back(coordinate[m]);
    }
    for (const LocalBox& box : layout.local_boxes(coordinate)) {
      each_index(box.box, [&](const Sizes& index) { elements[replica].insert(index); });
    }
  }
  std::multiset<Sizes> all;
  each_index(Box::full(layout.size()), [&](const Sizes& index) { all.insert(index); });
  for (const auto& [replica, found] : elements) RC_ASSERT(found == all);
}

RC_GTEST_PROP(MeshLayoutTest, BoxesPartitionTheLocalTensor, ()) {
  const MeshLayout layout = *layouts();
  for (std::int64_t i = 0; i < mesh_size(layout.mesh_shape()); ++i) {
    const Sizes coordinate = mesh_coordinate(layout.mesh_shape(), i);
    std::multiset<Sizes> found, expected;
    for (const LocalBox& box : layout.local_boxes(coordinate)) {
      RC_ASSERT(!is_empty(box.box));
      each_index({box.local_offsets, box.box.sizes}, [&](const Sizes& index) { found.insert(index); });
    }
    each_index(Box::full(layout.local_shape(coordinate).sizes), [&](const Sizes& index) { expected.insert(index); });
    RC_ASSERT(found == expected);
  }
}

TEST(MeshLayoutTest, AStridedShardIsALaterMeshDimensionThatCutsFirst) {
  // 8 rows: sharded by the second mesh dimension, then by the first.
  const MeshLayout layout({8}, {2, 2}, {Placement::strided_shard(0, 2), Placement::shard(0)});
  EXPECT_EQ(layout.local_shape(Sizes{0, 1}), (LocalShape{{2}, {4}}));
  EXPECT_EQ(layout.local_shape(Sizes{1, 0}), (LocalShape{{2}, {2}}));
  const MeshLayout before({8}, {2, 2}, {Placement::strided_shard(0, 2), Placement::replicate()});
  EXPECT_EQ(before.local_intervals(0, Sizes{1, 0}), (std::vector<Interval>{{2, 4}, {6, 8}}));
}

TEST(MeshLayoutTest, ScalarsAndDimensionsFromTheEnd) {
  const MeshLayout scalar({}, {2}, {Placement::replicate()});
  EXPECT_EQ(scalar.local_shape(Sizes{1}), LocalShape());
  EXPECT_EQ(scalar.local_boxes(Sizes{1}).size(), 1u);
  const MeshLayout columns({4, 6}, {2}, {Placement::shard(-1)});
  EXPECT_EQ(columns.placements(), Placements{Placement::shard(1)});
  EXPECT_EQ(columns.local_shape(Sizes{1}), (LocalShape{{4, 3}, {0, 3}}));
}

TEST(MeshLayoutTest, WhatCantBePlacedIsRefused) {
  EXPECT_ERROR(MeshLayout({4}, {2}, {Placement::shard(1)}), ErrorCode::invalid_argument,
               "placement S(1) of a tensor of 1 dimensions");
  EXPECT_ERROR(MeshLayout({4}, {2}, {Placement::shard(-2)}), ErrorCode::invalid_argument, "placement S(-2)");
  EXPECT_ERROR(MeshLayout({4}, {2, 2}, {Placement::shard(0)}), ErrorCode::invalid_argument,
               "placements [S(0)] on a mesh of shape [2, 2]: expected one for each of its 2 dimensions");
  EXPECT_ERROR(MeshLayout({4}, {0}, {Placement::shard(0)}), ErrorCode::invalid_argument, "mesh of shape [0]");
  EXPECT_ERROR(MeshLayout({-1}, {2}, {Placement::shard(0)}), ErrorCode::invalid_argument, "shape [-1]");
  EXPECT_ERROR(Placement::strided_shard(0, 0), ErrorCode::invalid_argument, "split factor 0");
}

TEST(PlacementTest, IsOfOneKind) {
  const Placement shard = Placement::shard(3), strided = Placement::strided_shard(3, 7), partial = Placement::partial(),
                  replicate = Placement::replicate();
  for (const Placement& each : {shard, strided}) {
    EXPECT_TRUE(each.is_shard() && each.is_shard(3)) << each;
    EXPECT_FALSE(each.is_shard(2) || each.is_partial() || each.is_replicate()) << each;
  }
  EXPECT_TRUE(strided.is_strided());
  EXPECT_FALSE(shard.is_strided());
  EXPECT_TRUE(partial.is_partial());
  EXPECT_FALSE(partial.is_shard() || partial.is_shard(0) || partial.is_replicate() || partial.is_strided());
  EXPECT_TRUE(replicate.is_replicate());
  EXPECT_FALSE(replicate.is_shard() || replicate.is_shard(0) || replicate.is_partial() || replicate.is_strided());
}

TEST(MeshLayoutTest, ATensorIsShardableIfEachPartHasAnElement) {
  const Placement shard = Placement::shard(0), of_two = Placement::strided_shard(0, 2),
                  of_three = Placement::strided_shard(0, 3);
  EXPECT_TRUE(is_tensor_shardable({8}, {4}, {shard}));
  EXPECT_TRUE(is_tensor_shardable({10}, {4}, {shard}));
  EXPECT_FALSE(is_tensor_shardable({2}, {4}, {shard}));
  EXPECT_TRUE(is_tensor_shardable({8, 0}, {4, 2}, {shard, shard}));
  EXPECT_FALSE(is_tensor_shardable({7, 8}, {4, 2}, {shard, shard}));
  EXPECT_FALSE(is_tensor_shardable({8, 8}, {4, 2}, {shard, of_two}));
  EXPECT_TRUE(is_tensor_shardable({0}, {4}, {Placement::partial()}));
  EXPECT_TRUE(is_tensor_evenly_shardable({8}, {4}, {shard}));
  EXPECT_FALSE(is_tensor_evenly_shardable({10}, {4}, {shard}));
  EXPECT_TRUE(is_tensor_evenly_shardable({16, 7}, {4, 2}, {shard, shard}));
  EXPECT_FALSE(is_tensor_evenly_shardable({16, 8}, {4, 2}, {of_three, shard}));
  EXPECT_TRUE(is_tensor_evenly_shardable({6, 8}, {4, 2}, {Placement::shard(-1), shard}));
  EXPECT_ERROR(is_tensor_shardable({8}, {4}, {Placement::shard(1)}), ErrorCode::invalid_argument, "dimension");
}

TEST(PlacementTest, PrintsAsPyTorchDoes) {
  const Placements placements = {Placement::shard(0), Placement::strided_shard(1, 2), Placement::replicate(),
                                 Placement::partial(), Placement::partial(ReduceOp::average)};
  EXPECT_EQ(to_string(placements), "[S(0), _S(1, 2), R, P(sum), P(avg)]");
  EXPECT_NE(Placement::shard(0), Placement::strided_shard(0, 2));
  EXPECT_EQ(Placement::shard(0), Placement::strided_shard(0, 1));
}

}  // namespace
}  // namespace tessera

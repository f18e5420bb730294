#include "tessera/tensor/device_mesh.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

// Gathers the world ranks of a group.
std::vector<std::int64_t> members(const ProcessGroup& group) {
  const at::Tensor all = at::zeros({group.size()}, at::kLong);
  group.all_gather_into(all, at::full({1}, group.world_rank(), at::kLong));
  const auto* data = all.data_ptr<std::int64_t>();
  return {data, data + all.numel()};
}

TEST(DeviceMeshTest, AGroupHasTheRanksThatDifferInItsDimensionAlone) {
  run_local(8, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2, 2}, {"pp", "dp", "tp"});
    const std::int64_t r = group.rank();
    EXPECT_THAT(*mesh.coordinate(), ElementsAre(r / 4, r / 2 % 2, r % 2));
    EXPECT_THAT(members(mesh.group(0)), ElementsAre(r % 4, r % 4 + 4));
    EXPECT_THAT(members(mesh.group("dp")), ElementsAre(r - r / 2 % 2 * 2, r - r / 2 % 2 * 2 + 2));
    EXPECT_THAT(members(mesh.group("tp")), ElementsAre(r - r % 2, r - r % 2 + 1));
    EXPECT_EQ(mesh.group(), group);
    for (std::int64_t d = 0; d < 3; ++d) EXPECT_EQ(mesh.group(d).rank(), mesh.local_rank(d));
    EXPECT_EQ(mesh.size(), 8);
    EXPECT_EQ(mesh.size(1), 2);
    EXPECT_EQ(mesh.to_string(), "DeviceMesh(pp=2, dp=2, tp=2)");
  });
}

TEST(DeviceMeshTest, SubMeshesHaveTheGroupsOfTheirMesh) {
  run_local(8, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2, 2}, {"pp", "dp", "tp"});
    const DeviceMesh tp = mesh["tp"];
    EXPECT_EQ(tp.group(), mesh.group("tp"));
    EXPECT_EQ(tp.group(0), mesh.group(2));
    EXPECT_EQ(tp.ranks(), mesh.group("tp").world_ranks());
    const DeviceMesh outer = mesh.submesh({"pp", "tp"});
    EXPECT_THAT(outer.shape(), ElementsAre(2, 2));
    EXPECT_EQ(outer.group("pp"), mesh.group("pp"));
    EXPECT_EQ(outer.group(), mesh.submesh({"pp", "tp"}).group());
    const int dp = group.rank() / 2 % 2 * 2;
    EXPECT_THAT(members(outer.group()), ElementsAre(dp, dp + 1, dp + 4, dp + 5));
    EXPECT_THAT(*outer.coordinate(), ElementsAre(group.rank() / 4, group.rank() % 2));
    EXPECT_EQ(outer["tp"].group(), mesh.group("tp"));
    const DeviceMesh flat = mesh.submesh({"dp", "tp"}).flattened("dp_tp");
    EXPECT_EQ(flat.to_string(), "DeviceMesh(dp_tp=4)");
    EXPECT_EQ(flat.group(0), mesh.submesh({"dp", "tp"}).group());
    EXPECT_EQ(flat.local_rank(), group.rank() % 4);
    EXPECT_TRUE(outer == mesh.submesh({"pp", "tp"}));
    EXPECT_FALSE(tp == mesh["dp"]);
  });
}

TEST(DeviceMeshTest, RanksOutsideHaveNoCoordinate) {
  run_local(5, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::of_ranks(group, {2, 2}, {4, 1, 0, 3}, {"dp", "tp"});
    if (group.rank() == 2) {
      EXPECT_FALSE(mesh.has_this_rank());
      EXPECT_FALSE(mesh["tp"].has_this_rank());
      EXPECT_ERROR(mesh.group(0), ErrorCode::invalid_argument, "this rank is not in DeviceMesh(dp=2, tp=2)");
      EXPECT_ERROR(mesh.group(), ErrorCode::invalid_argument, "this rank is not in");
      return;
    }
    EXPECT_THAT(members(mesh.group()), ElementsAre(4, 1, 0, 3));
    if (group.rank() == 3) {
      EXPECT_THAT(members(mesh.group("tp")), ElementsAre(0, 3));
    } else if (group.rank() == 1) {
      EXPECT_THAT(members(mesh.group("tp")), ElementsAre(4, 1));
    } else if (group.rank() == 4) {
      EXPECT_THAT(members(mesh.group("tp")), ElementsAre(4, 1));
    } else {
      EXPECT_THAT(members(mesh.group("tp")), ElementsAre(0, 3));
    }
  });
}

TEST(DeviceMeshTest, ThisProcessAlone) {
  const DeviceMesh mesh;
  EXPECT_THAT(mesh.shape(), ElementsAre(1));
  EXPECT_THAT(*mesh.coordinate(), ElementsAre(0));
  EXPECT_EQ(mesh.group().size(), 1);
  EXPECT_EQ(mesh, DeviceMesh());
}

TEST(DeviceMeshTest, WhatIsNoMeshIsRefusedOnAllRanks) {
  run_local(4, [](const ProcessGroup& group) {
    EXPECT_ERROR(DeviceMesh(group, {3}), ErrorCode::invalid_argument, "device mesh of shape [3]: 4 ranks, expected 3");
    EXPECT_ERROR(DeviceMesh::of_ranks(group, {2}, {0, 0}), ErrorCode::invalid_argument,
                 "expected ranks of 0 to 3, each once");
    EXPECT_ERROR(DeviceMesh::of_ranks(group, {2}, {0, 4}), ErrorCode::invalid_argument,
                 "expected ranks of 0 to 3, each once");
    EXPECT_ERROR(DeviceMesh(group, {2, 2}, {"a"}), ErrorCode::invalid_argument,
                 "named [a], expected a distinct name for each");
    EXPECT_ERROR(DeviceMesh(group, {2, 2}, {"a", "a"}), ErrorCode::invalid_argument, "named [a, a]");
    EXPECT_ERROR(DeviceMesh(group, {0, 2}), ErrorCode::invalid_argument, "at least 1 in each dimension");
    // Invalid on one rank only.
    EXPECT_ERROR(DeviceMesh(group, {group.rank() == 1 ? 3 : 4}), ErrorCode::invalid_argument, "rank 1");
    const DeviceMesh mesh(group, {2, 2}, {"dp", "tp"});
    EXPECT_ERROR(mesh["pp"], ErrorCode::invalid_argument, "DeviceMesh(dp=2, tp=2) has no dimension 'pp'");
    EXPECT_ERROR(mesh.submesh({"tp", "dp"}), ErrorCode::invalid_argument, "in the order of the mesh");
    EXPECT_ERROR(mesh.submesh({"tp", "tp"}), ErrorCode::invalid_argument, "each dimension once");
    EXPECT_ERROR(mesh.group(2), ErrorCode::invalid_argument, "has no dimension 2: expected 0 to 1");
  });
}

}  // namespace
}  // namespace tessera

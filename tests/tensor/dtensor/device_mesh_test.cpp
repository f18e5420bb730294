#include "tessera/tensor/device_mesh.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

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

TEST(DeviceMeshTest, FromOneGroupUsesTheGroup) {
  run_local(4, [](const ProcessGroup& world) {
    std::optional<ProcessGroup> group;
    for (const std::vector<int>& each : {std::vector{2, 0}, std::vector{3, 1}}) {
      if (std::optional<ProcessGroup> mine = world.subgroup(each)) group = mine;
    }
    const DeviceMesh mesh = DeviceMesh::from_group(*group, {"tp"});
    EXPECT_EQ(mesh.group(), *group);
    EXPECT_EQ(mesh.group("tp"), *group);
    EXPECT_EQ(mesh.local_rank(), world.rank() < 2 ? 1 : 0);
    EXPECT_EQ(mesh.to_string(), "DeviceMesh(tp=2)");
    EXPECT_TRUE(mesh == DeviceMesh(*group, {2}, {"tp"}));
    EXPECT_TRUE(DeviceMesh::from_group(*group).dim_names().empty());
    EXPECT_ERROR(DeviceMesh::from_group(*group, {"a", "b"}), ErrorCode::invalid_argument, "named [a, b]");
  });
}

TEST(DeviceMeshTest, FromGroupsUsesTheGroups) {
  run_local(7, [](const ProcessGroup& world) {
    const std::vector<int> ranks = {5, 0, 2, 1, 6, 4};  // without 3
    const DeviceMesh made = DeviceMesh::of_ranks(world, {2, 3}, ranks, {"dp", "tp"});
    const std::vector<ProcessGroup> groups =
        made.has_this_rank() ? std::vector<ProcessGroup>{made.group(0), made.group(1)} : std::vector<ProcessGroup>{};
    const DeviceMesh mesh = DeviceMesh::from_groups(world, groups, {2, 3}, ranks, {"dp", "tp"});
    EXPECT_EQ(mesh.has_this_rank(), world.rank() != 3);
    EXPECT_TRUE(mesh == made);
    EXPECT_EQ(mesh.ranks(), ranks);
    const DeviceMesh flat = mesh.flattened("all");
    if (!mesh.has_this_rank()) return;
    EXPECT_EQ(mesh.coordinate(), made.coordinate());
    EXPECT_EQ(mesh.group("dp"), groups[0]);
    EXPECT_EQ(mesh["tp"].group(), groups[1]);
    EXPECT_THAT(members(mesh.group()), ElementsAre(5, 0, 2, 1, 6, 4));
    EXPECT_EQ(flat.group(), mesh.group());
  });
}

TEST(DeviceMeshTest, FromGroupsOfAllRanksMakesNoGroup) {
  run_local(4, [](const ProcessGroup& world) {
    const DeviceMesh made(world, {2, 2}, {"dp", "tp"});
    const DeviceMesh mesh =
        DeviceMesh::from_groups(world, {made.group(0), made.group(1)}, {2, 2}, {0, 1, 2, 3}, {"dp", "tp"});
    EXPECT_EQ(mesh.group(), world);
    const ProcessGroup all = *world.subgroup(std::vector{0, 1, 2, 3});
    EXPECT_EQ(all.name(), "world/4");  // after two rows and two columns
    EXPECT_EQ(DeviceMesh::from_groups(world, {all}, {4}, {0, 1, 2, 3}, {"dp"}).group(), all);
  });
}

TEST(DeviceMeshTest, WhatAreNoGroupsOfAMeshIsRefusedOnAllRanks) {
  run_local(4, [](const ProcessGroup& world) {
    const DeviceMesh made(world, {2, 2}, {"dp", "tp"});
    const std::vector<ProcessGroup> groups = {made.group(0), made.group(1)};
    const auto refuse = [&](const std::vector<ProcessGroup>& given, const std::vector<int>& ranks,
                            const std::string& what) {
      EXPECT_ERROR(DeviceMesh::from_groups(world, given, {2, 2}, ranks, {"dp", "tp"}), ErrorCode::invalid_argument,
                   "make a device mesh from groups", what);
    };
    const std::vector<int> all = {0, 1, 2, 3};
    const bool is_wrong = world.rank() == 2;
    refuse(is_wrong ? std::vector<ProcessGroup>{groups[0]} : groups, all,
           "rank 2: 1 groups on rank 2, expected 2, one for each dimension of [2, 2]");
    refuse(is_wrong ? std::vector<ProcessGroup>{groups[1], groups[0]} : groups, all,
           "the group of rank 2 along dimension 0 ('dp') has the world ranks [2, 3], expected [0, 2] as in the mesh");
    refuse(groups, {1, 0, 3, 2}, "along dimension 1 ('tp') has the world ranks [0, 1], expected [1, 0]");
    EXPECT_ERROR(DeviceMesh::from_groups(world, groups, {2, 2}, all, {}), ErrorCode::invalid_argument,
                 "no names, expected one for each dimension");
    EXPECT_ERROR(DeviceMesh::from_groups(world, {groups[0]}, {2}, {0, 2}, {"dp"}), ErrorCode::invalid_argument,
                 "1 groups on rank 1, expected none outside of the mesh");
    // Another group of the same ranks, on one of the two.
    const DeviceMesh other(world, {2, 2}, {"dp", "tp"});
    refuse({groups[0], is_wrong ? other.group(1) : groups[1]}, all,
           "along dimension 1 ('tp'), rank 2 has the group world/");
    refuse({groups[0], world.rank() == 3 ? other.group(1) : groups[1]}, all, "and rank 3 has");
    EXPECT_TRUE(DeviceMesh::from_groups(world, groups, {2, 2}, all, {"dp", "tp"}) == made);
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
    EXPECT_ERROR(mesh.flattened(""), ErrorCode::invalid_argument,
                 "flattened DeviceMesh(dp=2, tp=2): its dimension is named '', expected a name");
    EXPECT_ERROR(mesh.group(2), ErrorCode::invalid_argument, "has no dimension 2: expected 0 to 1");
    EXPECT_EQ(mesh.find_group(std::vector<std::int64_t>{1}), &mesh.group(1));
    EXPECT_ERROR(mesh.find_group(std::vector<std::int64_t>{0, 2}), ErrorCode::invalid_argument,
                 "has no dimension 2: expected 0 to 1");
    EXPECT_ERROR(mesh.find_group(std::vector<std::int64_t>{-1}), ErrorCode::invalid_argument, "has no dimension -1");
  });
}

}  // namespace
}  // namespace tessera

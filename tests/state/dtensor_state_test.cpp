// Saves DTensors in state dicts as the boxes of each rank, and loads them on any mesh.

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {
namespace {

using testing::cross;
using testing::indexed;
using testing::part_of;
using testing::Sizes;
using testing::TemporaryDirectory;

const Placement R = Placement::replicate(), S0 = Placement::shard(0), S1 = Placement::shard(1);
const Placements kChoices = {R, S0, S1, Placement::strided_shard(0, 2)};

// Returns one tensor for each combination of placements on this mesh.
StateDict state_on(const DeviceMesh& mesh, const at::Tensor& full) {
  StateDict state;
  for (const Placements& placements : cross(kChoices, mesh.shape().size())) {
    const MeshLayout layout(full.sizes().vec(), mesh.shape(), placements);
    state[to_string(placements)] = DTensor(mesh, layout, part_of(full, layout, *mesh.coordinate()));
  }
  return state;
}

const at::Tensor kFull = indexed({7, 6});

TEST(DTensorStateTest, WhatWasSavedOnOneMeshIsLoadedOnAnother) {
  for (const Sizes& saved : {Sizes{1}, Sizes{3}, Sizes{2, 2}, Sizes{2, 3}}) {
    const TemporaryDirectory directory;
    run_local(static_cast<int>(mesh_size(saved)), [&](const ProcessGroup& group) {
      save(state_on(DeviceMesh(group, saved), kFull), directory.path(), group);
    });
    const StateDict full = load_full(directory.path());
    for (const auto& [name, value] : full) EXPECT_TRUE(at::equal(value.get<at::Tensor>(), kFull)) << to_string(name);
    for (const Sizes& loaded : {Sizes{1}, Sizes{4}, Sizes{2, 2, 2}}) {
      run_local(static_cast<int>(mesh_size(loaded)), [&](const ProcessGroup& group) {
        const DeviceMesh mesh(group, loaded);
        for (const auto& [name, value] : full) {
          StateDict state;
          std::vector<DTensor> tensors;
          for (const Placements& placements : cross(kChoices, loaded.size())) {
            const MeshLayout layout({7, 6}, loaded, placements);
            tensors.emplace_back(mesh, layout, at::zeros(layout.local_shape(*mesh.coordinate()).sizes, at::kDouble));
            state[name] = tensors.back();
            load(state, directory.path(), group);
            ASSERT_TRUE(at::equal(tensors.back().to_local(), part_of(kFull, layout, *mesh.coordinate())))
                << to_string(name) << " as " << to_string(placements);
            if (loaded.size() > 1) break;
          }
        }
      });
    }
  }
}

TEST(DTensorStateTest, SeveralShardsOfARankAreSavedAndLoaded) {
  const TemporaryDirectory directory;
  run_local(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const std::int64_t r = group.rank();
    const auto shards_of = [&](const at::Tensor& full) {
      // Round-robin columns.
      const std::vector<at::Tensor> shards = {full.narrow(1, r, 1).clone(), full.narrow(1, r + 2, 1).clone(),
                                              full.narrow(1, r + 4, 1).clone()};
      return DTensor::from_local(LocalShardsWrapper(shards, {{0, r}, {0, r + 2}, {0, r + 4}}), mesh, {S1}, {7, 6});
    };
    save({{"w", shards_of(kFull)}}, directory.path(), group);
    const DTensor loaded = shards_of(at::zeros({7, 6}, at::kDouble));
    StateDict state{{"w", loaded}};
    load(state, directory.path(), group);
    EXPECT_TRUE(loaded.local_shards()->equal(*shards_of(kFull).local_shards()));
  });
  EXPECT_TRUE(at::equal(load_full(directory.path()).at("w").get<at::Tensor>(), kFull));
}

TEST(DTensorStateTest, ARankWithoutLocalShardsTakesTheDtypeOfTheOthers) {
  const at::Tensor full = kFull.to(at::kHalf);
  for (const int without : {0, 1, 2}) {  // this rank has no shard; the others have three rows each, and the seventh
    for (const std::optional<at::ScalarType> given : {std::optional<at::ScalarType>(), std::optional(at::kHalf)}) {
      const TemporaryDirectory directory;
      run_local(3, [&](const ProcessGroup& group) {
        const DeviceMesh mesh(group, {3});
        const auto shards_of = [&](const at::Tensor& rows) {
          LocalShardsWrapper local({}, {});
          const bool is_first = group.rank() == (without == 0 ? 1 : 0);
          if (group.rank() != without) {
            local = is_first ? LocalShardsWrapper({rows.narrow(0, 0, 3).clone()}, {{0, 0}})
                             : LocalShardsWrapper({rows.narrow(0, 6, 1).clone(), rows.narrow(0, 3, 3).clone()},
                                                  {{6, 0}, {3, 0}});
          }
          return DTensor::from_local(local, mesh, {S0}, {7, 6}, given);
        };
        const DTensor saved = shards_of(full);
        if (group.rank() != without || given) {
          EXPECT_EQ(saved.scalar_type(), at::kHalf);
        } else {
          EXPECT_ERROR(saved.scalar_type(), ErrorCode::unsupported, "pass the dtype to DTensor::from_local");
        }
        save({{"w", saved}}, directory.path(), group);
        const DTensor loaded = shards_of(at::zeros({7, 6}, at::kHalf));
        StateDict state{{"w", loaded}};
        load(state, directory.path(), group);
        EXPECT_TRUE(loaded.local_shards()->equal(*shards_of(full).local_shards()));
        EXPECT_TRUE(at::equal(loaded.redistribute().to_local(), full));
        EXPECT_TRUE(at::equal(loaded.full_tensor(), full));
      });
      EXPECT_TRUE(at::equal(load_full(directory.path()).at("w").get<at::Tensor>(), full));
    }
  }
}

TEST(DTensorStateTest, LocalShardsOfAnotherDtypeThanGivenAreRefused) {
  run_local(1, [&](const ProcessGroup& group) {
    const LocalShardsWrapper local({at::zeros({1, 2})}, {{0, 0}});
    EXPECT_ERROR(DTensor::from_local(local, DeviceMesh(group, {1}), {S0}, {1, 2}, at::kHalf),
                 ErrorCode::invalid_argument, "dtype Float of a DTensor of size [1, 2]: expected Half");
  });
}

TEST(DTensorStateTest, PartialOnesAndOtherSizesAreRefused) {
  const TemporaryDirectory directory;
  run_local(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor rows = at::full({2, 3}, 1.0);
    EXPECT_ERROR(save({{"w", DTensor::from_local(rows, mesh, {Placement::partial()})}}, directory.path(), group),
                 ErrorCode::invalid_argument, "expected no partial placement, redistribute the tensor first");
    save({{"w", DTensor::from_local(rows, mesh, {S0})}}, directory.path(), group);
    StateDict other{{"w", DTensor::from_local(rows, mesh, {S1})}};
    EXPECT_ERROR(load(other, directory.path(), group), ErrorCode::invalid_argument, "w");
  });
}

}  // namespace
}  // namespace tessera

// Saves DTensors in state dicts as the boxes of each rank, and loads them on any mesh.

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/chaos.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/internal/box_view.h"

namespace tessera {
namespace {

using testing::cross;
using testing::indexed;
using testing::part_of;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;
using testing::TemporaryDirectory;

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
  testing::SampleIfSanitized sample(2);
  for (const Sizes& saved : {Sizes{1}, Sizes{3}, Sizes{2, 2}, Sizes{2, 3}}) {
    const TemporaryDirectory directory;
    run_local(static_cast<int>(mesh_size(saved)), [&](const ProcessGroup& group) {
      save(state_on(DeviceMesh(group, saved), kFull), directory.path(), group);
    });
    const StateDict full = load_full(directory.path());
    for (const auto& [name, value] : full) EXPECT_TRUE(at::equal(value.get<at::Tensor>(), kFull)) << to_string(name);
    for (const Sizes& loaded : {Sizes{1}, Sizes{4}, Sizes{2, 2, 2}}) {
      if (!sample.takes_next()) continue;
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

// How 7 rows of 6 columns are distributed over ranks: the local shards of a rank.
std::vector<Box> shards_of_rank(const std::string& how, int rank, int ranks) {
  std::vector<Box> shards;
  if (how == "rows by turns") {
    for (std::int64_t row = rank; row < 7; row += ranks) shards.emplace_back(Sizes{row, 0}, Sizes{1, 6});
  } else if (how == "columns by turns") {
    for (std::int64_t column = rank; column < 6; column += ranks) shards.emplace_back(Sizes{0, column}, Sizes{7, 1});
  } else if (how == "uneven rows") {  // the last rank has none if there are several
    const std::int64_t begin = rank == 0 ? 0 : 4 + rank - 1, end = rank == 0 ? 4 : rank == ranks - 2 ? 7 : begin + 1;
    if (ranks == 1) return {Box({4, 0}, {3, 6}), Box({0, 0}, {4, 6})};
    if (ranks == 2) return rank == 0 ? std::vector<Box>{Box({4, 0}, {3, 6}), Box({0, 0}, {4, 6})} : shards;
    if (rank < ranks - 1) shards.emplace_back(Sizes{begin, 0}, Sizes{end - begin, 6});
  } else if (how == "a grid") {
    const std::vector<Box> cells = {Box({0, 0}, {2, 5}), Box({2, 0}, {5, 5}), Box({0, 5}, {3, 1}), Box({3, 5}, {4, 1})};
    for (std::size_t i = 0; i < cells.size(); ++i) {
      if (static_cast<int>(i) % ranks == rank) shards.push_back(cells[cells.size() - 1 - i]);
    }
  }
  return shards;
}

const std::vector<std::string> kDistributions = {"rows by turns", "columns by turns", "uneven rows", "a grid"};

// PyTorch: test_uneven_reshard_with_dtensor_shards_wrapper_api.
TEST(DTensorStateTest, LocalShardsAreLoadedIntoAnyOtherLocalShards) {
  const auto tensor_of = [](const ProcessGroup& group, const std::string& how, const at::Tensor& full) {
    std::vector<at::Tensor> shards;
    std::vector<Sizes> offsets;
    for (const Box& box : shards_of_rank(how, group.rank(), group.size())) {
      shards.push_back(box_view(full, box).clone());
      offsets.push_back(box.offsets);
    }
    const DeviceMesh mesh(group, {group.size()});
    return DTensor::from_local(LocalShardsWrapper(shards, offsets), mesh, {S0}, {7, 6}, at::kDouble);
  };
  const auto storage = checkpoint::memory_storage();
  for (const int from_ranks : {1, 2, 4}) {
    run_local(from_ranks, [&](const ProcessGroup& group) {
      StateDict state;
      for (const std::string& how : kDistributions) state[how] = tensor_of(group, how, kFull);
      save(state, storage, group);
    });
    for (const int to_ranks : {1, 3, 5}) {
      run_local(to_ranks, [&](const ProcessGroup& group) {
        for (const std::string& to : kDistributions) {
          StateDict state;
          for (const std::string& from : kDistributions) state[from] = tensor_of(group, to, at::zeros_like(kFull));
          load(state, storage, group);
          for (const auto& [from, value] : state) {
            const DTensor loaded = *DTensor::from_checkpointable(value.get<std::shared_ptr<Checkpointable>>());
            EXPECT_TRUE(loaded.local_shards()->equal(*tensor_of(group, to, kFull).local_shards()))
                << to_string(from) << " to " << to << " on rank " << group.rank();
          }
        }
        const DTensor rows = DTensor::from_local(at::zeros({7, 6}, at::kDouble), DeviceMesh(group, {to_ranks}), {R});
        StateDict state{{"a grid", rows}};
        load(state, storage, group);
        EXPECT_TRUE(at::equal(rows.to_local(), kFull));
      });
    }
  }
}

// A tensor of a user's own that has boxes of each rank, in one piece of memory. PyTorch: _Checkpointable.
class BoxesOfAUser final : public Checkpointable {
 public:
  BoxesOfAUser(std::vector<Box> boxes, const at::Tensor& full) : boxes_(std::move(boxes)) {
    for (const Box& box : boxes_) {
      begins_.push_back(memory_.numel());
      memory_ = at::cat({memory_, box_view(full, box).reshape({-1})});
    }
  }
  const Sizes& size() const override { return size_; }
  std::optional<TensorProperties> properties() const override {
    TensorProperties properties;
    properties.dtype = DType::float64;
    return boxes_.empty() ? std::nullopt : std::optional(properties);
  }
  const std::vector<Box>& local_chunks() const override { return boxes_; }
  at::Tensor local_tensor(std::size_t i) const override {
    return memory_.narrow(0, begins_[i], volume(boxes_[i])).view(boxes_[i].sizes);
  }
  const at::Tensor& memory() const { return memory_; }

 private:
  Sizes size_ = {7, 6};
  std::vector<Box> boxes_;
  std::vector<std::int64_t> begins_;
  at::Tensor memory_ = at::zeros({0}, at::kDouble);
};

TEST(CheckpointableTest, ATensorOfAUserIsSavedAndLoadedIntoOtherBoxesAndByItsFullTensor) {
  const auto storage = checkpoint::memory_storage();
  const auto tensor_of = [](const ProcessGroup& group, const std::string& how, const at::Tensor& full) {
    return std::make_shared<BoxesOfAUser>(shards_of_rank(how, group.rank(), group.size()), full);
  };
  for (const std::string& from : kDistributions) {
    run_local(4, [&](const ProcessGroup& group) {
      save({{"own", tensor_of(group, from, kFull)}, {"step", 3}}, storage, group);
    });
    for (const int ranks : {1, 3}) {
      run_local(ranks, [&](const ProcessGroup& group) {
        for (const std::string& to : kDistributions) {
          const auto loaded = tensor_of(group, to, at::zeros_like(kFull));
          StateDict state{{"own", loaded}, {"step", 0}};
          load(state, storage, group);
          EXPECT_TRUE(at::equal(loaded->memory(), tensor_of(group, to, kFull)->memory())) << from << " to " << to;
        }
        const at::Tensor full = at::zeros_like(kFull);
        StateDict state{{"own", full}};
        load(state, storage, group);
        EXPECT_TRUE(at::equal(full, kFull));
      });
    }
  }
  run_local(2, [&](const ProcessGroup& group) {
    const auto rows = std::make_shared<BoxesOfAUser>(std::vector<Box>{Box({3 * group.rank(), 0}, {4, 6})}, kFull);
    EXPECT_ERROR(save({{"own", rows}}, checkpoint::memory_storage(), group), ErrorCode::invalid_argument,
                 "tensor 'own' of shape [7, 6]: chunks [0, 4)x[0, 6) of rank 0 and [3, 7)x[0, 6) of rank 1 overlap");
  });
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

#include "tessera/state/gather_state_dict.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/layout/sharding_spec.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {
namespace {

using testing::cross;
using testing::indexed;
using testing::part_of;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

const at::Tensor kMatrix = indexed({7, 6});

DTensor dtensor_of(const at::Tensor& full, const DeviceMesh& mesh, const Placements& placements) {
  const MeshLayout layout(full.sizes().vec(), mesh.shape(), placements);
  return DTensor(mesh, layout, part_of(full, layout, *mesh.coordinate()));
}

// Boxes of this rank's choice.
class Boxes final : public Checkpointable {
 public:
  Boxes(std::vector<std::int64_t> size, std::vector<Box> boxes, std::vector<at::Tensor> tensors)
      : size_(std::move(size)), boxes_(std::move(boxes)), tensors_(std::move(tensors)) {}
  const std::vector<std::int64_t>& size() const override { return size_; }
  std::optional<TensorProperties> properties() const override {
    return tensors_.empty() ? std::nullopt : std::optional(properties_of(tensors_[0]));
  }
  const std::vector<Box>& local_chunks() const override { return boxes_; }
  at::Tensor local_tensor(std::size_t i) const override { return tensors_[i]; }

 private:
  std::vector<std::int64_t> size_;
  std::vector<Box> boxes_;
  std::vector<at::Tensor> tensors_;
};

std::shared_ptr<Boxes> boxes(const at::Tensor& full, std::vector<Box> boxes) {
  std::vector<at::Tensor> tensors;
  for (const Box& box : boxes) tensors.push_back(box_view(full, box));
  return std::make_shared<Boxes>(full.sizes().vec(), std::move(boxes), std::move(tensors));
}

// Rows [begin, end) of kMatrix.
Box rows(std::int64_t begin, std::int64_t end) { return {{begin, 0}, {end - begin, 6}}; }

TEST(GatherStateDictTest, DTensorsOfAllPlacementsBecomeFullTensors) {
  for (const Sizes& shape : {Sizes{1}, Sizes{3}, Sizes{2, 2}}) {
    for (const at::ScalarType type : {at::kDouble, at::kBFloat16}) {
      const at::Tensor full = kMatrix.to(type);
      run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
        const DeviceMesh mesh(group, shape);
        StateDict state;
        for (const Placements& placements : cross({R, S0, S1, Placement::strided_shard(0, 2)}, shape.size())) {
          state[to_string(placements)] = dtensor_of(full, mesh, placements);
        }
        for (const auto& [name, value] : gather_state_dict(state, group)) {
          EXPECT_EQ(value, Value(full)) << to_string(name);
        }
      });
    }
  }
}

TEST(GatherStateDictTest, AScalarAndAnEmptyTensorAreGathered) {
  run_local(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor scalar = at::arange(3, 4, at::kInt).squeeze(0), empty = at::zeros({0, 4});
    const StateDict state{{"scalar", dtensor_of(scalar, mesh, {R})}, {"empty", dtensor_of(empty, mesh, {S0})}};
    EXPECT_EQ(Value(gather_state_dict(state, group)), Value(Dict{{"scalar", scalar}, {"empty", empty}}));
  });
}

TEST(GatherStateDictTest, ShardedTensorsAndOtherCheckpointablesAreGatheredWhereTheyAreNested) {
  run_local(3, [&](const ProcessGroup& group) {
    const int rank = group.rank();
    const auto chunks =
        std::make_shared<ChunkShardingSpec>(0, std::vector<RemoteDevice>{{0, Device()}, {1, Device()}, {2, Device()}});
    // Rank 1 has nothing, and rank 2 has a box that rank 0 has too.
    const auto own = boxes(kMatrix, rank == 0   ? std::vector<Box>{rows(4, 7), rows(0, 1)}
                                    : rank == 1 ? std::vector<Box>{}
                                                : std::vector<Box>{rows(0, 1), rows(1, 4)});
    const StateDict state{
        {"list", List{3, ShardedTensor::from_local_tensor(kMatrix.narrow(0, rank * 3, rank == 2 ? 1 : 3).clone(),
                                                          chunks, {7, 6}, group)}},
        {"dict", Dict{{"tuple", Tuple{own, "text"}}}}};
    const StateDict expected{{"list", List{3, kMatrix}}, {"dict", Dict{{"tuple", Tuple{kMatrix, "text"}}}}};
    EXPECT_EQ(Value(gather_state_dict(state, group)), Value(expected));
    EXPECT_EQ(Value(gather_state_dict(state, group, /*cpu_offload=*/true)), Value(rank == 0 ? expected : Dict()));
  });
}

TEST(GatherStateDictTest, WhatEveryRankHasIsNotCopied) {
  run_local(2, [&](const ProcessGroup& group) {
    const DTensor replicated = dtensor_of(kMatrix, DeviceMesh(group, {2}), {R});
    const StateDict full = gather_state_dict({{"plain", kMatrix}, {"replicated", replicated}}, group);
    EXPECT_EQ(full.at("plain").get<at::Tensor>().data_ptr(), kMatrix.data_ptr());
    EXPECT_EQ(full.at("replicated").get<at::Tensor>().data_ptr(), replicated.local_tensor().data_ptr());
  });
}

TEST(GatherStateDictTest, AGroupWithoutAllPartsIsAnErrorThatNamesTheHole) {
  run_local(2, [&](const ProcessGroup& group) {
    const StateDict state{{"a", Dict{{"b", dtensor_of(kMatrix, DeviceMesh(group, {2}), {S0})}}}};
    EXPECT_ERROR(gather_state_dict(state, ProcessGroup()), ErrorCode::invalid_argument, "gather a state dict",
                 group.rank() == 0 ? "[4, 7)x[0, 6)" : "[0, 4)x[0, 6)", "'a.b' of shape [7, 6]", "pass the group");
    EXPECT_EQ(gather_state_dict(state, group).at("a").get<Dict>().at("b"), Value(kMatrix));
  });
}

TEST(GatherStateDictTest, BoxesThatAreNotAPartitionAreAnErrorOnAllRanks) {
  run_local(2, [&](const ProcessGroup& group) {
    const auto of_ranks = [&](const std::shared_ptr<Boxes>& first, const std::shared_ptr<Boxes>& second) {
      return StateDict{{"w", group.rank() == 0 ? first : second}};
    };
    const auto low = boxes(kMatrix, {rows(0, 4)}), high = boxes(kMatrix, {rows(4, 7)});
    EXPECT_ERROR(gather_state_dict(of_ranks(low, boxes(kMatrix, {rows(3, 7)})), group), ErrorCode::invalid_argument,
                 "[0, 4)x[0, 6) and [3, 7)x[0, 6) of 'w' overlap");
    EXPECT_ERROR(gather_state_dict(of_ranks(low, boxes(kMatrix.to(at::kFloat), {rows(4, 7)})), group),
                 ErrorCode::invalid_argument, "'w' has dtype float32 on rank 1, expected float64");
    EXPECT_ERROR(gather_state_dict(of_ranks(low, boxes(indexed({6, 7}), {})), group), ErrorCode::invalid_argument,
                 "w [6, 7]");
    EXPECT_EQ(gather_state_dict(of_ranks(low, high), group).at("w"), Value(kMatrix));
  });
}

TEST(GatherStateDictTest, ChunksThatAreNotOfTheTensorAreAnError) {
  const at::Tensor row = at::zeros({1, 6}, at::kDouble);
  const auto gather = [](const std::vector<Box>& of, const std::vector<at::Tensor>& tensors) {
    gather_state_dict({{"w", std::make_shared<Boxes>(std::vector<std::int64_t>{2, 6}, of, tensors)}}, ProcessGroup());
  };
  EXPECT_ERROR(gather({rows(0, 1), rows(2, 3)}, {row, row}), ErrorCode::invalid_argument,
               "'w': local chunk [2, 3)x[0, 6), expected a box within shape [2, 6]");
  EXPECT_ERROR(gather({rows(0, 1), rows(1, 2)}, {row, row.to(at::kFloat)}), ErrorCode::invalid_argument,
               "'w': the tensor of [1, 2)x[0, 6) has dtype float32, expected float64");
}

TEST(GatherStateDictTest, ATensorWithoutMemoryIsAnErrorOnAllRanks) {
  run_local(2, [&](const ProcessGroup& group) {
    const at::Tensor meta = kMatrix.to(at::kMeta);
    const StateDict plain{{"p", group.rank() == 0 ? meta : kMatrix}};
    const auto part = group.rank() == 0 ? boxes(kMatrix, {rows(0, 4)}) : boxes(meta, {rows(4, 7)});
    EXPECT_ERROR(gather_state_dict({{"w", part}}, group), ErrorCode::unsupported, "rank 1: 'w': found ", " on meta",
                 "expected a tensor with memory");
    EXPECT_ERROR(gather_state_dict(plain, group, /*cpu_offload=*/true), ErrorCode::unsupported, "rank 0: 'p': found ");
    EXPECT_EQ(Value(gather_state_dict(plain, group)), Value(plain));
  });
}

TEST(GatherStateDictTest, ASparseTensorIsMovedToTheCpuAsItIs) {
  const StateDict state{{"s", kMatrix.to_sparse()}};
  const StateDict full = gather_state_dict(state, ProcessGroup(), /*cpu_offload=*/true);
  EXPECT_EQ(Value(full.at("s").get<at::Tensor>().to_dense()), Value(kMatrix));
}

TEST(GatherStateDictTest, ADtypeThatNoRankKnowsIsAnError) {
  const StateDict state{{"w", boxes(at::zeros({0, 6}), {})}};
  EXPECT_ERROR(gather_state_dict(state, ProcessGroup()), ErrorCode::unsupported, "no rank knows the dtype of 'w'");
}

}  // namespace
}  // namespace tessera

// Values of a state dict, found by their index in a checkpoint's metadata.

#include "tessera/state/find_object.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {
namespace {

using checkpoint::MetadataIndex;
using testing::chunk_spec;
using testing::grid_spec;

// PyTorch: test_flat_data.
TEST(FindObjectTest, TensorsAndOtherValuesAreFoundByName) {
  const at::Tensor a = at::rand({10});
  const StateDict state{{"a", a}, {"b", List{1, 2, 3}}};
  EXPECT_TRUE(find_state_dict_object(state, {"a", {}, {}}).get<at::Tensor>().is_same(a));
  EXPECT_TRUE(find_state_dict_object(state, {"a", {{0}}, {}}).get<at::Tensor>().is_same(a));
  EXPECT_TRUE(find_state_dict_object(state, {"a", {}, 99}).get<at::Tensor>().is_same(a));
  EXPECT_EQ(find_state_dict_object(state, {"b", {}, {}}), Value(List{1, 2, 3}));
  EXPECT_EQ(find_state_dict_object(state, {"b", {}, 1}), Value(List{1, 2, 3}));
  EXPECT_ERROR(find_state_dict_object(state, {"c", {}, {}}), ErrorCode::not_found, "'c'", "no such key");
  EXPECT_ERROR(find_state_dict_object(state, {"a", {{1}}, {}}), ErrorCode::invalid_argument, "'a' at [1]",
               "found tensor, expected a sharded tensor");
  EXPECT_ERROR(find_state_dict_object(state, {"b", {{1}}, {}}), ErrorCode::invalid_argument, "found list");
}

// PyTorch: test_sharded_tensor_lookup.
TEST(FindObjectTest, AShardIsFoundByItsOffset) {
  run_local(2, [](const ProcessGroup& group) {
    const int rank = group.rank();
    const ShardedTensor rows = ShardedTensor::rand(chunk_spec(0, {0, 1}), {8, 3}, group);
    const ShardedTensor cells = ShardedTensor::rand(grid_spec({4, 4}, {2, 2}, {0, 1}), {4, 4}, group);
    const DeviceMesh mesh(group, {2});
    const DTensor dtensor = distribute_tensor(at::rand({4, 2}), mesh, {Placement::shard(0)});
    const StateDict state{{"rows", rows}, {"cells", cells}, {"dtensor", dtensor}};
    const auto found = [&](const MetadataIndex& index) {
      return find_state_dict_object(state, index).get<at::Tensor>().data_ptr();
    };
    EXPECT_EQ(found({"rows", {{4 * rank, 0}}, {}}), rows.local_tensor().data_ptr());
    for (const std::size_t hint : {std::size_t{0}, std::size_t{1}, std::size_t{7}}) {
      EXPECT_EQ(found({"cells", {{2, 2 * rank}}, hint}), cells.local_shards()[1].tensor.data_ptr());
    }
    EXPECT_EQ(found({"dtensor", {}, {}}), dtensor.to_local().data_ptr());
    EXPECT_EQ(found({"dtensor", {{2 * rank, 0}}, {}}), dtensor.to_local().data_ptr());
    EXPECT_ERROR(find_state_dict_object(state, {"rows", {}, {}}), ErrorCode::invalid_argument,
                 "found a sharded tensor with 1 shards on this rank, expected an offset");
    EXPECT_ERROR(
        find_state_dict_object(state, {"rows", {{4 - 4 * rank, 0}}, {}}), ErrorCode::not_found,
        fmt::format("this rank has 1 shards of the tensor, none with that offset, expected one of [{}, 0]", 4 * rank));
    EXPECT_ERROR(find_state_dict_object(state, {"dtensor", {{1, 0}}, {}}), ErrorCode::not_found, "'dtensor' at [1, 0]");
  });
}

}  // namespace
}  // namespace tessera

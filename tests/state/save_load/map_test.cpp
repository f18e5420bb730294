// Loads through maps of names and shapes.

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/tensor/device_mesh.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/dtensor_factories.h"

namespace tessera {
namespace {

using testing::indices;
using testing::TemporaryDirectory;

LoadOptions through(const char* rules) {
  LoadOptions options;
  options.map = checkpoint::TensorMap::parse(
      fmt::format(R"({{"tessera_map": 1, "unmatched": "keep", "rules": [{}]}})", rules), "test");
  return options;
}

TEST(LoadThroughAMapTest, ShardedTensorsGetTheElementsOfRenamedTransposedAndFusedOnes) {
  const TemporaryDirectory directory;
  save({{"q", indices({4, 6})}, {"k", indices({2, 6}) + 100}, {"other", indices({3})}, {"step", 7}}, directory.path());
  const LoadOptions options = through(R"({"op": "concat", "match": ["q", "k"], "dim": 0, "to": "qk"},
                                         {"op": "transpose", "match": "qk", "dims": [0, 1]},
                                         {"op": "rename", "match": "other", "to": "renamed"})");
  const at::Tensor expected = at::cat({indices({4, 6}), indices({2, 6}) + 100}).t().contiguous();
  for (const int ranks : {1, 2, 3}) {
    run_local(ranks, [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, {group.size()});
      const DTensor fused = dtensor::zeros({6, 6}, mesh, {Placement::shard(0)}, at::kLong);
      const at::Tensor renamed = at::zeros({3}, at::kLong);
      StateDict state{{"qk", fused}, {"renamed", renamed}, {"step", 0}};
      load(state, directory.path(), group, options);
      EXPECT_TRUE(at::equal(fused.full_tensor(), expected));
      EXPECT_TRUE(at::equal(renamed, indices({3})));
      EXPECT_EQ(state.at("step"), Value(7));
    });
  }
}

TEST(LoadThroughAMapTest, AMapThatDoesNotFitIsAnErrorOnAllRanks) {
  const TemporaryDirectory directory;
  save({{"a", indices({4})}}, directory.path());
  run_local(2, [&](const ProcessGroup& group) {
    StateDict state{{"b", at::zeros({4}, at::kLong)}};
    EXPECT_ERROR(load(state, directory.path(), group, through(R"({"op": "rename", "match": "c", "to": "b"})")),
                 ErrorCode::invalid_argument, "rule 1 (rename)");
    load(state, directory.path(), group, through(R"({"op": "rename", "match": "a", "to": "b"})"));
    EXPECT_TRUE(at::equal(state.at("b").get<at::Tensor>(), indices({4})));
  });
}

}  // namespace
}  // namespace tessera

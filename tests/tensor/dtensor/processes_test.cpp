// Meshes, DTensors and tensor parallel layers with ranks as processes. The other tests run ranks as threads; these show
// that nothing is shared by accident.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "support/chaos.h"
#include "support/rank_processes.h"
#include "tensor/mesh_support.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/local_shards_wrapper.h"
#include "tessera/tensor/tensor_parallel.h"

namespace tessera {
namespace {

using testing::cross;
using testing::expect_good_processes;
using testing::indexed;
using testing::local_of;
using testing::P;
using testing::part_of;
using testing::quick;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

class DTensorProcesses : public ::testing::TestWithParam<Sizes> {};
INSTANTIATE_TEST_SUITE_P(, DTensorProcesses,
                         ::testing::Values(Sizes{1}, Sizes{2}, Sizes{3}, Sizes{5}, Sizes{8}, Sizes{2, 2}, Sizes{2, 3},
                                           Sizes{2, 2, 2}, Sizes{1, 3, 2}));

// Along one dimension.
class DTensorProcessesInLine : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, DTensorProcessesInLine, ::testing::Values(1, 2, 3, 5, 8),
                         ::testing::PrintToStringParamName());

TEST_P(DTensorProcesses, RedistributeBetweenAllPlacements) {
  const Sizes& shape = GetParam();
  const at::Tensor full = indexed({7, 5});
  const auto choices = cross({R, S0, S1, P}, shape.size());
  expect_good_processes(static_cast<int>(mesh_size(shape)), quick(), [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, shape);
    const Sizes& at = *mesh.coordinate();
    // A sample of many cases.
    const std::size_t step = (shape.size() == 3 ? 11 : shape.size() == 2 ? 3 : 1) * testing::stride_if_sanitized(5);
    for (std::size_t pair = 0; pair < choices.size() * choices.size(); pair += step) {
      const Placements &from = choices[pair / choices.size()], &to = choices[pair % choices.size()];
      const MeshLayout before({7, 5}, shape, from), after({7, 5}, shape, to);
      const at::Tensor local = local_of(full, before, at).set_requires_grad(true);
      const DTensor found = DTensor::from_local(local, mesh, from, {Sizes{7, 5}}).redistribute(to);
      const at::Tensor unsharded = found.full_tensor();
      unsharded.sum().backward();
      const std::string what = to_string(from) + " to " + to_string(to);
      EXPECT_EQ(found.placements(), to) << what;
      EXPECT_TRUE(at::allclose(unsharded, full, 1e-15, 0)) << what;  // a sixth is not exact
      EXPECT_TRUE(at::equal(local.grad(), at::ones_like(local))) << what;
    }
  });
}

TEST_P(DTensorProcesses, ComputeAndCompare) {
  const Sizes& shape = GetParam();
  const at::Tensor x = indexed({6, 4}).sin(), weight = indexed({5, 4}).cos();
  expect_good_processes(static_cast<int>(mesh_size(shape)), quick(), [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, shape);
    Placements by_rows(shape.size(), R), by_columns(shape.size(), R);
    by_rows.front() = S0;
    by_columns.back() = S1;
    const DTensor y = dtensor::linear(distribute_tensor(x, mesh, by_rows), distribute_tensor(weight, mesh, by_columns));
    const DTensor expected = distribute_tensor(at::linear(x, weight), mesh);
    EXPECT_TRUE(at::allclose(y.full_tensor(), expected.full_tensor(), 1e-12, 1e-14));
    EXPECT_TRUE(dtensor::equal(expected, expected.redistribute(by_rows)));
    EXPECT_FALSE(dtensor::equal(expected, dtensor::add(expected, 1)));
  });
}

TEST_P(DTensorProcesses, MeshesHaveTheirGroups) {
  const Sizes& shape = GetParam();
  expect_good_processes(static_cast<int>(mesh_size(shape)), quick(), [&](const ProcessGroup& group) {
    const std::vector<std::string> names = {"a", "b", "c"};
    const DeviceMesh mesh(group, shape, {names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shape.size())});
    for (std::int64_t dim = 0; dim < mesh.ndim(); ++dim) {
      // Every rank passes its coordinate; gathered along a dimension, these are all coordinates.
      const at::Tensor sum = at::full({1}, mesh.local_rank(dim) + 1, at::kLong);
      mesh[names[static_cast<std::size_t>(dim)]].group().all_reduce(sum);
      EXPECT_EQ(sum.item<std::int64_t>(), mesh.size(dim) * (mesh.size(dim) + 1) / 2) << dim;
    }
  });
}

TEST_P(DTensorProcessesInLine, SeveralShardsOfARankGetToOneTensor) {
  const std::int64_t ranks = GetParam();
  const at::Tensor full = indexed({2 * ranks, 3});
  expect_good_processes(GetParam(), quick(), [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {ranks});
    const std::int64_t first = group.rank(), second = group.rank() + ranks;  // rows
    const LocalShardsWrapper shards({full.narrow(0, first, 1).clone(), full.narrow(0, second, 1).clone()},
                                    {{first, 0}, {second, 0}});
    const DTensor tensor = DTensor::from_local(shards, mesh, {S0}, full.sizes().vec());
    EXPECT_TRUE(at::equal(tensor.full_tensor(), full));
  });
}

TEST_P(DTensorProcessesInLine, TensorParallelLayers) {
  expect_good_processes(GetParam(), quick(), [&](const ProcessGroup& group) {
    torch::manual_seed(group.rank());  // only the first rank's elements are used
    ParallelLinear up(6, 9), down(9, 6);
    ParallelEmbedding table(10, 6);
    for (torch::nn::Module* layer : std::initializer_list<torch::nn::Module*>{up.get(), down.get(), table.get()}) {
      layer->to(at::kDouble);
    }
    const auto first_ranks = [&](const at::Tensor& tensor) {
      const at::Tensor of_first = tensor.detach().clone();
      group.broadcast(of_first, 0);
      return of_first.set_requires_grad(true);
    };
    const at::Tensor up_w = first_ranks(up->weight), up_b = first_ranks(up->bias), down_w = first_ranks(down->weight),
                     down_b = first_ranks(down->bias), rows = first_ranks(table->weight);
    const DeviceMesh mesh(group, {group.size()});
    parallelize_module(*up, mesh, {{"", ColwiseParallel{}}});
    parallelize_module(*down, mesh, {{"", RowwiseParallel{}}});
    parallelize_module(*table, mesh, {{"", RowwiseParallel{}}});
    const at::Tensor ids = at::arange(8, at::kLong);
    const at::Tensor expected = at::linear(at::tanh(at::linear(at::embedding(rows, ids), up_w, up_b)), down_w, down_b);
    const at::Tensor found = down(at::tanh(up(table(ids))));
    expected.square().sum().backward();
    found.square().sum().backward();
    EXPECT_TRUE(at::allclose(found, expected, 1e-10, 1e-12));
    const auto expect_part = [&](const at::Tensor& part, const at::Tensor& full, const Placement& placement) {
      const MeshLayout layout(full.sizes().vec(), mesh.shape(), {placement});
      EXPECT_TRUE(at::allclose(part, part_of(full, layout, *mesh.coordinate()), 1e-9, 1e-12)) << placement;
    };
    expect_part(up->weight.grad(), up_w.grad(), S0);
    expect_part(up->bias.grad(), up_b.grad(), S0);
    expect_part(down->weight.grad(), down_w.grad(), S1);
    expect_part(down->bias.grad(), down_b.grad(), R);
    expect_part(table->weight.grad(), rows.grad(), S0);
  });
}

}  // namespace
}  // namespace tessera

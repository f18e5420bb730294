// DTensors and tensor parallel layers on a GPU compute what they compute on the CPU.

#include <ATen/ATen.h>

#include "device/gpu.h"
#include "tensor/mesh_support.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/tensor_parallel.h"

namespace tessera {
namespace {

using testing::cross;
using testing::expect_close;
using testing::indexed;
using testing::local_of;
using testing::P;
using testing::R;
using testing::Ranks;
using testing::run_on_gpus;
using testing::S0;
using testing::S1;
using testing::Sizes;

class DTensorOnGpuTest : public ::testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(, DTensorOnGpuTest, ::testing::ValuesIn(testing::kAllRanks), testing::ranks_name);

// Every third pair of placements of a mesh of two dimensions, and all of a mesh of one.
void redistribute_on(const ProcessGroup& group, at::Device device, const Sizes& shape) {
  const Sizes size = {7, 5};
  const at::Tensor full = indexed(size);
  const DeviceMesh mesh(group, shape);
  const auto choices = cross({R, S0, S1, P}, shape.size());
  const std::size_t step = shape.size() == 2 ? 3 : 1;
  for (std::size_t pair = 0; pair < choices.size() * choices.size(); pair += step) {
    const Placements &from = choices[pair / choices.size()], &to = choices[pair % choices.size()];
    const MeshLayout before(size, shape, from), after(size, shape, to);
    const std::string what = to_string(from) + " to " + to_string(to);
    const at::Tensor local = local_of(full, before, *mesh.coordinate()).to(device).set_requires_grad(true);
    const DTensor found = DTensor::from_local(local, mesh, from, {size}).redistribute(to);
    EXPECT_EQ(found.device(), local.device()) << what;
    const at::Tensor unsharded = found.full_tensor();
    unsharded.sum().backward();
    expect_close(unsharded.detach(), full, 1e-15, what);
    EXPECT_TRUE(at::equal(local.grad().cpu(), at::ones(local.sizes(), at::kDouble))) << what;
  }
}

TEST_P(DTensorOnGpuTest, RedistributesBetweenAllPlacements) {
  if (const auto reason = GetParam().missing(2)) GTEST_SKIP() << *reason;
  run_on_gpus(GetParam(), 2,
              [](const ProcessGroup& group, at::Device device) { redistribute_on(group, device, {group.size()}); });
}

TEST_P(DTensorOnGpuTest, RedistributesOnAMeshOfTwoDimensions) {
  if (GetParam().is_one()) GTEST_SKIP() << "one rank makes no mesh of two dimensions";
  if (const auto reason = GetParam().missing(4)) GTEST_SKIP() << *reason;
  run_on_gpus(GetParam(), 4, [](const ProcessGroup& group, at::Device device) {
    redistribute_on(group, device, {2, 2});
  });
}

TEST_P(DTensorOnGpuTest, OpsComputeAsOnCpu) {
  if (const auto reason = GetParam().missing(2)) GTEST_SKIP() << *reason;
  run_on_gpus(GetParam(), 2, [](const ProcessGroup& group, at::Device device) {
    const DeviceMesh mesh(group, {group.size()});
    const at::Tensor a = indexed({6, 4}).sin(), b = indexed({4, 8}).cos();
    const at::Tensor expected = at::softmax(at::relu(a.matmul(b)), -1);
    for (const auto& [left, right] : {std::pair{S0, R}, std::pair{R, S1}, std::pair{S1, S0}, std::pair{R, R}}) {
      const auto on_mesh = [&](const at::Tensor& full, const Placement& placement) {
        const MeshLayout layout(full.sizes().vec(), mesh.shape(), {placement});
        return DTensor::from_local(local_of(full, layout, *mesh.coordinate()).to(device), mesh, {placement},
                                   {full.sizes().vec()});
      };
      const DTensor found = dtensor::softmax(dtensor::relu(dtensor::matmul(on_mesh(a, left), on_mesh(b, right))), -1);
      expect_close(found.full_tensor(), expected, 1e-12, to_string(left) + " and " + to_string(right));
    }
  });
}

struct ParallelNetImpl : torch::nn::Module {
  ParallelNetImpl() {
    register_module("ids", ids);
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor x = norm(ids(tokens));
    return x + down(at::gelu(up(x)));
  }
  ParallelEmbedding ids{11, 8};
  ParallelLayerNorm norm{torch::nn::LayerNormOptions({8})};
  ParallelLinear up{8, 12}, down{12, 8};
};
TORCH_MODULE(ParallelNet);

TEST_P(DTensorOnGpuTest, TensorParallelLayersTrainAsOnCpu) {
  if (const auto reason = GetParam().missing(2)) GTEST_SKIP() << *reason;
  run_on_gpus(GetParam(), 2, [](const ProcessGroup& group, at::Device device) {
    std::vector<std::vector<at::Tensor>> results;
    for (const at::Device where : {at::Device(at::kCPU), device}) {
      ParallelNet net;
      net->to(at::kDouble);
      for (const at::Tensor& parameter : net->parameters()) {
        parameter.detach().copy_(indexed(parameter.sizes().vec()).sin());
      }
      net->to(where);
      const DeviceMesh mesh(group, {group.size()}, {"tp"});
      parallelize_module(*net, mesh,
                         {{"ids", RowwiseParallel{.output_layout = S1}},
                          {"norm", SequenceParallel{}},
                          {"up", ColwiseParallel{.input_layout = S1}},
                          {"down", RowwiseParallel{.output_layout = S1}}});
      const at::Tensor tokens = at::arange(24).remainder(11).view({4, 6}).to(where);
      std::vector<at::Tensor> found;
      for (int step = 0; step < 3; ++step) {
        const at::Tensor loss = net->forward(tokens).square().sum();
        loss.backward();
        found.push_back(loss.detach().cpu());
        const at::NoGradGuard no_grad;
        for (const at::Tensor& parameter : net->parameters()) {
          parameter.sub_(parameter.grad(), 1e-3);
          found.push_back(parameter.detach().clone().cpu());
          parameter.mutable_grad().reset();
        }
      }
      results.push_back(found);
    }
    for (std::size_t i = 0; i < results[0].size(); ++i) {
      expect_close(results[1][i], results[0][i], 1e-9, "result " + std::to_string(i));
    }
  });
}

}  // namespace
}  // namespace tessera

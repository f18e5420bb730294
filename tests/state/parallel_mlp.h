#pragma once
// A small model with plain parameters, a buffer, and linear layers that can be parallelized.

#include <ATen/ops/arange.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include "tessera/tensor/tensor_parallel.h"

namespace tessera::testing {

struct ParallelMlpImpl : torch::nn::Module {
  ParallelMlpImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
    const torch::NoGradGuard no_grad;
    std::int64_t first = 1;
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(at::arange(first, first + parameter.numel()).view(parameter.sizes()));
      first += parameter.numel();
    }
  }
  torch::nn::BatchNorm1d norm{6};
  ParallelLinear up{6, 5}, down{5, 6};
};
TORCH_MODULE(ParallelMlp);

// Each rank of the mesh's last dimension has a part.
inline ParallelMlp parallel_mlp(const DeviceMesh& mesh) {
  ParallelMlp model;
  parallelize_module(*model, mesh, {{"up", ColwiseParallel{}}, {"down", RowwiseParallel{}}});
  return model;
}

// The last dimension of a mesh of one or two dimensions, for parallel_mlp.
inline DeviceMesh tensor_parallel_mesh(const ProcessGroup& group, const std::vector<std::int64_t>& shape) {
  return shape.size() == 1 ? DeviceMesh(group, shape) : DeviceMesh(group, shape, {"dp", "tp"})["tp"];
}

// Takes a step in which each gradient is its parameter, so that the step of a part is the part of the step.
inline void step(torch::optim::Optimizer& optimizer) {
  for (auto& group : optimizer.param_groups()) {
    for (at::Tensor& parameter : group.params()) {
      if (parameter.requires_grad()) parameter.mutable_grad() = parameter.detach().clone();
    }
  }
  optimizer.step();
}

}  // namespace tessera::testing

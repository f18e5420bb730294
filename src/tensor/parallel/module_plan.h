#pragma once
// The planned changes to a module that is distributed over a mesh, complete before anything changes.

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/tensor/parallel/distribute_module.h"
#include "tessera/tensor/tensor_parallel.h"

namespace tessera {

// Returns the DTensor of which this rank has `local`, placed as `given` along the only dimension of `mesh`. The size of
// a sharded dimension is `last_size` if it is the last one, else the sum over the ranks: a collective, in which every
// rank throws Error(invalid_argument) unless the tensor is sharded as torch.chunk splits it.
DTensor with_layout(const at::Tensor& local, const DeviceMesh& mesh, const Placement& given,
                    std::optional<std::int64_t> last_size = std::nullopt);

class ModulePlan {
 public:
  ModulePlan(torch::nn::Module& module, const DeviceMesh& mesh, std::optional<std::int64_t> src_data_rank);

  // Plan what parallelize_module and distribute_module do. Throw as these.
  void add(const ParallelPlan& plan);
  void add(const DistributeModuleOptions& options);

  // Adds what must be equal on all ranks.
  void describe(CallArguments& arguments) const;
  // A collective.
  void apply();

 private:
  // A module under one of its names.
  struct NamedModule {
    std::string name;
    torch::nn::Module* module;
  };
  struct Planned {
    std::string name, how;
    TensorParallel* layer;  // null for another module, whose parameters are replicated
    TensorParallel::State state;
  };
  struct Prepared {
    std::string name, how;
    PreparedModule* module;
    PreparedModule::State state;
  };

  void collect(torch::nn::Module& module, const std::string& name);
  void add(const NamedModule& found, const ParallelStyle& style);
  void add_layer(const NamedModule& found, const ParallelStyle& style);
  void add_prepared(const NamedModule& found, const ParallelStyle& style);
  void add_distributed(const NamedModule& found, const DistributeModuleOptions& options);
  const Planned* find(const torch::nn::Module* module) const;
  // A parameter that several modules share must be placed alike in all of them.
  void check_shared_parameters() const;
  at::Tensor part_of(const at::Tensor& full, const MeshLayout& layout) const;

  const DeviceMesh& mesh_;
  std::optional<std::int64_t> src_data_rank_;
  std::vector<NamedModule> modules_;
  std::vector<std::pair<torch::nn::Module*, Planned>> planned_;  // in the plan's order, the same on all ranks
  std::vector<Prepared> prepared_;
  std::vector<torch::nn::Module*> with_buffers_;  // whose buffers are replicated
};

}  // namespace tessera

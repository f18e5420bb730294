// Trains a model whose parameters alone are larger than the memory that a process may use. No rank ever holds it: it is
// built on meta, sharded unit by unit, and saved and loaded in shards. When started again, on any number of ranks,
// resumes from the checkpoint.
//
//   tessera run -n 4 -- build/bin/train_large checkpoint 2 160      160 MiB for each rank
//   tessera run -n 6 -- build/bin/train_large checkpoint 4 160      resumes from step 2
//   build/bin/train_large checkpoint 4 160                          fails: one process does not hold the model

#include <ATen/Parallel.h>
#include <malloc.h>
#include <sys/resource.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <string>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"
#include "tessera/fsdp/meta_init.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"

namespace {

using namespace tessera;

constexpr std::int64_t kWidth = 768, kBlocks = 80, kBatch = 48, kMiB = 1 << 20;  // the batch of all ranks together

struct NetworkImpl : torch::nn::Module {
  NetworkImpl() {
    for (std::int64_t i = 0; i < kBlocks; ++i) blocks->push_back(fsdp::Wrap<torch::nn::Linear>(kWidth, kWidth));
    register_module("blocks", blocks);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = x + torch::tanh(block->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Network);

// Lets this process allocate `bytes` more than it has now (RLIMIT_DATA): beyond that, allocations fail.
void limit_memory(std::int64_t bytes) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmData:")) bytes += std::strtoll(line.c_str() + 7, nullptr, 10) * 1024;
  }
  const rlimit limit{static_cast<rlim_t>(bytes), static_cast<rlim_t>(bytes)};
  if (::setrlimit(RLIMIT_DATA, &limit) != 0) fail(ErrorCode::io, "setrlimit: refused {} bytes", bytes);
}

void train(const std::filesystem::path& checkpoint, std::int64_t steps, std::int64_t limit_mib) {
  const ProcessGroup group = init_process_group();
  at::set_num_threads(1);
  ::mallopt(M_MMAP_THRESHOLD, kMiB);  // tensors of 1 MiB or more return their memory when they are freed
  at::mm(at::ones({kWidth, kWidth}), at::ones({kWidth, kWidth}));  // allocates the buffers of BLAS
  limit_memory(limit_mib * kMiB);

  Network network = [] {
    const fsdp::MetaInit without_memory;
    return Network();
  }();
  std::int64_t bytes = 0;
  for (const at::Tensor& parameter : network->parameters()) bytes += static_cast<std::int64_t>(parameter.nbytes());
  fsdp::Options options;
  options.param_init_fn = [](torch::nn::Module& module) {
    if (auto* linear = module.as<torch::nn::LinearImpl>()) linear->reset_parameters();
  };
  torch::manual_seed(0);
  fsdp::FullyShardedDataParallel<Network> model(network, group, options);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.01));

  // The tensors of the state dict are the shards: save and load copy them in pieces.
  const auto state_at = [&](std::int64_t step) { return StateDict{{"model", model.state_dict()}, {"step", step}}; };
  std::int64_t step = 0;
  if (std::filesystem::exists(checkpoint)) {
    StateDict state = state_at(0);
    LoadOptions load_options;
    load_options.threads = 1;  // threads need memory for their stacks
    load(state, checkpoint, group, load_options);
    model.load_state_dict(state.at("model").get<Dict>());
    step = state.at("step").get<std::int64_t>();
  }
  if (group.rank() == 0) {
    std::cout << group.size() << " ranks, parameters of " << bytes / kMiB << " MiB, " << limit_mib
              << " MiB for each rank, from step " << step << "\n";
  }
  while (step < steps) {
    torch::manual_seed(static_cast<std::uint64_t>(++step));
    const at::Tensor rows = torch::randn({kBatch, kWidth}).slice(0, group.rank(), kBatch, group.size());
    model.zero_grad();
    const at::Tensor loss = (model(rows) - rows).square().mean();
    loss.backward();
    optimizer.step();
    at::Tensor total = loss.detach() / group.size();
    group.all_reduce(total);
    if (group.rank() == 0) std::cout << "step " << step << " loss " << total.item<double>() << "\n";
  }
  SaveOptions save_options;
  save_options.threads = 1;
  save(state_at(step), checkpoint, group, save_options);
}

}  // namespace

int main(int argc, char** argv) {
  // The limit would count parameters that ranks of a host share in full for each rank.
  ::setenv("TESSERA_HOST_MEMORY", "0", /*replace=*/0);
  if (argc != 4) {
    std::cerr << "usage: train_large CHECKPOINT STEPS LIMIT_MIB\n";
    return 2;
  }
  try {
    train(argv[1], std::atoll(argv[2]), std::atoll(argv[3]));
  } catch (const std::exception& error) {
    std::cerr << "train_large: " << error.what() << "\n";
    return 3;
  }
}

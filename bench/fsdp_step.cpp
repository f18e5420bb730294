/// \file
/// Times FullyShardedDataParallel, as each rank of a world. pytorch/fsdp_step.py times PyTorch's. Rank 0 prints one
/// line of JSON, with {"side"} as side.h describes it.
///   fsdp_bench step|plain BLOCKS WIDTH BATCH REPEATS
///     A training step of an MLP that has one unit per block. `plain` trains the same MLP without sharding; it is meant
///     for one rank. {"seconds"}: the median. {"peak_bytes"}: how much the resident memory of a rank grew, at its peak
///     in a step, over the value before the model was made; the maximum over the ranks. Pages of files do not count:
///     they belong to libraries, and their number depends on what the process happened to touch.
///   fsdp_bench state_dict BLOCKS WIDTH BATCH REPEATS
///     The sharded state dict of that MLP: {"seconds"}.
///   fsdp_bench unshard BYTES REPEATS
///     Unshards a flat parameter: {"ours"}. In turn with it, the bare collective that moves the same bytes: {"bare"}
///     into memory allocated for each call, as unshard does, and {"touched"} into memory that is already mapped.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "measure_ranks.h"
#include "side.h"
#include "tessera/comm/init.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"

namespace {

using namespace tessera;
using bench::median;
using bench::seconds;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width) : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  at::Tensor forward(at::Tensor x) { return at::relu(linear(x)); }

  torch::nn::Linear linear;
};
TORCH_MODULE(Block);

// `Unit` is Block, or fsdp::Wrap<Block> for a model to shard.
template <typename Unit>
torch::nn::Sequential make_mlp(std::int64_t blocks, std::int64_t width) {
  torch::nn::Sequential mlp;
  for (std::int64_t i = 0; i < blocks; ++i) mlp->push_back(Unit(width));
  return mlp;
}

std::int64_t status_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1)) * 1024;
  }
  return 0;
}
// `field` is "VmRSS" or "VmHWM", the peak since forget_peak. Without pages of files.
std::int64_t memory_bytes(const std::string& field) { return status_bytes(field) - status_bytes("RssFile"); }
void forget_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

struct Bench {
  ProcessGroup group = init_process_group();
  std::int64_t blocks = 0, width = 0, batch = 0;
  int repeats = 0;

  template <typename Model>
  void step(Model& model, std::vector<at::Tensor> parameters, std::int64_t bytes_before) const {
    torch::optim::SGD optimizer(std::move(parameters), torch::optim::SGDOptions(0.01));
    const at::Tensor rows = at::randn({batch, width});
    std::vector<double> times;
    for (int i = -2; i < repeats; ++i) {  // the first two warm up
      if (i == 0) forget_peak();
      const double time = seconds(group, [&] {
        optimizer.zero_grad();
        model->forward(rows).square().mean().backward();
        optimizer.step();
      });
      if (i >= 0) times.push_back(time);
    }
    const at::Tensor peak = at::tensor({memory_bytes("VmHWM") - bytes_before}, at::kLong);
    group.all_reduce(peak, ReduceOp::max);
    print("\"seconds\": " + std::to_string(median(times)) +
          ", \"peak_bytes\": " + std::to_string(peak.item<std::int64_t>()));
  }

  // On rank 0, while the others wait.
  void print(const std::string& fields) const {
    if (group.rank() == 0) std::cout << '{' << fields << ", \"side\": " << bench::describe_side() << "}\n";
    group.barrier();
  }

  void plain() const {
    const std::int64_t before = memory_bytes("VmRSS");
    torch::nn::Sequential mlp = make_mlp<Block>(blocks, width);
    step(mlp, mlp->parameters(), before);
  }

  void sharded() const {
    const std::int64_t before = memory_bytes("VmRSS");
    fsdp::FullyShardedDataParallel<torch::nn::Sequential> model(make_mlp<fsdp::Wrap<Block>>(blocks, width), group);
    auto* pointer = &model;
    step(pointer, model.parameters(), before);
  }

  void state_dict() const {
    fsdp::FullyShardedDataParallel<torch::nn::Sequential> model(make_mlp<fsdp::Wrap<Block>>(blocks, width), group);
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) times.push_back(seconds(group, [&] { model.state_dict(); }));
    print("\"seconds\": " + std::to_string(median(times)));
  }

  void unshard(std::int64_t bytes) const {
    const std::int64_t numel = bytes / 4 / group.size() * group.size();
    const fsdp::NamedParameter weight{"weight", at::ones({numel}).requires_grad_(true)};
    fsdp::FlatParamHandle handle({weight}, group, {});
    const at::Tensor shard = at::ones({handle.layout().sharded_numel()});
    const at::Tensor memory = at::ones({shard.numel() * group.size()});
    std::vector<double> ours, bare, touched;
    for (int i = 0; i < repeats; ++i) {
      touched.push_back(seconds(group, [&] { group.all_gather_into(memory, shard); }));
      at::Tensor fresh;
      bare.push_back(seconds(group, [&] {
        fresh = at::empty_like(memory);
        group.all_gather_into(fresh, shard);
      }));
      fresh.reset();
      ours.push_back(seconds(group, [&] { handle.unshard(); }));
      handle.reshard();
    }
    print("\"ours\": " + std::to_string(median(ours)) + ", \"bare\": " + std::to_string(median(bare)) +
          ", \"touched\": " + std::to_string(median(touched)));
  }
};

}  // namespace

int main(int argc, char** argv) {
  const std::string work = argc > 1 ? argv[1] : "";
  const bool is_unshard = work == "unshard" && argc == 4;
  if (!is_unshard && !((work == "step" || work == "plain" || work == "state_dict") && argc == 6)) {
    std::cerr << "usage: fsdp_bench step|plain|state_dict BLOCKS WIDTH BATCH REPEATS\n"
                 "       fsdp_bench unshard BYTES REPEATS\n";
    return 2;
  }
  try {
    at::set_num_threads(1);
    Bench bench;
    bench.repeats = std::stoi(argv[argc - 1]);
    if (is_unshard) {
      bench.unshard(std::stoll(argv[2]));
      return 0;
    }
    bench.blocks = std::stoll(argv[2]), bench.width = std::stoll(argv[3]), bench.batch = std::stoll(argv[4]);
    if (work == "plain") bench.plain();
    if (work == "step") bench.sharded();
    if (work == "state_dict") bench.state_dict();
  } catch (const std::exception& error) {
    std::cerr << "fsdp_bench: " << error.what() << '\n';
    return 3;
  }
  return 0;
}

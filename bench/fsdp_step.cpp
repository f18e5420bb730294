/// \file
/// Times FullyShardedDataParallel, as each rank of a world; fsdp_step_pytorch.py does the same under PyTorch's. Rank 0
/// prints one line of JSON.
///   fsdp_bench step|whole BLOCKS WIDTH BATCH REPEATS
///     A training step of an MLP, each block of which is a unit; whole: that isn't sharded, by one rank alone.
///     {"seconds"}, the median, and {"peak_bytes"}: by how much a rank's resident memory grew, at its highest in a
///     step, over what it was before there was a model; of the rank where it grew most. Pages of files don't count:
///     they are those of libraries, as many as a process happens to have looked at.
///   fsdp_bench state_dict BLOCKS WIDTH BATCH REPEATS
///     Its sharded state dict: {"seconds"}.
///   fsdp_bench unshard BYTES REPEATS
///     A flat parameter put together: {"ours"}, against the bare collective that moves the same bytes, in turn:
///     {"bare"} into memory taken for each, as unshard does it, and {"touched"} into memory that is there already.

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

torch::nn::Sequential make_mlp(std::int64_t blocks, std::int64_t width) {
  torch::nn::Sequential mlp;
  for (std::int64_t i = 0; i < blocks; ++i) mlp->push_back(fsdp::Wrap<Block>(width));
  return mlp;
}

std::int64_t status_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1)) * 1024;
  }
  return 0;
}
// "VmRSS", or "VmHWM", its highest since forget_peak; without pages of files.
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
    for (int i = -2; i < repeats; ++i) {  // two that don't count
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
    if (group.rank() != 0) return;
    std::cout << "{\"seconds\": " << median(times) << ", \"peak_bytes\": " << peak.item<std::int64_t>() << "}\n";
  }

  void whole() const {
    const std::int64_t before = memory_bytes("VmRSS");
    torch::nn::Sequential mlp = make_mlp(blocks, width);
    step(mlp, mlp->parameters(), before);
  }

  void sharded() const {
    const std::int64_t before = memory_bytes("VmRSS");
    fsdp::FullyShardedDataParallel<torch::nn::Sequential> model(make_mlp(blocks, width), group);
    auto* pointer = &model;
    step(pointer, model.parameters(), before);
  }

  void state_dict() const {
    fsdp::FullyShardedDataParallel<torch::nn::Sequential> model(make_mlp(blocks, width), group);
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) times.push_back(seconds(group, [&] { model.state_dict(); }));
    if (group.rank() == 0) std::cout << "{\"seconds\": " << median(times) << "}\n";
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
    if (group.rank() != 0) return;
    std::cout << "{\"ours\": " << median(ours) << ", \"bare\": " << median(bare) << ", \"touched\": " << median(touched)
              << "}\n";
  }
};

}  // namespace

int main(int argc, char** argv) {
  const std::string work = argc > 1 ? argv[1] : "";
  const bool is_unshard = work == "unshard" && argc == 4;
  if (!is_unshard && !((work == "step" || work == "whole" || work == "state_dict") && argc == 6)) {
    std::cerr << "usage: fsdp_bench step|whole|state_dict BLOCKS WIDTH BATCH REPEATS\n"
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
    if (work == "whole") bench.whole();
    if (work == "step") bench.sharded();
    if (work == "state_dict") bench.state_dict();
  } catch (const std::exception& error) {
    std::cerr << "fsdp_bench: " << error.what() << '\n';
    return 3;
  }
  return 0;
}

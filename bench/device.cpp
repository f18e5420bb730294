/// \file
/// Times training and checkpoints on a device, as each rank of a world. pytorch/device.py times PyTorch's.
///   device_bench step|plain|save|load|async cpu|cuda float32|bfloat16 BLOCKS WIDTH BATCH REPEATS DIRECTORY
///     step   A training step of an MLP that has one unit per block, with AdamW. bfloat16 is the dtype of computation.
///     plain  The same without sharding; it is meant for one rank.
///     save   Saves the sharded state of that model and its optimizer to DIRECTORY.
///     load   Loads it.
///     async  How long AsyncSaver::save delays the training: until it has returned and the device, which copies the
///            state on the stream of the training, has finished.
/// Rank 0 prints one line of JSON: {"seconds"}: the median, in which the device has finished; {"library"}; {"loss"} of
/// the first step, by which two sides can be compared.

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/cuda.h>
#include <torch/optim/adamw.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "measure_ranks.h"
#include "mlp.h"
#include "side.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/init.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"
#include "tessera/state/async_save.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"

namespace {

using namespace tessera;
using bench::Block;
using bench::make_mlp;
using bench::median;
namespace fs = std::filesystem;
using Model = fsdp::FullyShardedDataParallel<torch::nn::Sequential>;

struct Bench {
  ProcessGroup group = init_process_group();
  at::Device device = at::kCPU;
  bool in_bfloat16 = false;
  std::int64_t blocks = 0, width = 0, batch = 0;
  int repeats = 0;
  fs::path directory;

  void finish() const {
    if (device.is_cuda()) torch::cuda::synchronize(device.index());
  }
  double seconds(FunctionRef<void()> f) const {
    finish();
    return bench::seconds(group, [&] {
      f();
      finish();
    });
  }

  // The same values on every rank and in every run.
  void fill(torch::nn::Module& module) const {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : module.parameters()) {
      parameter.copy_(at::arange(parameter.numel(), parameter.options())
                          .mul(0.37)
                          .sin()
                          .div(std::sqrt(static_cast<double>(width)))
                          .view(parameter.sizes()));
    }
  }
  at::Tensor rows() const {
    return at::arange(batch * width, at::TensorOptions(device).dtype(at::kFloat)).mul(0.11).cos().view({batch, width});
  }
  template <typename Unit>
  torch::nn::Sequential mlp() const {
    torch::nn::Sequential model = make_mlp<Unit>(blocks, width);
    model->to(device);
    fill(*model);
    return model;
  }
  static torch::optim::AdamW make_optimizer(const std::vector<at::Tensor>& parameters) {
    return torch::optim::AdamW(parameters, torch::optim::AdamWOptions(1e-4));
  }

  template <typename Forward>
  void time_steps(torch::optim::Optimizer& optimizer, const Forward& forward) const {
    const at::Tensor x = rows();
    std::vector<double> times;
    double loss_of_first = 0;
    for (int i = -3; i < repeats; ++i) {  // the first ones warm up
      at::Tensor loss;
      const double time = seconds([&] {
        optimizer.zero_grad();
        loss = forward(x).to(at::kFloat).square().mean();
        loss.backward();
        optimizer.step();
      });
      if (i == -3) loss_of_first = loss.item<double>();
      if (i >= 0) times.push_back(time);
    }
    print(times, fmt::format(", \"loss\": {:.6g}", loss_of_first));
  }
  void print(const std::vector<double>& times, const std::string& more = "") const {
    if (group.rank() == 0) {
      std::cout << fmt::format("{{\"seconds\": {:.6f}, \"library\": \"tessera on LibTorch {}\"{}}}\n", median(times),
                               bench::libtorch_version(), more);
    }
    group.barrier();
  }

  void plain() const {
    torch::nn::Sequential model = mlp<Block>();
    if (in_bfloat16) model->to(at::kBFloat16);
    torch::optim::AdamW optimizer = make_optimizer(model->parameters());
    const at::ScalarType dtype = in_bfloat16 ? at::kBFloat16 : at::kFloat;
    time_steps(optimizer, [&](const at::Tensor& x) { return model->forward(x.to(dtype)); });
  }

  fsdp::Options options() const {
    fsdp::Options options;
    if (in_bfloat16) options.mixed_precision.param_dtype = at::kBFloat16;
    return options;
  }
  void step() const {
    Model model(mlp<fsdp::Wrap<Block>>(), group, options());
    torch::optim::AdamW optimizer = make_optimizer(model.parameters());
    time_steps(optimizer, [&](const at::Tensor& x) { return model(x); });
  }

  void checkpoint(const std::string& work) const {
    Model model(mlp<fsdp::Wrap<Block>>(), group, options());
    torch::optim::AdamW optimizer = make_optimizer(model.parameters());
    model(rows()).to(at::kFloat).square().mean().backward();
    optimizer.step();
    const fs::path path = directory / "checkpoint";
    const auto state_of = [&] {
      return StateDict{{"model", model.state_dict()}, {"optim", model.optim_state_dict(optimizer)}};
    };
    const auto clear = [&] {
      if (group.rank() == 0) fs::remove_all(path);
      group.barrier();
    };
    clear();
    AsyncSaver saver(group);
    if (work == "load") save(state_of(), path, group);
    std::vector<double> times;
    for (int i = -1; i < repeats; ++i) {  // the first one warms up
      double time = 0;
      StateDict state = state_of();
      if (work == "load") {
        time = seconds([&] { load(state, path, group); });
      } else {
        clear();
        if (work == "save") {
          time = seconds([&] { save(state, path, group); });
        } else {
          finish();
          group.barrier();
          const auto begin = std::chrono::steady_clock::now();
          saver.save(state, path);
          finish();  // the next step computes after the copies
          time = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        }
        saver.wait();
      }
      if (i >= 0) times.push_back(time);
    }
    clear();
    print(times);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const std::string work = argc == 9 ? argv[1] : "", device = argc == 9 ? argv[2] : "";
  if ((work != "step" && work != "plain" && work != "save" && work != "load" && work != "async") ||
      (device != "cpu" && device != "cuda")) {
    std::cerr << "usage: device_bench step|plain|save|load|async cpu|cuda float32|bfloat16 BLOCKS WIDTH BATCH REPEATS "
                 "DIRECTORY\n";
    return 2;
  }
  try {
    Bench bench;
    if (device == "cuda") {
      const auto gpus = static_cast<int>(torch::cuda::device_count());
      if (gpus == 0) throw std::runtime_error("there is no CUDA device");
      bench.device = {at::kCUDA, static_cast<c10::DeviceIndex>(bench.group.rank() % gpus)};
    }
    const c10::DeviceGuard guard(bench.device);
    bench.in_bfloat16 = std::string(argv[3]) == "bfloat16";
    bench.blocks = std::stoll(argv[4]), bench.width = std::stoll(argv[5]), bench.batch = std::stoll(argv[6]);
    bench.repeats = std::stoi(argv[7]);
    bench.directory = argv[8];
    if (work == "plain") {
      bench.plain();
    } else if (work == "step") {
      bench.step();
    } else {
      bench.checkpoint(work);
    }
  } catch (const std::exception& error) {
    std::cerr << "device_bench: " << error.what() << '\n';
    return 3;
  }
  return 0;
}

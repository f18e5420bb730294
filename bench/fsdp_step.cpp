/// \file
/// Times FullyShardedDataParallel, as each rank of a world. pytorch/fsdp_step.py times PyTorch's. Rank 0 prints one
/// line of JSON, with {"side"} as side.h describes it.
///   fsdp_bench step|plain BLOCKS WIDTH BATCH REPEATS
///     A training step of an MLP that has one unit per block. `plain` trains the same MLP without sharding; it is meant
///     for one rank. {"seconds"}: the median. {"peak_bytes"}: how much the memory of a rank grew, at its peak in a
///     step, over the value before the model was made; the maximum over the ranks. Pages of files do not count.
///     {"allocations"}, {"allocated_bytes"}, {"copied_bytes"}, {"page_faults"}: what one more step costs rank 0, see
///     costs/step_costs.h.
///   fsdp_bench gpt|plain_gpt BLOCKS WIDTH BATCH REPEATS
///     The same for the GPT of the examples, with 8 heads and rows of 128 tokens.
///   fsdp_bench all_reduce BYTES REPEATS
///     The sum of a tensor over the ranks: {"seconds"}.
///   fsdp_bench memory STRATEGY sgd|adamw full|meta BLOCKS WIDTH BATCH REPEATS
///     The same for a strategy of fsdp::ShardingStrategy or `plain`, an optimizer, and a model that is built in full or
///     on meta: {"build_bytes"}, the peak until the model is sharded, {"peak_bytes"}, that of the training after it,
///     and
///     {"build_formula_bytes"} and {"formula_bytes"}, what docs/memory.md states for them. The libraries have been
///     used.
///   fsdp_bench state_dict BLOCKS WIDTH BATCH REPEATS
///     The sharded state dict of that MLP: {"seconds"}.
///   fsdp_bench unshard BYTES REPEATS
///     Unshards a flat parameter: {"ours"}. In turn with it, the bare collective: {"bare"} into memory allocated for
///     each call, as unshard does, and {"touched"} into memory that is already mapped. It moves the same bytes with
///     TESSERA_HOST_MEMORY=0; ranks that share memory share the parameter as well, and their unshard moves none.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "costs/step_costs.h"
#include "gpt.h"
#include "measure_ranks.h"
#include "mlp.h"
#include "side.h"
#include "tessera/base/function_ref.h"
#include "tessera/base/internal/process_memory.h"
#include "tessera/comm/init.h"
#include "tessera/comm/internal/shared_memory.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"
#include "tessera/fsdp/meta_init.h"

namespace {

using namespace tessera;
using bench::Block;
using bench::make_mlp;
using bench::median;
using bench::seconds;

constexpr std::string_view kStrategies[] = {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard",
                                            "hybrid_shard_zero2"};

struct MemoryCase {
  std::string strategy, optimizer, build;
};

std::int64_t grown_bytes(std::uint64_t bytes, std::uint64_t before) {
  return static_cast<std::int64_t>(bytes) - static_cast<std::int64_t>(before);
}

struct Bench {
  ProcessGroup group = init_process_group();
  std::int64_t blocks = 0, width = 0, batch = 0;
  int repeats = 0;

  // `loss_of` runs forward.
  template <typename Loss>
  void step(const Loss& loss_of, std::vector<at::Tensor> parameters, std::uint64_t bytes_before) const {
    torch::optim::SGD optimizer(std::move(parameters), torch::optim::SGDOptions(0.01));
    std::vector<double> times;
    const auto one_step = [&] {
      optimizer.zero_grad();
      loss_of().backward();
      optimizer.step();
    };
    for (int i = -2; i < repeats; ++i) {  // the first two warm up
      if (i == 0) forget_peak_memory();
      const double time = seconds(group, one_step);
      if (i >= 0) times.push_back(time);
    }
    const std::int64_t peak = most(grown_bytes(peak_own_memory_bytes(), bytes_before));  // of shared memory, its part
    const bench::StepCosts costs = bench::costs_of(one_step);
    print(fmt::format(
        "\"seconds\": {}, \"peak_bytes\": {}, \"allocations\": {}, \"allocated_bytes\": {}, "
        "\"copied_bytes\": {}, \"page_faults\": {}",
        median(times), peak, costs.allocations, costs.allocated_bytes, costs.copied_bytes, costs.page_faults));
  }

  // The maximum over the ranks.
  std::int64_t most(std::int64_t value) const {
    const at::Tensor all = at::tensor({value}, at::kLong);
    group.all_reduce(all, ReduceOp::max);
    return all.item<std::int64_t>();
  }

  // On rank 0, while the others wait.
  void print(const std::string& fields) const {
    if (group.rank() == 0) std::cout << '{' << fields << ", \"side\": " << bench::describe_side() << "}\n";
    group.barrier();
  }

  // Trains `model`, sharded or not.
  template <typename Model>
  void train_steps(Model model, bool is_sharded, const at::Tensor& input,
                   FunctionRef<at::Tensor(const at::Tensor& output)> loss_of, std::uint64_t before) const {
    if (!is_sharded) return step([&] { return loss_of(model->forward(input)); }, model->parameters(), before);
    fsdp::FullyShardedDataParallel<Model> sharded(std::exchange(model, nullptr), group);
    step([&] { return loss_of(sharded(input)); }, sharded.parameters(), before);
  }

  void mlp(bool is_sharded) const {
    const std::uint64_t before = own_memory_bytes();
    train_steps(
        is_sharded ? make_mlp<fsdp::Wrap<Block>>(blocks, width) : make_mlp<Block>(blocks, width), is_sharded,
        at::randn({batch, width}), [](const at::Tensor& output) { return output.square().mean(); }, before);
  }

  void gpt(bool is_sharded) const {
    constexpr std::int64_t kTokens = 128, kCharacters = 256;
    const std::uint64_t before = own_memory_bytes();
    const examples::GptConfig config{kCharacters, kTokens, blocks, /*heads=*/8, width};
    const at::Tensor tokens = at::randint(kCharacters, {batch, kTokens}, at::kLong);
    const auto loss_of = [&](const at::Tensor& logits) {
      return at::cross_entropy_loss(logits.view({-1, kCharacters}), tokens.view({-1}));
    };
    train_steps(examples::Gpt(config), is_sharded, tokens, loss_of, before);
  }

  void all_reduce(std::int64_t bytes) const {
    const at::Tensor tensor = at::ones({bytes / 4});
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) times.push_back(seconds(group, [&] { group.start_all_reduce(tensor).wait(); }));
    print(fmt::format("\"seconds\": {:.9f}", median(times)));
  }

  void state_dict() const {
    fsdp::FullyShardedDataParallel<torch::nn::Sequential> model(make_mlp<fsdp::Wrap<Block>>(blocks, width), group);
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) times.push_back(seconds(group, [&] { model.state_dict(); }));
    print("\"seconds\": " + std::to_string(median(times)));
  }

  // Trains for `repeats` steps, in which gradients are reset before forward.
  template <typename Model>
  void train(Model& model, const std::vector<at::Tensor>& parameters, const std::string& optimizer) const {
    std::unique_ptr<torch::optim::Optimizer> steps;
    if (optimizer == "sgd") {
      steps = std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.01));
    } else {
      steps = std::make_unique<torch::optim::AdamW>(parameters);
    }
    for (int i = 0; i < repeats; ++i) {
      for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
      model->forward(at::randn({batch, width})).square().mean().backward();
      steps->step();
    }
  }

  // Builds and trains a model of `count` blocks. Returns how much the memory grew until the model was sharded, and
  // after it.
  std::pair<std::int64_t, std::int64_t> peaks_of(const MemoryCase& wanted, const fsdp::Options& options,
                                                 std::int64_t count) const {
    forget_peak_memory();
    const std::uint64_t before = own_memory_bytes();
    if (wanted.strategy == "plain") {
      torch::nn::Sequential mlp = make_mlp<Block>(count, width);
      const std::int64_t built = grown_bytes(peak_own_memory_bytes(), before);
      forget_peak_memory();
      train(mlp, mlp->parameters(), wanted.optimizer);
      return {built, grown_bytes(peak_own_memory_bytes(), before)};
    }
    torch::nn::Sequential mlp = [&] {
      std::optional<fsdp::MetaInit> on_meta;
      if (wanted.build == "meta") on_meta.emplace();
      return make_mlp<fsdp::Wrap<Block>>(count, width);
    }();
    fsdp::FullyShardedDataParallel<torch::nn::Sequential> model(std::exchange(mlp, nullptr), group, options);
    const std::int64_t built = grown_bytes(peak_own_memory_bytes(), before);
    forget_peak_memory();
    auto* pointer = &model;
    train(pointer, model.parameters(), wanted.optimizer);
    const std::int64_t grown = grown_bytes(peak_own_memory_bytes(), before);
    group.barrier();  // until then the ranks share the parameters
    return {built, grown};
  }

  void memory(const MemoryCase& wanted) const {
    fsdp::Options options;
    options.param_init_fn = [](torch::nn::Module& module) {
      if (auto* linear = module.as<torch::nn::LinearImpl>()) linear->reset_parameters();
    };
    const auto* const strategy = std::find(std::begin(kStrategies), std::end(kStrategies), wanted.strategy);
    ProcessGroup shards = group;
    if (strategy != std::end(kStrategies)) {
      options.strategy = static_cast<fsdp::ShardingStrategy>(strategy - std::begin(kStrategies));
      if (fsdp::is_hybrid(options.strategy)) {
        const fsdp::HybridGroups groups = fsdp::hybrid_groups(group, group.size() / 2);
        shards = groups.shards, options.replicas = groups.replicas;
      }
    }
    Bench bench = *this;
    bench.group = shards;
    bench.peaks_of(wanted, options, 2);
    const auto [build, peak] = bench.peaks_of(wanted, options, blocks);
    const auto [build_formula, formula] = stated_peaks(wanted, options.strategy, shards);
    print(fmt::format("\"build_bytes\": {}, \"build_formula_bytes\": {}, \"peak_bytes\": {}, \"formula_bytes\": {}",
                      most(build), build_formula, most(peak), formula));
  }

  // Those of docs/memory.md: until the model is sharded, and after it.
  std::pair<std::int64_t, std::int64_t> stated_peaks(const MemoryCase& wanted, fsdp::ShardingStrategy strategy,
                                                     const ProcessGroup& shards) const {
    const int ranks = shards.size();
    const bool shares_memory = comm::SharedMemory::is_available(shards);
    const std::int64_t unit = 4 * width * (width + 1), parameters = blocks * unit;
    const std::int64_t state = wanted.optimizer == "adamw" ? 2 * parameters : 0;
    const std::int64_t activations = blocks * 2 * 4 * batch * width;
    if (wanted.strategy == "plain") return {parameters, 2 * parameters + state + activations};
    const std::int64_t parts = is_sharded(strategy) ? ranks : 1;
    const std::int64_t build = wanted.build == "meta" ? parameters / parts : parameters;
    const bool gathers_all = is_sharded(strategy) && !reshards_after_forward(strategy) && !shares_memory;
    const std::int64_t units = !is_sharded(strategy) ? 2 : shares_memory ? 3 : 7;
    const std::int64_t kept =
        gathers_all ? (parameters + state) / parts + parameters : (2 * parameters + state) / parts;
    return {build + 2 * unit + (16 << 20), kept + units * unit + activations};
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
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const std::string work = arguments.empty() ? "" : arguments[0];
  const bool takes_bytes = work == "unshard" || work == "all_reduce";
  const std::size_t numbers = takes_bytes ? 2 : 4, words = work == "memory" ? 4 : 1;
  const std::vector<std::string> works{"step", "plain", "gpt", "plain_gpt", "state_dict", "memory"};
  if ((!takes_bytes && std::find(works.begin(), works.end(), work) == works.end()) ||
      arguments.size() != words + numbers) {
    std::cerr << "usage: fsdp_bench step|plain|gpt|plain_gpt|state_dict BLOCKS WIDTH BATCH REPEATS\n"
                 "       fsdp_bench memory STRATEGY|plain sgd|adamw full|meta BLOCKS WIDTH BATCH REPEATS\n"
                 "       fsdp_bench unshard|all_reduce BYTES REPEATS\n";
    return 2;
  }
  try {
    at::set_num_threads(1);
    Bench bench;
    bench.repeats = std::stoi(arguments.back());
    if (takes_bytes) {
      const std::int64_t bytes = std::stoll(arguments[1]);
      if (work == "unshard") bench.unshard(bytes);
      if (work == "all_reduce") bench.all_reduce(bytes);
      return 0;
    }
    bench.blocks = std::stoll(arguments[words]), bench.width = std::stoll(arguments[words + 1]);
    bench.batch = std::stoll(arguments[words + 2]);
    if (work == "plain" || work == "step") bench.mlp(work == "step");
    if (work == "plain_gpt" || work == "gpt") bench.gpt(work == "gpt");
    if (work == "state_dict") bench.state_dict();
    if (work == "memory") bench.memory({arguments[1], arguments[2], arguments[3]});
  } catch (const std::exception& error) {
    std::cerr << "fsdp_bench: " << error.what() << '\n';
    return 3;
  }
  return 0;
}

// Trains small networks under FullyShardedDataParallel on ranks as threads, so that Python can compare and resume them,
// and vice versa. train_fsdp.py --runs does the same with PyTorch's class, and documents the options: each line of the
// input is a JSON list of those of a run, and each line of the output has "why" it failed, or nothing.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/tensor/tensor_parallel.h"

namespace {

using namespace tessera;

constexpr std::int64_t kRows = 24;  // of a micro-batch, of all ranks together
constexpr std::int64_t kFeatures = 5, kWidth = 13, kOutputs = 3, kMlpWidth = 16, kMlpHidden = 24;

// Numbers that both languages make alike.
at::Tensor numbers(std::int64_t count, double step) {
  return (torch::arange(1, count + 1, torch::kDouble) * step).sin();
}

void fill(const torch::nn::Module& module, double factor) {
  const torch::NoGradGuard no_grad;
  int i = 0;
  for (at::Tensor& parameter : module.parameters()) {
    parameter.copy_(numbers(parameter.numel(), 0.1 * (i++ + 2)).view_as(parameter) * factor);
  }
}

torch::nn::LayerNorm layer_norm(std::int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

// Has odd sizes, so that shards split the parameters.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t hidden) : first(kWidth, hidden), norm(layer_norm(hidden)), second(hidden, kWidth) {
    register_module("first", first);
    register_module("norm", norm);
    register_module("second", second);
    gain = register_parameter("gain", torch::empty({1}));
  }
  at::Tensor forward(at::Tensor x) { return x + gain * second(torch::tanh(norm(first(x)))); }

  torch::nn::Linear first;
  torch::nn::LayerNorm norm;
  torch::nn::Linear second;
  at::Tensor gain;
};
TORCH_MODULE(Block);

// Units within a unit that has a parameter of its own.
struct TowerImpl : torch::nn::Module {
  TowerImpl() : narrow(7), wide(29) {
    gain = register_parameter("gain", torch::empty({kWidth}));
    register_module("narrow", narrow);
    register_module("wide", wide);
  }
  at::Tensor forward(at::Tensor x) { return wide(gain * narrow(x)); }

  at::Tensor gain;
  fsdp::Wrap<Block> narrow, wide;
};
TORCH_MODULE(Tower);

struct NetworkImpl : torch::nn::Module {
  NetworkImpl() : stem(kFeatures, kWidth), twice(17), norm(layer_norm(kWidth)), head(kWidth, kOutputs) {
    scale = register_buffer("scale", torch::empty({kWidth}));
    register_module("stem", stem);
    register_module("twice", twice);
    register_module("tower", tower);
    register_module("norm", norm);
    register_module("head", head);
    fill(*this, 0.5);
    scale.copy_(numbers(kWidth, 0.3) + 1.5);
  }
  at::Tensor forward(at::Tensor x) {
    x = twice(torch::tanh(stem(x)));
    x = twice(tower(x));
    return head(norm(x * scale));
  }

  at::Tensor scale;
  torch::nn::Linear stem;
  fsdp::Wrap<Block> twice;
  fsdp::Wrap<Tower> tower;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};
TORCH_MODULE(Network);

// Whose layers can be tensor parallel, of sizes that PyTorch wants then: a mesh divides them.
struct ParallelBlockImpl : torch::nn::Module {
  ParallelBlockImpl() : norm(layer_norm(kMlpWidth)) {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(at::Tensor x) { return x + down(torch::tanh(up(norm(x)))); }

  torch::nn::LayerNorm norm;
  ParallelLinear up{kMlpWidth, kMlpHidden}, down{kMlpHidden, kMlpWidth};
};
TORCH_MODULE(ParallelBlock);

struct MlpImpl : torch::nn::Module {
  MlpImpl() : stem(kFeatures, kMlpWidth), head(kMlpWidth, kOutputs) {
    register_module("stem", stem);
    register_module("first", first);
    register_module("second", second);
    register_module("head", head);
    fill(*this, 0.2);
  }
  at::Tensor forward(at::Tensor x) { return head(second(first(torch::tanh(stem(x))))); }

  torch::nn::Linear stem;
  fsdp::Wrap<ParallelBlock> first, second;
  torch::nn::Linear head;
};
TORCH_MODULE(Mlp);

struct Arguments {
  int ranks = 1, tp = 1;
  bool is_mlp = false;
  fsdp::ShardingStrategy strategy = fsdp::ShardingStrategy::full_shard;
  bool orig_params = true, freeze = false, bf16 = false, reduce_float32 = false, keep_low_precision = false;
  int accumulate = 1;
  bool sync_each = false;
  std::string optimizer = "adamw";
  bool is_local = false;  // whether flat parameters are saved and loaded, without the optimizer's state
  double clip = 0;
  std::vector<int> steps;
  std::string load, save, losses;
};

fsdp::Options options_of(const Arguments& arguments) {
  fsdp::Options options;
  options.strategy = arguments.strategy;
  options.use_orig_params = arguments.orig_params;
  if (arguments.bf16) {
    options.mixed_precision.param_dtype = at::kBFloat16;
    if (arguments.reduce_float32) options.mixed_precision.reduce_dtype = at::kFloat;
    options.mixed_precision.buffer_dtype = at::kBFloat16;
    options.mixed_precision.keep_low_precision_grads = arguments.keep_low_precision;
  }
  return options;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, std::vector<at::Tensor> parameters) {
  if (name == "adamw") {
    return std::make_unique<torch::optim::AdamW>(
        std::move(parameters), torch::optim::AdamWOptions(0.02).eps(1e-4).weight_decay(0.1).amsgrad(true));
  }
  if (name == "stateless") return std::make_unique<torch::optim::SGD>(std::move(parameters), 0.05);
  return std::make_unique<torch::optim::SGD>(
      std::move(parameters), torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01).nesterov(true));
}

StateDict state_of(fsdp::ShardedModule& model, const torch::optim::Optimizer& optimizer, bool is_local) {
  if (is_local) return {{"model", model.state_dict(fsdp::StateDictType::local)}};
  return {{"model", model.state_dict()}, {"optim", model.optim_state_dict(optimizer)}};
}

void load_into(fsdp::ShardedModule& model, torch::optim::Optimizer& optimizer, const std::string& source,
               const ProcessGroup& group, bool is_local) {
  StateDict state = state_of(model, optimizer, is_local);
  // An older PyTorch's optimizer has fewer options, and nothing else may be missing.
  LoadOptions options;
  options.rules.allow_partial = true;
  const LoadReport report = load(state, source, group, options);
  for (const std::string& missing : report.missing) {
    if (!missing.starts_with("optim.param_groups.")) fail(ErrorCode::not_found, "{} has no '{}'", source, missing);
  }
  model.load_state_dict(state.at("model").get<Dict>());
  if (!is_local) model.load_optim_state_dict(optimizer, state.at("optim").get<Dict>());
}

std::string json_list(const std::vector<double>& values) { return fmt::format("[{}]", fmt::join(values, ", ")); }

template <typename Network>
void train(const Network& network, const DeviceMesh& mesh, const Arguments& arguments) {
  const ProcessGroup &group = mesh.group(), &dp = mesh.group("dp");
  fsdp::FullyShardedDataParallel<Network> model(network, dp, options_of(arguments));
  const auto optimizer = make_optimizer(arguments.optimizer, model.parameters());
  const int first = arguments.steps.at(0), last = arguments.steps.at(1);
  if (first > 0) load_into(model, *optimizer, arguments.load, group, arguments.is_local);
  std::vector<double> losses, norms;
  for (int step = first + 1; step <= last; ++step) {
    optimizer->zero_grad();
    const at::Tensor total = torch::zeros({}, torch::kDouble);
    for (int micro = 0; micro < arguments.accumulate; ++micro) {
      const at::Tensor batch =
          numbers(kRows * kFeatures, 0.37 * step + 0.11 * micro).view({kRows, kFeatures}).to(torch::kFloat);
      const at::Tensor mine = at::tensor_split(batch, dp.size()).at(static_cast<std::size_t>(dp.rank()));
      const auto no_sync = model.no_sync(arguments.sync_each || micro == arguments.accumulate - 1);
      const at::Tensor target = mine.narrow(1, 0, kOutputs) * mine.narrow(1, 1, kOutputs);
      const at::Tensor loss = (model(mine).to(torch::kFloat) - target).square().mean();
      (loss / arguments.accumulate).backward();
      total.add_(loss.detach().to(torch::kDouble) / arguments.accumulate);
    }
    if (arguments.clip > 0) norms.push_back(model.clip_grad_norm_(arguments.clip).template item<double>());
    optimizer->step();
    dp.all_reduce(total);
    losses.push_back(total.item<double>() / dp.size());
  }
  if (!arguments.save.empty()) save(state_of(model, *optimizer, arguments.is_local), arguments.save, group);
  if (group.rank() != 0) return;
  std::ofstream(arguments.losses) << fmt::format(R"({{"losses": {}, "norms": {}}})", json_list(losses),
                                                 json_list(norms));
}

void train(const ProcessGroup& group, const Arguments& arguments) {
  const DeviceMesh mesh(group, {arguments.ranks / arguments.tp, arguments.tp}, {"dp", "tp"});
  if (!arguments.is_mlp) {
    Network network;
    if (arguments.freeze) network->tower->wide->first->weight.set_requires_grad(false);
    return train(network, mesh, arguments);
  }
  Mlp network;
  if (arguments.tp > 1) {
    parallelize_module(*network, mesh["tp"], {{"*.up", ColwiseParallel{}}, {"*.down", RowwiseParallel{}}});
  }
  train(network, mesh, arguments);
}

// Throws CLI::Error or std::exception.
void run(std::vector<std::string> words) {
  using Strategy = fsdp::ShardingStrategy;
  const std::map<std::string, Strategy> strategies{{"full_shard", Strategy::full_shard},
                                                   {"shard_grad_op", Strategy::shard_grad_op},
                                                   {"no_shard", Strategy::no_shard}};
  const std::map<std::string, bool> mixed{{"none", false}, {"bf16", true}}, networks{{"tower", false}, {"mlp", true}},
      states{{"sharded", false}, {"local", true}};
  Arguments arguments;
  CLI::App app;
  app.add_option("--ranks", arguments.ranks);
  app.add_option("--network", arguments.is_mlp)->transform(CLI::CheckedTransformer(networks));
  app.add_option("--tp", arguments.tp);
  app.add_option("--strategy", arguments.strategy)->transform(CLI::CheckedTransformer(strategies));
  app.add_option("--orig-params", arguments.orig_params);
  app.add_option("--freeze", arguments.freeze);
  app.add_option("--mixed", arguments.bf16)->transform(CLI::CheckedTransformer(mixed));
  app.add_option("--reduce-float32", arguments.reduce_float32);
  app.add_option("--keep-low-precision", arguments.keep_low_precision);
  app.add_option("--accumulate", arguments.accumulate);
  app.add_option("--sync-each", arguments.sync_each);
  app.add_option("--optimizer", arguments.optimizer)->check(CLI::IsMember({"sgd", "adamw", "stateless"}));
  app.add_option("--state", arguments.is_local)->transform(CLI::CheckedTransformer(states));
  app.add_option("--clip", arguments.clip);
  app.add_option("--steps", arguments.steps)->required()->expected(2);
  app.add_option("--load", arguments.load);
  app.add_option("--save", arguments.save);
  app.add_option("--losses", arguments.losses)->required();
  std::reverse(words.begin(), words.end());  // as CLI11 takes them
  app.parse(std::move(words));
  run_local(arguments.ranks, [&](const ProcessGroup& group) { train(group, arguments); });
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::string why;
    try {
      run(nlohmann::json::parse(line).get<std::vector<std::string>>());
    } catch (const std::exception& error) {
      why = error.what();
    }
    std::cout << nlohmann::json{{"why", why}}.dump() << std::endl;
  }
  return 0;
}

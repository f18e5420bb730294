// Trains a small GPT on the characters of a text, sharded over all ranks, and saves in the background every few steps.
// When started again, on any number of ranks, resumes from the last checkpoint.
//
//   tessera run -n 4 -- build/bin/train_gpt --directory checkpoints --steps 200
//   tessera run -n 2 -- build/bin/train_gpt --directory checkpoints --steps 400 --sample 500

#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>
#include <torch/cuda.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/adamw.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>

#include "gpt.h"
#include "loss_plot.h"
#include "tessera/comm/init.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"
#include "tessera/state/checkpoint_manager.h"
#include "text.h"

namespace tessera::examples {
namespace {

using fsdp::ShardingStrategy;
using Clock = std::chrono::steady_clock;

struct Flags {
  std::vector<std::filesystem::path> texts = {"/usr/share/common-licenses"};
  std::filesystem::path directory, plot;
  GptConfig model;
  std::int64_t steps = 1000, batch = 32, accumulate = 1, save_every = 100, print_every = 1, sample = 0;
  double learning_rate = 0.005;
  bool mixed_precision = false;
  std::string strategy = "full_shard", backend = "gloo", device = "cpu";
  int shard_ranks = 2;
};

const std::map<std::string, ShardingStrategy> kStrategies = {
    {"full_shard", ShardingStrategy::full_shard},
    {"shard_grad_op", ShardingStrategy::shard_grad_op},
    {"no_shard", ShardingStrategy::no_shard},
    {"hybrid_shard", ShardingStrategy::hybrid_shard},
    {"hybrid_shard_zero2", ShardingStrategy::hybrid_shard_zero2},
};

void add_flags(CLI::App& app, Flags& flags) {
  const auto add_count = [&](const char* name, auto& value, const char* help) {
    const CLI::Validator is_count = CLI::Range(1, 1'000'000'000).description("");
    app.add_option(name, value, help)->check(is_count)->capture_default_str()->type_name("N");
  };
  app.add_option("TEXT", flags.texts, "Files or directories to train on (default: Debian's licences)");
  app.add_option("--directory", flags.directory, "Directory of the checkpoints")->required()->type_name("DIR");
  add_count("--steps", flags.steps, "Total number of steps, including those before a restart");
  add_count("--batch", flags.batch, "Rows per step over all ranks");
  add_count("--accumulate", flags.accumulate, "Number of micro-batches in which each rank processes its rows");
  add_count("--context", flags.model.context, "Characters per row");
  add_count("--layers", flags.model.layers, "Number of blocks");
  add_count("--heads", flags.model.heads, "Attention heads per block");
  add_count("--width", flags.model.width, "Embedding width");
  app.add_option("--lr", flags.learning_rate, "Maximum learning rate")->capture_default_str()->type_name("X");
  app.add_flag("--mixed-precision", flags.mixed_precision, "Compute in bfloat16");
  app.add_option("--strategy", flags.strategy,
                 "full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2")
      ->check(CLI::IsMember(kStrategies).description(""))
      ->capture_default_str()
      ->type_name("NAME");
  add_count("--shard-ranks", flags.shard_ranks,
            "With a hybrid strategy, number of ranks over which the model is sharded");
  app.add_option("--backend", flags.backend, "gloo, nccl or mpi")
      ->check(CLI::IsMember(available_backends()).description(""))
      ->capture_default_str()
      ->type_name("NAME");
  app.add_option("--device", flags.device, "cpu or cuda; ranks share GPUs if there are fewer")
      ->check(CLI::IsMember({"cpu", "cuda"}).description(""))
      ->capture_default_str()
      ->type_name("NAME");
  add_count("--save-every", flags.save_every, "Steps between checkpoints");
  add_count("--print-every", flags.print_every, "Steps between printed lines");
  add_count("--sample", flags.sample, "Characters to generate at the end");
  app.add_option("--plot", flags.plot, "Plot the loss to this SVG file")->type_name("FILE");
}

at::Device device_of(const Flags& flags, const ProcessGroup& group) {
  if (flags.device == "cpu") return at::kCPU;
  const auto count = static_cast<int>(torch::cuda::device_count());
  if (count == 0) fail(ErrorCode::unsupported, "--device cuda: found no GPU, expected at least one");
  return {at::kCUDA, static_cast<c10::DeviceIndex>(group.rank() % count)};
}

using Model = fsdp::FullyShardedDataParallel<Gpt>;

Model shard(const Gpt& gpt, const Flags& flags, const ProcessGroup& group) {
  fsdp::Options options;
  options.strategy = kStrategies.at(flags.strategy);
  if (flags.mixed_precision) options.mixed_precision.param_dtype = torch::kBFloat16;
  if (!fsdp::is_hybrid(options.strategy)) return Model(gpt, group, options);
  const fsdp::HybridGroups groups = fsdp::hybrid_groups(group, flags.shard_ranks);
  options.replicas = groups.replicas;
  return Model(gpt, groups.shards, options);
}

// Warms up linearly, then decays with the inverse square root of the step, which suits any number of steps.
double learning_rate(const Flags& flags, std::int64_t step) {
  constexpr double kRising = 60;
  const double part = static_cast<double>(step) / kRising;
  return flags.learning_rate * std::min(part, 1 / std::sqrt(part));
}

double resident_mib() {
  std::int64_t all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return static_cast<double>(resident * ::sysconf(_SC_PAGESIZE)) / (1 << 20);
}

class Trainer {
 public:
  Trainer(const Gpt& gpt, const Flags& flags, const ProcessGroup& group, const Text& text, at::Device device)
      : flags_(flags),
        group_(group),
        text_(text),
        device_(device),
        model_(shard(gpt, flags, group)),
        optimizer_(model_.parameters(), torch::optim::AdamWOptions(flags_.learning_rate)) {}

  const Model& model() const { return model_; }

  // Trains on the rows of a step; returns their average loss.
  double train_step(std::int64_t step) {
    model_.zero_grad();
    at::Tensor sum = torch::zeros({}, torch::TensorOptions(device_).dtype(torch::kDouble));
    const std::int64_t parts = flags_.accumulate * group_.size();
    for (std::int64_t part = group_.rank(); part < parts; part += group_.size()) {
      const auto no_sync = model_.no_sync(part + group_.size() >= parts);
      const at::Tensor loss = loss_sum(step, part, parts);
      sum += loss.detach();
      // Backward averages gradients over the ranks. With this scale, the parts add up to the gradient of the average
      // loss.
      (loss * group_.size() / tokens_of_step()).backward();
    }
    model_.clip_grad_norm_(1.0);
    for (auto& parameters : optimizer_.param_groups()) parameters.options().set_lr(learning_rate(flags_, step));
    optimizer_.step();
    group_.all_reduce(sum);
    return sum.item<double>() / static_cast<double>(tokens_of_step());
  }

  // The part of the state that describes the model. It must be equal in the checkpoint and here.
  StateDict description() const {
    const GptConfig& config = flags_.model;
    return {
        {"config",
         Dict{
             {"context", config.context}, {"layers", config.layers}, {"heads", config.heads}, {"width", config.width}}},
        {"vocabulary", text_.vocabulary()}};
  }

  StateDict state() {
    StateDict all = description();
    all["model"] = model_.state_dict();
    all["optimizer"] = model_.optim_state_dict(optimizer_);
    return all;
  }

  // Restores the newest checkpoint and returns its step, or 0 if there is none.
  std::int64_t restore(CheckpointManager& manager) {
    const StateDict own = description();
    StateDict saved = own;
    if (!manager.restore_latest(saved)) return 0;
    for (const auto& [key, value] : own) {
      if (saved.at(key) == value) continue;
      fail(ErrorCode::invalid_argument, "resume from {}: {} of the checkpoint is {}, expected {}",
           flags_.directory.string(), to_string(key), to_string(saved.at(key), 300), to_string(value, 300));
    }
    saved = state();
    const std::int64_t step = manager.restore_latest(saved).value();
    model_.load_state_dict(saved.at("model").get<Dict>());
    model_.load_optim_state_dict(optimizer_, saved.at("optimizer").get<Dict>());
    return step;
  }

  // Returns `count` generated characters that follow the first character of the text; the same on all ranks.
  std::string sample(std::int64_t count) {
    constexpr double kTemperature = 0.5;
    const torch::NoGradGuard no_grad;
    model_.eval();
    torch::manual_seed(0);
    at::Tensor tokens = text_.tokens().slice(0, 0, 1).to(device_, torch::kLong).view({1, 1});
    std::string generated;
    for (std::int64_t i = 0; i < count; ++i) {
      const at::Tensor logits = model_(tokens.slice(1, -flags_.model.context)).select(1, -1).to(torch::kFloat);
      const at::Tensor next = torch::multinomial(logits.div(kTemperature).softmax(1), 1);
      group_.broadcast(next, 0);
      generated += text_.characters()[static_cast<std::size_t>(next.item<std::int64_t>())];
      tokens = torch::cat({tokens, next}, 1);
    }
    return generated;
  }

  std::int64_t tokens_of_step() const { return flags_.batch * flags_.model.context; }

 private:
  at::Tensor loss_sum(std::int64_t step, std::int64_t part, std::int64_t parts) {
    const at::Tensor rows = text_.rows(step, flags_.batch, flags_.model.context + 1, part, parts).to(device_);
    const at::Tensor logits = model_(rows.slice(1, 0, -1)).flatten(0, 1).to(torch::kFloat);
    const auto sum = torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum);
    return torch::nn::functional::cross_entropy(logits, rows.slice(1, 1).flatten(), sum);
  }

  const Flags& flags_;
  const ProcessGroup& group_;
  const Text& text_;
  at::Device device_;
  Model model_;
  torch::optim::AdamW optimizer_;
};

// Prints progress on rank 0: each line covers the steps since the previous one.
class Progress {
 public:
  explicit Progress(const Trainer& trainer)
      : trainer_(trainer), since_(Clock::now()), communication_(trainer.model().communication_seconds()) {}

  void print(std::int64_t step, std::int64_t steps, double loss) {
    const Clock::time_point now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - since_).count();
    const double communication = trainer_.model().communication_seconds();
    std::cout << fmt::format("step {:>4}  loss {:.4f}  {:>6.0f} tokens/s  {:.0f} MiB  {:.0f} % communication\n", step,
                             loss, static_cast<double>(steps * trainer_.tokens_of_step()) / seconds, resident_mib(),
                             100 * (communication - communication_) / seconds)
              << std::flush;
    since_ = now;
    communication_ = communication;
  }

 private:
  const Trainer& trainer_;
  Clock::time_point since_;
  double communication_;
};

CheckpointManagerOptions checkpoint_options(const Flags& flags) {
  CheckpointManagerOptions options;
  options.save_every = flags.save_every;
  options.keep_last = 2;
  options.warn = [](const std::string& what) { std::cerr << "warning: " << what << "\n"; };
  return options;
}

void introduce(const Gpt& gpt, const Text& text, int ranks) {
  std::int64_t parameters = 0;
  for (const at::Tensor& parameter : gpt->parameters()) parameters += parameter.numel();
  std::cout << fmt::format("{} rank{}; {} parameters; {} characters of text, {} distinct\n", ranks,
                           ranks == 1 ? "" : "s", parameters, text.tokens().numel(), text.characters().size())
            << std::flush;
}

void train(Flags flags) {
  InitOptions options = options_from_environment();
  options.backend = flags.backend;
  const ProcessGroup group = init_process_group(options);
  const bool is_printer = group.rank() == 0;
  const Text text(read_text(flags.texts));
  flags.model.characters = static_cast<std::int64_t>(text.characters().size());
  torch::manual_seed(0);  // the same initial model on any number of ranks
  Gpt gpt(flags.model);
  const at::Device device = device_of(flags, group);
  const c10::DeviceGuard guard(device);
  gpt->to(device);
  if (is_printer) introduce(gpt, text, group.size());
  Trainer trainer(gpt, flags, group, text, device);

  CheckpointManager manager(flags.directory, group, checkpoint_options(flags));
  std::int64_t step = trainer.restore(manager);
  if (is_printer && step > 0) std::cout << fmt::format("resumed from step {}\n", step) << std::flush;
  std::optional<LossCurve> curve;
  if (is_printer) curve.emplace(flags.directory / "loss.csv", step);

  Progress progress(trainer);
  std::int64_t printed = step;
  while (step < flags.steps) {
    const double loss = trainer.train_step(++step);
    const bool is_last = step == flags.steps;
    if (is_printer) curve->add({step, loss, group.size()});
    if (is_printer && (is_last || step % flags.print_every == 0)) {
      progress.print(step, step - printed, loss);
      printed = step;
    }
    if (is_last || manager.is_due(step)) {
      manager.save(step, trainer.state(), loss, true);
      if (is_printer && !flags.plot.empty()) write_loss_plot(curve->points(), flags.plot);
    }
  }
  manager.wait();
  if (is_printer && !flags.plot.empty()) write_loss_plot(curve->points(), flags.plot);
  if (flags.sample > 0) {
    const std::string generated = trainer.sample(flags.sample);
    if (is_printer) std::cout << "\n" << generated << "\n" << std::flush;
  }
}

}  // namespace
}  // namespace tessera::examples

int main(int argc, char** argv) {
  using namespace tessera::examples;
  Flags flags;
  CLI::App app("Trains a small GPT on the characters of a text, sharded over all ranks", "train_gpt");
  add_flags(app, flags);
  try {
    app.parse(argc, argv);
    train(flags);
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const c10::Error& error) {
    std::cerr << "train_gpt: " << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "train_gpt: " << error.what() << "\n";
  }
  return 1;
}

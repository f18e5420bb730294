#include "accelerator/step/step.h"

#include <torch/optim/adamw.h>

#include <algorithm>
#include <barrier>
#include <map>
#include <string>
#include <utility>

#include "accelerator/fsdp_training.h"
#include "support/accelerator/engine.h"
#include "tessera/base/function_ref.h"

namespace tessera::fsdp {

namespace {

constexpr int kSteps = 3;

struct NotedBlockImpl : BlockImpl {
  NotedBlockImpl(std::int64_t width, int index) : BlockImpl(width), number(std::to_string(index)) {}
  at::Tensor forward(const at::Tensor& x) {
    sim::note("forward " + number);
    at::Tensor result = BlockImpl::forward(x);
    result.register_hook([text = "backward " + number](const at::Tensor&) { sim::note(text); });
    return result;
  }
  std::string number;
};
TORCH_MODULE(NotedBlock);

struct NotedStackImpl : torch::nn::Module {
  explicit NotedStackImpl(const StepModel& model) {
    for (int i = 0; i < model.blocks; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), Wrap<NotedBlock>(model.width, i)));
    head = register_module("head", torch::nn::Linear(model.width, 5));
  }
  at::Tensor forward(at::Tensor x) {
    for (Wrap<NotedBlock>& block : blocks) x = block(x);
    sim::note("forward " + std::to_string(blocks.size()));
    return head(x);
  }
  std::vector<Wrap<NotedBlock>> blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(NotedStack);

using Kind = Work::Kind;

// The kind and the unit of what follows a note.
std::pair<Kind, int> meaning_of(const std::string& note) {
  const std::size_t space = note.find(' ');
  if (space == std::string::npos) return {Kind::optimizer, -1};
  return {note.substr(0, space) == "forward" ? Kind::forward : Kind::backward, std::stoi(note.substr(space))};
}

// The units that forward gathers, and backward if it does not have them from forward, in their order.
std::vector<int> gathered_units(int blocks) {
  std::vector<int> units{blocks};
  for (int i = 0; i < blocks; ++i) units.push_back(i);
  for (int i = blocks - 2; i >= 0; --i) units.push_back(i);
  return units;
}

// The model's own unit contains the blocks, so it is the last one.
std::vector<int> reduced_units(int blocks) {
  std::vector<int> units;
  for (int i = blocks - 1; i >= 0; --i) units.push_back(i);
  units.push_back(blocks);
  return units;
}

// Collects the work of a device from its tasks.
class Collector {
 public:
  explicit Collector(int blocks) : gathered_(gathered_units(blocks)), reduced_(reduced_units(blocks)) {}

  void add(const sim::TraceEntry& task, const sim::Interval& time) {
    if (task.name == "record") {
      recorded_on_[task.point] = task.stream;
    } else if (task.name == "wait") {
      waited_for_[task.stream] = recorded_on_[task.point];
    } else if (task.name == "note") {
      phase_ = meaning_of(task.text);
    } else if (task.meeting != 0) {
      // The stream of a backend waits for the one that calls it.
      const std::int64_t caller = waited_for_[task.stream];
      if (task.name == "nccl:all_gather") {
        work_.push_back({Kind::gather, gathered_.at(gathers_++), caller, time});
      } else if (task.name == "nccl:reduce_scatter") {
        work_.push_back({Kind::reduction, reduced_.at(reductions_++), caller, time});
      } else {
        work_.push_back({Kind::other, -1, caller, time});
      }
    } else if (time.seconds() > 0) {
      const auto [kind, unit] = task.stream == 0 ? phase_ : std::pair(Kind::other, -1);
      add_computation({kind, unit, task.stream, time});
    }
  }

  std::vector<Work> take() { return std::move(work_); }

 private:
  void add_computation(const Work& work) {
    const auto last = last_.find(work.stream);
    if (last != last_.end()) {
      Work& previous = work_[last->second];
      if (previous.kind == work.kind && previous.unit == work.unit && previous.time.end == work.time.begin) {
        previous.time.end = work.time.end;
        return;
      }
    }
    last_[work.stream] = work_.size();
    work_.push_back(work);
  }

  std::vector<int> gathered_, reduced_;
  std::size_t gathers_ = 0, reductions_ = 0;
  std::map<std::int64_t, std::int64_t> recorded_on_;  // the stream of a point
  std::map<std::int64_t, std::int64_t> waited_for_;   // the stream that a stream waited for last
  std::pair<Kind, int> phase_ = {Kind::other, -1};    // of the default stream
  std::map<std::int64_t, std::size_t> last_;          // the last computation on a stream
  std::vector<Work> work_;
};

bool is_communication(const Work& work) { return work.kind == Kind::gather || work.kind == Kind::reduction; }

}  // namespace

std::vector<sim::TraceEntry> trace_step(const StepModel& step_model) {
  std::vector<sim::TraceEntry> trace;
  std::barrier barrier(step_model.ranks);
  // Waits until no rank has a task. `then` runs on one of them.
  const auto meet = [&](at::Device device, int rank, FunctionRef<void()> then) {
    sim::Engine::get().synchronize_device(device.index());
    barrier.arrive_and_wait();
    if (rank == 0) then();
    barrier.arrive_and_wait();
  };
  run_on_devices(step_model.ranks, [&](const ProcessGroup& group, at::Device device) {
    Options options = options_of(ShardingStrategy::full_shard, true);
    options.device = device;
    options.forward_prefetch = step_model.prefetches;
    if (!step_model.prefetches) options.backward_prefetch = BackwardPrefetch::none;
    NotedStack stack(step_model);
    fill(*stack, at::kFloat);
    FullyShardedDataParallel<NotedStack> model(stack, group, options);
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.001));
    const at::Tensor x = at::ones({step_model.rows, step_model.width}).to(device);
    for (int step = 0; step < kSteps; ++step) {
      const bool is_traced = step == kSteps - 1;
      if (is_traced) meet(device, group.rank(), [] { sim::start_trace(); });
      const at::Tensor loss = loss_of(model(x));
      sim::note("backward " + std::to_string(step_model.blocks));
      loss.backward();
      sim::note("optimizer");
      optimizer.step();
      optimizer.zero_grad();
      if (is_traced) meet(device, group.rank(), [&] { trace = sim::take_trace(); });
    }
  });
  return trace;
}

Step schedule_step(const StepModel& model, const sim::Rates& rates) {
  const std::vector<sim::TraceEntry> trace = trace_step(model);
  const std::vector<sim::Interval> times = sim::schedule(trace, rates);
  Collector collector(model.blocks);
  for (std::size_t i = 0; i < trace.size(); ++i) {
    if (trace[i].device == 0) collector.add(trace[i], times[i]);
  }
  Step step;
  step.work = collector.take();
  std::vector<sim::Interval> communication, computation;
  for (const Work& work : step.work) {
    step.seconds = std::max(step.seconds, work.time.end);
    if (is_communication(work)) communication.push_back(work.time);
    if (!is_communication(work) && work.stream == 0) computation.push_back(work.time);
  }
  step.exposed = sim::difference(communication, computation);
  return step;
}

}  // namespace tessera::fsdp

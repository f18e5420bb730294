// Which streams FSDP uses: nothing that could run beside the computation, or beside another reduction, is on its
// stream.

#include <map>
#include <set>
#include <string>
#include <vector>

#include "accelerator/fsdp_training.h"
#include "fsdp/streams.h"
#include "tessera/base/function_ref.h"

namespace tessera::fsdp {
namespace {

// Returns what ran on device 0 in forward and backward of a second step.
std::vector<sim::TraceEntry> traced_step(ShardingStrategy strategy, FunctionRef<void(Options&)> change) {
  std::vector<sim::TraceEntry> entries;
  run_on_devices(is_hybrid(strategy) ? 4 : 2, [&](const ProcessGroup& group, at::Device device) {
    Options options = options_of(strategy, true);
    std::optional<HybridGroups> hybrid;
    if (is_hybrid(strategy)) options.replicas = hybrid.emplace(hybrid_groups(group, 2)).replicas;
    change(options);
    Stack stack;
    fill(*stack, at::kFloat);
    stack->to(device);
    FullyShardedDataParallel<Stack> model(stack, hybrid ? hybrid->shards : group, options);
    const at::Tensor x = batch_on(device, 0, group.rank());
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      x.cpu();  // nothing is enqueued when the trace begins
      group.barrier();
      if (step == 1 && group.rank() == 0) sim::start_trace();
      group.barrier();
      const at::Tensor loss = loss_of(model(x));
      loss.backward();
      loss.cpu();
      sim::implementation().synchronizeStream(sim::current(device.index()));
      group.barrier();
    }
    if (group.rank() != 0) return;
    for (sim::TraceEntry& entry : sim::take_trace()) {
      if (entry.device == 0) entries.push_back(std::move(entry));
    }
  });
  return entries;
}

TEST(FsdpStreamsTest, ShardsAndGradientsAreCopiedBesideTheComputation) {
  std::set<std::int64_t> streams;
  for (const sim::TraceEntry& entry :
       traced_step(ShardingStrategy::full_shard, [](Options& options) { options.offload_params = true; })) {
    if (entry.name == "copy") streams.insert(entry.stream);
  }
  EXPECT_EQ(streams.count(0), 1u) << "the loss is copied there";
  EXPECT_EQ(streams.size(), 3u) << "shards on one stream, gradients on another";
}

TEST(FsdpStreamsTest, ReductionsOverReplicasDoNotDelayThoseOverShards) {
  std::map<std::int64_t, std::string> last_collective;              // of a stream
  std::map<std::int64_t, std::string> collective_of;                // by point
  std::map<std::string, std::set<std::int64_t>> streams_that_wait;  // by collective
  for (const sim::TraceEntry& entry : traced_step(ShardingStrategy::hybrid_shard, [](Options&) {})) {
    if (entry.meeting != 0) last_collective[entry.stream] = entry.name;
    if (entry.name == "record" && last_collective.contains(entry.stream))
      collective_of[entry.point] = last_collective[entry.stream];
    if (entry.name == "wait" && collective_of.contains(entry.point))
      streams_that_wait[collective_of[entry.point]].insert(entry.stream);
  }
  ASSERT_EQ(streams_that_wait.count("nccl:all_reduce"), 1u);
  for (const std::int64_t stream : streams_that_wait["nccl:reduce_scatter"]) {
    EXPECT_EQ(streams_that_wait["nccl:all_reduce"].count(stream), 0u) << "stream " << stream;
  }
}

class FsdpStreamsOrderTest : public sim::InOrder {};
INSTANTIATE_TEST_SUITE_P(, FsdpStreamsOrderTest, ::testing::Values(sim::Order::late, sim::Order::early),
                         sim::order_name);

// Autograd accumulates gradients on a stream of its choice, before and after which the computation runs.
TEST_P(FsdpStreamsOrderTest, TheComputationComesAfterTheStreamThatItIsCalledOnAndBeforeIt) {
  Streams streams(sim::device(0));
  const c10::Stream autograd = sim::stream_from_pool(0);
  at::Tensor x = at::zeros({1000}, sim::on(0)), y = at::zeros({1000}, sim::on(0));
  sim::current().synchronize();
  autograd.synchronize();
  const c10::Stream computation = sim::stream_from_pool(0);
  {
    const c10::StreamGuard guard(computation);
    streams.wait_for_current();
  }
  {
    const c10::StreamGuard guard(autograd);
    x.fill_(1);
    {
      const OnComputation on(streams);
      EXPECT_EQ(sim::current(), computation);
      at::add_out(y, x, 1);
      EXPECT_EQ(y.sum().item<float>(), 2000) << "after the stream that it is called on";
      at::add_out(y, x, 2);
    }
    EXPECT_EQ(sim::current(), autograd);
    x.copy_(y);
  }
  autograd.synchronize();
  EXPECT_EQ(x.sum().item<float>(), 3000) << "before the stream that it is called on";
}

// The host may write shards after they were copied, while the computation still runs.
TEST_P(FsdpStreamsOrderTest, TheEndOfCopiesDoesNotWaitForTheComputation) {
  Streams streams(sim::device(0));
  const at::Tensor shard = at::ones({1000}, sim::pinned());
  at::Tensor copy = at::zeros({1000}, sim::on(0)), computed = at::zeros({1000}, sim::on(0));
  streams.wait_for_current();
  {
    const OnStream on(streams.cast);
    copy.copy_(shard, /*non_blocking=*/true);
  }
  computed.fill_(1);
  streams.finish_copies();
  EXPECT_FALSE(sim::current().query());
  shard.fill_(2);
  {
    const OnStream on(streams.cast);
    EXPECT_EQ(copy.sum().item<float>(), 1000);
  }
}

}  // namespace
}  // namespace tessera::fsdp

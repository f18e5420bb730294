// Streams, events, copies and what counts as a synchronization.

#include <gmock/gmock.h>

#include <thread>

#include "accelerator/sim.h"

namespace tessera::sim {
namespace {

using ::testing::ElementsAre;

using StreamTest = OnDevice;
using OrderedStreamTest = InOrder;
INSTANTIATE_TEST_SUITE_P(Orders, OrderedStreamTest, ::testing::Values(Order::late, Order::early), order_name);

constexpr std::int64_t kNumel = 1000;

// A side stream adds to what the default stream makes, and the default stream sums that up.
float sum_over_streams(bool side_waits, bool default_waits) {
  const c10::Stream side = stream_from_pool();
  const at::Tensor input = at::zeros({kNumel}, on(0));
  const at::Tensor output = at::zeros({kNumel}, on(0));
  current().synchronize();
  input.fill_(1);
  if (side_waits) wait_for(side, current());
  {
    const c10::StreamGuard guard(side);
    at::add_out(const_cast<at::Tensor&>(output), input, 1);  // NOLINT: out is a reference that is not const
  }
  if (default_waits) wait_for(current(), side);
  return output.sum().item<float>();
}

TEST_P(OrderedStreamTest, StreamsThatWaitForEachOtherAgreeInBothOrders) {
  EXPECT_EQ(sum_over_streams(true, true), 2 * kNumel);
}

TEST_F(StreamTest, SideStreamThatDoesNotWaitOvertakesInTheOrderEarly) {
  set_order(Order::early);
  EXPECT_EQ(sum_over_streams(false, true), kNumel);
}

TEST_F(StreamTest, ResultThatIsNotWaitedForIsMissingInTheOrderLate) {
  set_order(Order::late);
  EXPECT_EQ(sum_over_streams(true, false), 0);
}

TEST_F(StreamTest, CallsReturnBeforeTheyRun) {
  const at::Tensor sum = at::ones({kNumel}, on(0)).sum();
  EXPECT_FALSE(current().query());
  current().synchronize();
  EXPECT_TRUE(current().query());
  EXPECT_EQ(sum.item<float>(), kNumel);
}

TEST_F(StreamTest, StreamsAndDevicesBelongToAThread) {
  const c10::StreamGuard guard(stream_from_pool(1));
  EXPECT_EQ(current(0).id(), 0);
  EXPECT_NE(current(1).id(), 0);
  EXPECT_EQ(implementation().getDevice(), device(1));
  std::thread([] {
    EXPECT_EQ(current(1).id(), 0);
    EXPECT_EQ(implementation().getDevice(), device(0));
  }).join();
}

TEST_F(StreamTest, PoolHas32StreamsAndNewOnesAreOfNoOneElse) {
  const c10::Stream first = stream_from_pool(3);
  for (int i = 0; i < 31; ++i) EXPECT_NE(stream_from_pool(3), first);
  EXPECT_EQ(stream_from_pool(3), first);
  const c10::Stream a = implementation().getNewStream(device(3)), b = implementation().getNewStream(device(3));
  EXPECT_NE(a, b);
  EXPECT_GT(a.id(), 32);
}

TEST_F(StreamTest, EventOfAnEmptyStreamHasPassed) {
  c10::Event event(c10::kPrivateUse1);
  EXPECT_TRUE(event.query());
  event.record(stream_from_pool(4));
  EXPECT_TRUE(event.query());
}

TEST_F(StreamTest, EventIsReachedByWhoeverAsksOften) {
  set_order(Order::late);
  at::ones({kNumel}, on(0)).add_(1);
  c10::Event event(c10::kPrivateUse1);
  event.record(current());
  EXPECT_FALSE(event.query());
  int queries = 0;
  while (!event.query()) ASSERT_LT(++queries, 1000);
  EXPECT_EQ(synchronizations(0).total(), 0);
}

TEST_F(StreamTest, TraceNamesTasksInTheirOrder) {
  at::Tensor tensor = at::empty({4}, on(0));
  current().synchronize();
  start_trace();
  tensor.fill_(1);
  at::add_out(tensor, tensor, tensor);
  current().synchronize();
  const std::vector<TraceEntry> trace = take_trace();
  ASSERT_GE(trace.size(), 2U);
  EXPECT_EQ(trace[0], (TraceEntry{.name = "aten::fill_.Scalar", .bytes = 16}));
  EXPECT_EQ(trace[1], (TraceEntry{.name = "aten::add.out", .bytes = 48}));
}

TEST_F(StreamTest, TraceCountsTheOperationsOfProductsOfMatrices) {
  const at::Tensor a = at::ones({3, 5}, on(0)), b = at::ones({5, 2}, on(0)), c = at::ones({2}, on(0));
  current().synchronize();
  start_trace();
  const at::Tensor product = at::mm(a, b), sum = at::addmm(c, a, b),
                   batch = at::bmm(a.view({1, 3, 5}), b.view({1, 5, 2}));
  current().synchronize();
  std::vector<TraceEntry> trace = take_trace();
  std::erase_if(trace, [](const TraceEntry& entry) { return entry.flops == 0; });
  EXPECT_THAT(trace, ElementsAre(TraceEntry{.name = "aten::mm", .bytes = 4 * (15 + 10 + 6), .flops = 60},
                                 TraceEntry{.name = "aten::addmm", .bytes = 4 * (2 + 15 + 10 + 6), .flops = 60},
                                 TraceEntry{.name = "aten::bmm", .bytes = 4 * (15 + 10 + 6), .flops = 60}));
}

TEST_P(OrderedStreamTest, TraceHasPointsThatWereReachedWhenTheyWereWaitedFor) {
  const c10::Stream side = stream_from_pool();
  current().synchronize();
  side.synchronize();
  start_trace();
  wait_for(side, current());
  note("default");
  {
    const c10::StreamGuard guard(side);
    note("side");
  }
  side.synchronize();
  current().synchronize();
  std::vector<TraceEntry> trace = take_trace();
  note("after");
  const auto of = [&](std::int64_t stream) {
    std::vector<TraceEntry> entries;
    for (const TraceEntry& entry : trace) {
      if (entry.stream == stream) entries.push_back(entry);
    }
    return entries;
  };
  const std::vector<TraceEntry> first = of(0), second = of(side.id());
  ASSERT_GE(first.size(), 2U);
  ASSERT_GE(second.size(), 2U);
  EXPECT_EQ(first[0].name, "record");
  EXPECT_GT(first[0].point, 0);
  EXPECT_EQ(first[1], (TraceEntry{.name = "note", .text = "default"}));
  EXPECT_EQ(second[0], (TraceEntry{.stream = side.id(), .name = "wait", .point = first[0].point}));
  EXPECT_EQ(second[1], (TraceEntry{.stream = side.id(), .name = "note", .text = "side"}));
}

TEST_F(StreamTest, FailedTaskIsAFailureOfEveryLaterSynchronization) {
  const at::Tensor table = at::ones({4, 2}, on(0)), indices = at::full({1}, 7, on(0, at::kLong));
  const at::Tensor rows = at::index_select(table, 0, indices);
  for (int i = 0; i < 2; ++i) {
    try {
      (void)rows.cpu();
      ADD_FAILURE() << "no failure";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("sim: a task failed: aten::index_select"), std::string::npos)
          << error.what();
    }
  }
}

// Counts of device 0 since the last call.
Synchronizations counted() {
  const Synchronizations counts = synchronizations(0);
  reset_synchronizations(0);
  return counts;
}

TEST_P(OrderedStreamTest, SynchronizationsAreCountedByTheirKind) {
  const at::Tensor tensor = at::ones({kNumel}, on(0));
  (void)counted();
  const at::Tensor result = (tensor * 2 + 1).sum();
  EXPECT_EQ(counted().total(), 0);
  (void)result.item<float>();
  EXPECT_EQ(counted().item, 1);
  (void)at::equal(tensor, tensor);
  EXPECT_EQ(counted().item, 1);
  (void)at::nonzero(tensor);
  EXPECT_EQ(counted().item, 1);
  (void)tensor.index({tensor > 0});
  EXPECT_EQ(counted().item, 1);
  (void)tensor.index({at::zeros({3}, on(0, at::kLong))});
  EXPECT_EQ(counted().total(), 0);
  (void)tensor.cpu();
  EXPECT_EQ(counted().copy_to_host, 1);
  current().synchronize();
  EXPECT_EQ(counted().stream, 1);
  implementation().synchronizeDevice(0);
  EXPECT_EQ(counted().device, 1);
  c10::Event event(c10::kPrivateUse1);
  event.record(current());
  event.synchronize();
  const Synchronizations counts = counted();
  EXPECT_EQ(counts.event, 1);
  EXPECT_EQ(counts.total(), 1);
}

TEST_P(OrderedStreamTest, CopyFromPinnedMemoryReadsLate) {
  const at::Tensor host = at::ones({kNumel}, pinned());
  const at::Tensor tensor = at::zeros({kNumel}, on(0));
  current().synchronize();
  (void)counted();
  tensor.copy_(host, /*non_blocking=*/true);
  host.fill_(2);  // too early
  EXPECT_EQ(counted().total(), 0);
  EXPECT_EQ(tensor.sum().item<float>(), 2 * kNumel);
}

TEST_P(OrderedStreamTest, CopyFromUnpinnedMemoryOrThatBlocksReadsAtOnce) {
  for (const bool is_pinned : {false, true}) {
    const at::Tensor host = at::ones({kNumel}, is_pinned ? pinned() : at::TensorOptions());
    const at::Tensor tensor = at::zeros({kNumel}, on(0));
    (void)counted();
    tensor.copy_(host, /*non_blocking=*/!is_pinned);
    host.fill_(2);
    EXPECT_EQ(counted().total(), 0);
    EXPECT_EQ(tensor.sum().item<float>(), kNumel);
  }
}

TEST_F(StreamTest, CopyToPinnedMemoryWritesLate) {
  set_order(Order::late);
  const at::Tensor tensor = at::ones({kNumel}, on(0)), host = at::zeros({kNumel}, pinned());
  (void)counted();
  host.copy_(tensor, /*non_blocking=*/true);
  EXPECT_EQ(counted().total(), 0);
  EXPECT_EQ(host.sum().item<float>(), 0);
  current().synchronize();
  EXPECT_EQ(host.sum().item<float>(), kNumel);
}

TEST_P(OrderedStreamTest, CopyToTheHostWaitsIfItBlocksOrTheMemoryIsNotPinned) {
  for (const bool is_pinned : {false, true}) {
    const at::Tensor tensor = at::ones({kNumel}, on(0)),
                     host = at::zeros({kNumel}, is_pinned ? pinned() : at::TensorOptions());
    (void)counted();
    host.copy_(tensor, /*non_blocking=*/!is_pinned);
    EXPECT_EQ(counted().copy_to_host, 1);
    EXPECT_EQ(host.sum().item<float>(), kNumel);
  }
}

TEST_P(OrderedStreamTest, CopyBetweenDevicesWaitsForBothStreams) {
  const at::Tensor from = at::ones({kNumel}, on(0)), to = at::zeros({kNumel}, on(1));
  to.fill_(5);
  to.copy_(from);
  current(0).synchronize();  // runs the copy, after what its destination's stream has to do
  EXPECT_EQ(to.sum().item<float>(), kNumel);
}

TEST_P(OrderedStreamTest, CopyConvertsAndExpands) {
  const at::Tensor tensor = at::zeros({2, 3}, on(0, at::kDouble));
  tensor.copy_(at::arange(3, at::kInt));
  EXPECT_TRUE(same(tensor, at::arange(3, at::kDouble).expand({2, 3})));
  EXPECT_TRUE(same(tensor.t().to(at::kBFloat16), at::arange(3, at::kBFloat16).expand({2, 3}).t()));
}

}  // namespace
}  // namespace tessera::sim

// The simulated NCCL: what collectives compute, and what waits for what.

#include <gmock/gmock.h>

#include <atomic>
#include <barrier>

#include "accelerator/sim.h"
#include "support/accelerator/nccl/rank_threads.h"
#include "tessera/base/function_ref.h"

namespace tessera::sim {
namespace {

using at::Tensor;
using ::c10d::ReduceOp;
using ::testing::HasSubstr;

using NcclTest = OnDevice;
using OrderedNcclTest = InOrder;
INSTANTIATE_TEST_SUITE_P(Orders, OrderedNcclTest, ::testing::Values(Order::late, Order::early), order_name);

// What rank `rank` contributes.
Tensor input_of(int rank, std::int64_t size, at::ScalarType dtype = at::kFloat) {
  return (at::arange(size, at::kFloat) * 0.37 + rank * 1.1 + 1).to(dtype);
}
Tensor on_device(const Tensor& tensor, int rank) { return tensor.to(device(rank)); }

void reduce_to(NcclBackend& backend, const Tensor& tensor, ReduceOp::RedOpType op = ReduceOp::SUM) {
  ::c10d::AllreduceOptions options;
  options.reduceOp = op;
  std::vector<Tensor> tensors = {tensor};
  backend.allreduce(tensors, options)->wait();
}

TEST_P(OrderedNcclTest, AllReduceComputesByRankOrderInItsDtype) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kLong}) {
    Tensor sum = input_of(0, 7, dtype), product = sum.clone(), most = sum.clone(), least = sum.clone();
    for (int rank = 1; rank < 3; ++rank) {
      const Tensor next = input_of(rank, 7, dtype);
      sum = sum + next;
      product = product * next;
      most = at::maximum(most, next);
      least = at::minimum(least, next);
    }
    const Tensor average = dtype == at::kLong ? sum.div(3, "trunc") : sum.div(3);
    run_nccl_ranks(3, [&](NcclBackend& backend) {
      const auto reduced = [&](ReduceOp::RedOpType op) {
        const Tensor tensor = on_device(input_of(backend.getRank(), 7, dtype), backend.getRank());
        reduce_to(backend, tensor, op);
        return tensor;
      };
      EXPECT_TRUE(same(reduced(ReduceOp::SUM), sum)) << dtype;
      EXPECT_TRUE(same(reduced(ReduceOp::AVG), average)) << dtype;
      EXPECT_TRUE(same(reduced(ReduceOp::PRODUCT), product)) << dtype;
      EXPECT_TRUE(same(reduced(ReduceOp::MAX), most)) << dtype;
      EXPECT_TRUE(same(reduced(ReduceOp::MIN), least)) << dtype;
    });
  }
}

TEST_F(NcclTest, TraceCountsTheBytesThatARankSendsInARing) {
  constexpr int kRanks = 4;
  start_trace();
  run_nccl_ranks(kRanks, [](NcclBackend& backend) {
    const int rank = backend.getRank();
    Tensor full = on_device(input_of(rank, 40), rank), shard = at::empty({10}, on(rank));
    backend._reduce_scatter_base(shard, full)->wait();
    backend._allgather_base(full, shard)->wait();
    reduce_to(backend, full);
    current(rank).synchronize();
  });
  std::map<std::string, std::vector<TraceEntry>> collectives;
  for (const TraceEntry& entry : take_trace()) {
    if (entry.meeting != 0) collectives[entry.name].push_back(entry);
  }
  const std::map<std::string, std::int64_t> expected{
      {"nccl:reduce_scatter", 120}, {"nccl:all_gather", 120}, {"nccl:all_reduce", 240}};
  EXPECT_EQ(collectives.size(), expected.size());
  for (const auto& [name, bytes] : expected) {
    ASSERT_EQ(collectives[name].size(), static_cast<std::size_t>(kRanks)) << name;
    for (const TraceEntry& entry : collectives[name]) {
      EXPECT_EQ(entry.bytes, bytes) << name;
      EXPECT_EQ(entry.meeting, collectives[name][0].meeting) << name;
    }
  }
}

TEST_P(OrderedNcclTest, GathersAndScatters) {
  run_nccl_ranks(3, [](NcclBackend& backend) {
    const int rank = backend.getRank();
    std::vector<Tensor> expected;
    for (int r = 0; r < 3; ++r) expected.push_back(input_of(r, 4));
    const Tensor all = at::cat(expected);
    Tensor input = on_device(input_of(rank, 4), rank), output = at::empty({12}, on(rank));
    backend._allgather_base(output, input)->wait();
    EXPECT_TRUE(same(output, all));

    std::vector<std::vector<Tensor>> lists(1);
    for (int r = 0; r < 3; ++r) lists[0].push_back(at::empty({2, 2}, on(rank)).t());
    std::vector<Tensor> inputs = {input.view({2, 2})};
    backend.allgather(lists, inputs)->wait();
    for (int r = 0; r < 3; ++r) EXPECT_TRUE(same(lists[0][static_cast<std::size_t>(r)], input_of(r, 4).view({2, 2})));

    Tensor full = on_device(all + rank, rank), part = at::empty({4}, on(rank));
    backend._reduce_scatter_base(part, full)->wait();
    EXPECT_TRUE(same(part, ((input_of(rank, 4) + 0) + (input_of(rank, 4) + 1)) + (input_of(rank, 4) + 2)));

    std::vector<std::vector<Tensor>> chunks = {on_device(all + rank, rank).chunk(3)};
    std::vector<Tensor> parts = {at::empty({4}, on(rank))};
    backend.reduce_scatter(parts, chunks)->wait();
    EXPECT_TRUE(same(parts[0], part.cpu()));

    ::c10d::GatherOptions to;
    to.rootRank = 1;
    std::vector<std::vector<Tensor>> gathered;
    if (rank == 1) gathered = {at::empty({12}, on(rank)).chunk(3)};
    inputs = {input};
    backend.gather(gathered, inputs, to)->wait();
    if (rank == 1) {
      EXPECT_TRUE(same(at::cat(gathered[0]), all));
    }

    ::c10d::ScatterOptions from;
    from.rootRank = 2;
    std::vector<std::vector<Tensor>> scattered;
    if (rank == 2) scattered = {on_device(all, rank).chunk(3)};
    parts = {at::empty({4}, on(rank))};
    backend.scatter(parts, scattered, from)->wait();
    EXPECT_TRUE(same(parts[0], input_of(rank, 4)));
  });
}

TEST_P(OrderedNcclTest, RootsAndMessages) {
  run_nccl_ranks(3, [](NcclBackend& backend) {
    const int rank = backend.getRank();
    std::vector<Tensor> tensors = {on_device(input_of(rank, 5), rank)};
    ::c10d::BroadcastOptions from;
    from.rootRank = 2;
    backend.broadcast(tensors, from)->wait();
    EXPECT_TRUE(same(tensors[0], input_of(2, 5)));

    ::c10d::ReduceOptions to;
    to.rootRank = 1;
    tensors = {on_device(input_of(rank, 5), rank)};
    backend.reduce(tensors, to)->wait();
    EXPECT_TRUE(same(tensors[0], rank == 1 ? (input_of(0, 5) + input_of(1, 5)) + input_of(2, 5) : input_of(rank, 5)));

    // Rank r sends r + 1 rows to each rank.
    std::vector<std::int64_t> out_splits = {1, 2, 3};
    const std::int64_t rows = rank + 1;
    std::vector<std::int64_t> in_splits(3, rows);
    Tensor input = on_device(input_of(rank, 6 * rows).view({-1, 2}), rank), output = at::empty({6, 2}, on(rank));
    backend.alltoall_base(output, input, out_splits, in_splits)->wait();
    std::vector<Tensor> expected;
    for (int r = 0; r < 3; ++r)
      expected.push_back(input_of(r, 6 * (r + 1)).view({-1, 2}).narrow(0, rank * (r + 1), r + 1));
    EXPECT_TRUE(same(output, at::cat(expected)));

    std::vector<Tensor> sent = {on_device(input_of(rank, 5), rank)}, received = {at::empty({5}, on(rank))};
    backend.startCoalescing();  // else the first messages around a ring wait for each other
    backend.send(sent, (rank + 1) % 3, 0);
    backend.recv(received, (rank + 2) % 3, 0);
    backend.endCoalescing()->wait();
    EXPECT_TRUE(same(received[0], input_of((rank + 2) % 3, 5)));
  });
}

TEST_P(OrderedNcclTest, CoalescedCallsAreOneWork) {
  run_nccl_ranks(2, [](NcclBackend& backend) {
    const int rank = backend.getRank();
    std::vector<Tensor> tensors = {on_device(input_of(rank, 3), rank), on_device(input_of(rank, 4), rank)};
    backend.allreduce_coalesced(tensors)->wait();
    EXPECT_TRUE(same(tensors[1], input_of(0, 4) + input_of(1, 4)));
    std::vector<Tensor> one = {on_device(input_of(rank, 3), rank)}, two = {on_device(input_of(rank, 4), rank)};
    backend.startCoalescing();
    backend.allreduce(one);
    backend.allreduce(two);
    backend.endCoalescing()->wait();
    EXPECT_TRUE(same(one[0], input_of(0, 3) + input_of(1, 3)));
    EXPECT_TRUE(same(two[0], input_of(0, 4) + input_of(1, 4)));
  });
}

TEST_P(OrderedNcclTest, NothingWaitsOnTheHost) {
  run_nccl_ranks(2, [](NcclBackend& backend) {
    const int rank = backend.getRank();
    reset_synchronizations(rank);
    Tensor input = at::ones({100}, on(rank)), output = at::empty({200}, on(rank));
    for (int i = 0; i < 5; ++i) {
      input.mul_(2);
      backend._allgather_base(output, input)->wait();
      output.add_(1);
    }
    EXPECT_EQ(synchronizations(rank).total(), 0);
    EXPECT_TRUE(same(output, at::full({200}, 33, at::kFloat)));
  });
}

TEST_P(OrderedNcclTest, TheHostWaitsForTheOtherRanksInTheFirstCollectiveOfAKind) {
  std::atomic<int> gathers = 0, sums = 0;
  run_nccl_ranks(3, [&](NcclBackend& backend) {
    const int rank = backend.getRank();
    std::vector<Tensor> tensors = {at::ones({2}, on(rank))};
    Tensor all = at::empty({6}, on(rank));
    ++gathers;
    backend._allgather_base(all, tensors[0]);
    EXPECT_EQ(gathers, 3);
    ++sums;
    backend.allreduce(tensors)->wait();
    EXPECT_EQ(sums, 3);
    EXPECT_TRUE(same(tensors[0], at::full({2}, 3, at::kFloat)));
  });
}

TEST_F(NcclTest, ResultThatIsNotWaitedForIsMissingInTheOrderLate) {
  set_order(Order::late);
  std::barrier<> before_waits(2);
  run_nccl_ranks(2, [&](NcclBackend& backend) {
    const int rank = backend.getRank();
    std::vector<Tensor> tensors = {at::ones({10}, on(rank))};
    current(rank).synchronize();
    const auto work = backend.allreduce(tensors);
    EXPECT_FALSE(work->isCompleted());
    EXPECT_TRUE(same(tensors[0], at::ones({10})));
    before_waits.arrive_and_wait();
    work->wait();
    EXPECT_TRUE(same(tensors[0], at::full({10}, 2, at::kFloat)));
    EXPECT_TRUE(work->isCompleted());
  });
}

TEST_F(NcclTest, InputThatIsFreedIsKeptUntilTheCollectiveRan) {
  set_order(Order::late);
  std::barrier<> before_waits(2);
  run_nccl_ranks(2, [&](NcclBackend& backend) {
    const int rank = backend.getRank();
    Tensor output = at::empty({200}, on(rank)), input = at::full({100}, rank + 1, on(rank));
    const void* address = input.data_ptr();
    const auto work = backend._allgather_base(output, input);
    input.reset();
    const Tensor other = at::zeros({100}, on(rank));
    EXPECT_NE(other.data_ptr(), address);
    current(rank).synchronize();  // overtakes the collective
    before_waits.arrive_and_wait();
    work->wait();
    EXPECT_TRUE(same(output, at::cat({at::full({100}, 1, at::kFloat), at::full({100}, 2, at::kFloat)})));
  });
}

TEST_P(OrderedNcclTest, WaitOnAnotherStreamLeavesTheCurrentOneAlone) {
  run_nccl_ranks(2, [](NcclBackend& backend) {
    const int rank = backend.getRank();
    std::vector<Tensor> tensors = {at::ones({10}, on(rank))};
    const auto work = backend.allreduce(tensors);
    Tensor sum;
    {
      const c10::StreamGuard guard(stream_from_pool(rank));
      work->wait();
      sum = tensors[0] + 1;
      EXPECT_TRUE(same(sum, at::full({10}, 3, at::kFloat)));
    }
  });
}

TEST_P(OrderedNcclTest, BarrierWaitsOnTheHost) {
  run_nccl_ranks(2, [](NcclBackend& backend) {
    reset_synchronizations(backend.getRank());
    backend.barrier()->wait();
    EXPECT_EQ(synchronizations(backend.getRank()).stream, 1);
  });
}

TEST_P(OrderedNcclTest, FutureHasTheResult) {
  run_nccl_ranks(2, [](NcclBackend& backend) {
    std::vector<Tensor> tensors = {at::ones({10}, on(backend.getRank()))};
    const auto future = backend.allreduce(tensors)->getFuture();
    future->wait();
    EXPECT_TRUE(same(future->value().toTensorVector()[0], at::full({10}, 2, at::kFloat)));
  });
}

std::string error_of(FunctionRef<void()> f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST_F(NcclTest, RefusesTensorsOfTheHostAndThoseThatAreNotContiguous) {
  run_nccl_ranks(1, [](NcclBackend& backend) {
    EXPECT_THAT(error_of([&] { reduce_to(backend, at::ones({3})); }), HasSubstr("Tensors must be sim and dense"));
    EXPECT_THAT(error_of([&] {
                  reduce_to(backend, at::ones({3, 2}, on(0)).t());
                }),
                HasSubstr("Tensors must be contiguous"));
    Tensor input = at::ones({3}, on(0)), output = at::ones({4}, on(0));
    EXPECT_THAT(error_of([&] { backend._allgather_base(output, input); }),
                HasSubstr("output tensor size must be equal to world_size times input tensor size"));
  });
}

TEST_F(NcclTest, DifferentCollectivesAreAFailureOfTheTask) {
  set_order(Order::late);
  run_nccl_ranks(2, [](NcclBackend& backend) {
    std::vector<Tensor> tensors = {at::ones({3}, on(backend.getRank()))};
    const auto work = backend.getRank() == 0 ? backend.allreduce(tensors) : backend.broadcast(tensors);
    work->wait();
    EXPECT_THAT(error_of([&] { (void)tensors[0].cpu(); }), HasSubstr("sim: ranks met in different collectives"));
  });
}

TEST_P(OrderedNcclTest, ManyRanksTrainOnAveragedGradients) {
  const auto input = [](int rank) { return input_of(rank, 6).view({2, 3}); };
  std::vector<Tensor> grads;
  for (int rank = 0; rank < 4; ++rank) {
    const Tensor weight = at::ones({3}).requires_grad_(true);
    at::mv(input(rank), weight).pow(2).sum().backward();
    grads.push_back(weight.grad());
  }
  const Tensor expected = (((grads[0] + grads[1]) + grads[2]) + grads[3]).div(4);
  run_nccl_ranks(4, [&](NcclBackend& backend) {
    const int rank = backend.getRank();
    const Tensor weight = at::ones({3}, on(rank)).requires_grad_(true);
    at::mv(on_device(input(rank), rank), weight).pow(2).sum().backward();
    reduce_to(backend, weight.grad(), ReduceOp::AVG);
    EXPECT_TRUE(same(weight.grad(), expected));
  });
}

}  // namespace
}  // namespace tessera::sim

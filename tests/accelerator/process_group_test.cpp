// Groups of this project on the simulated NCCL.

#include "support/accelerator/nccl/process_group.h"

#include <future>

#include "accelerator/fsdp_training.h"
#include "accelerator/sim.h"
#include "support/error_matchers.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/functional.h"

namespace tessera::sim {
namespace {

using at::Tensor;

using OrderedProcessGroupTest = InOrder;
INSTANTIATE_TEST_SUITE_P(Orders, OrderedProcessGroupTest, ::testing::Values(Order::late, Order::early), order_name);

TEST_P(OrderedProcessGroupTest, CollectivesEqualGloos) {
  run_local_on_devices(2, [](const ProcessGroup& group) {
    const Tensor input = at::arange(8, at::kFloat) * 0.7 + group.rank();
    const Tensor moved = input.to(device(group.rank()));
    const auto both = [&](FunctionRef<Tensor(const Tensor&)> f) { EXPECT_TRUE(same(f(moved), f(input))); };
    both([&](const Tensor& tensor) {
      const Tensor sum = tensor.clone();
      group.all_reduce(sum);
      return sum;
    });
    both([&](const Tensor& tensor) {
      const Tensor all = at::empty({16}, tensor.options());
      group.all_gather_into(all, tensor);
      return all;
    });
    both([&](const Tensor& tensor) {
      const Tensor part = at::empty({4}, tensor.options());
      group.reduce_scatter_into(part, tensor, tessera::ReduceOp::average);
      return part;
    });
    both([&](const Tensor& tensor) {
      const Tensor out = at::empty({8}, tensor.options());
      const std::vector<std::int64_t> splits = {4, 4};
      group.all_to_all(out, tensor, splits, splits);
      return out;
    });
    both([&](const Tensor& tensor) {
      const Tensor sent = tensor.clone();
      group.broadcast(sent, 1);
      return sent;
    });
  });
}

TEST_P(OrderedProcessGroupTest, SubgroupsCanBeAttached) {
  run_local_on_devices(4, [](const ProcessGroup& group) {
    const std::vector<int> first = {0, 1}, second = {2, 3};
    const std::optional<ProcessGroup> low = group.subgroup(first), high = group.subgroup(second);
    const std::optional<ProcessGroup>& half = group.rank() < 2 ? low : high;
    ASSERT_TRUE(half.has_value());
    attach_nccl(*half);
    const Tensor tensor = at::full({3}, group.rank(), on(group.rank()));
    half->all_reduce(tensor);
    EXPECT_TRUE(same(tensor, at::full({3}, group.rank() < 2 ? 1 : 5, at::kFloat)));
  });
}

// Ranks of one host share memory, by which tensors on the CPU travel. Those on a device stay Gloo's, which carries CUDA
// and refuses this device.
TEST_P(OrderedProcessGroupTest, GlooGetsTensorsOnADevice) {
  run_local(2, [](const ProcessGroup& group) {
    const Tensor tensor = at::ones({8}, on(group.rank()));
    EXPECT_ERROR(group.start_all_reduce(tensor), ErrorCode::rank_failure, "gloo rejected the call", "device");
  });
}

using ProcessGroupOnDeviceTest = InOrder;
INSTANTIATE_TEST_SUITE_P(Orders, ProcessGroupOnDeviceTest, ::testing::Values(Order::late, Order::early), order_name);

// Connects the ranks, for which the host waits.
void connect_for_sums_and_gathers(const ProcessGroup& group, const at::TensorOptions& on_device) {
  const Tensor x = at::ones({8}, on_device);
  group.start_all_reduce(x).wait();
  group.start_all_gather_into(at::empty({8 * group.size()}, on_device), x).wait();
  (void)x.cpu();
}

TEST_P(ProcessGroupOnDeviceTest, MemoryOfACollectiveThatIsDroppedIsUsedAgainAfterItHasEnded) {
  std::promise<void> checked;
  const std::shared_future<void> has_checked = checked.get_future().share();
  fsdp::run_on_devices(2, [&](const ProcessGroup& group, at::Device device) {
    const at::TensorOptions here = on(device.index());
    connect_for_sums_and_gathers(group, here);
    if (group.rank() == 1) {
      has_checked.wait();
      const Tensor x = at::ones({8}, here);
      group.start_all_reduce(x).wait();
      EXPECT_TRUE(same(x, at::full({8}, 2, at::kFloat)));
      return;
    }
    {
      PendingCollective pending = group.start_all_reduce(at::ones({8}, here));
      const c10::StreamGuard guard(stream_from_pool(device.index()));
      pending = PendingCollective();
    }
    const Tensor other = at::zeros({8}, here);
    c10::Event filled(c10::kPrivateUse1);
    filled.record(current(device.index()));
    for (int i = 0; i < 300 && !filled.query(); ++i) {  // each query after the first hundred runs a task
    }
    EXPECT_FALSE(filled.query()) << "the memory was filled while the collective may still use it";
    checked.set_value();
    EXPECT_TRUE(same(other, at::zeros({8}, at::kFloat)));
  });
}

// A sum that NCCL does not support is computed where the collective is waited for, from memory of the stream on which
// it started.
TEST_P(ProcessGroupOnDeviceTest, MemoryOfLocalWorkIsUsedAgainAfterTheWork) {
  std::promise<void> reduced;
  const std::shared_future<void> has_reduced = reduced.get_future().share();
  fsdp::run_on_devices(2, [&](const ProcessGroup& group, at::Device device) {
    const at::TensorOptions here = on(device.index(), at::kShort);
    connect_for_sums_and_gathers(group, on(device.index()));
    const c10::Stream side = stream_from_pool(device.index());
    const Tensor x = at::full({8}, group.rank() + 1, here);
    PendingCollective pending;
    {
      wait_for(side, current(device.index()));
      const c10::StreamGuard guard(side);
      pending = group.start_all_reduce(x);
    }
    pending.wait();
    if (group.rank() == 0) {
      has_reduced.wait();  // the parts have been gathered, here as well
      const c10::StreamGuard guard(side);
      const Tensor other = at::full({16}, 7, here);
      side.synchronize();
    }
    EXPECT_TRUE(same(x, at::full({8}, 3, at::kShort)));
    if (group.rank() == 1) reduced.set_value();
  });
}

TEST_P(ProcessGroupOnDeviceTest, ATensorThatIsNotOnTheDeviceOfTheOthersIsRefused) {
  fsdp::run_on_devices(2, [](const ProcessGroup& group, at::Device device) {
    const at::TensorOptions here = group.rank() == 0 ? on(device.index()) : at::TensorOptions(at::kFloat);
    const Tensor part = at::ones({2}, here), full = at::ones({4}, here);
    const Tensor gathered = group.rank() == 0 ? full : Tensor();
    const std::vector<std::int64_t> splits = {1, 1};
    const std::vector<std::function<void()>> calls = {
        [&] { group.broadcast(part, 0); },
        [&] { group.all_reduce(part); },
        [&] { group.all_gather_into(full, part); },
        [&] { group.reduce_scatter_into(part, full); },
        [&] { group.all_to_all(at::empty_like(part), part, splits, splits); },
        [&] { group.gather(gathered, part, 0); },
        [&] { group.scatter(part, gathered, 0); },
        [&] { functional::all_gather(group, part); },
        [&] { functional::reduce_scatter(group, part); },
        [&] { functional::all_reduce(group, part); },
        [&] { functional::all_reduce_coalesced(group, std::vector<Tensor>{part}); },
        [&] { functional::all_to_all(group, part, splits, splits); },
    };
    for (const auto& call : calls) {
      EXPECT_ERROR(call(), ErrorCode::invalid_argument, "rank 0 has device type sim and rank 1 has device type cpu");
    }
    group.barrier();
  });
}

}  // namespace
}  // namespace tessera::sim

// Groups of this project on the simulated NCCL.

#include "support/accelerator/nccl/process_group.h"

#include "accelerator/sim.h"
#include "support/error_matchers.h"

namespace tessera::sim {
namespace {

using at::Tensor;

using OrderedProcessGroupTest = InOrder;
INSTANTIATE_TEST_SUITE_P(Orders, OrderedProcessGroupTest, ::testing::Values(Order::late, Order::early), order_name);

TEST_P(OrderedProcessGroupTest, CollectivesEqualGloos) {
  run_local_on_devices(2, [](const ProcessGroup& group) {
    const Tensor input = at::arange(8, at::kFloat) * 0.7 + group.rank();
    const Tensor moved = input.to(device(group.rank()));
    const auto both = [&](const std::function<Tensor(const Tensor&)>& f) { EXPECT_TRUE(same(f(moved), f(input))); };
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

}  // namespace
}  // namespace tessera::sim

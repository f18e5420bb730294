// The memory of the devices: what the host may not touch, and when a block is handed out again.

#include <gmock/gmock.h>

#include "accelerator/sim.h"

namespace tessera::sim {
namespace {

using ::testing::Each;

using MemoryDeathTest = OnDevice;
using MemoryTest = OnDevice;
using OrderedMemoryTest = InOrder;
INSTANTIATE_TEST_SUITE_P(Orders, OrderedMemoryTest, ::testing::Values(Order::late, Order::early), order_name);

constexpr std::int64_t kElements = 1000;

TEST_F(MemoryDeathTest, HostFaultsWhereItReadsADevice) {
  const at::Tensor tensor = at::ones({kElements}, on(0));
  EXPECT_EXIT(std::exit(*static_cast<volatile float*>(tensor.data_ptr()) == 1 ? 0 : 1),
              ::testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(MemoryDeathTest, HostFaultsWhereItWritesADevice) {
  const at::Tensor tensor = at::ones({kElements}, on(0));
  EXPECT_EXIT(
      {
        *static_cast<volatile float*>(tensor.data_ptr()) = 1;
        std::exit(0);
      },
      ::testing::KilledBySignal(SIGSEGV), "");
}

TEST_P(OrderedMemoryTest, MemoryIsNaNUntilItIsWritten) {
  const at::Tensor fresh = at::empty({kElements}, on(0));
  EXPECT_TRUE(at::isnan(fresh.cpu()).all().item<bool>());
  void* address = fresh.data_ptr();
  {
    const at::Tensor written = at::ones({kElements}, on(0));
    EXPECT_EQ(written.sum().item<float>(), kElements);
    address = written.data_ptr();
  }
  const at::Tensor again = at::empty({kElements}, on(0));
  EXPECT_EQ(again.data_ptr(), address);
  EXPECT_TRUE(at::isnan(again.cpu()).all().item<bool>());
}

TEST_F(MemoryTest, FreedBlockIsHandedOutAtOnceOnItsStream) {
  at::Tensor first = at::ones({kElements}, on(0));
  const at::Tensor sum = first.sum();  // not run yet
  const void* address = first.data_ptr();
  first.reset();
  const at::Tensor second = at::zeros({kElements}, on(0));
  EXPECT_EQ(second.data_ptr(), address);
  EXPECT_EQ(sum.item<float>(), kElements);
  EXPECT_EQ(second.sum().item<float>(), 0);
}

TEST_F(MemoryTest, FreedBlockIsNotHandedOutToAnotherStream) {
  const void* address = at::ones({kElements}, on(0)).data_ptr();
  {
    const c10::StreamGuard guard(stream_from_pool());
    EXPECT_NE(at::empty({kElements}, on(0)).data_ptr(), address);
  }
  EXPECT_EQ(at::empty({kElements}, on(0)).data_ptr(), address);
}

TEST_F(MemoryTest, BlockBelongsToTheStreamItWasAllocatedOn) {
  const c10::Stream side = stream_from_pool();
  at::Tensor tensor;
  {
    const c10::StreamGuard guard(side);
    tensor = at::empty({kElements}, on(0));
  }
  const void* address = tensor.data_ptr();
  tensor.reset();  // while the default stream is current
  EXPECT_NE(at::empty({kElements}, on(0)).data_ptr(), address);
  const c10::StreamGuard guard(side);
  EXPECT_EQ(at::empty({kElements}, on(0)).data_ptr(), address);
}

TEST_F(MemoryTest, BlocksAreSplitAndMerged) {
  at::Tensor large = at::empty({4096}, on(0, at::kByte));
  const auto* address = static_cast<const std::byte*>(large.data_ptr());
  large.reset();
  at::Tensor left = at::empty({1000}, on(0, at::kByte)), right = at::empty({3072}, on(0, at::kByte));
  EXPECT_EQ(left.data_ptr(), address);
  EXPECT_EQ(right.data_ptr(), address + 1024);
  left.reset();
  right.reset();
  EXPECT_EQ(at::empty({4096}, on(0, at::kByte)).data_ptr(), address);
}

// What another stream reads while the memory is freed, with and without record_stream().
float read_after_free(bool is_recorded) {
  const c10::Stream side = stream_from_pool();
  at::Tensor input = at::ones({kElements}, on(0));
  wait_for(side, current());
  at::Tensor result;
  {
    const c10::StreamGuard guard(side);
    result = input.add(1);
  }
  if (is_recorded) input.record_stream(side);
  const void* address = input.data_ptr();
  input.reset();
  const at::Tensor next = at::zeros({kElements}, on(0));
  EXPECT_EQ(next.data_ptr() != address, is_recorded && order() == Order::late);
  (void)next.sum().item<float>();  // the default stream overtakes
  wait_for(current(), side);
  return result.sum().item<float>();
}

TEST_P(OrderedMemoryTest, RecordStreamKeepsTheBlockUntilTheStreamHasPassed) {
  EXPECT_EQ(read_after_free(true), 2 * kElements);
}

TEST_F(MemoryTest, WithoutRecordStreamAnotherStreamReadsWhatCameLater) {
  set_order(Order::late);
  EXPECT_EQ(read_after_free(false), kElements);
}

TEST_F(MemoryTest, RecordedBlockIsHandedOutAfterTheStreamHasPassed) {
  set_order(Order::late);
  const c10::Stream side = stream_from_pool();
  at::Tensor tensor = at::ones({kElements}, on(0)), other = at::ones({1}, on(0));
  {
    const c10::StreamGuard guard(side);
    other.add_(1);
  }
  tensor.record_stream(side);
  const void* address = tensor.data_ptr();
  tensor.reset();
  EXPECT_NE(at::empty({kElements}, on(0)).data_ptr(), address);
  side.synchronize();
  EXPECT_EQ(at::empty({kElements}, on(0)).data_ptr(), address);
}

TEST_F(MemoryTest, StatisticsCountUnitsOf512Bytes) {
  const MemoryStatistics before = memory_statistics(2);
  reset_peak(2);
  {
    const at::Tensor a = at::empty({1}, on(2)), b = at::empty({513}, on(2, at::kByte));
    EXPECT_EQ(memory_statistics(2).allocated_bytes, before.allocated_bytes + 512 + 1024);
  }
  const at::Tensor c = at::empty({1}, on(2));
  const MemoryStatistics after = memory_statistics(2);
  EXPECT_EQ(after.allocated_bytes, before.allocated_bytes + 512);
  EXPECT_EQ(after.peak_bytes, before.allocated_bytes + 512 + 1024);
  EXPECT_EQ(after.allocations, before.allocations + 3);
}

TEST_F(MemoryTest, ResizedStorageKeepsWhatFits) {
  at::Tensor tensor = at::arange(10, on(0));
  tensor.resize_({20});
  EXPECT_TRUE(same(tensor.narrow(0, 0, 10), at::arange(10, at::kFloat)));
  EXPECT_TRUE(at::isnan(tensor.cpu().narrow(0, 10, 10)).all().item<bool>());
}

TEST_F(MemoryTest, PinnedBlockIsKeptWhileAStreamUsesIt) {
  set_order(Order::late);
  at::Tensor host = at::ones({kElements}, pinned());
  ASSERT_TRUE(host.is_pinned());
  const at::Tensor copy = host.to(device(0), at::kFloat, /*non_blocking=*/true);
  const void* address = host.data_ptr();
  host.reset();
  const at::Tensor other = at::empty({kElements}, pinned());
  EXPECT_NE(other.data_ptr(), address);
  EXPECT_EQ(copy.sum().item<float>(), kElements);
  EXPECT_EQ(at::empty({kElements}, pinned()).data_ptr(), address);
}

TEST_F(MemoryTest, PinnedBlockThatNoStreamUsesIsHandedOutAtOnce) {
  const void* address = at::ones({kElements}, pinned()).data_ptr();
  EXPECT_EQ(at::empty({kElements}, pinned()).data_ptr(), address);
}

}  // namespace
}  // namespace tessera::sim

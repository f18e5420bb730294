// A rank that fails ends what the others' streams wait for, and is named.

#include <gmock/gmock.h>

#include <chrono>
#include <future>
#include <span>
#include <thread>

#include "accelerator/fsdp_training.h"
#include "support/accelerator/nccl/group.h"
#include "support/error_matchers.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/internal/step.h"
#include "tessera/comm/point_to_point.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

class WatchdogTest : public sim::InOrder {
 protected:
  void SetUp() override {
    sim::InOrder::SetUp();
    fsdp::use_accelerator();
  }
};
INSTANTIATE_TEST_SUITE_P(, WatchdogTest, ::testing::Values(sim::Order::late, sim::Order::early), sim::order_name);

// As in a training step, the ranks do not compare their calls.
void sum_over(const ProcessGroup& group, const at::Tensor& x) { group.start_all_reduce(x).wait(); }
void gather_from(const ProcessGroup& group, const at::Tensor& x) {
  group.start_all_gather_into(at::empty({group.size() * x.numel()}, x.options()), x).wait();
}

// Runs on three ranks, of which rank 1 calls `fails` instead of `collective`, after an all-reduce. Returns what rank 0
// and 2 were told by this collective, or by the one that follows after they waited for the device. Their tensors are
// not on the current device.
std::vector<std::string> told(FunctionRef<void()> fails, milliseconds timeout,
                              FunctionRef<void(const ProcessGroup&, const at::Tensor&)> collective = sum_over) {
  std::vector<std::string> told(3);
  const auto run = [&](const ProcessGroup& group) {
    const at::Tensor x = at::ones({8}, sim::on(group.rank() + 1));
    sum_over(group, x);
    EXPECT_EQ(x.cpu()[0].item<float>(), 3);
    if (group.rank() == 1) return fails();
    try {
      collective(group, x);
      x.cpu();  // the stream waits for rank 1
      collective(group, x);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::rank_failure);
      told[static_cast<std::size_t>(group.rank())] = error.what();
    }
  };
  try {
    run_local(3, run, {.timeout = timeout, .backend = "sim"});
  } catch (const std::exception&) {
  }
  return told;
}

TEST_P(WatchdogTest, ARankThatThrowsIsNamed) {
  const auto begin = steady_clock::now();
  const auto all = told([] { throw std::runtime_error("the disk is full"); }, std::chrono::minutes(5));
  for (const std::size_t rank : {0, 2}) EXPECT_THAT(all[rank], ::testing::HasSubstr("rank 1"));
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(60));
}

// The host itself waits there, after the group has connected.
TEST_P(WatchdogTest, ARankThatIsMissingInTheFirstCollectiveOfAKindIsNamed) {
  const auto begin = steady_clock::now();
  const auto all = told([] { throw std::runtime_error("the disk is full"); }, std::chrono::minutes(5), gather_from);
  for (const std::size_t rank : {0, 2}) EXPECT_THAT(all[rank], ::testing::HasSubstr("rank 1"));
  EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(60));
}

// The host itself waits there.
TEST_P(WatchdogTest, ARankThatIsMissingWhenTheOthersConnectIsNamed) {
  std::vector<std::string> told(3);
  const auto run = [&](const ProcessGroup& group) {
    const c10::DeviceGuard guard(sim::device(group.rank()));
    if (group.rank() == 1) throw std::runtime_error("the disk is full");
    try {
      group.start_all_reduce(at::ones({8}, sim::on(group.rank()))).wait();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::rank_failure);
      told[static_cast<std::size_t>(group.rank())] = error.what();
    }
  };
  EXPECT_THROW(run_local(3, run, {.timeout = std::chrono::minutes(5), .backend = "sim"}), std::exception);
  for (const std::size_t rank : {0, 2}) {
    EXPECT_THAT(told[rank], ::testing::HasSubstr("the connection on a device"));
    EXPECT_THAT(told[rank], ::testing::HasSubstr("rank 1"));
  }
}

// The ranks have compared their calls, and rank 0 waits for the connection that its first message needs.
TEST_P(WatchdogTest, ARankThatFailsInItsFirstMessageIsNamed) {
  using Exchange = std::function<void(const ProcessGroup& group, const at::Tensor& x)>;
  const auto send = [](int from) -> Exchange {
    return [from](const ProcessGroup& group, const at::Tensor& x) {
      (group.rank() == from ? send_tensors : receive_tensors)(group, std::span(&x, 1), 1 - group.rank());
    };
  };
  const Exchange nothing = [](const ProcessGroup&, const at::Tensor&) {}, to_0 = send(1), to_1 = send(0);
  // Before its message: none; one in the other direction; one in this direction, before the group has connected.
  const Exchange to_1_and_connect = [&](const ProcessGroup& group, const at::Tensor& x) {
    to_1(group, x);
    sum_over(group, x);
  };
  for (const Exchange& before : {nothing, to_0, to_1_and_connect}) {
    std::string told;
    bool refuses = true;
    const auto run = [&](const ProcessGroup& group) {
      const c10::DeviceGuard guard(sim::device(group.rank()));
      const at::Tensor x = at::full({8}, group.rank(), sim::on(group.rank()));
      before(group, x);
      if (group.rank() == 1 && refuses) sim::Group::refuse_messages_of(1);
      if (group.rank() == 1) return to_1(group, x);
      try {
        to_1(group, x);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::rank_failure);
        told = error.what();
      }
    };
    const LocalOptions options{.timeout = std::chrono::minutes(5), .backend = "sim"};
    const auto begin = steady_clock::now();
    EXPECT_THROW(run_local(2, run, options), std::exception);
    sim::Group::refuse_messages_of(-1);
    EXPECT_THAT(told, ::testing::HasSubstr("rank 1"));
    EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(60));
    refuses = false;
    run_local(2, run, options);
  }
}

// The ranks connect in a thread.
TEST_P(WatchdogTest, TheFirstMessageFollowsTheCurrentStream) {
  fsdp::run_on_devices(2, [](const ProcessGroup& group, at::Device device) {
    const c10::StreamGuard guard(sim::stream_from_pool(device.index()));
    const at::Tensor x = at::zeros({8}, sim::on(device.index()));
    sim::current(device.index()).synchronize();
    if (group.rank() == 0) {
      x.fill_(7);
      return send_tensors(group, std::span(&x, 1), 1);
    }
    receive_tensors(group, std::span(&x, 1), 0);
    EXPECT_EQ(x.cpu()[7].item<float>(), 7);
  });
}

TEST_P(WatchdogTest, SubgroupsTakeOverTheConnectionsOfTheirGroup) {
  fsdp::run_on_devices(3, [](const ProcessGroup& group, at::Device device) {
    const auto sum_in = [&](std::vector<int> ranks) {
      const std::optional<ProcessGroup> own = group.subgroup(ranks);
      if (!own) return -1.0F;
      const at::Tensor x = at::full({4}, 1 << group.rank(), sim::on(device.index()));
      own->start_all_reduce(x).wait();
      return x.cpu()[3].item<float>();
    };
    EXPECT_EQ(sum_in({0, 1}), group.rank() < 2 ? 3 : -1) << "before the group has connected";
    group.start_all_reduce(at::ones({8}, sim::on(device.index()))).wait();
    EXPECT_EQ(sum_in({2, 0}), group.rank() != 1 ? 5 : -1);
    EXPECT_EQ(sum_in({1}), group.rank() == 1 ? 2 : -1);
    EXPECT_EQ(sum_in({0, 1, 2}), 7);
  });
}

// A rank outside of a subgroup takes part in the split of its backend.
TEST_P(WatchdogTest, AllRanksOfAGroupMakeTheSameCallsForASubgroup) {
  fsdp::run_on_devices(3, [](const ProcessGroup& group, at::Device device) {
    const CommDebugMode mode(group);
    sum_over(group, at::ones({8}, sim::on(device.index())));
    group.subgroup(std::vector<int>{0, 1});
    EXPECT_THAT(mode.counts(), ::testing::ElementsAre(::testing::Pair("all_reduce", 1)));
    comm::leave_step(group, "a step", std::string_view("an input of a wrong shape"));
    group.barrier();  // passes if all ranks have left the step after the same call
  });
}

TEST_P(WatchdogTest, WhatIsWatchedDoesNotDelayTheCurrentStream) {
  std::promise<void> computed;
  const std::shared_future<void> has_computed = computed.get_future().share();
  fsdp::run_on_devices(2, [&](const ProcessGroup& group, at::Device device) {
    group.start_all_reduce(at::ones({8}, sim::on(device.index()))).wait();  // the ranks connect
    const at::Tensor x = at::ones({8}, sim::on(device.index()));
    if (group.rank() == 1) has_computed.wait();
    PendingCollective pending = group.start_all_reduce(x);
    EXPECT_EQ((at::ones({2}, sim::on(device.index())) + 1).cpu()[1].item<float>(), 2);
    if (group.rank() == 0) computed.set_value();
    pending.wait();
    EXPECT_EQ(x.cpu()[7].item<float>(), 2);
  });
}

// A backend ends its work when it is destroyed. The tensors are not on the current device.
TEST_P(WatchdogTest, AGroupEndsAfterItsWork) {
  for (const char* backend : {"sim", "sim without abort"}) {
    const auto run = [](const ProcessGroup& group) {
      const at::Tensor x = at::ones({8}, sim::on(group.rank() + 1));
      {
        const std::optional<ProcessGroup> own = group.subgroup(std::vector<int>{0, 1});
        sum_over(*own, x);
      }
      EXPECT_EQ(x.cpu()[7].item<float>(), 2) << group.backend();
    };
    run_local(2, run, {.backend = backend});
  }
}

// In the order `late`, the stream that waits for work runs only if the host waits for it, so that the first work seems
// to take too long.
TEST(WatchdogTimeoutTest, ARankThatDoesNotArriveIsNamed) {
  fsdp::use_accelerator();
  sim::set_order(sim::Order::early);
  const auto all = told([] { std::this_thread::sleep_for(std::chrono::seconds(6)); }, std::chrono::seconds(2));
  for (const std::size_t rank : {0, 2}) {
    EXPECT_THAT(all[rank], ::testing::HasSubstr("rank 1 did not arrive within"));
    EXPECT_THAT(all[rank], ::testing::Not(::testing::HasSubstr("rank 2 is")));
  }
}

}  // namespace
}  // namespace tessera

// Death of a rank during training.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>

#include "fsdp/small_model.h"
#include "support/rank_processes.h"

namespace tessera::fsdp {
namespace {

using ::testing::HasSubstr;
using testing::quick;
using testing::RankOutcome;
using testing::run_processes;
using ::testing::StartsWith;

enum class When : std::uint8_t { before_forward, in_forward, before_backward, in_backward };

std::string name_of_moment(const ::testing::TestParamInfo<When>& test) {
  const char* const names[] = {"BeforeForward", "InForward", "BeforeBackward", "InBackward"};
  return names[static_cast<std::size_t>(test.param)];
}

class FsdpDeadRankTest : public ::testing::TestWithParam<When> {};
INSTANTIATE_TEST_SUITE_P(Phases, FsdpDeadRankTest,
                         ::testing::Values(When::before_forward, When::in_forward, When::before_backward,
                                           When::in_backward),
                         name_of_moment);

TEST_P(FsdpDeadRankTest, IsNamedToEveryOther) {
  const std::vector<RankOutcome> outcomes = run_processes(3, quick(), [&](const ProcessGroup& group) {
    const auto dies = [&](When when) {
      if (GetParam() == when && group.rank() == 1) ::kill(::getpid(), SIGKILL);
    };
    SmallModel plain = make_model();
    FullyShardedDataParallel<SmallModel> model(plain, group);
    for (int step = 0;; ++step) {
      if (step == 2) dies(When::before_forward);
      at::Tensor input = batch_of(step, group.rank());
      if (step == 2 && GetParam() == When::in_forward && group.rank() == 1) input = at::ones({2, 9}, at::kDouble);
      at::Tensor loss;
      try {
        loss = loss_of(model(input));
      } catch (const c10::Error&) {
        dies(When::in_forward);  // after some of the units were called
        throw;
      }
      if (step == 2) dies(When::before_backward);
      if (step == 2) loss.register_hook([&](const at::Tensor&) { dies(When::in_backward); });
      loss.backward();
      if (step == 3) return std::string("nothing happened");
    }
  });
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
  for (const std::size_t rank : {0u, 2u}) {
    EXPECT_THAT(outcomes[rank].report, StartsWith("rank_failure: "));
    EXPECT_THAT(outcomes[rank].report,
                HasSubstr(GetParam() == When::in_forward ? "rank 1 left forward of a sharded model: The size of tensor"
                                                         : "rank 1 died: no sign of life for 1000 ms"));
  }
}

}  // namespace
}  // namespace tessera::fsdp

// Messages between two ranks: what arrives, what both ranks do wrong, and ranks that die or do something else.

#include "tessera/comm/point_to_point.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "support/error_matchers.h"
#include "support/one_sided.h"
#include "support/rank_processes.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

using std::chrono::seconds;
using testing::expect_error_soon;
using ::testing::HasSubstr;
using testing::quick;
using testing::run_processes;
using ::testing::StartsWith;

using Tensors = std::vector<at::Tensor>;

// Tensors of every dtype, with sizes from none to more than a socket takes at once.
Tensors messages_of(int rank) {
  Tensors tensors;
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong,
        at::kComplexFloat, at::kComplexDouble, at::kBool}) {
    tensors.push_back(at::arange(6).add(rank).remainder(5).to(dtype).view({2, 3}));
  }
  tensors.push_back(at::empty({0, 3}));
  tensors.push_back(at::arange(1 << 20).add(rank));
  return tensors;
}

Tensors empty_like(const Tensors& tensors) {
  Tensors result;
  for (const at::Tensor& tensor : tensors) result.push_back(at::zeros_like(tensor));
  return result;
}

void expect_same(const Tensors& found, const Tensors& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
}

class PointToPointTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, PointToPointTest, ::testing::Values(2, 3, 5));

TEST_P(PointToPointTest, ARingOfTensorsAndBytes) {
  run_local(GetParam(), [](const ProcessGroup& group) {
    const int ranks = group.size(), next = (group.rank() + 1) % ranks, before = (group.rank() + ranks - 1) % ranks;
    const Tensors received = empty_like(messages_of(0));
    Bytes bytes;
    const auto send = [&] {
      send_tensors(group, messages_of(group.rank()), next);
      send_bytes(group, Bytes(static_cast<std::size_t>(group.rank()) * 1000, 7), next);
    };
    const auto receive = [&] {
      receive_tensors(group, received, before);
      bytes = receive_bytes(group, before);
    };
    if (group.rank() == 0) send();
    receive();
    if (group.rank() != 0) send();
    expect_same(received, messages_of(before));
    EXPECT_EQ(bytes, Bytes(static_cast<std::size_t>(before) * 1000, 7));
  });
}

// The other ranks' collectives have the same numbers as those of the ranks that exchange messages.
TEST(MessageTest, RanksThatTakeNoPartAreNotDisturbed) {
  run_local(4, [](const ProcessGroup& group) {
    const CommDebugMode mode(group);
    for (int i = 0; i < 20; ++i) {
      testing::expect_usable(group);
      if (group.rank() == 1) send_bytes(group, Bytes{1, 2, 3}, 3);
      if (group.rank() == 3) {
        EXPECT_EQ(receive_bytes(group, 1), (Bytes{1, 2, 3}));
      }
      if (group.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const std::map<std::string, std::int64_t> counts = mode.counts();
    EXPECT_EQ(counts.at("all_reduce"), 20);
    EXPECT_EQ(counts.count("send_bytes"), group.rank() == 1 ? 1u : 0u);
  });
}

TEST(MessageTest, MessagesArriveInTheOrderOfTheirCalls) {
  run_local(2, [](const ProcessGroup& group) {
    for (int i = 0; i < 50; ++i) {
      const at::Tensor number = at::full({1}, group.rank() == 0 ? i : -1);
      if (group.rank() == 0) {
        send_tensors(group, Tensors{number}, 1);
      } else {
        receive_tensors(group, Tensors{number}, 0);
        EXPECT_EQ(number.item<int>(), i);
      }
    }
  });
}

TEST(MessageTest, SubgroupsHaveRanksOfTheirOwn) {
  run_local(4, [](const ProcessGroup& group) {
    const int backwards[] = {3, 1};
    const auto pair = group.subgroup(backwards);
    if (!pair) return;
    if (group.rank() == 3) send_bytes(*pair, Bytes{9}, 1);
    if (group.rank() == 1) {
      EXPECT_EQ(receive_bytes(*pair, 0), Bytes{9});
    }
  });
}

// --- errors

Tensors two_tensors(const std::string& mistake) {
  Tensors tensors = {at::ones({6}), at::ones({2, 2})};
  if (mistake == "undefined") tensors[1] = at::Tensor();
  if (mistake == "on meta") tensors[1] = tensors[1].to(at::kMeta);
  if (mistake == "not contiguous") tensors[1] = at::ones({2, 4}).slice(1, 0, 4, 2);
  if (mistake == "another dtype") tensors[1] = tensors[1].to(at::kInt);
  if (mistake == "longer") tensors[1] = at::ones({5});
  if (mistake == "one too few") tensors.pop_back();
  return tensors;
}

const std::vector<std::string>& message_mistakes() {
  static const std::vector<std::string> mistakes = {"undefined", "on meta",     "not contiguous",      "another dtype",
                                                    "longer",    "one too few", "the wrong direction", "bytes"};
  return mistakes;
}

// Rank 0 sends to rank 1, one of which makes a mistake.
void make_message_mistakes(const ProcessGroup& group) {
  const auto exchange = [&](const std::string& mistake) {
    const int peer = 1 - group.rank();
    if (mistake == "bytes") {
      group.rank() == 0 ? send_bytes(group, Bytes{1}, peer) : void(receive_bytes(group, peer));
    } else if ((group.rank() == 0) != (mistake == "the wrong direction")) {
      send_tensors(group, two_tensors(mistake), peer);
    } else {
      receive_tensors(group, two_tensors(mistake), peer);
    }
  };
  for (const std::string& mistake : message_mistakes()) {
    for (const int wrong : {0, 1}) {
      SCOPED_TRACE(mistake + " on rank " + std::to_string(wrong));
      if (group.rank() < 2) {
        expect_error_soon([&] { exchange(group.rank() == wrong ? mistake : ""); },
                          {"tensors", "rank " + std::to_string(wrong)});
        exchange("");
      }
      testing::expect_usable(group);
    }
  }
}

TEST(MessageErrorTest, WhatOneRankDoesWrongIsAnErrorOnBothAsThreads) { run_local(3, make_message_mistakes); }

TEST(MessageErrorTest, WhatOneRankDoesWrongIsAnErrorOnBothAsProcesses) {
  testing::expect_good_processes(3, quick(), make_message_mistakes);
}

TEST(MessageErrorTest, BothReasonsAreGiven) {
  run_local(2, [](const ProcessGroup& group) {
    const Tensors one = {at::ones({group.rank() == 0 ? 2 : 3})};
    const auto call = [&] { group.rank() == 0 ? send_tensors(group, one, 1) : receive_tensors(group, one, 0); };
    EXPECT_ERROR(call(), ErrorCode::invalid_argument, "rank 0 has elements [2] and rank 1 has elements [3]");
    EXPECT_ERROR(
        send_bytes(group, {}, 1 - group.rank()), ErrorCode::invalid_argument,
        "rank 0 calls send of bytes from rank 0 to rank 1 and rank 1 calls send of bytes from rank 1 to rank 0");
  });
}

TEST(MessageErrorTest, TwoRanksAgreeOnAnOutcome) {
  run_local(3, [](const ProcessGroup& group) {
    if (group.rank() == 2) return;
    const int peer = 1 - group.rank();
    agree_with(group, peer, "pack", nullptr);
    const auto failure = std::make_exception_ptr(Error(ErrorCode::not_found, "no such box"));
    EXPECT_ERROR(agree_with(group, peer, "pack", group.rank() == 1 ? failure : nullptr), ErrorCode::not_found,
                 "pack: 1 of 2 ranks failed; rank 1: no such box");
    agree_with(group, peer, "pack", nullptr);
  });
}

// The others cannot know which rank is meant, so they must not wait for it.
TEST(MessageErrorTest, ARankThatIsNotInTheGroupBreaksIt) {
  for (const int peer : {-1, 0, 2}) {
    const auto outcomes = run_processes(2, quick(), [&](const ProcessGroup& group) {
      group.barrier();
      if (group.rank() == 0) send_bytes(group, Bytes{1}, peer);
      receive_bytes(group, 0);
      return std::string("nothing happened");
    });
    EXPECT_THAT(outcomes[0].report, StartsWith("invalid_argument: send_bytes on rank 0 of 2 (world): rank "));
    EXPECT_THAT(outcomes[1].report, StartsWith("rank_failure: receive_bytes from rank 0 on rank 1 of 2"));
    EXPECT_THAT(outcomes[1].report, HasSubstr("rank 0 refused send_bytes"));
  }
  EXPECT_ERROR(send_bytes(ProcessGroup(), {}, 0), ErrorCode::invalid_argument, "rank 0, expected another rank");
}

TEST(MessageErrorTest, ARankThatDiesIsNamed) {
  for (const bool sends : {true, false}) {
    const auto outcomes = run_processes(3, quick(), [&](const ProcessGroup& group) {
      group.barrier();
      if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
      if (group.rank() == 0 && sends) send_tensors(group, messages_of(0), 1);
      if (group.rank() == 0) receive_tensors(group, messages_of(0), 1);
      group.barrier();
      return std::string("nothing happened");
    });
    EXPECT_THAT(outcomes[0].report, StartsWith(sends ? "rank_failure: send_tensors to rank 1 on rank 0 of 3"
                                                     : "rank_failure: receive_tensors from rank 1 on rank 0 of 3"));
    EXPECT_THAT(outcomes[0].report, HasSubstr("rank 1 died: no sign of life for 1000 ms"));
    EXPECT_THAT(outcomes[2].report, HasSubstr("rank 1 died: no sign of life for 1000 ms"));
  }
}

TEST(MessageErrorTest, ARankThatLeavesIsNamedAndNotOneThatLeftBefore) {
  const auto outcomes = run_processes(3, quick(), [&](const ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 2) return std::string("enough");
    std::this_thread::sleep_for(seconds(1));
    if (group.rank() == 1) return std::string("enough, too");
    receive_bytes(group, 1);
    return std::string("nothing happened");
  });
  EXPECT_THAT(outcomes[0].report, HasSubstr("rank 1 left the group"));
}

TEST(MessageErrorTest, ARankThatWaitsInACollectiveIsNamedToAll) {
  const auto begin = std::chrono::steady_clock::now();
  const auto outcomes = run_processes(3, quick(), [&](const ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 0) send_bytes(group, Bytes{1}, 1);
    group.all_reduce(at::ones({2}));
    return std::string("nothing happened");
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, testing::kSoon);
  for (const auto& outcome : outcomes) {
    EXPECT_THAT(outcome.report, StartsWith("rank_failure: "));
    EXPECT_THAT(outcome.report, HasSubstr("rank 0 is in send_bytes to rank 1 and rank 1 in all_reduce"));
  }
}

TEST(MessageErrorTest, ARankThatDoesNotComeIsNamedWithWhatItDoes) {
  InitOptions options = quick();
  options.timeout = seconds(6);
  const auto outcomes = run_processes(2, options, [&](const ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 1) std::this_thread::sleep_for(seconds(9));
    group.rank() == 0 ? send_bytes(group, Bytes{1}, 1) : void(receive_bytes(group, 0));
    return std::string("nothing happened");
  });
  EXPECT_THAT(outcomes[0].report, StartsWith("rank_failure: send_bytes to rank 1 on rank 0 of 2"));
  EXPECT_THAT(outcomes[0].report, HasSubstr("rank 1 did not arrive within 6"));
  EXPECT_THAT(outcomes[0].report, HasSubstr("rank 1 is in no collective"));
}

}  // namespace
}  // namespace tessera

#pragma once
// Collective calls that one rank makes wrongly: every rank must throw soon, naming the operation, the rank and the
// reason, and the next correct call must succeed.

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "support/chaos.h"
#include "support/rank_processes.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/comm/process_group.h"

namespace tessera::testing {

struct OneSidedCall {
  std::string operation;  // as errors name it
  std::vector<std::string> mistakes;
  // Makes a correct call if `mistake` is empty.
  std::function<void(const ProcessGroup& group, const std::string& mistake)> call;
};
// Creates the calls, and what they need, on each rank.
using OneSidedCalls = std::function<std::vector<OneSidedCall>(const ProcessGroup& group)>;

inline void expect_usable(const ProcessGroup& group) {
  const at::Tensor sum = at::ones({3});
  group.all_reduce(sum);
  EXPECT_TRUE(sum.equal(at::full({3}, group.size())));
}

// Expects that `f` throws an error that names all of `words` soon.
inline void expect_error_soon(FunctionRef<void()> f, const std::vector<std::string>& words) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    f();
    ADD_FAILURE() << "no error";
  } catch (const std::exception& error) {
    for (const std::string& word : words) {
      if (std::string(error.what()).find(word) == std::string::npos)
        ADD_FAILURE() << error.what() << "\nlacks: " << word;
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kSoon);
}

// Makes each mistake on each rank in turn. Returns how often.
inline int make_mistakes(const ProcessGroup& group, const std::vector<OneSidedCall>& calls) {
  int cases = 0;
  SampleIfSanitized sample(11);
  for (const OneSidedCall& one : calls) {
    SCOPED_TRACE(one.operation);
    one.call(group, "");
    for (const std::string& mistake : one.mistakes) {
      for (int wrong = 0; wrong < group.size(); ++wrong) {
        if (!sample.takes_next()) continue;
        SCOPED_TRACE(mistake + " on rank " + std::to_string(wrong));
        expect_error_soon([&] { one.call(group, group.rank() == wrong ? mistake : ""); },
                          {one.operation, "rank " + std::to_string(wrong)});
        one.call(group, "");
        ++cases;
      }
    }
    expect_usable(group);
  }
  return cases;
}

inline void make_mistakes_as_threads(int ranks, const OneSidedCalls& calls) {
  run_local(ranks, [&](const ProcessGroup& group) {
    const int cases = make_mistakes(group, calls(group));
    if (group.rank() == 0) ::testing::Test::RecordProperty("cases", cases);
    if (group.rank() == 0) std::printf("%d ranks, %d cases\n", group.size(), cases);
  });
}

inline void make_mistakes_as_processes(int ranks, const OneSidedCalls& calls) {
  expect_good_processes(ranks, quick(), [&](const ProcessGroup& group) { make_mistakes(group, calls(group)); });
}

}  // namespace tessera::testing

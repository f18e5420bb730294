// What is wrong on one rank, or differs between ranks, is an error on all of them, and the group stays usable.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <map>
#include <span>
#include <utility>

#include "support/error_matchers.h"
#include "support/rank_processes.h"
#include "tessera/comm/functional.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/comm/objects.h"
#include "tessera/comm/point_to_point.h"

namespace tessera {
namespace {

using testing::quick;
using testing::run_processes;

// The arguments of a call. Each collective uses those that it has.
struct Arguments {
  at::Tensor tensor, out, in;
  std::vector<std::int64_t> out_splits, in_splits;
  std::vector<Bytes> parts;
  c10::IValue value;
  int root = 0;
  ReduceOp op = ReduceOp::sum;
};

using Call = std::function<void(const ProcessGroup&, const Arguments&)>;
using Change = std::function<void(const ProcessGroup&, Arguments&)>;

Arguments good(const ProcessGroup& group) {
  Arguments arguments;
  const auto ranks = static_cast<std::size_t>(group.size());
  arguments.tensor = at::ones({6});
  arguments.out = at::zeros({2 * group.size()});
  arguments.in = at::ones({2 * group.size()});
  arguments.out_splits = arguments.in_splits = std::vector<std::int64_t>(ranks, 2);
  arguments.parts.assign(ranks, Bytes{1, 2, 3});
  arguments.value = 7;
  return arguments;
}

struct Collective {
  Call call;
  std::map<std::string, Change> changes;  // each makes the call wrong on one rank
};

std::map<std::string, Change> of_tensor(at::Tensor Arguments::*member) {
  return {
      {"undefined", [=](const ProcessGroup&, Arguments& a) { a.*member = at::Tensor(); }},
      {"on meta", [=](const ProcessGroup&, Arguments& a) { a.*member = (a.*member).to(at::kMeta); }},
      {"not contiguous", [=](const ProcessGroup&, Arguments& a) { a.*member = at::ones({12}).slice(0, 0, 12, 2); }},
      {"of another dtype", [=](const ProcessGroup&, Arguments& a) { a.*member = (a.*member).to(at::kDouble); }},
      {"longer", [=](const ProcessGroup&, Arguments& a) { a.*member = at::ones({(a.*member).numel() + 1}); }},
      {"empty", [=](const ProcessGroup&, Arguments& a) { a.*member = at::ones({0}); }},
  };
}

std::map<std::string, Change> with(std::map<std::string, Change> changes, const std::map<std::string, Change>& more) {
  changes.insert(more.begin(), more.end());
  return changes;
}

const std::map<std::string, Change> kOfRoot = {
    {"another root", [](const ProcessGroup&, Arguments& a) { a.root = 1; }},
    {"a root below 0", [](const ProcessGroup&, Arguments& a) { a.root = -1; }},
    {"a root beyond the ranks", [](const ProcessGroup& g, Arguments& a) { a.root = g.size(); }},
};
const std::map<std::string, Change> kOfOp = {
    {"another op", [](const ProcessGroup&, Arguments& a) { a.op = ReduceOp::max; }},
};
const std::map<std::string, Change> kOfValue = {
    {"no pickle",
     [](const ProcessGroup&, Arguments& a) {
       a.value = c10::IValue::make_capsule(c10::make_intrusive<torch::CustomClassHolder>());
     }},
};
const std::map<std::string, Change> kOfParts = {
    {"a part too few", [](const ProcessGroup&, Arguments& a) { a.parts.pop_back(); }},
    {"a part too many", [](const ProcessGroup&, Arguments& a) { a.parts.emplace_back(); }},
};

// Returns two elements of a good tensor, and any other as it is.
at::Tensor two_of(const at::Tensor& tensor) {
  const bool is_good = tensor.defined() && !tensor.is_meta() && tensor.is_contiguous() && tensor.numel() == 6;
  return is_good ? tensor.narrow(0, 0, 2) : tensor;
}

std::map<std::string, Collective> collectives() {
  return {
      {"broadcast",
       {[](const ProcessGroup& g, const Arguments& a) { g.broadcast(a.tensor, a.root); },
        with(of_tensor(&Arguments::tensor), kOfRoot)}},
      {"all_reduce",
       {[](const ProcessGroup& g, const Arguments& a) { g.all_reduce(a.tensor, a.op); },
        with(of_tensor(&Arguments::tensor), kOfOp)}},
      {"all_gather_into",
       {[](const ProcessGroup& g, const Arguments& a) { g.all_gather_into(a.out, a.in.narrow(0, 0, 2)); },
        with(of_tensor(&Arguments::out), {})}},
      {"reduce_scatter_into",
       {[](const ProcessGroup& g, const Arguments& a) { g.reduce_scatter_into(at::zeros({2}), a.in, a.op); },
        with(of_tensor(&Arguments::in), kOfOp)}},
      {"all_to_all",
       {[](const ProcessGroup& g, const Arguments& a) { g.all_to_all(a.out, a.in, a.out_splits, a.in_splits); },
        with(with(of_tensor(&Arguments::out), {}),
             {{"splits that the others do not expect",
               [](const ProcessGroup&, Arguments& a) {
                 a.in_splits[0] = 1;
                 a.in_splits[1] = 3;
               }},
              {"too few splits", [](const ProcessGroup&, Arguments& a) { a.out_splits.pop_back(); }},
              {"a negative split",
               [](const ProcessGroup&, Arguments& a) {
                 a.in_splits[0] = -1;
                 a.in_splits[1] = 5;
               }}})}},
      {"gather",
       {[](const ProcessGroup& g, const Arguments& a) {
          g.gather(g.rank() == 0 ? a.out : at::Tensor(), two_of(a.tensor), a.root);
        },
        with(of_tensor(&Arguments::tensor), kOfRoot)}},
      {"scatter",
       {[](const ProcessGroup& g, const Arguments& a) {
          g.scatter(two_of(a.tensor), g.rank() == 0 ? a.in : at::Tensor(), a.root);
        },
        with(of_tensor(&Arguments::tensor), kOfRoot)}},
      {"gather_bytes",
       {[](const ProcessGroup& g, const Arguments& a) { g.gather_bytes(a.parts[0], a.root); }, kOfRoot}},
      {"broadcast_bytes",
       {[](const ProcessGroup& g, const Arguments& a) { g.broadcast_bytes(a.parts[0], a.root); }, kOfRoot}},
      {"scatter_bytes", {[](const ProcessGroup& g, const Arguments& a) { g.scatter_bytes(a.parts, a.root); }, kOfRoot}},
      {"all_to_all_bytes", {[](const ProcessGroup& g, const Arguments& a) { g.all_to_all_bytes(a.parts); }, kOfParts}},
      {"all_gather_object",
       {[](const ProcessGroup& g, const Arguments& a) { all_gather_object(g, a.value); }, kOfValue}},
      {"gather_object", {[](const ProcessGroup& g, const Arguments& a) { gather_object(g, a.value, 0); }, kOfValue}},
      {"broadcast_object",
       {[](const ProcessGroup& g, const Arguments& a) {
          for (int root = 0; root < g.size(); ++root) broadcast_object(g, a.value, root);
        },
        kOfValue}},
      {"scatter_object",
       {[](const ProcessGroup& g, const Arguments& a) {
          for (int root = 0; root < g.size(); ++root)
            scatter_object(g, std::vector<c10::IValue>(static_cast<std::size_t>(g.size()), a.value), root);
        },
        kOfValue}},
      {"functional::all_to_all",
       {[](const ProcessGroup& g, const Arguments& a) { functional::all_to_all(g, a.in, a.out_splits, a.in_splits); },
        {{"splits whose sum is below 0",
          [](const ProcessGroup&, Arguments& a) {
            a.out_splits = {3, -5, 0, 0};
          }},
         {"a split below 0", [](const ProcessGroup&, Arguments& a) { a.in_splits[0] = -1; }}}}},
  };
}

void expect_usable(const ProcessGroup& group) {
  const at::Tensor sum = at::ones({3});
  group.all_reduce(sum);
  EXPECT_TRUE(sum.equal(at::full({3}, group.size())));
  EXPECT_EQ(group.all_gather_bytes({}).size(), static_cast<std::size_t>(group.size()));
}

// Makes every wrong call on every rank in turn. Returns how many.
int try_all(const ProcessGroup& group) {
  int cases = 0;
  for (const auto& [name, collective] : collectives()) {
    collective.call(group, good(group));
    for (const auto& [what, change] : collective.changes) {
      for (int wrong = 0; wrong < group.size(); ++wrong) {
        SCOPED_TRACE(name + " with " + what + " on rank " + std::to_string(wrong));
        Arguments arguments = good(group);
        if (group.rank() == wrong) change(group, arguments);
        const auto begin = std::chrono::steady_clock::now();
        EXPECT_ERROR(collective.call(group, arguments), ErrorCode::invalid_argument, name, "rank ");
        EXPECT_LT(std::chrono::steady_clock::now() - begin, testing::kSoon);
        expect_usable(group);
        ++cases;
      }
    }
  }
  return cases;
}

class OneSidedTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, OneSidedTest, ::testing::Values(2, 3, 4));

TEST_P(OneSidedTest, WhatOneRankDoesWrongIsAnErrorOnAllAsThreads) {
  run_local(GetParam(), [](const ProcessGroup& group) {
    const int cases = try_all(group);
    if (group.rank() == 0) fmt::print("{} cases\n", cases);
  });
}

TEST_P(OneSidedTest, WhatOneRankDoesWrongIsAnErrorOnAllAsProcesses) {
  const auto outcomes = run_processes(GetParam(), quick(), [](const ProcessGroup& group) {
    const int cases = try_all(group);
    if (::testing::Test::HasFailure()) throw std::runtime_error("a case failed, see above");
    return std::to_string(cases);
  });
  for (const auto& outcome : outcomes) EXPECT_GT(std::atoi(outcome.report.c_str()), 80) << outcome.report;
}

TEST_P(OneSidedTest, RanksInDifferentCollectivesAllThrow) {
  run_local(GetParam(), [](const ProcessGroup& group) {
    for (const auto& [name, collective] : collectives()) {
      for (const auto& [other_name, other] : collectives()) {
        if (name == other_name) continue;
        SCOPED_TRACE(name + " and " + other_name);
        const Call& call = group.rank() == 1 ? other.call : collective.call;
        EXPECT_ERROR(call(group, good(group)), ErrorCode::invalid_argument, "rank 0 calls " + name,
                     "rank 1 calls " + other_name);
      }
      expect_usable(group);
    }
  });
}

// A rank that has returned meets the others in its next call.
TEST(OneSidedStepTest, OfADisagreementTheNextCallTellsTheRankThatWentOn) {
  run_local(2, [](const ProcessGroup& group) {
    if (group.rank() == 0) {
      EXPECT_ERROR(group.all_reduce(at::ones({2})), ErrorCode::invalid_argument, "rank 1 calls barrier");
    } else {
      EXPECT_ERROR(group.barrier(), ErrorCode::invalid_argument, "rank 0 calls all_reduce");
    }
    expect_usable(group);
  });
}

// What a view conjugates or negates is not so in memory.
TEST(OneSidedStepTest, AViewThatConjugatesOrNegatesIsRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor complex = at::complex(at::ones({4}), at::ones({4})), real = at::ones({4});
    const std::string why = "is a conjugated or negated view, expected a plain tensor";
    for (const auto& [plain, view] : {std::pair(complex, complex.conj()), std::pair(real, real._neg_view())}) {
      const at::Tensor& mine = group.rank() == 1 ? view : plain;
      const at::Tensor out = at::empty({8}, plain.options());
      EXPECT_ERROR(group.broadcast(mine, 0), ErrorCode::invalid_argument, "rank 1: broadcast", why);
      EXPECT_ERROR(group.all_reduce(mine), ErrorCode::invalid_argument, "rank 1: all_reduce", why);
      EXPECT_ERROR(group.all_gather_into(out, mine), ErrorCode::invalid_argument, "rank 1: all_gather_into", why);
      const std::span<const at::Tensor> one(&mine, 1);
      const auto message = [&] { group.rank() == 1 ? send_tensors(group, one, 0) : receive_tensors(group, one, 1); };
      EXPECT_ERROR(message(), ErrorCode::invalid_argument, "rank 1: send_tensors", why);
      expect_usable(group);
    }
  });
}

// Training steps do not compare. There a rank that refuses breaks the group, as one that dies.
TEST(OneSidedStepTest, ARankThatRefusesAnAsynchronousCallBreaksTheGroupForAll) {
  const auto outcomes = run_processes(3, quick(), [](const ProcessGroup& group) {
    group.barrier();
    group.start_all_reduce(group.rank() == 1 ? at::ones({4}).slice(0, 0, 4, 2) : at::ones({2})).wait();
    return std::string("nothing happened");
  });
  EXPECT_THAT(outcomes[1].report, ::testing::StartsWith("invalid_argument: "));
  for (const int rank : {0, 2}) {
    EXPECT_THAT(outcomes[static_cast<std::size_t>(rank)].report,
                ::testing::HasSubstr("rank 1 refused all_reduce: all_reduce on rank 1 of 3 (world): tensor is not"));
  }
}

TEST(OneSidedStepTest, RanksInDifferentAsynchronousCallsAreNoticed) {
  const auto outcomes = run_processes(2, quick(), [](const ProcessGroup& group) {
    group.barrier();
    const at::Tensor large = at::ones({1 << 20});
    if (group.rank() == 0) {
      group.start_all_reduce(large).wait();
    } else {
      group.start_all_gather_into(large, large.narrow(0, 0, 1 << 19).clone()).wait();
    }
    group.barrier();
    return std::string("nothing happened");
  });
  for (const auto& outcome : outcomes) EXPECT_THAT(outcome.report, ::testing::StartsWith("rank_failure: "));
}

}  // namespace
}  // namespace tessera

// Every collective on ranks that are threads, worlds of 1 to 8, every dtype.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <mutex>
#include <numeric>

#include "support/error_matchers.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/comm/objects.h"

namespace tessera {
namespace {

class CollectivesTest : public ::testing::TestWithParam<int> {
 protected:
  int world() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Worlds, CollectivesTest, ::testing::Values(1, 2, 3, 4, 8));

const std::vector<at::ScalarType>& all_dtypes() {
  static const std::vector<at::ScalarType> dtypes = {at::kFloat, at::kDouble,       at::kHalf,          at::kBFloat16,
                                                     at::kByte,  at::kChar,         at::kShort,         at::kInt,
                                                     at::kLong,  at::kComplexFloat, at::kComplexDouble, at::kBool};
  return dtypes;
}

// Returns `count` elements that differ from those of other ranks.
at::Tensor of_rank(int rank, std::int64_t count, at::ScalarType dtype) {
  const at::Tensor numbers = at::arange(count, at::kLong).add(rank * 7 + 1);
  return dtype == at::kBool ? numbers.remainder(2).to(dtype) : numbers.to(dtype);
}

TEST_P(CollectivesTest, BroadcastOfEveryDtypeFromEveryRoot) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const at::ScalarType dtype : all_dtypes()) {
      for (int root = 0; root < world(); ++root) {
        const at::Tensor tensor = of_rank(group.rank(), 5, dtype).view({5, 1});
        group.broadcast(tensor, root);
        EXPECT_TRUE(at::equal(tensor, of_rank(root, 5, dtype).view({5, 1}))) << dtype;
      }
    }
  });
}

TEST_P(CollectivesTest, AllGatherOfEveryDtype) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const at::ScalarType dtype : all_dtypes()) {
      for (const std::int64_t count : {0, 1, 6}) {
        const at::Tensor out = at::zeros({world(), count}, dtype);
        group.all_gather_into(out, of_rank(group.rank(), count, dtype));
        for (int r = 0; r < world(); ++r) EXPECT_TRUE(at::equal(out[r], of_rank(r, count, dtype))) << dtype;
      }
    }
  });
}

TEST_P(CollectivesTest, AllReduceOfEveryDtypeAndOperation) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const at::ScalarType dtype : all_dtypes()) {
      std::vector<at::Tensor> parts;
      for (int r = 0; r < world(); ++r) parts.push_back(of_rank(r, 3, dtype));
      const at::Tensor all = at::stack(parts);
      const auto reduced = [&](ReduceOp op) {
        const at::Tensor tensor = of_rank(group.rank(), 3, dtype);
        group.all_reduce(tensor, op);
        return tensor;
      };
      if (dtype == at::kBool) {
        EXPECT_TRUE(at::equal(reduced(ReduceOp::sum), all.any(0)));
        continue;
      }
      EXPECT_TRUE(at::allclose(reduced(ReduceOp::sum), all.sum(0).to(dtype))) << dtype;
      if (!at::isComplexType(dtype)) {
        EXPECT_TRUE(at::equal(reduced(ReduceOp::min), all.amin(0))) << dtype;
        EXPECT_TRUE(at::equal(reduced(ReduceOp::max), all.amax(0))) << dtype;
      }
      if (at::isFloatingType(dtype)) {
        EXPECT_TRUE(at::allclose(reduced(ReduceOp::average), all.mean(0), 1e-2)) << dtype;
      }
      if (dtype == at::kDouble || dtype == at::kComplexDouble || dtype == at::kLong) {
        EXPECT_TRUE(at::allclose(reduced(ReduceOp::product), all.prod(0))) << dtype;
      }
    }
  });
}

TEST_P(CollectivesTest, ReduceScatterOfEveryDtype) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const at::ScalarType dtype : all_dtypes()) {
      if (dtype == at::kBool) continue;
      const at::Tensor out = at::zeros({2}, dtype);
      group.reduce_scatter_into(out, of_rank(group.rank(), 2 * world(), dtype));
      at::Tensor sum = at::zeros({2 * world()}, dtype);
      for (int r = 0; r < world(); ++r) sum.add_(of_rank(r, 2 * world(), dtype));
      EXPECT_TRUE(at::equal(out, sum.narrow(0, 2 * group.rank(), 2))) << dtype;
    }
  });
}

TEST_P(CollectivesTest, ReduceScatterOfEveryOperation) {
  run_local(world(), [&](const ProcessGroup& group) {
    at::Tensor all = at::empty({world(), 2 * world()}, at::kDouble);
    for (int r = 0; r < world(); ++r) all[r].copy_(of_rank(r, 2 * world(), at::kDouble));
    const auto reduced = [&](ReduceOp op) {
      const at::Tensor out = at::zeros({2}, at::kDouble);
      group.reduce_scatter_into(out, all[group.rank()].clone(), op);
      return out;
    };
    const at::Tensor mine = all.narrow(1, 2 * group.rank(), 2);
    EXPECT_TRUE(at::equal(reduced(ReduceOp::sum), mine.sum(0)));
    EXPECT_TRUE(at::allclose(reduced(ReduceOp::average), mine.mean(0)));
    EXPECT_TRUE(at::allclose(reduced(ReduceOp::product), mine.prod(0)));
    EXPECT_TRUE(at::equal(reduced(ReduceOp::min), mine.amin(0)));
    EXPECT_TRUE(at::equal(reduced(ReduceOp::max), mine.amax(0)));
  });
}

TEST_P(CollectivesTest, APartMayBeInTheMemoryOfAllParts) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor all = at::ones({2 * world()}), own = all.narrow(0, 2 * group.rank(), 2);
    group.reduce_scatter_into(own, all);
    EXPECT_TRUE(at::equal(own, at::full({2}, world(), at::kFloat)));
    group.all_gather_into(all, own.fill_(group.rank()));
    EXPECT_TRUE(at::equal(all, at::arange(world(), at::kFloat).repeat_interleave(2)));
  });
}

// Rank r sends (r + 2 s) % 4 elements to rank s, which is none for some.
TEST_P(CollectivesTest, AllToAllWithSplitsThatDiffer) {
  run_local(world(), [&](const ProcessGroup& group) {
    const auto count = [](int from, int to) { return static_cast<std::int64_t>((from + 2 * to) % 4); };
    const auto value = [](int from, int to) { return at::full({1}, 100 * from + to, at::kInt); };
    std::vector<std::int64_t> in_splits, out_splits;
    std::vector<at::Tensor> in = {at::empty({0}, at::kInt)}, expected = {at::empty({0}, at::kInt)};
    for (int r = 0; r < world(); ++r) {
      in_splits.push_back(count(group.rank(), r));
      in.push_back(value(group.rank(), r).repeat({in_splits.back()}));
      out_splits.push_back(count(r, group.rank()));
      expected.push_back(value(r, group.rank()).repeat({out_splits.back()}));
    }
    const at::Tensor out =
        at::zeros({std::accumulate(out_splits.begin(), out_splits.end(), std::int64_t{0})}, at::kInt);
    group.all_to_all(out, at::cat(in), out_splits, in_splits);
    EXPECT_TRUE(at::equal(out, at::cat(expected)));
  });
}

TEST_P(CollectivesTest, AllToAllsThatArePendingTogether) {
  run_local(world(), [&](const ProcessGroup& group) {
    const std::vector<std::int64_t> splits(static_cast<std::size_t>(world()), 2);
    std::vector<at::Tensor> outs;
    std::vector<PendingCollective> pending;
    for (int call = 0; call < 5; ++call) {
      outs.push_back(at::empty({2 * world()}, at::kInt));
      // The collective keeps tensors alive that the caller has released.
      const at::Tensor in = at::full({2 * world()}, 100 * call + group.rank(), at::kInt);
      pending.push_back(group.start_all_to_all(outs.back(), in, splits, splits));
    }
    for (int call = 0; call < 5; ++call) {
      pending[static_cast<std::size_t>(call)].wait();
      pending[static_cast<std::size_t>(call)].wait();  // no-op
      const at::Tensor expected = at::arange(world(), at::kInt).repeat_interleave(2).add(100 * call);
      EXPECT_TRUE(at::equal(outs[static_cast<std::size_t>(call)], expected)) << call;
    }
    // Waiting is optional.
    const at::Tensor in = at::ones({2 * world()});
    group.start_all_to_all(at::empty({2 * world()}), in, splits, splits);
    group.barrier();
  });
}

// Several kinds, waited for in the order in which they started.
TEST_P(CollectivesTest, CollectivesOfEveryKindThatArePendingTogether) {
  run_local(world(), [&](const ProcessGroup& group) {
    std::vector<at::Tensor> gathered, reduced;
    std::vector<PendingCollective> pending;
    for (int call = 0; call < 4; ++call) {
      gathered.push_back(at::empty({3 * world()}, at::kInt));
      pending.push_back(
          group.start_all_gather_into(gathered.back(), at::full({3}, 100 * call + group.rank(), at::kInt)));
      reduced.push_back(at::empty({2}, at::kFloat));
      pending.push_back(group.start_reduce_scatter_into(
          reduced.back(), at::arange(2 * world(), at::kFloat).add(group.rank() + call), ReduceOp::average));
    }
    for (std::size_t call = 0; call < 4; ++call) {
      pending[2 * call].wait();
      pending[2 * call + 1].wait();
      const auto number = static_cast<int>(call);
      EXPECT_TRUE(at::equal(gathered[call], at::arange(world(), at::kInt).repeat_interleave(3).add(100 * number)));
      const double mean_rank = (world() - 1) / 2.0;
      EXPECT_TRUE(at::equal(reduced[call], at::arange(2, at::kFloat).add(2 * group.rank() + number + mean_rank)));
    }
    // Waiting is optional.
    group.start_all_gather_into(at::empty({3 * world()}), at::ones({3}));
    group.start_reduce_scatter_into(at::empty({3}), at::ones({3 * world()}));
    group.barrier();
  });
}

TEST_P(CollectivesTest, AllToAllOfNothing) {
  run_local(world(), [&](const ProcessGroup& group) {
    const std::vector<std::int64_t> none(static_cast<std::size_t>(world()), 0);
    group.all_to_all(at::empty({0}), at::empty({0}), none, none);
  });
}

TEST_P(CollectivesTest, GatherAndScatter) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (int root = 0; root < world(); ++root) {
      const bool is_root = group.rank() == root;
      const at::Tensor all = is_root ? at::zeros({world(), 3}, at::kShort) : at::Tensor();
      group.gather(all, of_rank(group.rank(), 3, at::kShort), root);
      for (int r = 0; is_root && r < world(); ++r) EXPECT_TRUE(at::equal(all[r], of_rank(r, 3, at::kShort)));
      const at::Tensor part = at::zeros({3}, at::kShort);
      group.scatter(part, all, root);
      EXPECT_TRUE(at::equal(part, of_rank(group.rank(), 3, at::kShort)));
    }
    group.barrier();
  });
}

Bytes bytes_of_rank(int rank, std::size_t size) { return Bytes(size, static_cast<std::uint8_t>(rank + 1)); }

TEST_P(CollectivesTest, BytesOfAnySize) {
  run_local(world(), [&](const ProcessGroup& group) {
    // In the second round one rank has nearly all bytes.
    for (const std::size_t factor : {std::size_t{1}, std::size_t{1} << 20}) {
      const auto size = [&](int rank) { return rank == world() - 1 ? factor : static_cast<std::size_t>(rank); };
      const std::vector<Bytes> all = group.all_gather_bytes(bytes_of_rank(group.rank(), size(group.rank())));
      ASSERT_EQ(all.size(), static_cast<std::size_t>(world()));
      for (int r = 0; r < world(); ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], bytes_of_rank(r, size(r)));
      const int root = world() - 1;
      const std::vector<Bytes> gathered = group.gather_bytes(bytes_of_rank(group.rank(), size(group.rank())), root);
      EXPECT_EQ(gathered, group.rank() == root ? all : std::vector<Bytes>());
      EXPECT_EQ(group.broadcast_bytes(bytes_of_rank(group.rank(), size(group.rank())), root), all.back());
      EXPECT_EQ(group.scatter_bytes(gathered, root), bytes_of_rank(group.rank(), size(group.rank())));
    }
  });
}

TEST_P(CollectivesTest, AllToAllBytes) {
  run_local(world(), [&](const ProcessGroup& group) {
    std::vector<Bytes> parts, expected;
    for (int r = 0; r < world(); ++r) {
      parts.push_back(bytes_of_rank(group.rank(), static_cast<std::size_t>(r)));
      expected.push_back(bytes_of_rank(r, static_cast<std::size_t>(group.rank())));
    }
    EXPECT_EQ(group.all_to_all_bytes(parts), expected);
  });
}

TEST_P(CollectivesTest, Objects) {
  run_local(world(), [&](const ProcessGroup& group) {
    const auto object = [](int rank) {
      c10::Dict<std::string, at::Tensor> dict;
      dict.insert("rank", at::full({2}, rank));
      return c10::IValue(dict);
    };
    const auto rank_of = [](const c10::IValue& value) {
      return value.toGenericDict().at("rank").toTensor()[0].item<int>();
    };
    const std::vector<c10::IValue> all = all_gather_object(group, object(group.rank()));
    for (int r = 0; r < world(); ++r) EXPECT_EQ(rank_of(all[static_cast<std::size_t>(r)]), r);
    EXPECT_EQ(gather_object(group, object(group.rank()), 0).size(), group.rank() == 0 ? all.size() : 0u);
    EXPECT_EQ(rank_of(broadcast_object(group, object(group.rank()), world() - 1)), world() - 1);
    EXPECT_EQ(rank_of(scatter_object(group, group.rank() == 0 ? all : std::vector<c10::IValue>(), 0)), group.rank());
  });
}

TEST_P(CollectivesTest, SubgroupsOfEvenAndOddRanksBackwards) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const int parity : {0, 1}) {
      std::vector<int> ranks;
      for (int r = world() - 1; r >= 0; --r) {
        if (r % 2 == parity) ranks.push_back(r);
      }
      if (ranks.empty()) continue;
      const std::optional<ProcessGroup> half = group.subgroup(ranks);
      ASSERT_EQ(half.has_value(), group.rank() % 2 == parity);
      if (!half) continue;
      EXPECT_EQ(half->world_ranks(), ranks);
      EXPECT_EQ(half->world_rank(), group.rank());
      EXPECT_EQ(half->world_size(), world());
      const at::Tensor sum = at::full({1}, group.rank(), at::kLong);
      half->all_reduce(sum);
      EXPECT_EQ(sum.item<int>(), std::accumulate(ranks.begin(), ranks.end(), 0));
      // The same in a subgroup.
      const int first[] = {0};
      EXPECT_EQ(half->subgroup(first).has_value(), half->rank() == 0);
    }
  });
}

TEST_P(CollectivesTest, AgreementOnSuccessAndOnFailure) {
  run_local(world(), [&](const ProcessGroup& group) {
    EXPECT_EQ(group.agree_on("count", [&] { return group.rank(); }), group.rank());
    const int last = world() - 1;
    const auto step = [&] {
      group.agree_on("open", [&] {
        if (group.rank() == last) fail(ErrorCode::io, "no file {}", group.rank());
      });
    };
    const std::string rank = world() == 1 ? "" : "rank " + std::to_string(last) + ": ";
    EXPECT_ERROR(step(), ErrorCode::io, rank + "no file " + std::to_string(last));
    group.barrier();  // the group is still usable
  });
}

TEST(AgreementTest, SaysEveryRankThatFailedAndWhy) {
  run_local(4, [&](const ProcessGroup& group) {
    const auto step = [&] {
      group.agree_on("open", [&] {
        if (group.rank() == 1) fail(ErrorCode::io, "no file");
        if (group.rank() == 3) throw std::runtime_error("bad\nluck");
      });
    };
    EXPECT_ERROR(step(), ErrorCode::rank_failure, "open: 2 of 4 ranks failed; rank 1: no file; rank 3: bad");
  });
}

TEST(ArgumentsTest, AreRefusedBeforeAnythingIsSent) {
  run_local(2, [&](const ProcessGroup& group) {
    const at::Tensor four = at::zeros({4}), two = at::zeros({2});
    const std::vector<std::int64_t> ones = {1, 1};
    const int bad_ranks[] = {0, 2}, twice[] = {1, 1};
    const auto refuse = [&](FunctionRef<void()> call, const std::string& where, const std::string& what) {
      EXPECT_ERROR(call(), ErrorCode::invalid_argument, where + " on rank", what);
    };
    refuse([&] { group.broadcast(two, 2); }, "broadcast", "root 2, expected 0 to 1");
    refuse([&] { group.broadcast(at::Tensor(), 0); }, "broadcast", "tensor is undefined");
    refuse([&] { group.broadcast(at::zeros({2, 2}).t(), 0); }, "broadcast", "not contiguous");
    refuse([&] { group.broadcast(at::zeros({2}, at::TensorOptions().device(at::kMeta)), 0); }, "broadcast", "on meta");
    refuse([&] { group.all_reduce(at::zeros({1}, at::kInt), ReduceOp::average); }, "all_reduce", "average of Int");
    refuse([&] { group.all_gather_into(two, two); }, "all_gather_into", "out has 2 elements, expected 2 x 2");
    refuse([&] { group.all_gather_into(four.to(at::kInt), two); }, "all_gather_into", "out is of Int, in of Float");
    refuse([&] { group.reduce_scatter_into(two, two); }, "reduce_scatter_into", "in has 2 elements, expected 2 x 2");
    refuse([&] { group.all_to_all(two, four, ones, ones); }, "all_to_all", "splits of in are [1, 1]");
    const std::vector<std::int64_t> overflowing = {1, std::numeric_limits<std::int64_t>::max()};
    refuse([&] { group.all_to_all(two, four, overflowing, ones); }, "all_to_all",
           "splits of out are [1, 9223372036854775807]");
    for (const std::int64_t begin : {0, 1}) {
      refuse([&] { group.all_to_all(four.narrow(0, begin, 2), four.narrow(0, 0, 2), ones, ones); }, "all_to_all",
             "out and in overlap");
    }
    refuse([&] { group.gather(four, two, 1 - group.rank()); }, "gather", "out is defined");
    refuse([&] { group.scatter(two, four, 1 - group.rank()); }, "scatter", "in is defined");
    refuse([&] { group.subgroup(bad_ranks); }, "subgroup", "ranks [0, 2], expected some of 0 to 1");
    refuse([&] { group.subgroup(twice); }, "subgroup", "each once");
    refuse([&] { group.subgroup({}); }, "subgroup", "ranks []");
    refuse([&] { group.all_to_all_bytes(std::vector<Bytes>(3)); }, "all_to_all_bytes", "3 parts");
    for (const std::int64_t begin : {1, 2 - 2 * group.rank()}) {
      const at::Tensor part = four.narrow(0, begin, 2);
      refuse([&] { group.reduce_scatter_into(part, four); }, "reduce_scatter_into", "out and in overlap");
      refuse([&] { group.all_gather_into(four, part); }, "all_gather_into", "out and in overlap");
    }
    group.barrier();  // the group is not broken
  });
  EXPECT_ERROR(run_local(0, [](const ProcessGroup&) {}), ErrorCode::invalid_argument, "run 0 local ranks");
}

}  // namespace
}  // namespace tessera

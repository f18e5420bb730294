// Reductions of ranks that share memory, and of others.

#include "tensor/exchange/reduce.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <tuple>

#include "support/chaos.h"
#include "support/error_matchers.h"
#include "support/rank_processes.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/internal/shared_memory.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

using testing::indexed;
using testing::Sizes;

const Sizes kShapes[] = {{1}, {7}, {5, 3}, {4, 6, 5}};
const Sizes kLarge[] = {{300, 131}, {2, 300000}, {3, 2, 50000}};  // of many pieces

// Each rank's input. Sums and products of these are exact.
at::Tensor local_of(const Sizes& shape, at::ScalarType type, int rank) {
  return indexed(shape).mul(3 + rank).remainder(rank + 5).sub(2).to(type);
}

at::Tensor expected_of(const Sizes& shape, at::ScalarType type, int ranks, ReduceOp op) {
  at::Tensor result = local_of(shape, type, 0);
  for (int rank = 1; rank < ranks; ++rank) {
    const at::Tensor other = local_of(shape, type, rank);
    if (op == ReduceOp::sum || op == ReduceOp::average) result = result + other;
    if (op == ReduceOp::product) result = result * other;
    if (op == ReduceOp::min) result = at::minimum(result, other);
    if (op == ReduceOp::max) result = at::maximum(result, other);
  }
  return op == ReduceOp::average ? result / ranks : result;
}

void compare(const ProcessGroup& group, const Sizes& shape, at::ScalarType type, ReduceOp op) {
  const at::Tensor local = local_of(shape, type, group.rank()), before = local.clone();
  const at::Tensor expected = expected_of(shape, type, group.size(), op);
  const auto check = [&](const at::Tensor& found, const at::Tensor& wanted, const char* what) {
    EXPECT_EQ(found.scalar_type(), type);
    EXPECT_TRUE(found.sizes() == wanted.sizes() && at::allclose(found, wanted, 1e-6, 0))
        << what << " of " << local.sizes() << " on " << group.size();
  };
  check(all_reduced(group, local, op), expected, "all-reduce");
  for (std::int64_t dim = 0; dim < local.dim(); ++dim) {
    const std::int64_t length = local.size(dim), rows = (length + group.size() - 1) / group.size();
    const std::int64_t begin = std::min(group.rank() * rows, length);
    const at::Tensor part = expected.narrow(dim, begin, std::min(begin + rows, length) - begin);
    check(reduce_scattered(group, local, op, dim), part, "reduce-scatter");
  }
  EXPECT_TRUE(at::equal(local, before));
}

void compare_all(const ProcessGroup& group) {
  testing::SampleIfSanitized sample(4);
  for (const Sizes& shape : kShapes) {
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kLong, at::kInt}) {
      for (const ReduceOp op : {ReduceOp::sum, ReduceOp::average, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
        if (op == ReduceOp::average && !at::isFloatingType(type)) continue;
        if (sample.takes_next()) compare(group, shape, type, op);
      }
    }
  }
  for (const Sizes& shape : kLarge) compare(group, shape, at::kFloat, ReduceOp::average);
}

class ReduceWorlds : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  ReduceWorlds() { ::setenv("TESSERA_HOST_MEMORY", shares_memory() ? "1" : "0", /*replace=*/1); }
  ~ReduceWorlds() override { ::unsetenv("TESSERA_HOST_MEMORY"); }
  static int ranks() { return std::get<0>(GetParam()); }
  static bool shares_memory() { return std::get<1>(GetParam()); }
  static void compare_in(const ProcessGroup& group) {
    ASSERT_EQ(comm::SharedMemory::is_available(group), shares_memory());
    compare_all(group);
  }
};
INSTANTIATE_TEST_SUITE_P(, ReduceWorlds, ::testing::Combine(::testing::Values(2, 3, 5), ::testing::Bool()),
                         [](const auto& test) {
                           return std::to_string(std::get<0>(test.param)) + (std::get<1>(test.param) ? "" : "Apart");
                         });

TEST_P(ReduceWorlds, InProcesses) { testing::expect_good_processes(ranks(), testing::quick(), compare_in); }
TEST_P(ReduceWorlds, InThreads) { run_local(ranks(), compare_in); }

TEST(ReduceTest, OtherTensors) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor wide = at::ones({600, 900}).t();
    EXPECT_TRUE(at::equal(all_reduced(group, wide, ReduceOp::sum), wide * 2));
    EXPECT_TRUE(at::equal(reduce_scattered(group, wide, ReduceOp::sum, 0), at::full({450, 600}, 2.0)));
    const at::Tensor bytes = at::ones({3000, 1000}, at::kByte);
    EXPECT_TRUE(at::equal(all_reduced(group, bytes, ReduceOp::sum), bytes * 2));
    EXPECT_EQ(all_reduced(group, at::zeros({0, 3}), ReduceOp::sum).sizes(), at::IntArrayRef({0, 3}));
  });
}

// A dimension of length 1 may have any stride in a contiguous tensor. The ranks must choose one collective nonetheless.
TEST(ReduceTest, StridesOfDimensionsOfLengthOneDoNotMatter) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor rows = at::ones({1, 1000}), transposed = at::ones({1000, 1}).t();
    ASSERT_TRUE(transposed.is_contiguous());
    ASSERT_NE(transposed.stride(0), rows.stride(0));
    const at::Tensor part = reduce_scattered(group, group.rank() == 0 ? rows : transposed, ReduceOp::sum, 0);
    EXPECT_TRUE(at::equal(part, at::full({group.rank() == 0 ? 1 : 0, 1000}, 2.0)));
  });
}

TEST(ReduceTest, WhatCannotBeReducedIsRefused) {
  for (const bool scatters : {false, true}) {
    for (const at::Tensor& local : {at::ones({600}, at::kLong), at::ones({600}, at::kBool)}) {
      run_local(2, [&](const ProcessGroup& group) {
        const auto reduce = [&] {
          scatters ? reduce_scattered(group, local, ReduceOp::average, 0)
                   : all_reduced(group, local, ReduceOp::average);
        };
        EXPECT_ERROR(reduce(), ErrorCode::invalid_argument, "average of", "expected a floating-point dtype");
      });
    }
  }
}

}  // namespace
}  // namespace tessera

// Ring attention gives what attention gives on the full sequence in one process.

#include "tessera/tensor/parallel/context_parallel.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

using testing::indexed;
using testing::R;
using testing::Sizes;

const std::vector<TokenOrder> kOrders = {TokenOrder::contiguous, TokenOrder::head_tail};

at::Tensor attention_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, bool is_causal,
                        double scale) {
  at::Tensor scores = at::matmul(query, key.transpose(-2, -1)) * scale;
  if (is_causal) {
    const at::Tensor later = at::ones({query.size(-2), key.size(-2)}, at::kBool).triu(1);
    scores = scores.masked_fill(later, -std::numeric_limits<double>::infinity());
  }
  return at::matmul(scores.softmax(-1), value);
}

at::Tensor wave(const Sizes& size, double phase) { return indexed(size).mul(0.7).add(phase).sin(); }

TEST(RingAttentionTest, ValuesAndGradientsAreThoseOfTheFullSequence) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_local(ranks, [&](const ProcessGroup& group) {
      for (const std::int64_t length : {8, 13, 3, 1}) {
        for (const bool is_causal : {false, true}) {
          for (const TokenOrder order : kOrders) {
            const Sizes size = {2, 3, length, 4};
            std::vector<at::Tensor> full, mine;
            for (const double phase : {0.0, 1.0, 2.0}) {
              full.push_back(wave(phase == 2 ? Sizes{2, 3, length, 5} : size, phase).requires_grad_());
              mine.push_back(context_parallel_shard(group, {full.back().detach()}, {2}, order)[0].requires_grad_());
            }
            RingAttentionOptions options;
            options.is_causal = is_causal;
            options.order = order;
            if (length == 13) options.scale = 0.9;
            const at::Tensor expected = attention_of(full[0], full[1], full[2], is_causal, options.scale.value_or(0.5));
            const CommDebugMode forward(group);
            const at::Tensor found = ring_attention(group, mine[0], mine[1], mine[2], length, options);
            EXPECT_EQ(forward.total(), ranks - 1);
            const std::string what =
                fmt::format("{} of {} ranks, {} tokens{}{}", group.rank(), ranks, length, is_causal ? ", causal" : "",
                            order == TokenOrder::head_tail ? ", head and tail" : "");
            const auto part = [&](const at::Tensor& tensor) {
              return context_parallel_shard(group, {tensor}, {-2}, order)[0];
            };
            ASSERT_TRUE(at::allclose(found, part(expected.detach()), 1e-10, 1e-12)) << what;
            const at::Tensor weights = wave(expected.sizes().vec(), 5);
            (expected * weights).sum().backward();
            (found * part(weights)).sum().backward();
            for (std::size_t i = 0; i < 3; ++i) {
              ASSERT_TRUE(at::allclose(mine[i].grad(), part(full[i].grad()), 1e-9, 1e-11)) << what << ", input " << i;
            }
          }
        }
      }
    });
  }
}

TEST(RingAttentionTest, WhatIsNoNumberStaysNone) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  run_local(2, [&](const ProcessGroup& group) {
    for (const double bad : {nan, infinity}) {
      for (const bool is_causal : {false, true}) {
        for (int which = 0; which < 3; ++which) {
          std::vector<at::Tensor> full = {wave({6, 4}, 0), wave({6, 4}, 1), wave({6, 4}, 2)};
          full[static_cast<std::size_t>(which)][2][1] = bad;
          const at::Tensor expected = attention_of(full[0], full[1], full[2], is_causal, 0.5);
          const auto mine = context_parallel_shard(group, full, {0, 0, 0}, TokenOrder::contiguous);
          RingAttentionOptions options;
          options.is_causal = is_causal;
          const at::Tensor found = ring_attention(group, mine[0], mine[1], mine[2], 6, options);
          const at::Tensor part = context_parallel_shard(group, {expected}, {0}, TokenOrder::contiguous)[0];
          EXPECT_TRUE(at::allclose(found, part, 1e-10, 1e-12, /*equal_nan=*/true)) << bad << which << found << part;
        }
      }
    }
  });
}

TEST(RingAttentionTest, LowPrecisionIsComputedInFloat32) {
  run_local(2, [](const ProcessGroup& group) {
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
      const at::Tensor full = wave({2, 16, 4}, 1).to(dtype);
      const at::Tensor expected =
          attention_of(full.to(at::kFloat), full.to(at::kFloat), full.to(at::kFloat), true, 0.5);
      const at::Tensor mine = full.narrow(1, 8 * group.rank(), 8).clone().requires_grad_();
      RingAttentionOptions options;
      options.is_causal = true;
      const at::Tensor found = ring_attention(group, mine, mine, mine, 16, options);
      EXPECT_EQ(found.scalar_type(), dtype);
      // Rounded once, from nearly the same number.
      const double tolerance = dtype == at::kFloat ? 1e-6 : dtype == at::kHalf ? 1e-3 : 8e-3;
      EXPECT_TRUE(at::allclose(found.to(at::kFloat), expected.narrow(1, 8 * group.rank(), 8), tolerance, tolerance));
      found.sum().backward();
      EXPECT_EQ(mine.grad().scalar_type(), dtype);
    }
  });
}

TEST(ContextParallelTest, TokensArePartitionedAndBalanced) {
  for (const int ranks : {1, 2, 3, 5}) {
    for (std::int64_t length = 0; length < 24; ++length) {
      for (const TokenOrder order : kOrders) {
        std::vector<int> owners(static_cast<std::size_t>(length));
        for (int r = 0; r < ranks; ++r) {
          for (const Interval& tokens : tokens_of_rank(length, ranks, r, order)) {
            ASSERT_GT(tokens.size(), 0);
            for (std::int64_t i = tokens.begin; i < tokens.end; ++i) ++owners[static_cast<std::size_t>(i)];
          }
        }
        ASSERT_THAT(owners, ::testing::Each(1)) << length << " on " << ranks;
      }
    }
  }
  EXPECT_EQ(tokens_of_rank(8, 2, 0, TokenOrder::head_tail), (std::vector<Interval>{{0, 2}, {6, 8}}));
  EXPECT_EQ(tokens_of_rank(8, 2, 1, TokenOrder::head_tail), (std::vector<Interval>{{2, 4}, {4, 6}}));
  EXPECT_EQ(tokens_of_rank(8, 2, 1, TokenOrder::contiguous), (std::vector<Interval>{{4, 8}}));
  // Causal pairs of tokens of each rank: equal from head and tail.
  const auto pairs = [](int rank, TokenOrder order) {
    std::int64_t count = 0;
    for (const Interval& tokens : tokens_of_rank(48, 4, rank, order)) {
      for (std::int64_t i = tokens.begin; i < tokens.end; ++i) count += i + 1;
    }
    return count;
  };
  EXPECT_EQ(pairs(0, TokenOrder::head_tail), pairs(3, TokenOrder::head_tail));
  EXPECT_GT(pairs(3, TokenOrder::contiguous), 5 * pairs(0, TokenOrder::contiguous));
}

TEST(ContextParallelTest, WhatIsShardedIsUnsharded) {
  for (const int ranks : {1, 2, 3}) {
    run_local(ranks, [&](const ProcessGroup& group) {
      for (const TokenOrder order : kOrders) {
        for (const std::int64_t length : {7, 12, 1}) {
          const at::Tensor ids = at::arange(2 * length).view({2, length}), x = indexed({length, 3, 2});
          const std::vector<at::Tensor> shards = context_parallel_shard(group, {ids, x}, {1, 0}, order);
          const std::vector<at::Tensor> full = context_parallel_unshard(group, shards, {-1, 0}, length, order);
          ASSERT_TRUE(at::equal(full[0], ids) && at::equal(full[1], x));
        }
      }
      // The gradient of a shard goes to its tokens.
      const at::Tensor leaf = indexed({6, 2}).requires_grad_();
      context_parallel_shard(group, {leaf}, {0}, TokenOrder::head_tail)[0].sum().backward();
      at::Tensor gradient = leaf.grad().clone();
      group.all_reduce(gradient);
      EXPECT_TRUE(at::equal(gradient, at::ones({6, 2}, at::kDouble)));
    });
  }
}

TEST(RingAttentionTest, DTensorsKeepTheirPlacements) {
  const Placement heads = Placement::shard(1);
  const Placement tokens = Placement::shard(2);
  const Placement last = Placement::shard(3);
  run_local(4, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2}, {"tp", "cp"});
    const at::Tensor full = wave({1, 3, 7, 4}, 1).requires_grad_();
    RingAttentionOptions causal;
    causal.is_causal = true;
    const at::Tensor expected = attention_of(full, full, full, true, 0.5);
    const at::Tensor weights = wave({1, 3, 7, 4}, 4);
    (expected * weights).sum().backward();
    for (const Placements& placements : {Placements{heads, tokens}, Placements{R, tokens}, Placements{tokens, heads}}) {
      const DTensor x = distribute_tensor(full.detach().clone().requires_grad_(), mesh, placements);
      const DTensor found = ring_attention(x, x, x, causal);
      EXPECT_EQ(found.placements(), placements);
      EXPECT_TRUE(at::allclose(found.full_tensor(), expected, 1e-10, 1e-12)) << to_string(placements);
      (found.to_local() * testing::part_of(weights, found.layout(), *mesh.coordinate())).sum().backward();
      EXPECT_TRUE(at::allclose(x.grad()->full_tensor(), full.grad(), 1e-9, 1e-11)) << to_string(placements);
    }
    const auto refused = [&](const Placements& placements, const RingAttentionOptions& options, const char* why) {
      const DTensor x = distribute_tensor(full.detach(), mesh, placements);
      EXPECT_ERROR(ring_attention(x, x, x, options), ErrorCode::invalid_argument, why);
    };
    refused({heads, R}, causal, "expected one mesh dimension that shards the second to last dimension");
    refused({tokens, tokens}, causal, "others that shard those before it");
    refused({last, tokens}, causal, "others that shard those before it");
    causal.order = TokenOrder::head_tail;
    refused({R, tokens}, causal, "expected tokens in contiguous order");
  });
}

TEST(RingAttentionTest, WhatDoesntFitIsRefusedByAll) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor x = wave({2, 4, 4}, 0);
    const bool is_second = group.rank() == 1;
    const auto refused = [&](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             std::int64_t length, const char* why) {
      EXPECT_ERROR(ring_attention(group, query, key, value, length), ErrorCode::invalid_argument, why);
    };
    refused(x, x, x, 9,
            "ring attention over 9 tokens: a query [2, 4, 4], a key [2, 4, 4] and a value [2, 4, 4], expected");
    refused(x, is_second ? x.narrow(0, 0, 1) : x, x, 8, "rank 1");
    refused(x, x, is_second ? x.to(at::kFloat) : x, 8, "tensors of Double on cpu and of Float on cpu");
    refused(x, x, is_second ? at::Tensor() : x, 8,
            "ring attention: the value is undefined, expected two or more dimensions of a floating-point dtype");
    refused(x, is_second ? x.to(at::kLong) : x, x, 8, "ring attention: the key is of size [2, 4, 4] of Long, expected");
    refused(x, x, is_second ? x.narrow(2, 0, 1) : x, 8,
            "rank 0 has size of a value 4 and rank 1 has size of a value 1");
    RingAttentionOptions options;
    options.is_causal = is_second;
    EXPECT_ERROR(ring_attention(group, x, x, x, 8, options), ErrorCode::invalid_argument, "is_causal");
    RingAttentionOptions scaled;
    if (is_second) scaled.scale = 2;
    EXPECT_ERROR(ring_attention(group, x, x, x, 8, scaled), ErrorCode::invalid_argument, "rank 1 has scale 2");
    EXPECT_ERROR(context_parallel_unshard(group, {x}, {1}, 9, TokenOrder::contiguous), ErrorCode::invalid_argument,
                 "context parallel: a tensor of 4 tokens, expected 5 of 9");
    EXPECT_ERROR(context_parallel_shard(group, {x}, {3}, TokenOrder::contiguous), ErrorCode::invalid_argument,
                 "dimension 3 of a tensor of 3, expected -3 to 2");
    EXPECT_ERROR(context_parallel_shard(group, {x}, {}, TokenOrder::contiguous), ErrorCode::invalid_argument,
                 "1 tensors with 0 sequence dimensions");
    const at::Tensor leaf = x.clone().requires_grad_();
    const at::Tensor y = ring_attention(group, leaf, leaf, leaf, 8);
    EXPECT_ERROR(torch::autograd::grad({y.sum()}, {leaf}, {}, true, true), ErrorCode::unsupported,
                 "second derivatives of ring attention");
    EXPECT_TRUE(ring_attention(group, x, x, x, 8).defined());  // the group stays usable
  });
}

}  // namespace
}  // namespace tessera

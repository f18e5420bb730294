// Layers with sharded weights give the results and gradients that one process computes on all ranks' inputs.

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/chaos.h"
#include "support/error_matchers.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/ops.h"

namespace tessera {
namespace {

using testing::chunk_spec;
using testing::close;
using testing::full_of;
using testing::grid_spec;
using testing::leaf;
using testing::permuted_ranks;
using testing::random;
using testing::ranks_of;
using testing::shard;
using testing::Sizes;
using testing::SpecPtr;

class LayersTest : public ::testing::TestWithParam<int> {
 protected:
  int world() const { return GetParam(); }
  std::vector<SpecPtr> specs_along(std::int64_t dim) const {
    return {chunk_spec(dim, ranks_of(world())), chunk_spec(dim - 2, permuted_ranks(world()))};
  }
};
INSTANTIATE_TEST_SUITE_P(Worlds, LayersTest, ::testing::Values(1, 2, 3, 4, 8));

// Rank r's part of all ranks' inputs, along dimension 0.
at::Tensor part_of(const at::Tensor& all, int rank, int world) {
  const std::int64_t n = all.size(0) / world;
  return all.narrow(0, rank * n, n);
}

void expect_shard_gradient(const ShardedTensor& weight, const at::Tensor& full_gradient) {
  const Shard& own = weight.local_shards()[0];
  if (own.tensor.numel() == 0) return;
  EXPECT_TRUE(close(own.tensor.grad(), box_view(full_gradient, own.metadata.box())))
      << weight.sharding_spec().to_string();
}

TEST_P(LayersTest, LinearOfEachRanksInput) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const bool with_bias : {true, false}) {
      for (const Sizes& rest : {Sizes{}, Sizes{3}}) {  // 2-D and 3-D inputs
        Sizes size = {2 * world()};
        size.insert(size.end(), rest.begin(), rest.end());
        size.push_back(7);
        const at::Tensor x = leaf(random(size, 1)), w = leaf(random({5, 7}, 2));
        const at::Tensor b = with_bias ? leaf(random({5}, 3)) : at::Tensor();
        const at::Tensor expected = at::linear(x, w, b), weights = random(expected.sizes().vec(), 4);
        (expected * weights).sum().backward();
        for (const std::int64_t dim : {0, 1}) {
          for (const SpecPtr& spec : specs_along(dim)) {
            const ShardedTensor weight = shard(w, spec, group);
            const at::Tensor own = leaf(part_of(x, group.rank(), world()));
            const at::Tensor bias = with_bias ? leaf(b) : at::Tensor();
            const ops::LinearResult result = ops::linear(own, weight, bias);
            if (dim == 0) {
              const ShardedTensor& columns = std::get<ShardedTensor>(result);
              EXPECT_TRUE(close(full_of(columns), expected.detach()));
              const SpecPtr last =
                  std::make_shared<ChunkShardingSpec>(-1, static_cast<const ChunkShardingSpec&>(*spec).placements());
              EXPECT_EQ(columns.sharding_spec(), *last);
              (columns.local_tensor() * shard(weights, last, group).local_tensor()).sum().backward();
            } else {
              const ShardedTensor rows = std::get<PartialTensor>(result).reshard(chunk_spec(0, ranks_of(world())));
              EXPECT_TRUE(close(full_of(rows), expected.detach()));
              (rows.local_tensor() * part_of(weights, group.rank(), world())).sum().backward();
            }
            EXPECT_TRUE(close(own.grad(), part_of(x.grad(), group.rank(), world())));
            expect_shard_gradient(weight, w.grad());
            if (with_bias) {
              EXPECT_TRUE(close(bias.grad(), b.grad()));
            }
          }
        }
      }
    }
  });
}

// Megatron's pair: the first weight is sharded by rows, the second by columns. Only the sum is communicated.
TEST_P(LayersTest, LinearOfAShardedInput) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor x = leaf(random({2 * world(), 6}, 1)), w1 = leaf(random({5, 6}, 2)), b1 = leaf(random({5}, 3));
    const at::Tensor w2 = leaf(random({4, 5}, 4)), b2 = leaf(random({4}, 5));
    const at::Tensor expected = at::linear(at::gelu(at::linear(x, w1, b1)), w2, b2);
    const at::Tensor weights = random(expected.sizes().vec(), 6);
    (expected * weights).sum().backward();
    for (std::size_t i = 0; i < 2; ++i) {
      const ShardedTensor first = shard(w1, specs_along(0)[i], group), second = shard(w2, specs_along(1)[i], group);
      const at::Tensor own = leaf(part_of(x, group.rank(), world())), bias1 = leaf(b1), bias2 = leaf(b2);
      const ShardedTensor hidden = ops::gelu(std::get<ShardedTensor>(ops::linear(own, first, bias1)));
      const PartialTensor summands = std::get<PartialTensor>(ops::linear(hidden, second, bias2));
      for (const std::int64_t dim : {0, 1}) {
        EXPECT_TRUE(close(full_of(summands.reshard(specs_along(dim)[i])), expected.detach()));
      }
      EXPECT_TRUE(close(summands.all_reduce().detach(), expected.detach()));
      const ShardedTensor rows = summands.reshard(chunk_spec(0, ranks_of(world())));
      (rows.local_tensor() * part_of(weights, group.rank(), world())).sum().backward();
      EXPECT_TRUE(close(own.grad(), part_of(x.grad(), group.rank(), world())));
      expect_shard_gradient(first, w1.grad());
      expect_shard_gradient(second, w2.grad());
      EXPECT_TRUE(close(bias1.grad(), b1.grad()));
      EXPECT_TRUE(close(bias2.grad(), b2.grad()));
      if (world() > 1) {
        const SpecPtr other = chunk_spec(0, ranks_of(world()));
        EXPECT_ERROR(ops::linear(shard(random({4, 5}, 1), other, group), second, bias2), ErrorCode::unsupported,
                     "sharded in its last dimension");
      }
      EXPECT_ERROR(ops::linear(shard(random({4, 4}, 1), specs_along(1)[i], group), second, bias2),
                   ErrorCode::invalid_argument, "expected 5 columns");
    }
  });
}

TEST_P(LayersTest, LinearOfOneDimension) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor x = random({world(), 7}, 1), w = random({5, 7}, 2), b = random({5}, 3);
    const at::Tensor expected = at::linear(x, w, b);
    const at::Tensor own = x[group.rank()];
    const ops::LinearResult columns = ops::linear(own, shard(w, specs_along(0)[1], group), b);
    EXPECT_TRUE(close(full_of(std::get<ShardedTensor>(columns)), expected));
    const ops::LinearResult rows = ops::linear(own, shard(w, specs_along(1)[1], group), b);
    EXPECT_TRUE(close(std::get<PartialTensor>(rows).all_reduce(), expected));
  });
}

TEST(LayerRefusalTest, Linear) {
  run_local(2, [](const ProcessGroup& group) {
    const ShardedTensor weight = ShardedTensor::ones(chunk_spec(0, {0, 1}), {4, 6}, group);
    const at::Tensor x = at::ones({2, 6}), bias = at::ones({4});
    EXPECT_ERROR(ops::linear(at::ones({2, 5}), weight, bias), ErrorCode::invalid_argument, "expected 6 columns");
    EXPECT_ERROR(ops::linear(at::ones({}), weight, bias), ErrorCode::invalid_argument, "op 'linear'");
    EXPECT_ERROR(ops::linear(x, weight, at::ones({5})), ErrorCode::invalid_argument, "bias",
                 "expected 1 dimension of 4");
    EXPECT_ERROR(ops::linear(x, weight, at::ones({4, 1})), ErrorCode::invalid_argument, "bias");
    EXPECT_ERROR(ops::linear(x, ShardedTensor::ones(chunk_spec(0, {0, 1}), {4}, group), bias),
                 ErrorCode::invalid_argument, "2 dimensions");
    // If one rank's input is invalid, both ranks throw.
    const at::Tensor wrong = group.rank() == 1 ? at::ones({2, 5}) : x;
    EXPECT_ERROR(ops::linear(wrong, weight, bias), ErrorCode::invalid_argument, "rank 1", "expected 6 columns");
    const at::Tensor longer = group.rank() == 1 ? at::ones({3, 6}) : x;
    EXPECT_ERROR(ops::linear(longer, weight, bias), ErrorCode::invalid_argument,
                 "rank 0 has arguments (Tensor [2, 6] Float", "rank 1 has arguments (Tensor [3, 6] Float");
    const at::Tensor other = group.rank() == 1 ? x.to(at::kDouble) : x;
    EXPECT_ERROR(ops::linear(other, weight, bias), ErrorCode::invalid_argument, "rank 1 has arguments", "Double");
    EXPECT_ERROR(PartialTensor(group, x).reshard(grid_spec({2, 6}, {1, 6}, {0, 1})), ErrorCode::unsupported,
                 "expected ChunkShardingSpec");
    EXPECT_ERROR(PartialTensor(group, x).reshard(chunk_spec(0, {0})), ErrorCode::unsupported,
                 "expected one on each rank");
  });
}

at::Tensor indices_below(std::int64_t rows, const Sizes& size, std::uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randint(0, rows, size, generator, at::TensorOptions().dtype(at::kLong));
}

// torch.nn.functional.embedding
at::Tensor embedding_of(const at::Tensor& input, const at::Tensor& weight, const ops::EmbeddingOptions& options) {
  if (options.max_norm) {
    const at::NoGradGuard no_grad;
    at::Tensor renormed = weight.detach();
    at::embedding_renorm_(renormed, input.contiguous(), *options.max_norm, options.norm_type);
  }
  return at::embedding(weight, input, options.padding_idx.value_or(-1));
}

TEST_P(LayersTest, Embedding) {
  const std::vector<ops::EmbeddingOptions> all_options = {
      {},
      {.padding_idx = 4},
      {.max_norm = 1.5},
      {.padding_idx = 0, .max_norm = 2.0, .norm_type = 1},
      {.max_norm = 1.0, .norm_type = std::numeric_limits<double>::infinity()}};
  run_local(world(), [&](const ProcessGroup& group) {
    for (const Sizes& rest : {Sizes{}, Sizes{2, 3}}) {
      Sizes size = {2 * world()};
      size.insert(size.end(), rest.begin(), rest.end());
      const at::Tensor input = indices_below(11, size, 1);
      const at::ScalarType index = rest.empty() ? at::kInt : at::kLong;
      for (const ops::EmbeddingOptions& options : all_options) {
        const at::Tensor initial = random({11, 5}, 2), w = leaf(initial);
        const at::Tensor expected = embedding_of(input, w, options), weights = random(expected.sizes().vec(), 3);
        (expected * weights).sum().backward();
        for (const std::int64_t dim : {0, 1}) {
          for (const SpecPtr& spec : specs_along(dim)) {
            const ShardedTensor weight = shard(leaf(initial), spec, group);
            const at::Tensor own = part_of(input, group.rank(), world()).to(index);
            const at::Tensor result = ops::embedding(own, weight, options);
            EXPECT_TRUE(close(result.detach(), part_of(expected.detach(), group.rank(), world())));
            EXPECT_TRUE(close(full_of(weight), w.detach())) << "rows with a norm above max_norm";
            (result * part_of(weights, group.rank(), world())).sum().backward();
            expect_shard_gradient(weight, w.grad());
          }
        }
      }
    }
  });
}

TEST_P(LayersTest, NormsOfAnEmbeddingInHalfPrecisionDoNotOverflow) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor initial = at::full({2, 8}, 300, at::kHalf);  // rows of norm 849
    const ShardedTensor weight = shard(initial, specs_along(1)[0], group);
    ops::embedding(at::zeros({2}, at::kLong), weight, {.max_norm = 800.0});
    const at::Tensor full = full_of(weight).to(at::kFloat);
    EXPECT_NEAR(full[0].norm().item<double>(), 800, 8);
    EXPECT_TRUE(at::equal(full[1], at::full({8}, 300.0)));
  });
}

// torch.nn.functional.embedding_bag
at::Tensor embedding_bag_of(const at::Tensor& input, const at::Tensor& weight,
                            const ops::EmbeddingBagOptions& options) {
  if (options.max_norm) {
    const at::NoGradGuard no_grad;
    at::Tensor renormed = weight.detach();
    at::embedding_renorm_(renormed, input.reshape({-1}), *options.max_norm, options.norm_type);
  }
  const at::Tensor offsets =
      input.dim() == 2 ? at::arange(input.size(0), at::kLong) * input.size(1) : options.offsets.to(at::kLong);
  const std::int64_t mode = options.mode == "sum" ? 0 : options.mode == "mean" ? 1 : 2;
  c10::optional<at::Tensor> sample_weights;
  if (options.per_sample_weights.defined()) sample_weights = options.per_sample_weights.reshape({-1});
  c10::optional<std::int64_t> padding;
  if (options.padding_idx) padding = *options.padding_idx;
  return std::get<0>(at::embedding_bag(weight, input.reshape({-1}), offsets, false, mode, false, sample_weights,
                                       options.include_last_offset, padding));
}

struct BagCase {
  at::Tensor input;  // of one rank
  ops::EmbeddingBagOptions options;
};

// Bags of every kind on each rank: empty, only padding, in one and two dimensions.
std::vector<BagCase> bag_cases(int rank) {
  std::vector<BagCase> cases;
  const auto seed = static_cast<std::uint64_t>(rank);
  for (const char* mode : {"sum", "mean", "max"}) {
    for (const std::optional<std::int64_t> padding : {std::optional<std::int64_t>(), std::optional<std::int64_t>(4)}) {
      for (const std::optional<double> max_norm : {std::optional<double>(), std::optional<double>(1.5)}) {
        ops::EmbeddingBagOptions options;
        options.mode = mode;
        options.padding_idx = padding;
        options.max_norm = max_norm;
        at::Tensor table = indices_below(11, {3, 4}, seed);
        table[1].fill_(4);
        cases.push_back({table, options});
        const at::Tensor flat = at::cat({table.view({-1}), indices_below(11, {2}, seed + 100)});
        options.offsets = at::tensor({0, 3, 3, 4 + rank % 3, 8, 14}, at::kLong);
        cases.push_back({flat, options});
        options.include_last_offset = true;
        cases.push_back({flat.to(at::kInt), options});
        if (options.mode == "sum") {
          options.per_sample_weights = random({14}, seed + 200);
          cases.push_back({flat, options});
          options = {};
          options.mode = "sum";
          options.padding_idx = padding;
          options.per_sample_weights = random({3, 4}, seed + 300);
          cases.push_back({table, options});
        }
      }
    }
  }
  return cases;
}

TEST_P(LayersTest, EmbeddingBag) {
  run_local(world(), [&](const ProcessGroup& group) {
    const std::size_t count = bag_cases(0).size();
    testing::SampleIfSanitized sample(4);
    for (std::size_t c = 0; c < count; ++c) {
      if (!sample.takes_next()) continue;
      // The reference: one process with all ranks' bags.
      const at::Tensor initial = random({11, 5}, 2), w = leaf(initial);
      at::Tensor expected, expected_weight_gradient;
      if (bag_cases(0)[c].options.max_norm) {  // all rows are renormalized before any is used
        for (int rank = 0; rank < world(); ++rank) {
          const BagCase bags = bag_cases(rank)[c];
          embedding_bag_of(bags.input, w.detach(), bags.options);
        }
      }
      const auto own_rank = group.rank();
      for (int rank = 0; rank < world(); ++rank) {
        BagCase bags = bag_cases(rank)[c];
        bags.options.max_norm = std::nullopt;
        if (bags.options.per_sample_weights.defined()) bags.options.per_sample_weights.set_requires_grad(true);
        const at::Tensor result = embedding_bag_of(bags.input, w, bags.options);
        (result * random(result.sizes().vec(), static_cast<std::uint64_t>(rank) + 10)).sum().backward();
        if (rank != own_rank) continue;
        expected = result.detach();
        if (bags.options.per_sample_weights.defined())
          expected_weight_gradient = bags.options.per_sample_weights.grad();
      }
      for (const std::int64_t dim : {0, 1}) {
        const SpecPtr spec = specs_along(dim)[c % 2];
        const ShardedTensor weight = shard(leaf(initial), spec, group);
        BagCase bags = bag_cases(own_rank)[c];
        if (bags.options.per_sample_weights.defined()) bags.options.per_sample_weights.set_requires_grad(true);
        const at::Tensor result = ops::embedding_bag(bags.input, weight, bags.options);
        EXPECT_TRUE(close(result.detach(), expected)) << describe(bags.options) << " by " << spec->to_string() << "\n"
                                                      << result << "\n"
                                                      << expected;
        EXPECT_TRUE(close(full_of(weight), w.detach()));
        (result * random(result.sizes().vec(), static_cast<std::uint64_t>(own_rank) + 10)).sum().backward();
        expect_shard_gradient(weight, w.grad());
        if (expected_weight_gradient.defined()) {
          EXPECT_TRUE(close(bags.options.per_sample_weights.grad(), expected_weight_gradient));
        }
      }
    }
  });
}

TEST(LayerRefusalTest, Embedding) {
  run_local(2, [](const ProcessGroup& group) {
    const ShardedTensor weight = ShardedTensor::ones(chunk_spec(0, {0, 1}), {4, 6}, group);
    const at::Tensor x = at::zeros({2}, at::kLong);
    const auto with = [](auto change) {
      ops::EmbeddingOptions options;
      change(options);
      return options;
    };
    EXPECT_ERROR(ops::embedding(x + 4, weight, {}), ErrorCode::invalid_argument, "index 4", "expected 0 to 3");
    EXPECT_ERROR(ops::embedding(x - 1, weight, {}), ErrorCode::invalid_argument, "index -1", "expected 0 to 3");
    EXPECT_ERROR(ops::embedding(group.rank() == 1 ? x + 4 : x, weight, {}), ErrorCode::invalid_argument, "rank 1",
                 "index 4");
    EXPECT_ERROR(ops::embedding(at::ones({2}), weight, {}), ErrorCode::invalid_argument, "int32 or int64");
    EXPECT_ERROR(ops::embedding(x, weight, with([](auto& o) { o.scale_grad_by_freq = true; })), ErrorCode::unsupported,
                 "scale_grad_by_freq");
    EXPECT_ERROR(ops::embedding(x, weight, with([](auto& o) { o.sparse = true; })), ErrorCode::unsupported, "sparse");
    EXPECT_ERROR(ops::embedding(x, weight, with([](auto& o) { o.max_norm = 0; })), ErrorCode::invalid_argument,
                 "max_norm is 0");
    EXPECT_ERROR(ops::embedding(x, weight, with([](auto& o) { o.padding_idx = 4; })), ErrorCode::invalid_argument,
                 "padding_idx is 4");
    EXPECT_ERROR(ops::embedding(x, ShardedTensor::ones(chunk_spec(0, {0, 1}), {4}, group), {}),
                 ErrorCode::invalid_argument, "2 dimensions");
    EXPECT_ERROR(ops::embedding(group.rank() == 1 ? at::zeros({3}, at::kLong) : x, weight, {}),
                 ErrorCode::invalid_argument, "rank 0 has arguments", "rank 1 has arguments");
    EXPECT_EQ(ops::embedding(at::zeros({0, 2}, at::kLong), weight, {}).sizes(), at::IntArrayRef({0, 2, 6}));
  });
}

TEST(LayerRefusalTest, EmbeddingBag) {
  run_local(2, [](const ProcessGroup& group) {
    const ShardedTensor weight = ShardedTensor::ones(chunk_spec(0, {0, 1}), {4, 6}, group);
    const at::Tensor flat = at::zeros({4}, at::kLong), table = at::zeros({2, 2}, at::kLong);
    const auto refuses = [&](const at::Tensor& input, auto change, const std::string& why) {
      ops::EmbeddingBagOptions options;
      options.offsets = input.dim() == 1 ? at::tensor({0, 2}, at::kLong) : at::Tensor();
      change(options);
      EXPECT_ERROR(ops::embedding_bag(input, weight, options), ErrorCode::invalid_argument, "op 'embedding_bag'", why);
    };
    using Options = ops::EmbeddingBagOptions;
    refuses(
        flat, [](Options& o) { o.mode = "median"; }, "mode is 'median'");
    refuses(
        flat, [](Options& o) { o.offsets = at::Tensor(); }, "without offsets, expected offsets");
    refuses(
        flat,
        [](Options& o) {
          o.offsets = at::ones({1, 1}, at::kLong);
        },
        "offsets are Tensor [1, 1]");
    refuses(
        flat,
        [](Options& o) {
          o.offsets = at::tensor({1, 2}, at::kLong);
        },
        "the first offset is 1, expected 0");
    refuses(
        flat,
        [](Options& o) {
          o.offsets = at::tensor({0, 3, 2}, at::kLong);
        },
        "descend");
    refuses(
        flat,
        [](Options& o) {
          o.offsets = at::tensor({0, 5}, at::kLong);
        },
        "an offset is 5");
    refuses(
        flat, [](Options& o) { o.include_last_offset = true; }, "last offset is 2");
    refuses(
        table, [](Options& o) { o.include_last_offset = true; }, "include_last_offset");
    refuses(
        table,
        [](Options& o) {
          o.offsets = at::tensor({0, 2}, at::kLong);
        },
        "offsets with an input of 2 dimensions");
    refuses(
        at::zeros({1, 1, 1}, at::kLong), [](Options&) {}, "1 or 2 dimensions");
    refuses(
        flat, [](Options& o) { o.per_sample_weights = at::ones({4}); }, "expected mode 'sum'");
    refuses(
        flat,
        [](Options& o) {
          o.mode = "sum";
          o.per_sample_weights = at::ones({3});
        },
        "the same size");
    refuses(
        flat, [](Options& o) { o.max_norm = -1; }, "max_norm is -1");
    refuses(
        flat + 4, [](Options&) {}, "index 4");
    const bool second = group.rank() == 1;
    refuses(
        flat,
        [&](Options& o) {
          o.offsets = second ? at::tensor({0, 2, 3}, at::kLong) : o.offsets;
        },
        "rank 1 has arguments");
  });
}

}  // namespace
}  // namespace tessera

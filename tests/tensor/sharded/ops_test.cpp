#include "tessera/tensor/ops.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/chaos.h"
#include "support/error_matchers.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

using testing::chunk_spec;
using testing::close;
using testing::full_of;
using testing::grid_spec;
using testing::on_rank;
using testing::permuted_ranks;
using testing::random;
using testing::ranks_of;
using testing::shard;
using testing::Sizes;
using testing::SpecPtr;
using testing::specs_of_every_kind;

class OpsTest : public ::testing::TestWithParam<int> {
 protected:
  int world() const { return GetParam(); }
  // Every chunk spec of a size: each dimension, with ranks in and out of order.
  std::vector<SpecPtr> chunk_specs(const Sizes& size) const {
    std::vector<SpecPtr> specs;
    for (std::size_t d = 0; d < size.size(); ++d) {
      specs.push_back(chunk_spec(static_cast<std::int64_t>(d), ranks_of(world())));
      specs.push_back(
          chunk_spec(static_cast<std::int64_t>(d) - static_cast<std::int64_t>(size.size()), permuted_ranks(world())));
    }
    return specs;
  }
};
INSTANTIATE_TEST_SUITE_P(Worlds, OpsTest, ::testing::Values(1, 2, 3, 4, 8));

TEST_P(OpsTest, ElementwiseOpsOfEverySpecAndDtype) {
  using Reference = at::Tensor (*)(const at::Tensor&);
  using Function = ShardedTensor (*)(const ShardedTensor&);
  const std::vector<std::pair<Function, Reference>> cases = {
      {ops::abs, at::abs},           {ops::ceil, at::ceil},
      {ops::cos, at::cos},           {ops::erf, at::erf},
      {ops::exp, at::exp},           {ops::expm1, at::expm1},
      {ops::floor, at::floor},       {ops::gelu, [](const at::Tensor& x) { return at::gelu(x); }},
      {ops::isfinite, at::isfinite}, {ops::isinf, at::isinf},
      {ops::isnan, at::isnan},       {ops::log, at::log},
      {ops::log1p, at::log1p},       {ops::nan_to_num, [](const at::Tensor& x) { return at::nan_to_num(x); }},
      {ops::neg, at::neg},           {ops::reciprocal, at::reciprocal},
      {ops::relu, at::relu},         {ops::round, at::round},
      {ops::rsqrt, at::rsqrt},       {ops::sigmoid, at::sigmoid},
      {ops::sign, at::sign},         {ops::silu, at::silu},
      {ops::sin, at::sin},           {ops::sqrt, at::sqrt},
      {ops::square, at::square},     {ops::tanh, at::tanh},
  };
  run_local(world(), [&](const ProcessGroup& group) {
    testing::SampleIfSanitized sample(5);
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
      at::Tensor full = random({5, 3}, 1, dtype);
      full[0][0] = std::numeric_limits<double>::quiet_NaN();
      full[4][2] = std::numeric_limits<double>::infinity();
      for (const SpecPtr& spec : specs_of_every_kind({5, 3}, world())) {
        const ShardedTensor input = shard(full, spec, group);
        for (const auto& [op, reference] : cases) {
          if (!sample.takes_next()) continue;
          const ShardedTensor result = op(input);
          const at::Tensor expected = reference(full);
          EXPECT_EQ(result.scalar_type(), expected.scalar_type()) << op_of(op).name();
          EXPECT_EQ(result.sharding_spec(), *spec);
          EXPECT_TRUE(at::allclose(full_of(result).to(at::kDouble), expected.to(at::kDouble), 1e-6, 1e-8, true))
              << op_of(op).name() << " by " << spec->to_string();
        }
      }
    }
  });
}

TEST_P(OpsTest, ElementwiseGradientsReachTheShards) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor full = random({5, 3}, 1).set_requires_grad(true);
    at::tanh(full).sum().backward();
    for (const SpecPtr& spec : specs_of_every_kind({5, 3}, world())) {
      const ShardedTensor input = shard(full, spec, group);
      const ShardedTensor result = ops::tanh(input);
      EXPECT_TRUE(result.requires_grad());
      EXPECT_FALSE(ops::isnan(input).requires_grad());
      EXPECT_FALSE(ops::detach(result).requires_grad());
      for (std::size_t i = 0; i < input.local_shards().size(); ++i) {
        const Shard& part = input.local_shards()[i];
        if (part.tensor.numel() == 0) continue;
        result.local_shards()[i].tensor.sum().backward();
        EXPECT_TRUE(close(part.tensor.grad(), box_view(full.grad(), part.metadata.box())));
      }
    }
  });
}

TEST_P(OpsTest, Dropout) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor full = at::ones({40, 30});
    const ShardedTensor input = shard(full, chunk_spec(0, ranks_of(world())), group);
    EXPECT_TRUE(at::equal(full_of(ops::dropout(input, 0.5, false)), full));
    EXPECT_TRUE(at::equal(full_of(ops::dropout(input, 0, true)), full));
    EXPECT_TRUE(at::equal(full_of(ops::dropout(input, 1, true)), at::zeros_like(full)));
    const at::Tensor half = full_of(ops::dropout(input, 0.5, true));
    EXPECT_TRUE(half.eq(0).logical_or(half.eq(2)).all().item<bool>());
    EXPECT_NEAR(half.mean().item<double>(), 1, 0.25);
  });
}

TEST_P(OpsTest, DropoutThatDropsNothingCopies) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor x = random({5, 3}, 1).set_requires_grad(true);
    for (const SpecPtr& spec : specs_of_every_kind({5, 3}, world())) {
      const ShardedTensor input = shard(x, spec, group);
      for (const auto& [p, training] : {std::pair(0.5, false), std::pair(0.0, true), std::pair(0.5, true)}) {
        EXPECT_TRUE(ops::dropout(input, p, training).requires_grad());
        const at::NoGradGuard no_grad;
        const ShardedTensor result = ops::dropout(input, p, training);
        EXPECT_FALSE(result.requires_grad());
        ops::constant_(result, 7);
        EXPECT_TRUE(at::equal(full_of(input), x));
      }
    }
  });
}

TEST_P(OpsTest, ArithmeticWithNumbersAndTensors) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor x = random({5, 3}, 1), y = random({5, 3}, 2);
    for (const SpecPtr& spec : specs_of_every_kind({5, 3}, world())) {
      const ShardedTensor a = shard(x, spec, group), b = shard(y, spec, group);
      EXPECT_TRUE(at::equal(full_of(a + b), x + y));
      EXPECT_TRUE(at::equal(full_of(a - b), x - y));
      EXPECT_TRUE(at::equal(full_of(a * b), x * y));
      EXPECT_TRUE(at::equal(full_of(a / b), x / y));
      EXPECT_TRUE(at::equal(full_of(a + 2), x + 2));
      EXPECT_TRUE(at::equal(full_of(a - 2.5), x - 2.5));
      EXPECT_TRUE(at::equal(full_of(a * 3), x * 3));
      EXPECT_TRUE(at::equal(full_of(a / 4), x / 4));
      EXPECT_TRUE(at::equal(full_of(2 + a), 2 + x));
      EXPECT_TRUE(at::equal(full_of(2.5 - a), 2.5 - x));
      EXPECT_TRUE(at::equal(full_of(3 * a), 3 * x));
      EXPECT_TRUE(close(full_of(4 / a), 4 / x));
      const at::Tensor mask = x.gt(0);
      EXPECT_TRUE(at::equal(full_of(ops::masked_fill(a, mask, -1)), x.masked_fill(mask, -1)));
      for (const Sizes& smaller : {Sizes{3}, Sizes{1, 3}, Sizes{5, 1}, Sizes{}}) {
        const at::Tensor part = random(smaller, 3).gt(0);
        EXPECT_TRUE(at::equal(full_of(ops::masked_fill(a, part, 7)), x.masked_fill(part, 7)));
      }
    }
  });
}

TEST_P(OpsTest, ArithmeticPromotesAsLibTorchDoes) {
  run_local(world(), [&](const ProcessGroup& group) {
    const SpecPtr spec = grid_spec({4, 2}, {2, 2}, {world() - 1});  // most ranks have no shard
    const at::Tensor x = at::arange(8).view({4, 2}), y = random({4, 2}, 1, at::kFloat);
    const ShardedTensor a = shard(x, spec, group), b = shard(y, spec, group);
    const std::vector<std::pair<ShardedTensor, at::Tensor>> cases = {
        {a + 1, x + 1}, {a + 1.5, x + 1.5}, {a / 2, x / 2}, {a + b, x + y}, {b * 2.5, y * 2.5}, {b + a, y + x}};
    for (const auto& [result, expected] : cases) {
      EXPECT_EQ(result.scalar_type(), expected.scalar_type());
      EXPECT_TRUE(at::equal(full_of(result), expected));
    }
  });
}

TEST(OpsRefusalTest, ArithmeticOfTensorsThatDiffer) {
  run_local(2, [](const ProcessGroup& group) {
    const ShardedTensor a = ShardedTensor::ones(chunk_spec(0, {0, 1}), {4, 2}, group);
    const ShardedTensor b = ShardedTensor::ones(chunk_spec(1, {0, 1}), {4, 2}, group);
    const ShardedTensor c = ShardedTensor::ones(chunk_spec(0, {0, 1}), {4, 1}, group);
    const ShardedTensor d = ShardedTensor::ones(chunk_spec(0, {1, 0}), {4, 2}, group);
    EXPECT_ERROR(a + b, ErrorCode::invalid_argument, "op 'add'", "equal sizes and specs", "broadcast");
    EXPECT_ERROR(a * c, ErrorCode::invalid_argument, "op 'mul'", "[4, 2]", "[4, 1]");
    EXPECT_ERROR(a - d, ErrorCode::invalid_argument, "op 'sub'");
    EXPECT_ERROR(ops::div(at::Scalar(1), at::Scalar(2)), ErrorCode::invalid_argument, "none of its arguments");
    EXPECT_ERROR(ops::masked_fill(a, at::ones({3, 2}).gt(0), 1), ErrorCode::invalid_argument, "mask");
    EXPECT_ERROR(ops::masked_fill(a, at::ones({1, 4, 2}).gt(0), 1), ErrorCode::invalid_argument, "mask");
    EXPECT_ERROR(ops::masked_fill(a, at::ones({4, 2}), 1), ErrorCode::invalid_argument, "bools");
    EXPECT_ERROR(ops::copy_(a, b, false), ErrorCode::invalid_argument, "op 'copy_'", "same shards");
  });
}

TEST(OpsRefusalTest, TensorsOfTwoGroups) {
  run_local(2, [](const ProcessGroup& group) {
    const ProcessGroup other = group.subgroup(std::vector<int>{0, 1}).value();
    const SpecPtr spec = chunk_spec(0, {0, 1});
    const ShardedTensor a = ShardedTensor::ones(spec, {4}, group), b = ShardedTensor::ones(spec, {4}, other);
    EXPECT_ERROR(a + b, ErrorCode::invalid_argument, "op 'add'", "two process groups");
    EXPECT_ERROR(ops::equal(a, b), ErrorCode::invalid_argument, "op 'equal'", "two process groups");
  });
}

TEST_P(OpsTest, EqualAndAllcloseAgreeOnAllRanks) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor x = random({5, 3}, 1);
    for (const SpecPtr& spec : specs_of_every_kind({5, 3}, world())) {
      const ShardedTensor a = shard(x, spec, group), same = shard(x, spec, group);
      EXPECT_TRUE(ops::equal(a, same));
      EXPECT_TRUE(ops::allclose(a, same, {}));
      at::Tensor y = x.clone();
      y[4][2] += 1e-7;  // on one rank only
      const ShardedTensor b = shard(y, spec, group);
      EXPECT_FALSE(ops::equal(a, b));
      EXPECT_TRUE(ops::allclose(a, b, {}));
      EXPECT_FALSE(ops::allclose(a, b, {.rtol = 0, .atol = 1e-9}));
      EXPECT_FALSE(ops::equal(a, ops::to(a, {.dtype = at::kFloat})));
      y[4][2] = std::numeric_limits<double>::quiet_NaN();
      const ShardedTensor nan = shard(y, spec, group);
      EXPECT_FALSE(ops::allclose(nan, nan, {}));
      EXPECT_TRUE(ops::allclose(nan, nan, {.equal_nan = true}));
    }
    const ShardedTensor rows = shard(x, chunk_spec(0, ranks_of(world())), group);
    EXPECT_EQ(ops::equal(rows, shard(x, grid_spec({5, 3}, {1, 1}, ranks_of(world())), group)), false);
  });
}

TEST_P(OpsTest, CopiesAndNewTensors) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor x = random({5, 3}, 1).set_requires_grad(true);
    for (const SpecPtr& spec : specs_of_every_kind({5, 3}, world())) {
      const ShardedTensor a = shard(x, spec, group);
      const ShardedTensor copy = ops::clone(a), detached = ops::detach(a);
      EXPECT_TRUE(at::equal(full_of(copy), x));
      EXPECT_TRUE(copy.requires_grad());
      EXPECT_FALSE(detached.requires_grad());
      for (std::size_t i = 0; i < a.local_shards().size(); ++i) {
        const at::Tensor& own = a.local_shards()[i].tensor;
        if (own.numel() == 0) continue;
        EXPECT_NE(copy.local_shards()[i].tensor.data_ptr(), own.data_ptr());
        EXPECT_EQ(detached.local_shards()[i].tensor.data_ptr(), own.data_ptr());
      }
      EXPECT_TRUE(at::equal(full_of(ops::zeros_like(a)), at::zeros_like(x)));
      EXPECT_TRUE(at::equal(full_of(ops::ones_like(a)), at::ones_like(x)));
      EXPECT_TRUE(at::equal(full_of(ops::full_like(a, 2.5)), at::full_like(x, 2.5)));
      EXPECT_EQ(ops::empty_like(a).size(), a.size());
      EXPECT_FALSE(ops::randn_like(a).requires_grad());
      const at::Tensor uniform = full_of(ops::rand_like(a));
      EXPECT_TRUE(uniform.ge(0).logical_and(uniform.lt(1)).all().item<bool>());
      EXPECT_EQ(uniform.scalar_type(), at::kDouble);

      const ShardedTensor target = ShardedTensor::zeros(spec, {5, 3}, group);
      EXPECT_TRUE(ops::copy_(target, detached, false).is_same(target));
      EXPECT_TRUE(at::equal(full_of(target), x.to(at::kFloat)));
      EXPECT_TRUE(ops::requires_grad_(target, true).is_same(target));
      EXPECT_TRUE(target.requires_grad());
      for (const Shard& part : target.local_shards()) EXPECT_TRUE(part.tensor.requires_grad());
      EXPECT_TRUE(ops::to(target, {}).is_same(target));
      EXPECT_EQ(ops::to(target, {.dtype = at::kDouble}).scalar_type(), at::kDouble);
      EXPECT_ERROR(ops::requires_grad_(ops::isnan(a), true), ErrorCode::invalid_argument, "floating-point");
    }
  });
}

TEST_P(OpsTest, ConversionsAndCopiesRequireGradAsTheirShardsDo) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor x = random({5, 3}, 1).set_requires_grad(true);
    for (const SpecPtr& spec : specs_of_every_kind({5, 3}, world())) {
      const ShardedTensor input = shard(x, spec, group);
      const ShardedTensor converted = [&] {
        const at::NoGradGuard no_grad;
        return input.to({.dtype = at::kFloat});
      }();
      EXPECT_FALSE(converted.requires_grad());
      EXPECT_FALSE((converted + 1).requires_grad());
      EXPECT_TRUE((input.to({.dtype = at::kFloat}) + 1).requires_grad());

      const ShardedTensor buffer = ShardedTensor::zeros(spec, {5, 3}, group);
      ops::copy_(buffer, input, false);
      EXPECT_TRUE(buffer.requires_grad());
      const ShardedTensor twice = buffer * 2;
      EXPECT_TRUE(twice.requires_grad());
      for (std::size_t i = 0; i < input.local_shards().size(); ++i) {
        const at::Tensor& part = input.local_shards()[i].tensor;
        if (part.numel() == 0) continue;
        twice.local_shards()[i].tensor.sum().backward();
        EXPECT_TRUE(at::equal(part.grad(), at::full_like(part, 2)));
      }
    }
  });
}

TEST_P(OpsTest, Initialisers) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const SpecPtr& spec : specs_of_every_kind({40, 30}, world())) {
      const ShardedTensor a = ShardedTensor::zeros(spec, {40, 30}, group, {.requires_grad = true});
      EXPECT_TRUE(ops::uniform_(a, 2, 4).is_same(a));
      at::Tensor x = full_of(a);
      EXPECT_TRUE(x.ge(2).logical_and(x.lt(4)).all().item<bool>());
      EXPECT_NEAR(x.mean().item<double>(), 3, 0.1);
      ops::normal_(a, 5, 0.5);
      x = full_of(a);
      EXPECT_NEAR(x.mean().item<double>(), 5, 0.1);
      EXPECT_NEAR(x.std().item<double>(), 0.5, 0.1);
      ops::constant_(a, 7);
      EXPECT_TRUE(at::equal(full_of(a), at::full({40, 30}, 7.0)));
      for (const Shard& part : a.local_shards()) EXPECT_TRUE(part.tensor.is_leaf());
      // The bounds of torch.nn.init on the full tensor: gain * sqrt(3 / fan).
      const std::vector<std::pair<std::string, double>> modes = {{"fan_in", 30}, {"fan_out", 40}};
      for (const auto& [mode, fan] : modes) {
        ops::kaiming_uniform_(a, 2, mode, "leaky_relu");
        const double bound = std::sqrt(2.0 / 5) * std::sqrt(3 / fan);
        EXPECT_NEAR(full_of(a).abs().max().item<double>(), bound, 0.03 * bound);
        ops::kaiming_uniform_(a, 0, mode, "relu");
        EXPECT_NEAR(full_of(a).abs().max().item<double>(), std::sqrt(6 / fan), 0.03 * std::sqrt(6 / fan));
      }
      EXPECT_ERROR(ops::kaiming_uniform_(a, 0, "fan", "relu"), ErrorCode::invalid_argument, "'fan_in' or 'fan_out'");
      EXPECT_ERROR(ops::kaiming_uniform_(a, 0, "fan_in", "rely"), ErrorCode::invalid_argument, "'rely'");
    }
    EXPECT_ERROR(
        ops::kaiming_uniform_(ShardedTensor::zeros(chunk_spec(0, ranks_of(world())), {8}, group), 0, "fan_in", "relu"),
        ErrorCode::invalid_argument, "two dimensions");
  });
}

TEST_P(OpsTest, TransposeOfEveryPairOfDimensions) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor x = random({5, 3, 4}, 1);
    for (const SpecPtr& spec : chunk_specs({5, 3, 4})) {
      const ShardedTensor a = shard(x, spec, group);
      for (std::int64_t d0 = -3; d0 < 3; ++d0) {
        for (std::int64_t d1 = 0; d1 < 3; ++d1) {
          const ShardedTensor result = ops::transpose(a, d0, d1);
          EXPECT_EQ(result.size(), x.transpose(d0, d1).sizes().vec());
          EXPECT_TRUE(at::equal(full_of(result), x.transpose(d0, d1)));
        }
      }
      EXPECT_TRUE(ops::transpose(a, 1, -2).is_same(a));
      EXPECT_ERROR(ops::transpose(a, 0, 3), ErrorCode::invalid_argument, "dimension 3", "expected -3 to 2");
    }
  });
}

TEST_P(OpsTest, ViewWhereTheCutAllowsIt) {
  run_local(world(), [&](const ProcessGroup& group) {
    const std::int64_t n = 2 * world();
    const at::Tensor x = random({3, n, 4}, 1);
    for (const std::vector<int>& ranks : {ranks_of(world()), permuted_ranks(world())}) {
      const ShardedTensor a = shard(x, chunk_spec(1, ranks), group);
      for (const Sizes& shape : {Sizes{3, 4 * n}, Sizes{3, n, 2, 2}, Sizes{3, world(), -1}, Sizes{-1, n, 4}}) {
        const ShardedTensor result = ops::view(a, shape);
        EXPECT_TRUE(at::equal(full_of(result), x.view(shape)));
      }
      EXPECT_TRUE(ops::view(a, {3, n, -1}).is_same(a));
      // 1-D to 4-D and back, sharded in the first dimension.
      const ShardedTensor flat = shard(x.view({-1}).contiguous(), chunk_spec(-1, ranks), group);
      const ShardedTensor deep = ops::view(flat, {n, 3, 2, 2});
      EXPECT_TRUE(at::equal(full_of(deep), x.view({n, 3, 2, 2})));
      EXPECT_TRUE(at::equal(full_of(ops::view(deep, {-1})), x.view({-1})));
      EXPECT_ERROR(ops::view(a, {-1, -1}), ErrorCode::invalid_argument, "only one size");
      EXPECT_ERROR(ops::view(a, {5, n}), ErrorCode::invalid_argument, "elements");
      EXPECT_ERROR(ops::view(a, {5, -1}), ErrorCode::invalid_argument,
                   "no size for -1: the product of the others is 5, expected more than 0 and a divisor of ");
      EXPECT_ERROR(ops::view(a, {-2, n}), ErrorCode::invalid_argument, "negative");
      if (world() > 1) {
        EXPECT_ERROR(ops::view(a, {12, n}), ErrorCode::unsupported, "equal parts of the same elements");
        EXPECT_ERROR(ops::view(a, {12 * n}), ErrorCode::unsupported, "equal parts");
      }
    }
  });
}

TEST_P(OpsTest, ChunkAlongDimensionsThatAreWhole) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor x = random({5, 3, 4}, 1);
    for (const SpecPtr& spec : chunk_specs({5, 3, 4})) {
      const ShardedTensor a = shard(x, spec, group);
      const auto dim = static_cast<const ChunkShardingSpec&>(*spec).dim();
      for (std::int64_t d = 0; d < 3; ++d) {
        for (const std::int64_t count : {1, 2, 3, 7}) {
          if (d == (dim + 3) % 3) {
            EXPECT_ERROR(ops::chunk(a, count, d), ErrorCode::unsupported, "is sharded, expected another one");
            continue;
          }
          const std::vector<at::Tensor> expected = x.chunk(count, d);
          const std::vector<ShardedTensor> parts = ops::chunk(a, count, d);
          ASSERT_EQ(parts.size(), expected.size());
          for (std::size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(at::equal(full_of(parts[i]), expected[i]));
        }
      }
      EXPECT_ERROR(ops::chunk(a, 0, 0), ErrorCode::invalid_argument, "at least 1");
    }
  });
}

TEST_P(OpsTest, SoftmaxAlongEveryDimension) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (std::int64_t dim = -2; dim < 2; ++dim) {
      const at::Tensor x = (random({5, 3}, 1) * 500).set_requires_grad(true);  // exp overflows
      const at::Tensor weights = random({5, 3}, 2), expected = at::softmax(x, dim);
      (expected * weights).sum().backward();
      for (const SpecPtr& spec : chunk_specs({5, 3})) {
        const ShardedTensor a = shard(x, spec, group);
        const ShardedTensor result = ops::softmax(a, dim);
        EXPECT_TRUE(close(full_of(result), expected.detach()));
        (result.local_tensor() * shard(weights, spec, group).local_tensor()).sum().backward();
        const Shard& own = a.local_shards()[0];
        if (own.tensor.numel() == 0) continue;
        EXPECT_TRUE(close(own.tensor.grad(), box_view(x.grad(), own.metadata.box())));
      }
    }
  });
}

TEST_P(OpsTest, LayerNormOverEveryShape) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const Sizes& shape : {Sizes{4}, Sizes{3, 4}, Sizes{5, 3, 4}}) {
      for (const bool affine : {true, false}) {
        const at::Tensor x = random({5, 3, 4}, 1).set_requires_grad(true), weights = random({5, 3, 4}, 2);
        ops::LayerNormOptions full, own;
        if (affine) {
          full = {random(shape, 3).set_requires_grad(true), random(shape, 4).set_requires_grad(true), 1e-3};
          own = {random(shape, 3).set_requires_grad(true), random(shape, 4).set_requires_grad(true), 1e-3};
        }
        const at::Tensor expected = at::layer_norm(x, shape, full.weight, full.bias, full.eps);
        (expected * weights).sum().backward();
        for (const SpecPtr& spec : chunk_specs({5, 3, 4})) {
          if (affine) {
            own.weight.mutable_grad() = at::Tensor();
            own.bias.mutable_grad() = at::Tensor();
          }
          const ShardedTensor a = shard(x, spec, group);
          const ShardedTensor result = ops::layer_norm(a, shape, own);
          EXPECT_TRUE(close(full_of(result), expected.detach()));
          (result.local_tensor() * shard(weights, spec, group).local_tensor()).sum().backward();
          const Shard& part = a.local_shards()[0];
          if (part.tensor.numel() != 0) {
            EXPECT_TRUE(close(part.tensor.grad(), box_view(x.grad(), part.metadata.box())));
          }
          if (affine) {
            EXPECT_TRUE(close(own.weight.grad(), full.weight.grad())) << spec->to_string();
            EXPECT_TRUE(close(own.bias.grad(), full.bias.grad()));
          }
          EXPECT_ERROR(ops::layer_norm(a, {3}, own), ErrorCode::invalid_argument, "last dimensions");
          EXPECT_ERROR(ops::layer_norm(a, {}, own), ErrorCode::invalid_argument, "last dimensions");
          EXPECT_ERROR(ops::layer_norm(a, shape, {at::ones({9}), {}}), ErrorCode::invalid_argument, "a parameter");
        }
      }
    }
  });
}

TEST_P(OpsTest, NormalizingInHalfPrecisionNeitherOverflowsNorRoundsSums) {
  run_local(world(), [&](const ProcessGroup& group) {
    const SpecPtr columns = chunk_spec(1, ranks_of(world()));
    const auto expect_close = [](const ShardedTensor& result, const at::Tensor& expected) {
      EXPECT_EQ(result.scalar_type(), at::kHalf);
      EXPECT_TRUE(at::allclose(full_of(result).to(at::kFloat), expected, 1e-2, 0));
    };
    const at::Tensor equal = at::zeros({1, 131072}, at::kHalf);
    expect_close(ops::softmax(shard(equal, columns, group), 1), at::softmax(equal.to(at::kFloat), 1));
    at::Tensor large = at::zeros({2, 64}, at::kHalf);
    large.select(1, 0).fill_(300);
    large.select(1, 63).fill_(-299);
    const at::Tensor weight = at::full({64}, 2, at::kHalf), bias = at::full({64}, 1, at::kHalf);
    expect_close(ops::layer_norm(shard(large, columns, group), {64}, {weight, bias}),
                 at::layer_norm(large.to(at::kFloat), {64}, weight.to(at::kFloat), bias.to(at::kFloat)));
  });
}

TEST_P(OpsTest, BmmOfBatchesThatAreCutAlike) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor x = random({5, 2, 3}, 1), y = random({5, 3, 4}, 2);
    for (const std::vector<int>& ranks : {ranks_of(world()), permuted_ranks(world())}) {
      const ShardedTensor a = shard(x, chunk_spec(0, ranks), group), b = shard(y, chunk_spec(-3, ranks), group);
      EXPECT_TRUE(close(full_of(ops::bmm(a, b)), at::bmm(x, y)));
      EXPECT_ERROR(ops::bmm(a, a), ErrorCode::invalid_argument, "[n, i, j] and [n, j, k]");
      EXPECT_ERROR(ops::bmm(shard(x, chunk_spec(1, ranks), group), b), ErrorCode::unsupported,
                   "sharded in dimension 0");
    }
  });
}

// ---- Which implementation runs ----

class HalvesSpec final : public ShardingSpec {
 public:
  std::string_view kind() const override { return "HalvesSpec"; }
  ShardedTensorMetadata build_metadata(std::span<const std::int64_t> size,
                                       const TensorProperties& properties) const override {
    return ChunkShardingSpec(0, {on_rank(0), on_rank(1)}).build_metadata(size, properties);
  }
  bool equals(const ShardingSpec& other) const override { return other.kind() == kind(); }
  std::string to_string() const override { return "HalvesSpec()"; }
};

TEST(OpDispatchTest, TheUsersBeforeTheSpecsBeforeTheBuiltIn) {
  const Op<std::string(const ShardedTensor&, std::int64_t)> op("probe");
  const Op<std::string(const ShardedTensor&)> built_in("probe", [](const ShardedTensor&) { return "built in"; });
  const ShardedTensor chunks = ShardedTensor::ones(chunk_spec(0, {0}), {4});
  const ShardedTensor grid = ShardedTensor::ones(grid_spec({4}, {2}, {0}), {4});

  EXPECT_ERROR(op(chunks, 3), ErrorCode::unsupported, "op 'probe' with arguments (ShardedTensor [4] float32 by", ", 3)",
               "not supported for ChunkShardingSpec");
  op.register_for(ChunkShardingSpec::kKind, [](const ShardedTensor&, std::int64_t) { return "spec"; });
  EXPECT_EQ(op(chunks, 3), "spec");
  EXPECT_ERROR(op(grid, 3), ErrorCode::unsupported, "not supported for EnumerableShardingSpec");
  op.register_custom([](const ShardedTensor&, std::int64_t n) { return std::to_string(n); });
  EXPECT_EQ(op(chunks, 3), "3");
  EXPECT_EQ(op(grid, 4), "4");
  op.register_custom(nullptr);
  EXPECT_EQ(op(chunks, 3), "spec");

  EXPECT_EQ(built_in(grid), "built in");
  built_in.register_for(EnumerableShardingSpec::kKind, [](const ShardedTensor&) { return "spec"; });
  EXPECT_EQ(built_in(grid), "spec");
  EXPECT_EQ(built_in(chunks), "built in");
  built_in.register_for(EnumerableShardingSpec::kKind, nullptr);
  EXPECT_EQ(built_in(grid), "built in");
}

TEST(OpDispatchTest, AUsersOwnSpecGetsItsOwnOps) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor x = random({4, 2}, 1);
    const ShardedTensor a = shard(x, std::make_shared<HalvesSpec>(), group);
    EXPECT_TRUE(at::equal(full_of(ops::relu(a)), at::relu(x)));
    EXPECT_ERROR(ops::softmax(a, 0), ErrorCode::unsupported, "op 'softmax' with arguments (", "by HalvesSpec(), 0)",
                 "not supported for HalvesSpec");
    group.barrier();
    if (group.rank() == 0) {
      op_of(ops::softmax).register_for("HalvesSpec", [](const ShardedTensor& input, std::int64_t) { return input; });
    }
    group.barrier();
    EXPECT_TRUE(ops::softmax(a, 0).is_same(a));
    group.barrier();
    if (group.rank() == 0) op_of(ops::softmax).register_for("HalvesSpec", nullptr);
  });
}

TEST(OpsRefusalTest, EveryChunkOpRefusesOtherSpecs) {
  run_local(2, [](const ProcessGroup& group) {
    const ShardedTensor grid = ShardedTensor::ones(grid_spec({4, 4}, {2, 2}, {0, 1}), {4, 4}, group);
    const ShardedTensor on_one = ShardedTensor::ones(chunk_spec(0, {1}), {4, 4}, group);
    const ShardedTensor twice = ShardedTensor::ones(chunk_spec(0, {0, 1, 0, 1}), {4, 4}, group);
    const at::Tensor indices = at::zeros({2}, at::kLong);
    for (const ShardedTensor& a : {grid, on_one, twice}) {
      const std::string why =
          a.is_same(grid) ? "not supported for EnumerableShardingSpec" : "expected one on each rank";
      EXPECT_ERROR(ops::transpose(a, 0, 1), ErrorCode::unsupported, "op 'transpose'", why);
      EXPECT_ERROR(ops::view(a, {16}), ErrorCode::unsupported, "op 'view'", why);
      EXPECT_ERROR(ops::chunk(a, 2, 1), ErrorCode::unsupported, "op 'chunk'", why);
      EXPECT_ERROR(ops::softmax(a, 1), ErrorCode::unsupported, "op 'softmax'", why);
      EXPECT_ERROR(ops::layer_norm(a, {4}, {}), ErrorCode::unsupported, "op 'layer_norm'", why);
      EXPECT_ERROR(ops::bmm(a, a), ErrorCode::unsupported, "op 'bmm'", why);
      EXPECT_ERROR(ops::linear(at::ones({2, 4}), a, at::ones({4})), ErrorCode::unsupported, "op 'linear'", why);
      EXPECT_ERROR(ops::embedding(indices, a, {}), ErrorCode::unsupported, "op 'embedding'", why);
      EXPECT_ERROR(ops::embedding_bag(indices, a, {}), ErrorCode::unsupported, "op 'embedding_bag'", why);
    }
  });
}

}  // namespace
}  // namespace tessera

// Training of a sharded model compared with one process that sees the batches of all ranks.

#include "tessera/fsdp/fully_sharded_data_parallel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "fsdp/cases.h"
#include "fsdp/small_model.h"
#include "support/chaos.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {
namespace {

enum class Kind : std::uint8_t { sgd, adamw };

std::unique_ptr<torch::optim::Optimizer> make_optimizer(Kind kind, const std::vector<at::Tensor>& params) {
  if (kind == Kind::sgd) {
    return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  return std::make_unique<torch::optim::AdamW>(params, torch::optim::AdamWOptions(0.02));
}

void expect_same(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected, double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].sizes(), expected[i].sizes()) << i;
    EXPECT_TRUE(at::allclose(found[i], expected[i], tolerance, tolerance))
        << "parameter " << i << " is off by " << (found[i] - expected[i]).abs().max().item<double>();
  }
}

class TrainingTest : public ::testing::TestWithParam<Case> {
 protected:
  int world() const { return std::get<0>(GetParam()); }
  Options options() const {
    Options options;
    options.use_orig_params = std::get<1>(GetParam());
    options.strategy = std::get<2>(GetParam());
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(Worlds, TrainingTest, every_case(), name_of_case);

// The losses and gradients of a first step are added in the same order and so equal bit for bit.
TEST_P(TrainingTest, TheFirstGradientIsThatOfOneProcess) {
  SmallModel alone = make_model();
  const std::vector<double> losses = backward_of_all(alone, {0}, world());
  run_local(world(), [&](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group, options());
    const at::Tensor loss = loss_of(model(batch_of(0, group.rank())));
    EXPECT_EQ(loss.item<double>(), losses[static_cast<std::size_t>(group.rank())]);
    loss.backward();
    std::size_t i = 0;
    SummonOptions with_grads;
    with_grads.with_grads = true;
    model.summon_full_params(
        [&] {
          for (const auto& param : alone->named_parameters()) {
            const at::Tensor found = model->named_parameters()[i++].value().grad();
            const at::Tensor expected = param.value().grad();
            ASSERT_EQ(found.defined(), expected.defined()) << param.key();
            if (!expected.defined()) continue;
            if (world() == 3 || options().strategy == ShardingStrategy::no_shard) {
              EXPECT_TRUE(at::allclose(found, expected, 1e-12, 1e-14)) << param.key();
            } else {
              EXPECT_TRUE(at::equal(found, expected)) << param.key();
            }
          }
        },
        with_grads);
  });
}

TEST_P(TrainingTest, TrainsAsOneProcessDoes) {
  constexpr int kSteps = 6 / static_cast<int>(::tessera::testing::stride_if_sanitized(2));
  ::tessera::testing::SampleIfSanitized sample(5);
  for (const Kind kind : {Kind::sgd, Kind::adamw}) {
    SmallModel alone = make_model();
    const auto alone_optimizer = make_optimizer(kind, unique_params(*alone));
    std::vector<std::vector<double>> losses;
    for (int step = 0; step < kSteps; ++step) {
      losses.push_back(backward_of_all(alone, {step}, world()));
      alone_optimizer->step();
    }
    for (const BackwardPrefetch prefetch : {BackwardPrefetch::none, BackwardPrefetch::pre, BackwardPrefetch::post}) {
      if (!sample.takes_next()) continue;
      run_local(world(), [&](const ProcessGroup& group) {
        Options how = options();
        how.backward_prefetch = prefetch;
        how.forward_prefetch = prefetch != BackwardPrefetch::none;
        how.max_prefetched_units = prefetch == BackwardPrefetch::post ? 2 : 1;
        FullyShardedDataParallel<SmallModel> model(make_model(), group, how);
        const auto optimizer = make_optimizer(kind, model.parameters());
        for (int step = 0; step < kSteps; ++step) {
          optimizer->zero_grad();
          const at::Tensor loss = loss_of(model(batch_of(step, group.rank())));
          EXPECT_NEAR(loss.item<double>(),
                      losses[static_cast<std::size_t>(step)][static_cast<std::size_t>(group.rank())], 1e-12);
          loss.backward();
          optimizer->step();
        }
        expect_same(full_params(model), alone->parameters(), 1e-11);
      });
    }
  }
}

TEST_P(TrainingTest, GradientsAddUpWithAndWithoutCommunication) {
  SmallModel alone = make_model();
  backward_of_all(alone, {0, 1, 2}, world());
  for (const bool syncs_each : {false, true}) {
    run_local(world(), [&](const ProcessGroup& group) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group, options());
      for (int step = 0; step < 3; ++step) {
        const auto no_sync = model.no_sync(/*off=*/syncs_each || step == 2);
        loss_of(model(batch_of(step, group.rank()))).backward();
      }
      SummonOptions with_grads;
      with_grads.with_grads = true;
      model.summon_full_params(
          [&] {
            std::vector<at::Tensor> found, expected;
            for (const at::Tensor& param : model->parameters()) {
              if (param.grad().defined()) found.push_back(param.grad());
            }
            for (const at::Tensor& param : alone->parameters()) {
              if (param.grad().defined()) expected.push_back(param.grad());
            }
            expect_same(found, expected, 1e-12);
          },
          with_grads);
    });
  }
}

TEST_P(TrainingTest, LowPrecisionTrainsNearly) {
  SmallModel alone = make_model(at::kFloat);
  const auto alone_optimizer = make_optimizer(Kind::sgd, unique_params(*alone));
  for (int step = 0; step < 4; ++step) {
    backward_of_all(alone, {step}, world());
    alone_optimizer->step();
  }
  run_local(world(), [&](const ProcessGroup& group) {
    Options how = options();
    how.mixed_precision.param_dtype = at::kBFloat16;
    how.mixed_precision.reduce_dtype = at::kFloat;
    FullyShardedDataParallel<SmallModel> model(make_model(at::kFloat), group, how);
    const auto optimizer = make_optimizer(Kind::sgd, model.parameters());
    for (int step = 0; step < 4; ++step) {
      model.zero_grad();
      const at::Tensor result = model(batch_of(step, group.rank(), at::kFloat));
      EXPECT_EQ(result.scalar_type(), at::kBFloat16);
      loss_of(result.to(at::kFloat)).backward();
      optimizer->step();
    }
    for (const at::Tensor& param : model.parameters()) EXPECT_EQ(param.scalar_type(), at::kFloat);
    expect_same(full_params(model), alone->parameters(), 0.03);
  });
}

}  // namespace
}  // namespace tessera::fsdp

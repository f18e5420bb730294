// Dtypes of parameters, buffers, inputs and gradients of sharded models.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/sgd.h>

#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/meta_init.h"
#include "tessera/fsdp/sharded_grad_scaler.h"

namespace tessera::fsdp {
namespace {

Options in_bfloat16() {
  Options options;
  options.mixed_precision.param_dtype = at::kBFloat16;
  return options;
}

TEST(FsdpPrecisionTest, GradientsInLowPrecisionAreClippedInIt) {
  run_local(2, [](const ProcessGroup& group) {
    for (const bool use_orig_params : {true, false}) {
      Options options = in_bfloat16();
      options.use_orig_params = use_orig_params;
      const auto backward = [&](bool keeps_low) {
        options.mixed_precision.keep_low_precision_grads = keeps_low;
        auto model = std::make_unique<FullyShardedDataParallel<SmallModel>>(make_model(at::kFloat), group, options);
        loss_of((*model)(batch_of(0, group.rank(), at::kFloat))).backward();
        return model;
      };
      const auto low = backward(true), full = backward(false);
      const double norm = full->clip_grad_norm_(1e-3).item<double>();
      EXPECT_NEAR(low->clip_grad_norm_(1e-3).item<double>(), norm, 1e-2 * norm);
      const std::vector<at::Tensor> found = low->parameters(), expected = full->parameters();
      for (std::size_t i = 0; i < found.size(); ++i) {
        ASSERT_EQ(found[i].grad().defined(), expected[i].grad().defined());
        if (!found[i].grad().defined()) continue;
        EXPECT_EQ(found[i].grad().scalar_type(), at::kBFloat16);
        EXPECT_TRUE(at::allclose(found[i].grad().to(at::kFloat), expected[i].grad(), 2e-2, 1e-6));
      }
    }
  });
}

TEST(FsdpPrecisionTest, InEvalBuffersMayBeInFullPrecision) {
  ASSERT_EQ(::setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1", 1), 0);
  run_local(2, [](const ProcessGroup& group) {
    Options options = in_bfloat16();
    options.mixed_precision.buffer_dtype = at::kBFloat16;
    FullyShardedDataParallel<SmallModel> model(make_model(at::kFloat), group, options);
    for (const bool trains : {true, false, true}) {
      model.train(trains);
      model(batch_of(0, 0, at::kFloat));
      EXPECT_EQ(model->count.scalar_type(), trains ? at::kBFloat16 : at::kFloat);
    }
  });
  ::unsetenv("FSDP_USE_FULL_PREC_IN_EVAL");
}

TEST(FsdpPrecisionTest, InputsThatAreCastGetGradientsInTheirOwnDtype) {
  run_local(2, [](const ProcessGroup& group) {
    for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
      Options options = in_bfloat16();
      options.strategy = strategy;
      FullyShardedDataParallel<SmallModel> model(make_model(at::kFloat), group, options);
      const at::Tensor input = batch_of(0, group.rank(), at::kFloat).requires_grad_();
      loss_of(model(input)).backward();
      ASSERT_TRUE(input.grad().defined());
      EXPECT_EQ(input.grad().scalar_type(), at::kFloat);
      SmallModel alone = make_model(at::kFloat);
      const at::Tensor expected = batch_of(0, group.rank(), at::kFloat).requires_grad_();
      loss_of(alone->forward(expected)).backward();
      EXPECT_TRUE(at::allclose(input.grad(), expected.grad(), 5e-2, 5e-3));
    }
  });
}

TEST(FsdpPrecisionTest, AModelOnMetaIsInitializedInFullPrecision) {
  run_local(2, [](const ProcessGroup& group) {
    SmallModel plain = [] {
      const MetaInit without_memory;
      return SmallModel();
    }();
    Options options = in_bfloat16();
    options.param_init_fn = [](torch::nn::Module& module) {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& param : module.parameters(/*recurse=*/false)) {
        EXPECT_EQ(param.scalar_type(), at::kFloat);
        param.detach().fill_(0.1);
      }
      for (const at::Tensor& buffer : module.buffers(/*recurse=*/false)) buffer.zero_();
    };
    FullyShardedDataParallel<SmallModel> model(plain, group, options);
    EXPECT_EQ(model(batch_of(0, group.rank(), at::kFloat)).scalar_type(), at::kBFloat16);
    for (const at::Tensor& param : full_params(model)) {
      EXPECT_EQ(param.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(param, at::full_like(param, 0.1)));
    }
  });
}

// A model that is stored in half precision, without mixed precision.
TEST(FsdpPrecisionTest, AModelInBFloat16Trains) {
  run_local(2, [](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<SmallModel> model(make_model(at::kBFloat16), group, way);
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      std::vector<double> losses;
      for (int step = 0; step < 10; ++step) {
        model.zero_grad();
        const at::Tensor loss = loss_of(model(batch_of(0, group.rank(), at::kBFloat16)));
        losses.push_back(loss.item<double>());
        loss.backward();
        for (const at::Tensor& param : model.parameters()) {
          EXPECT_EQ(param.scalar_type(), at::kBFloat16);
          EXPECT_EQ(param.grad().defined() ? param.grad().scalar_type() : at::kBFloat16, at::kBFloat16);
        }
        optimizer.step();
      }
      EXPECT_LT(losses.back(), losses.front());
      const StateDict state = model.state_dict(StateDictType::full, {.rank0_only = false});
      EXPECT_EQ(state.at("inner.weight").get<at::Tensor>().scalar_type(), at::kBFloat16);
      model.load_state_dict(state);
    }
  });
}

TEST(FsdpPrecisionTest, OtherClassesKeepTheirPrecision) {
  run_local(2, [](const ProcessGroup& group) {
    Options options = in_bfloat16();
    options.mixed_precision.cast_forward_inputs = true;
    options.keeps_full_precision = [](const torch::nn::Module& module) {
      return module.as<torch::nn::LayerNormImpl>() != nullptr;
    };
    torch::nn::Sequential plain{Wrap<torch::nn::Linear>(4, 4),
                                Wrap<torch::nn::LayerNorm>(torch::nn::LayerNormOptions({4}))};
    FullyShardedDataParallel<torch::nn::Sequential> model(plain, group, options);
    ASSERT_EQ(model.unit_count(), 2u);
    EXPECT_EQ(model.handle(0).options().mixed_precision.param_dtype, at::kBFloat16);
    EXPECT_EQ(model.handle(1).options().mixed_precision.param_dtype, std::nullopt);
  });
}

// Trains, averages the parameters into a copy, and evaluates the copy, in turn.
TEST(FsdpPrecisionTest, ACopyIsUpdatedFromFullParametersAndEvaluated) {
  run_local(2, [](const ProcessGroup& group) {
    for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op}) {
      Options options = in_bfloat16();
      options.strategy = strategy;
      FullyShardedDataParallel<SmallModel> model(make_model(at::kFloat), group, options),
          average(make_model(at::kFloat), group, options);
      SmallModel expected = make_model(at::kFloat);
      torch::optim::SGD optimizer(model.parameters(), 0.5);
      for (int step = 0; step < 3; ++step) {
        model.zero_grad();
        loss_of(model(batch_of(step, group.rank(), at::kFloat))).backward();
        optimizer.step();
        const std::vector<at::Tensor> now = full_params(model);
        const auto update = [&](const torch::nn::Module& module) {
          const at::NoGradGuard no_grad;
          const std::vector<at::Tensor> params = module.parameters();
          for (std::size_t i = 0; i < now.size(); ++i) params[i].detach().mul_(0.9).add_(now[i], 0.1);
        };
        average.summon_full_params([&] { update(*average.module()); });
        update(*expected);
        const at::NoGradGuard no_grad;
        average.eval();
        const at::Tensor batch = batch_of(step, 0, at::kFloat);
        EXPECT_TRUE(at::allclose(average(batch).to(at::kFloat), expected->forward(batch), 5e-2, 5e-2));
      }
      const std::vector<at::Tensor> found = full_params(average), params = expected->parameters();
      for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], params[i])) << i;
    }
  });
}

void expect_scaled_training(at::ScalarType param_dtype) {
  run_local(2, [&](const ProcessGroup& group) {
    for (Options way : kWays) {
      way.mixed_precision.param_dtype = param_dtype;
      FullyShardedDataParallel<SmallModel> scaled(make_model(at::kFloat), group, way),
          plain(make_model(at::kFloat), group, way);
      torch::optim::SGD of_scaled(scaled.parameters(), 0.1), of_plain(plain.parameters(), 0.1);
      ShardedGradScaler scaler(group);
      for (int step = 0; step < 3; ++step) {
        scaled.zero_grad();
        plain.zero_grad();
        scaler.scale(loss_of(scaled(batch_of(step, group.rank(), at::kFloat)))).backward();
        loss_of(plain(batch_of(step, group.rank(), at::kFloat))).backward();
        EXPECT_TRUE(scaler.step(of_scaled));
        of_plain.step();
        scaler.update();
      }
      const std::vector<at::Tensor> found = full_params(scaled), expected = full_params(plain);
      for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-4, 1e-6));

      const double factor = group.rank() == 1 ? std::numeric_limits<double>::infinity() : 1;
      scaler.scale(loss_of(scaled(batch_of(0, group.rank(), at::kFloat))) * factor).backward();
      EXPECT_FALSE(scaler.step(of_scaled));
      scaler.update();
      const std::vector<at::Tensor> after = full_params(scaled);
      for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(after[i], found[i]));
    }
  });
}

TEST(FsdpPrecisionTest, AScaledLossTrainsAsOneThatIsNotAndNoRankStepsAfterAnOverflow) {
  for (const at::ScalarType param_dtype : {at::kFloat, at::kBFloat16}) expect_scaled_training(param_dtype);
}

TEST(FsdpPrecisionTest, AfterAStepEvaluationAndNoGradGiveTheSame) {
  run_local(2, [](const ProcessGroup& group) {
    for (Options way : kWays) {
      way.mixed_precision = in_bfloat16().mixed_precision;
      FullyShardedDataParallel<SmallModel> model(make_model(at::kFloat), group, way);
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      loss_of(model(batch_of(0, group.rank(), at::kFloat))).backward();
      optimizer.step();
      model.eval();
      const at::Tensor evaluated = model(batch_of(1, 0, at::kFloat)).detach();
      const at::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(model(batch_of(1, 0, at::kFloat)), evaluated));
      EXPECT_EQ(evaluated.scalar_type(), at::kBFloat16);
    }
  });
}

// A gradient is reduced in low precision in training, and in its own in an evaluation in full precision.
TEST(FsdpPrecisionTest, InEvalGradientsMayBeReducedInFullPrecision) {
  ASSERT_EQ(::setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1", 1), 0);
  SmallModel alone = make_model(at::kFloat);
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const std::optional<at::ScalarType> param_dtype : {std::optional(at::kBFloat16), {}}) {
      for (Options way : kWays) {
        way.mixed_precision.param_dtype = param_dtype;
        way.mixed_precision.reduce_dtype = at::kBFloat16;
        FullyShardedDataParallel<SmallModel> model(make_model(at::kFloat), group, way);
        for (const auto& [trains, is_called_between] :
             {std::pair(true, false), {false, false}, {true, true}, {false, true}}) {
          model.train(trains);
          model.zero_grad();
          const at::Tensor loss = loss_of(model(batch_of(0, group.rank(), at::kFloat)));
          if (is_called_between) {  // in the other precision
            const at::NoGradGuard no_grad;
            model.train(!trains);
            model(batch_of(1, group.rank(), at::kFloat));
          }
          loss.backward();
          const std::vector<at::Tensor> found = unsharded_grads(model), expected = unique_params(*alone);
          bool is_exact = true;
          for (std::size_t i = 0; i < found.size(); ++i) {
            if (!found[i].defined()) continue;
            is_exact = is_exact && at::allclose(found[i], expected[i].grad(), 1e-5, 1e-6);
          }
          EXPECT_EQ(is_exact, !trains);
        }
      }
    }
  });
  ::unsetenv("FSDP_USE_FULL_PREC_IN_EVAL");
}

TEST(FsdpPrecisionTest, ABackwardOfCallsInBothPrecisionsIsRefused) {
  ASSERT_EQ(::setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1", 1), 0);
  run_local(2, [](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(at::kFloat), group, in_bfloat16());
    const auto loss = [&](bool trains) {
      model.train(trains);
      return loss_of(model(batch_of(0, group.rank(), at::kFloat)).to(at::kFloat));
    };
    const at::Tensor trained = loss(true), evaluated = loss(false);
    EXPECT_ERROR((trained + evaluated).backward(), ErrorCode::unsupported,
                 "it contains calls in training and in evaluation", "expected a backward for each");
    loss(true).backward();
    EXPECT_TRUE(model->head->weight.grad().defined());
  });
  ::unsetenv("FSDP_USE_FULL_PREC_IN_EVAL");
}

TEST(FsdpPrecisionTest, WithoutCommunicationGradientsHaveTheDtypeOfComputation) {
  run_local(2, [](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(at::kFloat), group, in_bfloat16());
    const auto dtype_after_backward = [&](bool syncs) {
      const auto no_sync = model.no_sync(/*off=*/syncs);
      loss_of(model(batch_of(0, group.rank(), at::kFloat))).backward();
      return model->head->weight.grad().scalar_type();
    };
    for (const bool syncs : {false, false, true}) {
      EXPECT_EQ(dtype_after_backward(syncs), syncs ? at::kFloat : at::kBFloat16);
    }
  });
}

// A module that keeps its dtype because the model does not shard it.
struct PartlyIgnoredImpl : torch::nn::Module {
  PartlyIgnoredImpl() {
    in = register_module("in", Wrap<torch::nn::Linear>(4, 4));
    ignored = register_module("ignored", torch::nn::Linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = in(x);
    dtypes = {y.scalar_type(), ignored->weight.scalar_type()};
    return ignored(y.to(at::kFloat));
  }
  Wrap<torch::nn::Linear> in{nullptr};
  torch::nn::Linear ignored{nullptr};
  std::vector<at::ScalarType> dtypes;
};
TORCH_MODULE(PartlyIgnored);

TEST(FsdpPrecisionTest, ParametersOfIgnoredModulesKeepTheirDtype) {
  run_local(2, [](const ProcessGroup& group) {
    for (Options way : kWays) {
      const PartlyIgnored plain;
      way.mixed_precision = in_bfloat16().mixed_precision;
      way.ignored_modules = {plain->ignored.ptr()};
      FullyShardedDataParallel<PartlyIgnored> model(plain, group, way);
      model(at::ones({2, 4})).sum().backward();
      EXPECT_EQ(plain->dtypes, (std::vector{at::kBFloat16, at::kFloat}));
      EXPECT_EQ(plain->ignored->weight.grad().scalar_type(), at::kFloat);
      EXPECT_EQ(model.handle(0).sharded_gradient().scalar_type(), at::kFloat);
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp

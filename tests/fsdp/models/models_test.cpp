// Models as programs have them train for 50 steps (5 with sanitizers) as one process does: it computes the batch of
// each rank in turn, with the seed and the buffers of that rank, and averages the gradients. Values are float64 and
// equal up to 1e-9 of the largest; the order of sums is all that differs.

#include "fsdp/models/models.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/transformer.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "support/chaos.h"
#include "support/rank_processes.h"
#include "tessera/base/function_ref.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"

namespace tessera::fsdp {
namespace {

constexpr int kSteps = 50 / static_cast<int>(::tessera::testing::stride_if_sanitized(10));

void seed(int step, int rank) { torch::manual_seed(static_cast<std::uint64_t>(1000 * step + rank)); }

at::Tensor images(int step, int rank, std::vector<std::int64_t> shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return at::arange(count, at::kDouble).mul(0.37 + 0.01 * rank).add(step).sin().reshape(shape);
}
at::Tensor classes(int step, int rank, std::int64_t count, std::int64_t of) {
  return at::arange(count, at::kLong).mul(3).add(step + 7 * rank).remainder(of);
}

// A model as one process trains it for `ranks` ranks.
template <typename Model>
class Alone {
 public:
  Alone(Model model, int ranks) : model_(std::move(model)), buffers_(static_cast<std::size_t>(ranks)) {
    for (auto& of_rank : buffers_) {
      for (const at::Tensor& buffer : model_->buffers()) of_rank.push_back(buffer.clone());
    }
  }
  Model& model() { return model_; }
  // Runs `f` with the buffers of a rank.
  void as_rank(int rank, FunctionRef<void()> f) {
    auto& mine = buffers_[static_cast<std::size_t>(rank)];
    const std::vector<at::Tensor> buffers = model_->buffers();
    for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].copy_(mine[i]);
    f();
    for (std::size_t i = 0; i < buffers.size(); ++i) mine[i].copy_(buffers[i]);
  }
  void average_gradients() {
    for (const at::Tensor& param : model_->parameters()) {
      if (param.grad().defined()) param.grad().div_(static_cast<double>(buffers_.size()));
    }
  }

 private:
  Model model_;
  std::vector<std::vector<at::Tensor>> buffers_;
};

template <typename Model>
void expect_same_model(ShardedModule& sharded, Alone<Model>& alone) {
  double largest = 0, difference = 0;
  const auto compare = [&](const at::Tensor& found, const at::Tensor& expected) {
    ASSERT_EQ(found.sizes(), expected.sizes());
    largest = std::max(largest, expected.abs().max().item<double>());
    difference = std::max(difference, (found - expected).abs().max().item<double>());
  };
  sharded.summon_full_params([&] {
    const std::vector<at::Tensor> found = sharded.module_ptr()->parameters(), expected = alone.model()->parameters();
    for (std::size_t i = 0; i < found.size(); ++i) compare(found[i], expected[i]);
  });
  alone.as_rank(sharded.group().rank(), [&] {
    const std::vector<at::Tensor> found = sharded.module_ptr()->buffers(), expected = alone.model()->buffers();
    for (std::size_t i = 0; i < found.size(); ++i) compare(found[i].to(at::kDouble), expected[i].to(at::kDouble));
  });
  EXPECT_LT(difference, 1e-9 * largest);
}

template <typename Model>
Model in_double(Model model) {
  model->to(at::kDouble);
  return model;
}

// Trains a model of `make` on `loss_of(model, step, rank)`.
template <typename Make, typename Loss>
void train(const ProcessGroup& group, const Options& options, const Make& make, const Loss& loss_of) {
  const auto seeded = [&] {
    torch::manual_seed(1);
    return in_double(make());
  };
  using Model = decltype(make());
  Alone<Model> alone(seeded(), group.size());
  FullyShardedDataParallel<Model> model(seeded(), group, options);
  EXPECT_GT(model.unit_count(), 1u);
  const auto sgd = torch::optim::SGDOptions(0.05).momentum(0.9);
  torch::optim::SGD optimizer(model.parameters(), sgd), expected(alone.model()->parameters(), sgd);
  for (int step = 0; step < kSteps; ++step) {
    expected.zero_grad();
    double loss = 0;
    for (int rank = 0; rank < group.size(); ++rank) {
      alone.as_rank(rank, [&] {
        seed(step, rank);
        const at::Tensor of_rank = loss_of(alone.model(), step, rank);
        of_rank.backward();
        if (rank == group.rank()) loss = of_rank.template item<double>();
      });
    }
    alone.average_gradients();
    expected.step();
    optimizer.zero_grad();
    seed(step, group.rank());
    const at::Tensor mine = loss_of(model, step, group.rank());
    ASSERT_NEAR(mine.template item<double>(), loss, 1e-9 * std::max(1.0, std::abs(loss))) << "step " << step;
    mine.backward();
    optimizer.step();
  }
  expect_same_model(model, alone);
}

class ModelsTest : public ::testing::TestWithParam<std::tuple<int, ShardingStrategy>> {
 protected:
  // Runs `f` in one process per rank.
  void run(FunctionRef<void(const ProcessGroup&, Options)> f) const {
    InitOptions ranks = testing::quick();
    ranks.timeout = std::chrono::minutes(5);
    ranks.liveness = std::chrono::seconds(60);
    testing::expect_good_processes(std::get<0>(GetParam()), ranks, [&](const ProcessGroup& group) {
      Options options;
      options.strategy = std::get<1>(GetParam());
      f(group, options);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Worlds, ModelsTest,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(ShardingStrategy::full_shard,
                                                              ShardingStrategy::shard_grad_op)),
                         [](const auto& world) {
                           return std::to_string(std::get<0>(world.param)) +
                                  (std::get<1>(world.param) == ShardingStrategy::full_shard ? "FullShard"
                                                                                            : "ShardGradOp");
                         });

TEST_P(ModelsTest, DigitsWithDropout) {
  run([](const ProcessGroup& group, Options options) {
    options.policy = wrap_modules<torch::nn::Conv2dImpl, torch::nn::LinearImpl>();
    train(
        group, options, [] { return models::Digits(); },
        [](auto& model, int step, int rank) {
          return at::nll_loss(model(images(step, rank, {4, 1, 14, 14})), classes(step, rank, 4, 5));
        });
  });
}

TEST_P(ModelsTest, AResidualNetworkWithBatchNorms) {
  run([](const ProcessGroup& group, const Options& options) {
    train(
        group, options, [] { return models::ResNet(); },
        [](auto& model, int step, int rank) {
          return at::cross_entropy_loss(model(images(step, rank, {4, 3, 6, 6})), classes(step, rank, 4, 3));
        });
  });
}

TEST_P(ModelsTest, AVisionTransformer) {
  run([](const ProcessGroup& group, const Options& options) {
    train(
        group, options, [] { return models::VisionTransformer(); },
        [](auto& model, int step, int rank) {
          return at::cross_entropy_loss(model(images(step, rank, {3, 3, 8, 8})), classes(step, rank, 3, 3));
        });
  });
}

TEST_P(ModelsTest, ADecoderWhoseLayersAreCalledByTheirClass) {
  run([](const ProcessGroup& group, const Options& options) {
    train(
        group, options, [] { return models::Decoder(); },
        [](auto& model, int step, int rank) {
          const at::Tensor ids = classes(step, rank, 10, models::DecoderImpl::kTokens).view({2, 5});
          const at::Tensor logits = model(ids);
          return at::cross_entropy_loss(logits.view({10, -1}),
                                        ids.add(1).remainder(models::DecoderImpl::kTokens).view(-1));
        });
  });
}

TEST_P(ModelsTest, TheTransformerOfLibTorch) {
  run([](const ProcessGroup& group, Options options) {
    options.policy = wrap_modules<torch::nn::TransformerEncoderLayerImpl, torch::nn::TransformerDecoderLayerImpl>();
    const auto make = [] {
      return torch::nn::Transformer(
          torch::nn::TransformerOptions(8, 2).num_encoder_layers(2).num_decoder_layers(2).dim_feedforward(12));
    };
    train(group, options, make, [](auto& model, int step, int rank) {
      const at::Tensor source = images(step, rank, {4, 2, 8}), target = images(step + 1, rank, {3, 2, 8});
      return model(source, target).square().mean();
    });
  });
}

// Two models, one of which computes the gradients of the other.
TEST_P(ModelsTest, AGeneratorAndItsDiscriminator) {
  run([](const ProcessGroup& group, const Options& options) {
    Options of_generator = options;
    of_generator.policy = wrap_modules<torch::nn::ConvTranspose2dImpl>();
    const auto generator = [] {
      torch::manual_seed(1);
      return in_double(models::Generator());
    };
    const auto discriminator = [] {
      torch::manual_seed(2);
      return in_double(models::Discriminator());
    };
    Alone<models::Generator> alone_g(generator(), group.size());
    Alone<models::Discriminator> alone_d(discriminator(), group.size());
    FullyShardedDataParallel<models::Generator> g(generator(), group, of_generator);
    FullyShardedDataParallel<models::Discriminator> d(discriminator(), group, options);
    const auto sgd = torch::optim::SGDOptions(0.02).momentum(0.5);
    torch::optim::SGD of_g(g.parameters(), sgd), of_d(d.parameters(), sgd);
    torch::optim::SGD of_alone_g(alone_g.model()->parameters(), sgd), of_alone_d(alone_d.model()->parameters(), sgd);
    const auto noise = [](int step, int rank) { return images(step, rank, {4, 3, 1, 1}); };
    const auto backward_of_d = [&](auto& of_images, auto& of_truth, int step, int rank) {
      const at::Tensor fake = of_images(noise(step, rank)).detach();
      const at::Tensor real = of_truth(images(step, rank, {4, 1, 8, 8}));
      at::binary_cross_entropy(real, at::full_like(real, 0.9)).backward();
      const at::Tensor found = of_truth(fake);
      at::binary_cross_entropy(found, at::zeros_like(found)).backward();
    };
    const auto backward_of_g = [&](auto& of_images, auto& of_truth, int step, int rank) {
      const at::Tensor found = of_truth(of_images(noise(step, rank)));
      at::binary_cross_entropy(found, at::ones_like(found)).backward();
    };
    const auto for_each_rank = [&](const auto& f) {
      for (int rank = 0; rank < group.size(); ++rank) {
        alone_g.as_rank(rank, [&] { alone_d.as_rank(rank, [&] { f(rank); }); });
      }
    };
    for (int step = 0; step < kSteps; ++step) {
      of_alone_d.zero_grad();
      for_each_rank([&](int rank) { backward_of_d(alone_g.model(), alone_d.model(), step, rank); });
      alone_d.average_gradients();
      of_alone_d.step();
      of_alone_g.zero_grad();
      for_each_rank([&](int rank) { backward_of_g(alone_g.model(), alone_d.model(), step, rank); });
      alone_g.average_gradients();
      of_alone_g.step();

      of_d.zero_grad();
      backward_of_d(g, d, step, group.rank());
      of_d.step();
      of_g.zero_grad();
      backward_of_g(g, d, step, group.rank());
      of_g.step();
    }
    expect_same_model(g, alone_g);
    expect_same_model(d, alone_d);
  });
}

}  // namespace
}  // namespace tessera::fsdp

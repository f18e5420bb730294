// Autograd, optimizers and modules of LibTorch on a device give what they give on the CPU, bit for bit.

#include <torch/nn.h>
#include <torch/optim.h>

#include <chrono>

#include "accelerator/sim.h"

namespace tessera::sim {
namespace {

using torch::Tensor;
namespace nn = torch::nn;

using OrderedTrainingTest = InOrder;
INSTANTIATE_TEST_SUITE_P(Orders, OrderedTrainingTest, ::testing::Values(Order::late, Order::early), order_name);

// A transformer's layer on words, with an attention written out.
struct SmallTransformerImpl : nn::Module {
  SmallTransformerImpl() {
    words = register_module("words", nn::Embedding(11, 8));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({8})));
    projection = register_module("projection", nn::Linear(8, 24));
    up = register_module("up", nn::Linear(8, 16));
    down = register_module("down", nn::Linear(16, 8));
    dropout = register_module("dropout", nn::Dropout(0.5));
    head = register_module("head", nn::Linear(8, 11));
  }
  Tensor forward(const Tensor& indices) {
    Tensor x = words(indices);
    const std::vector<Tensor> parts = projection(norm(x)).chunk(3, -1);
    const Tensor weights = (parts[0].matmul(parts[1].transpose(-2, -1)) / 3).softmax(-1);
    x = x + dropout(weights.matmul(parts[2]));
    return head(x + down(torch::gelu(up(x))));
  }
  nn::Embedding words{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::Linear projection{nullptr}, up{nullptr}, down{nullptr}, head{nullptr};
  nn::Dropout dropout{nullptr};
};
TORCH_MODULE(SmallTransformer);

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>)>;

template <typename Optimizer, typename Options>
MakeOptimizer optimizer(const Options& options) {
  return [=](std::vector<Tensor> parameters) { return std::make_unique<Optimizer>(std::move(parameters), options); };
}

// Returns the loss of each step, and the parameters and their gradients after the last one.
std::vector<Tensor> train(c10::Device where, const MakeOptimizer& make_optimizer,
                          std::optional<c10::Stream> stream = {}) {
  torch::manual_seed(1);
  manual_seed(2);
  SmallTransformer model;
  const Tensor indices = torch::randint(11, {4, 6}, torch::kLong).to(where),
               targets = torch::randint(11, {24}, torch::kLong).to(where);
  model->to(where);
  torch::manual_seed(2);
  const auto stepper = make_optimizer(model->parameters());
  c10::OptionalStreamGuard guard(stream);
  if (stream) wait_for(*stream, implementation().getDefaultStream(where));
  std::vector<Tensor> results;
  for (int i = 0; i < 3; ++i) {
    stepper->zero_grad();
    const Tensor loss = nn::functional::cross_entropy(model(indices).view({24, 11}), targets);
    loss.backward();
    nn::utils::clip_grad_norm_(model->parameters(), 0.1);
    stepper->step();
    results.push_back(loss.detach());
  }
  for (const Tensor& parameter : model->parameters())
    results.insert(results.end(), {parameter.detach(), parameter.grad()});
  for (Tensor& result : results) result = result.cpu();
  return results;
}

void expect_same_training(const MakeOptimizer& make_optimizer, std::optional<c10::Stream> stream = {}) {
  const std::vector<Tensor> on_device = train(device(1), make_optimizer, stream),
                            on_cpu = train(c10::kCPU, make_optimizer);
  ASSERT_EQ(on_device.size(), on_cpu.size());
  for (std::size_t i = 0; i < on_cpu.size(); ++i) EXPECT_TRUE(at::equal(on_device[i], on_cpu[i])) << i;
}

TEST_P(OrderedTrainingTest, SGD) {
  expect_same_training(optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01)));
}
TEST_P(OrderedTrainingTest, Adam) {
  expect_same_training(optimizer<torch::optim::Adam>(torch::optim::AdamOptions(0.01).amsgrad(true)));
}
TEST_P(OrderedTrainingTest, AdamW) {
  expect_same_training(optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01)));
}

TEST_P(OrderedTrainingTest, BackwardRunsOnTheStreamsOfTheForward) {
  expect_same_training(optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1)), stream_from_pool(1));
}

TEST_P(OrderedTrainingTest, BackwardOverTwoStreamsIsSynchronizedByAutograd) {
  const auto run = [](c10::Device where) {
    const Tensor x = torch::full({1000}, 2.0, torch::TensorOptions().device(where).requires_grad(true));
    const Tensor y = x * x;
    Tensor z;
    if (where.is_cpu()) {
      z = y * y;
    } else {
      const c10::Stream side = stream_from_pool();
      wait_for(side, current());
      {
        const c10::StreamGuard guard(side);
        z = y * y;
      }
      wait_for(current(), side);
    }
    (z + y).sum().backward();
    return x.grad().cpu();
  };
  EXPECT_TRUE(at::equal(run(device(0)), run(c10::kCPU)));
}

TEST_P(OrderedTrainingTest, StepsDoNotWaitForTheDevice) {
  nn::Sequential model(nn::Linear(8, 16), nn::ReLU(), nn::Linear(16, 8));
  model->to(device(2));
  torch::optim::AdamW stepper(model->parameters(), torch::optim::AdamWOptions(0.01));
  const Tensor input = torch::ones({4, 8}, on(2));
  reset_synchronizations(2);
  for (int i = 0; i < 3; ++i) {
    stepper.zero_grad();
    model->forward(input).pow(2).mean().backward();
    stepper.step();
  }
  EXPECT_EQ(synchronizations(2).total(), 0);
}

TEST_P(OrderedTrainingTest, FusedOpsStepAsOnTheCPU) {
  const auto run = [](c10::Device where) {
    torch::manual_seed(4);
    std::vector<Tensor> p, g, m, v, max, steps;
    for (int i = 0; i < 2; ++i) {
      p.push_back(torch::randn({5}).to(where));
      g.push_back(torch::randn({5}).to(where));
      m.push_back(torch::zeros({5}).to(where));
      v.push_back(torch::zeros({5}).to(where));
      steps.push_back(torch::ones({}).to(where));
    }
    at::_fused_adamw_(p, g, m, v, max, steps, 0.01, 0.9, 0.999, 0.01, 1e-8, false, false);
    Tensor found = torch::zeros({1}).to(where);
    g[1][2] = std::numeric_limits<float>::infinity();
    at::_amp_foreach_non_finite_check_and_unscale_(g, found, torch::full({1}, 0.5).to(where));
    return std::vector<Tensor>{p[0].cpu(), p[1].cpu(), m[1].cpu(), v[1].cpu(), g[0].cpu(), found.cpu()};
  };
  const std::vector<Tensor> on_device = run(device(0)), on_cpu = run(c10::kCPU);
  for (std::size_t i = 0; i < on_cpu.size(); ++i) EXPECT_TRUE(at::equal(on_device[i], on_cpu[i])) << i;
}

TEST_P(OrderedTrainingTest, BackwardInRankThreads) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([rank] {
      const c10::DeviceGuard guard(device(rank));
      const Tensor x = torch::full({100}, rank, on(rank).requires_grad(true));
      (x * x).sum().backward();
      EXPECT_TRUE(same(x.grad(), torch::full({100}, 2 * rank, torch::kFloat)));
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST_P(OrderedTrainingTest, AStepTakesMilliseconds) {
  const auto step = optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01));
  (void)train(device(1), step);  // finds the shapes
  const auto begin = std::chrono::steady_clock::now();
  (void)train(device(1), step);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
}

}  // namespace
}  // namespace tessera::sim

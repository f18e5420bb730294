// Frozen units, and parts of a forward without gradients.

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <utility>
#include <vector>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {
namespace {

// A block that ignores its second input.
struct OneOfTwoImpl : torch::nn::Module {
  explicit OneOfTwoImpl(std::int64_t width) { block = register_module("block", Block(width)); }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& /*unused*/) { return block(x); }
  Block block{nullptr};
};
TORCH_MODULE(OneOfTwo);

// Calls its units with and without gradients, several times, in turn.
struct TraversedImpl : torch::nn::Module {
  TraversedImpl() {
    in = register_module("in", Wrap<torch::nn::Linear>(5, 5));
    trained = register_module("trained", Wrap<Block>(5));
    frozen = register_module("frozen", Wrap<OneOfTwo>(5));
    head = register_module("head", Wrap<torch::nn::Linear>(5, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor start = in(x);
    at::Tensor constant;
    {
      const at::NoGradGuard no_grad;
      constant = trained(frozen(start, start));
    }
    at::Tensor y = frozen(trained(start + constant), start);
    {
      const at::NoGradGuard no_grad;
      constant = at::tanh(frozen(constant, y));
    }
    y = frozen(trained(y * constant), x);
    return head(y);
  }
  Wrap<torch::nn::Linear> in{nullptr}, head{nullptr};
  Wrap<Block> trained{nullptr};
  Wrap<OneOfTwo> frozen{nullptr};
};
TORCH_MODULE(Traversed);

Traversed make_traversed(bool freezes, at::ScalarType dtype = at::kDouble) {
  Traversed model;
  fill(*model, dtype);
  for (const at::Tensor& param : model->frozen->parameters()) param.set_requires_grad(!freezes);
  return model;
}

TEST(FrozenTest, UnitsCalledWithAndWithoutGradientsTrainAsOneProcessDoes) {
  Traversed alone = make_traversed(true);
  std::vector<at::Tensor> trained;
  for (const at::Tensor& param : alone->parameters()) {
    if (param.requires_grad()) trained.push_back(param);
  }
  torch::optim::SGD alone_optimizer(trained, torch::optim::SGDOptions(0.1).momentum(0.9));
  std::vector<std::vector<double>> losses;
  for (int step = 0; step < 3; ++step) {
    losses.push_back(backward_of_all(alone, {step}, 2));
    alone_optimizer.step();
  }
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<Traversed> model(make_traversed(true), group, way);
      torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (std::size_t step = 0; step < 3; ++step) {
        model.zero_grad();
        const at::Tensor loss = loss_of(model(batch_of(static_cast<int>(step), group.rank())));
        EXPECT_NEAR(loss.item<double>(), losses[step][static_cast<std::size_t>(group.rank())], 1e-12);
        loss.backward();
        optimizer.step();
      }
      const std::vector<at::Tensor> found = full_params(model), expected = alone->parameters();
      for (std::size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-11, 1e-12)) << i;
      }
    }
  });
}

// The other parameters get the gradients that they get if no unit is frozen, bit for bit.
TEST(FrozenTest, InMixedPrecisionTheOthersGetTheSameGradients) {
  run_local(2, [](const ProcessGroup& group) {
    for (Options way : kWays) {
      way.mixed_precision.param_dtype = at::kBFloat16;
      way.mixed_precision.reduce_dtype = at::kFloat;
      const auto grads = [&](bool freezes) {
        FullyShardedDataParallel<Traversed> model(make_traversed(freezes, at::kFloat), group, way);
        for (int step = 0; step < 2; ++step) loss_of(model(batch_of(step, group.rank(), at::kFloat))).backward();
        return unsharded_grads(model);
      };
      const std::vector<at::Tensor> found = grads(true), expected = grads(false);
      const auto names = make_traversed(true)->named_parameters();
      for (std::size_t i = 0; i < found.size(); ++i) {
        const bool is_frozen = names[i].key().rfind("frozen", 0) == 0;
        ASSERT_EQ(found[i].defined(), !is_frozen) << names[i].key();
        if (is_frozen) continue;
        EXPECT_EQ(found[i].scalar_type(), at::kFloat);
        EXPECT_TRUE(at::equal(found[i], expected[i])) << names[i].key();
      }
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp

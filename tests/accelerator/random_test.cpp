// Random numbers of a device: activation checkpointing draws them again, and checkpoints resume them.

#include <torch/nn/modules/dropout.h>

#include "accelerator/fsdp_training.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/state/stateful.h"

namespace tessera {
namespace {

using testing::TemporaryDirectory;

class RandomOnDeviceTest : public sim::InOrder {};
INSTANTIATE_TEST_SUITE_P(, RandomOnDeviceTest, ::testing::Values(sim::Order::late, sim::Order::early), sim::order_name);

TEST_P(RandomOnDeviceTest, ARecomputedDropoutIsTheSame) {
  const auto gradient = [](bool computes_again) {
    sim::manual_seed(3);
    const at::Tensor x = at::ones({64}, sim::on(1)).requires_grad_();
    const auto drop = [](const at::Tensor& y) { return at::dropout(y * 2, 0.5, /*train=*/true); };
    const at::Tensor y = computes_again ? fsdp::activation_checkpoint(drop, x) : drop(x);
    at::dropout(x.detach(), 0.5, true);  // so that the generator has another state in backward
    y.sum().backward();
    return x.grad().cpu();
  };
  EXPECT_TRUE(at::equal(gradient(true), gradient(false)));
}

TEST_P(RandomOnDeviceTest, ACheckpointResumesTheGenerators) {
  const TemporaryDirectory directory;
  const auto draw = [](int device) {
    return at::cat({at::rand({5}), at::rand({5}, sim::on(device)).cpu(), at::rand({5}, sim::on(2)).cpu()});
  };
  draw(0);
  StateDict state{{"random", stateful_random({}, {sim::device(0), sim::device(2)})}};
  save(state, directory.path() / "checkpoint");
  const at::Tensor expected = draw(0);
  EXPECT_FALSE(at::equal(draw(0), expected));
  load(state, directory.path() / "checkpoint");
  EXPECT_TRUE(at::equal(draw(0), expected));
  StateDict on_another{{"random", stateful_random({}, {sim::device(1), sim::device(2)})}};
  load(on_another, directory.path() / "checkpoint");
  EXPECT_TRUE(at::equal(draw(1), expected));
}

TEST(RandomStateTest, EachDeviceOnce) {
  sim::install();
  EXPECT_ERROR(stateful_random({}, {sim::device(1), sim::device(1)}), ErrorCode::invalid_argument,
               "expected each device once");
  EXPECT_ERROR(stateful_random({}, {at::Device(at::kCPU)}), ErrorCode::invalid_argument, "expected each device once");
}

}  // namespace
}  // namespace tessera

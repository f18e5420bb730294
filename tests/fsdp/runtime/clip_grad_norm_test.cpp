// The result of clip_grad_norm_, and how it is computed.

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <limits>
#include <memory>
#include <set>
#include <string>

#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {
namespace {

// Parameters of two dtypes, in two units.
struct TwoDtypesImpl : torch::nn::Module {
  TwoDtypesImpl() {
    low = register_module("low", Wrap<torch::nn::Linear>(5, 4));
    high = register_module("high", Wrap<torch::nn::Linear>(4, 3));
    high->to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = low(x);
    return uses_both ? high(y.to(at::kDouble)) : y;
  }
  Wrap<torch::nn::Linear> low{nullptr}, high{nullptr};
  bool uses_both = true;
};
TORCH_MODULE(TwoDtypes);

TEST(ClipGradNormTest, TheNormHasTheDtypeThatTheGradientsPromoteTo) {
  run_local(2, [](const ProcessGroup& group) {
    for (const double type : {2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      FullyShardedDataParallel<TwoDtypes> model(TwoDtypes(), group);
      for (const bool uses_both : {false, true}) {
        model->uses_both = uses_both;
        model(batch_of(0, group.rank(), at::kFloat)).sum().backward();
        const at::Tensor norm = model.clip_grad_norm_(1, type);
        EXPECT_EQ(norm.scalar_type(), uses_both ? at::kDouble : at::kFloat);
        EXPECT_EQ(norm.dim(), 0);
        EXPECT_GT(norm.item<double>(), 1);
        EXPECT_NEAR(model.clip_grad_norm_(1, type).item<double>(), 1, 1e-5);
      }
    }
    Options options;
    options.mixed_precision = {.param_dtype = at::kBFloat16, .keep_low_precision_grads = true};
    FullyShardedDataParallel<SmallModel> low(make_model(at::kFloat), group, options);
    loss_of(low(batch_of(0, group.rank(), at::kFloat))).backward();
    EXPECT_EQ(low.clip_grad_norm_(1).scalar_type(), at::kBFloat16);
  });
}

TEST(ClipGradNormTest, ALimitOrANormThatIsNoneIsRefusedAndTheGradientsStay) {
  run_local(2, [](const ProcessGroup& group) {
    Options options;
    options.use_orig_params = false;
    FullyShardedDataParallel<SmallModel> model(make_model(), group, options);
    loss_of(model(batch_of(0, group.rank()))).backward();
    const at::Tensor before = model.parameters()[0].grad().clone();
    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    for (const double wrong : {kNan, -1.0, -std::numeric_limits<double>::infinity()}) {
      EXPECT_ERROR(model.clip_grad_norm_(wrong), ErrorCode::invalid_argument,
                   fmt::format("clip_grad_norm_: max_norm is {}, expected at least 0", wrong));
      EXPECT_ERROR(model.clip_grad_norm_(group.rank() == 1 ? wrong : 1), ErrorCode::invalid_argument, "rank 1");
    }
    for (const double wrong : {kNan, -1.0, 0.0}) {
      EXPECT_ERROR(model.clip_grad_norm_(1, wrong), ErrorCode::invalid_argument,
                   fmt::format("clip_grad_norm_: norm_type is {}, expected above 0", wrong));
    }
    EXPECT_TRUE(at::equal(model.parameters()[0].grad(), before));
    model.clip_grad_norm_(0);
    EXPECT_TRUE(at::equal(model.parameters()[0].grad(), at::zeros_like(before)));
  });
}

// Reading a number makes the host wait for the device.
// The ops that a thread has run. LibTorch also calls a thread's callbacks in the threads that work for it.
thread_local std::set<std::string> ops_of_thread;

TEST(ClipGradNormTest, NoNumberIsRead) {
  run_local(2, [](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group);
    loss_of(model(batch_of(0, group.rank()))).backward();
    const auto handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& op) -> std::unique_ptr<at::ObserverContext> {
          ops_of_thread.insert(op.name());
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
    for (const double type : {2.0, std::numeric_limits<double>::infinity()}) model.clip_grad_norm_(1e-3, type);
    at::removeCallback(handle);
    EXPECT_EQ(ops_of_thread.count("aten::norm"), 1u);
    EXPECT_EQ(ops_of_thread.count("aten::item"), 0u);
    EXPECT_EQ(ops_of_thread.count("aten::_local_scalar_dense"), 0u);
    EXPECT_EQ(ops_of_thread.count("aten::is_nonzero"), 0u);
  });
}

}  // namespace
}  // namespace tessera::fsdp

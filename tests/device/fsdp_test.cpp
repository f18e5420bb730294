// FSDP on a GPU trains as on the CPU. Matrix products add in another order there, so float64 shows errors that rounding
// in float32 would hide.

#include "fsdp/training_cases.h"

#include "device/gpu.h"

namespace tessera::fsdp {
namespace {

using testing::expect_close;
using testing::kAllRanks;
using testing::Ranks;
using testing::run_on_gpus;

constexpr double kFloat64Error = 1e-8, kFloat32Error = 1e-3, kBFloat16Error = 0.1;

double tolerance_of(const Training& training) {
  Options options;
  training.change(options);
  const MixedPrecision& precision = options.mixed_precision;
  if (precision.param_dtype || precision.reduce_dtype) return kBFloat16Error;
  return training.dtype == at::kDouble ? kFloat64Error : kFloat32Error;
}

// Compares a training of this rank on `device` with the one on the CPU.
void compare(const ProcessGroup& group, at::Device device, const Training& training) {
  const Trained on_cpu = train(group, at::kCPU, training), on_device = train(group, device, training);
  ASSERT_EQ(on_device.results.size(), on_cpu.results.size()) << training.name;
  for (std::size_t i = 0; i < on_cpu.results.size(); ++i) {
    expect_close(on_device.results[i], on_cpu.results[i], tolerance_of(training),
                 std::string(training.name) + ", result " + std::to_string(i));
  }
}

// The trainings whose names have one of these beginnings, in float64.
std::vector<Training> trainings_of(const std::vector<std::string>& beginnings) {
  std::vector<Training> found;
  for (Training training : trainings) {
    const std::string name = training.name;
    for (const std::string& beginning : beginnings) {
      if (!name.starts_with(beginning)) continue;
      training.dtype = at::kDouble;
      found.push_back(training);
      break;
    }
  }
  return found;
}

class FsdpOnGpuTest : public ::testing::TestWithParam<Ranks> {
 protected:
  // Those of two ranks, then those of four, in as many processes. One rank has no replicas. If NCCL carries its
  // collectives, it shards its parameters all the same: extensions make it gather and reduce.
  void run(const std::vector<Training>& chosen) {
    ASSERT_FALSE(chosen.empty());
    bool has_run = false;
    std::string reason = "one rank has no replicas";
    for (const int count : {2, 4}) {
      std::vector<Training> part;
      for (Training training : chosen) {
        if (training.ranks() != count || (GetParam().is_one() && is_hybrid(training.strategy))) continue;
        if (GetParam().kind == Ranks::Kind::nccl_one && training.strategy != ShardingStrategy::no_shard) {
          training.change = [change = training.change](Options& options) {
            change(options);
            options.extensions = std::make_shared<FlatParamExtensions>();
          };
        }
        part.push_back(training);
      }
      if (part.empty()) continue;
      if (const auto missing = GetParam().missing(count)) {
        reason = *missing;
        continue;
      }
      has_run = true;
      run_on_gpus(GetParam(), count, [&](const ProcessGroup& group, at::Device device) {
        for (const Training& training : part) compare(group, device, training);
      });
    }
    if (!has_run) GTEST_SKIP() << reason;
  }
};
INSTANTIATE_TEST_SUITE_P(, FsdpOnGpuTest, ::testing::ValuesIn(kAllRanks), testing::ranks_name);

TEST_P(FsdpOnGpuTest, EachStrategyTrainsAsOnCpu) {
  run(trainings_of({"full_shard", "flat_params", "shard_grad_op", "no_shard", "accumulated"}));
}
TEST_P(FsdpOnGpuTest, HybridShardingTrainsAsOnCpu) { run(trainings_of({"hybrid"})); }
TEST_P(FsdpOnGpuTest, EachPrefetchTrainsAsOnCpu) {
  run(trainings_of({"prefetched", "not_prefetched", "far_ahead", "without_forward_prefetch"}));
}
TEST_P(FsdpOnGpuTest, MixedPrecisionTrainsAsOnCpu) { run(trainings_of({"bfloat16", "reduced_in_bfloat16"})); }
TEST_P(FsdpOnGpuTest, OffloadedParametersTrainAsOnCpu) { run(trainings_of({"offloaded"})); }
TEST_P(FsdpOnGpuTest, ActivationCheckpointingTrainsAsOnCpu) { run(trainings_of({"checkpointed"})); }
TEST_P(FsdpOnGpuTest, ScaledGradientsTrainAsOnCpu) { run(trainings_of({"scaled"})); }
TEST_P(FsdpOnGpuTest, ParametersThatChangeBetweenStepsTrainAsOnCpu) { run(trainings_of({"changed"})); }
TEST_P(FsdpOnGpuTest, Float32TrainsAsOnCpu) {
  std::vector<Training> chosen = trainings_of({"full_shard", "shard_grad_op", "no_shard"});
  std::erase_if(chosen, [](const Training& training) { return tolerance_of(training) == kBFloat16Error; });
  for (Training& training : chosen) training.dtype = at::kFloat;
  run(chosen);
}

TEST_P(FsdpOnGpuTest, AnOverflowSkipsTheStepAndHalvesTheScale) {
  if (const auto reason = GetParam().missing(2)) GTEST_SKIP() << *reason;
  run_on_gpus(GetParam(), 2, [](const ProcessGroup& group, at::Device device) {
    Stack stack;
    fill(*stack, at::kFloat);
    stack->to(device);
    FullyShardedDataParallel<Stack> model(stack, group);
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.05));
    ShardedGradScaler scaler(group, {.init_scale = 1024});
    const std::vector<at::Tensor> before = full_params(model);
    const auto step = [&](bool overflows) {
      optimizer.zero_grad();
      at::Tensor loss = loss_of(model(batch_on(device, 0, group.rank())));
      if (overflows && group.rank() == 0) loss = loss * 1e38;  // on one rank alone
      scaler.scale(loss).backward();
      const bool stepped = scaler.step(optimizer);
      scaler.update();
      return stepped;
    };
    EXPECT_FALSE(step(true));
    EXPECT_EQ(scaler.get_scale(), 512);
    const std::vector<at::Tensor> after = full_params(model);
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(after[i], before[i])) << i;
    EXPECT_TRUE(step(false));
    EXPECT_EQ(scaler.get_scale(), 512);
    EXPECT_FALSE(at::equal(full_params(model)[0], before[0]));
  });
}

TEST_P(FsdpOnGpuTest, AClippedGradientHasTheNormOfTheLimit) {
  if (const auto reason = GetParam().missing(2)) GTEST_SKIP() << *reason;
  run_on_gpus(GetParam(), 2, [](const ProcessGroup& group, at::Device device) {
    std::vector<at::Tensor> norms;
    for (const at::Device where : {at::Device(at::kCPU), device}) {
      Stack stack;
      fill(*stack, at::kDouble);
      stack->to(where);
      FullyShardedDataParallel<Stack> model(stack, group);
      for (const double norm_type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
        model.zero_grad();
        loss_of(model(batch_on(where, 0, group.rank(), at::kDouble))).backward();
        const at::Tensor norm = model.clip_grad_norm_(0.01, norm_type);
        EXPECT_EQ(norm.device().type(), where.type());
        norms.push_back(norm.cpu());
        expect_close(model.clip_grad_norm_(100, norm_type), at::full({}, 0.01, at::kDouble), 1e-4, "the clipped norm");
      }
    }
    for (std::size_t i = 0; i < norms.size() / 2; ++i) {
      expect_close(norms[i + norms.size() / 2], norms[i], kFloat64Error, "norm " + std::to_string(i));
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp

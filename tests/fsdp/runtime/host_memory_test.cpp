// Parameters that the ranks of a host share: no rank sees another one's write before it has finished reading.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#include "fsdp/training_cases.h"
#include "support/rank_processes.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/internal/shared_memory.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {
namespace {

using HostTrainingTest = ::testing::TestWithParam<std::size_t>;
INSTANTIATE_TEST_SUITE_P(, HostTrainingTest, ::testing::Range<std::size_t>(0, trainings.size()),
                         [](const auto& param) { return std::string(trainings[param.param].name); });

TEST_P(HostTrainingTest, TrainsAsWithoutSharedMemory) {
  const Training training = trainings[GetParam()];
  const auto trained = [&](const char* shares) {
    ::setenv("TESSERA_HOST_MEMORY", shares, /*replace=*/1);
    std::vector<Trained> of_ranks(static_cast<std::size_t>(training.ranks()));
    run_local(training.ranks(), [&](const ProcessGroup& group) {
      EXPECT_EQ(comm::SharedMemory::is_available(group), *shares == '1');
      of_ranks[static_cast<std::size_t>(group.rank())] = train(group, at::kCPU, training);
    });
    return of_ranks;
  };
  const std::vector<Trained> apart = trained("0"), together = trained("1");
  for (std::size_t rank = 0; rank < apart.size(); ++rank) {
    ASSERT_EQ(together[rank].results.size(), apart[rank].results.size());
    for (std::size_t i = 0; i < apart[rank].results.size(); ++i)
      EXPECT_TRUE(at::equal(together[rank].results[i], apart[rank].results[i])) << "rank " << rank << ", result " << i;
  }
}

void sleep_on(bool is_slow) {
  if (is_slow) std::this_thread::sleep_for(std::chrono::milliseconds(300));
}

// Is slow on rank 1, in forward and in backward.
struct SlowBlockImpl : torch::nn::Module {
  SlowBlockImpl() : linear(register_module("linear", torch::nn::Linear(16, 16))) {}
  at::Tensor forward(const at::Tensor& x) {
    sleep_on(is_slow);
    at::Tensor y = at::tanh(linear(x));
    if (y.requires_grad()) y.register_hook([this](const at::Tensor&) { sleep_on(is_slow); });
    return y;
  }
  torch::nn::Linear linear;
  bool is_slow = false;
};
TORCH_MODULE(SlowBlock);

struct SlowModelImpl : torch::nn::Module {
  SlowModelImpl() {
    for (int i = 0; i < 3; ++i) blocks.push_back(register_module("block" + std::to_string(i), Wrap<SlowBlock>()));
  }
  at::Tensor forward(at::Tensor x) {
    for (Wrap<SlowBlock>& block : blocks) x = block(x);
    return x;
  }
  std::vector<Wrap<SlowBlock>> blocks;
};
TORCH_MODULE(SlowModel);

using SlowFsdp = FullyShardedDataParallel<SlowModel>;

at::Tensor rows() { return at::arange(64, at::kFloat).mul(0.1).sin().view({4, 16}); }

// Runs `read` on two ranks, of which rank 1 is slow, and `write` as soon as it returns. Both ranks read the same
// values, and what both have written is there at the next forward.
void expect_no_write_is_seen(const Options& options, FunctionRef<at::Tensor(SlowFsdp&)> read) {
  testing::expect_good_processes(2, testing::quick(), [&](const ProcessGroup& group) {
    SlowModel slow;
    fill(*slow, at::kFloat);
    SlowFsdp model(slow, group, options);
    loss_of(model(rows())).backward();  // in the first forward the ranks compare each call
    model.zero_grad();
    for (Wrap<SlowBlock>& block : slow->blocks) block->is_slow = group.rank() == 1;
    const at::Tensor found = read(model).contiguous();
    {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& param : model.parameters()) param.mul_(-3);
    }
    at::Tensor all = at::empty({2 * found.numel()});
    group.all_gather_into(all, found.view({-1}));
    EXPECT_TRUE(at::equal(all.narrow(0, 0, found.numel()), all.narrow(0, found.numel(), found.numel())));
    const at::NoGradGuard no_grad;
    SlowModel changed;
    fill(*changed, at::kFloat);
    for (const at::Tensor& param : changed->parameters()) param.mul_(-3);
    EXPECT_TRUE(at::equal(model(rows()), changed->forward(rows())));
  });
}

class HostMemoryTest : public ::testing::TestWithParam<ShardingStrategy> {};
INSTANTIATE_TEST_SUITE_P(Strategies, HostMemoryTest,
                         ::testing::Values(ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op),
                         [](const auto& param) {
                           return param.param == ShardingStrategy::full_shard ? "FullShard" : "ShardGradOp";
                         });

TEST_P(HostMemoryTest, AnEvaluationDoesNotSeeWritesAfterThatOfAnotherRank) {
  expect_no_write_is_seen(options_of(GetParam(), true), [](SlowFsdp& model) {
    const at::NoGradGuard no_grad;
    return model(rows());
  });
}

TEST_P(HostMemoryTest, AForwardDoesNotSeeWritesAfterThatOfAnotherRank) {
  expect_no_write_is_seen(options_of(GetParam(), true), [](SlowFsdp& model) { return model(rows()).detach(); });
}

TEST_P(HostMemoryTest, ABackwardDoesNotSeeTheStepOfAnotherRank) {
  expect_no_write_is_seen(options_of(GetParam(), true), [](SlowFsdp& model) {
    at::Tensor x = rows().requires_grad_();
    model(x).square().sum().backward();
    return x.grad();
  });
}

// No gradient of a parameter is reduced, which would order the ranks.
TEST_P(HostMemoryTest, ABackwardWithoutReductionsDoesNotSeeWritesOfAnotherRank) {
  expect_no_write_is_seen(options_of(GetParam(), true), [](SlowFsdp& model) {
    for (const at::Tensor& param : model.module_ptr()->parameters()) param.set_requires_grad(false);
    at::Tensor x = rows().requires_grad_();
    model(x).square().sum().backward();
    return x.grad();
  });
}

// Returns all summoned parameters, as a rank sees them that is slow if `is_slow`.
at::Tensor summoned(SlowFsdp& model, bool is_slow) {
  std::vector<at::Tensor> found;
  const SummonOptions options{.writeback = false};
  model.summon_full_params(
      [&] {
        sleep_on(is_slow);
        for (const at::Tensor& param : model.module_ptr()->parameters())
          found.push_back(param.detach().reshape({-1}).clone());
      },
      options);
  return at::cat(found);
}

TEST_P(HostMemoryTest, SummonedParametersDoNotSeeWritesOfAnotherRankAfterThem) {
  expect_no_write_is_seen(options_of(GetParam(), true),
                          [](SlowFsdp& model) { return summoned(model, model.group().rank() == 1); });
}

TEST_P(HostMemoryTest, SummonedParametersAreCopiedOnlyWhereARankWritesToThem) {
  testing::expect_good_processes(2, testing::quick(), [&](const ProcessGroup& group) {
    SlowModel plain;
    fill(*plain, at::kFloat);
    SlowFsdp model(plain, group, options_of(GetParam(), true));
    const double own = group.rank() + 1;
    model.summon_full_params([&] {
      for (std::size_t i = 0; i < model.unit_count(); ++i) {
        const FlatParamHandle& handle = model.handle(i);
        for (const at::Tensor& param : handle.params())
          EXPECT_TRUE(param.is_alias_of(handle.unsharded_flat_params()[0]));
      }
      for (const at::Tensor& param : model.module_ptr()->parameters()) param.fill_(own);
      group.barrier();  // both ranks have written
      for (const at::Tensor& param : model.module_ptr()->parameters())
        EXPECT_TRUE(at::equal(param, at::full_like(param, own)));
    });
    const at::Tensor kept = summoned(model, false);  // of each rank what it has a shard of
    EXPECT_TRUE((kept == 1).logical_or(kept == 2).all().item<bool>());
    EXPECT_TRUE((kept == 1).any().item<bool>() && (kept == 2).any().item<bool>());
  });
}

TEST_P(HostMemoryTest, LowPrecisionCopiesAreNotReplacedWhileTheyAreRead) {
  Options options = options_of(GetParam(), true);
  options.mixed_precision.param_dtype = at::kFloat;
  testing::expect_good_processes(2, testing::quick(), [&](const ProcessGroup& group) {
    SlowModel slow;
    fill(*slow, at::kDouble);
    SlowFsdp model(slow, group, options);
    EXPECT_TRUE(model.handle(0).shares_memory());
    for (Wrap<SlowBlock>& block : slow->blocks) block->is_slow = group.rank() == 1;
    SlowModel alone;
    fill(*alone, at::kDouble);
    const at::NoGradGuard no_grad;
    for (int round = 0; round < 3; ++round) {
      SlowModel lowered;
      fill(*lowered, at::kDouble);
      for (std::size_t i = 0; i < alone->parameters().size(); ++i)
        lowered->parameters()[i].copy_(alone->parameters()[i]);
      lowered->to(at::kFloat);
      EXPECT_TRUE(at::equal(model(rows()), lowered->forward(rows())));
      for (const at::Tensor& param : alone->parameters()) param.mul_(-1.5);
      for (const at::Tensor& param : model.parameters()) param.mul_(-1.5);
    }
  });
}

TEST_P(HostMemoryTest, AHandleOfItsOwnWaitsForReaders) {
  testing::expect_good_processes(2, testing::quick(), [](const ProcessGroup& group) {
    const at::Tensor param = at::arange(10, at::kFloat).requires_grad_();
    FlatParamOptions options;
    options.strategy = GetParam();
    FlatParamHandle handle({{"param", param}}, group, options);
    EXPECT_TRUE(handle.shares_memory());
    for (int round = 0; round < 3; ++round) {
      handle.unshard();
      sleep_on(group.rank() == 1);
      EXPECT_TRUE(at::equal(param.detach(), at::arange(10, at::kFloat).add(round)));
      handle.reshard();
      handle.flat_param().detach().add_(1);
    }
  });
}

struct WritingImpl : torch::nn::Module {
  WritingImpl() : linear(register_module("linear", torch::nn::Linear(300, 300))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (factor != 1) {
      const at::NoGradGuard no_grad;
      auto* const data = linear->weight.data_ptr<float>();
      for (int i = 0; i < 300; ++i) data[301 * i] *= factor;
      linear->weight.data().mul_(factor);
    }
    return linear(x);
  }
  torch::nn::Linear linear;
  float factor = 1;
};
TORCH_MODULE(Writing);

// A forward that writes to its parameters, by any means, changes a copy, as it does where they are gathered.
TEST_P(HostMemoryTest, WhatForwardWritesToParametersIsLostWhenTheyAreResharded) {
  testing::expect_good_processes(2, testing::quick(), [&](const ProcessGroup& group) {
    Writing module;
    const at::NoGradGuard no_grad;
    module->linear->weight.copy_(at::arange(90000, at::kFloat).remainder(7).view({300, 300}));  // sums are exact
    module->linear->bias.fill_(1);
    const at::Tensor x = at::ones({1, 300}), expected = module->forward(x).clone();
    FullyShardedDataParallel<Writing> model(module, group, options_of(GetParam(), true));
    module->factor = group.rank() == 1 ? 2 : 1;
    EXPECT_EQ(at::equal(model(x), expected), group.rank() == 0);
    module->factor = 1;
    EXPECT_TRUE(at::equal(model(x), expected));
  });
}

}  // namespace
}  // namespace tessera::fsdp

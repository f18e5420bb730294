// What is wrong on one rank in a collective of a sharded model is an error on all of them.

#include "support/one_sided.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <limits>
#include <map>

#include "fsdp/small_model.h"
#include "tessera/fsdp/meta_init.h"
#include "tessera/fsdp/sharded_grad_scaler.h"
#include "tessera/tensor/tensor_parallel.h"

namespace tessera::fsdp {
namespace {

using testing::expect_error_soon;
using testing::expect_good_processes;
using testing::expect_usable;
using testing::OneSidedCall;
using testing::quick;
using Model = FullyShardedDataParallel<SmallModel>;

struct ParallelPairImpl : torch::nn::Module {
  ParallelPairImpl() {
    up = register_module("up", ParallelLinear(4, 8));
    down = register_module("down", ParallelLinear(8, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return down(up(x)); }
  ParallelLinear up{nullptr}, down{nullptr};
};
TORCH_MODULE(ParallelPair);

std::vector<OneSidedCall> constructor_calls(const ProcessGroup& /*group*/) {
  return {
      {"a model",  // shard it, or initialize it
       {"a null module", "another unit", "another strategy", "another dtype of parameters", "another reduce_dtype",
        "use_orig_params", "another prefetch", "a negative limit of prefetches", "no broadcast", "an ignored module",
        "another dtype", "a frozen parameter", "another shape", "hybrid without replicas", "meta without values"},
       [](const ProcessGroup& g, const std::string& mistake) {
         SmallModel model = make_model(mistake == "another dtype" ? at::kFloat : at::kDouble);
         Options options;
         options.sync_module_states = mistake != "no broadcast";
         if (mistake == "another unit") options.policy = wrap_none();
         if (mistake == "another strategy") options.strategy = ShardingStrategy::no_shard;
         if (mistake == "another dtype of parameters") options.mixed_precision.param_dtype = at::kFloat;
         if (mistake == "another reduce_dtype") options.mixed_precision.reduce_dtype = at::kFloat;
         if (mistake == "use_orig_params") options.use_orig_params = false;
         if (mistake == "another prefetch") options.backward_prefetch = BackwardPrefetch::none;
         if (mistake == "a negative limit of prefetches") options.max_prefetched_units = -1;
         if (mistake == "an ignored module") options.ignored_modules.push_back(model->never.ptr());
         if (mistake == "a frozen parameter") model->head->weight.set_requires_grad(false);
         if (mistake == "another shape") model->head->bias.set_data(at::ones({4}, at::kDouble));
         if (mistake == "hybrid without replicas") options.strategy = ShardingStrategy::hybrid_shard;
         if (mistake == "meta without values") {
           const MetaInit without_memory;
           model = SmallModel();
           model->to(at::kDouble);
         }
         FullyShardedDataParallel<SmallModelImpl>(mistake == "a null module" ? nullptr : model.ptr(), g, options);
       }},
      {"make a flat parameter",
       {"no parameter", "a parameter less", "another name", "another shape", "another dtype", "integers", "frozen",
        "another strategy"},
       [](const ProcessGroup& g, const std::string& mistake) {
         const auto dtype = mistake == "another dtype" ? at::kDouble : mistake == "integers" ? at::kLong : at::kFloat;
         std::vector<NamedParameter> params = {{"a", at::ones({3, 4}, dtype)},
                                               {mistake == "another name" ? "c" : "b", at::ones({5}, dtype)}};
         if (mistake == "no parameter") params.clear();
         if (mistake == "a parameter less") params.pop_back();
         if (mistake == "another shape") params[0].parameter = at::ones({4, 3}, dtype);
         if (mistake != "integers" && mistake != "frozen") {
           for (const NamedParameter& param : params) param.parameter.set_requires_grad(true);
         }
         FlatParamOptions options;
         if (mistake == "another strategy") options.strategy = ShardingStrategy::no_shard;
         FlatParamHandle(params, g, options);
       }},
      {"a model",
       {"not tensor parallel"},
       [](const ProcessGroup& g, const std::string& mistake) {
         const DeviceMesh mesh(g, {g.size(), 1}, {"dp", "tp"});
         ParallelPair model;
         const ParallelPlan plan = {{"up", ColwiseParallel{}}, {"down", RowwiseParallel{}}};
         if (mistake != "not tensor parallel") parallelize_module(*model, mesh["tp"], plan);
         FullyShardedDataParallel<ParallelPair>(model, mesh.group("dp"));
       }},
      {"unshard",
       {"a gradient that is not reduced"},
       [](const ProcessGroup& g, const std::string& mistake) {
         FlatParamHandle handle({{"a", at::ones({3, 4}).set_requires_grad(true)}}, g, {});
         const auto accumulate = [&] {
           handle.params()[0].sum().backward();
           handle.take_gradient(0);
         };
         handle.unshard();
         accumulate();
         handle.start_reduce_gradient();
         handle.finish_reduce_gradient();
         if (!mistake.empty()) accumulate();
         handle.unshard_grad();
       }},
      {"hybrid_groups",
       {"another number", "no divisor", "none"},
       [](const ProcessGroup& g, const std::string& mistake) {
         const int good = g.size();
         hybrid_groups(g, mistake == "another number" ? 1
                          : mistake == "no divisor"   ? good + 1
                          : mistake == "none"         ? 0
                                                      : good);
       }},
  };
}

// A model that has trained a step, and its optimizer.
struct TrainedOneStep {
  explicit TrainedOneStep(const ProcessGroup& group, const Options& options = {})
      : model(make_model(), group, options), optimizer(model.parameters(), torch::optim::AdamWOptions(1e-3)) {
    loss_of(model(batch_of(0, group.rank()))).backward();
    optimizer.step();
  }
  Model model;
  torch::optim::AdamW optimizer;
};

std::vector<OneSidedCall> model_calls(const std::shared_ptr<TrainedOneStep>& trained) {
  const auto full = std::make_shared<StateDict>(trained->model.state_dict(StateDictType::full, {.rank0_only = false}));
  const auto optim = std::make_shared<StateDict>(
      trained->model.optim_state_dict(trained->optimizer, StateDictType::full, {.rank0_only = false}));
  return {
      {"clip_grad_norm_",
       {"another limit", "a negative limit", "a limit of NaN", "another norm", "a negative norm", "a norm of NaN",
        "the norm of infinity"},
       [=](const ProcessGroup&, const std::string& mistake) {
         double limit = 1, norm = 2;
         if (mistake == "another limit") limit = 2;
         if (mistake == "a negative limit") limit = -1;
         if (mistake == "a limit of NaN") limit = std::numeric_limits<double>::quiet_NaN();
         if (mistake == "another norm") norm = 3;
         if (mistake == "a negative norm") norm = -1;
         if (mistake == "a norm of NaN") norm = std::numeric_limits<double>::quiet_NaN();
         if (mistake == "the norm of infinity") norm = std::numeric_limits<double>::infinity();
         trained->model.clip_grad_norm_(limit, norm);
       }},
      {"summon_full_params",
       {"a null function", "a function that throws", "no writeback", "rank0_only", "rank0_only with writeback",
        "with_grads"},
       [=](const ProcessGroup&, const std::string& mistake) {
         SummonOptions options;
         options.writeback = mistake != "no writeback" && mistake != "rank0_only";
         options.rank0_only = mistake == "rank0_only" || mistake == "rank0_only with writeback";
         options.with_grads = mistake == "with_grads";
         std::function<void()> f = [] {};
         if (mistake == "a null function") f = nullptr;
         if (mistake == "a function that throws") f = [] { throw std::runtime_error("it throws"); };
         trained->model.summon_full_params(f, options);
       }},
      {"state_dict",
       {"rank0_only", "data that does not fit"},
       [=](const ProcessGroup&, const std::string& mistake) {
         at::Tensor param = trained->model.module()->weight;
         const at::Tensor before = param.data();
         if (mistake == "data that does not fit") param.set_data(at::ones({1000}, at::kDouble));
         try {
           trained->model.state_dict(StateDictType::full, {.rank0_only = mistake == "rank0_only"});
         } catch (...) {
           param.set_data(before);
           throw;
         }
       }},
      {"load",
       {"rank0_only", "an entry less", "an entry more", "another shape", "a number as a name", "a string as a value"},
       [=](const ProcessGroup&, const std::string& mistake) {
         StateDict state = *full;
         if (mistake == "an entry less") state.erase("weight");
         if (mistake == "an entry more") state["more"] = at::ones({2});
         if (mistake == "another shape") state["weight"] = at::ones({2});
         if (mistake == "a number as a name") state[3] = at::ones({2});
         if (mistake == "a string as a value") state["weight"] = "weight";
         trained->model.load_state_dict(state, {.rank0_only = mistake == "rank0_only"});
       }},
      {"optim_state_dict",
       {"another type", "a type that it lacks", "rank0_only", "another optimizer", "the optimizer of another model"},
       [=](const ProcessGroup&, const std::string& mistake) {
         torch::optim::SGD sgd(trained->model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
         torch::optim::AdamW foreign({at::ones({3}).set_requires_grad(true)}, torch::optim::AdamWOptions(1e-3));
         const torch::optim::Optimizer* optimizer = &trained->optimizer;
         if (mistake == "another optimizer") optimizer = &sgd;
         if (mistake == "the optimizer of another model") optimizer = &foreign;
         const StateDictType type = mistake == "another type"           ? StateDictType::sharded
                                    : mistake == "a type that it lacks" ? StateDictType::local
                                                                        : StateDictType::full;
         trained->model.optim_state_dict(*optimizer, type, {.rank0_only = mistake == "rank0_only"});
       }},
      {"load",
       {"no state", "rank0_only", "a parameter less", "the optimizer of another model", "another shape"},
       [=](const ProcessGroup&, const std::string& mistake) {
         StateDict state = *optim;
         if (mistake == "no state") state.erase("state");
         if (mistake == "a parameter less") state.at("state").get<Dict>().erase("weight");
         if (mistake == "another shape")
           state.at("state").get<Dict>().at("weight").get<Dict>()["exp_avg"] = at::ones({2});
         torch::optim::AdamW foreign({at::ones({3}).set_requires_grad(true)}, torch::optim::AdamWOptions(1e-3));
         trained->model.load_optim_state_dict(
             mistake == "the optimizer of another model" ? foreign : trained->optimizer, state,
             {.rank0_only = mistake == "rank0_only"});
       }},
      {"unscale_ of a gradient scaler",
       {"another scale", "no scale", "unscaled before", "gradients of integers"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         GradScalerOptions options;
         if (mistake == "another scale") options.init_scale = 2;
         ShardedGradScaler scaler(g, options);
         if (mistake != "no scale") scaler.scale(at::ones({1}));
         at::Tensor param = at::ones({2}).set_requires_grad(true);
         param.mutable_grad() = at::ones({2});
         if (mistake == "gradients of integers") {
           param = at::ones({2}, at::kLong);
           param.mutable_grad() = at::ones({2}, at::kLong);
         }
         torch::optim::SGD sgd({param}, 0.1), other({param}, 0.1);
         scaler.unscale_(sgd);
         scaler.unscale_(mistake == "unscaled before" ? sgd : other);
       }},
      {"step of a gradient scaler",
       {"a closure", "no scale", "stepped before"},
       [=](const ProcessGroup& g, const std::string& mistake) {
         ShardedGradScaler scaler(g);
         if (mistake != "no scale") scaler.scale(at::ones({1}));
         at::Tensor param = at::ones({2}).set_requires_grad(true);
         param.mutable_grad() = at::ones({2});
         torch::optim::SGD sgd({param}, 0.1);
         if (mistake == "a closure") {
           scaler.step(sgd, [] { return at::ones({1}); });
         } else {
           scaler.step(sgd);
         }
         if (mistake == "stepped before") {
           scaler.step(sgd);
         } else {
           scaler.update();
           scaler.scale(at::ones({1}));
           scaler.step(sgd);
         }
       }},
  };
}

std::vector<OneSidedCall> all_calls(const ProcessGroup& group) {
  std::vector<OneSidedCall> calls = constructor_calls(group);
  const std::vector<OneSidedCall> more = model_calls(std::make_shared<TrainedOneStep>(group));
  calls.insert(calls.end(), more.begin(), more.end());
  return calls;
}

// Two copies of the model, each sharded over half of the ranks.
std::vector<OneSidedCall> hybrid_calls(const ProcessGroup& group) {
  const HybridGroups groups = hybrid_groups(group, group.size() / 2);
  Options options;
  options.strategy = ShardingStrategy::hybrid_shard;
  options.replicas = groups.replicas;
  std::vector<OneSidedCall> calls = model_calls(std::make_shared<TrainedOneStep>(groups.shards, options));
  calls.push_back({"a model",
                   {"another strategy", "another unit", "another shape"},
                   [=](const ProcessGroup&, const std::string& mistake) {
                     SmallModel model = make_model();
                     Options mistaken = options;
                     if (mistake == "another strategy") mistaken.strategy = ShardingStrategy::hybrid_shard_zero2;
                     if (mistake == "another unit") mistaken.policy = wrap_none();
                     if (mistake == "another shape") model->head->bias.set_data(at::ones({4}, at::kDouble));
                     Model(model, groups.shards, mistaken);
                   }});
  return calls;
}

class OneSidedFsdpTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, OneSidedFsdpTest, ::testing::Values(2, 3, 4));

TEST_P(OneSidedFsdpTest, AMistakeIsAnErrorOnAllRanksAsThreads) {
  testing::make_mistakes_as_threads(GetParam(), all_calls);
}

TEST_P(OneSidedFsdpTest, AMistakeIsAnErrorOnAllRanksAsProcesses) {
  if (GetParam() == 4) return;  // as threads only, to save time
  testing::make_mistakes_as_processes(GetParam(), all_calls);
}

TEST(OneSidedHybridTest, AMistakeIsAnErrorOnAllReplicasToo) { testing::make_mistakes_as_threads(4, hybrid_calls); }

// --- forward and backward do not compare

enum class Where : std::uint8_t { input, forward, backward, gradient };
const char* const kWhere[] = {"Input", "Forward", "Backward", "Gradient"};

struct Thrown : std::runtime_error {
  Thrown() : std::runtime_error("thrown by the user") {}
};

// Throws in forward, or in backward, when it is told to.
struct ThrowingImpl : torch::nn::Module {
  ThrowingImpl() { inner = register_module("inner", torch::nn::Linear(5, 5)); }
  at::Tensor forward(const at::Tensor& x) {
    if (throws == Where::forward) throw Thrown();
    at::Tensor y = inner(x);
    if (throws == Where::backward) y.register_hook([](const at::Tensor&) { throw Thrown(); });
    return y;
  }
  torch::nn::Linear inner{nullptr};
  std::optional<Where> throws;
};
TORCH_MODULE(Throwing);

struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    for (const char* name : {"a", "b", "c"}) links.push_back(register_module(name, Wrap<Throwing>()));
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& link : links) x = at::tanh(link(x));
    return x;
  }
  std::vector<Wrap<Throwing>> links;
};
TORCH_MODULE(Chain);

// Trains a step, in which this rank throws at `where` if `is_wrong`.
void step(FullyShardedDataParallel<Chain>& model, std::size_t link, std::optional<Where> where) {
  model->links[link]->throws = where;
  const bool has_wrong_input = where == Where::input;
  at::Tensor loss = model(at::ones({2, has_wrong_input ? 4 : 5}, at::kDouble)).sum();
  const bool creates_graph = where == Where::gradient;
  loss.backward({}, creates_graph, creates_graph);
  model.zero_grad();
}

std::string named(int rank, Where where) {
  const bool is_forward = where == Where::input || where == Where::forward;
  return fmt::format("rank {} left {} of a sharded model: ", rank, is_forward ? "forward" : "backward");
}

void expect_named(const ProcessGroup& group, Where where, int wrong, std::size_t link) {
  FullyShardedDataParallel<Chain> model(Chain(), group);
  for (int i = 0; i < 2; ++i) step(model, link, std::nullopt);
  expect_error_soon(
      [&] {
        try {
          step(model, link, group.rank() == wrong ? std::optional(where) : std::nullopt);
        } catch (const std::exception&) {
          if (group.rank() != wrong) throw;
        }
        group.barrier();
      },
      {named(wrong, where)});
  expect_error_soon([&] { group.barrier(); }, {named(wrong, where)});
}

class OneSidedStepTest : public ::testing::TestWithParam<Where> {};
INSTANTIATE_TEST_SUITE_P(Places, OneSidedStepTest,
                         ::testing::Values(Where::input, Where::forward, Where::backward, Where::gradient),
                         [](const auto& test) { return kWhere[static_cast<std::size_t>(test.param)]; });

TEST_P(OneSidedStepTest, ARankThatLeavesAStepIsNamedToAllAsThreads) {
  for (std::size_t link = 0; link < 3; ++link) {
    for (int wrong = 0; wrong < 2; ++wrong) {
      SCOPED_TRACE(fmt::format("unit {}, rank {}", link, wrong));
      run_local(2, [&](const ProcessGroup& group) { expect_named(group, GetParam(), wrong, link); });
    }
  }
}

TEST_P(OneSidedStepTest, ARankThatLeavesAStepIsNamedToAllAsProcesses) {
  for (std::size_t link = 0; link < 3; link += 2) {
    SCOPED_TRACE(link);
    expect_good_processes(3, quick(), [&](const ProcessGroup& group) { expect_named(group, GetParam(), 1, link); });
  }
}

TEST(OneSidedReasonTest, WhatTheProgramHasHandledIsNotTheReason) {
  run_local(2, [](const ProcessGroup& group) {
    FullyShardedDataParallel<Chain> model(Chain(), group);
    for (int i = 0; i < 2; ++i) step(model, 0, std::nullopt);
    const at::Tensor input = at::ones({2, 5}, at::kDouble).requires_grad_() * 2;
    input.register_hook([&](const at::Tensor&) {
      if (group.rank() == 1) throw Thrown();
    });
    const at::Tensor result = model(input);
    result.register_hook([&](const at::Tensor&) {
      EXPECT_THROW(model(at::ones({2, 4}, at::kDouble)), std::exception);
    });
    expect_error_soon(
        [&] {
          try {
            result.sum().backward();
          } catch (const std::exception&) {
            if (group.rank() != 1) throw;
          }
          group.barrier();
        },
        {"rank 1 left backward of a sharded model: an exception in autograd"});
  });
}

// Each collective of a step compares which call the ranks are in, so a rank that takes another step is an error, too.
TEST(OneSidedStepKindTest, ARankThatTakesAnotherStepIsNamedToAll) {
  const std::map<std::string, std::function<void(FullyShardedDataParallel<Chain>&)>> others = {
      {"no gradients",
       [](auto& model) {
         const at::NoGradGuard no_grad;
         model(at::ones({2, 5}, at::kDouble));
       }},
      {"no backward",
       [](auto& model) {
         model(at::ones({2, 5}, at::kDouble));
       }},
      {"no synchronization",
       [](auto& model) {
         const auto no_sync = model.no_sync();
         step(model, 0, std::nullopt);
       }},
  };
  for (const auto& [name, other] : others) {
    SCOPED_TRACE(name);
    run_local(3, [&, &other_step = other](const ProcessGroup& group) {
      FullyShardedDataParallel<Chain> model(Chain(), group);
      for (int i = 0; i < 2; ++i) step(model, 0, std::nullopt);
      const auto two_steps = [&] {
        for (int i = 0; i < 2; ++i) {
          if (group.rank() == 1) {
            other_step(model);
          } else {
            step(model, 0, std::nullopt);
          }
        }
      };
      expect_error_soon(two_steps, {"rank 1", "in all_gather_into", "in reduce_scatter_into"});
    });
  }
}

// With this switch, a rank that evaluates gathers elements of another size.
TEST(OneSidedStepKindTest, ARankThatEvaluatesInFullPrecisionIsNamedToAll) {
  ASSERT_EQ(::setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1", 1), 0);
  run_local(3, [&](const ProcessGroup& group) {
    Options options;
    options.mixed_precision.param_dtype = at::kFloat;
    FullyShardedDataParallel<Chain> model(Chain(), group, options);
    const auto forward = [&](bool trains) {
      model.train(trains);
      model(at::ones({2, 5}, at::kDouble)).sum().backward();
    };
    for (const bool trains : {true, false, true}) forward(trains);
    expect_error_soon([&] { forward(group.rank() != 1); },
                      {"forward of a sharded model", "rank 0 has training true and rank 1 has training false"});
    forward(false);
    forward(true);
  });
}

TEST_P(OneSidedStepTest, ARankThatLeavesAStepIsNamedToTheReplicasToo) {
  run_local(4, [&](const ProcessGroup& group) {
    const HybridGroups groups = hybrid_groups(group, 2);
    Options options;
    options.strategy = ShardingStrategy::hybrid_shard;
    options.replicas = groups.replicas;
    FullyShardedDataParallel<Chain> model(Chain(), groups.shards, options);
    for (int i = 0; i < 2; ++i) step(model, 1, std::nullopt);
    const auto two_steps = [&] {
      for (int i = 0; i < 2; ++i) step(model, 1, group.rank() == 2 ? std::optional(GetParam()) : std::nullopt);
    };
    expect_error_soon(two_steps, {group.rank() == 2 ? "" : "left"});
  });
}

TEST_P(OneSidedStepTest, IfAllRanksLeaveAStepTheModelStaysUsable) {
  run_local(3, [](const ProcessGroup& group) {
    FullyShardedDataParallel<Chain> model(Chain(), group);
    for (std::size_t link = 0; link < 3; ++link) {
      step(model, link, std::nullopt);
      EXPECT_THROW(step(model, link, GetParam()), std::exception);
      model->links[link]->throws.reset();
      expect_usable(group);
      step(model, link, std::nullopt);
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp

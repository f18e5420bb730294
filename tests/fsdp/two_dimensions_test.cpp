// FSDP of a tensor parallel model on a mesh of two dimensions, compared with one process that trains the full model.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include "fsdp/small_model.h"
#include "support/chaos.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/activation_checkpoint.h"
#include "tessera/fsdp/meta_init.h"
#include "tessera/layout/mesh_layout.h"
#include "tessera/state/load.h"
#include "tessera/state/module_state.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/state/save.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/tensor_parallel.h"

namespace tessera::fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;
using testing::SampleIfSanitized;
using testing::TemporaryDirectory;
using Sizes = std::vector<std::int64_t>;

// Has sizes that are not divisible by all meshes, a norm that is not parallel, and a parameter of the model itself.
struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto compute = [this](const at::Tensor& y) { return y + down(at::tanh(up(norm(y)))); };
    return computes_again ? activation_checkpoint(compute, x) : compute(x);
  }
  bool computes_again = false;
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({6})};
  ParallelLinear up{6, 11}, down{11, 6};
};
TORCH_MODULE(Mlp);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("ids", ids);
    scale = register_parameter("scale", at::ones({6}));
    register_module("first", first);
    register_module("second", second);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) { return head(second(first(ids(x) * scale))); }
  ParallelEmbedding ids{9, 6};
  at::Tensor scale;
  Wrap<Mlp> first, second;
  Wrap<ParallelLinear> head{6, 5};
};
TORCH_MODULE(Net);

const ParallelPlan kPlan = {{"ids", RowwiseParallel{}},
                            {"*.up", ColwiseParallel{}},
                            {"*.down", RowwiseParallel{}},
                            {"head", ColwiseParallel{Placement::replicate(), Placement::replicate()}}};

Net make_net() {
  Net net;
  fill(*net);
  return net;
}

at::Tensor ids_of(int step, int batch) { return at::arange(6, at::kLong).mul(5).add(3 * step + batch).remainder(9); }

// A model on a mesh [dp, tp] and its optimizer.
struct TrainedOnMesh {
  TrainedOnMesh(const DeviceMesh& on, const Options& options) : TrainedOnMesh(on, options, make_net()) {}
  TrainedOnMesh(const DeviceMesh& on, const Options& options, const Net& net)
      : mesh(on),
        model(parallelized(net, on), on.group("dp"), options),
        optimizer(model.parameters(), torch::optim::AdamWOptions(0.02)) {}

  static Net parallelized(Net net, const DeviceMesh& on) {
    parallelize_module(*net, on["tp"], kPlan);
    return net;
  }

  // Returns the loss over all batches and the norm of the gradient before clipping.
  std::pair<double, double> step(int step) {
    const double loss =
        backward_of_batches(model, kBatches, [&](int batch) { return loss_of(model(ids_of(step, batch))); });
    const double norm = model.clip_grad_norm_(0.5).item<double>();
    optimizer.step();
    return {loss, norm};
  }
  StateDict state() { return {{"model", model.state_dict()}, {"optim", model.optim_state_dict(optimizer)}}; }

  DeviceMesh mesh;
  FullyShardedDataParallel<Net> model;
  torch::optim::AdamW optimizer;
};

// One process with the original layers.
struct Alone {
  Net net = make_net();
  torch::optim::AdamW optimizer{unique_params(*net), torch::optim::AdamWOptions(0.02)};

  std::pair<double, double> step(int step) {
    for (const at::Tensor& param : net->parameters()) param.mutable_grad().reset();
    double sum = 0;
    for (int batch = 0; batch < kBatches; ++batch) {
      const at::Tensor loss = loss_of(net->forward(ids_of(step, batch))) / kBatches;
      loss.backward();
      sum += loss.item<double>();
    }
    double power = 0;
    for (const at::Tensor& param : unique_params(*net)) power += param.grad().square().sum().item<double>();
    const double norm = std::sqrt(power);
    for (const at::Tensor& param : unique_params(*net)) param.mutable_grad().mul_(std::min(1.0, 0.5 / (norm + 1e-6)));
    optimizer.step();
    return {sum, norm};
  }
};

void on_mesh(const Sizes& shape, FunctionRef<void(const DeviceMesh& mesh)> f) {
  run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
    f(DeviceMesh(group, shape, {"dp", "tp"}));
  });
}

template <typename Model>
void expect_steps(Model& model, int from, int to, const std::vector<std::pair<double, double>>& expected,
                  const std::string& what) {
  for (int step = from; step < to; ++step) {
    const auto [loss, norm] = model.step(step);
    EXPECT_NEAR(loss, expected[static_cast<std::size_t>(step)].first, 1e-10) << what << ", step " << step;
    EXPECT_NEAR(norm, expected[static_cast<std::size_t>(step)].second, 1e-10) << what << ", step " << step;
  }
}

std::vector<std::pair<double, double>> expected_steps() {
  Alone alone;
  std::vector<std::pair<double, double>> steps;
  for (int step = 0; step < 6; ++step) steps.push_back(alone.step(step));
  return steps;
}

const std::vector<Sizes> kMeshes = {{1, 1}, {1, 2}, {2, 1}, {2, 2}, {1, 4}, {3, 2}, {2, 3}, {4, 2}, {2, 4}, {1, 8}};

TEST(TwoDimensionsTest, ATrainingIsThatOfOneProcess) {
  const auto expected = expected_steps();
  SampleIfSanitized sample(13);
  for (const Sizes& shape : kMeshes) {
    for (const Options& options : kWays) {
      if (!sample.takes_next()) continue;
      on_mesh(shape, [&](const DeviceMesh& mesh) {
        TrainedOnMesh one(mesh, options);
        expect_steps(one, 0, 4, expected, mesh.to_string());
      });
    }
  }
}

// Saves after the third step on `savers`. Resumes on those of `loaders` that the sample takes, and in one process.
void save_and_go_on(const Sizes& savers, const Options& saved, const std::vector<std::pair<Sizes, Options>>& loaders,
                    SampleIfSanitized& sample) {
  const auto expected = expected_steps();
  const TemporaryDirectory directory;
  on_mesh(savers, [&](const DeviceMesh& mesh) {
    TrainedOnMesh one(mesh, saved);
    expect_steps(one, 0, 3, expected, "before");
    save(one.state(), directory.path(), mesh.group());
  });
  for (const auto& [shape, loaded] : loaders) {
    if (!sample.takes_next()) continue;
    on_mesh(shape, [&, &options = loaded](const DeviceMesh& mesh) {
      TrainedOnMesh one(mesh, options);
      StateDict state = one.state();
      load(state, directory.path(), mesh.group());
      one.model.load_state_dict(state.at("model").get<Dict>());
      one.model.load_optim_state_dict(one.optimizer, state.at("optim").get<Dict>());
      expect_steps(one, 3, 6, expected, mesh.to_string());
    });
  }
  Alone alone;
  StateDict state{{"model", get_model_state_dict(*alone.net)},
                  {"optim", get_optimizer_state_dict(*alone.net, alone.optimizer)}};
  load(state, directory.path());
  set_optimizer_state_dict(*alone.net, alone.optimizer, state.at("optim").get<Dict>());
  expect_steps(alone, 3, 6, expected, "one process");
}

TEST(TwoDimensionsTest, SavedOnOneMeshItGoesOnOnOthersAndInOneProcess) {
  std::vector<std::pair<Sizes, Options>> loaders;
  for (const Sizes& shape : {Sizes{1, 1}, Sizes{3, 1}, Sizes{1, 2}, Sizes{2, 2}, Sizes{2, 4}}) {
    loaders.emplace_back(shape, kWays[0]);
  }
  SampleIfSanitized sample(4);
  for (const Sizes& savers : {Sizes{1, 1}, Sizes{2, 2}, Sizes{1, 3}}) save_and_go_on(savers, kWays[0], loaders, sample);
}

TEST(TwoDimensionsTest, SavedInOneWayItGoesOnInOthers) {
  const std::vector<std::pair<Sizes, Options>> loaders = {{{3, 2}, kWays[0]}, {{2, 2}, kWays[1]}, {{2, 3}, kWays[4]}};
  SampleIfSanitized sample(3), of_loaders(2);
  for (const Options& saved : kWays) {
    if (sample.takes_next()) save_and_go_on({2, 2}, saved, loaders, of_loaders);
  }
}

TEST(TwoDimensionsTest, AFullStateIsThatOfOneProcessAndGoesOnOnAnyMesh) {
  const auto expected = expected_steps();
  Alone alone;
  for (int step = 0; step < 3; ++step) alone.step(step);
  const StateDict unsharded = get_model_state_dict(*alone.net);
  const StateDict of_optimizer = get_optimizer_state_dict(*alone.net, alone.optimizer);
  SampleIfSanitized sample(4);
  for (const Options& options : kWays) {
    for (const bool rank0_only : {true, false}) {
      if (!sample.takes_next()) continue;
      on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
        TrainedOnMesh one(mesh, options);
        expect_steps(one, 0, 3, expected, "before");
        const FullStateOptions full{.rank0_only = rank0_only};
        const StateDict model = one.model.state_dict(StateDictType::full, full);
        const StateDict optim = one.model.optim_state_dict(one.optimizer, StateDictType::full, full);
        EXPECT_EQ(model.empty(), rank0_only && mesh.local_rank(0) != 0);
        if (!model.empty()) {
          for (const auto& [name, value] : unsharded) {
            const at::Tensor found = model.at(name).get<at::Tensor>();
            EXPECT_TRUE(at::allclose(found, value.get<at::Tensor>(), 1e-9, 1e-11)) << to_string(name);
          }
          for (const auto& [name, state] : of_optimizer.at("state").get<Dict>()) {
            const at::Tensor found = optim.at("state").get<Dict>().at(name).get<Dict>().at("exp_avg").get<at::Tensor>();
            const at::Tensor wanted = state.get<Dict>().at("exp_avg").get<at::Tensor>();
            EXPECT_TRUE(at::allclose(found, wanted, 1e-9, 1e-11)) << to_string(name);
          }
        }
        // A new model resumes from the saved state.
        TrainedOnMesh other(mesh, options);
        other.model.load_state_dict(model, full);
        other.model.load_optim_state_dict(other.optimizer, optim, full);
        expect_steps(other, 3, 6, expected, "after");
      });
    }
  }
}

std::optional<DTensor> dtensor_in(const Value& value) {
  const auto* part = value.get_if<std::shared_ptr<Checkpointable>>();
  return part != nullptr ? DTensor::from_checkpointable(*part) : std::nullopt;
}

TEST(TwoDimensionsTest, AShardedStateMayConsistOfDTensorsOnTheMesh) {
  const auto expected = expected_steps();
  const StateOptions all{.rank0_only = false};
  for (const bool use_orig_params : {true, false}) {
    on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
      const Options options = options_of(ShardingStrategy::full_shard, use_orig_params);
      TrainedOnMesh one(mesh, options), other(mesh, options_of(ShardingStrategy::full_shard, !use_orig_params));
      expect_steps(one, 0, 3, expected, "before");
      const StateDict rows = one.model.state_dict(StateDictType::sharded, {.mesh = mesh});
      const StateDict optim = one.model.optim_state_dict(one.optimizer, StateDictType::sharded, {.mesh = mesh});
      const StateDict full = one.model.state_dict(StateDictType::full, all);
      for (const auto& [name, value] : rows) {
        const auto tensor = dtensor_in(value);
        ASSERT_TRUE(tensor) << to_string(name);
        EXPECT_EQ(tensor->device_mesh(), mesh);
        EXPECT_TRUE(tensor->placements()[0].is_shard(0));
        EXPECT_TRUE(at::equal(tensor->full_tensor(), full.at(name).get<at::Tensor>())) << to_string(name);
      }
      EXPECT_EQ(dtensor_in(rows.at("first.up.weight"))->placements(),
                (Placements{Placement::shard(0), Placement::shard(0)}));
      EXPECT_EQ(dtensor_in(rows.at("first.down.weight"))->placements(),
                (Placements{Placement::shard(0), Placement::shard(1)}));
      EXPECT_EQ(dtensor_in(rows.at("scale"))->placements(), (Placements{Placement::shard(0), Placement::replicate()}));
      other.model.load_state_dict(rows);
      other.model.load_optim_state_dict(other.optimizer, optim);
      expect_steps(other, 3, 6, expected, "after");
      EXPECT_ERROR(one.model.state_dict(StateDictType::sharded, {.mesh = mesh["dp"]}), ErrorCode::invalid_argument,
                   "the mesh is DeviceMesh(dp=2), expected one with the dimensions of the mesh of the tensor parallel");
    });
  }
}

// PyTorch: test_fsdp_tp_extension_grad.
TEST(TwoDimensionsTest, AStepSendsWhatFsdpAndTheParallelLayersSend) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    TrainedOnMesh one(mesh, {});
    const auto step = [&] { loss_of(one.model(ids_of(0, static_cast<int>(mesh.local_rank(0))))).backward(); };
    step();  // the first one compares the order of units
    const CommDebugMode mode(mesh.group());
    step();
    // FSDP gathers its 4 units, 2 of them again in backward, and reduces the gradients of each. The layers sum the
    // results of ids and both down, and the gradients of the inputs of both up and of head. The results of head, which
    // are uneven, are gathered by an all-to-all.
    EXPECT_THAT(mode.counts(), ElementsAre(Pair("all_gather_into", 4 + 2), Pair("all_reduce", 3 + 3),
                                           Pair("all_to_all", 1), Pair("reduce_scatter_into", 4)));
    for (const at::Tensor& param : one.model.parameters()) {
      EXPECT_FALSE(param.grad().isnan().any().item<bool>());
    }
  });
}

// PyTorch: test_fsdp_tp_sync_module_state.
TEST(TwoDimensionsTest, TheFirstRanksPartsAreThoseOfAllRanksThatHaveTheSameOnes) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    Net net = TrainedOnMesh::parallelized(make_net(), mesh);
    for (const at::Tensor& param : net->parameters()) param.detach().fill_(10 + mesh.group().rank());
    Options options;
    options.sync_module_states = true;
    FullyShardedDataParallel<Net> model(net, mesh.group("dp"), options);
    model.summon_full_params([&] {
      for (const auto& param : model.module_ptr()->named_parameters()) {
        const double expected = static_cast<double>(10 + mesh.local_rank(1));
        EXPECT_TRUE(at::equal(param.value(), at::full_like(param.value(), expected))) << param.key();
      }
    });
  });
}

TEST(TwoDimensionsTest, WithoutFsdpAStateDictHoldsDTensors) {
  const auto expected = expected_steps();
  const TemporaryDirectory directory;
  const auto train = [&](const ProcessGroup& group, int from, int to) {
    const DeviceMesh mesh(group, {group.size()}, {"tp"});
    Alone one;
    parallelize_module(*one.net, mesh, kPlan);
    StateDict state{{"model", get_model_state_dict(*one.net)},
                    {"optim", get_optimizer_state_dict(*one.net, one.optimizer)}};
    if (from != 0) {
      load(state, directory.path(), group);
      set_optimizer_state_dict(*one.net, one.optimizer, state.at("optim").get<Dict>());
    }
    for (int step = from; step < to; ++step) {
      double sum = 0;
      for (const at::Tensor& param : one.net->parameters()) param.mutable_grad().reset();
      for (int batch = 0; batch < kBatches; ++batch) {
        const at::Tensor loss = loss_of(one.net->forward(ids_of(step, batch))) / kBatches;
        loss.backward();
        sum += loss.item<double>();
      }
      EXPECT_NEAR(sum, expected[static_cast<std::size_t>(step)].first, 1e-10);
      // Equal to those that the one process clipped.
      const double norm = expected[static_cast<std::size_t>(step)].second;
      for (const at::Tensor& param : one.net->parameters()) {
        param.mutable_grad().mul_(std::min(1.0, 0.5 / (norm + 1e-6)));
      }
      one.optimizer.step();
    }
    state = {{"model", get_model_state_dict(*one.net)}, {"optim", get_optimizer_state_dict(*one.net, one.optimizer)}};
    const auto& weight = state.at("model").get<Dict>().at("first.up.weight");
    const auto tensor = DTensor::from_checkpointable(weight.get<std::shared_ptr<Checkpointable>>());
    ASSERT_TRUE(tensor);
    EXPECT_EQ(tensor->to_string(), "DTensor of size [11, 6] as [S(0)] on " + mesh.to_string());
    EXPECT_TRUE(tensor->local_tensor().is_alias_of(one.net->first->up->weight));
    if (to == 3) save(state, directory.path(), group);

    // A full state is sharded.
    Net other = make_net();
    parallelize_module(*other, mesh, kPlan);
    StateDict full_state;
    for (const auto& [name, value] : state.at("model").get<Dict>()) {
      const auto* sharded = value.get_if<std::shared_ptr<Checkpointable>>();
      full_state[name] =
          sharded != nullptr ? DTensor::from_checkpointable(*sharded)->full_tensor() : value.get<at::Tensor>();
    }
    set_model_state_dict(*other, full_state);
    EXPECT_TRUE(at::equal(other->first->up->weight, one.net->first->up->weight));
    EXPECT_TRUE(at::equal(other->second->down->weight, one.net->second->down->weight));
  };
  run_local(2, [&](const ProcessGroup& group) { train(group, 0, 3); });
  run_local(3, [&](const ProcessGroup& group) { train(group, 3, 6); });
}

TEST(TwoDimensionsTest, ActivationsThatAreComputedAgainAreTheSame) {
  const auto expected = expected_steps();
  on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
    Net net = make_net();
    net->first->computes_again = net->second->computes_again = true;
    TrainedOnMesh one(mesh, {}, net);
    expect_steps(one, 0, 4, expected, "checkpointed");
  });
}

TEST(TwoDimensionsTest, InMixedPrecisionALossIsNear) {
  const auto expected = expected_steps();
  on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
    Options options;
    options.mixed_precision.param_dtype = at::kBFloat16;
    options.mixed_precision.reduce_dtype = at::kFloat;
    TrainedOnMesh one(mesh, options);
    for (int step = 0; step < 3; ++step) {
      const double loss = one.step(step).first, wanted = expected[static_cast<std::size_t>(step)].first;
      EXPECT_NEAR(loss, wanted, 0.02 * wanted);
      EXPECT_NE(loss, wanted);
    }
  });
}

TEST(TwoDimensionsTest, BuiltOnMetaNoRankEverHasItWhole) {
  const auto expected = expected_steps();
  on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
    const TemporaryDirectory directory;
    const Net net = [] {
      const MetaInit without_memory;
      Net made;
      made->to(at::kDouble);
      return made;
    }();
    Options options;
    options.param_init_fn = [](torch::nn::Module& module) {
      for (const at::Tensor& param : module.parameters(/*recurse=*/false)) param.detach().zero_();
    };
    TrainedOnMesh one(mesh, options, net);
    // Each rank loads its values from a checkpoint.
    StateDict state = one.model.state_dict();
    TrainedOnMesh reference(mesh, options);
    one.model.load_state_dict(reference.model.state_dict());
    expect_steps(one, 0, 4, expected, "from meta");
  });
}

// Gives a module's own parameters random values that do not depend on the ranks.
void set_random(torch::nn::Module& module) {
  PhiloxGenerator generator(7);
  if (auto* parallel = dynamic_cast<TensorParallel*>(&module)) return parallel->initialize(generator);
  for (const at::Tensor& param : module.parameters(/*recurse=*/false)) param.detach().fill_(0.5);
}

// Built on meta, shards are the parts of one random tensor: they differ, and those of replicas do not.
TEST(TwoDimensionsTest, BuiltOnMetaRandomValuesAreThoseOfOneProcess) {
  Net expected = make_net();
  expected->apply([](torch::nn::Module& module) { set_random(module); });
  const auto values = expected->named_parameters();
  const auto expect_values = [&](const DeviceMesh& tp, const ProcessGroup& shards, Options options) {
    Net net = [] {
      const MetaInit without_memory;
      Net made;
      made->to(at::kDouble);
      return made;
    }();
    parallelize_module(*net, tp, kPlan);
    options.param_init_fn = set_random;
    FullyShardedDataParallel<Net> model(net, shards, options);
    std::size_t parallel = 0;
    model.summon_full_params([&] {
      for (const auto& module : model.module_ptr()->named_modules("", false)) {
        const auto* sharded = dynamic_cast<const DTensorParameters*>(module.value().get());
        for (const auto& param : module.value()->named_parameters(false)) {
          const std::string name = module.key() + "." + param.key();
          const DTensorSpec* spec = sharded != nullptr ? sharded->dtensor_spec(param.key()) : nullptr;
          if (spec == nullptr) {
            EXPECT_TRUE(at::equal(param.value(), values[name])) << name;
            continue;
          }
          ++parallel;
          const LocalShape part = spec->layout.local_shape(*spec->mesh.coordinate());
          at::Tensor wanted = values[name].detach();
          for (std::size_t d = 0; d < part.sizes.size(); ++d)
            wanted = wanted.narrow(static_cast<std::int64_t>(d), part.offsets[d], part.sizes[d]);
          EXPECT_TRUE(at::equal(param.value(), wanted)) << name;
        }
      }
    });
    EXPECT_GT(parallel, 6u);
  };
  on_mesh({2, 2}, [&](const DeviceMesh& mesh) { expect_values(mesh["tp"], mesh.group("dp"), {}); });
  on_mesh({1, 3}, [&](const DeviceMesh& mesh) { expect_values(mesh["tp"], mesh.group("dp"), {}); });
  run_local(8, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2, 2}, {"replicas", "shards", "tp"});
    Options options;
    options.strategy = ShardingStrategy::hybrid_shard;
    options.replicas = mesh.group("replicas");
    expect_values(mesh["tp"], mesh.group("shards"), options);
  });
}

TEST(TwoDimensionsTest, WhatDoesntFitIsRefused) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    // The ranks in the group of the wrong dimension have different parts.
    const Net net = TrainedOnMesh::parallelized(make_net(), mesh);
    EXPECT_ERROR(FullyShardedDataParallel<Net>(net, mesh.group("tp")), ErrorCode::invalid_argument,
                 "such as the group of the mesh's other dimension");

    TrainedOnMesh one(mesh, {});
    EXPECT_ERROR(one.model.state_dict(StateDictType::local), ErrorCode::unsupported, "tensor parallel");
    StateDict state = one.model.state_dict(StateDictType::full, {.rank0_only = false});
    state["first.up.weight"] = at::zeros({6, 6}, at::kDouble);  // this rank's part, not the full tensor
    EXPECT_ERROR(one.model.load_state_dict(state), ErrorCode::invalid_argument,
                 "'first.up.weight' has shape [6, 6], expected [11, 6]");
    // A state from a mesh with other ranks. If it consists of DTensors, it is loaded.
    TrainedOnMesh by_columns(DeviceMesh(mesh.group(), {1, 4}, {"dp", "tp"}), {});
    by_columns.step(0);
    one.model.load_state_dict(by_columns.model.state_dict());
    EXPECT_EQ(one.model.state_dict(StateDictType::full, {.rank0_only = false}),
              by_columns.model.state_dict(StateDictType::full, {.rank0_only = false}));
    TrainedOnMesh by_rows(DeviceMesh(mesh.group(), {4, 1}, {"dp", "tp"}), {});
    EXPECT_ERROR(one.model.load_state_dict(by_rows.model.state_dict()), ErrorCode::invalid_argument,
                 "is sharded differently");
    // Parallelized after FSDP.
    EXPECT_ERROR(parallelize_module(*one.model.module_ptr(), mesh["tp"], kPlan), ErrorCode::invalid_argument,
                 "is already parallelized");
    FullyShardedDataParallel<Net> plain(make_net(), mesh.group("dp"));
    EXPECT_ERROR(parallelize_module(*plain.module_ptr(), mesh["tp"], kPlan), ErrorCode::invalid_argument,
                 "parallelize the model before anything else changes its parameters");

    Net for_lbfgs = TrainedOnMesh::parallelized(make_net(), mesh);
    const torch::optim::LBFGS lbfgs(for_lbfgs->parameters());
    EXPECT_ERROR(get_optimizer_state_dict(*for_lbfgs, lbfgs), ErrorCode::unsupported, "LBFGS");
    StateDict changed = get_model_state_dict(*for_lbfgs);
    changed["first.up.weight"] = at::zeros({6, 6}, at::kDouble);
    changed["first.down.weight"] = 3;
    EXPECT_ERROR(
        set_model_state_dict(*for_lbfgs, changed), ErrorCode::invalid_argument,
        "size mismatch: 'first.up.weight' is [6, 6], expected [11, 6]; not a tensor: 'first.down.weight' is int");
  });
}

}  // namespace
}  // namespace tessera::fsdp

// State dicts of models of other forms: with activation checkpoints, a module under two names, ignored modules.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <string>
#include <typeinfo>
#include <vector>

#include "fsdp/small_model.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/activation_checkpoint.h"
#include "tessera/state/module_state.h"

namespace tessera::fsdp {
namespace {

const StateOptions kOnEachRank{.rank0_only = false};

template <typename Holder>
struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl() {
    first = register_module("first", Holder(5));
    second = register_module("second", Holder(5));
    tail = register_module("tail", torch::nn::Linear(5, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return tail(second(first(x))); }
  Holder first{nullptr}, second{nullptr};
  torch::nn::Linear tail{nullptr};
};
template <typename Holder>
using TwoLayers = torch::nn::ModuleHolder<TwoLayersImpl<Holder>>;

template <typename Model>
Model filled() {
  Model model;
  fill(*model);
  return model;
}

template <typename Model>
void train_a_step(Model& model, const at::Tensor& input) {
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  loss_of(model(input)).backward();
  optimizer.step();
}

std::vector<std::string> names_of(const StateDict& state) {
  std::vector<std::string> names;
  for (const auto& [key, value] : state) names.push_back(std::get<std::string>(key));
  return names;
}

// PyTorch: test_load_activation_checkpointed_module, test_fsdp_state_dict_with_activation_checkpoint,
// test_state_dict_with_manual_ac_wrapper.
template <typename From, typename To>
void expect_exchange() {
  SCOPED_TRACE(std::string(typeid(From).name()) + " to " + typeid(To).name());
  From from = filled<From>();
  To to;
  to->to(at::kDouble);
  const StateDict plain = get_model_state_dict(*from);
  set_model_state_dict(*to, plain);
  EXPECT_EQ(get_model_state_dict(*to), plain);
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<From> trained(filled<From>(), group, way);
      train_a_step(trained, batch_of(0, group.rank()));
      const StateDict full = trained.state_dict(StateDictType::full, kOnEachRank);
      EXPECT_EQ(names_of(full), names_of(plain));
      EXPECT_NE(full, plain);
      for (const auto type : {StateDictType::sharded, StateDictType::full, StateDictType::local}) {
        FullyShardedDataParallel<To> other(filled<To>(), group, way);
        other.load_state_dict(trained.state_dict(type, kOnEachRank));
        EXPECT_EQ(other.state_dict(StateDictType::full, kOnEachRank), full);
      }
    }
  });
}

TEST(FsdpModelStatesTest, CheckpointedModelsAndOthersLoadTheStatesOfEachOther) {
  using Plain = TwoLayers<Wrap<Block>>;
  using Inside = TwoLayers<Wrap<Checkpointed<Block>>>;
  using Outside = TwoLayers<Checkpointed<Wrap<Block>>>;
  expect_exchange<Plain, Inside>();
  expect_exchange<Inside, Plain>();
  expect_exchange<Outside, Plain>();
  expect_exchange<Plain, Outside>();
}

struct OneModuleTwoNamesImpl : torch::nn::Module {
  OneModuleTwoNamesImpl() {
    first = register_module("first", Wrap<Block>(5));
    again = register_module("again", first);
    head = register_module("head", torch::nn::Linear(5, 5));
    register_parameter("tied", head->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return head(again(head(first(x)))); }
  Wrap<Block> first{nullptr}, again{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(OneModuleTwoNames);

// PyTorch: test_shared_module_and_shared_parameter.
TEST(FsdpModelStatesTest, AModuleUnderTwoNamesIsInTheStateUnderBoth) {
  run_local(2, [](const ProcessGroup& group) {
    OneModuleTwoNames plain = filled<OneModuleTwoNames>();
    for (const Options& way : kWays) {
      FullyShardedDataParallel<OneModuleTwoNames> model(filled<OneModuleTwoNames>(), group, way);
      train_a_step(model, batch_of(0, group.rank()));
      const StateDict full = model.state_dict(StateDictType::full, kOnEachRank);
      EXPECT_EQ(names_of(full), names_of(get_model_state_dict(*plain)));
      for (const char* name : {"up.weight", "up.bias", "down.weight", "down.bias"}) {
        EXPECT_EQ(full.at(std::string("first.") + name), full.at(std::string("again.") + name)) << name;
      }
      EXPECT_EQ(full.at("tied"), full.at("head.weight"));
      const StateDict rows = model.state_dict(StateDictType::sharded, {.mesh = DeviceMesh::from_group(group)});
      for (const StateDict& state : {full, model.state_dict(), rows, model.state_dict(StateDictType::local)}) {
        FullyShardedDataParallel<OneModuleTwoNames> other(filled<OneModuleTwoNames>(), group, way);
        other.load_state_dict(state);
        EXPECT_EQ(other.state_dict(StateDictType::full, kOnEachRank), full);
      }
      set_model_state_dict(*plain, full);
      EXPECT_EQ(get_model_state_dict(*plain), full);
    }
  });
}

// PyTorch: test_state_dict_with_ignored_modules.
TEST(FsdpModelStatesTest, WhatIsIgnoredIsNotCopiedIntoStatesOfShards) {
  run_local(2, [](const ProcessGroup& group) {
    for (const bool ignores_more : {true, false}) {
      for (const bool low_precision : {true, false}) {
        const SmallModel plain = make_model();
        Options options;
        options.ignored_modules = {plain->first.ptr()};
        if (ignores_more) options.ignored_modules.push_back(plain->inner.ptr());
        if (low_precision) {
          options.mixed_precision.param_dtype = options.mixed_precision.reduce_dtype = at::kFloat;
        }
        FullyShardedDataParallel<SmallModel> model(plain, group, options);
        std::vector<std::string> ignored = {"first.up.weight", "first.up.bias", "first.down.weight", "count"};
        if (ignores_more) ignored.insert(ignored.end(), {"inner.weight", "inner.bias"});
        const auto tensors = plain->named_parameters();
        const StateDict local = model.state_dict(StateDictType::local);
        const StateDict sharded = model.state_dict(),
                        on_cpu = model.state_dict(StateDictType::sharded, {.offload_to_cpu = true});
        const StateDict rows = model.state_dict(StateDictType::sharded, {.mesh = DeviceMesh::from_group(group)});
        const StateDict full = model.state_dict(StateDictType::full, kOnEachRank);
        EXPECT_NE(full.at("weight").get<at::Tensor>().data_ptr(), tensors["weight"].data_ptr());
        for (const std::string& name : ignored) {
          const at::Tensor& expected = name == "count" ? plain->count : tensors[name];
          for (const StateDict& state : {sharded, local, on_cpu, rows, full}) {
            EXPECT_EQ(state.at(name).get<at::Tensor>().data_ptr(), expected.data_ptr()) << name;
          }
        }
        EXPECT_EQ(sharded.contains("inner.weight") && sharded.at("inner.weight").is<at::Tensor>(), ignores_more);
        FullyShardedDataParallel<SmallModel> other(make_model(), group, Options());
        plain->first->up->bias.detach().fill_(7);
        other.load_state_dict(model.state_dict(StateDictType::full, kOnEachRank));
        EXPECT_EQ(other.state_dict(StateDictType::full, kOnEachRank),
                  model.state_dict(StateDictType::full, kOnEachRank));
      }
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp

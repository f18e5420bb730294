// Modules and parameters that are replaced, and shards that are left.

#include <ATen/ATen.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/TensorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::fsdp {
namespace {

using Model = FullyShardedDataParallel<SmallModel>;

// Replaces registered parameters, as ParameterDict does.
struct ReplaceableImpl : torch::nn::Module {
  ReplaceableImpl() {
    weight = register_parameter("weight", at::ones({4, 4}));
    register_parameter("tied", weight);
    register_parameter("other", at::ones({4}));
  }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, parameters_["weight"]) * parameters_["other"]; }
  void replace(const char* name, const at::Tensor& by) { parameters_[name] = by; }
  at::Tensor weight;
};
TORCH_MODULE(Replaceable);

TEST(FsdpReplacedTest, AParameterThatIsReplacedIsNamed) {
  run_local(2, [](const ProcessGroup& group) {
    for (const bool use_orig_params : {true, false}) {
      for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
        FullyShardedDataParallel<Replaceable> model(Replaceable(), group, options_of(strategy, use_orig_params));
        const at::Tensor x = at::ones({2, 4});
        model(x);
        for (const char* name : {"other", "tied"}) {  // also one that is no longer shared
          const at::Tensor before = model->named_parameters()[name];
          model->replace(name, at::ones({4}).set_requires_grad(true));
          EXPECT_ERROR(model(x), ErrorCode::invalid_argument,
                       std::string("parameter '") + name + "' was replaced by another tensor");
          model->replace(name, before);
        }
        model(x).sum().backward();  // the model stays usable
      }
    }
  });
}

TEST(FsdpReplacedTest, AModuleThatIsReplacedIsNamed) {
  run_local(2, [](const ProcessGroup& group) {
    Model model(make_model(), group);
    model->never->replace_module("up", torch::nn::Linear(7, 15));
    EXPECT_ERROR(model(batch_of(0, 0)), ErrorCode::invalid_argument, "parameter 'never.up.bias' was replaced");
    // New parameters are not sharded, and do no harm.
    Model larger(make_model(), group);
    larger->register_parameter("more", at::ones({2}));
    larger(batch_of(0, 0));
  });
}

TEST(FsdpNestedTest, ShardsThatAreLeftAreNotShardedAgain) {
  run_local(2, [](const ProcessGroup& group) {
    for (const bool use_orig_params : {true, false}) {
      SmallModel plain = make_model();
      std::vector<at::Tensor> full;
      {
        Model model(plain, group, options_of(ShardingStrategy::full_shard, use_orig_params));
        full = full_params(model);
      }
      EXPECT_ERROR(Model(plain, group), ErrorCode::invalid_argument,
                   "is a shard of a FullyShardedDataParallel that was destroyed");
      EXPECT_ERROR(FlatParamHandle({{"a", plain->inner->weight}}, group, {}), ErrorCode::invalid_argument,
                   "parameter 'a' is a shard of a flat parameter that was destroyed");
      std::size_t i = 0;
      for (at::Tensor& param : plain->parameters()) param.set_data(full[i++]);
      Model again(plain, group);
      SmallModel alone = make_model();
      backward_of_all(alone, {0}, 2);
      loss_of(again(batch_of(0, group.rank()))).backward();
      expect_same_grads(unsharded_grads(again), *alone);
    }
  });
}

TEST(FsdpNestedTest, AReplicatedModelIsShardedAfterwards) {
  SmallModel alone = make_model();
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    SmallModel plain = make_model();
    const Options replicated = options_of(ShardingStrategy::no_shard, true);
    loss_of(Model(plain, group, replicated)(batch_of(0, group.rank()))).detach();
    Model again(plain, group);
    loss_of(again(batch_of(0, group.rank()))).backward();
    expect_same_grads(unsharded_grads(again), *alone);
  });
}

TEST(FsdpNestedTest, FlatParametersAreNotFlattened) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor param = at::ones({4}).set_requires_grad(true);
    const FlatParamHandle handle({{"a", param}}, group, {});
    for (const at::Tensor& taken : {param, handle.flat_param()}) {
      EXPECT_ERROR(FlatParamHandle({{"b", taken}}, group, {}), ErrorCode::invalid_argument,
                   "parameter 'b' belongs to a flat parameter already");
    }
  });
}

// A tensor on a device that this machine lacks: it has no memory.
at::Tensor on_another_device() {
  return at::Tensor(c10::make_intrusive<c10::TensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::XLA), c10::scalarTypeToTypeMeta(at::kDouble), at::Device(at::kXLA, 0)));
}

TEST(FsdpNestedTest, UnitsOnSeveralDevicesAreRefused) {
  struct FarImpl : torch::nn::Module {
    FarImpl() {
      near = register_module("near", make_model());
      register_parameter("far", on_another_device());
    }
    SmallModel near{nullptr};
  };
  EXPECT_ERROR(FullyShardedDataParallel<FarImpl>(std::make_shared<FarImpl>()), ErrorCode::invalid_argument,
               "unit 'near", "is on cpu and unit '' on xla:0, expected one device for all units");
}

TEST(ApplyTest, AFunctionSeesFullParametersAndItsChangesAreKept) {
  run_local(2, [](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      Model model(make_model(), group, way);
      std::size_t modules = 0;
      model.apply([&](torch::nn::Module& module) {
        ++modules;
        if (auto* linear = dynamic_cast<torch::nn::LinearImpl*>(&module)) {
          EXPECT_EQ(linear->weight.dim(), 2);
          linear->weight.fill_(3);
        }
      });
      EXPECT_EQ(modules, make_model()->modules().size());
      model.summon_full_params([&] { EXPECT_EQ(model->inner->weight.sum().item<double>(), 105); });
      EXPECT_ERROR(model.apply(nullptr), ErrorCode::invalid_argument, "apply: the function is null");
    }
  });
}

TEST(FlatParamStateTest, FunctionsThatAreCalledInTheWrongOrderAreRefused) {
  run_local(2, [](const ProcessGroup& group) {
    FlatParamHandle handle({{"a", at::ones({3, 4}).set_requires_grad(true)}}, group, {});
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { handle.take_gradient(0); }, [&] { handle.write_back_unsharded(); },
             [&] { handle.write_back_unsharded_grad(); }, [&] { handle.unshard_grad(); }}) {
      EXPECT_ERROR(call(), ErrorCode::invalid_argument,
                   "the parameters from 'a' on are sharded, expected a call of unshard");
    }
    handle.unshard();
    handle.params()[0].sum().backward();
    handle.take_gradient(0);
    handle.start_reduce_gradient();
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { handle.start_reduce_gradient(); }, [&] { handle.prepare_gradient_for_backward(); },
             [&] { handle.drop_reset_gradients(); }, [&] { handle.set_comm_hook(nullptr); }}) {
      EXPECT_ERROR(call(), ErrorCode::invalid_argument, "a reduction of the gradient of 'a' is pending");
    }
    handle.finish_reduce_gradient();
    handle.unshard_grad();
    EXPECT_EQ(handle.params()[0].grad().sum().item<float>(), 12);
  });
}

// Flattens matrices in transposed form.
struct Transposed : FlatParamExtensions {
  at::Tensor pre_flatten_transform(const std::string&, const at::Tensor& parameter) override {
    return parameter.dim() == 2 ? parameter.t().contiguous() : parameter;
  }
  at::Tensor post_unflatten_transform(const std::string&, const at::Tensor& view) override {
    return view.dim() == 2 ? view.t() : view;
  }
};

TEST(FsdpExtensionsTest, AModelMayBeFlattenedInAnotherForm) {
  SmallModel alone = make_model();
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (Options options : kWays) {
      options.extensions = std::make_shared<Transposed>();
      if (!is_sharded(options.strategy)) {
        EXPECT_ERROR(Model(make_model(), group, options), ErrorCode::unsupported, "a unit has strategy no_shard");
        continue;
      }
      Model model(make_model(), group, options);
      EXPECT_EQ(model.handle(1).layout().params()[0].shape, (std::vector<std::int64_t>{7, 15}));
      loss_of(model(batch_of(0, group.rank()))).backward();
      expect_same_grads(unsharded_grads(model), *alone);
      const StateDict state = model.state_dict(StateDictType::full, {.rank0_only = false});
      EXPECT_EQ(state.at("inner.weight").get<at::Tensor>().sizes(), (std::vector<std::int64_t>{5, 7}));
      Model one(make_model(), ProcessGroup(), options);
      one.apply([](torch::nn::Module& module) {
        for (const at::Tensor& param : module.parameters(/*recurse=*/false)) param.zero_();
      });
      one.load_state_dict(state);
      const std::vector<at::Tensor> expected = alone->parameters(), found = full_params(one);
      for (std::size_t k = 0; k < found.size(); ++k) EXPECT_TRUE(at::equal(found[k], expected[k])) << k;
    }
    Options one_sided;
    if (group.rank() == 1) one_sided.extensions = std::make_shared<Transposed>();
    EXPECT_ERROR(Model(make_model(), group, one_sided), ErrorCode::invalid_argument, "extensions",
                 "expected the same on all ranks");
  });
}

}  // namespace
}  // namespace tessera::fsdp

// Models, options and calls at the edges: without parameters or gradients, with ignored modules, with results that the
// loss does not use, with packed sequences, copied, or differentiated twice.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/utils/rnn.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/grads.h"
#include "fsdp/small_model.h"
#include "support/error_matchers.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/fsdp/activation_checkpoint.h"
#include "tessera/fsdp/meta_init.h"

namespace tessera::fsdp {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> names_of_units(const ShardedModule& model) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < model.unit_count(); ++i) names.push_back(model.unit_name(i));
  return names;
}

TEST(FsdpEdgeTest, AModelWithoutParameters) {
  run_local(2, [](const ProcessGroup& group) {
    FullyShardedDataParallel<torch::nn::Sequential> model(torch::nn::Sequential{torch::nn::Tanh()}, group);
    EXPECT_EQ(model.unit_count(), 0u);
    EXPECT_TRUE(model.parameters().empty());
    const at::Tensor input = at::ones({2}).requires_grad_();
    model(input).sum().backward();
    EXPECT_TRUE(input.grad().defined());
    EXPECT_EQ(model.clip_grad_norm_(1.0).item<double>(), 0.0);
    EXPECT_TRUE(model.state_dict().empty());
    EXPECT_TRUE(model.state_dict(StateDictType::full).empty());
    model.summon_full_params([] {});
  });
}

TEST(FsdpEdgeTest, WithoutGradientsNothingIsClipped) {
  run_local(2, [](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      for (const double type : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
        EXPECT_EQ(model.clip_grad_norm_(1.0, type).item<double>(), 0.0);
      }
    }
  });
}

TEST(FsdpEdgeTest, IgnoredModulesOfOtherRanksOrOtherModels) {
  run_local(2, [](const ProcessGroup& group) {
    const SmallModel differs = make_model();
    Options options;
    options.ignored_modules = {group.rank() == 0 ? differs->first.ptr() : differs->never.ptr()};
    EXPECT_ERROR(FullyShardedDataParallel<SmallModel>(differs, group, options), ErrorCode::invalid_argument,
                 "expected the same on all ranks");
    options.ignored_modules = {make_model().ptr()};  // none of this model
    const FullyShardedDataParallel<SmallModel> model(make_model(), group, options);
    EXPECT_EQ(model.unit_count(), 6u);
  });
}

TEST(FsdpEdgeTest, TheModelItselfIsIgnored) {
  run_local(2, [](const ProcessGroup& group) {
    const SmallModel plain = make_model();
    Options options;
    options.ignored_modules = {plain.ptr()};
    FullyShardedDataParallel<SmallModel> model(plain, group, options);
    EXPECT_EQ(model.unit_count(), 0u);
    loss_of(model(batch_of(0, group.rank()))).backward();
    EXPECT_EQ(model->inner->weight.dim(), 2);
    EXPECT_TRUE(model->inner->weight.grad().defined());
  });
}

TEST(FsdpEdgeTest, IgnoredModulesStayOnMeta) {
  run_local(2, [](const ProcessGroup& group) {
    SmallModel plain = make_model();
    {
      const MetaInit without_memory;
      plain->never->up = torch::nn::Linear(7, 15);
      plain->never->replace_module("up", plain->never->up.ptr());
    }
    Options options;
    options.ignored_modules = {plain->never->up.ptr()};
    FullyShardedDataParallel<SmallModel> model(plain, group, options);
    loss_of(model(batch_of(0, group.rank()))).backward();
    EXPECT_TRUE(plain->never->up->weight.is_meta());
  });
}

struct ByNameImpl : torch::nn::Module {
  ByNameImpl() { linear = register_module("linear", Wrap<torch::nn::Linear>(4, 4)); }
  std::map<std::string, at::Tensor> forward(const std::map<std::string, at::Tensor>& inputs,
                                            const std::vector<at::Tensor>& list) {
    for (const auto& [name, tensor] : inputs) EXPECT_EQ(tensor.scalar_type(), at::kBFloat16) << name;
    for (const at::Tensor& tensor : list) EXPECT_EQ(tensor.scalar_type(), at::kBFloat16);
    return {{"sum", linear(inputs.at("a") + list.at(0))}};
  }
  Wrap<torch::nn::Linear> linear{nullptr};
};
TORCH_MODULE(ByName);

TEST(FsdpEdgeTest, InputsMayBeListsAndDicts) {
  run_local(2, [](const ProcessGroup& group) {
    Options options;
    options.mixed_precision.param_dtype = at::kBFloat16;
    FullyShardedDataParallel<ByName> model(ByName(), group, options);
    const at::Tensor x = at::ones({2, 4});
    model(std::map<std::string, at::Tensor>{{"a", x}}, std::vector<at::Tensor>{x}).at("sum").sum().backward();
    EXPECT_TRUE(unsharded_grads(model)[0].defined());
  });
}

struct TwoResultsImpl : torch::nn::Module {
  TwoResultsImpl() {
    used = register_module("used", Wrap<Block>(4));
    unused = register_module("unused", Wrap<Block>(4));
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    const at::Tensor y = used(x);
    return {y, unused(y)};
  }
  Wrap<Block> used{nullptr}, unused{nullptr};
};
TORCH_MODULE(TwoResults);

TEST(FsdpEdgeTest, ResultsThatTheLossDoesNotUse) {
  const auto make = [] {
    TwoResults plain;
    fill(*plain);
    return plain;
  };
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      TwoResults alone = make();
      FullyShardedDataParallel<TwoResults> model(make(), group, way);
      torch::optim::SGD optimizer(model.parameters(), 0.1), expected(alone->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        const at::Tensor input = at::linspace(0, 1, 8, at::kDouble).reshape({2, 4});
        const auto loss = [&](const auto& results) {  // of one result, of both, of one again
          return step == 1 ? loss_of(results.first) + loss_of(results.second) : loss_of(results.first);
        };
        model.zero_grad();
        alone->zero_grad();
        loss(model(input)).backward();
        loss(alone->forward(input)).backward();
        for (std::size_t i = 0; i < model.unit_count(); ++i)
          EXPECT_FALSE(model.handle(i).is_gathered() && is_sharded(way.strategy));
        optimizer.step();
        expected.step();
      }
      const std::vector<at::Tensor> found = full_params(model), params = alone->parameters();
      for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(found[i], params[i], 1e-10)) << i;
    }
  });
}

struct ScaledImpl : torch::nn::Module {
  ScaledImpl() { factor = register_parameter("factor", at::full({1}, 2.0)); }
  at::Tensor forward(const at::Tensor& x) { return x * factor; }
  at::Tensor factor;
};
TORCH_MODULE(Scaled);

TEST(FsdpEdgeTest, AUnitOfOneElement) {
  run_local(3, [](const ProcessGroup& group) {
    for (const bool writeback : {true, false}) {
      FullyShardedDataParallel<Scaled> model(Scaled(), group);
      model.summon_full_params([&] { model->factor.detach().fill_(5); }, {.writeback = writeback});
      EXPECT_EQ(model(at::ones({1})).item<float>(), writeback ? 5 : 2);
      model(at::ones({1})).sum().backward();
      EXPECT_EQ(unsharded_grads(model)[0].item<float>(), 1);
    }
  });
}

struct ContainersImpl : torch::nn::Module {
  ContainersImpl() {
    list->push_back(torch::nn::Linear(8, 8));
    list->push_back(torch::nn::Linear(2, 2));
    register_module("list", list);
    dict->update({{"a", torch::nn::Linear(2, 2).ptr()}});
    register_module("dict", dict);
  }
  torch::nn::ModuleList list;
  torch::nn::ModuleDict dict;
};
TORCH_MODULE(Containers);

TEST(FsdpEdgeTest, SizesDoNotMakeUnitsOfContainersNorCountIgnoredParameters) {
  Options options;
  options.policy = wrap_larger_than(5);
  EXPECT_THAT(names_of_units(FullyShardedDataParallel<Containers>(Containers(), {}, options)),
              ElementsAre("list.0", "list.1", "dict.a"));
  options.policy = wrap_larger_than(70);
  EXPECT_THAT(names_of_units(FullyShardedDataParallel<Containers>(Containers(), {}, options)),
              ElementsAre("", "list.0"));
  Containers plain;
  options.ignored_parameters = {plain->list[0]->as<torch::nn::Linear>()->bias};
  EXPECT_THAT(names_of_units(FullyShardedDataParallel<Containers>(plain, {}, options)), ElementsAre(""));
}

struct AttendingImpl : torch::nn::Module {
  AttendingImpl() {
    attention = register_module("attention", torch::nn::MultiheadAttention(4, 2));
    norms->push_back(torch::nn::Linear(4, 8));
    norms->push_back(torch::nn::Linear(8, 4));
    register_module("norms", norms);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = x.unsqueeze(1);
    return norms->forward(std::get<0>(attention(y, y, y)).squeeze(1));
  }
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::Sequential norms;
};
TORCH_MODULE(Attending);

TEST(FsdpEdgeTest, SizesDoNotMakeUnitsWithinModulesThatAreNotDivided) {
  const auto names_with = [](const WrapPolicy& policy) {
    Options options;
    options.policy = policy;
    return names_of_units(FullyShardedDataParallel<Attending>(Attending(), {}, options));
  };
  EXPECT_THAT(names_with(wrap_larger_than(10)), ElementsAre("attention", "norms.0", "norms.1"));
  EXPECT_THAT(names_with(wrap_larger_than(10, nullptr)),
              ElementsAre("attention.out_proj", "attention", "norms.0", "norms.1"));
  EXPECT_THAT(names_with(wrap_larger_than(10, is_any_of<torch::nn::SequentialImpl>)),
              ElementsAre("attention.out_proj", "attention", "norms"));
  EXPECT_THAT(names_with(wrap_larger_than(10, is_any_of<torch::nn::SequentialImpl>,
                                          is_any_of<torch::nn::SequentialImpl, torch::nn::LinearImpl>)),
              ElementsAre("", "attention"));
  const auto make = [] {
    Attending model;
    fill(*model);
    return model;
  };
  Attending alone = make();
  const auto input = [](int rank) { return batch_of(0, rank).narrow(1, 0, 4); };
  run_local(2, [&](const ProcessGroup& group) {
    Options options;
    options.policy = wrap_larger_than(10);
    FullyShardedDataParallel<Attending> model(make(), group, options);
    loss_of(model(input(0))).backward();
    if (group.rank() == 0) loss_of(alone->forward(input(0))).backward();
    group.barrier();
    expect_same_grads(unsharded_grads(model), *alone);
  });
}

// --- what programs do with a sharded model

// `model->forward(x)` is a call of the model's own class.
TEST(FsdpEdgeTest, ACallOfTheModelsOwnClassIsReported) {
  run_local(2, [](const ProcessGroup& group) {
    FullyShardedDataParallel<TwoResults> of_units(TwoResults(), group);
    EXPECT_ERROR(of_units->forward(at::ones({2, 4})), ErrorCode::invalid_argument,
                 "'used' was called while its parameters are sharded");
    FullyShardedDataParallel<Scaled> of_one_element(Scaled(), group);
    EXPECT_ERROR(of_one_element->forward(at::ones({1})).sum().backward(), ErrorCode::invalid_argument,
                 "a gradient reached parameter 'factor' of unit '' outside of any call");
    of_one_element(at::ones({1})).sum().backward();
    FullyShardedDataParallel<Wrap<Scaled>> wrapped(Wrap<Scaled>(), group);
    EXPECT_EQ(wrapped->forward(at::ones({1})).item<float>(), 2);
  });
}

TEST(FsdpEdgeTest, ACopyIsTheSameModelAsOfLibTorchsHolders) {
  SmallModel alone = make_model();
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    struct Trainer {
      FullyShardedDataParallel<SmallModel> model;
      std::vector<FullyShardedDataParallel<SmallModel>> models;
    };
    const auto shard = [&] { return FullyShardedDataParallel(make_model(), group); };  // deduces the class
    Trainer trainer{shard(), {}};
    auto moved = std::move(trainer.model);
    trainer.models.push_back(moved);
    moved = trainer.models.front();
    loss_of(trainer.model(batch_of(0, group.rank()))).backward();
    for (auto* model : {&trainer.model, &trainer.models.front(), &moved}) {
      expect_same_grads(unsharded_grads(*model), *alone);
    }
    const FullyShardedDataParallel of_class(std::make_shared<BlockImpl>(4), group, Options());
    EXPECT_EQ(of_class.unit_count(), 1u);
  });
}

TEST(FsdpEdgeTest, GradientsOfInputsAloneLeaveTheModelAsItWas) {
  SmallModel alone = make_model();
  const auto gradient_of_input = [](auto&& forward, int rank) {
    const at::Tensor input = batch_of(1, rank).requires_grad_();
    return torch::autograd::grad({loss_of(forward(input))}, {input}).front();
  };
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      SmallModel plain = make_model();
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      for (int times = 0; times < 2; ++times) {
        model.zero_grad();
        EXPECT_TRUE(at::allclose(
            gradient_of_input([&](const at::Tensor& x) { return model(x); }, group.rank()),
            gradient_of_input([&](const at::Tensor& x) { return plain->forward(x); }, group.rank()), 1e-12, 1e-14));
        loss_of(model(batch_of(0, group.rank()))).backward();
        expect_same_grads(unsharded_grads(model), *alone);
      }
    }
  });
}

TEST(FsdpEdgeTest, GradientsOfGradientsAreRefused) {
  SmallModel alone = make_model();
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      const at::Tensor input = batch_of(0, group.rank()).requires_grad_();
      const at::Tensor loss = loss_of(model(input));
      EXPECT_ERROR(torch::autograd::grad({loss}, {input}, {}, /*retain_graph=*/true, /*create_graph=*/true),
                   ErrorCode::unsupported, "backward of a sharded model: create_graph is true, expected false");
      EXPECT_ERROR(loss_of(model(input)).backward({}, /*keep_graph=*/true, /*create_graph=*/true),
                   ErrorCode::unsupported, "create_graph is true");
      model.zero_grad();
      loss_of(model(batch_of(0, group.rank()))).backward();
      expect_same_grads(unsharded_grads(model), *alone);
    }
  });
}

// Optimizers with foreach ops do this. Ranks have no elements of some parameters.
TEST(FsdpEdgeTest, ForeachOpsTakeShardsWithoutElements) {
  run_local(4, [](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group);
    std::vector<at::Tensor> shards;
    for (const at::Tensor& param : model.parameters()) shards.push_back(param.detach());
    EXPECT_TRUE(std::any_of(shards.begin(), shards.end(), [](const at::Tensor& shard) { return shard.numel() == 0; }));
    at::_foreach_mul_(shards, 0.5);
    const std::vector<at::Tensor> found = full_params(model), expected = make_model()->parameters();
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i].detach() * 0.5)) << i;
  });
}

// --- packed sequences

struct PackedModelImpl : torch::nn::Module {
  PackedModelImpl() { lstm = register_module("lstm", Wrap<torch::nn::LSTM>(3, 4)); }
  torch::nn::utils::rnn::PackedSequence forward(const torch::nn::utils::rnn::PackedSequence& sequence) {
    dtype = sequence.data().scalar_type();
    return std::get<0>(lstm->forward_with_packed_input(sequence));
  }
  Wrap<torch::nn::LSTM> lstm{nullptr};
  at::ScalarType dtype = at::kLong;
};
TORCH_MODULE(PackedModel);

TEST(FsdpEdgeTest, InputsAndResultsMayBePackedSequences) {
  namespace rnn = torch::nn::utils::rnn;
  const auto sequence = [](at::ScalarType dtype) {
    const at::Tensor all = at::arange(24, at::kDouble).mul(0.3).sin().reshape({4, 2, 3}).to(dtype);
    return rnn::pack_padded_sequence(all, at::tensor({2, 4}, at::kLong), /*batch_first=*/false,
                                     /*enforce_sorted=*/false);
  };
  const auto make = [] {
    PackedModel model;
    fill(*model);
    return model;
  };
  PackedModel alone = make();
  loss_of(alone->forward(sequence(at::kDouble)).data()).backward();
  run_local(2, [&](const ProcessGroup& group) {
    for (Options way : kWays) {
      FullyShardedDataParallel<PackedModel> model(make(), group, way);
      loss_of(model(sequence(at::kDouble)).data()).backward();
      expect_same_grads(unsharded_grads(model), *alone);

      way.mixed_precision.param_dtype = at::kDouble;
      FullyShardedDataParallel<PackedModel> casts(make(), group, way);
      const rnn::PackedSequence input = sequence(at::kFloat), result = casts(input);
      EXPECT_EQ(casts->dtype, at::kDouble);
      EXPECT_EQ(input.data().scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(result.batch_sizes(), input.batch_sizes()));
      EXPECT_TRUE(at::equal(result.sorted_indices(), input.sorted_indices()));
    }
  });
}

TEST(FsdpEdgeTest, TrainingAfterAnEvaluationIsAsWithoutIt) {
  SmallModel alone = make_model();
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      FullyShardedDataParallel<SmallModel> model(make_model(), group, way);
      for (int times = 0; times < 2; ++times) {
        {
          const at::NoGradGuard no_grad;
          model.eval();
          model(batch_of(3, group.rank()));
          model.train();
        }
        model.zero_grad();
        loss_of(model(batch_of(0, group.rank()))).backward();
        expect_same_grads(unsharded_grads(model), *alone);
      }
    }
  });
}

// Multiplies by a weight that another module may have, too.
struct TimesImpl : torch::nn::Module {
  explicit TimesImpl(const at::Tensor& weight_in) { weight = register_parameter("weight", weight_in); }
  at::Tensor forward(const at::Tensor& x) { return at::matmul(x, weight.t()); }
  at::Tensor weight;
};
TORCH_MODULE(Times);

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    embedding = register_module("embedding", Times(at::ones({3, 5})));
    in = register_module("in", Wrap<torch::nn::Linear>(5, 5));
    head = register_module("head", Wrap<Times>(embedding->weight));
  }
  at::Tensor forward(const at::Tensor& x) { return head(at::tanh(in(x))) + embedding(x); }
  Times embedding{nullptr};
  Wrap<torch::nn::Linear> in{nullptr};
  Wrap<Times> head{nullptr};
};
TORCH_MODULE(Tied);

TEST(FsdpEdgeTest, AParameterOfAnIgnoredModuleIsIgnoredWhereAnotherModuleSharesIt) {
  const auto make = [] {
    Tied model;
    fill(*model);
    return model;
  };
  run_local(2, [&](const ProcessGroup& group) {
    for (Options way : kWays) {
      Tied plain = make(), alone = make();
      way.ignored_modules = {plain->embedding.ptr()};
      FullyShardedDataParallel<Tied> model(plain, group, way);
      EXPECT_THAT(names_of_units(model), ElementsAre("in"));
      torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      loss_of(model(batch_of(0, group.rank()))).backward();
      loss_of(alone->forward(batch_of(0, group.rank()))).backward();
      EXPECT_TRUE(at::allclose(model->head->weight.grad(), alone->head->weight.grad()));  // this rank's own
      optimizer.step();
      const StateDict state = model.state_dict(StateDictType::full, {.rank0_only = false});
      for (const char* name : {"embedding.weight", "head.weight"}) {
        EXPECT_TRUE(at::equal(state.at(name).get<at::Tensor>(), plain->embedding->weight)) << name;
      }
      const StateDict optim = model.optim_state_dict(optimizer, StateDictType::full, {.rank0_only = false});
      const Dict& states = optim.at("state").get<Dict>();
      EXPECT_EQ(states.size(), 3u);
      const auto& momentum = states.at("embedding.weight").get<Dict>().at("momentum_buffer").get<at::Tensor>();
      EXPECT_TRUE(at::equal(momentum, plain->embedding->weight.grad()));
    }
  });
}

// Backward needs the weight after its gradient has arrived.
struct StopsGradientImpl : torch::nn::Module {
  StopsGradientImpl() { weight = register_parameter("weight", at::ones({5, 5})); }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor constant = at::matmul(x, weight.detach());
    return constant * at::matmul(x, weight);
  }
  at::Tensor weight;
};
TORCH_MODULE(StopsGradient);

TEST(FsdpEdgeTest, AWeightIsAlsoUsedWithoutItsGradient) {
  const auto make = [](auto layer) {
    torch::nn::Sequential model{Wrap<torch::nn::Linear>(5, 5), std::move(layer), Wrap<torch::nn::Linear>(5, 3)};
    fill(*model);
    return model;
  };
  const auto make_plain = [&] { return make(Wrap<StopsGradient>()); };
  const auto make_checkpointed = [&] { return make(Wrap<Checkpointed<StopsGradient>>()); };
  torch::nn::Sequential alone = make_plain();
  backward_of_all(alone, {0}, 2);
  run_local(2, [&](const ProcessGroup& group) {
    for (const Options& way : kWays) {
      for (const torch::nn::Sequential& plain : {make_plain(), make_checkpointed()}) {
        FullyShardedDataParallel<torch::nn::Sequential> model(plain, group, way);
        loss_of(model(batch_of(0, group.rank()))).backward();
        expect_same_grads(unsharded_grads(model), *alone);
      }
    }
  });
}

}  // namespace
}  // namespace tessera::fsdp

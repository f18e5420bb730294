// A transformer with attention, sequence parallel between its layers, trains as in one process.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/optim/adamw.h>

#include "support/chaos.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/tensor_parallel.h"

namespace tessera {
namespace {

using testing::indexed;
using testing::part_of;
using testing::R;
using testing::Sizes;

constexpr std::int64_t kWidth = 8, kHeads = 4, kWords = 11;

// Its input, sharded along the sequence, is gathered; each rank computes its heads.
struct AttentionImpl : torch::nn::Module, PreparedModule {
  AttentionImpl() {
    for (const auto& [name, layer] : {std::pair("wq", wq), {"wk", wk}, {"wv", wv}, {"wo", wo}}) {
      register_module(name, layer);
    }
  }
  at::Tensor forward(const at::Tensor& given) {
    const at::Tensor x = prepare_input(given);
    const auto heads = [&](ParallelLinear& layer) {
      return layer(x).view({x.size(0), x.size(1), -1, kWidth / kHeads}).transpose(1, 2);
    };
    const at::Tensor scores = at::matmul(heads(wq), heads(wk).transpose(-2, -1)) / 1.5;
    const at::Tensor later = at::ones({x.size(1), x.size(1)}, at::kBool).triu(1);
    const at::Tensor y = at::matmul(scores.masked_fill(later, -1e9).softmax(-1), heads(wv));
    return wo(y.transpose(1, 2).flatten(2));
  }
  ParallelLinear wq{kWidth, kWidth}, wk{kWidth, kWidth}, wv{kWidth, kWidth}, wo{kWidth, kWidth};
};
TORCH_MODULE(Attention);

struct LayerImpl : torch::nn::Module {
  LayerImpl() {
    register_module("attention_norm", attention_norm);
    register_module("attention", attention);
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = x + attention(attention_norm(x));
    return y + down(at::relu(up(norm(y))));
  }
  ParallelLayerNorm attention_norm{Sizes{kWidth}};
  Attention attention;
  ParallelRMSNorm norm{Sizes{kWidth}};
  ParallelLinear up{kWidth, 12}, down{12, kWidth};
};
TORCH_MODULE(Layer);

struct TransformerImpl : torch::nn::Module {
  TransformerImpl() {
    layers->push_back(Layer());
    layers->push_back(Layer());
    register_module("table", table);
    register_module("layers", layers);
    register_module("head", head);
    to(at::kDouble);
    double phase = 0;
    for (const at::Tensor& parameter : parameters()) {
      parameter.detach().copy_(indexed(parameter.sizes().vec()).add(phase += 7).sin());
    }
  }
  at::Tensor forward(const at::Tensor& ids) {
    at::Tensor x = table(ids);
    for (const auto& layer : *layers) x = layer->as<LayerImpl>()->forward(x);
    return head(x);
  }
  ParallelEmbedding table{kWords, kWidth};
  torch::nn::ModuleList layers;
  ParallelLinear head{kWidth, kWords};
};
TORCH_MODULE(Transformer);

ParallelPlan plan_of_transformer() {
  const Placement sequence = Placement::shard(1);
  return {{"table", RowwiseParallel{std::nullopt, sequence}},
          {"layers.*.*norm", SequenceParallel{}},
          {"layers.*.attention", PrepareModuleInput{{sequence}, {R}}},
          {"layers.*.attention.w[qkv]", ColwiseParallel{}},
          {"layers.*.attention.wo", RowwiseParallel{std::nullopt, sequence}},
          {"layers.*.up", ColwiseParallel{sequence}},
          {"layers.*.down", RowwiseParallel{std::nullopt, sequence}},
          {"head", ColwiseParallel{sequence, R}}};
}

void train(Transformer& net, const at::Tensor& ids, std::vector<double>& losses) {
  std::vector<at::Tensor> trained;
  for (const at::Tensor& parameter : net->parameters()) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  torch::optim::AdamW optimizer(trained, torch::optim::AdamWOptions(0.05));
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = at::cross_entropy_loss(net->forward(ids).flatten(0, 1), ids.flatten());
    losses.push_back(loss.item<double>());
    loss.backward();
    optimizer.step();
  }
}

TEST(TransformerTest, TrainsAsOneProcessWithAnyParametersFrozen) {
  const at::Tensor ids = at::arange(12, at::kLong).mul(5).remainder(kWords).view({2, 6});
  const auto freeze_all_but = [](Transformer& net, const std::string& trained) {
    for (auto& parameter : net->named_parameters()) {
      parameter.value().set_requires_grad(parameter.key().find(trained) != std::string::npos);
    }
  };
  struct Trained {
    std::string part;
    Transformer full;
    std::vector<double> losses;
  };
  std::vector<Trained> cases;
  for (const char* part : {"", "head", "layers.1", "attention.w", "norm", "table"}) {
    Trained& each = cases.emplace_back();
    each.part = part;
    freeze_all_but(each.full, part);
    train(each.full, ids, each.losses);
  }
  for (const int ranks : {2, 4}) {
    run_local(ranks, [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, {ranks}, {"tp"});
      testing::SampleIfSanitized sample(3, static_cast<std::size_t>(ranks));
      for (const Trained& expected : cases) {
        if (!sample.takes_next()) continue;
        Transformer net;
        freeze_all_but(net, expected.part);
        parallelize_module(*net, mesh, plan_of_transformer());
        std::vector<double> losses;
        train(net, ids, losses);
        for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected.losses[i], 1e-8);
        for (const auto& module : net->named_modules("", false)) {
          const auto* layer = dynamic_cast<const TensorParallel*>(module.value().get());
          for (const auto& parameter : module.value()->named_parameters(false)) {
            ASSERT_NE(layer, nullptr);
            const at::Tensor of_full = expected.full->named_parameters()[module.key() + "." + parameter.key()];
            EXPECT_EQ(parameter.value().requires_grad(), of_full.requires_grad());
            const at::Tensor part = part_of(of_full, layer->dtensor_spec(parameter.key())->layout, *mesh.coordinate());
            ASSERT_TRUE(at::allclose(parameter.value(), part, 1e-7, 1e-8)) << module.key() << " of " << expected.part;
          }
        }
      }
    });
  }
}

}  // namespace
}  // namespace tessera

// Trains a transformer that is written in DTensors alone: no module knows of the mesh, only the placements of the
// parameters and of the batch do. Rows of the mesh have different parts of the batch, and the ranks of a row share
// heads, hidden units and the vocabulary. When started again, on any mesh, resumes from the last checkpoint.
//
//   tessera run -n 4 -- build/bin/dtensor_transformer checkpoints 10 2      2 x 2 ranks
//   tessera run -n 2 -- build/bin/dtensor_transformer checkpoints 20 1      2 x 1, resumes from step 10

#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

#include <cstdlib>
#include <iostream>
#include <map>

#include "tessera/base/error.h"
#include "tessera/comm/init.h"
#include "tessera/state/checkpoint_manager.h"
#include "tessera/state/module_state.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/tensor/dtensor_factories.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/dtensor_parameters.h"

namespace {

using namespace tessera;
using Sizes = std::vector<std::int64_t>;

constexpr std::int64_t kBatch = 8, kLength = 12, kVocabulary = 26, kWidth = 16, kHeads = 4, kLayers = 2;
const Placement kReplicate = Placement::replicate();
const Placements kReplicated = {kReplicate, kReplicate}, kRows = {kReplicate, Placement::shard(0)},
                 kColumns = {kReplicate, Placement::shard(1)}, kBatches = {Placement::shard(0), kReplicate};

// Holds the local tensors of its parameters, so that optimizers and state dicts find them.
class Transformer : public torch::nn::Module, public DTensorParameters {
 public:
  explicit Transformer(const DeviceMesh& mesh) : mesh_(mesh) {
    add_random("embedding", {kVocabulary, kWidth}, kRows);
    add_random("positions", {kLength, kWidth}, kReplicated);
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      for (const char* name : {"query", "key", "value"}) add_random(in_layer(layer, name), {kWidth, kWidth}, kRows);
      add_random(in_layer(layer, "project"), {kWidth, kWidth}, kColumns);
      add_random(in_layer(layer, "up"), {4 * kWidth, kWidth}, kRows);
      add_random(in_layer(layer, "down"), {kWidth, 4 * kWidth}, kColumns);
      for (const char* name : {"norm_attention", "norm_mlp"}) add(in_layer(layer, name), ones());
    }
    add("norm", ones());
  }

  // tokens: [batch, length]. Returns logits, [batch, length, vocabulary].
  DTensor forward(const DTensor& tokens) const {
    DTensor x = dtensor::embedding(at("embedding"), tokens) + at("positions");
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      x = x + attention(layer, normalized(in_layer(layer, "norm_attention"), x));
      x = x + mlp(layer, normalized(in_layer(layer, "norm_mlp"), x));
    }
    return dtensor::linear(normalized("norm", x), at("embedding"));
  }

  const DTensorSpec* dtensor_spec(const std::string& parameter) const override { return &specs_.at(parameter); }

 private:
  static std::string in_layer(std::int64_t layer, const std::string& name) {
    return "layer" + std::to_string(layer) + "_" + name;
  }

  const DTensor& at(const std::string& name) const { return parameters_.at(name); }

  DTensor ones() const { return dtensor::ones({kWidth}, mesh_, kReplicated, torch::dtype(torch::kDouble)); }

  void add_random(const std::string& name, const Sizes& size, const Placements& placements) {
    add(name, dtensor::randn(size, mesh_, generator_, placements, torch::dtype(torch::kDouble)) * 0.2);
  }

  void add(const std::string& name, const DTensor& value) {
    const DTensor parameter = value.detach().requires_grad_();
    register_parameter(name, parameter.local_tensor());
    specs_.emplace(name, DTensorSpec{mesh_, parameter.layout()});
    parameters_.emplace(name, parameter);
  }

  DTensor normalized(const std::string& weight, const DTensor& x) const {
    return dtensor::layer_norm(x, {kWidth}, at(weight));
  }

  DTensor attention(std::int64_t layer, const DTensor& x) const {
    const auto heads = [&](const char* name) {
      const DTensor all = dtensor::linear(x, at(in_layer(layer, name)));
      return dtensor::permute(dtensor::view(all, {kBatch, kLength, kHeads, -1}), {0, 2, 1, 3});
    };
    const DTensor mixed = dtensor::scaled_dot_product_attention(heads("query"), heads("key"), heads("value"), true);
    const DTensor joined = dtensor::view(dtensor::permute(mixed, {0, 2, 1, 3}), {kBatch, kLength, kWidth});
    return dtensor::linear(joined, at(in_layer(layer, "project")));
  }

  DTensor mlp(std::int64_t layer, const DTensor& x) const {
    const DTensor hidden = dtensor::gelu(dtensor::linear(x, at(in_layer(layer, "up"))));
    return dtensor::linear(hidden, at(in_layer(layer, "down")));
  }

  DeviceMesh mesh_;
  PhiloxGenerator generator_{1};  // the same parameters on any mesh
  std::map<std::string, DTensor> parameters_;
  std::map<std::string, DTensorSpec> specs_;
};

// Returns sequences that count in steps of their own, one token longer than the model reads.
DTensor batch_of(std::int64_t step, const DeviceMesh& mesh) {
  const at::Tensor row = torch::arange(kBatch).view({kBatch, 1}), place = torch::arange(kLength + 1);
  return distribute_tensor((row * 3 + step * 5 + place * (row % 5 + 1)) % kVocabulary, mesh, kBatches);
}

DTensor loss_of(const Transformer& model, const DTensor& tokens) {
  const DTensor logits = model.forward(dtensor::narrow(tokens, 1, 0, kLength));
  const DTensor next = dtensor::narrow(tokens, 1, 1, kLength);
  return dtensor::cross_entropy(dtensor::view(logits, {-1, kVocabulary}), dtensor::flatten(next));
}

void train(const std::string& directory, std::int64_t steps, int tp) {
  const ProcessGroup group = init_process_group();
  const DeviceMesh mesh(group, {group.size() / tp, tp}, {"dp", "tp"});
  Transformer model(mesh);
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));

  CheckpointManagerOptions options;
  options.save_every = 5;
  CheckpointManager manager(directory, group, options);
  const auto state_now = [&] {
    return StateDict{{"model", get_model_state_dict(model)}, {"optimizer", get_optimizer_state_dict(model, optimizer)}};
  };
  StateDict state = state_now();
  const auto restored = manager.restore_latest(state);
  if (restored) {
    set_optimizer_state_dict(model, optimizer, state.at("optimizer").get<Dict>());
    if (group.rank() == 0) std::cout << "resumed from step " << *restored << " on " << mesh.to_string() << "\n";
  }
  for (std::int64_t step = restored.value_or(0) + 1; step <= steps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(model, batch_of(step, mesh)).full_tensor();
    loss.backward();
    optimizer.step();
    manager.save(step, state_now(), loss.item<double>());
    if (group.rank() == 0) std::cout << "step " << step << " loss " << loss.item<double>() << "\n";
  }
  manager.wait();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: dtensor_transformer DIRECTORY STEPS TENSOR_PARALLEL_RANKS\n";
    return 2;
  }
  try {
    train(argv[1], std::atoll(argv[2]), std::atoi(argv[3]));
  } catch (const Error& error) {
    std::cerr << "dtensor_transformer: " << error.what() << "\n";
    return 3;
  }
}

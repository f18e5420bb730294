#include "tessera/tensor/tensor_parallel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "tensor/dtensor/mesh_groups.h"
#include "tensor/layer_clone.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/internal/step.h"
#include "tessera/tensor/dtensor_factories.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/internal/box_view.h"
#include "tessera/tensor/internal/materialize.h"

namespace tessera {

namespace {

const Placement R = Placement::replicate();

[[noreturn]] void refuse_style(const ParallelStyle& style, const char* layer, const char* expected) {
  fail(ErrorCode::invalid_argument, "parallelize {}: style is {}, expected {}", layer, to_string(style), expected);
}

// Returns the tensor on a mesh of this process alone.
DTensor alone(const at::Tensor& tensor) { return DTensor::from_local(tensor, DeviceMesh()); }

// The parallelization of a module that runs on a shard of the sequence.
template <typename Parallelization>
Parallelization along_sequence(const ParallelStyle& style, const char* layer,
                               const std::vector<std::string>& parameters, const std::vector<std::int64_t>& size) {
  const auto* sequence = std::get_if<SequenceParallel>(&style);
  if (sequence == nullptr) refuse_style(style, layer, "SequenceParallel");
  const Placement shard = Placement::shard(sequence->sequence_dim);
  Parallelization how{{}, shard, shard, shard};
  for (const std::string& parameter : parameters) how.parameters[parameter] = {R, size};
  return how;
}

}  // namespace

std::string to_string(const ParallelStyle& style) {
  constexpr std::array<const char*, 6> kNames = {"ColwiseParallel",     "RowwiseParallel",
                                                 "SequenceParallel",    "PrepareModuleInput",
                                                 "PrepareModuleOutput", "PrepareModuleInputOutput"};
  return kNames.at(style.index());
}

// --- common to all layers

const DTensorSpec* TensorParallel::dtensor_spec(const std::string& parameter) const {
  if (!state_) return nullptr;
  const auto found = state_->specs.find(parameter);
  return found == state_->specs.end() ? nullptr : &found->second;
}

void TensorParallel::initialize(PhiloxGenerator&) {}

DTensor TensorParallel::input(const at::Tensor& local, std::optional<std::int64_t> last_size) const {
  return state_->input(local, last_size);
}

DTensor TensorParallel::parameter(const std::string& name, const at::Tensor& local) const {
  if (!state_) return alone(local);
  const DTensorSpec* spec = TensorParallel::dtensor_spec(name);
  if (spec == nullptr) {
    std::string others;
    for (const auto& [other, _] : state_->specs) others += (others.empty() ? "" : ", ") + other;
    fail(ErrorCode::invalid_argument, "parameter '{}' of a parallel layer was not parallelized, expected one of [{}]",
         printable(name), printable(others));
  }
  return {spec->mesh, spec->layout, local};
}

at::Tensor TensorParallel::output(const DTensor& result) const { return state_->output(result); }

at::Tensor TensorParallel::in_forward(FunctionRef<at::Tensor()> forward) const {
  return comm::in_step(groups_of(state_->mesh), "forward of a parallel layer", forward);
}

void TensorParallel::check_not_parallelized(const char* operation) const {
  if (state_)
    fail(ErrorCode::unsupported, "{} of a parallelized module, expected one that is not parallelized", operation);
}

// --- linear

TensorParallel::Parallelization ParallelLinearImpl::parallelization(const ParallelStyle& style) const {
  const std::int64_t in = options.in_features(), out = options.out_features();
  if (const auto* colwise = std::get_if<ColwiseParallel>(&style)) {
    const Placement rows = Placement::shard(0);
    return {{{"weight", {rows, {out, in}}}, {"bias", {rows, {out}}}}, colwise->input_layout, R, colwise->output_layout};
  }
  if (const auto* rowwise = std::get_if<RowwiseParallel>(&style)) {
    const Placement last = Placement::shard(-1);
    return {{{"weight", {Placement::shard(1), {out, in}}}, {"bias", {R, {out}}}},
            rowwise->input_layout.value_or(last),
            last,
            rowwise->output_layout};
  }
  refuse_style(style, "a linear layer", "ColwiseParallel or RowwiseParallel");
}

at::Tensor ParallelLinearImpl::forward(const at::Tensor& x) {
  if (!is_parallelized()) return LinearImpl::forward(x);
  return in_forward([&] {
    std::optional<DTensor> of_bias;
    if (bias.defined()) of_bias = parameter("bias", bias);
    return output(dtensor::linear(input(x, options.in_features()), parameter("weight", weight), of_bias));
  });
}

void ParallelLinearImpl::initialize(PhiloxGenerator& generator) {
  dtensor::kaiming_uniform_(parameter("weight", weight), generator, std::sqrt(5.0));
  if (!bias.defined()) return;
  const double bound = 1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(options.in_features(), 1)));
  dtensor::uniform_(parameter("bias", bias), generator, -bound, bound);
}

std::shared_ptr<torch::nn::Module> ParallelLinearImpl::clone(const OptionalDevice& device) const {
  check_not_parallelized("clone");
  return cloned_layer<torch::nn::LinearImpl>(*this, device);
}

// --- embedding

TensorParallel::Parallelization ParallelEmbeddingImpl::parallelization(const ParallelStyle& style) const {
  if (options.max_norm() || options.scale_grad_by_freq() || options.sparse()) {
    fail(ErrorCode::unsupported, "parallelize an embedding as {}: expected no max_norm, scale_grad_by_freq or sparse",
         to_string(style));
  }
  const std::vector<std::int64_t> size = {options.num_embeddings(), options.embedding_dim()};
  if (const auto* colwise = std::get_if<ColwiseParallel>(&style)) {
    return {{{"weight", {Placement::shard(1), size}}}, colwise->input_layout, R, colwise->output_layout};
  }
  if (const auto* rowwise = std::get_if<RowwiseParallel>(&style)) {
    return {{{"weight", {Placement::shard(0), size}}}, rowwise->input_layout.value_or(R), R, rowwise->output_layout};
  }
  refuse_style(style, "an embedding", "ColwiseParallel or RowwiseParallel");
}

at::Tensor ParallelEmbeddingImpl::forward(const at::Tensor& ids) {
  if (!is_parallelized()) return EmbeddingImpl::forward(ids);
  return in_forward([&] {
    return output(dtensor::embedding(parameter("weight", weight), input(ids), options.padding_idx().value_or(-1)));
  });
}

void ParallelEmbeddingImpl::initialize(PhiloxGenerator& generator) {
  const c10::NoGradGuard no_grad;
  const DTensor table = parameter("weight", weight);
  dtensor::normal_(table, generator);
  if (!options.padding_idx()) return;
  for (const LocalBox& box : table.layout().local_boxes(*table.device_mesh().coordinate())) {
    const std::int64_t row = *options.padding_idx() - box.box.offsets[0];
    if (row >= 0 && row < box.box.sizes[0]) {
      box_view(weight, {box.local_offsets, box.box.sizes}).select(0, row).zero_();
    }
  }
}

std::shared_ptr<torch::nn::Module> ParallelEmbeddingImpl::clone(const OptionalDevice& device) const {
  check_not_parallelized("clone");
  return cloned_layer<torch::nn::EmbeddingImpl>(*this, device);
}

// --- layer norm

TensorParallel::Parallelization ParallelLayerNormImpl::parallelization(const ParallelStyle& style) const {
  return along_sequence<Parallelization>(style, "a layer norm", {"weight", "bias"}, options.normalized_shape());
}

at::Tensor ParallelLayerNormImpl::forward(const at::Tensor& x) {
  if (!is_parallelized()) return LayerNormImpl::forward(x);
  return in_forward([&] {
    std::optional<DTensor> of_weight, of_bias;
    if (weight.defined()) of_weight = parameter("weight", weight);
    if (bias.defined()) of_bias = parameter("bias", bias);
    return output(dtensor::layer_norm(input(x), options.normalized_shape(), of_weight, of_bias, options.eps()));
  });
}

void ParallelLayerNormImpl::initialize(PhiloxGenerator&) {
  const c10::NoGradGuard no_grad;
  if (weight.defined()) weight.fill_(1);
  if (bias.defined()) bias.zero_();
}

std::shared_ptr<torch::nn::Module> ParallelLayerNormImpl::clone(const OptionalDevice& device) const {
  check_not_parallelized("clone");
  return cloned_layer<torch::nn::LayerNormImpl>(*this, device);
}

// --- RMS norm

ParallelRMSNormImpl::ParallelRMSNormImpl(std::vector<std::int64_t> normalized_shape, std::optional<double> eps,
                                         bool has_weight)
    : normalized_shape_(std::move(normalized_shape)), eps_(eps), has_weight_(has_weight) {
  ParallelRMSNormImpl::reset();
}

void ParallelRMSNormImpl::reset() {
  weight = register_parameter("weight", has_weight_ ? at::ones(normalized_shape_) : at::Tensor(), has_weight_);
}

TensorParallel::Parallelization ParallelRMSNormImpl::parallelization(const ParallelStyle& style) const {
  return along_sequence<Parallelization>(style, "an RMS norm", {"weight"}, normalized_shape_);
}

at::Tensor ParallelRMSNormImpl::forward(const at::Tensor& x) {
  std::optional<DTensor> of_weight;
  if (weight.defined()) of_weight = parameter("weight", weight);
  if (!is_parallelized()) return dtensor::rms_norm(alone(x), normalized_shape_, of_weight, eps_).to_local();
  return in_forward([&] { return output(dtensor::rms_norm(input(x), normalized_shape_, of_weight, eps_)); });
}

void ParallelRMSNormImpl::initialize(PhiloxGenerator&) {
  const c10::NoGradGuard no_grad;
  if (weight.defined()) weight.fill_(1);
}

std::shared_ptr<torch::nn::Module> ParallelRMSNormImpl::clone(const OptionalDevice& device) const {
  check_not_parallelized("clone");
  return Cloneable::clone(device);
}

// --- dropout

ParallelDropoutImpl::ParallelDropoutImpl(double p, PhiloxGenerator generator_in) : generator(generator_in), p_(p) {}

TensorParallel::Parallelization ParallelDropoutImpl::parallelization(const ParallelStyle& style) const {
  return along_sequence<Parallelization>(style, "a dropout", {}, {});
}

at::Tensor ParallelDropoutImpl::forward(const at::Tensor& x) {
  if (!is_training()) return x;
  if (!is_parallelized()) return dtensor::dropout(alone(x), p_, generator).to_local();
  return in_forward([&] { return output(dtensor::dropout(input(x), p_, generator)); });
}

void ParallelDropoutImpl::reset() {}

std::shared_ptr<torch::nn::Module> ParallelDropoutImpl::clone(const OptionalDevice& device) const {
  check_not_parallelized("clone");
  return Cloneable::clone(device);
}

// --- initial values

void initialize_parameters(torch::nn::Module& module, PhiloxGenerator& generator, at::Device device) {
  std::set<const torch::nn::Module*> done;
  module.apply([&](torch::nn::Module& each) {
    auto* layer = dynamic_cast<TensorParallel*>(&each);
    if (layer == nullptr || !done.insert(&each).second) return;
    for (const auto& parameter : each.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = parameter.value();
      if (!tensor.is_meta()) continue;
      materialize_in_place(tensor, device);
    }
    layer->initialize(generator);
  });
}

}  // namespace tessera

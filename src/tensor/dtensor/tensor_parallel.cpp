#include "tessera/tensor/tensor_parallel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <set>

#include "tessera/base/error.h"
#include "tessera/comm/internal/step.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera {

namespace {

const Placement R = Placement::replicate();

// A module under one of its names.
struct NamedModule {
  std::string name;
  torch::nn::Module* module;
};

void collect(torch::nn::Module& module, const std::string& name, std::vector<NamedModule>& modules) {
  modules.push_back({name, &module});
  for (const auto& child : module.named_children()) {
    collect(*child.value(), name.empty() ? child.key() : name + "." + child.key(), modules);
  }
}

// Matches the parts of a name as the shell matches the parts of a path.
bool matches(std::string pattern, std::string name) {
  std::replace(pattern.begin(), pattern.end(), '.', '/');
  std::replace(name.begin(), name.end(), '.', '/');
  return fnmatch(pattern.c_str(), name.c_str(), FNM_PATHNAME) == 0;
}

[[noreturn]] void refuse(const ParallelStyle& style, const char* layer, const char* expected) {
  fail(ErrorCode::invalid_argument, "parallelize {}: style is {}, expected {}", layer, to_string(style), expected);
}

}  // namespace

std::string to_string(const ParallelStyle& style) {
  constexpr std::array<const char*, 3> kNames = {"ColwiseParallel", "RowwiseParallel", "SequenceParallel"};
  return kNames.at(style.index());
}

// --- parallelizing

// The planned changes to a module, complete before anything changes.
class Parallelizer {
 public:
  // Throws as parallelize_module.
  Parallelizer(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan) : mesh_(mesh) {
    if (mesh.ndim() != 1) {
      fail(ErrorCode::invalid_argument, "mesh is {}, expected one dimension, such as mesh[\"tp\"]", mesh.to_string());
    }
    collect(module, "", modules_);
    for (const auto& [pattern, style] : plan) {
      bool is_found = false;
      for (const NamedModule& each : modules_) {
        if (!matches(pattern, each.name)) continue;
        is_found = true;
        add(each, style);
      }
      if (!is_found)
        fail(ErrorCode::invalid_argument, "the plan names '{}', but no module matches", printable(pattern));
    }
    check_shared_parameters();
  }

  // Adds what must be equal on all ranks.
  void describe(CallArguments& arguments) const {
    for (const auto& [module, planned] : planned_) {
      arguments.add("module", fmt::format("'{}' with input {}, computing with {}, and output {}",
                                          printable(planned.name), to_string(planned.state.input),
                                          to_string(planned.state.computes_with), to_string(planned.state.output)));
      for (const auto& parameter : module->named_parameters(/*recurse=*/false)) {
        const MeshLayout& layout = planned.state.specs.at(parameter.key()).layout;
        arguments.add("parameter",
                      fmt::format("'{}' {} {} as {}{}", printable(parameter.key()),
                                  c10::toString(parameter.value().scalar_type()), shape_to_string(layout.size()),
                                  to_string(layout.placements()), parameter.value().is_meta() ? " on meta" : ""));
      }
    }
  }

  // A collective.
  void apply() {
    std::set<const void*> done;
    for (auto& [module, planned] : planned_) {
      for (auto& parameter : module->named_parameters(/*recurse=*/false)) {
        at::Tensor& tensor = parameter.value();
        if (!done.insert(tensor.unsafeGetTensorImpl()).second) continue;
        tensor.mutable_grad().reset();
        tensor.set_data(part_of(tensor.detach(), planned.state.specs.at(parameter.key()).layout));
      }
      planned.layer->state_ = std::move(planned.state);
    }
  }

 private:
  struct Planned {
    std::string name;
    TensorParallel* layer;
    TensorParallel::State state;
  };

  void add(const NamedModule& found, const ParallelStyle& style) {
    const std::string& name = found.name;
    auto* layer = dynamic_cast<TensorParallel*>(found.module);
    if (layer == nullptr) {
      fail(ErrorCode::invalid_argument, "'{}' is {}, expected a ParallelLinear, ParallelEmbedding or ParallelLayerNorm",
           printable(name), found.module->name());
    }
    if (layer->is_parallelized()) {
      fail(ErrorCode::invalid_argument, "'{}' is already parallelized, expected each module once", printable(name));
    }
    TensorParallel::Parallelization how = layer->parallelization(style);
    for (const Placement& layout : {how.input, how.output}) {
      if (!layout.is_partial()) continue;
      fail(ErrorCode::invalid_argument, "'{}': layout {}, expected shard or replicate", printable(name),
           to_string(layout));
    }
    TensorParallel::State state{mesh_, how.input, how.computes_with, how.output, {}};
    for (const auto& parameter : found.module->named_parameters(/*recurse=*/false)) {
      const auto& [placement, size] = how.parameters.at(parameter.key());
      if (parameter.value().sizes() != at::IntArrayRef(size)) {
        fail(ErrorCode::invalid_argument,
             "'{}.{}' has shape {}, expected {}: parallelize the model before anything else changes its parameters",
             printable(name), printable(parameter.key()), shape_to_string(parameter.value().sizes().vec()),
             shape_to_string(size));
      }
      state.specs.emplace(parameter.key(), DTensorSpec{mesh_, MeshLayout(size, mesh_.shape(), {placement})});
    }
    if (const Planned* other = find(found.module)) {
      fail(ErrorCode::invalid_argument, "'{}' is in the plan twice, also as '{}', expected each module once",
           printable(name), printable(other->name));
    }
    planned_.emplace_back(found.module, Planned{name, layer, std::move(state)});
  }

  const Planned* find(const torch::nn::Module* module) const {
    const auto found =
        std::find_if(planned_.begin(), planned_.end(), [&](const auto& each) { return each.first == module; });
    return found != planned_.end() ? &found->second : nullptr;
  }

  // A parameter that several modules share must be placed alike in all of them.
  void check_shared_parameters() const {
    struct Use {
      std::string name;
      const DTensorSpec* spec;
    };
    std::map<const void*, Use> first_uses;
    for (const NamedModule& each : modules_) {
      const Planned* planned = find(each.module);
      for (const auto& parameter : each.module->named_parameters(/*recurse=*/false)) {
        const Use use{each.name + "." + parameter.key(),
                      planned != nullptr ? &planned->state.specs.at(parameter.key()) : nullptr};
        const Use& first = first_uses.emplace(parameter.value().unsafeGetTensorImpl(), use).first->second;
        if (use.spec == first.spec) continue;
        if (use.spec != nullptr && first.spec != nullptr && *use.spec == *first.spec) continue;
        fail(ErrorCode::invalid_argument,
             "'{}' and '{}' are one parameter, expected a plan that shards it alike in both", printable(first.name),
             printable(use.name));
      }
    }
  }

  at::Tensor part_of(const at::Tensor& full, const MeshLayout& layout) const {
    if (!full.is_meta()) return distribute_tensor(full, mesh_, layout.placements()).to_local();
    return at::empty(layout.local_shape(*mesh_.coordinate()).sizes, full.options().requires_grad(false));
  }

  const DeviceMesh& mesh_;
  std::vector<NamedModule> modules_;
  std::vector<std::pair<torch::nn::Module*, Planned>> planned_;  // in the plan's order, the same on all ranks
};

void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan) {
  if (!mesh.has_this_rank()) return;
  const c10::NoGradGuard no_grad;
  std::optional<Parallelizer> parallelizer;
  mesh.group().check_call("parallelize a module", [&](CallArguments& arguments) {
    parallelizer.emplace(module, mesh, plan);
    parallelizer->describe(arguments);
  });
  parallelizer->apply();
}

// --- common to all layers

const DTensorSpec* TensorParallel::dtensor_spec(const std::string& parameter) const {
  if (!state_) return nullptr;
  const auto found = state_->specs.find(parameter);
  return found == state_->specs.end() ? nullptr : &found->second;
}

DTensor TensorParallel::input(const at::Tensor& local, std::optional<std::int64_t> last_size) const {
  const DeviceMesh& mesh = state_->mesh;
  const Placements given = normalized({&state_->input, 1}, static_cast<std::size_t>(local.dim()));
  std::vector<std::int64_t> size = local.sizes().vec();
  if (given[0].is_shard()) {
    const std::int64_t dim = given[0].dim();
    std::int64_t& sharded = size[static_cast<std::size_t>(dim)];
    if (last_size && dim == local.dim() - 1) {
      sharded = *last_size;
    } else {
      const at::Tensor mine = at::full({1}, sharded, at::kLong), all = at::empty({mesh.size()}, at::kLong);
      mesh.group().all_gather_into(all, mine);
      sharded = all.sum().item<std::int64_t>();
      const MeshLayout layout(size, mesh.shape(), given);
      for (std::int64_t i = 0; i < mesh.size(); ++i) {
        const auto has = all[i].item<std::int64_t>();
        const std::int64_t expected = layout.local_shape({&i, 1}).sizes[static_cast<std::size_t>(dim)];
        if (has == expected) continue;
        fail(ErrorCode::invalid_argument,
             "input of a parallel layer, as {}: rank {} of {} has {} of {} along the sharded dimension, expected {}",
             to_string(given), i, mesh.to_string(), has, sharded, expected);
      }
    }
  }
  return DTensor::from_local(local, mesh, given, {std::move(size)}).redistribute({state_->computes_with}, false);
}

DTensor TensorParallel::parameter(const std::string& name, const at::Tensor& local) const {
  const DTensorSpec& spec = state_->specs.at(name);
  return {spec.mesh, spec.layout, local};
}

at::Tensor TensorParallel::output(const DTensor& result) const {
  return result.redistribute({state_->output}, false).to_local();
}

at::Tensor TensorParallel::in_forward(const std::function<at::Tensor()>& forward) const {
  return comm::in_step(std::span(&state_->mesh.group(), 1), "forward of a parallel layer", forward);
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
  refuse(style, "a linear layer", "ColwiseParallel or RowwiseParallel");
}

at::Tensor ParallelLinearImpl::forward(const at::Tensor& x) {
  if (!is_parallelized()) return LinearImpl::forward(x);
  return in_forward([&] {
    std::optional<DTensor> of_bias;
    if (bias.defined()) of_bias = parameter("bias", bias);
    return output(dtensor::linear(input(x, options.in_features()), parameter("weight", weight), of_bias));
  });
}

std::shared_ptr<torch::nn::Module> ParallelLinearImpl::clone(const OptionalDevice& device) const {
  check_not_parallelized("clone");
  return LinearImpl::clone(device);
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
  refuse(style, "an embedding", "ColwiseParallel or RowwiseParallel");
}

at::Tensor ParallelEmbeddingImpl::forward(const at::Tensor& ids) {
  if (!is_parallelized()) return EmbeddingImpl::forward(ids);
  return in_forward([&] {
    return output(dtensor::embedding(parameter("weight", weight), input(ids), options.padding_idx().value_or(-1)));
  });
}

std::shared_ptr<torch::nn::Module> ParallelEmbeddingImpl::clone(const OptionalDevice& device) const {
  check_not_parallelized("clone");
  return EmbeddingImpl::clone(device);
}

// --- layer norm

TensorParallel::Parallelization ParallelLayerNormImpl::parallelization(const ParallelStyle& style) const {
  const auto* sequence = std::get_if<SequenceParallel>(&style);
  if (sequence == nullptr) refuse(style, "a layer norm", "SequenceParallel");
  const Placement shard = Placement::shard(sequence->sequence_dim);
  const std::vector<std::int64_t>& size = options.normalized_shape();
  return {{{"weight", {R, size}}, {"bias", {R, size}}}, shard, shard, shard};
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

std::shared_ptr<torch::nn::Module> ParallelLayerNormImpl::clone(const OptionalDevice& device) const {
  check_not_parallelized("clone");
  return LayerNormImpl::clone(device);
}

}  // namespace tessera

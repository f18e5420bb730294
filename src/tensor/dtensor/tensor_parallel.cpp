#include "tessera/tensor/tensor_parallel.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <set>

#include "tessera/base/error.h"
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

// Parts of names are to patterns what parts of paths are to the shell's.
bool matches(std::string pattern, std::string name) {
  std::replace(pattern.begin(), pattern.end(), '.', '/');
  std::replace(name.begin(), name.end(), '.', '/');
  return fnmatch(pattern.c_str(), name.c_str(), FNM_PATHNAME) == 0;
}

[[noreturn]] void refuse(const ParallelStyle& style, const char* layer, const char* expected) {
  fail(ErrorCode::invalid_argument, "{} of {}: expected {}", to_string(style), layer, expected);
}

}  // namespace

std::string to_string(const ParallelStyle& style) {
  constexpr std::array<const char*, 3> kNames = {"ColwiseParallel", "RowwiseParallel", "SequenceParallel"};
  return kNames.at(style.index());
}

// --- parallelizing

// What a plan does to a module, all of it before anything is changed.
class Parallelizer {
 public:
  // Throws what parallelize_module does.
  Parallelizer(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan) : mesh_(mesh) {
    if (mesh.ndim() != 1) {
      fail(ErrorCode::invalid_argument, "{}, expected one dimension of it, such as mesh[\"tp\"]", mesh.to_string());
    }
    collect(module, "", modules_);
    for (const auto& [pattern, style] : plan) {
      bool is_found = false;
      for (const NamedModule& each : modules_) {
        if (!matches(pattern, each.name)) continue;
        is_found = true;
        add(each, style);
      }
      if (!is_found) fail(ErrorCode::invalid_argument, "no module is called '{}'", printable(pattern));
    }
    check_shared_parameters();
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
      fail(ErrorCode::invalid_argument, "'{}' is parallelized already", printable(name));
    }
    TensorParallel::Parallelization how = layer->parallelization(style);
    for (const Placement& layout : {how.input, how.output}) {
      if (!layout.is_partial()) continue;
      fail(ErrorCode::invalid_argument, "'{}': layout {}, expected a shard or a replica", printable(name),
           to_string(layout));
    }
    TensorParallel::State state{mesh_, how.input, how.computes_with, how.output, {}};
    for (const auto& parameter : found.module->named_parameters(/*recurse=*/false)) {
      const auto& [placement, size] = how.parameters.at(parameter.key());
      if (parameter.value().sizes() != at::IntArrayRef(size)) {
        fail(ErrorCode::invalid_argument,
             "'{}.{}' is {}, expected {}: a model is parallelized before anything else is done with its parameters",
             printable(name), printable(parameter.key()), shape_to_string(parameter.value().sizes().vec()),
             shape_to_string(size));
      }
      state.specs.emplace(parameter.key(), DTensorSpec{mesh_, MeshLayout(size, mesh_.shape(), {placement})});
    }
    if (const Planned* other = find(found.module)) {
      fail(ErrorCode::invalid_argument, "'{}' is in the plan twice, also as '{}'", printable(name),
           printable(other->name));
    }
    planned_.emplace_back(found.module, Planned{name, layer, std::move(state)});
  }

  const Planned* find(const torch::nn::Module* module) const {
    const auto found =
        std::find_if(planned_.begin(), planned_.end(), [&](const auto& each) { return each.first == module; });
    return found != planned_.end() ? &found->second : nullptr;
  }

  // What several modules have must be the same part of it for all.
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
        fail(ErrorCode::invalid_argument, "'{}' and '{}' are one parameter, expected a plan that cuts it alike in both",
             printable(first.name), printable(use.name));
      }
    }
  }

  at::Tensor part_of(const at::Tensor& whole, const MeshLayout& layout) const {
    if (!whole.is_meta()) return distribute_tensor(whole, mesh_, layout.placements()).to_local();
    return at::empty(layout.local_shape(*mesh_.coordinate()).sizes, whole.options().requires_grad(false));
  }

  const DeviceMesh& mesh_;
  std::vector<NamedModule> modules_;
  std::vector<std::pair<torch::nn::Module*, Planned>> planned_;  // in the plan's order, which all ranks have
};

void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan) {
  if (!mesh.has_this_rank()) return;
  const c10::NoGradGuard no_grad;
  mesh.group().agree_on("parallelize a module", [&] { return Parallelizer(module, mesh, plan); }).apply();
}

// --- what layers have in common

const DTensorSpec* TensorParallel::dtensor_spec(const std::string& parameter) const {
  if (!state_) return nullptr;
  const auto found = state_->specs.find(parameter);
  return found == state_->specs.end() ? nullptr : &found->second;
}

DTensor TensorParallel::input(const at::Tensor& local, std::optional<std::int64_t> last_size) const {
  const DeviceMesh& mesh = state_->mesh;
  const Placements comes = normalized({&state_->input, 1}, static_cast<std::size_t>(local.dim()));
  std::vector<std::int64_t> size = local.sizes().vec();
  if (comes[0].is_shard()) {
    const std::int64_t dim = comes[0].dim();
    std::int64_t& cut = size[static_cast<std::size_t>(dim)];
    if (last_size && dim == local.dim() - 1) {
      cut = *last_size;
    } else {
      const at::Tensor mine = at::full({1}, cut, at::kLong), all = at::empty({mesh.size()}, at::kLong);
      mesh.group().all_gather_into(all, mine);
      cut = all.sum().item<std::int64_t>();
      const MeshLayout layout(size, mesh.shape(), comes);
      for (std::int64_t i = 0; i < mesh.size(); ++i) {
        const auto has = all[i].item<std::int64_t>();
        const std::int64_t expected = layout.local_shape({&i, 1}).sizes[static_cast<std::size_t>(dim)];
        if (has == expected) continue;
        fail(ErrorCode::invalid_argument, "an input that is {}: rank {} of {} has {} of {} along it, expected {}",
             to_string(comes), i, mesh.to_string(), has, cut, expected);
      }
    }
  }
  return DTensor::from_local(local, mesh, comes, {std::move(size)}).redistribute({state_->computes_with});
}

DTensor TensorParallel::parameter(const std::string& name, const at::Tensor& local) const {
  const DTensorSpec& spec = state_->specs.at(name);
  return {spec.mesh, spec.layout, local};
}

at::Tensor TensorParallel::output(const DTensor& result) const {
  return result.redistribute({state_->output}).to_local();
}

void TensorParallel::check_whole(const char* what) const {
  if (state_) fail(ErrorCode::unsupported, "{} of a module that is parallelized", what);
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
  std::optional<DTensor> of_bias;
  if (bias.defined()) of_bias = parameter("bias", bias);
  return output(dtensor::linear(input(x, options.in_features()), parameter("weight", weight), of_bias));
}

std::shared_ptr<torch::nn::Module> ParallelLinearImpl::clone(const OptionalDevice& device) const {
  check_whole("clone");
  return LinearImpl::clone(device);
}

// --- embedding

TensorParallel::Parallelization ParallelEmbeddingImpl::parallelization(const ParallelStyle& style) const {
  if (options.max_norm() || options.scale_grad_by_freq() || options.sparse()) {
    fail(ErrorCode::unsupported, "{} of an embedding with max_norm, scale_grad_by_freq or sparse", to_string(style));
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
  return output(dtensor::embedding(parameter("weight", weight), input(ids), options.padding_idx().value_or(-1)));
}

std::shared_ptr<torch::nn::Module> ParallelEmbeddingImpl::clone(const OptionalDevice& device) const {
  check_whole("clone");
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
  std::optional<DTensor> of_weight, of_bias;
  if (weight.defined()) of_weight = parameter("weight", weight);
  if (bias.defined()) of_bias = parameter("bias", bias);
  return output(dtensor::layer_norm(input(x), options.normalized_shape(), of_weight, of_bias, options.eps()));
}

std::shared_ptr<torch::nn::Module> ParallelLayerNormImpl::clone(const OptionalDevice& device) const {
  check_whole("clone");
  return LayerNormImpl::clone(device);
}

}  // namespace tessera

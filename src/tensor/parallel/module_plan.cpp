#include "tensor/parallel/module_plan.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <fnmatch.h>

#include <algorithm>
#include <map>
#include <set>

#include "tessera/base/error.h"

namespace tessera {

namespace {

// Matches the parts of a name as the shell matches the parts of a path.
bool matches(std::string pattern, std::string name) {
  std::replace(pattern.begin(), pattern.end(), '.', '/');
  std::replace(name.begin(), name.end(), '.', '/');
  return fnmatch(pattern.c_str(), name.c_str(), FNM_PATHNAME) == 0;
}

std::string layouts_to_string(const TensorLayouts& layouts) {
  std::string text;
  for (const std::optional<Placement>& layout : layouts) {
    text += (text.empty() ? "" : ", ") + (layout ? to_string(*layout) : "none");
  }
  return "(" + text + ")";
}

void check_layouts(const std::string& name, const TensorLayouts& given, const TensorLayouts& desired) {
  bool is_alike = given.size() == desired.size();
  for (std::size_t i = 0; i < given.size() && is_alike; ++i) is_alike = given[i].has_value() == desired[i].has_value();
  if (is_alike) return;
  fail(ErrorCode::invalid_argument, "'{}': layouts {} to {}, expected one of each for the same tensors",
       printable(name), layouts_to_string(given), layouts_to_string(desired));
}

}  // namespace

DTensor with_layout(const at::Tensor& local, const DeviceMesh& mesh, const Placement& given,
                    std::optional<std::int64_t> last_size) {
  const Placements placements = normalized({&given, 1}, static_cast<std::size_t>(local.dim()));
  std::vector<std::int64_t> size = local.sizes().vec();
  if (placements[0].is_shard()) {
    const std::int64_t dim = placements[0].dim();
    std::int64_t& sharded = size[static_cast<std::size_t>(dim)];
    if (last_size && dim == local.dim() - 1) {
      sharded = *last_size;
    } else {
      const at::Tensor mine = at::full({1}, sharded, at::kLong), all = at::empty({mesh.size()}, at::kLong);
      mesh.group().all_gather_into(all, mine);
      sharded = all.sum().item<std::int64_t>();
      const MeshLayout layout(size, mesh.shape(), placements);
      for (std::int64_t i = 0; i < mesh.size(); ++i) {
        const auto has = all[i].item<std::int64_t>();
        const std::int64_t expected = layout.local_shape({&i, 1}).sizes[static_cast<std::size_t>(dim)];
        if (has == expected) continue;
        fail(ErrorCode::invalid_argument,
             "input of a parallel layer, as {}: rank {} of {} has {} of {} along the sharded dimension, expected {}",
             to_string(placements), i, mesh.to_string(), has, sharded, expected);
      }
    }
  }
  FromLocalOptions options;
  options.size = std::move(size);
  return DTensor::from_local(local, mesh, placements, options);
}

ModulePlan::ModulePlan(torch::nn::Module& module, const DeviceMesh& mesh, std::optional<std::int64_t> src_data_rank)
    : mesh_(mesh), src_data_rank_(src_data_rank) {
  for (const std::int64_t length : mesh.shape()) {
    if (!src_data_rank || (*src_data_rank >= 0 && *src_data_rank < length)) continue;
    fail(ErrorCode::invalid_argument, "parameters of rank {} on {}: expected 0 to {}", *src_data_rank, mesh.to_string(),
         length - 1);
  }
  collect(module, "");
}

void ModulePlan::collect(torch::nn::Module& module, const std::string& name) {
  modules_.push_back({name, &module});
  for (const auto& child : module.named_children()) {
    collect(*child.value(), name.empty() ? child.key() : name + "." + child.key());
  }
}

// --- a plan of styles

void ModulePlan::add(const ParallelPlan& plan) {
  if (mesh_.ndim() != 1) {
    fail(ErrorCode::invalid_argument, "mesh is {}, expected one dimension, such as mesh[\"tp\"]", mesh_.to_string());
  }
  for (const auto& [pattern, style] : plan) {
    bool is_found = false;
    for (const NamedModule& each : modules_) {
      if (!matches(pattern, each.name)) continue;
      is_found = true;
      add(each, style);
    }
    if (!is_found) {
      fail(ErrorCode::invalid_argument,
           "the plan names '{}', but no module matches, expected the name of a module or a pattern of names",
           printable(pattern));
    }
  }
  check_shared_parameters();
}

void ModulePlan::add(const NamedModule& found, const ParallelStyle& style) {
  const bool prepares = std::holds_alternative<PrepareModuleInput>(style) ||
                        std::holds_alternative<PrepareModuleOutput>(style) ||
                        std::holds_alternative<PrepareModuleInputOutput>(style);
  return prepares ? add_prepared(found, style) : add_layer(found, style);
}

void ModulePlan::add_layer(const NamedModule& found, const ParallelStyle& style) {
  const std::string& name = found.name;
  const std::string& kind = found.module->name();
  auto* layer = dynamic_cast<TensorParallel*>(found.module);
  if (layer == nullptr) {
    fail(ErrorCode::invalid_argument, "'{}' is {}, expected a ParallelLinear or another parallel layer",
         printable(name), kind);
  }
  if (layer->is_parallelized()) {
    fail(ErrorCode::invalid_argument, "'{}' is already parallelized, expected each module once", printable(name));
  }
  const TensorParallel::Parallelization how = layer->parallelization(style);
  for (const Placement& layout : {how.input, how.output}) {
    if (!layout.is_partial()) continue;
    fail(ErrorCode::invalid_argument, "'{}': layout {}, expected shard or replicate", printable(name),
         to_string(layout));
  }
  TensorParallel::State state{mesh_, {}, {}, {}};
  for (const auto& parameter : found.module->named_parameters(/*recurse=*/false)) {
    const auto placed = how.parameters.find(parameter.key());
    if (placed == how.parameters.end()) {
      std::string others;
      for (const auto& [other, _] : how.parameters) others += (others.empty() ? "" : ", ") + other;
      fail(ErrorCode::invalid_argument, "'{}.{}' is a parameter that {} does not place, expected none but [{}]",
           printable(name), printable(parameter.key()), to_string(style), printable(others));
    }
    const auto& [placement, size] = placed->second;
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
  state.input = [mesh = mesh_, given = how.input, wanted = how.computes_with](const at::Tensor& local,
                                                                              std::optional<std::int64_t> last_size) {
    return with_layout(local, mesh, given, last_size).redistribute({wanted}, false);
  };
  state.output = [wanted = how.output](const DTensor& result) {
    return result.redistribute({wanted}, false).to_local();
  };
  planned_.emplace_back(found.module,
                        Planned{name,
                                fmt::format("with input {}, computing with {}, and output {}", to_string(how.input),
                                            to_string(how.computes_with), to_string(how.output)),
                                layer, std::move(state)});
}

void ModulePlan::add_prepared(const NamedModule& found, const ParallelStyle& style) {
  const std::string& kind = found.module->name();
  auto* module = dynamic_cast<PreparedModule*>(found.module);
  if (module == nullptr) {
    fail(ErrorCode::invalid_argument, "'{}' is {}, expected a PreparedModule for {}", printable(found.name), kind,
         to_string(style));
  }
  const bool is_planned =
      std::any_of(prepared_.begin(), prepared_.end(), [&](const Prepared& each) { return each.module == module; });
  if (module->is_prepared() || is_planned) {
    fail(ErrorCode::invalid_argument, "'{}' is already prepared, expected each module once", printable(found.name));
  }
  PreparedModule::State state{mesh_, {}, {}};
  if (const auto* input = std::get_if<PrepareModuleInput>(&style)) state.input = *input;
  if (const auto* output = std::get_if<PrepareModuleOutput>(&style)) state.output = *output;
  if (const auto* both = std::get_if<PrepareModuleInputOutput>(&style)) {
    state.input = both->input;
    state.output = both->output;
  }
  const auto& [given_in, desired_in] = state.input;
  const auto& [given_out, desired_out] = state.output;
  check_layouts(found.name, given_in, desired_in);
  check_layouts(found.name, given_out, desired_out);
  prepared_.push_back(
      {found.name,
       fmt::format("inputs {} to {}, outputs {} to {}", layouts_to_string(given_in), layouts_to_string(desired_in),
                   layouts_to_string(given_out), layouts_to_string(desired_out)),
       module, std::move(state)});
}

// --- functions

void ModulePlan::add(const DistributeModuleOptions& options) {
  std::set<const torch::nn::Module*> done;
  for (const NamedModule& each : modules_) {
    if (done.insert(each.module).second) add_distributed(each, options);
  }
  check_shared_parameters();
}

void ModulePlan::add_distributed(const NamedModule& found, const DistributeModuleOptions& options) {
  const std::string& name = found.name;
  auto* layer = dynamic_cast<TensorParallel*>(found.module);
  if (layer != nullptr && layer->is_parallelized()) {
    fail(ErrorCode::invalid_argument, "'{}' is already parallelized, expected each module once", printable(name));
  }
  const auto* sharded = dynamic_cast<const DTensorParameters*>(found.module);
  TensorParallel::State state{mesh_, {}, {}, {}};
  for (const auto& parameter : found.module->named_parameters(/*recurse=*/false)) {
    const DTensorSpec* spec = sharded != nullptr ? sharded->dtensor_spec(parameter.key()) : nullptr;
    if (spec != nullptr) {
      fail(ErrorCode::invalid_argument,
           "'{}.{}' is already the local tensor of a DTensor as {}, expected a full tensor: distribute the module "
           "before its parameters are sharded, or distribute other submodules alone",
           printable(name), printable(parameter.key()), to_string(spec->layout.placements()));
    }
    const at::Tensor& full = parameter.value();
    Placements placements = options.partition ? options.partition(name, parameter.key(), full) : Placements();
    if (placements.empty()) placements.resize(static_cast<std::size_t>(mesh_.ndim()));
    const MeshLayout layout(full.sizes().vec(), mesh_.shape(), std::move(placements));
    for (const Placement& placement : layout.placements()) {
      if (!placement.is_partial() && (placement.is_replicate() || layer != nullptr)) continue;
      fail(ErrorCode::invalid_argument, "'{}.{}' of {} is placed as {}, expected {}", printable(name),
           printable(parameter.key()), found.module->name(), to_string(layout.placements()),
           layer != nullptr ? "no partial placement" : "replicate: only parameters of parallel layers can be sharded");
    }
    state.specs.emplace(parameter.key(), DTensorSpec{mesh_, layout});
  }
  state.input = [=, mesh = mesh_, f = options.input](const at::Tensor& input, std::optional<std::int64_t>) {
    return f ? f(name, input, mesh) : DTensor::from_local(input, mesh);
  };
  state.output = [=, f = options.output](const DTensor& result) {
    return f ? f(name, result) : result.redistribute({}, false).to_local();
  };
  planned_.emplace_back(found.module, Planned{name, "of any input and output", layer, std::move(state)});
  with_buffers_.push_back(found.module);
}

// --- both

const ModulePlan::Planned* ModulePlan::find(const torch::nn::Module* module) const {
  const auto found =
      std::find_if(planned_.begin(), planned_.end(), [&](const auto& each) { return each.first == module; });
  return found != planned_.end() ? &found->second : nullptr;
}

void ModulePlan::check_shared_parameters() const {
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
      fail(ErrorCode::invalid_argument, "'{}' and '{}' are one parameter, expected a plan that shards it alike in both",
           printable(first.name), printable(use.name));
    }
  }
}

void ModulePlan::describe(CallArguments& arguments) const {
  // Whether `part_of` communicates depends on the device, and distribute_tensor needs the same one on all ranks.
  const auto device_of = [](const at::Tensor& tensor) {
    return tensor.is_cpu() ? std::string() : " on " + c10::DeviceTypeName(tensor.device().type(), true);
  };
  arguments.add("src_data_rank", src_data_rank_ ? std::to_string(*src_data_rank_) : "none");
  for (const Prepared& each : prepared_)
    arguments.add("module", fmt::format("'{}' with {}", printable(each.name), each.how));
  for (const auto& [module, planned] : planned_) {
    arguments.add("module", fmt::format("'{}' {}", printable(planned.name), planned.how));
    for (const auto& parameter : module->named_parameters(/*recurse=*/false)) {
      const MeshLayout& layout = planned.state.specs.at(parameter.key()).layout;
      arguments.add(
          "parameter",
          fmt::format("'{}' {} {} as {}{}", printable(parameter.key()), c10::toString(parameter.value().scalar_type()),
                      shape_to_string(layout.size()), to_string(layout.placements()), device_of(parameter.value())));
    }
  }
  for (torch::nn::Module* module : with_buffers_) {
    for (const auto& buffer : module->named_buffers(/*recurse=*/false)) {
      arguments.add("buffer",
                    fmt::format("'{}' {} {}{}", printable(buffer.key()), c10::toString(buffer.value().scalar_type()),
                                shape_to_string(buffer.value().sizes().vec()), device_of(buffer.value())));
    }
  }
}

void ModulePlan::apply() {
  std::set<const void*> done;
  for (auto& [module, planned] : planned_) {
    for (auto& parameter : module->named_parameters(/*recurse=*/false)) {
      at::Tensor& tensor = parameter.value();
      if (!done.insert(tensor.unsafeGetTensorImpl()).second) continue;
      tensor.mutable_grad().reset();
      tensor.set_data(part_of(tensor.detach(), planned.state.specs.at(parameter.key()).layout));
    }
    if (planned.layer != nullptr) planned.layer->state_ = std::move(planned.state);
  }
  for (torch::nn::Module* module : with_buffers_) {
    for (auto& buffer : module->named_buffers(/*recurse=*/false)) {
      at::Tensor& tensor = buffer.value();
      if (!done.insert(tensor.unsafeGetTensorImpl()).second) continue;
      const MeshLayout layout(tensor.sizes().vec(), mesh_.shape(), Placements(static_cast<std::size_t>(mesh_.ndim())));
      tensor.set_data(part_of(tensor.detach(), layout));
    }
  }
  for (Prepared& each : prepared_) each.module->state_ = std::move(each.state);
}

at::Tensor ModulePlan::part_of(const at::Tensor& full, const MeshLayout& layout) const {
  if (!full.is_meta()) return distribute_tensor(full, mesh_, layout.placements(), src_data_rank_).to_local();
  return at::empty(layout.local_shape(*mesh_.coordinate()).sizes, full.options().requires_grad(false));
}

namespace {

template <typename Plan>
void carry_out(const char* call, torch::nn::Module& module, const DeviceMesh& mesh, const Plan& plan,
               std::optional<std::int64_t> src_data_rank) {
  if (!mesh.has_this_rank()) return;
  const c10::NoGradGuard no_grad;
  std::optional<ModulePlan> planned;
  mesh.group().check_call(call, [&](CallArguments& arguments) {
    planned.emplace(module, mesh, src_data_rank);
    planned->add(plan);
    planned->describe(arguments);
  });
  planned->apply();
}

}  // namespace

void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                        std::optional<std::int64_t> src_data_rank) {
  carry_out("parallelize a module", module, mesh, plan, src_data_rank);
}

void distribute_module(torch::nn::Module& module, const DeviceMesh& mesh, const DistributeModuleOptions& options) {
  carry_out("distribute a module", module, mesh, options, options.src_data_rank);
}

}  // namespace tessera

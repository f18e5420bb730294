#include "tessera/state/module_state.h"

#include <torch/types.h>

#include <optional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/state/internal/local_state_dict.h"
#include "tessera/state/internal/problems.h"
#include "tessera/tensor/internal/materialize.h"

namespace tessera {

namespace {

struct ModelTensor {
  std::string name;
  at::Tensor tensor;
  bool is_parameter;
  bool is_selected = true;  // by the options
};

void collect(const torch::nn::Module& module, const std::string& prefix, std::vector<ModelTensor>& tensors) {
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    tensors.push_back({prefix + parameter.key(), parameter.value(), /*is_parameter=*/true});
  }
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    tensors.push_back({prefix + buffer.key(), buffer.value(), /*is_parameter=*/false});
  }
  for (const auto& child : module.named_children()) collect(*child.value(), prefix + child.key() + ".", tensors);
}

// Returns the first name of `submodule` followed by a dot, or nothing if it is not in `module`.
std::optional<std::string> prefix_of(const torch::nn::Module* submodule, const torch::nn::Module& module,
                                     const std::string& prefix) {
  if (submodule == &module) return prefix;
  for (const auto& child : module.named_children()) {
    if (auto found = prefix_of(submodule, *child.value(), prefix + child.key() + ".")) return found;
  }
  return std::nullopt;
}

// Marks the tensors that the options select. Without keep_submodule_prefixes, removes those outside of the submodules
// and the prefixes of the others.
void select(std::vector<ModelTensor>& tensors, const std::vector<std::string>& prefixes,
            const StateDictOptions& options) {
  std::vector<ModelTensor> kept;
  for (ModelTensor& one : tensors) {
    const auto prefix =
        std::find_if(prefixes.begin(), prefixes.end(), [&](const std::string& p) { return one.name.starts_with(p); });
    const bool is_outside = !prefixes.empty() && prefix == prefixes.end();
    const bool is_frozen = one.is_parameter && one.tensor.defined() && !one.tensor.requires_grad();
    one.is_selected = !is_outside && !(options.ignore_frozen_params && is_frozen);
    if (!options.keep_submodule_prefixes && is_outside) continue;
    if (!options.keep_submodule_prefixes && !prefixes.empty()) one.name.erase(0, prefix->size());
    kept.push_back(std::move(one));
  }
  tensors = std::move(kept);
}

// Returns the module's tensors by their names in the state dict.
std::vector<ModelTensor> tensors_of(const torch::nn::Module& module, const StateDictOptions& options) {
  std::vector<ModelTensor> tensors;
  collect(module, "", tensors);
  select(tensors, submodule_prefixes(module, options), options);
  std::set<std::string_view> names;
  for (const ModelTensor& one : tensors) {
    if (names.insert(one.name).second) continue;
    fail(ErrorCode::invalid_argument, "model state dict: two tensors have the name '{}', expected unique names",
         printable(one.name));
  }
  return tensors;
}

std::string in_quotes(const std::string& name) { return fmt::format("'{}'", printable(name)); }

// Reports a value that ParameterParts rejects.
void add_mismatch(const std::string& name, const Value& given, const std::vector<std::int64_t>& expected,
                  Problems& problems) {
  const auto* tensor = given.get_if<at::Tensor>();
  const auto* sharded = given.get_if<std::shared_ptr<Checkpointable>>();
  if (tensor == nullptr && sharded == nullptr) {
    return problems.add("not a tensor", fmt::format("{} is {}", name, kind_name(given.kind())));
  }
  const std::vector<std::int64_t> size = tensor != nullptr ? tensor->sizes().vec() : (*sharded)->size();
  if (size != expected) {
    problems.add("size mismatch",
                 fmt::format("{} is {}, expected {}", name, shape_to_string(size), shape_to_string(expected)));
  } else {
    problems.add("sharded differently", name);
  }
}

}  // namespace

std::vector<std::string> submodule_prefixes(const torch::nn::Module& module, const StateDictOptions& options) {
  std::vector<std::string> prefixes;
  for (std::size_t i = 0; i < options.submodules.size(); ++i) {
    std::optional<std::string> prefix = prefix_of(options.submodules[i].get(), module, "");
    if (!prefix) {
      fail(ErrorCode::invalid_argument,
           "model state dict: submodule {} of the options is not in the model, expected a submodule of it", i);
    }
    prefixes.push_back(std::move(*prefix));
  }
  return prefixes;
}

StateDict local_model_state(const torch::nn::Module& module, const ParameterParts& parts,
                            const StateDictOptions& options) {
  StateDict state;
  for (const ModelTensor& one : tensors_of(module, options)) {
    if (one.is_selected) state.insert_or_assign(one.name, parts.to_state(one.tensor, one.tensor.detach()));
  }
  return state;
}

ModelStatePlan plan_model_state(const torch::nn::Module& module, const StateDict& state_dict,
                                const ParameterParts& parts, const StateDictOptions& options) {
  IncompatibleKeys incompatible;
  Problems problems;
  std::set<std::string> known;
  struct Copy {
    at::Tensor to, from;
    at::Device device;  // for a tensor on meta
  };
  std::vector<Copy> copies;
  for (const auto& [name, to, is_parameter, is_selected] : tensors_of(module, options)) {
    known.insert(name);
    const Value* given = state_dict.find(name);
    if (!given) {
      if (!is_selected) continue;
      incompatible.missing.push_back(name);
      if (options.strict) problems.add("missing", in_quotes(name));
      continue;
    }
    const std::optional<at::Tensor> from = parts.from_state(to, *given);
    if (!from) {
      add_mismatch(in_quotes(name), *given, parts.size_of(to), problems);
    } else if (from->is_complex() && !to.is_complex()) {
      problems.add("dtype mismatch", fmt::format("{} is complex, expected {}", in_quotes(name),
                                                 to_string(parts.to_state(to, to.detach()))));
    } else if (from->is_meta() && from->numel() != 0) {
      problems.add("without memory", in_quotes(name) + " is on meta");
    } else {
      if (to.is_meta()) check_can_materialize(to, "load model state dict: " + in_quotes(name));
      const DTensorSpec* spec = parts.find(to);
      const at::Device of_mesh = spec != nullptr ? at::Device(spec->mesh.device_type()) : at::Device(at::kCPU);
      copies.push_back({to, *from, from->is_meta() ? of_mesh : from->device()});
    }
  }
  for (const auto& [key, value] : state_dict) {
    const auto* name = std::get_if<std::string>(&key);
    if (name && known.contains(*name)) continue;
    incompatible.unexpected.push_back(name ? *name : to_string(key));
    if (options.strict) problems.add("unexpected", in_quotes(incompatible.unexpected.back()));
  }
  problems.raise("load model state dict");
  return {std::move(incompatible), [copies = std::move(copies)] {
            const torch::NoGradGuard no_grad;
            for (const Copy& copy : copies) {
              if (copy.to.is_meta()) materialize_in_place(copy.to, copy.device);
              if (copy.to.numel() != 0) copy.to.detach().copy_(copy.from);
            }
          }};
}

}  // namespace tessera

#include "tessera/state/module_state.h"

#include <torch/types.h>

#include "tessera/base/error.h"
#include "tessera/state/internal/parameter_parts.h"
#include "tessera/state/internal/problems.h"

namespace tessera {

namespace {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

void collect(const torch::nn::Module& module, const std::string& prefix, std::vector<NamedTensor>& tensors) {
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    tensors.push_back({prefix + parameter.key(), parameter.value()});
  }
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    tensors.push_back({prefix + buffer.key(), buffer.value()});
  }
  for (const auto& child : module.named_children()) collect(*child.value(), prefix + child.key() + ".", tensors);
}

std::vector<NamedTensor> tensors_of(const torch::nn::Module& module) {
  std::vector<NamedTensor> tensors;
  collect(module, "", tensors);
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

StateDict get_model_state_dict(const torch::nn::Module& module) {
  return get_model_state_dict(module, ParameterParts(module));
}

StateDict get_model_state_dict(const torch::nn::Module& module, const ParameterParts& parts) {
  StateDict state;
  for (const auto& [name, tensor] : tensors_of(module)) {
    if (state.contains(name)) {
      fail(ErrorCode::invalid_argument, "get model state dict: two tensors have the name '{}', expected unique names",
           printable(name));
    }
    state.insert_or_assign(name, parts.to_state(tensor, tensor.detach()));
  }
  return state;
}

IncompatibleKeys set_model_state_dict(torch::nn::Module& module, const StateDict& state_dict,
                                      const StateDictOptions& options) {
  return set_model_state_dict(module, state_dict, options, ParameterParts(module));
}

IncompatibleKeys set_model_state_dict(torch::nn::Module& module, const StateDict& state_dict,
                                      const StateDictOptions& options, const ParameterParts& parts) {
  const StateDict own = get_model_state_dict(module, parts);
  IncompatibleKeys incompatible;
  Problems problems;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  for (const auto& [name, to] : tensors_of(module)) {
    const Value* given = state_dict.find(name);
    if (!given) {
      incompatible.missing.push_back(name);
      if (options.strict) problems.add("missing", in_quotes(name));
      continue;
    }
    const std::optional<at::Tensor> from = parts.from_state(to, *given);
    if (!from) {
      add_mismatch(in_quotes(name), *given, parts.size_of(to), problems);
    } else if (from->is_complex() && !to.is_complex()) {
      problems.add("dtype mismatch",
                   fmt::format("{} is complex, expected {}", in_quotes(name), to_string(own.at(name))));
    } else {
      copies.emplace_back(to.detach(), *from);
    }
  }
  for (const auto& [key, value] : state_dict) {
    if (own.contains(key)) continue;
    const auto* name = std::get_if<std::string>(&key);
    incompatible.unexpected.push_back(name ? *name : to_string(key));
    if (options.strict) problems.add("unexpected", in_quotes(incompatible.unexpected.back()));
  }
  problems.raise("load model state dict");
  if (options.confirm) options.confirm();
  const torch::NoGradGuard no_grad;
  for (auto& [to, from] : copies) to.copy_(from);
  return incompatible;
}

}  // namespace tessera

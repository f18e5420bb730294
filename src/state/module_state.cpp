#include "tessera/state/module_state.h"

#include <torch/types.h>

#include "state/problems.h"
#include "tessera/base/error.h"

namespace tessera {

namespace {

void add_tensor(StateDict& state, const std::string& name, const at::Tensor& tensor) {
  if (state.contains(name)) {
    fail(ErrorCode::invalid_argument, "model state dict: two tensors are called '{}'", printable(name));
  }
  state.insert_or_assign(name, tensor.detach());
}

void collect(const torch::nn::Module& module, const std::string& prefix, StateDict& state) {
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    add_tensor(state, prefix + parameter.key(), parameter.value());
  }
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    add_tensor(state, prefix + buffer.key(), buffer.value());
  }
  for (const auto& child : module.named_children()) collect(*child.value(), prefix + child.key() + ".", state);
}

std::string in_quotes(const std::string& name) { return fmt::format("'{}'", printable(name)); }

}  // namespace

StateDict get_model_state_dict(const torch::nn::Module& module) {
  StateDict state;
  collect(module, "", state);
  return state;
}

IncompatibleKeys set_model_state_dict(torch::nn::Module& module, const StateDict& state_dict,
                                      const StateDictOptions& options) {
  StateDict own = get_model_state_dict(module);
  IncompatibleKeys incompatible;
  Problems problems;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  for (const auto& [key, value] : own) {
    const std::string& name = std::get<std::string>(key);
    const Value* given = state_dict.find(key);
    if (!given) {
      incompatible.missing.push_back(name);
      if (options.strict) problems.add("missing", in_quotes(name));
      continue;
    }
    const at::Tensor& to = value.get<at::Tensor>();
    const at::Tensor* from = given->get_if<at::Tensor>();
    if (!from) {
      problems.add("no tensor", fmt::format("{} is {}", in_quotes(name), kind_name(given->kind())));
    } else if (from->sizes() != to.sizes()) {
      problems.add("size mismatch",
                   fmt::format("{} is {}, expected {}", in_quotes(name), shape_to_string(from->sizes().vec()),
                               shape_to_string(to.sizes().vec())));
    } else if (from->is_complex() && !to.is_complex()) {
      problems.add("dtype mismatch", fmt::format("{} is complex, expected {}", in_quotes(name), to_string(value)));
    } else {
      copies.emplace_back(to, *from);
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

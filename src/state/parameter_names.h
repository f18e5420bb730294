#pragma once
// The names of a module's parameters.

#include <torch/nn/module.h>

#include <map>
#include <string>
#include <vector>

#include "tessera/base/error.h"

namespace tessera {

class ParameterNames {
 public:
  explicit ParameterNames(const torch::nn::Module& module) { collect(module, ""); }

  // Returns all names of an optimizer's parameter, in the module's order. Throws Error(invalid_argument) if it has
  // none.
  const std::vector<std::string>& of(const at::Tensor& parameter, std::size_t group, std::size_t position) const {
    const auto found = names_.find(parameter.unsafeGetTensorImpl());
    if (found == names_.end()) {
      fail(ErrorCode::invalid_argument,
           "optimizer state dict: parameter {} of group {} is not in the module, expected a parameter of it", position,
           group);
    }
    return found->second;
  }

 private:
  void collect(const torch::nn::Module& module, const std::string& prefix) {
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      if (parameter.value().defined()) {
        names_[parameter.value().unsafeGetTensorImpl()].push_back(prefix + parameter.key());
      }
    }
    for (const auto& child : module.named_children()) collect(*child.value(), prefix + child.key() + ".");
  }

  std::map<const void*, std::vector<std::string>> names_;
};

}  // namespace tessera

#pragma once
// The key of a parameter in the state of LibTorch's optimizers.

#include <torch/optim/optimizer.h>

#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

namespace tessera {

// Returns the key of a parameter in Optimizer::state(): the address of its TensorImpl, as text before 2.1.
using OptimizerStateMap = std::remove_reference_t<decltype(std::declval<torch::optim::Optimizer&>().state())>;
template <typename Key = OptimizerStateMap::key_type>
Key optimizer_key(const at::Tensor& parameter) {
  if constexpr (std::is_same_v<Key, std::string>) {
    std::ostringstream text;
    text << parameter.unsafeGetTensorImpl();
    return text.str();
  } else {
    return parameter.unsafeGetTensorImpl();
  }
}

}  // namespace tessera

#pragma once
// Copies of layers that derive from LibTorch's.

#include <torch/nn/module.h>

#include <memory>

#include "tessera/tensor/torch_types.h"

namespace tessera {

// Returns a copy of `layer` of its own class. Base::clone alone returns a Base, which a container does not take as a
// Layer.
template <typename Base, typename Layer>
std::shared_ptr<torch::nn::Module> cloned_layer(const Layer& layer, const OptionalDevice& device) {
  const auto copy = std::make_shared<Layer>(layer);  // shares the parameters until these are assigned
  static_cast<Base&>(*copy) = dynamic_cast<const Base&>(*layer.Base::clone(device));
  return copy;
}

}  // namespace tessera

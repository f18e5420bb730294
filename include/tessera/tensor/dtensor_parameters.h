#pragma once
/// \file
/// Modules whose parameters are parts of larger ones: each is the local tensor of a DTensor.
///
/// A LibTorch module holds plain tensors, so a parameter can't be a DTensor. It is the local tensor of one, and the
/// module says of which. State dicts of models and optimizers (`state`), and FSDP's, ask for it and hold DTensors.

#include <string>

#include "tessera/layout/mesh_layout.h"
#include "tessera/tensor/device_mesh.h"

namespace tessera {

/// What a DTensor is but for its elements. PyTorch: DTensorSpec.
struct DTensorSpec {
  DeviceMesh mesh;
  MeshLayout layout;
  bool operator==(const DTensorSpec&) const = default;
};

/// A torch::nn::Module that is also this has such parameters.
class DTensorParameters {
 public:
  virtual ~DTensorParameters() = default;
  /// Of which DTensor the module's own parameter of this name is the local tensor; null if it is a tensor by itself.
  /// No placement is partial.
  virtual const DTensorSpec* dtensor_spec(const std::string& parameter) const = 0;

 protected:
  DTensorParameters() = default;
  DTensorParameters(const DTensorParameters&) = default;
  DTensorParameters& operator=(const DTensorParameters&) = default;
};

}  // namespace tessera

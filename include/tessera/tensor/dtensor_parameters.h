#pragma once
/// \file
/// An interface of modules whose parameters are the local tensors of DTensors.
///
/// A LibTorch module holds plain tensors, so a parameter cannot be a DTensor. Instead it is the local tensor of a
/// DTensor, whose layout the module reports. State dicts of models and optimizers (`state`) and those of FSDP use this
/// layout and hold DTensors.

#include <string>

#include "tessera/layout/mesh_layout.h"
#include "tessera/tensor/device_mesh.h"

namespace tessera {

/// A DTensor without its elements. PyTorch: DTensorSpec.
struct DTensorSpec {
  DeviceMesh mesh;
  MeshLayout layout;
  bool operator==(const DTensorSpec&) const = default;
};

/// The interface of such modules, which also derive from torch::nn::Module.
class DTensorParameters {
 public:
  virtual ~DTensorParameters() = default;
  /// Returns the DTensor whose local tensor is the module's own parameter of this name; null if the parameter is a
  /// plain tensor. No placement is partial.
  virtual const DTensorSpec* dtensor_spec(const std::string& parameter) const = 0;

 protected:
  DTensorParameters() = default;
  DTensorParameters(const DTensorParameters&) = default;
  DTensorParameters& operator=(const DTensorParameters&) = default;
};

}  // namespace tessera

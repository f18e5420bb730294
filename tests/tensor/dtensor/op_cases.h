#pragma once
// Ops on DTensors beside those of ATen.

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "layout/mesh_cases.h"
#include "tessera/tensor/dtensor.h"

namespace tessera::testing {

struct OpCase {
  std::string name;
  std::vector<Sizes> sizes;  // of the inputs
  std::function<DTensor(const std::vector<DTensor>&)> ours;
  std::function<at::Tensor(const std::vector<at::Tensor>&)> aten;
  bool has_gradient = true;
};

// Ops that are tried on four meshes, and ops that are tried on two.
std::vector<OpCase> op_cases();
std::vector<OpCase> more_op_cases();

}  // namespace tessera::testing

#pragma once
// Ops on DTensors beside those of ATen.

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "layout/mesh_cases.h"
#include "tensor/case_function.h"
#include "tessera/tensor/dtensor.h"

namespace tessera::testing {

struct OpCase {
  std::string name;
  std::vector<Sizes> sizes;  // of the inputs
  CaseFunction<DTensor(const std::vector<DTensor>&)> ours;
  CaseFunction<at::Tensor(const std::vector<at::Tensor>&)> aten;
  bool has_gradient = true;
};

// Ops that are tried on four meshes, and ops that are tried on two.
std::vector<OpCase> op_cases();
std::vector<OpCase> more_op_cases();
std::vector<OpCase> math_cases();
std::vector<OpCase> linalg_cases();
// Further ops, by family.
std::vector<OpCase> index_cases();
std::vector<OpCase> rearranging_cases();
std::vector<OpCase> spatial_cases();

// Expects values and gradients of the full tensors for all placements of the inputs on a mesh of `shape`; for a sample
// if it has several dimensions.
void expect_as_on_full_tensors(const std::vector<OpCase>& ops, const Sizes& shape);
// The same for inputs that are sharded with a stride or averages, on a mesh [2, 2].
void expect_as_on_full_tensors_if_strided(const std::vector<OpCase>& ops);

}  // namespace tessera::testing

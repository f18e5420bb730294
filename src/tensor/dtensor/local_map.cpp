#include "tessera/tensor/dtensor/local_map.h"

#include "tensor/dtensor/local_outside.h"
#include "tensor/torch_errors.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"

namespace tessera {

namespace {

void check_number(const char* what, std::size_t found, std::size_t expected) {
  if (found == 0 || found == expected) return;
  fail(ErrorCode::invalid_argument, "local_map with {} {}: expected {}, one for each", found, what, expected);
}

// Returns the local tensor of input `i`.
at::Tensor local_of_input(const DTensor& input, std::size_t i, const LocalMapOptions& options) {
  DTensor placed = input;
  if (!options.in_placements.empty() && !options.in_placements[i].empty()) {
    const MeshLayout wanted(input.size(), input.device_mesh().shape(), options.in_placements[i]);
    if (!(wanted == input.layout())) {
      if (!options.redistribute_inputs) {
        fail(ErrorCode::invalid_argument, "local_map: input {} is {}, expected placements {}", i, input.to_string(),
             to_string(wanted.placements()));
      }
      placed = input.redistribute(wanted.placements());
    }
  }
  return placed.to_local(options.in_grad_placements.empty() ? Placements() : options.in_grad_placements[i]);
}

}  // namespace

std::vector<DTensor> local_map(FunctionRef<std::vector<at::Tensor>(const std::vector<at::Tensor>& locals)> f,
                               std::span<const DTensor> inputs, const LocalMapOptions& options) {
  check_number("in_placements", options.in_placements.size(), inputs.size());
  check_number("in_grad_placements", options.in_grad_placements.size(), inputs.size());
  check_number("out_sizes", options.out_sizes.size(), options.out_placements.size());
  if (inputs.empty() && !options.device_mesh)
    fail(ErrorCode::invalid_argument, "local_map without inputs: expected a device mesh");
  const DeviceMesh mesh = options.device_mesh ? *options.device_mesh : inputs[0].device_mesh();
  std::vector<at::Tensor> locals;
  locals.reserve(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) locals.push_back(local_of_input(inputs[i], i, options));

  std::vector<at::Tensor> results;
  try {
    results = mesh.has_this_rank()
                  ? f(locals)
                  : std::vector(options.out_placements.size(), local_outside({0}, at::TensorOptions(), locals));
  } catch (...) {
    rethrow_as_error("local_map");
  }
  if (results.size() != options.out_placements.size()) {
    fail(ErrorCode::invalid_argument, "local_map with {} out_placements: the function returned {} tensors, expected {}",
         options.out_placements.size(), results.size(), options.out_placements.size());
  }
  std::vector<DTensor> outputs;
  outputs.reserve(results.size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    FromLocalOptions from_local;
    if (!options.out_sizes.empty()) {
      from_local.size = options.out_sizes[i];
    } else if (!mesh.has_this_rank()) {
      from_local.size = std::vector<std::int64_t>(dims_for(options.out_placements[i]), 0);
    }
    outputs.push_back(DTensor::from_local(results[i], mesh, options.out_placements[i], from_local));
  }
  return outputs;
}

}  // namespace tessera

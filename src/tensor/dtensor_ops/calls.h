#pragma once
// Calls of built-in ops, by kind of rule.

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "tensor/dtensor_ops/rules.h"
#include "tessera/tensor/dtensor_op.h"

namespace tessera::dtensor {

using Inputs = std::span<const DTensor>;
using Sizes = std::vector<std::int64_t>;

enum class Linearity : std::uint8_t { none, linear };

// Returns the inputs of a call: `optional` ones that are there come last.
inline std::vector<DTensor> inputs_of(std::initializer_list<const DTensor*> inputs,
                                      std::initializer_list<const std::optional<DTensor>*> optional) {
  std::vector<DTensor> result;
  result.reserve(inputs.size() + optional.size());
  for (const DTensor* input : inputs) result.push_back(*input);
  for (const std::optional<DTensor>* input : optional) {
    if (*input) result.push_back(**input);
  }
  return result;
}

// Element by element. `f` takes as many local tensors as there are inputs.
template <typename F>
DTensor unary(const char* op, const DTensor& x, Linearity linearity, const F& f) {
  return call(
      op, {&x, 1}, [&](Inputs inputs) { return rules::elementwise(op, inputs, linearity == Linearity::linear); },
      [&](Inputs inputs) -> at::Tensor { return f(inputs[0].local_tensor()); });
}

template <typename F>
DTensor binary(const char* op, const DTensor& a, const DTensor& b, Linearity linearity, const F& f) {
  const std::vector<DTensor> both = {a, b};
  return call(
      op, both, [&](Inputs inputs) { return rules::elementwise(op, inputs, linearity == Linearity::linear); },
      [&](Inputs inputs) -> at::Tensor { return f(inputs[0].local_tensor(), inputs[1].local_tensor()); });
}

// For `inputs[0]`, not sharded along `unsharded_dims` (ascending), and replicated parameters.
template <typename F>
DTensor along_dims(const char* op, const std::vector<DTensor>& inputs, const Sizes& unsharded_dims, const F& f) {
  return call(
      op, inputs, [&](Inputs given) { return rules::along_dims(given, unsharded_dims); }, f);
}

// For an op of one tensor; `f` takes a local tensor.
template <typename F>
DTensor along_dims(const char* op, const DTensor& x, const Sizes& unsharded_dims, const F& f) {
  return along_dims(op, std::vector<DTensor>{x}, unsharded_dims,
                    [&](Inputs inputs) -> at::Tensor { return f(inputs[0].local_tensor()); });
}

// `f` takes a local tensor and the dimensions, from the front. For `partial` see rules::reduction.
template <typename F>
DTensor reduction(const char* op, const DTensor& x, const Sizes& dims, bool keepdim, std::optional<Placement> partial,
                  const F& f) {
  const Sizes over = rules::dims_from_front(op, dims, x.dim());
  return call(
      op, {&x, 1}, [&](Inputs inputs) { return rules::reduction(inputs[0], over, keepdim, partial); },
      [&](Inputs inputs) -> at::Tensor { return f(inputs[0].local_tensor(), over); });
}

// `f` takes the local tensor and the size of the local result.
template <typename F>
DTensor mapped(const char* op, const DTensor& x, const Sizes& size, const rules::DimMap& map, const F& f) {
  return call(
      op, {&x, 1}, [&](Inputs inputs) { return rules::mapped(inputs[0], size, map); },
      [&](Inputs inputs) -> at::Tensor {
        const DeviceMesh& mesh = inputs[0].device_mesh();
        const MeshLayout result(size, mesh.shape(), rules::mapped(inputs[0].placements(), map));
        return f(inputs[0].local_tensor(), result.local_shape(*mesh.coordinate()).sizes);
      });
}

// Returns the map that leaves every dimension where it is.
inline rules::DimMap same_dims(const DTensor& x) {
  rules::DimMap map;
  for (std::size_t d = 0; d < x.size().size(); ++d) map.emplace_back(d);
  return map;
}

// Returns whether `x` is sharded along `dim`, counted from the front.
inline bool is_sharded_along(const DTensor& x, std::int64_t dim) {
  for (const Placement& placement : x.placements()) {
    if (placement.is_shard(dim)) return true;
  }
  return false;
}

// The places of ids 0 to n - 1 in a local tensor that is sharded along a dimension of n.
struct LocalPlaces {
  at::Tensor places;   // 0 for ids that are elsewhere
  at::Tensor is_here;  // bool
};
LocalPlaces local_places(const DTensor& x, std::int64_t dim, const at::Tensor& ids);

}  // namespace tessera::dtensor

#pragma once
// Calls of built-in ops, by kind of rule.

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <functional>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "tensor/dtensor/local_outside.h"
#include "tensor/dtensor_rules/rules.h"
#include "tessera/tensor/dtensor_op.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::dtensor {

using Inputs = std::span<const DTensor>;
using Sizes = std::vector<std::int64_t>;

using rules::Linearity;

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

inline std::vector<at::Tensor> locals_of(Inputs inputs) {
  std::vector<at::Tensor> locals;
  locals.reserve(inputs.size());
  for (const DTensor& input : inputs) locals.push_back(input.local_tensor());
  return locals;
}

// Returns the operands as DTensors: plain tensors are replicated on the mesh of the first DTensor. Throws
// Error(invalid_argument) if there is none.
std::vector<DTensor> on_one_mesh(const char* op, std::initializer_list<AnyTensor> operands);

// Element by element, of any number of inputs. `f` takes the vector of their local tensors. Ranks outside of the mesh
// call it on tensors without elements, for the dtype of the result.
template <typename F>
DTensor elementwise(const char* op, const std::vector<DTensor>& inputs, Linearity linearity, const F& f) {
  const auto rule = [&](Inputs given) {
    OpRule of_result = rules::elementwise(op, given, linearity);
    if (given[0].device_mesh().has_this_rank()) return of_result;
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> none;
    for (const DTensor& input : given) none.push_back(local_outside(input.size(), input.local_tensor().options()));
    of_result.output_dtypes = {f(none).scalar_type()};
    return of_result;
  };
  return call(op, inputs, rule, [&](Inputs given) -> at::Tensor { return f(locals_of(given)); });
}

// Element by element. `f` takes as many local tensors as there are inputs.
template <typename F>
DTensor unary(const char* op, const DTensor& x, Linearity linearity, const F& f) {
  return elementwise(op, {x}, linearity, [&](const std::vector<at::Tensor>& t) -> at::Tensor { return f(t[0]); });
}

template <typename F>
DTensor binary(const char* op, const AnyTensor& a, const AnyTensor& b, Linearity linearity, const F& f) {
  return elementwise(op, on_one_mesh(op, {a, b}), linearity,
                     [&](const std::vector<at::Tensor>& t) -> at::Tensor { return f(t[0], t[1]); });
}

// The dtypes of results; none if they are that of the first input.
using DTypes = std::vector<at::ScalarType>;

// Of a sum or a product of elements of x: integers give Long.
inline DTypes summed_dtypes(const DTensor& x) {
  return {at::isIntegralType(x.scalar_type(), /*includeBool=*/true) ? at::kLong : x.scalar_type()};
}

inline OpRule with_dtypes(OpRule rule, DTypes dtypes) {
  rule.output_dtypes = std::move(dtypes);
  return rule;
}

// For `inputs[0]`, not sharded along `unsharded_dims` (ascending), and replicated parameters.
template <typename F>
DTensor along_dims(const char* op, const std::vector<DTensor>& inputs, const Sizes& unsharded_dims, const F& f,
                   const DTypes& dtypes = {}) {
  return call(
      op, inputs, [&](Inputs given) { return with_dtypes(rules::along_dims(given, unsharded_dims), dtypes); }, f);
}

// For an op of one tensor; `f` takes a local tensor.
template <typename F>
DTensor along_dims(const char* op, const DTensor& x, const Sizes& unsharded_dims, const F& f,
                   const DTypes& dtypes = {}) {
  return along_dims(
      op, std::vector<DTensor>{x}, unsharded_dims,
      [&](Inputs inputs) -> at::Tensor { return f(inputs[0].local_tensor()); }, dtypes);
}

// `f` takes a local tensor and the dimensions, from the front. For `partial` see rules::reduction.
template <typename F>
DTensor reduction(const char* op, const DTensor& x, const Sizes& dims, bool keepdim, std::optional<Placement> partial,
                  const F& f, const DTypes& dtypes = {}) {
  const Sizes over = rules::dims_from_front(op, dims, x.dim());
  return call(
      op, {&x, 1},
      [&](Inputs inputs) { return with_dtypes(rules::reduction(inputs[0], over, keepdim, partial), dtypes); },
      [&](Inputs inputs) -> at::Tensor { return f(inputs[0].local_tensor(), over); });
}

// `f` takes the local tensor and the size of the local result. For `reduced` see rules::mapped.
template <typename F>
DTensor mapped(const char* op, const DTensor& x, const Sizes& size, const rules::DimMap& map, const F& f,
               std::span<const ReduceOp> reduced = {}, const DTypes& dtypes = {}) {
  return call(
      op, {&x, 1}, [&](Inputs inputs) { return with_dtypes(rules::mapped(inputs[0], size, map, reduced), dtypes); },
      [&](Inputs inputs) -> at::Tensor {
        const DeviceMesh& mesh = inputs[0].device_mesh();
        const MeshLayout result(size, mesh.shape(), rules::mapped(inputs[0].placements(), map));
        return f(inputs[0].local_tensor(), result.local_shape(*mesh.coordinate()).sizes);
      });
}

// For an op of several results with the placements of the first. `f` returns the local tensors; `sizes` are those of
// the full results after the first.
template <typename F>
std::vector<DTensor> call_for_all(const char* op, const std::vector<DTensor>& inputs, PlacementRuleRef rule,
                                  const std::vector<Sizes>& sizes, const F& f, const DTypes& dtypes = {}) {
  const auto rule_of_all = [&](Inputs given) {
    OpRule of_all = with_dtypes(rule(given), dtypes);
    of_all.more_output_sizes = sizes;
    return of_all;
  };
  return call_with_results(op, inputs, rule_of_all, f);
}

// For one tensor, of which `f` reduces or orders dimension `dim`, and returns values and their indices of the same
// size. `length`: of that dimension in the results; nullopt if it is removed.
template <typename F>
ValuesAndIndices with_indices(const char* op, const DTensor& x, std::int64_t dim, std::optional<std::int64_t> length,
                              const F& f) {
  const Sizes over = rules::dims_from_front(op, {dim}, x.dim());
  Sizes size = x.size();
  for (const std::int64_t d : over) {
    if (length) {
      size[static_cast<std::size_t>(d)] = *length;
    } else {
      size.erase(size.begin() + d);
    }
  }
  const auto rule = [&](Inputs inputs) {
    if (!length) return rules::reduction(inputs[0], over, false, std::nullopt);
    OpRule given = rules::along_dims(inputs, over);
    given.output_size = size;
    return given;
  };
  const auto compute = [&](Inputs inputs) {
    auto [values, indices] = f(inputs[0].local_tensor(), dim);
    return std::vector<at::Tensor>{values, indices};
  };
  std::vector<DTensor> both = call_for_all(op, {x}, rule, {size}, compute, {x.scalar_type(), at::kLong});
  return {both[0], both[1]};
}

// Returns x in the dtype in which LibTorch computes sums of its elements: float for half precision, which would
// overflow or round.
inline DTensor widened(const DTensor& x) {
  const at::ScalarType wide = at::toOpMathType(x.scalar_type());
  return wide == x.scalar_type() ? x : to(x, wide);
}
// Returns a result that was computed from widened(x) in half precision, if x is.
inline DTensor narrowed_as(const DTensor& x, const DTensor& result) {
  const at::ScalarType dtype = x.scalar_type();
  return at::toOpMathType(dtype) == dtype ? result : to(result, dtype);
}

// Throws Error(invalid_argument) for a dtype without fractions, for which LibTorch does not have the op.
void refuse_integers(const char* op, const DTensor& x);
// Throws Error(invalid_argument) unless x has norms of this order: not of integers, nor of negative or infinite order
// of no elements.
void check_norm(const char* op, const DTensor& x, double p, const Sizes& dims = {});
// Returns powsum(widened(x), ...).
DTensor wide_powsum(const DTensor& x, double p, const Sizes& dims = {}, bool keepdim = false);
// Returns x^(1/p) of sums of powers, without partial placements; x itself if p is 0. The gradient at 0 is 0.
DTensor root(const DTensor& powers, double p);

// Returns the map that leaves every dimension where it is.
inline rules::DimMap same_dims(const DTensor& x) {
  rules::DimMap map;
  for (std::size_t d = 0; d < x.size().size(); ++d) map.emplace_back(d);
  return map;
}

// Returns the dimensions that such a map keeps.
inline Sizes kept_by(const rules::DimMap& map) {
  Sizes kept;
  for (std::size_t d = 0; d < map.size(); ++d) {
    if (map[d]) kept.push_back(static_cast<std::int64_t>(d));
  }
  return kept;
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
// Returns the first of the numbers that is not valid, for an error; there must be one.
std::string first_invalid(const at::Tensor& numbers, const at::Tensor& is_valid);
// The same for ids from `lowest` on: negative ones count from the end. Throws Error(invalid_argument) for others.
LocalPlaces checked_places(const char* op, const DTensor& x, std::int64_t dim, const at::Tensor& ids,
                           std::int64_t lowest = 0);
// Returns `values` where `is_here`, else 0, also for values that are infinite.
at::Tensor only_where(const at::Tensor& is_here, const at::Tensor& values);
// Returns a tensor with one more place along `dim`, of 0.
at::Tensor with_one_more(const at::Tensor& local, std::int64_t dim);

// Returns f(locals), for an `f` that computes each place along `dims` by itself but takes no tensors without places
// there. The tensors, and the results of `f`, have the same dims.
template <typename F>
std::vector<at::Tensor> all_even_if_empty(std::vector<at::Tensor> locals, const Sizes& dims, const F& f) {
  Sizes empty;
  for (const std::int64_t dim : dims) {
    if (locals[0].size(dim) == 0) empty.push_back(dim);
  }
  for (const std::int64_t dim : empty) {
    for (at::Tensor& local : locals) local = with_one_more(local, dim);
  }
  std::vector<at::Tensor> results = f(locals);
  for (const std::int64_t dim : empty) {
    for (at::Tensor& result : results) result = result.narrow(dim, 0, 0);
  }
  return results;
}

// The same for one tensor and one result.
template <typename F>
at::Tensor even_if_empty(const at::Tensor& local, const Sizes& dims, const F& f) {
  return all_even_if_empty(
      {local}, dims, [&](const std::vector<at::Tensor>& filled) { return std::vector<at::Tensor>{f(filled[0])}; })[0];
}

// Returns the results of an op of several results.
template <typename Tuple>
std::vector<at::Tensor> to_tensors(const Tuple& results) {
  return std::apply([](const auto&... each) { return std::vector<at::Tensor>{each...}; }, results);
}

// Returns zeros that autograd tracks as a result of `locals`, whose gradients are 0.
inline at::Tensor zeros_from(const Sizes& size, const std::vector<at::Tensor>& locals) {
  at::Tensor zeros = at::zeros(size, locals[0].options().requires_grad(false));
  for (const at::Tensor& local : locals) zeros = zeros + local.flatten().narrow(0, 0, 0).sum();
  return zeros;
}

// Returns whether numbers of this dtype are floating-point ones of 8 bits, for which LibTorch has conversions alone.
inline bool is_float8(at::ScalarType dtype) { return at::isFloatingType(dtype) && c10::elementSize(dtype) == 1; }

// Returns whether indices of this dtype are masks.
inline bool is_mask(at::ScalarType dtype) { return dtype == at::kBool || dtype == at::kByte; }

// A slice of x, from the front and within it.
struct SliceBounds {
  std::int64_t dim, begin, end;
};
SliceBounds slice_bounds(const char* op, const DTensor& x, std::int64_t dim, std::int64_t begin, std::int64_t end,
                         std::int64_t step);

inline std::int64_t volume(const Sizes& size) {
  return std::accumulate(size.begin(), size.end(), std::int64_t{1}, std::multiplies<>());
}

}  // namespace tessera::dtensor

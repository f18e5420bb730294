#pragma once
/// \file
/// Tensors that are made of elements of other tensors: slices, concatenations, permutations and reshapes of them, in
/// any combination. Nothing is copied: a view computes which elements of which inputs its own elements are.
///
/// Law: for_each_part visits each element of the given lattice exactly once. The parts of a box are few if the view is
/// regular there: one for each input that it touches, and up to 2r + 1 for a reshape that merges r dimensions.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/layout/box.h"

namespace tessera {

/// Indices of a tensor at regular distances, and a place in strided memory for the element of each. For all k with
/// 0 <= k[j] < steps[j].count, the element at index base[d] + sum(k[j] * steps[j].step, over the j with steps[j].dim ==
/// d) is at out + sum(k[j] * steps[j].out_stride) in the memory, in elements. The indices differ from each other.
struct Lattice {
  struct Step {
    std::size_t dim = 0;
    std::int64_t step = 1, count = 1;  ///< >= 1
    std::int64_t out_stride = 0;       ///< >= 0
    bool operator==(const Step&) const = default;
  };
  std::vector<std::int64_t> base;
  std::int64_t out = 0;
  std::vector<Step> steps;

  /// Returns the elements of a box that is not empty, in memory with these strides.
  static Lattice of(BoxView box, std::span<const std::int64_t> out_strides);
  std::int64_t count() const;  ///< of elements
  Box bounds() const;          ///< the smallest box that contains the indices
};

/// Splits a lattice into the elements whose index in dimension `dim` is less than `at`, and the others. Appends the
/// parts to `below` and `above`.
void split_lattice(Lattice lattice, std::size_t dim, std::int64_t at, std::vector<Lattice>& below,
                   std::vector<Lattice>& above);

/// A lattice in terms of memory that holds its tensor: element k is at first + sum(k[j] * strides[j]), in elements.
struct LatticeInMemory {
  std::int64_t first = 0, out = 0;
  std::vector<std::int64_t> sizes, strides, out_strides;
};
/// Returns `lattice` in as few steps as possible, ordered by descending strides, for memory that has index x at
/// sum((x[d] - origin[d]) * strides[d]).
LatticeInMemory lattice_in_memory(const Lattice& lattice, std::span<const std::int64_t> origin,
                                  std::span<const std::int64_t> strides);

/// A tensor made of elements of inputs, which are known by number and shape alone. A cheap value: copies share their
/// parts. Immutable, so any number of threads may use it. Functions that take arguments out of range have undefined
/// behavior unless they state what they throw.
class TensorView {
 public:
  /// The largest number of operations from an input to the view.
  static constexpr std::size_t kMaxDepth = 256;

  static TensorView input(std::size_t number, std::vector<std::int64_t> shape);

  const std::vector<std::int64_t>& shape() const;

  // Each of these throws `Error(unsupported)` if the depth exceeds kMaxDepth.

  /// Returns the elements with begin <= index < begin + size in dimension `dim`.
  TensorView slice(std::size_t dim, std::int64_t begin, std::int64_t size) const;
  /// Returns the view whose dimension d is dimension dims[d] of this one. `dims` has each dimension once.
  TensorView permute(std::vector<std::size_t> dims) const;
  /// Returns the same elements in row-major order in another shape, of as many elements.
  TensorView reshape(std::vector<std::int64_t> shape) const;
  /// Concatenates one or more `parts` along dimension `dim`. They must be of equal size in all other dimensions.
  static TensorView concat(const std::vector<TensorView>& parts, std::size_t dim);

  /// Returns whether the view is an input as it is.
  bool is_input() const;
  /// Appends the numbers of the inputs that the view is made of, which may repeat.
  void add_inputs(std::vector<std::size_t>& numbers) const;
  /// Returns this view with other numbers for its inputs.
  TensorView renumbered(FunctionRef<std::size_t(std::size_t)> number) const;

  using Visitor = FunctionRef<void(std::size_t input, const Lattice& part)>;
  /// Calls f(input, part) with lattices of indices of inputs that have the elements of `lattice`, which has indices of
  /// this view.
  void for_each_part(const Lattice& lattice, Visitor f) const;

 private:
  struct Node;
  explicit TensorView(std::shared_ptr<const Node> node) : node_(std::move(node)) {}
  std::shared_ptr<const Node> node_;
};

/// Returns boxes that partition the elements of `box`, in a tensor of shape `from`, within the tensor of shape `to`
/// that has the same elements in row-major order. Returns nothing if `box` has a part of a dimension and several
/// indices of one before it, and the reshape changes both: such elements need many boxes.
std::optional<std::vector<Box>> reshape_box(BoxView box, std::span<const std::int64_t> from,
                                            std::span<const std::int64_t> to);

}  // namespace tessera

#include "tessera/layout/tensor_view.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "layout/view/reshape.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"

namespace tessera {

struct TensorView::Node {
  struct Input {
    std::size_t number;
  };
  struct Slice {
    TensorView of;
    std::size_t dim;
    std::int64_t begin;
  };
  struct Permute {
    TensorView of;
    std::vector<std::size_t> dims;
  };
  struct Reshape {
    TensorView of;
    std::vector<ReshapeGroup> groups;  // from this shape to that of `of`
  };
  struct Concat {
    std::vector<TensorView> parts;
    std::size_t dim;
    std::vector<std::int64_t> ends;  // of each part, in the dimension
  };
  std::variant<Input, Slice, Permute, Reshape, Concat> operation;
  std::vector<std::int64_t> shape;
  std::size_t depth = 0;

  static TensorView make(decltype(operation) operation, std::vector<std::int64_t> shape, std::size_t depth_below) {
    if (depth_below >= kMaxDepth) {
      fail(ErrorCode::unsupported, "a tensor is the result of over {} operations, expected fewer", kMaxDepth);
    }
    return TensorView(std::make_shared<const Node>(Node{std::move(operation), std::move(shape), depth_below + 1}));
  }

  // Visitors of one kind of operation each.
  static void visit(const Input& input, const Node& /*node*/, const Lattice& lattice, Visitor f) {
    f(input.number, lattice);
  }
  static void visit(const Slice& slice, const Node& /*node*/, const Lattice& lattice, Visitor f) {
    Lattice moved = lattice;
    moved.base[slice.dim] += slice.begin;
    slice.of.for_each_part(moved, f);
  }
  static void visit(const Permute& permute, const Node& /*node*/, const Lattice& lattice, Visitor f) {
    Lattice permuted = lattice;
    for (std::size_t d = 0; d < permute.dims.size(); ++d) permuted.base[permute.dims[d]] = lattice.base[d];
    for (Lattice::Step& step : permuted.steps) step.dim = permute.dims[step.dim];
    permute.of.for_each_part(permuted, f);
  }
  static void visit(const Reshape& reshape, const Node& node, const Lattice& lattice, Visitor f) {
    reshape_lattice(lattice, node.shape, reshape.of.shape(), reshape.groups,
                    [&](const Lattice& part) { reshape.of.for_each_part(part, f); });
  }
  static void visit(const Concat& concat, const Node& /*node*/, const Lattice& lattice, Visitor f) {
    const auto first = std::ranges::upper_bound(concat.ends, lattice.base[concat.dim]);
    std::vector<Lattice> rest = {lattice};
    for (auto end = first; end != concat.ends.end() && !rest.empty(); ++end) {
      std::vector<Lattice> within, above;
      for (Lattice& part : rest) split_lattice(std::move(part), concat.dim, *end, within, above);
      const auto number = static_cast<std::size_t>(end - concat.ends.begin());
      const std::int64_t begin = number == 0 ? 0 : concat.ends[number - 1];
      for (Lattice& part : within) {
        part.base[concat.dim] -= begin;
        concat.parts[number].for_each_part(part, f);
      }
      rest = std::move(above);
    }
  }

  static void add_inputs(const Input& input, std::vector<std::size_t>& numbers) { numbers.push_back(input.number); }
  static void add_inputs(const Concat& concat, std::vector<std::size_t>& numbers) {
    for (const TensorView& part : concat.parts) part.add_inputs(numbers);
  }
  static void add_inputs(const auto& one, std::vector<std::size_t>& numbers) { one.of.add_inputs(numbers); }
};

TensorView TensorView::input(std::size_t number, std::vector<std::int64_t> shape) {
  return Node::make(Node::Input{number}, std::move(shape), 0);
}

const std::vector<std::int64_t>& TensorView::shape() const { return node_->shape; }

TensorView TensorView::slice(std::size_t dim, std::int64_t begin, std::int64_t size) const {
  std::vector<std::int64_t> sliced = shape();
  if (begin == 0 && size == sliced[dim]) return *this;
  sliced[dim] = size;
  return Node::make(Node::Slice{*this, dim, begin}, std::move(sliced), node_->depth);
}

TensorView TensorView::permute(std::vector<std::size_t> dims) const {
  std::vector<std::int64_t> permuted;
  permuted.reserve(dims.size());
  for (const std::size_t dim : dims) permuted.push_back(shape()[dim]);
  if (std::ranges::is_sorted(dims)) return *this;
  return Node::make(Node::Permute{*this, std::move(dims)}, std::move(permuted), node_->depth);
}

TensorView TensorView::reshape(std::vector<std::int64_t> to) const {
  if (to == shape()) return *this;
  // Lattices of tensors without elements are not visited.
  const bool has_elements = std::ranges::find(to, 0) == to.end();
  std::vector<ReshapeGroup> groups;
  if (has_elements) groups = reshape_groups(to, shape());
  return Node::make(Node::Reshape{*this, std::move(groups)}, std::move(to), node_->depth);
}

TensorView TensorView::concat(const std::vector<TensorView>& parts, std::size_t dim) {
  if (parts.size() == 1) return parts[0];
  std::vector<std::int64_t> shape = parts[0].shape(), ends;
  std::size_t depth = 0;
  shape[dim] = 0;
  for (const TensorView& part : parts) {
    ends.push_back(shape[dim] += part.shape()[dim]);
    depth = std::max(depth, part.node_->depth);
  }
  return Node::make(Node::Concat{parts, dim, std::move(ends)}, std::move(shape), depth);
}

bool TensorView::is_input() const { return std::holds_alternative<Node::Input>(node_->operation); }

void TensorView::add_inputs(std::vector<std::size_t>& numbers) const {
  std::visit([&](const auto& operation) { Node::add_inputs(operation, numbers); }, node_->operation);
}

TensorView TensorView::renumbered(FunctionRef<std::size_t(std::size_t)> number) const {
  Node node = *node_;
  if (auto* input = std::get_if<Node::Input>(&node.operation)) {
    input->number = number(input->number);
  } else if (auto* concat = std::get_if<Node::Concat>(&node.operation)) {
    for (TensorView& part : concat->parts) part = part.renumbered(number);
  } else if (auto* slice = std::get_if<Node::Slice>(&node.operation)) {
    slice->of = slice->of.renumbered(number);
  } else if (auto* permute = std::get_if<Node::Permute>(&node.operation)) {
    permute->of = permute->of.renumbered(number);
  } else if (auto* reshape = std::get_if<Node::Reshape>(&node.operation)) {
    reshape->of = reshape->of.renumbered(number);
  }
  return TensorView(std::make_shared<const Node>(std::move(node)));
}

void TensorView::for_each_part(const Lattice& lattice, Visitor f) const {
  std::visit([&](const auto& operation) { Node::visit(operation, *node_, lattice, f); }, node_->operation);
}

}  // namespace tessera

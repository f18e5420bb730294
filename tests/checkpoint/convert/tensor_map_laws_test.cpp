// The inverse of any map restores what the map was applied to.

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <numeric>

#include "checkpoint/convert/tensor_maps.h"
#include "support/box_generators.h"
#include "support/temporary_directory.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"

namespace tessera::checkpoint {
namespace {

using testing::any_between;
using testing::Shape;
using testing::TemporaryDirectory;
using namespace tensor_maps;

// Names a tensor and its shape.
using Names = std::vector<NamedTensor>;

// A rule that fits to a tensor of this name and shape and can be inverted, and what it makes.
struct AnyRule {
  std::string json;
  Names results;
};

std::string dims_text(const std::vector<std::int64_t>& dims) {
  std::string text;
  for (const std::int64_t dim : dims) text += (text.empty() ? "" : ", ") + std::to_string(dim);
  return "[" + text + "]";
}

AnyRule any_rule(const NamedTensor& tensor, int number) {
  const Shape& shape = tensor.shape;
  const auto rank = static_cast<std::int64_t>(shape.size());
  const std::string fresh = "t" + std::to_string(number);
  const std::string head = R"("match": ")" + tensor.name + R"(", )";
  const std::int64_t op = any_between(0, 7);
  switch (op) {
    case 0:
      return {R"({"op": "rename", )" + head + R"("to": ")" + fresh + "\"}", {{fresh, shape}}};
    case 1: {
      const std::int64_t a = any_between(0, rank - 1), b = any_between(0, rank - 1);
      Shape swapped = shape;
      std::swap(swapped[static_cast<std::size_t>(a)], swapped[static_cast<std::size_t>(b)]);
      return {R"({"op": "transpose", )" + head + R"("dims": )" + dims_text({a, b}) + "}", {{tensor.name, swapped}}};
    }
    case 2: {
      std::vector<std::int64_t> dims(shape.size());
      std::iota(dims.begin(), dims.end(), 0);
      for (std::size_t i = dims.size(); i > 1; --i) {
        std::swap(dims[i - 1], dims[static_cast<std::size_t>(any_between(0, static_cast<std::int64_t>(i) - 1))]);
      }
      Shape permuted;
      for (const std::int64_t dim : dims) permuted.push_back(shape[static_cast<std::size_t>(dim)]);
      return {R"({"op": "permute", )" + head + R"("dims": )" + dims_text(dims) + "}", {{tensor.name, permuted}}};
    }
    case 3: {
      const auto dim = static_cast<std::size_t>(any_between(0, rank - 1));
      if (shape[dim] % 2 != 0 || rank > 5) return any_rule(tensor, number);
      Shape to = shape;
      to[dim] /= 2;
      to.insert(to.begin() + static_cast<std::ptrdiff_t>(dim), 2);
      return {R"({"op": "unflatten", )" + head + R"("sizes": [2, -1], "dim": )" + std::to_string(dim) + "}",
              {{tensor.name, to}}};
    }
    case 4: {
      const std::int64_t first = any_between(0, rank - 1), last = any_between(first, rank - 1);
      const Shape flattened(shape.begin() + first, shape.begin() + last + 1);
      Shape to(shape.begin(), shape.begin() + first);
      to.push_back(volume(Box::full(flattened)));
      to.insert(to.end(), shape.begin() + last + 1, shape.end());
      return {R"({"op": "flatten", )" + head + R"("dims": )" + dims_text({first, last}) + R"(, "sizes": )" +
                  dims_text(flattened) + "}",
              {{tensor.name, to}}};
    }
    case 5:
    case 6: {
      const auto dim = static_cast<std::size_t>(any_between(0, rank - 1));
      Shape one = shape, other = shape;
      one[dim] = any_between(0, shape[dim]);
      other[dim] -= one[dim];
      const std::string parts = "[\"" + fresh + "a\", \"" + fresh + "b\"]";
      const std::string tail =
          R"("dim": )" + std::to_string(dim) + R"(, "sizes": )" + dims_text({one[dim], other[dim]}) + "}";
      const std::string split = R"({"op": "split", )" + head + R"("to": )" + parts + ", " + tail;
      if (op == 5) return {split, {{fresh + "a", one}, {fresh + "b", other}}};
      return {split + R"(, {"op": "concat", "to": ")" + fresh + R"(", "match": )" + parts + ", " + tail,
              {{fresh, shape}}};
    }
    default: {
      if (rank < 2 || shape[0] == 0) return any_rule(tensor, number);
      AnyRule rule{R"({"op": "unstack", )" + head + R"("to": ")" + fresh + R"(x{i}"})", {}};
      for (std::int64_t i = 0; i < shape[0]; ++i) {
        rule.results.push_back({fresh + "x" + std::to_string(i), {shape.begin() + 1, shape.end()}});
      }
      return rule;
    }
  }
}

RC_GTEST_PROP(TensorMapLaws, TheInverseOfAMapRestoresTheCheckpointWhateverItsChunks, ()) {
  const TemporaryDirectory folder;
  Names tensors;
  for (std::int64_t n = any_between(1, 3); n > 0; --n) {
    Shape shape(static_cast<std::size_t>(any_between(1, 3)));
    for (std::int64_t& size : shape) size = any_between(1, 6);
    tensors.push_back({"s" + std::to_string(n), shape});
  }
  auto from = counting_tensors(folder, tensors);
  if (any_between(0, 1) == 1) {
    ReshardOptions options;
    options.ranks = any_between(1, 4);
    options.dim = any_between(0, 2);
    reshard(from, folder / "ranks", options);
    from = Checkpoint::open(folder / "ranks");
  }
  std::string rules;
  for (int number = 0; number < any_between(1, 8); ++number) {
    const auto which = static_cast<std::size_t>(any_between(0, static_cast<std::int64_t>(tensors.size()) - 1));
    const AnyRule rule = any_rule(tensors[which], number);
    rules += (rules.empty() ? "" : ", ") + rule.json;
    tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(which));
    tensors.insert(tensors.end(), rule.results.begin(), rule.results.end());
  }
  RC_LOG() << rules;
  const TensorMap map = map_of_rules(rules);
  const auto view = map.apply(from);
  for (const NamedTensor& tensor : tensors) {
    RC_ASSERT(view->tensors()[*view->find_tensor(tensor.name)].shape == tensor.shape);
    view->check_partition(*view->find_tensor(tensor.name));
  }
  RC_ASSERT(diff(map.inverse().apply(view), from).same());
  RC_ASSERT(diff(map.then(map.inverse()).apply(from), from).same());
  // The same through files.
  ConvertOptions options;
  options.to = any_between(0, 1) == 0 ? SourceKind::dcp : SourceKind::safetensors;
  convert(view, folder / "out", options);
  RC_ASSERT(diff(Checkpoint::open(folder / "out"), view).same());
}

}  // namespace
}  // namespace tessera::checkpoint

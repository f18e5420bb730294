#pragma once
// Random nested values.

#include <ATen/ATen.h>
#include <rapidcheck.h>

#include <string>
#include <vector>

#include "tessera/state/value.h"

namespace tessera::testing {

struct RandomValues {
  bool with_empty_dicts = true;
  bool with_int_keys = true;
  bool with_dots = true;  // in keys, so that flat names may be equal

  static std::size_t below(std::size_t end) { return *rc::gen::resize(1000, rc::gen::inRange<std::size_t>(0, end)); }

  static at::Tensor tensor() {
    const auto rows = static_cast<std::int64_t>(below(3)), columns = static_cast<std::int64_t>(below(4));
    const std::vector<at::ScalarType> types = {at::kFloat, at::kLong, at::kBFloat16, at::kBool};
    const at::Tensor tensor = at::arange(rows * columns).view({rows, columns}).to(types[below(types.size())]);
    return below(2) == 0 ? tensor : tensor.t();
  }

  static Value leaf() {
    switch (below(9)) {
      case 0:
        return {};
      case 1:
        return below(2) == 0;
      case 2:
        return *rc::gen::arbitrary<std::int64_t>();
      case 3:
        return *rc::gen::arbitrary<double>();
      case 4:
        return std::string(below(4), 'x') + (below(2) == 0 ? "" : "\xc3\xa9\n");
      case 5:
        return *rc::gen::resize(20, rc::gen::arbitrary<Bytes>());
      default:
        return tensor();
    }
  }

  Value value(int depth) const {
    const std::size_t kind = depth == 0 ? 0 : below(8);
    if (kind < 4) return leaf();
    if (kind < 6) return dict(depth - 1);
    std::vector<Value> items;
    for (std::size_t i = below(4); i > 0; --i) items.push_back(value(depth - 1));
    return kind == 6 ? Value(List(std::move(items))) : Value(Tuple(std::move(items)));
  }

  Dict dict(int depth) const {
    std::vector<Key> keys = {"a", "b", "weight", "0", "\xc3\xa9"};
    if (with_int_keys) keys.insert(keys.end(), {Key(std::int64_t{0}), Key(std::int64_t{7})});
    if (with_dots) keys.insert(keys.end(), {Key("a.b"), Key("")});
    Dict result;
    for (std::size_t i = below(5) + (with_empty_dicts ? 0 : 1); i > 0; --i) {
      result.insert_or_assign(keys[below(keys.size())], value(depth));
    }
    return result;
  }
};

}  // namespace tessera::testing

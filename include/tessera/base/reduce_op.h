#pragma once
/// \file
/// How the elements that several ranks have in one place become one element.

#include <cstdint>
#include <string_view>

namespace tessera {

enum class ReduceOp : std::uint8_t { sum, average, product, min, max };

/// As PyTorch's placements name it: "sum", "avg", "product", "min", "max".
constexpr std::string_view to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::average:
      return "avg";
    case ReduceOp::product:
      return "product";
    case ReduceOp::min:
      return "min";
    case ReduceOp::max:
      return "max";
  }
  return "unknown";
}

}  // namespace tessera

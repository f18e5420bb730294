#pragma once
/// \file
/// Reductions: how corresponding elements of several ranks are combined into one.

#include <cstdint>
#include <string_view>

namespace tessera {

/// A reduction. `average` is the sum divided by the number of ranks.
enum class ReduceOp : std::uint8_t { sum, average, product, min, max };

/// Returns the name that PyTorch's placements use: "sum", "avg", "product", "min", "max".
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

#pragma once
/// \file
/// The tensors in what a module's `forward` takes and returns.
///
/// Found are tensors, and those in optionals, tuples, pairs, arrays, vectors, lists and the values of maps, in each
/// other as one likes. For a type of one's own, give a function of this name in its namespace:
///
///     void visit_tensors(MyOutput& output, const tessera::fsdp::TensorVisitor& visit) { visit(output.logits); }

#include <ATen/core/Tensor.h>

#include <functional>
#include <ranges>
#include <tuple>
#include <type_traits>
#include <utility>

namespace tessera::fsdp {

/// May put another tensor in the place of the one that it is given.
using TensorVisitor = std::function<void(at::Tensor&)>;

namespace detail {

template <typename T>
concept VisitedByUser = requires(T& value, const TensorVisitor& visit) {
  visit_tensors(value, visit);
};
template <typename T>
concept TupleLike = requires {
  std::tuple_size<T>::value;
};
template <typename T>
concept OptionalLike = requires(T& value) {
  { value.has_value() } -> std::same_as<bool>;
  *value;
};
template <typename T>  // a path is a range of paths
concept RangeOfOthers = std::ranges::range<T> && !std::is_same_v<T, std::ranges::range_value_t<T>>;
template <typename T>
concept MapLike = std::ranges::range<T> && requires {
  typename T::mapped_type;
};

}  // namespace detail

template <typename T>
void for_each_tensor(T& value, const TensorVisitor& visit) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (value.defined()) visit(value);
  } else if constexpr (detail::VisitedByUser<T>) {
    visit_tensors(value, visit);
  } else if constexpr (detail::OptionalLike<T>) {
    if (value.has_value()) for_each_tensor(*value, visit);
  } else if constexpr (detail::TupleLike<T>) {
    std::apply([&](auto&... items) { (for_each_tensor(items, visit), ...); }, value);
  } else if constexpr (detail::MapLike<T>) {
    for (auto& entry : value) for_each_tensor(entry.second, visit);
  } else if constexpr (detail::RangeOfOthers<T>) {
    if constexpr (std::is_lvalue_reference_v<std::ranges::range_reference_t<T>>) {
      for (auto& item : value) for_each_tensor(item, visit);
    }
  }
}

}  // namespace tessera::fsdp

#pragma once
/// \file
/// Traversal of the tensors in the arguments and results of a module's `forward`.
///
/// for_each_tensor visits tensors, the data of a PackedSequence, and those in optionals, tuples, pairs, arrays,
/// vectors, lists and the values of maps, nested to any depth. It ignores other types. To support a type, define this
/// function in the type's namespace:
///
///     void visit_tensors(MyOutput& output, tessera::fsdp::TensorVisitor visit) { visit(output.logits); }

#include <ATen/core/Tensor.h>

#include <ranges>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tessera/base/function_ref.h"

namespace torch::nn::utils::rnn {
class PackedSequence;
}

namespace tessera::fsdp {

/// A function that is called with a reference to each tensor and may assign another tensor to it.
using TensorVisitor = FunctionRef<void(at::Tensor&)>;

/// Visits the data. If it is moved to another device, the indices follow. PyTorch: _apply_to_tensors.
void visit_tensors(torch::nn::utils::rnn::PackedSequence& sequence, TensorVisitor visit);

namespace detail {

template <typename T>
concept VisitedByUser = requires(T& value, TensorVisitor visit) {
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
template <typename T>  // excludes ranges of themselves, such as std::filesystem::path
concept RangeOfOthers = std::ranges::range<T> && !std::is_same_v<T, std::ranges::range_value_t<T>>;
template <typename T>
concept MapLike = std::ranges::range<T> && requires {
  typename T::mapped_type;
};

// Returns whether for_each_tensor finds all tensors that a `T` can contain.
template <typename T>
constexpr bool is_visited() {
  if constexpr (std::is_same_v<T, at::Tensor> || VisitedByUser<T>) {
    return true;
  } else if constexpr (OptionalLike<T>) {
    return is_visited<std::remove_cvref_t<decltype(*std::declval<T&>())>>();
  } else if constexpr (TupleLike<T>) {
    return []<std::size_t... i>(std::index_sequence<i...>) {
      return (is_visited<std::remove_cvref_t<std::tuple_element_t<i, T>>>() && ...);
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (MapLike<T>) {
    return is_visited<typename T::mapped_type>();
  } else if constexpr (RangeOfOthers<T>) {
    using Item = std::ranges::range_value_t<T>;
    return std::is_lvalue_reference_v<std::ranges::range_reference_t<T>> ? is_visited<Item>() : !std::is_class_v<Item>;
  } else {
    return !std::is_class_v<T>;
  }
}

// Returns whether for_each_tensor may find a tensor in a `T`.
template <typename T>
constexpr bool may_hold_tensors() {
  if constexpr (std::is_same_v<T, at::Tensor> || VisitedByUser<T>) {
    return true;
  } else if constexpr (OptionalLike<T>) {
    return may_hold_tensors<std::remove_cvref_t<decltype(*std::declval<T&>())>>();
  } else if constexpr (TupleLike<T>) {
    return []<std::size_t... i>(std::index_sequence<i...>) {
      return (may_hold_tensors<std::remove_cvref_t<std::tuple_element_t<i, T>>>() || ...);
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (MapLike<T>) {
    return may_hold_tensors<typename T::mapped_type>();
  } else if constexpr (RangeOfOthers<T>) {
    return may_hold_tensors<std::ranges::range_value_t<T>>();
  } else {
    return false;
  }
}

}  // namespace detail

/// Calls `visit` for each defined tensor in `value`, in order.
template <typename T>
void for_each_tensor(T& value, TensorVisitor visit) {
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

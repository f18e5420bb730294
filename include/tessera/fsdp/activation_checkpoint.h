#pragma once
/// \file
/// Activation checkpointing: forward saves only its inputs, and backward computes the activations again.
///
///     at::Tensor y = fsdp::activation_checkpoint([&](const at::Tensor& x) { return block(x); }, x);
///
///     fsdp::Checkpointed<Block> block{64};                        // checkpoints every call
///     fsdp::Wrap<fsdp::Checkpointed<Block>> unit{64};             // inside a unit of FullyShardedDataParallel
///     fsdp::apply_activation_checkpointing(*model, is_block);     // blocks of a model that are held in Wrap
///
/// Law: results and gradients equal those of a plain call bit for bit, provided that the function is deterministic.
/// There is one exception: if a tensor receives several gradients, those from inside the function are summed first. To
/// repeat the first run, the second one gets the original arguments, the state of the random generators (of the CPU,
/// of the arguments' devices and of every CUDA device in use) and the autocast state. Side effects, such as counting or
/// updating the statistics of BatchNorm, happen twice.
///
/// Tensors that require gradients must be arguments, found by for_each_tensor, and results. Parameters may also be
/// captured by the function; other tensors that were computed and require gradients may not. Arguments must not
/// be changed in place, neither by the function nor later until backward. Gradients can be computed by backward() only,
/// without `inputs` and `create_graph`; torch::autograd::grad throws.
///
/// Threads: those that the function permits. Threads that share a random generator, such as ranks that are threads of
/// one process, cannot restore its state separately. Use no random numbers there, or use processes.
///
/// With FullyShardedDataParallel, checkpoint the forward inside the unit (`Wrap<Checkpointed<Block>>`) rather than the
/// call of the unit: `Checkpointed<Wrap<Block>>` unshards the parameters once more for the recomputation. PyTorch:
/// `checkpoint(use_reentrant=True)` in torch/utils/checkpoint.py.

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/function_ref.h"
#include "tessera/fsdp/tensors_in.h"

namespace tessera::fsdp {

namespace detail {

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;

/// Calls `run` without recording a graph and returns its results. Backward calls `again(inputs)`, which must return the
/// same number of tensors. If neither `inputs` nor a parameter of `module` requires a gradient, this is a plain call.
/// If `module` is null, some parameter is assumed to require one.
std::vector<at::Tensor> run_checkpointed(const std::vector<at::Tensor>& inputs, const torch::nn::Module* module,
                                         FunctionRef<std::vector<at::Tensor>()> run, TensorFunction again);

/// Returns an empty tensor, stored in arguments in place of a tensor that autograd saves.
at::Tensor placeholder();

// The type in which an argument is stored until backward. A type that only points to its elements is copied.
template <typename T>
struct Owned {
  using type = T;
};
template <typename T>
requires requires(T view) {
  view.vec();  // ArrayRef
}
struct Owned<T> {
  using type = decltype(std::declval<T>().vec());
};
template <typename T>
requires requires(T view) {
  view.subspan(0);  // span
}
struct Owned<T> {
  using type = std::vector<typename T::value_type>;
};
template <typename T>
requires requires(T view) {
  view.remove_prefix(1);  // string_view
}
struct Owned<T> {
  using type = std::string;
};
template <typename T>
using OwnedOf = typename Owned<std::decay_t<T>>::type;

template <typename T>
OwnedOf<T> own(const std::remove_reference_t<T>& value) {
  if constexpr (std::is_same_v<OwnedOf<T>, std::decay_t<T>>) {
    return value;
  } else {
    return OwnedOf<T>(value.begin(), value.end());
  }
}

// Converts a stored argument to type `Arg&&`, or to a const reference if it is stored as another type.
template <typename Arg, typename Kept>
decltype(auto) as_argument(Kept& kept) {
  if constexpr (std::is_same_v<Kept, std::remove_cvref_t<Arg>>) {
    return static_cast<Arg&&>(kept);
  } else {
    return std::as_const(kept);
  }
}

template <typename T>
std::vector<at::Tensor> tensors_in(T& value) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(value, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

template <typename T>
void replace_tensors(T& value, const std::vector<at::Tensor>& tensors) {
  std::size_t i = 0;
  for_each_tensor(value, [&](at::Tensor& tensor) { tensor = tensors.at(i++); });
}

// Returns whether a copy of a `T` compiles, and shares nothing but tensors and what pointers point to with the
// original.
template <typename T>
constexpr bool is_value() {
  if constexpr (!std::is_copy_constructible_v<T>) {
    return false;
  } else if constexpr (std::is_trivially_copyable_v<T> || std::is_same_v<T, at::Tensor> || VisitedByUser<T>) {
    return true;
  } else if constexpr (OptionalLike<T>) {
    return is_value<std::remove_cvref_t<decltype(*std::declval<T&>())>>();
  } else if constexpr (TupleLike<T>) {
    return []<std::size_t... i>(std::index_sequence<i...>) {
      return (is_value<std::remove_cvref_t<std::tuple_element_t<i, T>>>() && ...);
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (RangeOfOthers<T>) {
    return is_value<std::remove_cvref_t<std::ranges::range_value_t<T>>>();
  } else {
    return false;
  }
}

// Returns whether a call with this result and these arguments can be checkpointed without a promise of the program. A
// program that uses Checkpointed promises that copies of the arguments are independent.
template <typename Result, typename... Args>
constexpr bool can_checkpoint() {
  if constexpr (std::is_object_v<Result> && !std::is_const_v<Result>) {
    return is_visited<Result>() && std::is_copy_constructible_v<Result> && (is_value<OwnedOf<Args>>() && ...);
  } else {
    return false;
  }
}

template <typename... Args, typename F>
auto checkpoint_call(const torch::nn::Module* module, F&& f, Args&&... arguments) {
  using Function = std::decay_t<F>;
  using Result = std::decay_t<std::invoke_result_t<Function&, Args...>>;
  static_assert(!std::is_void_v<Result>, "activation_checkpoint: the function returns void, expected a result");
  static_assert(is_visited<Result>(),
                "activation_checkpoint: the result's type has no visit_tensors, expected one that finds its tensors");
  if (!c10::GradMode::is_enabled()) return Result(std::invoke(f, std::forward<Args>(arguments)...));
  const auto function = std::make_shared<Function>(std::forward<F>(f));
  std::tuple<OwnedOf<Args>...> kept(own<Args>(arguments)...);
  const std::vector<at::Tensor> inputs = tensors_in(kept);
  for_each_tensor(kept, [](at::Tensor& tensor) { tensor = placeholder(); });

  std::optional<Result> result;
  const auto run = [&] {
    result.emplace(std::invoke(*function, std::forward<Args>(arguments)...));
    return tensors_in(*result);
  };
  const auto again = [function, kept](const std::vector<at::Tensor>& tensors) {
    auto items = kept;
    replace_tensors(items, tensors);
    const auto call = [&](auto&... item) -> Result { return std::invoke(*function, as_argument<Args>(item)...); };
    Result repeated = std::apply(call, items);
    return tensors_in(repeated);
  };
  const std::vector<at::Tensor> outputs = run_checkpointed(inputs, module, run, again);
  replace_tensors(*result, outputs);
  return *std::move(result);
}

}  // namespace detail

/// Returns f(arguments...) by value and saves only `f` and the arguments for backward. If gradients are disabled, this
/// is a plain call. Tensors are saved without a copy. Other arguments are copied, also the elements of views (ArrayRef,
/// string_view); copies of a user's type must not share tensors with the original. Changes that `f` makes through
/// references happen once: the second run gets a copy of the values before the first. The result requires a gradient
/// even if no argument does, because parameters may.
///
/// Throws `Error(invalid_argument)` if `f` changed an argument in place. Backward throws the exceptions of `f`, and
/// `Error(invalid_argument)` if the results of the second run differ from the first in number or shape.
template <typename F, typename... Args>
auto activation_checkpoint(F&& f, Args&&... arguments) {
  return detail::checkpoint_call<Args...>(nullptr, std::forward<F>(f), std::forward<Args>(arguments)...);
}

/// Checkpoints every later call of the modules that `selects` selects, of `model` and its submodules; null selects all
/// that are held in a Wrap. The model may be sharded already: the call is then checkpointed inside the unit. Throws
/// `Error(invalid_argument)`, before it changes anything, if a selected module is not held in a Wrap. A call throws
/// `Error(unsupported)` if forward returns a reference or nothing, or if an argument is of a class that may share more
/// than tensors with its copy; for such arguments, hold the module in a Checkpointed. PyTorch:
/// apply_activation_checkpointing.
void apply_activation_checkpointing(torch::nn::Module& model,
                                    FunctionRef<bool(const torch::nn::Module& module)> selects = nullptr);

template <typename Impl, typename Forward = decltype(&Impl::forward)>
class CheckpointedImpl;

/// A module whose forward is checkpointed. As with WrapImpl, `forward` must be a single function, and calls must pass
/// all arguments. The graph keeps the module alive until backward.
template <typename Impl, typename Class, typename Result, typename... Args>
class CheckpointedImpl<Impl, Result (Class::*)(Args...)> : public Impl {
 public:
  using Impl::Impl;
  Result forward(Args... arguments) {
    const auto forward = [this, alive = this->weak_from_this().lock()](Args... args) -> Result {
      return Impl::forward(std::forward<Args>(args)...);
    };
    return detail::checkpoint_call<Args...>(this, forward, std::forward<Args>(arguments)...);
  }
};

template <typename Impl, typename Class, typename Result, typename... Args>
class CheckpointedImpl<Impl, Result (Class::*)(Args...) const>
    : public CheckpointedImpl<Impl, Result (Class::*)(Args...)> {
 public:
  using CheckpointedImpl<Impl, Result (Class::*)(Args...)>::CheckpointedImpl;
};

/// The holder of a checkpointed module. Its constructor takes the arguments of the module's own holder.
template <typename Module>
class Checkpointed : public torch::nn::ModuleHolder<CheckpointedImpl<typename Module::ContainedType>> {
 public:
  using torch::nn::ModuleHolder<CheckpointedImpl<typename Module::ContainedType>>::ModuleHolder;
};

}  // namespace tessera::fsdp

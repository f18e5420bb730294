#pragma once
/// \file
/// Forwards that keep their inputs instead of all they compute, and compute it again in backward.
///
///     at::Tensor y = fsdp::activation_checkpoint([&](const at::Tensor& x) { return block(x); }, x);
///
///     fsdp::Checkpointed<Block> block{Block(64)};                 // every call of it
///     fsdp::Wrap<fsdp::Checkpointed<Block>> unit{Block(64)};      // of a unit of FullyShardedDataParallel
///
/// Law: results and gradients are those of a plain call, bit for bit, as long as the function does the same twice; but
/// where a tensor gets gradients from several places, those from within are added up before the others are. So that it
/// can do the same, it runs the second time with the arguments as they were, in the state in which the random
/// generators were (that of the CPU, and of every CUDA device in use) and under the autocast of the first. What it does
/// besides, such as counting or updating BatchNorm's statistics, it does twice.
///
/// Tensors that need gradients come in as arguments, found by for_each_tensor, and go out in the result. What the
/// function itself holds may be parameters; a tensor that was computed from others and needs gradients must be an
/// argument. A tensor that is an argument must not be changed in place, neither by the function nor until backward.
/// Gradients are made by backward() only, without `inputs` and `create_graph`; torch::autograd::grad throws.
///
/// Threads: as the function. Threads that draw from one generator, such as ranks that are threads of one process, can't
/// have each the same numbers again: let them draw none, or be processes.
///
/// What a unit of FullyShardedDataParallel calls should be checkpointed rather than the call of a unit: in
/// `Checkpointed<Wrap<Block>>` the parameters are put together once more, for what is computed again.
/// PyTorch: `checkpoint(use_reentrant=True)` in torch/utils/checkpoint.py.

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

#include "tessera/fsdp/tensors_in.h"

namespace tessera::fsdp {

namespace detail {

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;

/// What `run` returns, which is called now and without a graph; in backward `again(inputs)` is, and must return as
/// many. If neither `inputs` nor a parameter of `module` needs gradients, that is all there is to it. Null is a module
/// that nothing is known of.
std::vector<at::Tensor> run_checkpointed(const std::vector<at::Tensor>& inputs, const torch::nn::Module* module,
                                         const std::function<std::vector<at::Tensor>()>& run, TensorFunction again);

/// A tensor that keeps the place of another.
at::Tensor place_holder();

// What is kept of an argument until backward: the value, where the argument only points to one.
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

// As an argument of type `Arg&&`, if it was kept as it is.
template <typename Arg, typename Kept>
decltype(auto) as_argument(Kept& kept) {
  if constexpr (std::is_same_v<Kept, std::remove_cvref_t<Arg>>) {
    return static_cast<Arg&&>(kept);
  } else {
    return std::as_const(kept);
  }
}

// Whether for_each_tensor finds all tensors that there can be in it.
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

template <typename T>
std::vector<at::Tensor> tensors_in(T& value) {
  std::vector<at::Tensor> tensors;
  for_each_tensor(value, [&](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

template <typename T>
void put_tensors(T& value, const std::vector<at::Tensor>& tensors) {
  std::size_t i = 0;
  for_each_tensor(value, [&](at::Tensor& tensor) { tensor = tensors.at(i++); });
}

template <typename... Args, typename F>
auto checkpoint_call(const torch::nn::Module* module, F&& f, Args&&... arguments) {
  using Function = std::decay_t<F>;
  using Result = std::decay_t<std::invoke_result_t<Function&, Args...>>;
  static_assert(!std::is_void_v<Result>, "there is no result");
  static_assert(is_visited<Result>(), "the result is of a type in which tensors aren't found: give a visit_tensors");
  if (!c10::GradMode::is_enabled()) return Result(std::invoke(f, std::forward<Args>(arguments)...));
  const auto function = std::make_shared<Function>(std::forward<F>(f));
  std::tuple<OwnedOf<Args>...> kept(own<Args>(arguments)...);
  const std::vector<at::Tensor> inputs = tensors_in(kept);
  for_each_tensor(kept, [](at::Tensor& tensor) { tensor = place_holder(); });

  std::optional<Result> result;
  const auto run = [&] {
    result.emplace(std::invoke(*function, std::forward<Args>(arguments)...));
    return tensors_in(*result);
  };
  const auto again = [function, kept](const std::vector<at::Tensor>& tensors) {
    auto items = kept;
    put_tensors(items, tensors);
    const auto call = [&](auto&... item) -> Result { return std::invoke(*function, as_argument<Args>(item)...); };
    Result repeated = std::apply(call, items);
    return tensors_in(repeated);
  };
  const std::vector<at::Tensor> outputs = run_checkpointed(inputs, module, run, again);
  put_tensors(*result, outputs);
  return *std::move(result);
}

}  // namespace detail

/// f(arguments...), of which nothing is kept for backward but the arguments; in no_grad simply that. `f` is kept until
/// then, too. Arguments are copied, but for tensors; what one only points to (an ArrayRef, a string_view) is copied as
/// well; a type of one's own must not share its tensors with its copies. What `f` changes through a reference, it
/// changes once: the second time it gets a copy of what was before. The result is a value. If no argument needs a
/// gradient the result does all the same, for the sake of parameters.
///
/// Backward throws what `f` throws, and `Error(invalid_argument)` if `f` returns other sizes than the first time.
/// Throws `Error(invalid_argument)` if `f` changed an argument in place.
template <typename F, typename... Args>
auto activation_checkpoint(F&& f, Args&&... arguments) {
  return detail::checkpoint_call<Args...>(nullptr, std::forward<F>(f), std::forward<Args>(arguments)...);
}

template <typename Impl, typename Forward = decltype(&Impl::forward)>
class CheckpointedImpl;

/// A module whose forward is checkpointed. As with WrapImpl, `forward` must be one function, and a default argument
/// must be given. Until backward, the module lives.
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

/// The holder: constructed as the module's own.
template <typename Module>
class Checkpointed : public torch::nn::ModuleHolder<CheckpointedImpl<typename Module::ContainedType>> {
 public:
  using torch::nn::ModuleHolder<CheckpointedImpl<typename Module::ContainedType>>::ModuleHolder;
};

}  // namespace tessera::fsdp

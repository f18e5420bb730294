#pragma once
// Hides the differences between versions of LibTorch's optimizers.

#include <torch/optim.h>

#include <type_traits>
#include <utility>

#include "tessera/tensor/internal/optimizer_key.h"

namespace tessera {

// c10::optional became std::optional in 2.5.
using OptionalInt = std::decay_t<decltype(std::declval<torch::optim::LBFGSOptions&>().max_eval())>;
using OptionalString = std::decay_t<decltype(std::declval<torch::optim::LBFGSOptions&>().line_search_fn())>;

}  // namespace tessera

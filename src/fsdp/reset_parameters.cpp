#include "tessera/fsdp/reset_parameters.h"

#include <torch/nn/functional/instancenorm.h>  // which the header of the modules lacks in LibTorch 1.13
#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "tessera/base/error.h"

namespace tessera::fsdp::detail {

namespace {

namespace nn = torch::nn;

template <typename Impl>
void reset(nn::Module& module) {
  dynamic_cast<Impl&>(module).reset_parameters();
}
template <>
void reset<nn::MultiheadAttentionImpl>(nn::Module& module) {
  dynamic_cast<nn::MultiheadAttentionImpl&>(module)._reset_parameters();
}
template <>
void reset<nn::PReLUImpl>(nn::Module& module) {
  auto& prelu = dynamic_cast<nn::PReLUImpl&>(module);
  nn::init::constant_(prelu.weight, prelu.options.init());
}

template <typename... Impls>
ResetFunction find(const nn::Module& module) {
  ResetFunction found = nullptr;
  static_cast<void>(((dynamic_cast<const Impls*>(&module) != nullptr && (found = reset<Impls>, true)) || ...));
  return found;
}

// Returns whether the module has only tensors that LibTorch's layers register. A class that derives from one of them
// may have others, which the layer's function does not know.
bool has_tensors_of_layers_only(const nn::Module& module) {
  constexpr std::array<std::string_view, 12> kNames{
      "weight", "bias",         "running_mean",   "running_var",   "bias_k",        "num_batches_tracked",
      "bias_v", "in_proj_bias", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"};
  constexpr std::array<std::string_view, 3> kRecurrent{"weight_ih", "weight_h", "bias_"};  // with layer and direction
  const auto is_known = [&](const auto& item) {
    const std::string_view name = item.key();
    return std::find(kNames.begin(), kNames.end(), name) != kNames.end() ||
           std::any_of(kRecurrent.begin(), kRecurrent.end(), [&](auto prefix) { return name.starts_with(prefix); });
  };
  const auto params = module.named_parameters(/*recurse=*/false), buffers = module.named_buffers(/*recurse=*/false);
  return std::all_of(params.begin(), params.end(), is_known) && std::all_of(buffers.begin(), buffers.end(), is_known);
}

}  // namespace

ResetFunction libtorch_reset(const nn::Module& module) {
  if (!has_tensors_of_layers_only(module)) return nullptr;
  return find<nn::LinearImpl, nn::BilinearImpl, nn::EmbeddingImpl, nn::EmbeddingBagImpl, nn::Conv1dImpl, nn::Conv2dImpl,
              nn::Conv3dImpl, nn::ConvTranspose1dImpl, nn::ConvTranspose2dImpl, nn::ConvTranspose3dImpl,
              nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl, nn::InstanceNorm1dImpl,
              nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl, nn::LayerNormImpl, nn::GroupNormImpl, nn::RNNImpl,
              nn::LSTMImpl, nn::GRUImpl, nn::RNNCellImpl, nn::LSTMCellImpl, nn::GRUCellImpl, nn::MultiheadAttentionImpl,
              nn::PReLUImpl>(module);
}

void refuse_to_reset(const nn::Module& module) {
  fail(ErrorCode::invalid_argument,
       "reset parameters: a {} has parameters or buffers on meta, expected a layer of LibTorch without others of its "
       "own, or one of the classes that reset_parameters was called with",
       module.name());
}

}  // namespace tessera::fsdp::detail

#include "tessera/fsdp/wrap_policy.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

namespace tessera::fsdp {

bool is_multihead_attention(const torch::nn::Module& module) {
  return is_any_of<torch::nn::MultiheadAttentionImpl>(module);
}

bool is_container(const torch::nn::Module& module) {
  return is_any_of<torch::nn::ModuleListImpl, torch::nn::ModuleDictImpl>(module);
}

WrapPolicy wrap_larger_than(std::int64_t min_numel, ModulePredicate undivided, ModulePredicate excluded) {
  const auto choose = [min_numel, excluded = std::move(excluded)](const torch::nn::Module& module, std::int64_t numel) {
    return numel >= min_numel && !(excluded && excluded(module));
  };
  return {choose, std::move(undivided)};
}

}  // namespace tessera::fsdp

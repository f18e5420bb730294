// Programs that do not compile. Each line with an error is preceded by its text, and there is no other error.

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <string>

#include "tessera/fsdp/fully_sharded_data_parallel.h"

namespace {

namespace fsdp = tessera::fsdp;

const at::Tensor kInput = at::ones({2, 3});

struct Output {
  at::Tensor logits;
  std::string note;
};
struct HidesTensorsImpl : torch::nn::Module {
  HidesTensorsImpl() { linear = register_module("linear", torch::nn::Linear(3, 3)); }
  Output forward(const at::Tensor& x) { return {linear(x), ""}; }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(HidesTensors);

void tensors_that_a_unit_cannot_find() {
  // error: the result of forward has a type whose tensors a unit cannot find: define visit_tensors for it
  fsdp::FullyShardedDataParallel<HidesTensors>(HidesTensors{})(kInput);
}

void a_module_without_forward_is_wrapped() {
  // error: this module has no forward, so it cannot be wrapped: wrap the modules in it
  fsdp::Wrap<torch::nn::ModuleList>();
}

void a_module_without_forward_is_called() {
  // error: the model's forward does not take these arguments, or it has none
  fsdp::FullyShardedDataParallel<torch::nn::ModuleList>(torch::nn::ModuleList{})(kInput);
}

void other_arguments_than_those_of_forward() {
  // error: the model's forward does not take these arguments, or it has none
  fsdp::FullyShardedDataParallel<torch::nn::Linear>(torch::nn::Linear(3, 3))(kInput, "text");
  // error: the module's forward does not take these arguments
  fsdp::Wrap<torch::nn::Linear>(3, 3)(kInput, "text");
}

struct OfLvaluesImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) & { return x; }
};
TORCH_MODULE(OfLvalues);

void a_forward_with_qualifiers() {
  // error: forward must be a function without & and volatile qualifiers
  fsdp::Wrap<OfLvalues>();
}

}  // namespace

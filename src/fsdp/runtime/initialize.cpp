#include "fsdp/runtime/initialize.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <c10/core/GradMode.h>

#include <span>
#include <vector>

#include "fsdp/groups.h"
#include "fsdp/runtime/unit.h"
#include "tessera/base/error.h"
#include "tessera/fsdp/meta_init.h"
#include "tessera/fsdp/reset_parameters.h"
#include "tessera/state/internal/parameter_parts.h"

namespace tessera::fsdp {

namespace {

std::vector<NamedParameter> own_tensors(const torch::nn::Module& module) {
  std::vector<NamedParameter> tensors;
  for (const auto& param : module.named_parameters(/*recurse=*/false)) tensors.push_back({param.key(), param.value()});
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) tensors.push_back({buffer.key(), buffer.value()});
  std::erase_if(tensors, [](const NamedParameter& named) { return !named.parameter.defined(); });
  return tensors;
}

// Returns the function that initializes the module's own tensors, null if there is none.
std::function<void(torch::nn::Module&)> init_function(const torch::nn::Module& module, const Options& options) {
  if (options.param_init_fn) return options.param_init_fn;
  const ParameterParts parts(module);
  for (const at::Tensor& param : module.parameters(/*recurse=*/false)) {
    if (parts.find(param) != nullptr)
      return nullptr;  // a part does not have the sizes that LibTorch's values depend on
  }
  return detail::libtorch_reset(module);
}

void materialize_module(torch::nn::Module& module, const std::string& unit, at::Device device, const Options& options) {
  std::vector<NamedParameter> tensors = own_tensors(module);
  std::erase_if(tensors, [](const NamedParameter& named) { return !named.parameter.is_meta(); });
  if (tensors.empty()) return;
  const std::function<void(torch::nn::Module&)> init = init_function(module, options);
  if (!init) {
    fail(ErrorCode::invalid_argument,
         "'{}' of a {} in unit '{}' is on meta, expected Options::param_init_fn to initialize it",
         printable(tensors[0].fqn), module.name(), printable(unit));
  }
  for (const NamedParameter& named : tensors) materialize(named.parameter, device);
  init(module);
}

// Copies tensors of rank 0 to the other ranks. Small ones are sent together, as bytes. PyTorch:
// _sync_module_params_and_buffers, with buckets of 250 MiB.
void broadcast(std::span<const at::Tensor> tensors, const ProcessGroup& group) {
  constexpr std::int64_t kBucketBytes = 64 << 20, kAlignBytes = 16;
  struct Part {
    at::Tensor tensor, bytes;  // `bytes` is padded
  };
  std::vector<Part> bucket;
  std::int64_t bucket_bytes = 0;
  const auto flush = [&] {
    if (bucket.empty()) return;
    std::vector<at::Tensor> pieces;
    pieces.reserve(bucket.size());
    for (const Part& part : bucket) pieces.push_back(part.bytes);
    const at::Tensor all = pieces.size() == 1 ? pieces[0] : at::cat(pieces);
    group.broadcast(all, 0);
    std::int64_t begin = 0;
    for (const Part& part : bucket) {
      const at::Tensor elements = all.narrow(0, begin, static_cast<std::int64_t>(part.tensor.nbytes()));
      part.tensor.copy_(elements.view(part.tensor.scalar_type()).view(part.tensor.sizes()));
      begin += part.bytes.numel();
    }
    bucket.clear();
    bucket_bytes = 0;
  };
  for (const at::Tensor& given : tensors) {
    const at::Tensor tensor = given.detach();
    if (tensor.numel() == 0) continue;
    at::Tensor bytes = tensor.contiguous().view({-1}).view(at::kByte);
    if (const std::int64_t rest = bytes.numel() % kAlignBytes; rest != 0)
      bytes = at::constant_pad_nd(bytes, {0, kAlignBytes - rest});
    if (!bucket.empty() &&
        (bucket_bytes + bytes.numel() > kBucketBytes || bytes.device() != bucket.front().bytes.device()))
      flush();
    bucket_bytes += bytes.numel();
    bucket.push_back({tensor, std::move(bytes)});
  }
  flush();
}

}  // namespace

at::Device device_of(const FoundUnit& unit, const Options& options) {
  if (unit.sharded != nullptr) return unit.sharded->handle()->options().device;
  if (options.device) return *options.device;
  for (const NamedParameter& named : unit.params) {
    if (!named.parameter.is_meta()) return named.parameter.device();
  }
  return at::kCPU;
}

void initialize(const FoundUnit& unit, std::span<const ProcessGroup> agreeing_groups, const Options& options,
                const std::exception_ptr& failure) {
  const c10::NoGradGuard no_grad;
  const at::Device device = device_of(unit, options);
  agree_on(agreeing_groups, "initialize a model", [&] {
    if (failure) std::rethrow_exception(failure);
    for (torch::nn::Module* module : unit.modules) {
      materialize_module(*module, unit.name, device, options);
      for (const auto& buffer : module->named_buffers(/*recurse=*/false)) {
        if (buffer.value().defined() && buffer.value().device() != device) {
          buffer.value().set_data(buffer.value().to(device));
        }
      }
    }
  });
  if (!options.sync_module_states) return;
  std::vector<at::Tensor> tensors;
  for (torch::nn::Module* module : unit.modules) {
    for (const NamedParameter& named : own_tensors(*module)) tensors.push_back(named.parameter);
  }
  if (options.replicas) broadcast(tensors, *options.replicas);
  broadcast(tensors, unit.group);
}

}  // namespace tessera::fsdp

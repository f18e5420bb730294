// Modules that compute with a sharded weight.

#include <algorithm>
#include <array>
#include <vector>

#include "tensor/layer_clone.h"
#include "tensor/ops/chunks.h"
#include "tensor/ops/embedding.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/functional.h"
#include "tessera/comm/internal/step.h"
#include "tessera/tensor/shard_module.h"

namespace tessera {

// --- common to all modules

const DTensorSpec* ShardedParameters::dtensor_spec(const std::string& parameter) const {
  const auto found = sharded_.find(parameter);
  return found != sharded_.end() ? &found->second.dtensor : nullptr;
}

ShardedTensor ShardedParameters::sharded_parameter(const std::string& name, const at::Tensor& local) const {
  const auto found = sharded_.find(name);
  if (found == sharded_.end()) {
    fail(ErrorCode::invalid_argument,
         "sharded parameter '{}': it is not sharded, expected one that shard_module sharded", printable(name));
  }
  const Sharded& sharded = found->second;
  return ShardedTensor::from_local_tensor(local, sharded.spec, sharded.dtensor.layout.size(), sharded.group);
}

void ShardedParameters::check_shardable(const std::string& /*parameter*/) const {}

at::Tensor ShardedParameters::in_forward(FunctionRef<at::Tensor()> forward) const {
  std::vector<ProcessGroup> groups;
  for (const auto& [name, sharded] : sharded_) {
    if (std::find(groups.begin(), groups.end(), sharded.group) == groups.end()) groups.push_back(sharded.group);
  }
  return comm::in_step(groups, "forward of a layer with a sharded weight", forward);
}

void ShardedParameters::check_not_sharded(const char* operation) const {
  if (!sharded_.empty())
    fail(ErrorCode::unsupported, "{} of a module with sharded parameters, expected full parameters", operation);
}

namespace {

void check_is_weight(const std::string& parameter) {
  if (parameter == "weight") return;
  fail(ErrorCode::unsupported, "'{}' of a layer cannot be sharded, expected its weight", printable(parameter));
}

template <typename Options>
void check_embedding_options(const Options& options) {
  if (options.scale_grad_by_freq() || options.sparse())
    fail(ErrorCode::unsupported, "the weight of an embedding with scale_grad_by_freq or sparse, expected neither");
}

// Sets the options that embedding and embedding_bag have in common.
template <typename Options>
void set_embedding_options(ops::EmbeddingOptions& set, const Options& options) {
  if (options.padding_idx()) set.padding_idx = *options.padding_idx();
  if (options.max_norm()) set.max_norm = *options.max_norm();
  set.norm_type = options.norm_type();
}

}  // namespace

at::Tensor local_batch(const ops::LinearResult& result) {
  if (const auto* partial = std::get_if<PartialTensor>(&result)) {
    return functional::reduce_scatter(partial->process_group(), partial->local());
  }
  const auto& columns = std::get<ShardedTensor>(result);
  const ops::Chunks chunks = ops::chunks_of("local_batch", columns);
  std::vector<std::int64_t> size = columns.size();
  const std::int64_t ranks = columns.process_group().size();
  if (chunks.dim != columns.dim() - 1 || columns.dim() < 2) {
    fail(ErrorCode::unsupported, "local_batch of {}: expected a tensor sharded in its last dimension",
         describe(columns));
  }
  if (size[0] % ranks != 0) {
    fail(ErrorCode::invalid_argument, "local_batch of {}: expected a multiple of {} rows", describe(columns), ranks);
  }
  std::int64_t rows = 1;
  for (std::size_t d = 0; d + 1 < size.size(); ++d) rows *= size[d];
  size[0] /= ranks;
  return ops::distribute_columns(columns.local_tensor().reshape({rows, chunks.size()}), columns, chunks).view(size);
}

// --- linear

void ShardedLinearImpl::check_shardable(const std::string& parameter) const { check_is_weight(parameter); }

at::Tensor ShardedLinearImpl::forward(const at::Tensor& input) {
  if (!is_sharded("weight")) return LinearImpl::forward(input);
  return in_forward([&] {
    const at::Tensor rows = local_batch(ops::linear(input, sharded_parameter("weight", weight), bias));
    return input.dim() == 1 ? rows.squeeze(0) : rows;
  });
}

std::shared_ptr<torch::nn::Module> ShardedLinearImpl::clone(const OptionalDevice& device) const {
  check_not_sharded("clone");
  return cloned_layer<torch::nn::LinearImpl>(*this, device);
}

// --- embedding

void ShardedEmbeddingImpl::check_shardable(const std::string& parameter) const {
  check_is_weight(parameter);
  check_embedding_options(options);
}

at::Tensor ShardedEmbeddingImpl::forward(const at::Tensor& ids) {
  if (!is_sharded("weight")) return EmbeddingImpl::forward(ids);
  return in_forward([&] {
    ops::EmbeddingOptions of_op;
    set_embedding_options(of_op, options);
    return ops::embedding(ids, sharded_parameter("weight", weight), of_op);
  });
}

std::shared_ptr<torch::nn::Module> ShardedEmbeddingImpl::clone(const OptionalDevice& device) const {
  check_not_sharded("clone");
  return cloned_layer<torch::nn::EmbeddingImpl>(*this, device);
}

// --- embedding bag

void ShardedEmbeddingBagImpl::check_shardable(const std::string& parameter) const {
  check_is_weight(parameter);
  check_embedding_options(options);
}

at::Tensor ShardedEmbeddingBagImpl::forward(const at::Tensor& ids, const at::Tensor& offsets,
                                            const at::Tensor& per_sample_weights) {
  if (!is_sharded("weight")) return EmbeddingBagImpl::forward(ids, offsets, per_sample_weights);
  return in_forward([&] {
    constexpr std::array<const char*, 3> kModes = {"sum", "mean", "max"};  // in the order of EmbeddingBagMode
    ops::EmbeddingBagOptions of_op;
    set_embedding_options(of_op, options);
    of_op.mode = kModes.at(options.mode().index());
    of_op.offsets = offsets;
    of_op.include_last_offset = options.include_last_offset();
    of_op.per_sample_weights = per_sample_weights;
    return ops::embedding_bag(ids, sharded_parameter("weight", weight), of_op);
  });
}

std::shared_ptr<torch::nn::Module> ShardedEmbeddingBagImpl::clone(const OptionalDevice& device) const {
  check_not_sharded("clone");
  return cloned_layer<torch::nn::EmbeddingBagImpl>(*this, device);
}

}  // namespace tessera

#pragma once
// The shared state of the copies of a ShardedTensor, for the files that implement it.

#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "tensor/sharded/remote_shards.h"
#include "tensor/torch_errors.h"
#include "tessera/comm/process_group.h"
#include "tessera/tensor/sharded_tensor.h"

namespace tessera {

struct ShardedTensor::State {
  ProcessGroup group;
  SpecPtr spec;
  ShardedTensorMetadata metadata;
  std::vector<Shard> local_shards;
  bool init_rrefs = false;
  std::shared_ptr<RemoteShards> remote_shards;  // null without init_rrefs
};

// Throws Error(invalid_argument) if `init_rrefs` and RPC is not initialized.
void require_rpc(bool init_rrefs);

// Returns f(), the state of a new tensor, which is a rank's own part of creating it. With init_rrefs, a collective
// follows, so if `f` throws on any rank, every rank throws.
template <typename F>
auto construct(const ProcessGroup& group, bool init_rrefs, F&& f) {
  const auto make = [&] {
    try {
      return f();
    } catch (...) {
      rethrow_as_error("sharded tensor");
    }
  };
  if (!init_rrefs) return make();
  decltype(f()) made;
  group.check_call("sharded tensor with init_rrefs", [&](CallArguments& arguments) {
    require_rpc(init_rrefs);
    made = make();
    arguments.add("metadata", comparable_text(made->metadata));
  });
  return made;
}

// Throws Error(invalid_argument) unless the shard's tensor is contiguous, on this rank, and of the size and device of
// the shard's metadata and of the properties `expected`.
void check_shard(const Shard& shard, const TensorProperties& expected, const ProcessGroup& group);

// Throws Error(invalid_argument) unless `local_shards` have the metadata of this rank's shards of `all`, in that order.
// `whose` begins the message.
void check_local_shards(std::string_view whose, const std::vector<Shard>& local_shards,
                        const std::vector<ShardMetadata>& all, const ProcessGroup& group);

// Throws Error(invalid_argument) if `spec` is null.
void require_spec(const ShardedTensor::SpecPtr& spec);

// Returns the metadata of a tensor of `size` sharded by `spec`. Throws Error(invalid_argument) as build_metadata, and
// for a null spec and a negative size.
ShardedTensorMetadata metadata_by(const ShardedTensor::SpecPtr& spec, const ShardedTensor::Sizes& size,
                                  const TensorProperties& properties);

}  // namespace tessera

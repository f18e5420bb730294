// ShardedTensor's references to other ranks' shards, and its state as plain data.

#include "tensor/dtensor/placement.h"
#include "tensor/sharded/state.h"
#include "tessera/base/error.h"

namespace tessera {

namespace {

ProcessGroupState state_of(const ProcessGroup& group) {
  return {group.rank(), group.world_rank(), group.size(), group.world_size()};
}

void check_same(const ProcessGroupState& saved, const ProcessGroupState& found) {
  const auto check = [](const char* what, int of_state, int of_group) {
    if (of_state == of_group) return;
    fail(ErrorCode::invalid_argument, "sharded tensor from its state: {} is {}, expected {} as in the state", what,
         of_group, of_state);
  };
  check("the rank in the group", saved.rank, found.rank);
  check("the rank in the world", saved.world_rank, found.world_rank);
  check("the size of the group", saved.size, found.size);
  check("the size of the world", saved.world_size, found.world_size);
}

// Checks what the other ways to create a tensor check.
void check_complete(const ShardedTensorState& state, const ProcessGroup& group) {
  if (state.sharding_spec == nullptr) {
    fail(ErrorCode::invalid_argument,
         "sharded tensor from its state: sharding_spec is null, expected that of the original tensor");
  }
  check_local_shards("sharded tensor from its state", state.local_shards, state.metadata.shards_metadata, group);
  with_context([] { return "sharded tensor from its state"; },
               [&] {
                 for (const Shard& shard : state.local_shards) {
                   check_shard(shard, state.metadata.tensor_properties, group);
                 }
               });
}

}  // namespace

void require_rpc(bool init_rrefs) {
  if (!init_rrefs || is_rpc_initialized()) return;
  fail(ErrorCode::invalid_argument,
       "sharded tensor with init_rrefs: RPC is not initialized, expected a call of init_rpc before");
}

ShardedTensor ShardedTensor::finish(std::shared_ptr<State> state) {
  state->remote_shards = state->init_rrefs ? RemoteShards::make() : nullptr;
  if (state->init_rrefs) share_shards(*state->remote_shards, state->group, state->metadata, state->local_shards);
  return ShardedTensor(std::move(state));
}

const std::map<int, std::vector<RemoteShard>>& ShardedTensor::remote_shards() const {
  if (!state_->init_rrefs) {
    fail(ErrorCode::invalid_argument,
         "remote shards of a sharded tensor of size {}: it was created without init_rrefs and has no references to "
         "them, expected a tensor created with it",
         shape_to_string(size()));
  }
  return state_->remote_shards->by_rank();
}

ShardedTensorState ShardedTensor::state() const {
  return {local_shards(), metadata(), state_of(process_group()), state_->spec, state_->init_rrefs};
}

ShardedTensor ShardedTensor::from_state(ShardedTensorState state, const ProcessGroup& group) {
  group.check_call("sharded tensor from its state", [&](CallArguments& arguments) {
    check_same(state.process_group, state_of(group));
    check_complete(state, group);
    require_rpc(state.init_rrefs);
    arguments.add("metadata", comparable_text(state.metadata))
        .add("spec", comparable_text(*state.sharding_spec))
        .add("init_rrefs", state.init_rrefs);
  });
  auto made = std::make_shared<State>();
  made->group = group;
  made->spec = std::move(state.sharding_spec);
  made->metadata = std::move(state.metadata);
  made->local_shards = std::move(state.local_shards);
  made->init_rrefs = state.init_rrefs;
  return finish(std::move(made));
}

}  // namespace tessera

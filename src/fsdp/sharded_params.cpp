#include "fsdp/sharded_params.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "fsdp/runtime.h"
#include "tessera/base/error.h"
#include "tessera/state/object_archive.h"

namespace tessera::fsdp {

ShardedParams sharded_params(Runtime& runtime) {
  ShardedParams params;
  if (!is_sharded(runtime.options().strategy)) return params;
  for (const Unit* unit : runtime.units()) {
    FlatParamHandle* handle = unit->handle();
    const FlatParamLayout& layout = handle->layout();
    for (std::size_t i = 0; i < layout.params().size(); ++i) params[layout.params()[i].fqn] = {handle, i};
    for (const SharedParamInfo& shared : layout.shared_params()) params[shared.fqn] = {handle, shared.primary};
  }
  return params;
}

at::Tensor piece_in(const Value& value, const ShardedParam& param) {
  const ParamInfo& info = param.info();
  const auto check_shape = [&](const std::vector<std::int64_t>& shape) {
    if (shape == info.shape) return;
    fail(ErrorCode::invalid_argument, "'{}' is {}, expected {}", printable(info.fqn), shape_to_string(shape),
         shape_to_string(info.shape));
  };
  if (const at::Tensor* whole = value.get_if<at::Tensor>()) {
    check_shape(whole->sizes().vec());
    return param.handle->piece_of_whole(*whole, param.index);
  }
  const auto* checkpointable = value.get_if<std::shared_ptr<Checkpointable>>();
  const auto part = checkpointable ? std::dynamic_pointer_cast<FlatParamPart>(*checkpointable) : nullptr;
  if (!part) {
    fail(ErrorCode::invalid_argument, "'{}' is {}, expected a tensor, or what state_dict has of it",
         printable(info.fqn), kind_name(value.kind()));
  }
  check_shape(part->size());
  const FlatParamPart own(*param.handle, param.index, part->piece());
  if (own.local_chunks() != part->local_chunks()) {
    fail(ErrorCode::invalid_argument, "'{}' was cut in another way than here, expected it from a model on these ranks",
         printable(info.fqn));
  }
  return part->piece();
}

std::vector<at::Tensor> put_together(const FlatParamHandle& handle, const std::vector<Piece>& pieces,
                                     const FullStateOptions& options) {
  if (pieces.empty()) return {};
  const c10::NoGradGuard no_grad;
  const FlatParamLayout& layout = handle.layout();
  const at::TensorOptions of = pieces[0].piece.options().device(handle.options().device).requires_grad(false);
  const at::Tensor shard = at::zeros({layout.sharded_numel()}, of);
  for (const Piece& piece : pieces) handle.piece_of(shard, piece.index).copy_(piece.piece);
  const bool has_all = !options.rank0_only || handle.group().rank() == 0;
  at::Tensor whole;
  if (has_all) whole = at::empty({layout.padded_unsharded_numel()}, of);
  if (options.rank0_only) {
    handle.group().gather(whole, shard, 0);
  } else {
    handle.group().all_gather_into(whole, shard);
  }
  if (!has_all) return {};
  std::vector<at::Tensor> params = handle.unflatten_as(whole), found;
  for (const Piece& piece : pieces) {
    const at::Tensor& param = params[piece.index];
    found.push_back(options.offload_to_cpu ? param.cpu() : param);
    if (found.back().is_alias_of(whole)) found.back() = found.back().clone();  // one that is kept keeps no other
  }
  return found;
}

void for_each_entry(const StateDict& state, const ProcessGroup& group, const FullStateOptions& options,
                    Problems& problems, const std::function<void(const std::string& name, const Value& value)>& f) {
  const auto take = [&](const Key& key, const Value& value) {
    try {
      const auto* name = std::get_if<std::string>(&key);
      if (name == nullptr) fail(ErrorCode::invalid_argument, "key {} is an int, expected a name", to_string(key));
      f(*name, value);
    } catch (const Error& error) {
      problems.add("wrong", error.what());
    }
  };
  if (!options.rank0_only) {
    for (const auto& [key, value] : state) take(key, value);
    return;
  }
  const at::Tensor count = at::full({1}, static_cast<std::int64_t>(state.size()), at::kLong);
  group.broadcast(count, 0);
  auto entry = state.begin();
  for (std::int64_t i = 0; i < count.item<std::int64_t>(); ++i) {
    const Bytes archive = group.agree_on("send a state", [&] {
      if (group.rank() != 0) return Bytes();
      return save_object(Dict{{entry->key, entry->value}});
    });
    if (group.rank() == 0) ++entry;
    const Bytes received = group.broadcast_bytes(archive, 0);
    const Value sent = load_object(received, "state of rank 0");
    for (const auto& [key, value] : sent.get<Dict>()) take(key, value);
  }
}

void set_on_all(const ProcessGroup& group, std::string_view step,
                const std::function<void(const std::function<void()>& confirm)>& set) {
  bool has_agreed = false;
  try {
    set([&] {
      has_agreed = true;
      group.agree(step, nullptr);
    });
  } catch (...) {
    if (!has_agreed) group.agree(step, std::current_exception());
    throw;
  }
}

}  // namespace tessera::fsdp

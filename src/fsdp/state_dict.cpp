// The state of a sharded model by the names of its parameters.

#include <c10/core/GradMode.h>

#include "fsdp/runtime.h"
#include "fsdp/sharded_params.h"
#include "state/problems.h"
#include "tessera/base/error.h"
#include "tessera/layout/sharding_spec.h"
#include "tessera/state/module_state.h"
#include "tessera/tensor/torch_types.h"

namespace tessera::fsdp {

namespace {

constexpr std::string_view kFlatParam = "_flat_param";

std::string flat_name_of(const Unit& unit) {
  return unit.name().empty() ? std::string(kFlatParam) : fmt::format("{}.{}", unit.name(), kFlatParam);
}

// A unit's flat parameter, one-dimensional, cut over the ranks as it is.
ShardedTensor flat_param_of(const FlatParamHandle& handle) {
  std::vector<RemoteDevice> placements;
  placements.reserve(static_cast<std::size_t>(handle.group().size()));
  for (int rank = 0; rank < handle.group().size(); ++rank) {
    placements.push_back({rank, to_device(handle.flat_param().device())});
  }
  return ShardedTensor::from_local_tensor(handle.flat_param().detach(),
                                          std::make_shared<ChunkShardingSpec>(0, std::move(placements)),
                                          {handle.layout().padded_unsharded_numel()}, handle.group());
}

}  // namespace

StateDict ShardedModule::state_dict(StateDictType type, const FullStateOptions& full) {
  runtime_->check_idle("state_dict was called");
  runtime_->cast_buffers(/*own_dtype=*/true);
  for (const Unit* unit : runtime_->units()) unit->handle()->write_back_params();
  StateDict state = get_model_state_dict(*module_ptr());
  const ShardedParams params = sharded_params(*runtime_);
  if (type == StateDictType::sharded) {
    for (const auto& [name, param] : params) {
      state.insert_or_assign(
          name, std::make_shared<FlatParamPart>(*param.handle, param.index,
                                                param.handle->piece_of(param.handle->flat_param(), param.index)));
    }
    return state;
  }
  if (type == StateDictType::local) {
    StateDict local;
    for (auto& [key, value] : state) {
      if (params.count(std::get<std::string>(key)) == 0) local.insert_or_assign(key, value);
    }
    if (params.empty()) return local;
    for (const Unit* unit : runtime_->units())
      local.insert_or_assign(flat_name_of(*unit), flat_param_of(*unit->handle()));
    return local;
  }
  const bool has_all = !full.rank0_only || group().rank() == 0;
  for (const Unit* unit : runtime_->units()) {
    if (params.empty()) break;
    const FlatParamHandle& handle = *unit->handle();
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < handle.params().size(); ++i) {
      pieces.push_back({i, handle.piece_of(handle.flat_param(), i)});
    }
    const std::vector<at::Tensor> whole = put_together(handle, pieces, full);
    if (!has_all) continue;
    for (std::size_t i = 0; i < whole.size(); ++i) state.insert_or_assign(handle.layout().params()[i].fqn, whole[i]);
    for (const SharedParamInfo& shared : handle.layout().shared_params()) {
      state.insert_or_assign(shared.fqn, whole[shared.primary]);
    }
  }
  if (!has_all) return {};
  StateDict copy;
  for (const auto& [key, value] : state) {
    const at::Tensor& tensor = value.get<at::Tensor>();
    const bool is_ours = params.count(std::get<std::string>(key)) != 0;
    copy.insert_or_assign(key, is_ours               ? tensor
                               : full.offload_to_cpu ? tensor.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true)
                                                     : tensor.clone());
  }
  return copy;
}

void ShardedModule::load_state_dict(const StateDict& state_dict, const FullStateOptions& full) {
  runtime_->check_idle("load_state_dict was called");
  const c10::NoGradGuard no_grad;
  runtime_->cast_buffers(/*own_dtype=*/true);
  for (const Unit* unit : runtime_->units()) unit->handle()->write_back_params();
  const ShardedParams params = sharded_params(*runtime_);
  std::map<std::string, const Unit*> flat_params;
  for (const Unit* unit : runtime_->units()) flat_params[flat_name_of(*unit)] = unit;

  Problems problems;
  StateDict own;  // of the module as it is now: pieces and what isn't cut
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  const StateDict now = get_model_state_dict(*module_ptr());
  for_each_entry(state_dict, group(), full, [&](const std::string& name, const Value& value) {
    try {
      if (const auto flat = flat_params.find(name); flat != flat_params.end() && !params.empty()) {
        const FlatParamHandle& handle = *flat->second->handle();
        const ShardedTensor& local = value.get<ShardedTensor>();
        if (local.local_tensor().sizes() != handle.flat_param().sizes()) {
          fail(ErrorCode::invalid_argument, "'{}' has {} elements here, expected {}", printable(name),
               local.local_tensor().numel(), handle.flat_param().numel());
        }
        copies.emplace_back(handle.flat_param().detach(), local.local_tensor());
        for (const auto& [param_name, param] : params) {
          if (param.handle == &handle) own.insert_or_assign(param_name, now.at(param_name));
        }
        return;
      }
      const auto found = params.find(name);
      if (found == params.end()) {
        own.insert_or_assign(name, value);
        return;
      }
      const ShardedParam& param = found->second;
      const at::Tensor to = param.handle->piece_of(param.handle->flat_param(), param.index);
      const at::Tensor from = piece_in(value, param);
      if (!from.is_alias_of(to) || from.data_ptr() != to.data_ptr()) copies.emplace_back(to, from.clone());
      own.insert_or_assign(name, now.at(name));
    } catch (const Error& error) {
      problems.add("wrong", error.what());
    }
  });
  set_on_all(group(), "load a model's state", [&](const std::function<void()>& confirm) {
    problems.raise("load a model's state");
    StateDictOptions options;
    options.confirm = confirm;
    set_model_state_dict(*module_ptr(), own, options);
  });
  for (const auto& [to, from] : copies) to.copy_(from);
}

}  // namespace tessera::fsdp

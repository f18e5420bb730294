// State dicts of a sharded model.

#include <c10/core/GradMode.h>

#include "fsdp/runtime/runtime.h"
#include "fsdp/state/sharded_params.h"
#include "tessera/base/error.h"
#include "tessera/layout/sharding_spec.h"
#include "tessera/state/internal/local_state_dict.h"
#include "tessera/tensor/torch_types.h"

namespace tessera::fsdp {

namespace {

constexpr std::string_view kFlatParam = "_flat_param";

std::string flat_name_of(const Unit& unit) {
  return unit.name().empty() ? std::string(kFlatParam) : fmt::format("{}.{}", unit.name(), kFlatParam);
}

// Returns a unit's flat parameter as a one-dimensional tensor that is sharded over the ranks, without a copy.
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

// Each of the following functions converts `state`, the state of the module with sharded parameters.

StateDict sharded_state(StateDict state, const ShardedParams& params) {
  for (const auto& [name, param] : params) {
    state.insert_or_assign(name, param.part(param.handle->piece_of(param.handle->flat_param(), param.index)));
  }
  return state;
}

StateDict local_state(const StateDict& state, const ShardedParams& params, const std::vector<Unit*>& units) {
  StateDict local;
  for (const auto& [key, value] : state) {
    if (params.count(std::get<std::string>(key)) == 0) local.insert_or_assign(key, value);
  }
  for (const Unit* unit : units) local.insert_or_assign(flat_name_of(*unit), flat_param_of(*unit->handle()));
  return local;
}

// A collective.
StateDict full_state(StateDict state, const ShardedParams& params, const std::vector<Unit*>& units,
                     const FullStateOptions& full) {
  for (auto& [key, value] : state) {
    if (params.count(std::get<std::string>(key)) != 0) continue;
    state.insert_or_assign(key, full_copy_of(value, full));
  }
  for (const Unit* unit : units) {
    const FlatParamHandle& handle = *unit->handle();
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < handle.params().size(); ++i) {
      pieces.push_back({params.at(handle.layout().params()[i].fqn), handle.piece_of(handle.flat_param(), i)});
    }
    const std::vector<at::Tensor> tensors = gather_full(pieces, full);
    if (tensors.empty()) continue;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      state.insert_or_assign(handle.layout().params()[i].fqn, tensors[i]);
    }
    for (const SharedParamInfo& shared : handle.layout().shared_params()) {
      state.insert_or_assign(shared.fqn, tensors[shared.primary]);
    }
  }
  return state;
}

// Returns this rank's shard of a unit's flat parameter. Throws Error(invalid_argument) if it has another size.
const at::Tensor& local_flat_param(const Value& value, const std::string& name, const FlatParamHandle& handle) {
  const at::Tensor& local = value.get<ShardedTensor>().local_tensor();
  if (local.sizes() != handle.flat_param().sizes()) {
    fail(ErrorCode::invalid_argument, "'{}' has {} elements on this rank, expected {}", printable(name), local.numel(),
         handle.flat_param().numel());
  }
  return local;
}

}  // namespace

StateDict ShardedModule::state_dict(StateDictType type, const FullStateOptions& full) {
  StateDict state;
  const auto get = [&] {
    runtime_->check_idle("state_dict");
    runtime_->cast_buffers(/*own_dtype=*/true);
    for (const Unit* unit : runtime_->units()) unit->handle()->write_back_params();
    if (type == StateDictType::local && !ParameterParts(*module_ptr()).empty()) {
      fail(ErrorCode::unsupported, "state_dict: type is local for a tensor parallel model, expected sharded or full");
    }
    state = local_model_state(*module_ptr(), unsharded_parts(*runtime_));
  };
  if (type != StateDictType::full) {
    get();
  } else {
    runtime_->check_call("state_dict", [&](CallArguments& arguments) {
      if (full.rank0_only) runtime_->check_no_own_groups("state_dict");
      get();
      arguments.add("rank0_only", full.rank0_only);
    });
  }
  const ShardedParams params = sharded_params(*runtime_);
  if (type == StateDictType::sharded) return sharded_state(std::move(state), params);
  if (type == StateDictType::local) return local_state(state, params, sharded_units(*runtime_));
  state = full_state(std::move(state), params, sharded_units(*runtime_), full);
  return full.rank0_only && group().rank() != 0 ? StateDict() : state;
}

IncompatibleKeys ShardedModule::load_state_dict(const StateDict& state_dict, const FullStateOptions& full,
                                                bool strict) {
  const c10::NoGradGuard no_grad;
  runtime_->check_call("load_state_dict", [&](CallArguments& arguments) {
    runtime_->check_idle("load_state_dict");
    runtime_->cast_buffers(/*own_dtype=*/true);
    for (const Unit* unit : runtime_->units()) unit->handle()->write_back_params();
    arguments.add("rank0_only", full.rank0_only).add("strict", strict);
  });
  const ShardedParams params = sharded_params(*runtime_);
  std::map<std::string, const Unit*> flat_params;
  for (const Unit* unit : sharded_units(*runtime_)) flat_params[flat_name_of(*unit)] = unit;

  const ParameterParts parts = unsharded_parts(*runtime_);
  const StateDict now = local_model_state(*module_ptr(), parts);
  StateDict own;                                          // the new value, but of sharded parameters that of `now`
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // destination in a shard, source
  const auto take = [&](const std::string& name, const Value& value) {
    if (runtime_->is_of_other_ranks(name)) return;
    if (const auto flat = flat_params.find(name); flat != flat_params.end()) {
      const FlatParamHandle& handle = *flat->second->handle();
      copies.emplace_back(handle.flat_param().detach(), local_flat_param(value, name, handle));
      for (const auto& [param_name, param] : params) {
        if (param.handle == &handle) own.insert_or_assign(param_name, now.at(param_name));
      }
    } else if (const auto found = params.find(name); found != params.end()) {
      const ShardedParam& param = found->second;
      const at::Tensor to = param.handle->piece_of(param.handle->flat_param(), param.index);
      const at::Tensor from = piece_in(value, param);
      if (from.data_ptr() != to.data_ptr())
        copies.emplace_back(to, from.clone());  // unless it is this model's own state
      own.insert_or_assign(name, now.at(name));
    } else {
      own.insert_or_assign(name, value);
    }
  };
  Problems problems;
  for_each_entry(state_dict, group(), full, problems, take);
  StateDictOptions options;
  options.strict = strict;
  IncompatibleKeys incompatible;
  set_on_all(*runtime_, "load a model's state", [&](const std::function<void()>& confirm) {
    problems.raise("load a model's state");
    ModelStatePlan plan = plan_model_state(*module_ptr(), own, parts, options);
    confirm();
    plan.set();
    incompatible = std::move(plan.incompatible);
  });
  for (const auto& [to, from] : copies) to.copy_(from);
  return incompatible;
}

}  // namespace tessera::fsdp

// State dicts of a sharded model.

#include <c10/core/GradMode.h>

#include "fsdp/runtime/runtime.h"
#include "fsdp/state/values.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/layout/interval.h"
#include "tessera/state/internal/local_state_dict.h"
#include "tessera/tensor/shard.h"
#include "tessera/tensor/torch_types.h"

namespace tessera::fsdp {

namespace {

constexpr std::string_view kFlatParam = "_flat_param";

std::string flat_name_of(const Unit& unit) {
  return unit.name().empty() ? std::string(kFlatParam) : fmt::format("{}.{}", unit.name(), kFlatParam);
}

// Returns which elements of a flat parameter are in a rank's shard, without the padding at its end.
Interval unpadded_shard(const FlatParamHandle& handle, std::int64_t rank) {
  const FlatParamLayout& layout = handle.layout();
  const std::int64_t begin = rank * layout.sharded_numel();
  return {begin, begin + layout.sharded_numel() - layout.shard_numel_padded(rank)};
}

// Returns a unit's flat parameter as a one-dimensional tensor that is sharded over the ranks, without padding at its
// end. Ranks without elements have no shard. Without a copy, unless it is moved to the CPU.
ShardedTensor flat_param_of(const FlatParamHandle& handle, bool is_on_cpu) {
  at::Tensor shard = handle.flat_param().detach();
  if (is_on_cpu) shard = shard.cpu();
  ShardedTensorMetadata metadata;
  metadata.size = {handle.layout().unpadded_unsharded_numel()};
  metadata.tensor_properties = properties_of(shard);
  std::vector<Shard> local;
  for (int rank = 0; rank < handle.group().size(); ++rank) {
    const Interval part = unpadded_shard(handle, rank);
    if (part.size() == 0 && (rank != 0 || metadata.size[0] != 0)) continue;  // an empty tensor has one shard
    const std::vector<std::int64_t> offsets{part.begin}, sizes{part.size()};
    metadata.shards_metadata.emplace_back(offsets, sizes, RemoteDevice(rank, to_device(shard.device())));
    if (rank == handle.group().rank()) {
      local.push_back({shard.narrow(0, 0, part.size()), metadata.shards_metadata.back()});
    }
  }
  return ShardedTensor::from_local_shards_and_global_metadata(std::move(local), std::move(metadata), handle.group());
}

// Each of the following functions converts `state`, the state of the module with sharded parameters.

StateDict local_state(const StateDict& state, const ShardedParams& params, const std::vector<Unit*>& units,
                      const StateOptions& options) {
  StateDict local;
  for (const auto& [key, value] : state) {
    if (params.count(std::get<std::string>(key)) != 0) continue;
    local.insert_or_assign(key, value_of_unsharded(value, StateDictType::local, options, /*copies=*/false));
  }
  for (const Unit* unit : units) {
    local.insert_or_assign(flat_name_of(*unit), flat_param_of(*unit->handle(), options.offload_to_cpu.value_or(false)));
  }
  return local;
}

// A collective if it is full or on a mesh.
StateDict state_of_params(StateDict state, const Runtime& runtime, const ShardedParams& params, StateDictType type,
                          const StateOptions& options) {
  for (const auto& [key, value] : StateDict(state)) {
    const auto& name = std::get<std::string>(key);
    if (params.count(name) != 0) continue;
    state.insert_or_assign(key, value_of_unsharded(value, type, options, /*copies=*/runtime.has_param(name)));
  }
  for (const Unit* unit : sharded_units(runtime)) {
    const FlatParamHandle& handle = *unit->handle();
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < handle.params().size(); ++i) {
      pieces.push_back({params.at(handle.layout().params()[i].fqn), handle.piece_of(handle.flat_param(), i)});
    }
    const std::vector<Value> values = values_of(pieces, type, options, runtime.group());
    if (values.empty()) continue;
    for (std::size_t i = 0; i < values.size(); ++i) {
      state.insert_or_assign(handle.layout().params()[i].fqn, values[i]);
    }
    for (const SharedParamInfo& shared : handle.layout().shared_params()) {
      state.insert_or_assign(shared.fqn, values[shared.primary]);
    }
  }
  return state;
}

// Returns this rank's shard of a unit's flat parameter in a state of type local. Throws Error(invalid_argument) if it
// is sharded differently.
at::Tensor local_flat_param(const Value& value, const std::string& name, const FlatParamHandle& handle) {
  const ShardedTensor& flat = value.get<ShardedTensor>();
  const std::int64_t numel = handle.layout().unpadded_unsharded_numel();
  if (flat.size() != std::vector<std::int64_t>{numel}) {
    fail(ErrorCode::invalid_argument,
         "'{}' has shape {}, expected [{}]: a local state is of the same units and, with use_orig_params, of as many "
         "ranks",
         printable(name), shape_to_string(flat.size()), numel);
  }
  const Interval part = unpadded_shard(handle, handle.shard_rank());
  if (part.size() == 0) return handle.flat_param().detach().narrow(0, 0, 0);
  const std::vector<Shard>& shards = flat.local_shards();
  const auto has_part = [&](const ShardMetadata& shard) {
    return shard.shard_offsets[0] == part.begin && shard.shard_sizes[0] == part.size();
  };
  if (shards.size() == 1 && has_part(shards[0].metadata)) return shards[0].tensor.detach();
  std::int64_t found = 0;
  for (const Shard& shard : shards) found += shard.tensor.numel();
  fail(
      ErrorCode::invalid_argument,
      "'{}' has {} elements on this rank in {} shards, expected {} in one shard that begins at {}: a local state is of "
      "as many ranks",
      printable(name), found, shards.size(), part.size(), part.begin);
}

}  // namespace

StateDict ShardedModule::state_dict(StateDictType type, const StateOptions& options) {
  StateDict state;
  const auto get = [&] {
    runtime().check_idle("state_dict");
    runtime().cast_buffers(/*own_dtype=*/true);
    for (const Unit* unit : runtime().units()) unit->handle()->write_back_params();
    if (type == StateDictType::local && !ParameterParts(*module_ptr()).empty()) {
      fail(ErrorCode::unsupported, "state_dict: type is local for a tensor parallel model, expected sharded or full");
    }
    state = local_model_state(*module_ptr(), unsharded_parts(runtime()));
  };
  const bool is_full = type == StateDictType::full, is_on_mesh = type == StateDictType::sharded && options.mesh;
  if (!is_full && !is_on_mesh) {
    get();
  } else {
    runtime().check_call("state_dict", [&](CallArguments& arguments) {
      if (is_full && options.rank0_only) runtime().check_has_all_params("state_dict");
      if (is_on_mesh) check_mesh(runtime(), *options.mesh);
      get();
      if (is_full) arguments.add("rank0_only", options.rank0_only);
      if (is_on_mesh) arguments.add("mesh", options.mesh->to_string());
    });
  }
  const ShardedParams params = sharded_params(runtime());
  if (type == StateDictType::local) return local_state(state, params, sharded_units(runtime()), options);
  state = state_of_params(std::move(state), runtime(), params, type, options);
  return is_full && options.rank0_only && group().rank() != 0 ? StateDict() : state;
}

IncompatibleKeys ShardedModule::load_state_dict(const StateDict& state_dict, const StateOptions& options, bool strict) {
  const c10::NoGradGuard no_grad;
  const ShardedParams params = sharded_params(runtime());
  StateDict given = state_dict;
  GatheredDTensors dtensors(runtime(), params);
  if (!options.rank0_only) {
    for (const auto& [key, value] : state_dict) {
      if (const auto* name = std::get_if<std::string>(&key)) dtensors.add(*name, "", given.at(key));
    }
  }
  runtime().check_call(
      "load_state_dict",
      [&](CallArguments& arguments) {
        runtime().check_idle("load_state_dict");
        runtime().cast_buffers(/*own_dtype=*/true);
        for (const Unit* unit : runtime().units()) unit->handle()->write_back_params();
        arguments.add("rank0_only", options.rank0_only).add("strict", strict);
        dtensors.describe(arguments);
      },
      [&](const Unit& unit, CallArguments& arguments) { dtensors.describe(unit, arguments); });
  dtensors.gather();
  std::map<std::string, const Unit*> flat_params;
  for (const Unit* unit : sharded_units(runtime())) flat_params[flat_name_of(*unit)] = unit;

  const ParameterParts parts = unsharded_parts(runtime());
  const StateDict now = local_model_state(*module_ptr(), parts);
  StateDict own;                                          // the new value, but of sharded parameters that of `now`
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // destination in a shard, source
  const auto take = [&](const std::string& name, const Value& value) {
    if (runtime().is_of_other_ranks(name)) return;
    if (const auto flat = flat_params.find(name); flat != flat_params.end()) {
      const FlatParamHandle& handle = *flat->second->handle();
      const at::Tensor from = local_flat_param(value, name, handle);
      copies.emplace_back(handle.flat_param().detach().narrow(0, 0, from.numel()), from);
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
  for_each_entry(given, group(), options, problems, take);
  StateDictOptions state_options;
  state_options.strict = strict;
  IncompatibleKeys incompatible;
  set_on_all(runtime(), "load a model's state", [&](FunctionRef<void()> confirm) {
    problems.raise("load a model's state");
    ModelStatePlan plan = plan_model_state(*module_ptr(), own, parts, state_options);
    confirm();
    plan.set();
    incompatible = std::move(plan.incompatible);
  });
  for (const auto& [to, from] : copies) to.copy_(from);
  return incompatible;
}

}  // namespace tessera::fsdp

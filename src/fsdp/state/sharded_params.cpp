#include "fsdp/state/sharded_params.h"

#include <iterator>
#include <sstream>

#include "fsdp/runtime/runtime.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/state/internal/entries_of_rank0.h"

namespace tessera::fsdp {

const std::vector<std::int64_t>& ShardedParam::size() const {
  return spec != nullptr ? spec->layout.size() : handle->layout().params()[index].shape;
}

std::vector<Unit*> sharded_units(const Runtime& runtime) {
  std::vector<Unit*> units;
  for (Unit* unit : runtime.units()) {
    if (is_sharded(unit->handle()->options().strategy)) units.push_back(unit);
  }
  return units;
}

ShardedParams sharded_params(const Runtime& runtime) {
  ShardedParams params;
  const ParameterParts parts(*runtime.module());
  for (const Unit* unit : sharded_units(runtime)) {
    FlatParamHandle* handle = unit->handle();
    const FlatParamLayout& layout = handle->layout();
    const auto add = [&](const std::string& fqn, std::size_t i) {
      params.insert_or_assign(fqn, ShardedParam{handle, i, parts.find(handle->params()[i])});
    };
    for (std::size_t i = 0; i < layout.params().size(); ++i) add(layout.params()[i].fqn, i);
    for (const SharedParamInfo& shared : layout.shared_params()) add(shared.fqn, shared.primary);
  }
  return params;
}

ParameterParts unsharded_parts(const Runtime& runtime) {
  ParameterParts parts(*runtime.module());
  for (const Unit* unit : sharded_units(runtime)) {
    for (const at::Tensor& param : unit->handle()->params()) parts.remove(param);
  }
  return parts;
}

void check_same_parts(const torch::nn::Module& module, const ProcessGroup& group) {
  const ParameterParts parts(module);
  std::string mine;  // one line per parameter
  for (const auto& param : module.named_parameters()) {
    const DTensorSpec* spec = param.value().defined() ? parts.find(param.value()) : nullptr;
    if (spec == nullptr) continue;
    fmt::format_to(std::back_inserter(mine), "'{}':", printable(param.key()));
    for (const LocalBox& box : spec->layout.local_boxes(*spec->mesh.coordinate())) {
      fmt::format_to(std::back_inserter(mine), " {}", to_string(box.box));
    }
    mine.push_back('\n');
  }
  const Bytes of_first = group.broadcast_bytes(as_bytes(mine), 0);
  group.agree_on("shard a model", [&] {
    if (as_text(of_first) == mine) return;
    std::istringstream here(mine), there{std::string(as_text(of_first))};
    std::string line_here, line_there;
    do {
      if (!std::getline(here, line_here)) line_here = "none";
      if (!std::getline(there, line_there)) line_there = "none";
    } while (line_here == line_there);
    fail(ErrorCode::invalid_argument,
         "this rank has parameter parts {}, expected {} as on rank 0 of the group: shard a tensor parallel model over "
         "ranks that have the same part of it, such as the group of the mesh's other dimension",
         line_here, line_there);
  });
}

at::Tensor piece_in(const Value& value, const ShardedParam& param) {
  const auto check_size = [&](const std::vector<std::int64_t>& size) {
    if (size == param.size()) return;
    fail(ErrorCode::invalid_argument, "'{}' has shape {}, expected {}", printable(param.fqn()), shape_to_string(size),
         shape_to_string(param.size()));
  };
  if (const at::Tensor* full = value.get_if<at::Tensor>()) {
    if (param.spec == nullptr) {
      const at::Tensor flat = param.handle->flattened_form(*full, param.index);
      check_size(flat.sizes().vec());
      return param.handle->piece_of_full(flat, param.index);
    }
    check_size(full->sizes().vec());
    const at::Tensor local = param.handle->flattened_form(local_of_full(*param.spec, *full), param.index);
    return param.handle->piece_of_full(local, param.index);
  }
  const auto* checkpointable = value.get_if<std::shared_ptr<Checkpointable>>();
  const auto part = checkpointable ? std::dynamic_pointer_cast<FlatParamPart>(*checkpointable) : nullptr;
  if (!part) {
    fail(ErrorCode::invalid_argument, "'{}' has kind {}, expected a tensor or a value that state_dict returned",
         printable(param.fqn()), kind_name(value.kind()));
  }
  check_size(part->size());
  if (param.part(part->piece())->local_chunks() != part->local_chunks()) {
    fail(ErrorCode::invalid_argument,
         "'{}' is sharded differently, expected a value from a model with the same units on the same ranks",
         printable(param.fqn()));
  }
  return part->piece();
}

void for_each_entry(const StateDict& state, const ProcessGroup& group, const StateOptions& options, Problems& problems,
                    FunctionRef<void(const std::string& name, const Value& value)> f) {
  const auto take = [&](const Key& key, const Value& value) {
    try {
      const auto* name = std::get_if<std::string>(&key);
      if (name == nullptr) fail(ErrorCode::invalid_argument, "key {} is an int, expected a string", to_string(key));
      f(*name, value);
    } catch (const Error& error) {
      problems.add("wrong", error.what());
    }
  };
  if (!options.rank0_only) {
    for (const auto& [key, value] : state) take(key, value);
    return;
  }
  for_each_entry_of_rank0(state, group, take);
}

void set_on_all(const Runtime& runtime, std::string_view step, FunctionRef<void(FunctionRef<void()> confirm)> set) {
  bool has_agreed = false;
  try {
    set([&] {
      has_agreed = true;
      runtime.agree(step, nullptr);
    });
  } catch (...) {
    if (!has_agreed) runtime.agree(step, std::current_exception());
    throw;
  }
}

}  // namespace tessera::fsdp

#pragma once
// The parameters of a sharded model by name, and conversion between their full tensors and pieces.

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/flat_param/part.h"
#include "tessera/base/function_ref.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"
#include "tessera/state/internal/parameter_parts.h"
#include "tessera/state/internal/problems.h"

namespace tessera::fsdp {

// A parameter in a flat parameter.
struct ShardedParam {
  FlatParamHandle* handle;
  std::size_t index;
  const DTensorSpec* spec;  // of the DTensor whose local tensor the parameter is, else null

  const std::string& fqn() const { return handle->layout().params()[index].fqn; }
  // The shape of the full tensor, which is the DTensor if there is one.
  const std::vector<std::int64_t>& size() const;
  // Returns the state dict's value for this rank's `piece` of the parameter or of its optimizer state.
  std::shared_ptr<FlatParamPart> part(at::Tensor piece) const {
    return std::make_shared<FlatParamPart>(*handle, index, std::move(piece), spec);
  }
};

// Returns the units whose strategy shards parameters.
std::vector<Unit*> sharded_units(const Runtime& runtime);

using ShardedParams = std::map<std::string, ShardedParam>;
// Returns the parameters of these units.
ShardedParams sharded_params(const Runtime& runtime);
// Returns the parts of all other parameters that are local tensors of DTensors.
ParameterParts unsharded_parts(const Runtime& runtime);
// Throws Error(invalid_argument) on all ranks unless all ranks of `group` have the same parts of a tensor parallel
// model's parameters. A collective.
void check_same_parts(const torch::nn::Module& module, const ProcessGroup& group);

// Returns this rank's elements of a parameter, one-dimensional, from its value in a state dict of type full or sharded.
// Throws Error(invalid_argument) if the value has another shape or is sharded differently.
at::Tensor piece_in(const Value& value, const ShardedParam& param);

// Calls `f` for each entry of `state`. With `rank0_only` calls it on all ranks for each entry of rank 0, which is sent
// one entry at a time to save memory; a collective then. Adds errors that `f` throws, and keys that are not strings, to
// `problems`.
void for_each_entry(const StateDict& state, const ProcessGroup& group, const StateOptions& options, Problems& problems,
                    FunctionRef<void(const std::string& name, const Value& value)> f);

// Calls `set(confirm)` on all ranks. `set` must call `confirm` before it changes anything. If `set` throws on any rank
// before that, every rank throws and nothing is changed. A collective of all groups.
void set_on_all(const Runtime& runtime, std::string_view step, FunctionRef<void(FunctionRef<void()> confirm)> set);

}  // namespace tessera::fsdp

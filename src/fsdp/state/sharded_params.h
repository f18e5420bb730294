#pragma once
// The parameters of a sharded model by name, and values of them, whole and in part.

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/flat_param/part.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"
#include "tessera/state/internal/parameter_parts.h"
#include "tessera/state/internal/problems.h"

namespace tessera::fsdp {

// A parameter in a flat parameter.
struct ShardedParam {
  FlatParamHandle* handle;
  std::size_t index;
  const DTensorSpec* spec;  // of the DTensor that it is the local tensor of; null if it is a tensor by itself

  const std::string& fqn() const { return handle->layout().params()[index].fqn; }
  // Of the DTensor.
  const std::vector<std::int64_t>& size() const;
  // What a state dict has of it, or of a state of it, of which this rank has `piece`.
  std::shared_ptr<FlatParamPart> part(at::Tensor piece) const {
    return std::make_shared<FlatParamPart>(*handle, index, std::move(piece), spec);
  }
};

using ShardedParams = std::map<std::string, ShardedParam>;
// Of the units' parameters; none where nothing is cut.
ShardedParams sharded_params(const Runtime& runtime);
// The other parameters that are local tensors of DTensors.
ParameterParts unsharded_parts(const Runtime& runtime);
// That the ranks which shard a model have the same parts of its parameters. A collective; throws
// Error(invalid_argument).
void check_same_parts(const torch::nn::Module& module, const ProcessGroup& group);

// This rank's elements of a parameter, out of what a state dict of any type has of it: one-dimensional. Throws
// Error(invalid_argument) for what isn't of its shape, or was cut in another way.
at::Tensor piece_in(const Value& value, const ShardedParam& param);

// Whole parameters out of their pieces on all ranks: `pieces` are of parameters of one handle. A collective, also of
// the meshes of DTensors. On ranks other than 0 nothing, if `rank0_only`.
struct Piece {
  ShardedParam param;
  at::Tensor piece;
};
std::vector<at::Tensor> put_together(const std::vector<Piece>& pieces, const FullStateOptions& options);

// The whole tensor of one that isn't cut by FSDP, where it is a DTensor; else itself. A collective of its mesh.
at::Tensor whole_of(const Value& value);

// Calls `f` for each entry of `state`; with `rank0_only` for each of rank 0's, on all ranks, one entry at a time in
// memory: a collective then. What `f` throws, and keys that are no names, become `problems`.
void for_each_entry(const StateDict& state, const ProcessGroup& group, const FullStateOptions& options,
                    Problems& problems, const std::function<void(const std::string& name, const Value& value)>& f);

// Calls `set(confirm)` on all ranks, which calls `confirm` before it changes anything: if it throws on one, it does on
// all, and nothing is changed.
void set_on_all(const ProcessGroup& group, std::string_view step,
                const std::function<void(const std::function<void()>& confirm)>& set);

}  // namespace tessera::fsdp

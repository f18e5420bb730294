#pragma once
// The tensors of state dicts: made of the pieces that all ranks have, and taken apart again.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/state/sharded_params.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"
#include "tessera/tensor/dtensor.h"

namespace tessera::fsdp {

// Throws Error(invalid_argument) unless the model's parameters can be DTensors on `mesh`; see StateOptions::mesh.
void check_mesh(const Runtime& runtime, const DeviceMesh& mesh);

// This rank's elements of a parameter, or of its optimizer state.
struct Piece {
  ShardedParam param;
  at::Tensor piece;
};
// Returns the values of pieces in a state dict, sharded or full. `pieces` are of parameters of one handle. Returns an
// empty vector on ranks that get no state dict: with `rank0_only` all but rank 0 of `group`, the model's. A collective
// if it is full or on a mesh, also of the meshes of DTensors.
std::vector<Value> values_of(const std::vector<Piece>& pieces, StateDictType type, const StateOptions& options,
                             const ProcessGroup& group);

// Returns the value in a state dict, of any type, of a tensor or DTensor that FSDP does not shard. Unless it is moved
// to the CPU, or gathered, it shares the tensor's memory, except for `copies` in a full state. A collective of the
// DTensor's mesh if it is full.
Value value_of_unsharded(const Value& value, StateDictType type, const StateOptions& options, bool copies);

// The DTensors in a state dict of which this rank needs other elements than it has.
class GatheredDTensors {
 public:
  GatheredDTensors(const Runtime& runtime, const ShardedParams& params);

  // Notes a value of a parameter, or of `key` of its optimizer state, if it is such a DTensor. `value` must stay valid.
  void add(const std::string& name, const std::string& key, Value& value);
  // Add what was noted of the parameters of a unit, or of those that are in no unit.
  void describe(const Unit& unit, CallArguments& arguments) const;
  void describe(CallArguments& arguments) const;
  // Replaces the values, one by one, by this rank's parts of sharded parameters and by the full tensors of others. A
  // collective of their meshes: all ranks must have noted the same.
  void gather();

 private:
  struct Found {
    DTensor tensor;
    Value* value;
  };
  const ShardedParams& params_;
  ParameterParts parts_;
  std::map<std::string, at::Tensor> model_;
  std::map<std::string, const Unit*> unit_of_;                  // by parameter
  std::map<std::pair<std::string, std::string>, Found> found_;  // by parameter and key
};

}  // namespace tessera::fsdp

#pragma once
// Converts a rank's part of a state dict to the form that module checkpoint accepts.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "state/transport/spans.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/flat_state.h"
#include "tessera/state/save.h"

namespace tessera {

// Shares elements with `state`. Copies elements of other devices and pickles objects only when they are requested.
// Throws as save().
checkpoint::FlatState local_state(const StateDict& state, const ProcessGroup& group, const SaveOptions& options);

// Returns the last name of the storage's directory. All ranks must use the same directory, but hosts may have mounted
// it under different paths. Throws Error(invalid_argument) if the storage is null.
std::string last_name_of(const std::shared_ptr<checkpoint::Storage>& storage);
// Adds the rank that coordinates a save or a load. Throws Error(invalid_argument) if it is not in the group.
void describe_coordinator(const ProcessGroup& group, int rank, CallArguments& arguments);
// Adds what must be equal on all ranks of a save. Throws Error(invalid_argument) if the storage is null, and as
// describe_coordinator.
void describe_save(const std::shared_ptr<checkpoint::Storage>& storage, const ProcessGroup& group,
                   const SaveOptions& options, CallArguments& arguments);

// Compares the ranks' calls, to which `describe` adds arguments, and returns `convert(state)` with the state of each
// Stateful in its place. A collective.
checkpoint::FlatState convert_on_all_ranks(const ProcessGroup& group, std::string_view operation,
                                           const StateDict& state, FunctionRef<void(CallArguments& arguments)> describe,
                                           FunctionRef<checkpoint::FlatState(const StateDict& state)> convert);

// Copies elements to memory that is reused for the next copy. Elements that a state has several times, such as a tied
// weight or views of one storage, are copied once.
class StagingArea {
 public:
  // As local_state, but copies all elements and pickles all objects before it returns; the state may then be changed.
  // The next call invalidates the result of the previous one.
  checkpoint::FlatState copy(const StateDict& state, const ProcessGroup& group, const SaveOptions& options);
  std::uint64_t size_bytes() const { return copies_.size_bytes(); }

 private:
  HostCopies copies_;
};

}  // namespace tessera

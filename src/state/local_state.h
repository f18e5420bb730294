#pragma once
// Converts a rank's part of a state dict to the form that module checkpoint accepts.

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <utility>

#include "tessera/checkpoint/flat_state.h"
#include "tessera/state/save.h"

namespace tessera {

// Shares elements with `state`. Copies elements of other devices and pickles objects only when they are requested.
// Throws as save().
checkpoint::FlatState local_state(const StateDict& state, const ProcessGroup& group, const SaveOptions& options);

// Copies elements to memory that is reused for the next copy of the same state; pinned if the elements are on CUDA.
class StagingArea {
 public:
  // As local_state, but copies all elements and pickles all objects before it returns; the state may then be changed.
  // The next call invalidates the result of the previous one.
  checkpoint::FlatState copy(const StateDict& state, const ProcessGroup& group, const SaveOptions& options);
  std::uint64_t size_bytes() const;

 private:
  std::map<std::pair<std::string, std::size_t>, at::Tensor> buffers_;  // by name and chunk
};

}  // namespace tessera

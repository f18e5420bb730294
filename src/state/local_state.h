#pragma once
// A rank's part of a state dict as the checkpoint module takes it.

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <utility>

#include "tessera/checkpoint/flat_state.h"
#include "tessera/state/save.h"

namespace tessera {

// Elements are shared with `state`; those of other devices are copied when they are asked for. Objects are pickled when
// they are asked for. Throws as save().
checkpoint::FlatState local_state(const StateDict& state, const ProcessGroup& group, const SaveOptions& options);

// Copies of elements in memory that is used again for the next copy of the same state: pinned where the elements are on
// CUDA.
class StagingArea {
 public:
  // As local_state, but everything is copied, objects pickled, before it returns: the state may be changed then. The
  // copies stay until the next call, which needs the flat state of the one before no more.
  checkpoint::FlatState copy(const StateDict& state, const ProcessGroup& group, const SaveOptions& options);
  std::uint64_t size_bytes() const;

 private:
  std::map<std::pair<std::string, std::size_t>, at::Tensor> buffers_;  // by name and chunk
};

}  // namespace tessera

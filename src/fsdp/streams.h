#pragma once
// The streams of a device on which FSDP gathers parameters and reduces gradients beside the computation, which is on
// the current stream; see comm/internal/streams.h. On CPU nothing in this file does anything.
//
// PyTorch: _init_streams and _FreeEventQueue of torch/distributed/fsdp.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <deque>
#include <optional>

#include "tessera/comm/internal/streams.h"

namespace tessera::fsdp {

using comm::Mark;
using comm::OnStream;
using comm::SideStream;

class Streams;

// Makes the stream of the computation the current one, which then comes after the one that was. That one waits for the
// computation when this is destroyed. Autograd accumulates the gradients of parameters on a stream of its own choice.
class OnComputation {
 public:
  explicit OnComputation(const Streams& streams);
  ~OnComputation();
  OnComputation(const OnComputation&) = delete;
  OnComputation& operator=(const OnComputation&) = delete;

 private:
  const Streams& streams_;
  std::optional<c10::impl::InlineStreamGuard<c10::impl::VirtualGuardImpl>> guard_;
};

// The streams that all units of a model share, and the memory that the units have freed.
//
// Freed memory is held until the unshard stream waits for its last use, so that the next unit to be unsharded takes its
// place without the host or the allocator waiting. As long as one block is held, the next unit is gathered during the
// computation that used it.
class Streams {
 public:
  explicit Streams(at::Device device);
  at::Device device() const { return device_; }

 private:
  at::Device device_;  // with an index

 public:
  const SideStream cast;      // casts shards, and copies them to the device
  const SideStream unshard;   // owns the memory of unsharded parameters
  const SideStream reduce;    // reduces gradients over the ranks of the group, and accumulates them
  const SideStream replicas;  // the same over the replicas

  // Makes the streams wait for the current one, which may have written shards and gradients, and is that of the
  // computation from now on.
  void wait_for_current();
  // Blocks the host until shards were copied to the device, after which they may be written.
  void finish_copies() const;
  // Whether all work on shards comes after wait_for_current(): during forward and backward of a model. Otherwise each
  // unshard waits for the current stream.
  bool is_in_step = false;
  // Whether ranks that share memory meet at the end of forward and backward, and not after each reshard.
  bool meets_after_backward = false;

  // Frees the memory of a tensor that was allocated on the unshard stream and last used on the current one. In a step
  // it is held.
  void free(const at::Tensor& flat);
  // Returns the held memory to the allocator, from the oldest on, until at most `count` blocks are held.
  void hold_at_most(std::size_t count);
  std::size_t held() const { return held_.size(); }

 private:
  friend class OnComputation;
  struct Held {
    c10::DataPtr memory;
    Mark last_use;
  };

  std::optional<c10::Stream> computation_;
  std::deque<Held> held_;
};

}  // namespace tessera::fsdp

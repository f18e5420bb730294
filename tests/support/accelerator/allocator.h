#pragma once
// The memory of the devices as tensors use it, by the rules of CUDA's caching allocator (PyTorch:
// c10/cuda/CUDACachingAllocator.cpp):
//
// - A block belongs to the stream that was current when it was allocated, until the process ends.
// - free(b) hands b to the next allocation on its stream that fits, at once and without waiting: what is enqueued on
// that stream later
//   runs later.
// - After record_stream(b, s), free(b) hands b out only when s has passed a point that is recorded at the time of free.
// - Blocks are split, and free neighbors of one stream are merged. The smallest free block that fits is taken.
// - When a block becomes free, a task "poison" on its stream fills it with bytes 0xFF. Fresh memory holds these, too.
//
// May be called from any thread, but not from a task.

#include <c10/core/Allocator.h>

#include <cstddef>

#include "support/accelerator/accelerator.h"
#include "support/accelerator/engine.h"

namespace tessera::sim {

// The allocator of LibTorch for this kind of device. It allocates on the current stream of the current device.
c10::Allocator* device_allocator();

// Makes the memory of `data` wait for `stream` when it is freed. Does nothing for memory of other owners, for example
// of from_blob(), as CUDA's allocator does, and for the stream that the block belongs to.
void record_stream(const c10::DataPtr& data, StreamKey stream);

}  // namespace tessera::sim

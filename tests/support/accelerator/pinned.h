#pragma once
// Pinned memory: memory of the host that tasks may read and write late. It follows CUDA's caching host allocator
// (PyTorch: ATen/core/CachingHostAllocator.h): a freed block is handed out again, to any thread, when the streams that
// used it have passed a point that is recorded at the time of free; without such streams at once. Blocks are filled
// with bytes 0xFF when they are handed out.
//
// May be called from any thread, but not from a task.

#include <c10/core/Allocator.h>

#include "support/accelerator/engine.h"

namespace tessera::sim {

c10::Allocator* pinned_allocator();

// Whether the address is within a block of pinned memory.
bool is_pinned(const void* address);

// Notes that `stream` uses the block that the address is in.
void record_pinned(const void* address, StreamKey stream);

}  // namespace tessera::sim

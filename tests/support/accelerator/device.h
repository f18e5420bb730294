#pragma once
// The device and the streams that a thread has selected, and the parts of the accelerator that LibTorch must know.

#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

#include "support/accelerator/engine.h"

namespace tessera::sim {

// Streams 1 to kPoolStreams of a device are a pool, handed out in turn; later ones are new each time.
inline constexpr std::int64_t kPoolStreams = 32;

// Of the calling thread. At first they are device 0 and the default streams.
int current_device();
StreamKey current_stream(int device);

StreamKey key_of(const c10::Stream& stream);
c10::Stream stream_of(const StreamKey& key);

// Moves the memory of a storage to a new block of `bytes` on the current stream of its device. What fits is copied.
void resize_storage(c10::StorageImpl& storage, std::size_t bytes);

// Called once, by install().
void register_guard();       // c10's guards, streams and events: guard.cpp
void register_hooks();       // pinned memory and generators: hooks.cpp
void register_tensor_ops();  // making, viewing and resizing tensors: ops/tensors.cpp
void register_copies();      // ops/copies.cpp
void register_fallback();    // all other ops, called last: ops/fallback.cpp

}  // namespace tessera::sim

#pragma once
// Streams of a device beside the current one, and the places in streams that others wait for. A device runs the work of
// a stream in order. Streams wait for each other by events, which the host does not wait for. On CPU work is done when
// a function returns, and nothing in this file does anything.
//
// Memory belongs to the stream that was current when it was allocated: the allocator hands it out again to work on that
// stream as soon as it is freed. So what another stream uses is freed only after its own stream waits for that use.
//
// Threads: an object may be used by several threads if none of them changes it.

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/InlineStreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>

namespace tessera::comm {

// Returns the functions of a kind of device.
inline c10::impl::VirtualGuardImpl guard_of(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()); }

// Returns the device with an index: that of the current device if it has none. CPU has none.
c10::Device with_index(c10::Device device);

// A place in a stream: all work that was enqueued before it. Every place is reached until set() is called.
class Mark {
 public:
  // Sets it to the end of the current stream of `device`.
  void set(c10::Device device);
  // Makes work that is enqueued on the current stream from now on wait until the place is reached.
  void block_current() const;
  // Returns whether the place is reached.
  bool is_reached() const { return event_ == nullptr || event_->query(); }
  // Blocks the host until the place is reached.
  void synchronize() const;

 private:
  std::shared_ptr<c10::Event> event_;
};

// A stream beside the current one.
class SideStream {
 public:
  // Takes a stream of the device; on CPU none.
  explicit SideStream(c10::Device device);
  // Makes what is enqueued here from now on wait for `mark`, and for all that was enqueued on the current stream.
  void wait_for(const Mark& mark) const;
  void wait_for_current() const;

 private:
  friend class OnStream;
  c10::Device device_;
  std::optional<c10::Stream> stream_;
};

// Makes a stream the current one of this thread while it exists.
class OnStream {
 public:
  explicit OnStream(const SideStream& stream);
  explicit OnStream(c10::Stream stream) { guard_.emplace(stream); }

 private:
  std::optional<c10::impl::InlineStreamGuard<c10::impl::VirtualGuardImpl>> guard_;
};

}  // namespace tessera::comm

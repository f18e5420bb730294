#include "fsdp/streams.h"

#include <exception>
#include <utility>

#include "fsdp/flat_param/storage.h"

namespace tessera::fsdp {

using comm::guard_of;

OnComputation::OnComputation(const Streams& streams) : streams_(streams) {
  const std::optional<c10::Stream>& computation = streams.computation_;
  if (!computation || *computation == guard_of(streams.device_).getStream(streams.device_)) return;
  Mark mark;
  mark.set(streams.device_);
  guard_.emplace(*computation);
  mark.block_current();
}

OnComputation::~OnComputation() {
  if (!guard_) return;
  try {
    Mark mark;
    mark.set(streams_.device_);
    guard_.reset();
    mark.block_current();
  } catch (const std::exception&) {  // the device has failed, which the next call on it throws
  }
}

Streams::Streams(at::Device device)
    : device_(comm::with_index(device)), cast(device_), unshard(device_), reduce(device_), replicas(device_) {}

void Streams::wait_for_current() {
  if (device_.is_cpu()) return;
  computation_ = guard_of(device_).getStream(device_);
  Mark mark;
  mark.set(device_);
  for (const SideStream* stream : {&cast, &unshard, &reduce, &replicas}) stream->wait_for(mark);
}

void Streams::finish_copies() const {
  Mark mark;
  {
    const OnStream on(cast);
    mark.set(device_);
  }
  mark.synchronize();
}

void Streams::free(const at::Tensor& flat) {
  if (device_.is_cpu()) return free_storage(flat);
  Held held;
  held.last_use.set(device_);
  held.memory = take_storage(flat);
  held_.push_back(std::move(held));
  if (!is_in_step) hold_at_most(0);
}

void Streams::hold_at_most(std::size_t count) {
  while (held_.size() > count) {
    unshard.wait_for(held_.front().last_use);
    held_.pop_front();
  }
}

}  // namespace tessera::fsdp

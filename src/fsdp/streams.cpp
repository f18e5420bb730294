#include "fsdp/streams.h"

#include <chrono>
#include <thread>
#include <utility>

#include "fsdp/flat_param/storage.h"

namespace tessera::fsdp {

namespace {

c10::impl::VirtualGuardImpl guard_of(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()); }

at::Device with_index(at::Device device) {
  return device.is_cpu() || device.has_index() ? device : guard_of(device).getDevice();
}

}  // namespace

void Mark::set(at::Device device) {
  if (device.is_cpu()) return;
  auto event = std::make_shared<c10::Event>(device.type());
  event->record(guard_of(device).getStream(device));
  event_ = std::move(event);
}

void Mark::block_current() const {
  if (event_ == nullptr) return;
  const at::Device device(event_->device_type(), event_->device_index());
  event_->block(guard_of(device).getStream(device));
}

void Mark::synchronize() const {
  // LibTorch 1.13 cannot wait for an event of any device, only ask.
  while (event_ != nullptr && !event_->query()) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

SideStream::SideStream(at::Device device) : device_(device) {
  if (!device.is_cpu()) stream_ = guard_of(device).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

void SideStream::wait_for(const Mark& mark) const {
  const OnStream on(*this);
  mark.block_current();
}

void SideStream::wait_for_current() const {
  Mark mark;
  mark.set(device_);
  wait_for(mark);
}

OnStream::OnStream(const SideStream& stream) {
  if (stream.stream_) guard_.emplace(*stream.stream_);
}

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
  Mark mark;
  mark.set(streams_.device_);
  guard_.reset();
  mark.block_current();
}

Streams::Streams(at::Device device)
    : device_(with_index(device)), cast(device_), unshard(device_), reduce(device_), replicas(device_) {}

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

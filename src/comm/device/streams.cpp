#include "tessera/comm/internal/streams.h"

#include <chrono>
#include <thread>
#include <utility>

namespace tessera::comm {

c10::Device with_index(c10::Device device) {
  return device.is_cpu() || device.has_index() ? device : guard_of(device).getDevice();
}

void Mark::set(c10::Device device) {
  if (device.is_cpu()) return;
  auto event = std::make_shared<c10::Event>(device.type());
  event->record(guard_of(device).getStream(device));
  event_ = std::move(event);
}

void Mark::block_current() const {
  if (event_ == nullptr) return;
  const c10::Device device(event_->device_type(), event_->device_index());
  event_->block(guard_of(device).getStream(device));
}

void Mark::synchronize() const {
  // LibTorch 1.13 cannot wait for an event of any device, only ask.
  while (!is_reached()) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

SideStream::SideStream(c10::Device device) : device_(with_index(device)) {
  if (!device_.is_cpu()) stream_ = guard_of(device_).getStreamFromGlobalPool(device_, /*isHighPriority=*/true);
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

}  // namespace tessera::comm

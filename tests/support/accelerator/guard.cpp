#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>

#include "support/accelerator/allocator.h"
#include "support/accelerator/device.h"

namespace tessera::sim {

namespace {

struct Selection {
  int device = 0;
  std::array<std::int64_t, kDevices> streams = {};
};
thread_local Selection selection;
std::array<std::atomic<std::int64_t>, kDevices> destroyed = {};  // events, by current device

int checked_index(c10::Device device) {
  TORCH_CHECK(device.is_privateuseone() && device.index() < kDevices, "sim: found device ", device,
              ", expected sim:0 to sim:", kDevices - 1);
  return device.has_index() ? device.index() : selection.device;
}

PointPtr& point_of(void* event) { return *static_cast<PointPtr*>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device(selection.device); }
  void setDevice(c10::Device device) const override { selection.device = checked_index(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { selection.device = device.index(); }

  c10::Stream getStream(c10::Device device) const noexcept override {
    return stream_of(current_stream(device.has_index() ? device.index() : selection.device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({checked_index(device), 0}); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high_priority*/) const override {
    static std::array<std::atomic<std::int64_t>, kDevices> given = {};
    const int index = checked_index(device);
    return stream_of({index, given[static_cast<std::size_t>(index)]++ % kPoolStreams + 1});
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return stream_of(Engine::get().new_stream(checked_index(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    const c10::Stream before = getStream(stream.device());
    selection.streams[static_cast<std::size_t>(stream.device_index())] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return Engine::get().is_idle(key_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    Engine::get().synchronize_stream(key_of(stream), Engine::Kind::stream);
  }
  void synchronizeDevice(
      const c10::DeviceIndex index) const override {  // NOLINT(readability-avoid-const-params-in-decls)
    Engine::get().synchronize_device(index < 0 ? selection.device : index);
  }

  // An event is a pointer to the place where it was recorded last.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*index*/,
              const c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new PointPtr;
    point_of(*event) = Engine::get().record(key_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Engine::get().wait(key_of(stream), point_of(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || Engine::get().query(point_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Engine::get().synchronize(point_of(event), Engine::Kind::event);
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*index*/) const noexcept override {
    if (event != nullptr) ++destroyed[static_cast<std::size_t>(selection.device)];
    delete static_cast<PointPtr*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, key_of(stream));
  }
};

}  // namespace

int current_device() { return selection.device; }
std::int64_t destroyed_events(int device) { return destroyed[static_cast<std::size_t>(device)]; }
StreamKey current_stream(int device) { return {device, selection.streams[static_cast<std::size_t>(device)]}; }

StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
c10::Stream stream_of(const StreamKey& key) { return c10::Stream(c10::Stream::UNSAFE, device(key.device), key.id); }

void register_guard() {
  c10::SetAllocator(c10::kPrivateUse1, device_allocator());
  static const c10::impl::DeviceGuardImplRegistrar registrar(c10::kPrivateUse1, new Guard);
}

}  // namespace tessera::sim

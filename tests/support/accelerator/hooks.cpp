#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <mutex>
#include <vector>

#include "support/accelerator/device.h"
#include "support/accelerator/generator.h"
#include "support/accelerator/memory.h"
#include "support/accelerator/pinned.h"

namespace tessera::sim {

DeviceGenerator::DeviceGenerator(int index, std::uint64_t seed)
    : GeneratorImpl(sim::device(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      cpu_(at::detail::createCPUGenerator(seed)) {}

void DeviceGenerator::set_current_seed(std::uint64_t seed) { cpu_.set_current_seed(seed); }
std::uint64_t DeviceGenerator::current_seed() const { return cpu_.current_seed(); }
std::uint64_t DeviceGenerator::seed() { return cpu_.seed(); }
void DeviceGenerator::set_offset(std::uint64_t offset) { cpu_.set_offset(offset); }
std::uint64_t DeviceGenerator::get_offset() const { return cpu_.unsafeGetGeneratorImpl()->get_offset(); }
void DeviceGenerator::set_state(const c10::TensorImpl& state) { cpu_.unsafeGetGeneratorImpl()->set_state(state); }
c10::intrusive_ptr<c10::TensorImpl> DeviceGenerator::get_state() const {
  return cpu_.unsafeGetGeneratorImpl()->get_state();
}
at::Generator DeviceGenerator::on_cpu() const { return cpu_.clone(); }
void DeviceGenerator::advance_to(const at::Generator& cpu) { cpu_ = cpu.clone(); }

DeviceGenerator* DeviceGenerator::clone_impl() const {
  auto* copy = new DeviceGenerator(device().index());
  copy->advance_to(cpu_);
  return copy;
}

const at::Generator& default_generator(int index) {
  static const auto& generators = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (int d = 0; d < kDevices; ++d) made.push_back(at::make_generator<DeviceGenerator>(d));
    return made;
  }());
  return generators.at(static_cast<std::size_t>(index < 0 ? current_device() : index));
}

void manual_seed(std::uint64_t seed) {
  for (int d = 0; d < kDevices; ++d) {
    at::Generator generator = default_generator(d);
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

namespace {

const c10::impl::DeviceGuardImplInterface& guard() { return *c10::impl::getDeviceGuardImpl(c10::kPrivateUse1); }

struct Hooks final : at::PrivateUse1HooksInterface {
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current_device() : index);
  }
  at::Device getDeviceFromPtr(void* data) const override { return device(Memory::get().device_of(data)); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { guard().setDevice(device(index)); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return guard().exchangeDevice(device(index)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR > 6
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
#endif
};

}  // namespace

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

}  // namespace tessera::sim

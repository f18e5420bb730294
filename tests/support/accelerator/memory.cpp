#include "support/accelerator/memory.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "support/accelerator/accelerator.h"

namespace tessera::sim {

namespace {

constexpr std::size_t kRegionBytes = Memory::kDeviceBytes * kDevices;

std::byte* map_region(int file, int protection) {
  void* address = ::mmap(nullptr, kRegionBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
  TORCH_CHECK(address != MAP_FAILED, "sim: mapping the memory of the devices: ", std::strerror(errno));
  return static_cast<std::byte*>(address);
}

}  // namespace

Memory& Memory::get() {
  static Memory& memory = *new Memory;
  return memory;
}

Memory::Memory() {
  const int file = ::memfd_create("sim", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ::ftruncate(file, static_cast<off_t>(kRegionBytes)) == 0,
              "sim: making the memory of the devices: ", std::strerror(errno));
  first_ = map_region(file, PROT_NONE);
  second_ = map_region(file, PROT_READ | PROT_WRITE);
  ::madvise(second_, kRegionBytes, MADV_DONTDUMP);
  ::close(file);
}

bool Memory::contains(const void* address) const {
  const auto* byte = static_cast<const std::byte*>(address);
  return byte >= first_ && byte < first_ + kRegionBytes;
}

std::byte* Memory::readable(const void* address) const {
  if (address == nullptr) return nullptr;
  TORCH_CHECK(contains(address), "sim: address ", address, " is of no device");
  return second_ + (static_cast<const std::byte*>(address) - first_);
}

int Memory::device_of(const void* address) const {
  TORCH_CHECK(contains(address), "sim: address ", address, " is of no device");
  return static_cast<int>(static_cast<std::size_t>(static_cast<const std::byte*>(address) - first_) / kDeviceBytes);
}

}  // namespace tessera::sim

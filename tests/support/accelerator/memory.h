#pragma once
// The memory of all devices: one region that is mapped twice. The first mapping, which tensors point to, permits no
// access, so the host faults where it touches memory of a device. The second one, at another address, is what tasks
// read and write.
//
//   device_address(d, o) is byte o of device d in the first mapping, readable() is the same byte in the second one.
//
// The region is made at its first use and takes up only the pages that were written.

#include <cstddef>

namespace tessera::sim {

class Memory {
 public:
  static constexpr std::size_t kDeviceBytes = std::size_t{8} << 30;

  static Memory& get();

  std::byte* device_address(int device, std::size_t offset_bytes) const {
    return first_ + static_cast<std::size_t>(device) * kDeviceBytes + offset_bytes;
  }
  bool contains(const void* address) const;
  // Null gives null. `address` must be of a device.
  std::byte* readable(const void* address) const;
  int device_of(const void* address) const;

 private:
  Memory();
  std::byte* first_ = nullptr;
  std::byte* second_ = nullptr;
};

}  // namespace tessera::sim

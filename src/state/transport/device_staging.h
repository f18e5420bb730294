#pragma once
// Copies of elements between a device and the host, in blocks of pinned memory, so that the device copies while files
// are read and written.
//
// Law: the pinned memory is at most the limit, or one block, and does not depend on the size of what is copied. The
// copies run on a stream of their own, after what was enqueued on the current stream when the DeviceStaging was made.
//
// Threads: all functions may be called from any thread.

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/internal/streams.h"

namespace tessera {

class DeviceStaging {
 public:
  DeviceStaging(c10::Device device, std::uint64_t limit_bytes);
  // Blocks until all copies are complete.
  ~DeviceStaging();
  DeviceStaging(const DeviceStaging&) = delete;
  DeviceStaging& operator=(const DeviceStaging&) = delete;

  // Copies elements of a tensor on the device, in row-major order from byte `begin_bytes` on. Blocks until they are in
  // `out`.
  void read(const at::Tensor& elements, std::uint64_t begin_bytes, MutableByteView out);
  // Calls `fill` with memory for the elements of a tensor on the device, in row-major order, and starts to copy them to
  // it. They are there when the DeviceStaging is destroyed.
  void write(const at::Tensor& elements, FunctionRef<void(std::uint8_t* row_major)> fill);

 private:
  struct Block {
    at::Tensor memory;  // bytes
    comm::Mark copied;  // before which the device uses them
  };
  class Taken;
  Block take(std::uint64_t size_bytes);
  void give_back(Block block);
  void drop(Block block);

  const c10::Device device_;
  const std::uint64_t limit_bytes_;
  const comm::SideStream stream_;
  std::mutex mutex_;
  std::condition_variable given_back_;
  std::uint64_t allocated_bytes_ = 0;
  std::deque<Block> idle_;  // the one that was copied first is the first
};

// A DeviceStaging for each device that tensors of a state are on, each with the same limit.
class DeviceStagings {
 public:
  explicit DeviceStagings(std::uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}
  std::shared_ptr<DeviceStaging> of(c10::Device device);

 private:
  std::uint64_t limit_bytes_;
  std::vector<std::pair<c10::Device, std::shared_ptr<DeviceStaging>>> stagings_;
};

}  // namespace tessera

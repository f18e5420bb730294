#include "state/transport/device_staging.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "state/transport/spans.h"
#include "tessera/layout/flat_interval.h"
#include "tessera/tensor/internal/box_view.h"

namespace tessera {

namespace {

// The size of blocks, which is that of the parts in which files are read and written. Larger parts get larger blocks.
constexpr std::uint64_t kBlockBytes = 4u << 20;

at::Tensor pinned_bytes(std::uint64_t size_bytes) {
  return at::empty({static_cast<std::int64_t>(size_bytes)}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
}

// Starts to copy the elements of `source`, on a device, to `memory`, from byte `begin_bytes` on.
void copy_to_host(const at::Tensor& memory, std::int64_t begin_bytes, const at::Tensor& source) {
  elements_in(memory, source.scalar_type(), source.sizes(), begin_bytes)
      .copy_(source.resolve_conj().resolve_neg(), /*non_blocking=*/true);
}

}  // namespace

// A block that is given back when this is destroyed.
class DeviceStaging::Taken {
 public:
  Taken(DeviceStaging& staging, std::uint64_t size_bytes) : staging_(staging), block_(staging.take(size_bytes)) {}
  ~Taken() { staging_.give_back(std::move(block_)); }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;
  Block* operator->() { return &block_; }

 private:
  DeviceStaging& staging_;
  Block block_;
};

DeviceStaging::DeviceStaging(c10::Device device, std::uint64_t limit_bytes)
    : device_(comm::with_index(device)), limit_bytes_(limit_bytes), stream_(device_) {
  stream_.wait_for_current();
}

DeviceStaging::~DeviceStaging() {
  try {
    comm::Mark end;
    {
      const comm::OnStream on(stream_);
      end.set(device_);
    }
    end.synchronize();
  } catch (const std::exception&) {  // the device has failed, and no longer copies
  }
}

// Blocks until memory of `size_bytes` is within the limit. Does not keep others from their blocks while it allocates
// memory or waits for a copy.
DeviceStaging::Block DeviceStaging::take(std::uint64_t size_bytes) {
  const std::uint64_t wanted = std::max(size_bytes, kBlockBytes);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    const bool can_allocate = allocated_bytes_ == 0 || allocated_bytes_ + wanted <= limit_bytes_;
    if (!idle_.empty() && (!can_allocate || idle_.front().copied.is_reached())) {
      Block block = std::move(idle_.front());
      idle_.pop_front();
      lock.unlock();
      block.copied.synchronize();
      if (block.memory.nbytes() >= size_bytes) return block;
      const std::uint64_t freed = block.memory.nbytes();
      drop(std::move(block));
      lock.lock();
      allocated_bytes_ -= freed;
    } else if (can_allocate) {
      allocated_bytes_ += wanted;
      lock.unlock();
      try {
        return {pinned_bytes(wanted), {}};
      } catch (...) {
        lock.lock();
        allocated_bytes_ -= wanted;
        given_back_.notify_one();
        throw;
      }
    } else {
      given_back_.wait(lock);
    }
  }
}

// Frees a block. Of a thread on another device, a destroyed event would initialize that one.
void DeviceStaging::drop(Block block) {
  const comm::OnStream on(stream_);
  const Block dropped = std::move(block);
}

void DeviceStaging::give_back(Block block) {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(std::move(block));
  given_back_.notify_one();
}

void DeviceStaging::read(const at::Tensor& elements, std::uint64_t begin_bytes, MutableByteView out) {
  if (out.empty()) return;
  Taken block(*this, out.size());
  {
    const comm::OnStream on(stream_);
    const auto item_bytes = static_cast<std::int64_t>(elements.element_size());
    const std::int64_t begin = static_cast<std::int64_t>(begin_bytes) / item_bytes,
                       count = static_cast<std::int64_t>(out.size()) / item_bytes;
    if (elements.is_contiguous()) {
      copy_to_host(block->memory, 0, elements.view({-1}).narrow(0, begin, count));
    } else {
      std::int64_t done = 0;
      for (const Box& box : boxes_of_flat_interval(elements.sizes().vec(), begin, begin + count)) {
        copy_to_host(block->memory, done, box_view(elements, box));
        done += volume(box) * item_bytes;
      }
    }
    block->copied.set(device_);
  }
  block->copied.synchronize();
  std::memcpy(out.data(), block->memory.data_ptr(), out.size());
}

void DeviceStaging::write(const at::Tensor& elements, FunctionRef<void(std::uint8_t* row_major)> fill) {
  Taken block(*this, elements.nbytes());
  fill(static_cast<std::uint8_t*>(block->memory.data_ptr()));
  const comm::OnStream on(stream_);
  elements.copy_(elements_in(block->memory, elements.scalar_type(), elements.sizes()), /*non_blocking=*/true);
  block->copied.set(device_);
}

std::shared_ptr<DeviceStaging> DeviceStagings::of(c10::Device device) {
  const c10::Device indexed = comm::with_index(device);
  for (const auto& [known, staging] : stagings_) {
    if (known == indexed) return staging;
  }
  return stagings_.emplace_back(indexed, std::make_shared<DeviceStaging>(indexed, limit_bytes_)).second;
}

}  // namespace tessera

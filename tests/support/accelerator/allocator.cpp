#include "support/accelerator/allocator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "support/accelerator/device.h"
#include "support/accelerator/memory.h"

namespace tessera::sim {

namespace {

constexpr std::size_t kUnitBytes = 512;
constexpr int kPoison = 0xFF;

struct Block {
  std::size_t bytes = 0;
  StreamKey stream;
  enum class State { used, pending, free } state = State::free;
  std::set<StreamKey> other_streams;  // that use it
  std::vector<PointPtr> points;       // that a pending block waits for
};

// The blocks of a device, side by side from offset 0 to `end_`.
class Arena {
 public:
  void start(int device) { device_ = device; }

  void* allocate(std::size_t bytes, StreamKey stream) {
    const std::lock_guard lock(mutex_);
    release_pending();
    const std::size_t size = std::max((bytes + kUnitBytes - 1) / kUnitBytes, std::size_t{1}) * kUnitBytes;
    const std::size_t offset = take(size, stream);
    statistics_.allocated_bytes += size;
    statistics_.peak_bytes = std::max(statistics_.peak_bytes, statistics_.allocated_bytes);
    ++statistics_.allocations;
    return Memory::get().device_address(device_, offset);
  }

  void free(std::size_t offset) {
    const std::lock_guard lock(mutex_);
    Block& block = blocks_.at(offset);
    statistics_.allocated_bytes -= block.bytes;
    block.state = Block::State::pending;
    for (const StreamKey& stream : block.other_streams) block.points.push_back(Engine::get().record(stream));
    block.other_streams.clear();
    pending_.push_back(offset);
    release_pending();
  }

  void record_stream(std::size_t offset, StreamKey stream) {
    const std::lock_guard lock(mutex_);
    Block& block = blocks_.at(offset);
    if (stream != block.stream) block.other_streams.insert(stream);
  }

  MemoryStatistics statistics() {
    const std::lock_guard lock(mutex_);
    return statistics_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    statistics_.peak_bytes = statistics_.allocated_bytes;
  }

 private:
  // Returns the offset of a used block of `size` bytes.
  std::size_t take(std::size_t size, StreamKey stream) {
    std::set<std::pair<std::size_t, std::size_t>>& candidates = free_[stream];
    const auto found = candidates.lower_bound({size, 0});
    if (found == candidates.end()) return extend(size, stream);
    const std::size_t offset = found->second;
    candidates.erase(found);
    Block& block = blocks_.at(offset);
    if (block.bytes > size) {
      Block rest;
      rest.bytes = block.bytes - size;
      rest.stream = stream;
      candidates.insert({rest.bytes, offset + size});
      blocks_.emplace(offset + size, rest);
      block.bytes = size;
    }
    block.state = Block::State::used;
    return offset;
  }

  std::size_t extend(std::size_t size, StreamKey stream) {
    TORCH_CHECK_WITH(OutOfMemoryError, size <= Memory::kDeviceBytes - end_, "sim: device ", device_,
                     " is out of memory: ", size, " bytes were requested, ", Memory::kDeviceBytes - end_,
                     " were never allocated");
    const std::size_t offset = end_;
    end_ += size;
    std::memset(Memory::get().readable(Memory::get().device_address(device_, offset)), kPoison, size);
    Block block;
    block.bytes = size;
    block.stream = stream;
    block.state = Block::State::used;
    blocks_.emplace(offset, block);
    return offset;
  }

  void release_pending() {
    for (std::size_t i = 0; i < pending_.size();) {
      const std::vector<PointPtr>& points = blocks_.at(pending_[i]).points;
      if (std::all_of(points.begin(), points.end(), [](const PointPtr& point) { return point->reached.load(); })) {
        const std::size_t offset = pending_[i];
        pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
        release(offset);
      } else {
        ++i;
      }
    }
  }

  void release(std::size_t offset) {
    auto block = blocks_.find(offset);
    block->second.points.clear();
    block->second.state = Block::State::free;
    std::byte* memory = Memory::get().readable(Memory::get().device_address(device_, offset));
    Engine::get().enqueue(block->second.stream, "poison",
                          [memory, bytes = block->second.bytes] { std::memset(memory, kPoison, bytes); });
    const auto next = std::next(block);
    if (next != blocks_.end() && can_merge(block->second, next->second)) {
      free_[next->second.stream].erase({next->second.bytes, next->first});
      block->second.bytes += next->second.bytes;
      blocks_.erase(next);
    }
    if (block != blocks_.begin()) {
      const auto previous = std::prev(block);
      if (can_merge(block->second, previous->second)) {
        free_[previous->second.stream].erase({previous->second.bytes, previous->first});
        previous->second.bytes += block->second.bytes;
        blocks_.erase(block);
        block = previous;
      }
    }
    free_[block->second.stream].insert({block->second.bytes, block->first});
  }

  static bool can_merge(const Block& block, const Block& other) {
    return other.state == Block::State::free && other.stream == block.stream;
  }

  int device_ = 0;
  std::mutex mutex_;
  std::map<std::size_t, Block> blocks_;                                      // by offset
  std::map<StreamKey, std::set<std::pair<std::size_t, std::size_t>>> free_;  // bytes and offset
  std::vector<std::size_t> pending_;
  std::size_t end_ = 0;
  MemoryStatistics statistics_;
};

Arena& arena(int device) {
  static auto& arenas = *new std::array<Arena, kDevices>;
  static const bool is_started = [] {
    for (int d = 0; d < kDevices; ++d) arenas[static_cast<std::size_t>(d)].start(d);
    return true;
  }();
  TORCH_CHECK(is_started && device >= 0 && device < kDevices, "sim: found device ", device, ", expected 0 to ",
              kDevices - 1);
  return arenas[static_cast<std::size_t>(device)];
}

std::size_t offset_of(const void* address, int device) {
  return static_cast<std::size_t>(static_cast<const std::byte*>(address) - Memory::get().device_address(device, 0));
}

void free_device_memory(void* address) {
  if (address == nullptr) return;
  const int owner = Memory::get().device_of(address);
  arena(owner).free(offset_of(address, owner));
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const int index = current_device();
    void* address = bytes == 0 ? nullptr : arena(index).allocate(bytes, current_stream(index));
    return {address, address, &free_device_memory, device(index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device_memory; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::byte* out = Memory::get().readable(to);
    const std::byte* in = Memory::get().readable(from);
    Engine::get().enqueue(current_stream(Memory::get().device_of(to)), "copy", [=] { std::memmove(out, in, bytes); },
                          {.bytes = 2 * static_cast<std::int64_t>(bytes)});
  }
};

}  // namespace

c10::Allocator* device_allocator() {
  static auto& allocator = *new DeviceAllocator;
  return &allocator;
}

void record_stream(const c10::DataPtr& data, StreamKey stream) {
  if (data.get() == nullptr || data.get_deleter() != &free_device_memory) return;
  const int owner = Memory::get().device_of(data.get());
  arena(owner).record_stream(offset_of(data.get(), owner), stream);
}

MemoryStatistics memory_statistics(int device) { return arena(device).statistics(); }
void reset_peak(int device) { arena(device).reset_peak(); }

}  // namespace tessera::sim

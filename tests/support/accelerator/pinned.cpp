#include "support/accelerator/pinned.h"

#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace tessera::sim {

namespace {

struct PinnedBlock {
  std::size_t bytes = 0;
  bool is_used = false;
  std::set<StreamKey> streams;
  std::vector<PointPtr> points;

  bool is_free() const {
    return !is_used &&
           std::all_of(points.begin(), points.end(), [](const PointPtr& point) { return point->reached.load(); });
  }
};

class PinnedMemory {
 public:
  static PinnedMemory& get() {
    static PinnedMemory& memory = *new PinnedMemory;
    return memory;
  }

  void* allocate(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const std::size_t size = std::bit_ceil(bytes);  // so that blocks fit often, as in CUDA's
    auto found = std::find_if(blocks_.begin(), blocks_.end(),
                              [&](const auto& entry) { return entry.second.bytes == size && entry.second.is_free(); });
    if (found == blocks_.end()) {
      found = blocks_.emplace(static_cast<std::byte*>(c10::alloc_cpu(size)), PinnedBlock()).first;
      found->second.bytes = size;
    }
    found->second.is_used = true;
    found->second.points.clear();
    std::memset(found->first, 0xFF, size);
    return found->first;
  }

  void free(void* address) {
    const std::lock_guard lock(mutex_);
    PinnedBlock& block = blocks_.at(static_cast<std::byte*>(address));
    block.is_used = false;
    for (const StreamKey& stream : block.streams) block.points.push_back(Engine::get().record(stream));
    block.streams.clear();
  }

  bool contains(const void* address) {
    const std::lock_guard lock(mutex_);
    return find(address) != nullptr;
  }

  void record(const void* address, StreamKey stream) {
    const std::lock_guard lock(mutex_);
    if (PinnedBlock* block = find(address)) block->streams.insert(stream);
  }

 private:
  PinnedBlock* find(const void* address) {
    auto* byte = const_cast<std::byte*>(static_cast<const std::byte*>(address));  // NOLINT: a key
    auto next = blocks_.upper_bound(byte);
    if (next == blocks_.begin()) return nullptr;
    --next;
    return byte < next->first + next->second.bytes ? &next->second : nullptr;
  }

  std::mutex mutex_;
  std::map<std::byte*, PinnedBlock> blocks_;
};

void free_pinned(void* address) {
  if (address != nullptr) PinnedMemory::get().free(address);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* address = bytes == 0 ? nullptr : PinnedMemory::get().allocate(bytes);
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static auto& allocator = *new PinnedAllocator;
  return &allocator;
}

bool is_pinned(const void* address) { return PinnedMemory::get().contains(address); }
void record_pinned(const void* address, StreamKey stream) { PinnedMemory::get().record(address, stream); }

}  // namespace tessera::sim

#include "tessera/base/internal/huge_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

namespace tessera {

namespace {

constexpr std::uintptr_t kHugePageBytes = std::uintptr_t{2} << 20;

std::uintptr_t page_bytes() { return static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE)); }

std::uintptr_t round_up(std::uintptr_t bytes, std::uintptr_t unit) { return (bytes + unit - 1) & ~(unit - 1); }

}  // namespace

void* map_huge_pages(std::size_t size_bytes) {
  // The end is mapped in small pages, so that it does not take a huge page for a part of one.
  const std::size_t mapped_bytes = round_up(size_bytes, page_bytes());
  const std::size_t with_slack = mapped_bytes + kHugePageBytes;
  void* mapped = ::mmap(nullptr, with_slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* begin = static_cast<std::uint8_t*>(mapped);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::size_t before = round_up(address, kHugePageBytes) - address;
  if (before != 0) ::munmap(begin, before);
  ::munmap(begin + before + mapped_bytes, kHugePageBytes - before);
  advise_huge_pages(begin + before, mapped_bytes);
  return begin + before;
}

void unmap_huge_pages(void* data, std::size_t size_bytes) noexcept {
  ::munmap(data, round_up(size_bytes, page_bytes()));
}

void advise_huge_pages(void* data, std::size_t size_bytes) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t first = round_up(begin, kHugePageBytes);
  const std::uintptr_t last = (begin + size_bytes) & ~(kHugePageBytes - 1);
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

}  // namespace tessera

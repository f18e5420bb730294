#pragma once
// Large memory in huge pages: touching a gigabyte for the first time in pages of 4 KiB takes as long as parsing into
// it.

#include <cstddef>

namespace tessera {

// `size_bytes` of zeros, aligned to 2 MiB, in huge pages where the system has them. Only what is touched takes memory.
// Throws std::bad_alloc.
void* map_huge_pages(std::size_t size_bytes);
void unmap_huge_pages(void* data, std::size_t size_bytes) noexcept;

// Asks for huge pages in memory that has not been touched yet. A hint: failures are ignored.
void advise_huge_pages(void* data, std::size_t size_bytes) noexcept;

}  // namespace tessera

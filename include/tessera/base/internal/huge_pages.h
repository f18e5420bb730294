#pragma once
// Large memory in huge pages. Without them, touching a gigabyte for the first time takes as long as parsing into it.

#include <cstddef>

namespace tessera {

// Maps `size_bytes` of zeros, aligned to 2 MiB, in huge pages if the system has them. Only touched pages take memory.
// Throws std::bad_alloc.
void* map_huge_pages(std::size_t size_bytes);
void unmap_huge_pages(void* data, std::size_t size_bytes) noexcept;

// Asks for huge pages in memory that has not been touched yet. A hint: failures are ignored.
void advise_huge_pages(void* data, std::size_t size_bytes) noexcept;

}  // namespace tessera

#pragma once
// Plain system calls that write, read and copy the bytes of a benchmark, in several ways. A benchmark measures all ways
// of a list in each run and compares with the fastest: a slow baseline would flatter.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tessera::bench {

using Pieces = std::vector<std::span<std::uint8_t>>;

struct Way {
  std::string name;
  std::size_t call_bytes = 16u << 20;  // of each system call, at most
  int threads = 1;                     // they take the calls in turn
  bool preallocate = false;            // fallocate, before the first write
  bool start_writeback = false;  // sync_file_range after each write, so that the disk works while bytes are copied
  bool in_kernel = false;        // copy_files alone: copy_file_range
};

const std::vector<Way>& ways_to_write();
const std::vector<Way>& ways_to_read();
const std::vector<Way>& ways_to_copy_files();
const std::vector<Way>& ways_to_copy_memory();

// Creates `path` with the bytes of `pieces` one after another, and fsyncs it.
// Throws std::system_error, as all functions here.
void write_file(const std::string& path, const Pieces& pieces, const Way& way);
// Reads as many bytes from the beginning of `path` as `pieces` hold.
void read_file(const std::string& path, const Pieces& pieces, const Way& way);
// Copies from[i] to to[i], which has the same size.
void copy_memory(const Pieces& to, const Pieces& from, const Way& way);
// Creates `to` with the bytes of the files `from` one after another, and fsyncs it.
void copy_files(const std::string& to, const std::vector<std::string>& from, const Way& way);

}  // namespace tessera::bench

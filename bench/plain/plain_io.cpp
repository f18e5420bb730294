#include "plain_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <memory>
#include <system_error>
#include <thread>

#include "tessera/base/function_ref.h"

namespace tessera::bench {
namespace {

constexpr std::size_t kMiB = 1u << 20;
constexpr std::size_t kMaxVectors = 1024;  // IOV_MAX of Linux

void check(bool good, const std::string& what) {
  if (!good) throw std::system_error(errno, std::generic_category(), what);
}

class Descriptor {
 public:
  Descriptor(const std::string& path, int flags) : number_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {
    check(number_ >= 0, path);
  }
  ~Descriptor() { ::close(number_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return number_; }

 private:
  int number_;
};

// Calls work(i) for i in [0, threads), in as many threads.
void run_threads(int threads, FunctionRef<void(int)> work) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(threads));
  std::vector<std::thread> others;
  const auto guarded = [&](int i) {
    try {
      work(i);
    } catch (...) {
      errors[static_cast<std::size_t>(i)] = std::current_exception();
    }
  };
  for (int i = 1; i < threads; ++i) others.emplace_back(guarded, i);
  guarded(0);
  for (std::thread& other : others) other.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// Some consecutive pieces, and the position of the first in the file.
struct Batch {
  std::uint64_t offset = 0;
  std::vector<iovec> vectors;
  std::size_t bytes = 0;
};

// Of up to `batch_bytes` each; a larger piece is split.
std::vector<Batch> batches_of(const Pieces& pieces, std::size_t batch_bytes) {
  std::vector<Batch> batches(1);
  std::uint64_t offset = 0;
  for (const std::span<std::uint8_t>& piece : pieces) {
    for (std::size_t done = 0; done < piece.size();) {
      if (batches.back().bytes == batch_bytes || batches.back().vectors.size() == kMaxVectors) {
        batches.push_back({offset, {}, 0});
      }
      Batch& batch = batches.back();
      const std::size_t size = std::min(piece.size() - done, batch_bytes - batch.bytes);
      batch.vectors.push_back({piece.data() + done, size});
      batch.bytes += size;
      done += size;
      offset += size;
    }
  }
  return batches;
}

// Calls `transfer`, which is pwritev or preadv, until all bytes of `batch` are done.
template <typename Transfer>
void transfer_all(Transfer transfer, int descriptor, Batch batch) {
  std::size_t first = 0;
  while (batch.bytes > 0) {
    const ssize_t got = transfer(descriptor, &batch.vectors[first], static_cast<int>(batch.vectors.size() - first),
                                 static_cast<off_t>(batch.offset));
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) errno = EIO;
    check(got > 0, "transfer");
    auto left = static_cast<std::size_t>(got);
    batch.bytes -= left;
    batch.offset += left;
    for (; left > 0; first += batch.vectors[first].iov_len == 0) {
      iovec& vector = batch.vectors[first];
      const std::size_t size = std::min(left, vector.iov_len);
      vector.iov_base = static_cast<std::uint8_t*>(vector.iov_base) + size;
      vector.iov_len -= size;
      left -= size;
    }
  }
}

// Calls work(i) for i in [0, count); each thread takes the next i as soon as it is done with its last.
template <typename Work>
void share_out(std::size_t count, int threads, Work work) {
  std::atomic<std::size_t> next = 0;
  run_threads(threads, [&](int) {
    for (std::size_t i = next++; i < count; i = next++) work(i);
  });
}

void start_writeback(int descriptor, std::uint64_t offset, std::size_t bytes) {
  ::sync_file_range(descriptor, static_cast<off64_t>(offset), static_cast<off64_t>(bytes), SYNC_FILE_RANGE_WRITE);
}

void preallocate(int descriptor, std::uint64_t bytes) {
  // A file system that has no fallocate does without.
  if (bytes > 0) static_cast<void>(::fallocate(descriptor, 0, 0, static_cast<off_t>(bytes)));
}

void copy_range_in_kernel(int from, std::uint64_t from_offset, int to, std::uint64_t to_offset, std::size_t bytes) {
  auto in = static_cast<off64_t>(from_offset), out = static_cast<off64_t>(to_offset);
  while (bytes > 0) {
    const ssize_t got = ::copy_file_range(from, &in, to, &out, bytes, 0);
    if (got == 0) errno = EIO;
    check(got > 0, "copy_file_range");
    bytes -= static_cast<std::size_t>(got);
  }
}

}  // namespace

const std::vector<Way>& ways_to_write() {
  static const std::vector<Way> ways = {
      {"16 MiB a call", 16 * kMiB},
      {"16 MiB a call, early writeback", 16 * kMiB, 1, false, true},
      {"16 MiB a call, preallocated, early writeback", 16 * kMiB, 1, true, true},
      {"4 MiB a call, preallocated, early writeback", 4 * kMiB, 1, true, true},
      {"4 MiB a call, preallocated, early writeback, 2 threads", 4 * kMiB, 2, true, true}};
  return ways;
}

const std::vector<Way>& ways_to_read() {
  static const std::vector<Way> ways = {{"16 MiB a call", 16 * kMiB},
                                        {"1 MiB a call", kMiB},
                                        {"4 MiB a call, 2 threads", 4 * kMiB, 2},
                                        {"512 KiB a call, 2 threads", kMiB / 2, 2}};
  return ways;
}

const std::vector<Way>& ways_to_copy_files() {
  static const std::vector<Way> ways = {
      {"read and write", 16 * kMiB},
      {"read and write, preallocated, early writeback", 4 * kMiB, 1, true, true},
      {"read and write, preallocated, early writeback, 2 threads", 4 * kMiB, 2, true, true},
      {"copy_file_range, early writeback", 16 * kMiB, 1, false, true, true},
      {"copy_file_range, preallocated, early writeback, 2 threads", 4 * kMiB, 2, true, true, true}};
  return ways;
}

const std::vector<Way>& ways_to_copy_memory() {
  static const std::vector<Way> ways = {{"memcpy"}, {"memcpy, 2 threads", 16 * kMiB, 2}};
  return ways;
}

void write_file(const std::string& path, const Pieces& pieces, const Way& way) {
  const Descriptor file(path, O_WRONLY | O_CREAT | O_EXCL);
  const std::vector<Batch> batches = batches_of(pieces, way.call_bytes);
  if (way.preallocate) preallocate(file.get(), batches.back().offset + batches.back().bytes);
  share_out(batches.size(), way.threads, [&](std::size_t i) {
    transfer_all(::pwritev, file.get(), batches[i]);
    if (way.start_writeback) start_writeback(file.get(), batches[i].offset, batches[i].bytes);
  });
  check(::fsync(file.get()) == 0, path);
}

void read_file(const std::string& path, const Pieces& pieces, const Way& way) {
  const Descriptor file(path, O_RDONLY);
  const std::vector<Batch> batches = batches_of(pieces, way.call_bytes);
  share_out(batches.size(), way.threads, [&](std::size_t i) { transfer_all(::preadv, file.get(), batches[i]); });
}

void copy_memory(const Pieces& to, const Pieces& from, const Way& way) {
  share_out(from.size(), way.threads,
            [&](std::size_t i) { std::memcpy(to[i].data(), from[i].data(), from[i].size()); });
}

void copy_files(const std::string& to, const std::vector<std::string>& from, const Way& way) {
  struct Range {
    std::size_t file;
    std::uint64_t from_offset, to_offset;
    std::size_t bytes;
  };
  std::vector<Range> ranges;
  std::vector<std::unique_ptr<Descriptor>> sources;
  std::uint64_t total = 0;
  for (const std::string& path : from) {
    sources.push_back(std::make_unique<Descriptor>(path, O_RDONLY));
    struct stat status = {};
    check(::fstat(sources.back()->get(), &status) == 0, path);
    const auto size = static_cast<std::uint64_t>(status.st_size);
    for (std::uint64_t at = 0; at < size; at += way.call_bytes) {
      ranges.push_back({sources.size() - 1, at, total + at, std::min<std::uint64_t>(way.call_bytes, size - at)});
    }
    total += size;
  }
  const Descriptor file(to, O_WRONLY | O_CREAT | O_EXCL);
  if (way.preallocate) preallocate(file.get(), total);
  share_out(ranges.size(), way.threads, [&](std::size_t i) {
    const Range& range = ranges[i];
    const int source = sources[range.file]->get();
    if (way.in_kernel) {
      copy_range_in_kernel(source, range.from_offset, file.get(), range.to_offset, range.bytes);
    } else {
      thread_local std::vector<std::uint8_t> block(1u << 20);  // stays in the cache between read and write
      for (std::size_t done = 0; done < range.bytes; done += block.size()) {
        const std::size_t size = std::min(block.size(), range.bytes - done);
        transfer_all(::preadv, source, {range.from_offset + done, {{block.data(), size}}, size});
        transfer_all(::pwritev, file.get(), {range.to_offset + done, {{block.data(), size}}, size});
      }
    }
    if (way.start_writeback) start_writeback(file.get(), range.to_offset, range.bytes);
  });
  check(::fsync(file.get()) == 0, to);
}

}  // namespace tessera::bench

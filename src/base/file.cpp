#include "tessera/base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/internal/huge_pages.h"

namespace tessera {
namespace {

// A larger transfer in one call would only delay signals.
constexpr std::size_t kMaxTransferBytes = 64u << 20;

[[noreturn]] void fail_system(const char* operation, const std::string& name, int error) {
  const ErrorCode code = error == ENOENT   ? ErrorCode::not_found
                         : error == EEXIST ? ErrorCode::invalid_argument
                                           : ErrorCode::io;
  fail(code, "{} {}: {}", operation, printable(name, 4096), std::strerror(error));
}

[[noreturn]] void fail_system_at(const char* operation, const std::string& name, std::uint64_t offset_bytes,
                                 int error) {
  fail(ErrorCode::io, "{} {} at byte {}: {}", operation, printable(name, 4096), offset_bytes, std::strerror(error));
}

// Calls the system again for as long as a signal interrupts it.
template <typename SystemCall>
auto retrying(const SystemCall& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

int open_retrying(const std::string& name, int flags, mode_t mode) {
  return retrying([&] { return ::open(name.c_str(), flags | O_CLOEXEC, mode); });
}

}  // namespace

void MemorySource::read_at(std::uint64_t offset_bytes, MutableByteView out) const {
  if (offset_bytes > bytes_.size() || out.size() > bytes_.size() - offset_bytes) {
    fail(ErrorCode::corrupt, "read {} at byte {}: the source ends at byte {}, expected {} bytes", name_, offset_bytes,
         bytes_.size(), out.size());
  }
  if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset_bytes, out.size());
}

File File::open_read(const std::filesystem::path& path) {
  // Without O_NONBLOCK, opening a named pipe would wait for its writer.
  const int descriptor = open_retrying(path.string(), O_RDONLY | O_NONBLOCK, 0);
  if (descriptor < 0) fail_system("open", path.string(), errno);
  File file(descriptor, path.string());
  struct stat status = {};
  if (::fstat(descriptor, &status) != 0) fail_system("stat", path.string(), errno);
  if (!S_ISREG(status.st_mode)) {
    fail(ErrorCode::invalid_argument, "open {}: found a {}, expected a regular file", printable(path.string(), 4096),
         S_ISDIR(status.st_mode) ? "directory" : "special file");
  }
  return file;
}

File File::create_new(const std::filesystem::path& path) {
  const int descriptor = open_retrying(path.string(), O_RDWR | O_CREAT | O_EXCL, 0666);
  if (descriptor < 0) fail_system("create", path.string(), errno);
  return {descriptor, path.string()};
}

File::File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)), name_(std::move(other.name_)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(name_, other.name_);
  return *this;
}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void File::read_at(std::uint64_t offset_bytes, MutableByteView out) const {
  std::size_t done = 0;
  while (done < out.size()) {
    const std::size_t want = std::min(out.size() - done, kMaxTransferBytes);
    const auto offset = static_cast<off_t>(offset_bytes + done);
    const ssize_t got = retrying([&] { return ::pread(descriptor_, out.data() + done, want, offset); });
    if (got < 0) fail_system_at("read", name_, offset_bytes + done, errno);
    if (got == 0) {
      fail(ErrorCode::corrupt, "read {} at byte {}: the file ends at byte {}, expected {} more bytes",
           printable(name_, 4096), offset_bytes + done, size_bytes(), out.size() - done);
    }
    done += static_cast<std::size_t>(got);
  }
}

std::uint64_t File::size_bytes() const {
  struct stat status = {};
  if (::fstat(descriptor_, &status) != 0) fail_system("stat", name_, errno);
  return static_cast<std::uint64_t>(status.st_size);
}

void File::write_at(std::uint64_t offset_bytes, ByteView bytes) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const std::size_t want = std::min(bytes.size() - done, kMaxTransferBytes);
    const auto offset = static_cast<off_t>(offset_bytes + done);
    const ssize_t put = retrying([&] { return ::pwrite(descriptor_, bytes.data() + done, want, offset); });
    if (put < 0) fail_system_at("write", name_, offset_bytes + done, errno);
    if (put == 0) fail_system_at("write", name_, offset_bytes + done, ENOSPC);
    done += static_cast<std::size_t>(put);
  }
}

void File::preallocate(std::uint64_t size_bytes) {
  if (size_bytes == 0) return;
  const auto size = static_cast<off_t>(size_bytes);
  if (retrying([&] { return ::fallocate(descriptor_, 0, 0, size); }) == 0) return;
  // On file systems that cannot reserve space, a full disk is detected when data is written.
  if (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) {
    fail(ErrorCode::io, "reserve {} bytes for {}: {}", size_bytes, printable(name_, 4096), std::strerror(errno));
  }
  if (retrying([&] { return ::ftruncate(descriptor_, size); }) != 0) fail_system("truncate", name_, errno);
}

void File::start_writeback(std::uint64_t offset_bytes, std::uint64_t length_bytes) noexcept {
  ::sync_file_range(descriptor_, static_cast<off64_t>(offset_bytes), static_cast<off64_t>(length_bytes),
                    SYNC_FILE_RANGE_WRITE);
}

void File::sync() {
  if (retrying([&] { return ::fsync(descriptor_); }) != 0) fail_system("fsync", name_, errno);
}

void File::close() {
  const int descriptor = std::exchange(descriptor_, -1);
  if (descriptor >= 0 && ::close(descriptor) != 0 && errno != EINTR) fail_system("close", name_, errno);
}

void require_size_within(const ByteSource& source, std::uint64_t limit_bytes) {
  if (source.size_bytes() > limit_bytes) {
    fail(ErrorCode::corrupt, "read {}: found {} bytes, expected at most {}", printable(source.name(), 4096),
         source.size_bytes(), limit_bytes);
  }
}

Bytes read_all(const ByteSource& source) {
  const std::uint64_t size = source.size_bytes();
  Bytes bytes;
  bytes.reserve(size);
  advise_huge_pages(bytes.data(), size);
  // Pieces stay in the cache between being zeroed and being read into.
  constexpr std::uint64_t kPieceBytes = std::uint64_t{512} << 10;
  for (std::uint64_t begin = 0; begin < size; begin += kPieceBytes) {
    bytes.resize(std::min(size, begin + kPieceBytes));
    source.read_at(begin, MutableByteView(bytes).subspan(begin));
  }
  return bytes;
}

Bytes read_file(const std::filesystem::path& path, std::uint64_t limit_bytes) {
  const File file = File::open_read(path);
  require_size_within(file, limit_bytes);
  return read_all(file);
}

void write_new_file(const std::filesystem::path& path, ByteView bytes) {
  File file = File::create_new(path);
  file.write_at(0, bytes);
  file.sync();
  file.close();
}

void sync_directory(const std::filesystem::path& path) {
  const int descriptor = open_retrying(path.string(), O_RDONLY | O_DIRECTORY, 0);
  if (descriptor < 0) fail_system("open directory", path.string(), errno);
  const int result = retrying([&] { return ::fsync(descriptor); });
  const int error = errno;
  ::close(descriptor);
  // Some file systems do not support fsync of directories.
  if (result != 0 && error != EINVAL) fail_system("fsync directory", path.string(), error);
}

void rename_replacing(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    fail(errno == ENOENT ? ErrorCode::not_found : ErrorCode::io, "rename {} to {}: {}", printable(from.string(), 4096),
         printable(to.string(), 4096), std::strerror(errno));
  }
}

void rename_new(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
  if (errno == EINVAL || errno == ENOSYS) {  // not supported by the file system: check and rename in two steps
    struct stat status = {};
    if (::lstat(to.c_str(), &status) == 0)
      errno = EEXIST;
    else if (::rename(from.c_str(), to.c_str()) == 0)
      return;
  }
  const ErrorCode code = errno == EEXIST || errno == ENOTEMPTY ? ErrorCode::invalid_argument : ErrorCode::io;
  fail(code, "rename {} to {}: {}", printable(from.string(), 4096), printable(to.string(), 4096), std::strerror(errno));
}

}  // namespace tessera

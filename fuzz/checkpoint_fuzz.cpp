/// \file
/// Reads bytes as a small checkpoint and does with it what the command does: verify, diff, convert to every format.
/// Memory and output must follow the input's size, whatever numbers are in it.
///
/// The first byte chooses what the rest is: the `.metadata` of a DCP checkpoint, the `data.pkl` of a torch.save
/// archive (both with some KiB of data beside them), or a safetensors file.

#ifdef __has_feature
#if __has_feature(address_sanitizer)
#include <sanitizer/allocator_interface.h>
#define TESSERA_SANITIZED
#endif
#endif
#include <malloc.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <string>

#include "tessera/base/crc32.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/format/zip.h"

namespace {

std::atomic<std::int64_t> live_bytes = 0, peak_bytes = 0;

void add(std::size_t size) {
  const std::int64_t now = live_bytes += static_cast<std::int64_t>(size);
  for (std::int64_t peak = peak_bytes; now > peak && !peak_bytes.compare_exchange_weak(peak, now);) {
  }
}

}  // namespace

#ifdef TESSERA_SANITIZED

namespace {

void after_malloc(const volatile void*, std::size_t size) { add(size); }
void before_free(const volatile void* memory) {
  live_bytes -= static_cast<std::int64_t>(::__sanitizer_get_allocated_size(memory));
}
const int installed = ::__sanitizer_install_malloc_and_free_hooks(after_malloc, before_free);

}  // namespace

#else

namespace {

void* counted(void* memory) {
  if (memory == nullptr) std::abort();
  add(::malloc_usable_size(memory));
  return memory;
}

void uncounted(void* memory) {
  if (memory != nullptr) live_bytes -= static_cast<std::int64_t>(::malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

void* operator new(std::size_t size) { return counted(std::malloc(size)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  const auto multiple = static_cast<std::size_t>(alignment);
  return counted(std::aligned_alloc(multiple, (size + multiple - 1) / multiple * multiple));
}
void operator delete(void* memory) noexcept { uncounted(memory); }
void operator delete(void* memory, std::size_t) noexcept { uncounted(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { uncounted(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { uncounted(memory); }

#endif

namespace {

using namespace tessera;
using namespace tessera::checkpoint;
namespace fs = std::filesystem;

// The budget of SECURITY.md, and for memory what the buffers of a conversion take.
constexpr std::int64_t kExpansionBytes = 64 << 20, kBufferBytes = 128 << 20, kTimesInput = 16;
constexpr std::size_t kDataBytes = 4096;

// A folder of this process, empty again for each input.
class Folder {
 public:
  Folder() {
    fs::create_directories(path_);
    clear();
  }
  ~Folder() { fs::remove_all(path_); }
  void clear() {
    for (const auto& entry : fs::directory_iterator(path_)) fs::remove_all(entry.path());
  }
  fs::path operator/(const char* name) const { return path_ / name; }
  std::int64_t size_bytes() const {
    std::int64_t size = 0;
    for (const auto& entry : fs::recursive_directory_iterator(path_)) {
      if (entry.is_regular_file()) size += static_cast<std::int64_t>(entry.file_size());
    }
    return size;
  }

 private:
  fs::path path_ = fs::temp_directory_path() / ("tessera-fuzz-" + std::to_string(::getpid()));
};

Bytes archive_of(ByteView pickle) {
  const Bytes data(kDataBytes, 1);
  zip::Layout layout;
  const std::vector<std::pair<std::string, ByteView>> entries = {
      {"archive/data.pkl", pickle}, {"archive/data/0", ByteView(data)}, {"archive/version", as_bytes("3\n")}};
  for (const auto& [name, bytes] : entries) layout.add(name, bytes.size());
  Bytes archive;
  std::vector<std::uint32_t> crcs;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const ByteView bytes = entries[i].second;
    crcs.push_back(crc32(bytes));
    for (const Bytes& part : {layout.header(i), Bytes(bytes.begin(), bytes.end()), layout.descriptor(i, crcs[i])}) {
      archive.insert(archive.end(), part.begin(), part.end());
    }
  }
  const Bytes directory = layout.directory(crcs);
  archive.insert(archive.end(), directory.begin(), directory.end());
  return archive;
}

// An object, 1, as it is saved in a DCP data file; its archive is the first 4,715 bytes.
Bytes archived_one() {
  Bytes bytes = archive_of(as_bytes("\x80\x02K\x01."));
  bytes.resize(2 * kDataBytes);
  return bytes;
}

// Writes the input as a checkpoint and returns its path.
fs::path written(const Folder& folder, std::uint8_t kind, ByteView input) {
  switch (kind % 3) {
    case 0:
      fs::create_directory(folder / "in");
      write_new_file(folder / "in/.metadata", input);
      write_new_file(folder / "in/__0_0.distcp", archived_one());
      return folder / "in";
    case 1:
      write_new_file(folder / "in.pt", archive_of(input));
      return folder / "in.pt";
    default:
      write_new_file(folder / "in.safetensors", input);
      return folder / "in.safetensors";
  }
}

// Any error of ours is an answer.
template <typename Action>
void attempt(const char* what, std::int64_t input_bytes, const Folder& folder, const Action& action) {
  const std::int64_t size_before = folder.size_bytes(), live_before = live_bytes;
  peak_bytes = live_before;
  try {
    action();
  } catch (const Error&) {
  }
  const std::int64_t took = peak_bytes - live_before, wrote = folder.size_bytes() - size_before;
  const std::int64_t allowed = kExpansionBytes + kTimesInput * input_bytes;
  if (took > allowed + kBufferBytes || wrote > allowed) {
    std::fprintf(stderr, "%s: %lld bytes of input took %lld bytes of memory and wrote %lld\n", what,
                 static_cast<long long>(input_bytes), static_cast<long long>(took), static_cast<long long>(wrote));
    std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  static Folder folder;
  folder.clear();
  const fs::path in = written(folder, data[0], ByteView(data + 1, size - 1));
  const std::int64_t input_bytes = static_cast<std::int64_t>(size + kDataBytes);
  attempt("verify", input_bytes, folder, [&] { verify(in); });
  std::shared_ptr<const Checkpoint> checkpoint;
  attempt("open", input_bytes, folder, [&] { checkpoint = Checkpoint::open(in); });
  if (checkpoint == nullptr) return 0;
  DiffOptions diff_options;
  diff_options.jobs = 2;
  attempt("diff", input_bytes, folder, [&] { diff(checkpoint, checkpoint, diff_options); });
  const auto convert_to = [&](SourceKind kind, const char* name) {
    ConvertOptions options;
    options.to = kind;
    options.jobs = 2;
    attempt(name, input_bytes, folder, [&] { convert(checkpoint, folder / name, options); });
  };
  convert_to(SourceKind::dcp, "dcp");
  convert_to(SourceKind::torch, "out.pt");
  convert_to(SourceKind::safetensors, "out.safetensors");
  return 0;
}

/// \file
/// Reads bytes as a small checkpoint and does with it what the command does: verify, diff, convert to every format.
/// Memory and output must follow the input's size, whatever numbers are in it.
/// See input_checkpoint.h for what the bytes are.

#ifdef __has_feature
#if __has_feature(address_sanitizer)
#include <sanitizer/allocator_interface.h>
#define TESSERA_SANITIZED
#endif
#endif
#include <malloc.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <string>

#include "input_checkpoint.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/verify.h"

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
using fuzz::Folder;
namespace fs = std::filesystem;

// The budget of SECURITY.md, and for memory what the buffers of a conversion take.
constexpr std::int64_t kExpansionBytes = 64 << 20, kBufferBytes = 128 << 20, kTimesInput = 16;

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
  const fs::path in = fuzz::written(folder, data[0], ByteView(data + 1, size - 1));
  const std::int64_t input_bytes = static_cast<std::int64_t>(size + fuzz::kDataBytes);
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
  convert_to(SourceKind::torch_checkpointing, "out");
  return 0;
}

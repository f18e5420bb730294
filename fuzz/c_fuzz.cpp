/// \file
/// Uses a small checkpoint through the C interface, as a program in another language does: lists what is in it, reads
/// tensors, boxes, objects and archives, and verifies it. Some of the arguments are wrong; they follow from the input.
/// The laws of tessera.h must hold. See input_checkpoint.h for what the bytes are.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "input_checkpoint.h"
#include "tessera/base/crc32.h"
#include "tessera/c/tessera.h"

namespace {

using namespace tessera;

constexpr std::uint64_t kReadBytes = 1 << 20;
constexpr std::size_t kItems = 64;         // of a list that are looked at
constexpr std::uint8_t kUntouched = 0xa5;  // after the memory that a call may fill

void expect(bool law, const char* what) {
  if (law) return;
  std::fprintf(stderr, "broken law: %s; the last error: %s\n", what, tessera_last_error());
  std::abort();
}

// Whether a call succeeded. Otherwise it has a reason, one line, and is not a defect.
bool is_good(tessera_status status) {
  if (status == TESSERA_OK) return true;
  const char* reason = tessera_last_error();
  expect(reason[0] != '\0' && std::strpbrk(reason, "\r\n") == nullptr, "an error has a message of one line");
  expect(status != TESSERA_INTERNAL, "no input is an internal error");
  expect(std::strcmp(tessera_status_name(status), "unknown") != 0, "a status has a name");
  return false;
}

// Memory of a call, followed by some that it must not touch.
class Memory {
 public:
  explicit Memory(std::size_t size) : size_(size), bytes_(size + 16, kUntouched) {}
  ~Memory() {
    for (std::size_t i = size_; i < bytes_.size(); ++i) expect(bytes_[i] == kUntouched, "memory has a size");
  }
  void* data() { return bytes_.data(); }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  std::vector<std::uint8_t> bytes_;
};

class Program {
 public:
  Program(const tessera_checkpoint* checkpoint, std::uint32_t seed) : checkpoint_(checkpoint), random_(seed) {}

  void use() {
    list();
    const std::size_t tensors = tessera_tensor_count(checkpoint_), objects = tessera_object_count(checkpoint_);
    for (std::size_t i = 0; i < std::min(tensors, kItems); ++i) use_tensor(i);
    for (std::size_t i = 0; i < std::min(objects, kItems); ++i) use_object(i);
    tessera_tensor_info tensor{};
    tessera_object_info object{};
    expect(!is_good(tessera_tensor(checkpoint_, tensors, &tensor)), "there is no tensor after the last");
    expect(!is_good(tessera_object(checkpoint_, objects, &object)), "there is no object after the last");
  }

 private:
  void list() {
    for (std::size_t i = 0; i < tessera_warning_count(checkpoint_); ++i) read(tessera_warning(checkpoint_, i));
    for (std::size_t i = 0; i < tessera_file_count(checkpoint_); ++i) read(tessera_file_name(checkpoint_, i));
    expect(tessera_file_name(checkpoint_, tessera_file_count(checkpoint_)) == nullptr,
           "there is no file after the last");
    expect(tessera_warning(checkpoint_, SIZE_MAX) == nullptr, "there is no such warning");
    read(tessera_kind(checkpoint_));
    read(tessera_format_version(checkpoint_));
  }
  // Reads a text to its end, where a sanitizer finds one that has none.
  static void read(const char* text) { expect(std::strlen(text) < SIZE_MAX, "a text has an end"); }

  void use_tensor(std::size_t number) {
    tessera_tensor_info info{};
    expect(is_good(tessera_tensor(checkpoint_, number, &info)), "a tensor that is counted has a description");
    expect(info.name[info.name_bytes] == '\0', "a zero byte follows a name");
    std::uint64_t elements = 1;
    for (std::size_t d = 0; d < info.dims; ++d) elements *= static_cast<std::uint64_t>(info.shape[d]);
    expect(elements * info.element_bytes == info.size_bytes, "the shape gives the size");
    std::size_t found = SIZE_MAX;
    if (is_good(tessera_find_tensor(checkpoint_, info.name, &found)) && std::strlen(info.name) == info.name_bytes) {
      expect(found == number, "a name finds its tensor");
    }
    for (std::size_t i = 0; i < std::min(info.chunks, kItems); ++i) {
      tessera_chunk_info chunk{};
      expect(is_good(tessera_chunk(checkpoint_, number, i, &chunk)), "a chunk that is counted has a description");
      for (std::size_t d = 0; d < info.dims; ++d) {
        expect(chunk.offsets[d] >= 0 && chunk.sizes[d] >= 0, "a box has no negative numbers");
      }
    }
    if (info.size_bytes <= kReadBytes) {
      Memory memory(info.size_bytes);
      is_good(tessera_read_tensor(checkpoint_, info.name, memory.data(), memory.size(), nullptr));
      expect(!is_good(tessera_read_tensor(checkpoint_, info.name, memory.data(), memory.size() + 1, nullptr)),
             "memory must have the tensor's size");
    }
    for (int i = 0; i < 4; ++i) read_box(info);
  }

  // A number that is often within a dimension, and sometimes far from it.
  std::int64_t number_to(std::int64_t most) {
    switch (random_() % 16) {
      case 0:
        return std::numeric_limits<std::int64_t>::max() - static_cast<std::int64_t>(random_() % 3);
      case 1:
        return std::numeric_limits<std::int64_t>::min() + static_cast<std::int64_t>(random_() % 3);
      case 2:
        return -1;
      case 3:
        return most + 1;
      default:
        return most <= 0 ? 0 : static_cast<std::int64_t>(random_() % (static_cast<std::uint64_t>(most) + 1));
    }
  }

  void read_box(const tessera_tensor_info& info) {
    std::vector<std::int64_t> offsets, sizes, strides;
    for (std::size_t d = 0; d < info.dims; ++d) {
      offsets.push_back(number_to(info.shape[d]));
      const bool is_inside = offsets.back() >= 0 && offsets.back() <= info.shape[d];
      sizes.push_back(number_to(is_inside ? std::min<std::int64_t>(info.shape[d] - offsets.back(), 8) : 8));
      strides.push_back(number_to(8));
    }
    constexpr const char* kDtypes[] = {nullptr, "float32", "bfloat16", "complex128", "no dtype"};
    Memory memory(random_() % 4096);
    const char* dtype = kDtypes[random_() % std::size(kDtypes)];
    void* data = random_() % 64 == 0 ? nullptr : memory.data();
    const std::size_t size = memory.size(), dims = random_() % 16 == 0 ? info.dims + 1 : info.dims;
    offsets.push_back(0);
    sizes.push_back(1);
    strides.push_back(0);
    tessera_boxes boxes{};
    boxes.struct_size = sizeof boxes;
    boxes.count = 1;
    boxes.names = &info.name;
    boxes.dtypes = &dtype;
    boxes.dims = &dims;
    boxes.offsets = offsets.data();
    boxes.sizes = sizes.data();
    boxes.data = &data;
    boxes.data_bytes = &size;
    boxes.strides = random_() % 2 == 0 ? nullptr : strides.data();
    tessera_read_options options{};
    options.struct_size = sizeof options;
    options.cast = static_cast<int>(random_() % 2);
    options.threads = 1;
    options.compare_rest = options.cast;
    is_good(tessera_read(checkpoint_, &boxes, &options, nullptr));
  }

  void use_object(std::size_t number) {
    tessera_object_info info{};
    expect(is_good(tessera_object(checkpoint_, number, &info)), "an object that is counted has a description");
    expect(info.name[info.name_bytes] == '\0', "a zero byte follows a name");
    for (const auto read : {tessera_read_object, tessera_read_object_archive}) {
      tessera_bytes* bytes = nullptr;
      const bool good = is_good(read(checkpoint_, number, &bytes));
      expect(good == (bytes != nullptr), "outputs are unchanged unless a call succeeds");
      expect(tessera_bytes_data(bytes)[tessera_bytes_size(bytes)] == '\0', "a zero byte follows");
      tessera_bytes_free(bytes);
    }
  }

  const tessera_checkpoint* checkpoint_;
  std::mt19937 random_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  static fuzz::Folder folder;
  folder.clear();
  const std::string path = fuzz::written(folder, data[0], ByteView(data + 1, size - 1)).string();
  std::uint64_t problems = UINT64_MAX;
  tessera_bytes* json = nullptr;
  const bool is_verified = is_good(tessera_verify(path.c_str(), nullptr, &problems, &json));
  expect(is_verified == (json != nullptr) && is_verified == (problems != UINT64_MAX),
         "outputs are unchanged unless a call succeeds");
  tessera_bytes_free(json);
  tessera_checkpoint* checkpoint = nullptr;
  const bool is_open = is_good(tessera_open(path.c_str(), nullptr, &checkpoint));
  expect(is_open == (checkpoint != nullptr), "outputs are unchanged unless a call succeeds");
  if (is_open) Program(checkpoint, crc32(ByteView(data, size))).use();
  tessera_close(checkpoint);
  return 0;
}

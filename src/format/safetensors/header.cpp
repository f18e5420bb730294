// Reads a header.

#include <algorithm>
#include <array>

#include "format/json/events.h"
#include "tessera/base/checked.h"
#include "tessera/base/error.h"
#include "tessera/format/safetensors.h"

namespace tessera::safetensors {
namespace {

using json::Cursor;
using json::Scalar;

// A tensor of the header, unchecked.
struct Entry {
  Tensor tensor;
  std::uint64_t at = 0;  // the end of its JSON object, in the file
  std::string code;
  bool has_shape = false;
  std::vector<std::uint64_t> offsets;
};

class HeaderVisitor final : public json::Visitor {
 public:
  HeaderVisitor(std::map<std::string, std::string>& metadata, const std::string& file)
      : metadata_(metadata), file_(file) {}

  std::vector<Entry> take_entries() { return std::move(entries_); }

  void open(const Cursor& at, bool is_array) override {
    const auto path = at.path();
    if (path.size() <= 1) {
      if (is_array) at.corrupt("{}, expected an object", json::container_name(is_array));
      if (path.size() == 1 && path[0].key != kMetadataKey) {
        entries_.emplace_back();
        entries_.back().tensor.name = path[0].key;
      }
    } else if (path[0].key == kMetadataKey) {
      wrong_metadata(at, json::container_name(is_array));
    } else if (path.size() == 2) {
      const std::string& field = path[1].key;
      const bool is_list = field == "shape" || field == "data_offsets";
      if (field == "dtype" || (is_list && !is_array)) wrong_field(at, json::container_name(is_array));
      if (field == "shape") entries_.back().has_shape = true;
    } else if (in_list(path)) {
      wrong_field(at, json::container_name(is_array));
    }
  }

  void scalar(const Cursor& at, Scalar value) override {
    const auto path = at.path();
    if (path.empty()) at.corrupt("{}, expected an object", scalar_kind_name(value.kind));
    const bool is_metadata = path[0].key == kMetadataKey;
    if (path.size() == 1) {
      if (!is_metadata || !value.is(Scalar::Kind::null)) {
        at.corrupt("'{}' is {}, expected an object", printable(path[0].key), scalar_kind_name(value.kind));
      }
    } else if (is_metadata) {
      if (!value.is(Scalar::Kind::string)) wrong_metadata(at, scalar_kind_name(value.kind));
      metadata_[path[1].key] = std::move(value.text);
    } else if (path.size() == 2) {
      if (path[1].key == "shape" || path[1].key == "data_offsets") wrong_field(at, scalar_kind_name(value.kind));
      if (path[1].key != "dtype") return;
      if (!value.is(Scalar::Kind::string)) wrong_field(at, scalar_kind_name(value.kind));
      entries_.back().code = std::move(value.text);
    } else if (in_list(path)) {
      if (!value.is(Scalar::Kind::unsigned_integer)) wrong_field(at, scalar_kind_name(value.kind));
      Entry& entry = entries_.back();
      if (path[1].key == "shape") {
        if (!std::in_range<std::int64_t>(value.number)) wrong_field(at, value.number);
        entry.tensor.shape.push_back(static_cast<std::int64_t>(value.number));
      } else {
        entry.offsets.push_back(value.number);
      }
    }
  }

  void close(const Cursor& at, bool) override {
    if (at.path().size() == 1 && at.path()[0].key != kMetadataKey) finish(at, entries_.back());
  }

 private:
  static bool in_list(std::span<const json::Level> path) {
    return path.size() == 3 && (path[1].key == "shape" || path[1].key == "data_offsets");
  }

  [[noreturn]] void wrong_metadata(const Cursor& at, std::string_view found) const {
    at.corrupt("'{}' of {} is {}, expected a string", printable(at.path()[1].key), kMetadataKey, found);
  }

  template <typename Found>
  [[noreturn]] void wrong_field(const Cursor& at, const Found& found) const {
    at.corrupt("tensor '{}': {} is or contains {}, expected {}", printable(at.path()[0].key), at.path()[1].key, found,
               at.path()[1].key == "dtype" ? "a string" : "an array of integers from 0 to 2^63 - 1");
  }

  // Checks one tensor without the others.
  void finish(const Cursor& at, Entry& entry) const {
    Tensor& tensor = entry.tensor;
    const std::string name = printable(tensor.name);
    if (entry.code.empty() || !entry.has_shape || entry.offsets.size() != 2) {
      at.corrupt(
          "tensor '{}': found {} dtype, {} shape and {} data_offsets, expected dtype, shape and two data_offsets", name,
          entry.code.empty() ? "no or an empty" : "a", entry.has_shape ? "a" : "no", entry.offsets.size());
    }
    const std::optional<DType> dtype = dtype_of_type_code(entry.code);
    if (!dtype) {
      fail(ErrorCode::unsupported,
           "{}: safetensors, byte {}: tensor '{}': unknown dtype '{}', expected one of safetensors such as 'F32'",
           file_, at.offset_bytes(), name, printable(entry.code));
    }
    tensor.dtype = *dtype;
    if (*dtype == DType::float4_e2m1fn_x2) {
      // The file counts half-bytes, PyTorch counts bytes.
      if (tensor.shape.empty() || tensor.shape.back() % 2 != 0) {
        fail(ErrorCode::unsupported,
             "{}: safetensors, byte {}: tensor '{}': F4 with {}, expected a last dimension of even size", file_,
             at.offset_bytes(), name,
             tensor.shape.empty() ? "no dimension" : fmt::format("a last dimension of {}", tensor.shape.back()));
      }
      tensor.shape.back() /= 2;
    }
    std::int64_t bytes = 0;
    try {
      bytes = checked_multiply(checked_numel(tensor.shape, "number of elements"), dtype_size(*dtype), "size");
    } catch (const Error& error) {
      at.corrupt("tensor '{}': {}", name, error.what());
    }
    tensor.begin_bytes = entry.offsets[0];
    tensor.end_bytes = entry.offsets[1];
    if (tensor.end_bytes < tensor.begin_bytes ||
        tensor.end_bytes - tensor.begin_bytes != static_cast<std::uint64_t>(bytes)) {
      at.corrupt("tensor '{}': data_offsets are [{}, {}], expected a range of {} bytes for its shape in {}", name,
                 tensor.begin_bytes, tensor.end_bytes, bytes, entry.code);
    }
    entry.at = at.offset_bytes();
  }

  std::map<std::string, std::string>& metadata_;
  const std::string& file_;
  std::vector<Entry> entries_;
};

// Checks that the tensors' ranges are contiguous from 0 to the end of the data.
void check_ranges(const std::vector<Entry>& entries, std::uint64_t data_bytes, const std::string& file) {
  std::uint64_t end = 0;
  for (const Entry& entry : entries) {
    const Tensor& tensor = entry.tensor;
    if (tensor.begin_bytes != end || tensor.end_bytes > data_bytes) {
      fail(ErrorCode::corrupt,
           "{}: safetensors, byte {}: tensor '{}' at [{}, {}) of the data, expected to begin at {} {}", file, entry.at,
           printable(tensor.name), tensor.begin_bytes, tensor.end_bytes, end,
           fmt::format("and to end within its {} bytes", data_bytes));
    }
    end = tensor.end_bytes;
  }
  if (end != data_bytes) {
    fail(ErrorCode::corrupt, "{}: safetensors: {} bytes of data, expected {} as its tensors have", file, data_bytes,
         end);
  }
}

}  // namespace

bool looks_like_safetensors(ByteView first_bytes, std::uint64_t file_bytes) {
  if (first_bytes.size() < 8 || file_bytes < 10) return false;
  const auto length = load_little_endian<std::uint64_t>(first_bytes.data());
  if (length < 2 || length > kMaxHeaderBytes || length > file_bytes - 8) return false;
  return first_bytes.size() == 8 || first_bytes[8] == '{';
}

Header read_header(const ByteSource& file) {
  const std::string& name = file.name();
  const std::uint64_t file_bytes = file.size_bytes();
  if (file_bytes < 8) fail(ErrorCode::corrupt, "{}: safetensors: {} bytes, expected at least 8", name, file_bytes);
  std::array<std::uint8_t, 8> prefix{};
  file.read_at(0, prefix);
  const auto length = load_little_endian<std::uint64_t>(prefix.data());
  if (length > kMaxHeaderBytes || length > file_bytes - 8) {
    fail(ErrorCode::corrupt, "{}: safetensors, byte 0: header of {} bytes, expected at most {}", name, length,
         std::min(kMaxHeaderBytes, file_bytes - 8));
  }
  Bytes text(length);
  file.read_at(8, text);
  if (text.empty() || text[0] != '{') {
    fail(ErrorCode::corrupt, "{}: safetensors, byte 8: the header starts with '{}', expected '{{'", name,
         printable(as_text(ByteView(text).first(std::min<std::size_t>(text.size(), 1)))));
  }
  Header header;
  header.data_offset_bytes = 8 + length;
  HeaderVisitor visitor(header.metadata, name);
  json::read(text, name, 8, visitor);
  std::vector<Entry> entries = visitor.take_entries();
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.tensor.begin_bytes, a.tensor.end_bytes) < std::pair(b.tensor.begin_bytes, b.tensor.end_bytes);
  });
  check_ranges(entries, file_bytes - header.data_offset_bytes, name);
  header.tensors.reserve(entries.size());
  for (Entry& entry : entries) header.tensors.push_back(std::move(entry.tensor));
  return header;
}

}  // namespace tessera::safetensors

#include "tessera/checkpoint/inspect/tensor_slice.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <utility>

#include "checkpoint/buffer.h"
#include "checkpoint/inspect/numbers.h"
#include "checkpoint/source/expansion.h"
#include "tessera/base/cast.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera::checkpoint {
namespace {

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t end = text.find(separator);
    parts.push_back(trimmed(text.substr(0, end)));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

class SliceParser {
 public:
  SliceParser(std::string_view text, const std::vector<std::int64_t>& shape) : text_(text), shape_(shape) {}

  TensorSlice parse() const {
    std::string_view inside = trimmed(text_);
    if (inside.starts_with('[') && inside.ends_with(']') && inside.size() > 1) {
      inside.remove_prefix(1);
      inside.remove_suffix(1);
    }
    std::vector<std::string_view> parts = split(inside, ',');
    if (parts.size() > 1 && parts.back().empty()) parts.pop_back();  // as in Python's `x[0,]`
    const auto dots = std::count(parts.begin(), parts.end(), "...");
    if (dots > 1) not_a_slice("more than one '...'");
    if (parts.size() - static_cast<std::size_t>(dots) > shape_.size()) {
      not_a_slice(fmt::format("{} dimensions", parts.size() - static_cast<std::size_t>(dots)));
    }
    TensorSlice slice = TensorSlice::full(shape_);
    std::size_t d = 0;
    for (const std::string_view part : parts) {
      if (part == "...") {
        d += shape_.size() + 1 - parts.size();
      } else {
        slice.dims[d] = dim(part, d);
        ++d;
      }
    }
    return slice;
  }

 private:
  [[noreturn]] void not_a_slice(const std::string& found) const {
    fail(ErrorCode::invalid_argument,
         "slice '{}': found {}, expected for each of the dimensions {} an int or begin:end:step, or '...' once",
         printable(text_), found, shape_to_string(shape_));
  }

  std::optional<std::int64_t> number(std::string_view text) const {
    if (text.empty()) return std::nullopt;
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) not_a_slice(fmt::format("'{}'", printable(text)));
    return value;
  }

  TensorSlice::Dim dim(std::string_view text, std::size_t d) const {
    const std::int64_t size = shape_[d];
    const std::vector<std::string_view> parts = split(text, ':');
    if (parts.size() > 3) not_a_slice(fmt::format("'{}'", printable(text)));
    if (parts.size() == 1) {
      const std::optional<std::int64_t> index = number(text);
      if (!index) not_a_slice("an empty index");
      if (*index < -size || *index >= size) {
        fail(ErrorCode::invalid_argument, "slice '{}': index {} in dimension {}, expected one from {} to {}",
             printable(text_), *index, d, -size, size - 1);
      }
      return {*index < 0 ? *index + size : *index, 1, 1, false};
    }
    const auto bound = [&](std::string_view part, std::int64_t without) {
      const std::int64_t value = number(part).value_or(without);
      return std::clamp<std::int64_t>(value < 0 ? value + size : value, 0, size);
    };
    TensorSlice::Dim result;
    result.begin = bound(parts[0], 0);
    const std::int64_t end = bound(parts[1], size);
    result.step = parts.size() == 3 ? number(parts[2]).value_or(1) : 1;
    if (result.step < 1) not_a_slice(fmt::format("a step of {}", result.step));
    if (end > result.begin) result.size = (end - result.begin - 1) / result.step + 1;
    return result;
  }

  std::string_view text_;
  const std::vector<std::int64_t>& shape_;
};

// Casts elements, through float64 if `cast` does not know their type.
void cast_elements(DType from, const std::uint8_t* source, DType to, std::uint8_t* destination, std::int64_t count) {
  if (can_cast(from, to)) return cast(from, source, to, destination, count);
  std::vector<double> wide(static_cast<std::size_t>(count));
  widen_elements(from, source, wide.data(), count);
  cast(DType::float64, reinterpret_cast<const std::uint8_t*>(wide.data()), to, destination, count);
}

}  // namespace

TensorSlice TensorSlice::full(const std::vector<std::int64_t>& shape) {
  TensorSlice slice;
  for (const std::int64_t size : shape) slice.dims.push_back({0, size, 1, true});
  return slice;
}

std::vector<std::int64_t> TensorSlice::shape() const {
  std::vector<std::int64_t> sizes;
  for (const Dim& dim : dims) {
    if (dim.is_kept) sizes.push_back(dim.size);
  }
  return sizes;
}

std::int64_t TensorSlice::elements() const {
  std::vector<std::int64_t> sizes;
  for (const Dim& dim : dims) sizes.push_back(dim.size);
  return volume(Box::full(sizes));
}

TensorSlice parse_slice(std::string_view text, const std::vector<std::int64_t>& shape) {
  return SliceParser(text, shape).parse();
}

bool can_cast_slice(DType from, DType to) {
  return can_cast(from, to) || (from == DType::float8_e8m0fnu && can_cast(DType::float64, to));
}

void check_slice_size(const Checkpoint& checkpoint, std::size_t tensor, const TensorSlice& slice) {
  const TensorInfo& info = checkpoint.tensors()[tensor];
  const std::uint64_t bytes = static_cast<std::uint64_t>(slice.elements() * dtype_size(info.dtype));
  check_expansion(checkpoint, bytes, info);
}

void read_slice(const TensorReader& reader, const TensorSlice& slice, DType dtype, std::int64_t limit_bytes,
                FunctionRef<void(ByteView)> visit) {
  const DType stored = reader.info().dtype;
  if (!can_cast_slice(stored, dtype)) {
    fail(ErrorCode::unsupported, "read tensor '{}': dtype {}, expected one with a cast to {}",
         printable(reader.info().name), dtype_name(stored), dtype_name(dtype));
  }
  const std::int64_t element_bytes = dtype_size(stored);
  const std::size_t rank = slice.dims.size();
  // Pieces are boxes of the slice. Each is read as the box of the tensor that contains it, which the steps make larger.
  // A large step counts as the limit, so that the product does not overflow.
  std::vector<std::int64_t> sizes(rank), steps(rank);
  std::int64_t bytes_of_element = std::max(element_bytes, dtype_size(dtype));
  for (std::size_t d = 0; d < rank; ++d) {
    sizes[d] = slice.dims[d].size;
    steps[d] = slice.dims[d].size > 1 ? slice.dims[d].step : 1;
    bytes_of_element = std::min(bytes_of_element * std::min(steps[d], limit_bytes), limit_bytes);
  }
  Buffer read_buffer, slice_buffer, cast_buffer;
  for_each_row_major_piece(Box::full(sizes), bytes_of_element, limit_bytes, [&](const Box& piece) {
    Box box(piece);
    bool has_steps = false;
    for (std::size_t d = 0; d < rank; ++d) {
      box.offsets[d] = slice.dims[d].begin + piece.offsets[d] * steps[d];
      box.sizes[d] = (piece.sizes[d] - 1) * steps[d] + 1;
      has_steps = has_steps || box.sizes[d] != piece.sizes[d];
    }
    const std::int64_t count = volume(piece);
    MutableByteView bytes = read_buffer.get(static_cast<std::size_t>(volume(box) * element_bytes));
    reader.read(box, bytes);
    if (has_steps) {
      std::vector<std::int64_t> strides = row_major_strides(box.sizes);
      for (std::size_t d = 0; d < rank; ++d) strides[d] *= steps[d];
      const MutableByteView picked = slice_buffer.get(static_cast<std::size_t>(count * element_bytes));
      copy_strided(piece.sizes, element_bytes, bytes.data(), strides, picked.data(), row_major_strides(piece.sizes));
      bytes = picked;
    }
    if (dtype != stored) {
      const MutableByteView converted = cast_buffer.get(static_cast<std::size_t>(count * dtype_size(dtype)));
      cast_elements(stored, bytes.data(), dtype, converted.data(), count);
      bytes = converted;
    }
    visit(bytes);
  });
}

}  // namespace tessera::checkpoint

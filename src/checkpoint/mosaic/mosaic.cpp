// The mosaic page's data:
//   {"name", "kind", "version",
//    "dtypes": [[name, bytes per element]], "files": [[name, bytes or null, rank or null]],
//    "tensors": [[name, dtype, [shape], [offsets..., sizes..., file or -1, byte of the stored item] for each chunk]],
//    "objects": [[name, type, repr]]}
// where `dtype` and `file` are indices. Every `<` is written as \u003c, so that no name can end the script element.

#include "tessera/checkpoint/mosaic.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "checkpoint/mosaic/assets.h"
#include "tessera/base/error.h"
#include "tessera/format/python_value.h"

namespace tessera::checkpoint {
namespace {

constexpr std::size_t kReprBytes = 2000;

std::string json_string(std::string_view text) {
  using Document = nlohmann::json;
  const std::string quoted = Document(std::string(text)).dump(-1, ' ', false, Document::error_handler_t::replace);
  std::string safe;
  for (const char c : quoted) {
    if (c == '<') {
      safe += "\\u003c";
    } else {
      safe += c;
    }
  }
  return safe;
}

std::string html_text(std::string_view text) {
  std::string safe;
  for (const char c : printable(text, SIZE_MAX)) {
    if (c == '<') {
      safe += "&lt;";
    } else if (c == '&') {
      safe += "&amp;";
    } else {
      safe += c;
    }
  }
  return safe;
}

// Removes the number at the beginning of `text`, which may have leading zeros, and returns it.
std::optional<std::int64_t> take_padded_number(std::string_view& text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || text.starts_with('-')) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

// Returns the last part of the path, made absolute so that "." and "x/" have one.
std::string name_of(const Checkpoint& checkpoint) {
  std::error_code error;
  std::filesystem::path path = std::filesystem::absolute(checkpoint.path(), error).lexically_normal();
  if (path.filename().empty()) path = path.parent_path();
  return path.filename().string();
}

// Returns `page` with each "{{key}}" replaced by its value. Values are not searched for placeholders.
std::string fill(std::string_view page, const std::map<std::string_view, std::string_view>& values) {
  std::string filled;
  while (true) {
    const std::size_t begin = page.find("{{");
    filled += page.substr(0, begin);
    if (begin == std::string_view::npos) return filled;
    const std::size_t end = page.find("}}", begin);
    filled += values.at(page.substr(begin + 2, end - begin - 2));
    page.remove_prefix(end + 2);
  }
}

class PageData {
 public:
  explicit PageData(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {
    text_ = fmt::format("{{\"name\":{},\"kind\":\"{}\",\"version\":{}", json_string(name_of(checkpoint)),
                        source_kind_name(checkpoint.kind()), json_string(checkpoint.version()));
    add_dtypes();
    add_list("files", checkpoint.files().size(), [&](std::size_t i) { add_file(checkpoint_.files()[i]); });
    add_list("tensors", checkpoint.tensors().size(), [&](std::size_t i) { add_tensor(checkpoint_.tensors()[i]); });
    add_list("objects", checkpoint.objects().size(), [&](std::size_t i) { add_object(i); });
    text_ += "}";
  }
  const std::string& text() const { return text_; }

 private:
  template <typename... Args>
  void put(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Args>(args)...);
  }

  template <typename AddOne>
  void add_list(std::string_view name, std::size_t count, const AddOne& add_one) {
    put(",\n\"{}\":[", name);
    for (std::size_t i = 0; i < count; ++i) {
      text_ += i == 0 ? "\n" : ",\n";
      add_one(i);
    }
    text_ += "]";
  }

  void add_dtypes() {
    dtype_index_.assign(kDTypeCount, 0);
    std::vector<DType> used;
    for (const TensorInfo& tensor : checkpoint_.tensors()) {
      if (std::find(used.begin(), used.end(), tensor.dtype) == used.end()) used.push_back(tensor.dtype);
    }
    std::sort(used.begin(), used.end());
    for (std::size_t i = 0; i < used.size(); ++i) dtype_index_[static_cast<std::size_t>(used[i])] = i;
    add_list("dtypes", used.size(),
             [&](std::size_t i) { put("[\"{}\",{}]", dtype_name(used[i]), dtype_size(used[i])); });
  }

  void add_file(const SourceFile& file) {
    put("[{},{},{}]", json_string(file.name), file.size_bytes ? fmt::to_string(*file.size_bytes) : "null",
        file.rank ? fmt::to_string(*file.rank) : "null");
  }

  void add_tensor(const TensorInfo& tensor) {
    put("[{},{},[{}],[", json_string(tensor.name), dtype_index_[static_cast<std::size_t>(tensor.dtype)],
        fmt::join(tensor.shape, ","));
    for (std::size_t c = 0; c < tensor.chunks.size(); ++c) {
      if (c > 0) text_ += ",";
      const BoxView box = tensor.chunks[c];
      for (const std::int64_t offset : box.offsets) put("{},", offset);
      for (const std::int64_t size : box.sizes) put("{},", size);
      const StoredRange& stored = tensor.stored[c];
      const bool known = stored.file != StoredRange::kNoFile;
      put("{},{}", known ? static_cast<std::int64_t>(stored.file) : -1, stored.offset_bytes);
    }
    text_ += "]]";
  }

  void add_object(std::size_t i) {
    std::string type, shown;
    try {
      const ObjectValue loaded = checkpoint_.load_object(i);
      type = pickle::type_name(loaded.value);
      shown = pickle::repr(loaded.value, kReprBytes);
    } catch (const Error& error) {
      type = "unknown";
      shown = fmt::format("<cannot be read: {}>", error.what());
    }
    put("[{},{},{}]", json_string(checkpoint_.objects()[i].name), json_string(type), json_string(shown));
  }

  const Checkpoint& checkpoint_;
  std::vector<std::size_t> dtype_index_;
  std::string text_;
};

}  // namespace

std::optional<std::int64_t> rank_of_file(std::string_view file_name) {
  file_name.remove_prefix(std::min(file_name.size(), file_name.rfind('/') + 1));
  if (file_name.starts_with("__")) {
    file_name.remove_prefix(2);
    const auto rank = take_padded_number(file_name);
    return rank && file_name.starts_with('_') ? rank : std::nullopt;
  }
  if (file_name.starts_with("shard-")) {
    file_name.remove_prefix(6);
    const auto number = take_padded_number(file_name);
    return number && *number > 0 && file_name.starts_with('-') ? std::optional(*number - 1) : std::nullopt;
  }
  return std::nullopt;
}

std::string mosaic_html(const Checkpoint& checkpoint) {
  const std::string name = html_text(name_of(checkpoint));
  const std::string summary =
      fmt::format("{}: {} tensors, {} of elements, {} objects, {} files.", name, checkpoint.tensors().size(),
                  format_bytes(checkpoint.tensor_bytes()), checkpoint.objects().size(), checkpoint.files().size());
  const PageData data(checkpoint);
  std::string script;
  for (const std::string_view part : {mosaic::kModel, mosaic::kDrawing, mosaic::kBrowser}) script += part;
  return fill(
      mosaic::kPage,
      {{"name", name}, {"style", mosaic::kStyle}, {"summary", summary}, {"data", data.text()}, {"script", script}});
}

}  // namespace tessera::checkpoint

#include "checkpoint/source/foreign.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <set>
#include <system_error>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/format/zip.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

using namespace std::literals;

constexpr Foreign kArray = {"an array of NumPy", "save its arrays with safetensors.numpy.save_file first"};
constexpr Foreign kPacked = {"a packed file", "unpack it first"};
constexpr Foreign kWebPage = {"a web page", "the download failed, for example for lack of a login"};
constexpr Foreign kJson = {"a JSON text", "pass its directory"};
constexpr Foreign kTensorFlow = {"a checkpoint of TensorFlow", "load it there and save its variables as safetensors"};

struct Magic {
  std::size_t offset;
  std::string_view bytes;
  Foreign found;
};

constexpr std::array<Magic, 15> kMagics = {
    {{0, "GGUF"sv, {"a GGUF file of llama.cpp", "use the checkpoint that it was made from"}},
     {0, "\x89HDF\r\n\x1a\n"sv, {"an HDF5 file, as Keras writes", "save its weights as safetensors first"}},
     {257, "ustar"sv, {"a tar archive", "unpack it first"}},
     {0, "\x1f\x8b"sv, kPacked},
     {0, "\x28\xb5\x2f\xfd"sv, kPacked},
     {0, "\xfd\x37zXZ\0"sv, kPacked},
     {0, "BZh"sv, kPacked},
     {0, "\x93NUMPY"sv, kArray},
     {0, "version https://git-lfs."sv, {"a pointer of Git LFS", "get the file itself with 'git lfs pull'"}},
     {0, "<!DOCTYPE"sv, kWebPage},
     {0, "<!doctype"sv, kWebPage},
     {0, "<html"sv, kWebPage},
     {0, "<?xml"sv, {"an XML text", "if it was downloaded, the download may have failed"}},
     {0, "{\n"sv, kJson},
     {0, "{\""sv, kJson}}};

bool has(ByteView bytes, std::size_t offset, std::string_view expected) {
  return bytes.size() >= offset + expected.size() && as_text(bytes.subspan(offset, expected.size())) == expected;
}

// A message of protobuf that begins as ONNX's ModelProto: a small ir_version (field 1), then the name of the producer
// (field 2) or an opset (field 8) or the graph (field 7).
bool looks_like_onnx(ByteView first) {
  if (first.size() < 16 || first[0] != 0x08 || first[1] == 0 || first[1] > 30) return false;
  if (first[2] == 0x12 && first[3] < first.size() - 4) {
    const ByteView name = first.subspan(4, first[3]);
    return std::ranges::all_of(name, [](std::uint8_t c) { return std::isprint(c) != 0; });
  }
  return first[2] == 0x3a || (first[2] == 0x42 && first[3] < 0x80);
}

// Whether the first entry of a zip archive is an array of NumPy.
bool looks_like_npz(ByteView first) {
  constexpr std::size_t kNameLengthOffset = 26, kNameOffset = 30;
  if (!zip::looks_like_zip(first) || first.size() < kNameOffset) return false;
  const auto length = load_little_endian<std::uint16_t>(first.data() + kNameLengthOffset);
  return length <= first.size() - kNameOffset && as_text(first.subspan(kNameOffset, length)).ends_with(".npy");
}

// The index of a checkpoint of TensorFlow is a sorted table whose last bytes are a magic number.
bool ends_like_a_table(const ByteSource& file) {
  constexpr std::string_view kMagic = "\x57\xfb\x80\x8b\x24\x75\x47\xdb"sv;
  if (file.size_bytes() < kMagic.size()) return false;
  Bytes last(kMagic.size());
  file.read_at(file.size_bytes() - kMagic.size(), last);
  return as_text(last) == kMagic;
}

}  // namespace

std::optional<Foreign> foreign_file(ByteView first, const ByteSource& file) {
  for (const Magic& magic : kMagics) {
    if (has(first, magic.offset, magic.bytes)) return magic.found;
  }
  if (looks_like_npz(first)) return kArray;
  if (looks_like_onnx(first)) return Foreign{"a model of ONNX", "use the checkpoint that it was exported from"};
  if (ends_like_a_table(file)) return kTensorFlow;
  return std::nullopt;
}

std::optional<Foreign> foreign_directory(const fs::path& directory) {
  std::set<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    names.insert(it->path().filename().string());
  }
  const auto any = [&](const auto& what) { return std::ranges::any_of(names, what); };
  if (names.contains("_CHECKPOINT_METADATA") || names.contains("_METADATA") || names.contains("manifest.ocdbt")) {
    return Foreign{"a checkpoint of Orbax (JAX)", "load it there and save its arrays as safetensors"};
  }
  if (names.contains("saved_model.pb")) return Foreign{"a SavedModel of TensorFlow", kTensorFlow.advice};
  const bool has_data = any([](const std::string& name) { return name.find(".data-00000-of-") != std::string::npos; });
  if (has_data && any([](const std::string& name) { return name.ends_with(".index"); })) return kTensorFlow;
  if (names.contains(".zgroup") || names.contains("zarr.json")) {
    return Foreign{"a store of Zarr", "save its arrays as safetensors"};
  }
  return std::nullopt;
}

void refuse_foreign(const fs::path& path, const Foreign& found) {
  fail(ErrorCode::unsupported, "{}: found {}, expected a checkpoint of PyTorch or safetensors; {}", path.string(),
       found.what, found.advice);
}

void refuse_no_path(const fs::path& path) {
  const std::string text = path.string();
  if (text.empty()) {
    fail(ErrorCode::invalid_argument, "the path is empty, expected the path of a checkpoint");
  }
  if (text == "-") {
    fail(ErrorCode::invalid_argument,
         "-: found standard input and output, expected a path: a checkpoint is read and written at any place");
  }
  const std::size_t end = text.find("://");
  const bool is_url = end != std::string::npos && end > 0 && std::ranges::all_of(text.substr(0, end), [](char c) {
                        return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '+' || c == '-' || c == '.';
                      });
  if (!is_url) return;
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 5> kTools = {
      {{"s3", ", for example with 'aws s3 cp --recursive'"},
       {"gs", ", for example with 'gcloud storage cp -r'"},
       {"hf", ", for example with 'hf download'"},
       {"http", ", for example with 'curl -LO'"},
       {"https", ", for example with 'curl -LO'"}}};
  std::string_view tool;
  for (const auto& [scheme, with] : kTools) {
    if (text.substr(0, end) == scheme) tool = with;
  }
  fail(ErrorCode::invalid_argument, "{}: found a URL, expected a path of this machine; copy the files{}",
       printable(text), tool);
}

fs::file_status require_present(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) {
    refuse_no_path(path);
    fail(ErrorCode::not_found, "{}: no such file or directory", path.string());
  }
  if (error) fail(ErrorCode::io, "open {}: {}", path.string(), error.message());
  return status;
}

}  // namespace tessera::checkpoint

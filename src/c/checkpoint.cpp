// Opening checkpoints and describing what is in them.

#include "tessera/checkpoint/checkpoint.h"

#include <nlohmann/json.hpp>

#include "c/call.h"
#include "c/handles.h"
#include "tessera/format/python_value.h"

namespace tessera::c {
namespace {

using checkpoint::Checkpoint;
using checkpoint::TensorInfo;

const Checkpoint& of(const tessera_checkpoint* handle) { return *handle->checkpoint; }

// Returns f(checkpoint), or `otherwise` for a NULL.
template <typename R, typename F>
R described(const tessera_checkpoint* handle, R otherwise, const F& f) noexcept {
  return if_given(handle, otherwise, [&](const tessera_checkpoint& given) { return f(*given.checkpoint); });
}
// Returns how many `f` lists, or 0 for a NULL.
template <typename F>
std::size_t count_of(const tessera_checkpoint* handle, const F& f) noexcept {
  return described(handle, std::size_t{0}, [&](const Checkpoint& opened) { return f(opened).size(); });
}

const TensorInfo& tensor_of(const tessera_checkpoint* handle, std::size_t tensor, std::string_view function) {
  const Checkpoint& checkpoint = *required(handle, function, "checkpoint")->checkpoint;
  if (tensor >= checkpoint.tensors().size()) {
    fail(ErrorCode::invalid_argument, "{}: there is no tensor {} in {}, expected a number below {}", function, tensor,
         checkpoint.path().string(), checkpoint.tensors().size());
  }
  return checkpoint.tensors()[tensor];
}

const checkpoint::ObjectInfo& object_of(const tessera_checkpoint* handle, std::size_t object,
                                        std::string_view function) {
  const Checkpoint& checkpoint = *required(handle, function, "checkpoint")->checkpoint;
  if (object >= checkpoint.objects().size()) {
    fail(ErrorCode::invalid_argument, "{}: there is no object {} in {}, expected a number below {}", function, object,
         checkpoint.path().string(), checkpoint.objects().size());
  }
  return checkpoint.objects()[object];
}

std::string object_json(const Checkpoint& checkpoint, std::size_t object) {
  const checkpoint::ObjectValue loaded = checkpoint.load_object(object);
  nlohmann::ordered_json json = {
      {"type", pickle::type_name(loaded.value)}, {"repr", pickle::repr(loaded.value)}, {"value", nullptr}};
  if (auto value = pickle::to_lossless_json(loaded.value)) {
    json["value"] = *std::move(value);
  } else {
    json["opaque"] = pickle::opaque_reason(loaded.value).value_or("contains itself");
  }
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace
}  // namespace tessera::c

using namespace tessera;

extern "C" {

const char* tessera_bytes_data(const tessera_bytes* bytes) { return bytes == nullptr ? "" : bytes->bytes.c_str(); }
size_t tessera_bytes_size(const tessera_bytes* bytes) { return bytes == nullptr ? 0 : bytes->bytes.size(); }
void tessera_bytes_free(tessera_bytes* bytes) { delete bytes; }

tessera_status tessera_open(const char* path, const tessera_open_options* options, tessera_checkpoint** checkpoint) {
  return c::call([&] {
    c::required(path, "tessera_open", "path");
    c::required(checkpoint, "tessera_open", "checkpoint");
    checkpoint::OpenOptions open;
    open.check_checksums = c::options_of(options, "tessera_open").no_checksums == 0;
    c::give(std::make_unique<tessera_checkpoint>(checkpoint::Checkpoint::open(path, open)), checkpoint);
  });
}
void tessera_close(tessera_checkpoint* checkpoint) { delete checkpoint; }

const char* tessera_kind(const tessera_checkpoint* checkpoint) {
  return c::described(checkpoint, "",
                      [](const auto& opened) { return checkpoint::source_kind_name(opened.kind()).data(); });
}
const char* tessera_format_version(const tessera_checkpoint* checkpoint) {
  return c::described(checkpoint, "", [](const auto& opened) { return opened.version().c_str(); });
}
size_t tessera_warning_count(const tessera_checkpoint* checkpoint) {
  return c::count_of(
      checkpoint, [](const auto& opened) -> const auto& { return opened.warnings(); });
}
const char* tessera_warning(const tessera_checkpoint* checkpoint, size_t warning) {
  if (warning >= tessera_warning_count(checkpoint)) return nullptr;
  return c::of(checkpoint).warnings()[warning].c_str();
}
size_t tessera_file_count(const tessera_checkpoint* checkpoint) {
  return c::count_of(
      checkpoint, [](const auto& opened) -> const auto& { return opened.files(); });
}
const char* tessera_file_name(const tessera_checkpoint* checkpoint, size_t file) {
  if (file >= tessera_file_count(checkpoint)) return nullptr;
  return c::of(checkpoint).files()[file].name.c_str();
}

uint64_t tessera_largest_block(const tessera_checkpoint* checkpoint) {
  return c::described(checkpoint, uint64_t{0}, [](const auto& opened) { return opened.largest_block_bytes(); });
}

size_t tessera_tensor_count(const tessera_checkpoint* checkpoint) {
  return c::count_of(
      checkpoint, [](const auto& opened) -> const auto& { return opened.tensors(); });
}

tessera_status tessera_tensor(const tessera_checkpoint* checkpoint, size_t tensor, tessera_tensor_info* info) {
  return c::call([&] {
    const checkpoint::TensorInfo& found = c::tensor_of(checkpoint, tensor, "tessera_tensor");
    *c::required(info, "tessera_tensor", "info") = {.name = found.name.c_str(),
                                                    .name_bytes = found.name.size(),
                                                    .dtype = dtype_name(found.dtype).data(),
                                                    .element_bytes = static_cast<size_t>(dtype_size(found.dtype)),
                                                    .dims = found.shape.size(),
                                                    .shape = found.shape.data(),
                                                    .size_bytes = found.size_bytes(),
                                                    .chunks = found.chunks.size(),
                                                    .requires_grad = found.requires_grad ? 1 : 0};
  });
}

tessera_status tessera_find_tensor(const tessera_checkpoint* checkpoint, const char* name, size_t* tensor) {
  return c::call([&] {
    const checkpoint::Checkpoint& opened = *c::required(checkpoint, "tessera_find_tensor", "checkpoint")->checkpoint;
    c::required(name, "tessera_find_tensor", "name");
    const auto found = opened.find_tensor(name);
    if (!found) {
      fail(ErrorCode::not_found, "{} has no tensor '{}', expected the name of one; it has {}", opened.path().string(),
           printable(name), opened.tensors().size());
    }
    *c::required(tensor, "tessera_find_tensor", "tensor") = *found;
  });
}

tessera_status tessera_chunk(const tessera_checkpoint* checkpoint, size_t tensor, size_t chunk,
                             tessera_chunk_info* info) {
  return c::call([&] {
    const checkpoint::TensorInfo& found = c::tensor_of(checkpoint, tensor, "tessera_chunk");
    if (chunk >= found.chunks.size()) {
      fail(ErrorCode::invalid_argument, "tessera_chunk: tensor '{}' has no chunk {}, expected a number below {}",
           printable(found.name), chunk, found.chunks.size());
    }
    const BoxView box = found.chunks[chunk];
    const checkpoint::StoredRange& stored = found.stored[chunk];
    *c::required(info, "tessera_chunk", "info") = {
        .offsets = box.offsets.data(),
        .sizes = box.sizes.data(),
        .file = stored.file == checkpoint::StoredRange::kNoFile ? SIZE_MAX : stored.file,
        .offset_bytes = stored.offset_bytes,
        .length_bytes = stored.length_bytes};
  });
}

size_t tessera_object_count(const tessera_checkpoint* checkpoint) {
  return c::count_of(
      checkpoint, [](const auto& opened) -> const auto& { return opened.objects(); });
}
tessera_status tessera_object(const tessera_checkpoint* checkpoint, size_t object, tessera_object_info* info) {
  return c::call([&] {
    const checkpoint::ObjectInfo& found = c::object_of(checkpoint, object, "tessera_object");
    *c::required(info, "tessera_object", "info") = {.name = found.name.c_str(), .name_bytes = found.name.size()};
  });
}

tessera_status tessera_read_object(const tessera_checkpoint* checkpoint, size_t object, tessera_bytes** json) {
  return c::call([&] {
    c::object_of(checkpoint, object, "tessera_read_object");
    c::required(json, "tessera_read_object", "json");
    c::give(std::make_unique<tessera_bytes>(c::object_json(c::of(checkpoint), object)), json);
  });
}

tessera_status tessera_read_object_archive(const tessera_checkpoint* checkpoint, size_t object,
                                           tessera_bytes** archive) {
  return c::call([&] {
    const checkpoint::ObjectInfo& found = c::object_of(checkpoint, object, "tessera_read_object_archive");
    c::required(archive, "tessera_read_object_archive", "archive");
    const checkpoint::Checkpoint& opened = c::of(checkpoint);
    if (opened.kind() != checkpoint::SourceKind::dcp || found.stored.file == checkpoint::StoredRange::kNoFile) {
      fail(ErrorCode::unsupported, "read the archive of object '{}': {} stores its objects otherwise, expected DCP",
           printable(found.name), opened.path().string());
    }
    const checkpoint::StoredRange stored = opened.without_transforms(found.stored);
    const auto file = opened.open_file(stored.file);
    if (stored.length_bytes > file->size_bytes()) {
      fail(ErrorCode::corrupt, "{} at byte {}: object '{}' has {} bytes, expected at most the file's {}", file->name(),
           stored.offset_bytes, printable(found.name), stored.length_bytes, file->size_bytes());
    }
    auto made = std::make_unique<tessera_bytes>(std::string(stored.length_bytes, '\0'));
    file->read_at(stored.offset_bytes,
                  MutableByteView(reinterpret_cast<std::uint8_t*>(made->bytes.data()), made->bytes.size()));
    c::give(std::move(made), archive);
  });
}

}  // extern "C"

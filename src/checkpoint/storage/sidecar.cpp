#include "tessera/checkpoint/sidecar.h"

#include <charconv>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/crc32.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/internal/file_names.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

constexpr std::uint64_t kMaxSidecarBytes = 1ull << 30;
constexpr std::int64_t kVersion = 1;

std::uint32_t parse_crc(const std::string& text, const std::string& where) {
  std::uint32_t crc = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), crc, 16);
  if (text.size() != 8 || error != std::errc() || end != text.data() + text.size()) {
    fail(ErrorCode::corrupt, "{}: found crc32 '{}', expected eight hexadecimal digits", where, printable(text));
  }
  return crc;
}

Sidecar parse(const Bytes& bytes, const std::string& name) {
  bool duplicate = false;
  std::vector<std::set<std::string>> keys;
  const auto see = [&](int, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key) duplicate = duplicate || !keys.back().insert(parsed.get<std::string>()).second;
    return true;
  };
  const nlohmann::json json = nlohmann::json::parse(bytes.begin(), bytes.end(), see, false);
  if (json.is_discarded() || !json.is_object()) fail(ErrorCode::corrupt, "{}: not a JSON object", name);
  if (duplicate) fail(ErrorCode::corrupt, "{}: a key occurs twice, expected unique keys", name);
  const auto version = json.find("version");
  if (version == json.end() || !version->is_number_integer()) {
    fail(ErrorCode::corrupt, "{}: no version, expected {}", name, kVersion);
  }
  if (version->get<std::int64_t>() != kVersion) {
    fail(ErrorCode::unsupported, "{}: version {}, expected {}", name, version->dump(), kVersion);
  }
  const auto files = json.find("files");
  if (files == json.end() || !files->is_object()) fail(ErrorCode::corrupt, "{}: no object 'files'", name);
  Sidecar sidecar;
  for (const auto& [file, facts] : files->items()) {
    const auto where = fmt::format("{}: file '{}'", name, printable(file));
    if (!facts.is_object() || !facts.contains("bytes") || !facts["bytes"].is_number_unsigned() ||
        !facts.contains("crc32") || !facts["crc32"].is_string()) {
      fail(ErrorCode::corrupt, "{}: expected its bytes and crc32", where);
    }
    sidecar.files[file] = {facts["bytes"].get<std::uint64_t>(), parse_crc(facts["crc32"].get<std::string>(), where)};
  }
  return sidecar;
}

// Returns the sidecar of a save that was killed between its two renames: it belongs to `.metadata` but still has its
// temporary name.
std::optional<Sidecar> interrupted_sidecar(const Storage& storage) {
  const std::string name = std::string(kSidecarFileName) + std::string(kTemporarySuffix);
  const std::string metadata_name(kMetadataFileName);
  if (!storage.size_bytes(name)) return std::nullopt;
  try {
    const Sidecar sidecar = parse(read_file(storage, name, kMaxSidecarBytes), storage.name_of(name));
    const auto facts = sidecar.files.find(metadata_name);
    if (facts == sidecar.files.end()) return std::nullopt;
    const Bytes metadata = read_file(storage, metadata_name);
    const Sidecar::FileFacts found{metadata.size(), crc32(metadata)};
    return found == facts->second ? std::optional(sidecar) : std::nullopt;
  } catch (const Error&) {
    return std::nullopt;  // the sidecar was not finished
  }
}

}  // namespace

fs::path sidecar_path(const fs::path& checkpoint) {
  std::error_code ignored;
  if (fs::is_directory(checkpoint, ignored)) return checkpoint / kSidecarFileName;
  return fs::path(checkpoint.string() + std::string(kSidecarFileName));
}

std::optional<Sidecar> read_sidecar(const Storage& storage) {
  if (std::optional<Sidecar> sidecar = interrupted_sidecar(storage)) return sidecar;
  const std::string name(kSidecarFileName);
  if (!storage.size_bytes(name)) return std::nullopt;
  return parse(read_file(storage, name, kMaxSidecarBytes), storage.name_of(name));
}

std::optional<Sidecar> read_sidecar(const fs::path& checkpoint) {
  std::error_code ignored;
  if (fs::is_directory(checkpoint, ignored)) return read_sidecar(*file_system_storage(checkpoint));
  const fs::path path = sidecar_path(checkpoint);
  if (!fs::exists(path, ignored)) return std::nullopt;
  return parse(read_file(path, kMaxSidecarBytes), path.string());
}

Bytes write_sidecar(const Sidecar& sidecar) {
  nlohmann::ordered_json files = nlohmann::ordered_json::object();
  for (const auto& [name, facts] : sidecar.files) {
    files[name] = {{"bytes", facts.size_bytes}, {"crc32", fmt::format("{:08x}", facts.crc32)}};
  }
  const nlohmann::ordered_json json = {{"version", kVersion}, {"files", std::move(files)}};
  Bytes out;
  append(out, json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  out.push_back('\n');
  return out;
}

}  // namespace tessera::checkpoint

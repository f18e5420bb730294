#include "tessera/checkpoint/sidecar.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "checkpoint/source/shard_index.h"
#include "tessera/base/crc32.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/internal/file_names.h"
#include "tessera/format/internal/json_structure.h"
#include "tessera/format/internal/pickle_text.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t kVersion = 2;
constexpr std::string_view kGeneration = "generation";  // a member before `files`
constexpr std::size_t kCrcDigits = 8;
constexpr std::uint64_t kMinBlockBytes = 1u << 10;

// Returns a number, or the type of another value. To dump a value that is nested deep takes much stack.
std::string shown_fact(const nlohmann::json& json) {
  return json.is_number() ? json.dump() : fmt::format("a JSON {}", json.type_name());
}

std::uint32_t parse_crc(std::string_view text, const std::string& where) {
  std::uint32_t crc = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), crc, 16);
  if (text.size() != kCrcDigits || error != std::errc() || end != text.data() + text.size()) {
    fail(ErrorCode::corrupt, "{}: found crc32 '{}', expected eight hexadecimal digits", where, printable(text));
  }
  return crc;
}

Sidecar::FileFacts parse_facts(const nlohmann::json& json, std::uint64_t block_bytes, const std::string& where) {
  if (!json.is_object()) {
    fail(ErrorCode::corrupt, "{}: found {}, expected its bytes and crc32", where, shown_fact(json));
  }
  const auto bytes = json.find("bytes"), crc = json.find("crc32");
  if (bytes == json.end() || !bytes->is_number_unsigned()) {
    fail(ErrorCode::corrupt, "{}: found {} for bytes, expected an integer of at least 0", where,
         bytes == json.end() ? "nothing" : shown_fact(*bytes));
  }
  if (crc == json.end() || !crc->is_string()) {
    fail(ErrorCode::corrupt, "{}: found {} for crc32, expected eight hexadecimal digits", where,
         crc == json.end() ? "nothing" : shown_fact(*crc));
  }
  Sidecar::FileFacts facts;
  facts.size_bytes = bytes->get<std::uint64_t>();
  facts.crc32 = parse_crc(crc->get_ref<const std::string&>(), where);
  const auto blocks = json.find("blocks");
  if (blocks == json.end()) return facts;
  if (!blocks->is_string()) {
    fail(ErrorCode::corrupt, "{}: found {} for blocks, expected a string", where, shown_fact(*blocks));
  }
  const std::string_view digits = blocks->get_ref<const std::string&>();
  const std::uint64_t expected =
      block_bytes < kMinBlockBytes ? 0 : facts.size_bytes / block_bytes + (facts.size_bytes % block_bytes != 0 ? 1 : 0);
  if (expected < 2 || digits.size() % kCrcDigits != 0 || digits.size() / kCrcDigits != expected) {
    fail(ErrorCode::corrupt, "{}: blocks has {} digits, expected {} for each of {} blocks of {} bytes", where,
         digits.size(), kCrcDigits, expected, block_bytes);
  }
  facts.block_bytes = block_bytes;
  facts.block_crcs.reserve(expected);
  for (std::size_t at = 0; at < digits.size(); at += kCrcDigits) {
    facts.block_crcs.push_back(parse_crc(digits.substr(at, kCrcDigits), where));
  }
  return facts;
}

std::uint32_t crc32_of(const ByteSource& file) {
  Bytes block(std::min<std::uint64_t>(file.size_bytes(), std::uint64_t{1} << 20));
  std::uint32_t crc = 0;
  for (std::uint64_t done = 0; done < file.size_bytes();) {
    const MutableByteView part = MutableByteView(block).first(std::min(block.size(), file.size_bytes() - done));
    file.read_at(done, part);
    crc = crc32(part, crc);
    done += part.size();
  }
  return crc;
}

}  // namespace

Sidecar parse_sidecar(ByteView contents, const std::string& name) {
  const nlohmann::json json = nlohmann::json::parse(contents.begin(), contents.end(), nullptr, false);
  if (!json.is_object()) {
    fail(ErrorCode::corrupt, "{}: found {}, expected a JSON object", name,
         json.is_discarded() ? "no JSON" : shown_fact(json));
  }
  if (const std::optional<std::string> twice = json::structure_of(as_text(contents)).duplicate_key) {
    fail(ErrorCode::corrupt, "{}: the key '{}' occurs twice, expected unique keys", name, printable(*twice));
  }
  const auto version = json.find("version");
  if (version == json.end() || !version->is_number_integer()) {
    fail(ErrorCode::corrupt, "{}: no version, expected 1 to {}", name, kVersion);
  }
  if (version->get<std::int64_t>() < 1 || version->get<std::int64_t>() > kVersion) {
    fail(ErrorCode::unsupported, "{}: version {}, expected 1 to {}", name, version->dump(), kVersion);
  }
  std::uint64_t block_bytes = 0;
  if (const auto found = json.find("block_bytes"); found != json.end()) {
    if (!found->is_number_unsigned() || found->get<std::uint64_t>() < kMinBlockBytes) {
      fail(ErrorCode::corrupt, "{}: block_bytes is {}, expected at least {}", name, shown_fact(*found), kMinBlockBytes);
    }
    block_bytes = found->get<std::uint64_t>();
  }
  const auto files = json.find("files");
  if (files == json.end() || !files->is_object()) {
    fail(ErrorCode::corrupt, "{}: found {} for files, expected an object", name,
         files == json.end() ? "nothing" : shown_fact(*files));
  }
  Sidecar sidecar;
  for (const auto& [file, facts] : files->items()) {
    sidecar.files[file] = parse_facts(facts, block_bytes, fmt::format("{}: file '{}'", name, printable(file)));
  }
  return sidecar;
}

void FileSums::add(ByteView bytes) {
  while (!bytes.empty()) {
    const std::uint64_t in_block = size_bytes_ % Sidecar::kBlockBytes;
    if (in_block == 0) crcs_.push_back(0);
    const ByteView part = bytes.first(std::min<std::uint64_t>(bytes.size(), Sidecar::kBlockBytes - in_block));
    crcs_.back() = crc32(part, crcs_.back());
    size_bytes_ += part.size();
    bytes = bytes.subspan(part.size());
  }
}

Sidecar::FileFacts FileSums::facts() const { return facts_of_blocks(size_bytes_, crcs_); }

Sidecar::FileFacts facts_of(ByteView contents) {
  FileSums sums;
  sums.add(contents);
  return sums.facts();
}

Sidecar::FileFacts facts_of_blocks(std::uint64_t size_bytes, std::vector<std::uint32_t> block_crcs) {
  Sidecar::FileFacts facts;
  facts.size_bytes = size_bytes;
  for (std::size_t i = 0; i < block_crcs.size(); ++i) {
    const std::uint64_t length = std::min(Sidecar::kBlockBytes, size_bytes - i * Sidecar::kBlockBytes);
    facts.crc32 = i == 0 ? block_crcs[i] : crc32_combine(facts.crc32, block_crcs[i], length);
  }
  if (block_crcs.size() < 2) return facts;
  facts.block_bytes = Sidecar::kBlockBytes;
  facts.block_crcs = std::move(block_crcs);
  return facts;
}

fs::path sidecar_path(const fs::path& checkpoint) {
  if (const auto directory = checkpoint_directory(checkpoint)) return *directory / kSidecarFileName;
  return fs::path(checkpoint.string() + std::string(kSidecarFileName));
}

bool describes_metadata(const Storage& storage, const Sidecar& sidecar) {
  const std::string name(kMetadataFileName);
  const auto facts = sidecar.files.find(name);
  if (facts == sidecar.files.end() || storage.size_bytes(name) != facts->second.size_bytes) return false;
  try {
    const std::shared_ptr<const ByteSource> metadata = storage.open(name);
    return metadata->size_bytes() == facts->second.size_bytes && crc32_of(*metadata) == facts->second.crc32;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
    return false;
  }
}

std::optional<Sidecar> read_interrupted_sidecar(const Storage& storage) {
  const std::string name(kTemporarySidecarName);
  if (!storage.size_bytes(name) || !storage.size_bytes(std::string(kMetadataFileName))) return std::nullopt;
  try {
    Sidecar sidecar = parse_sidecar(read_file(storage, name, kMaxSidecarBytes), storage.name_of(name));
    return describes_metadata(storage, sidecar) ? std::optional(std::move(sidecar)) : std::nullopt;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::io) throw;
    return std::nullopt;  // the sidecar was not finished
  }
}

std::optional<Sidecar> read_sidecar(const Storage& storage) {
  if (std::optional<Sidecar> sidecar = read_interrupted_sidecar(storage)) return sidecar;
  const std::string name(kSidecarFileName);
  if (!storage.size_bytes(name)) return std::nullopt;
  try {
    return parse_sidecar(read_file(storage, name, kMaxSidecarBytes), storage.name_of(name));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
    return std::nullopt;  // a save removed it meanwhile
  }
}

std::optional<Sidecar> read_sidecar(const fs::path& checkpoint) {
  if (const auto directory = checkpoint_directory(checkpoint)) return read_sidecar(*file_system_storage(*directory));
  const fs::path path = sidecar_path(checkpoint);
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return std::nullopt;
  Sidecar sidecar = parse_sidecar(read_file(path, kMaxSidecarBytes), path.string());
  if (sidecar.files.size() != 1) {
    fail(ErrorCode::corrupt, "{}: it describes {} files, expected one, the file beside it", path.string(),
         sidecar.files.size());
  }
  auto only = sidecar.files.extract(sidecar.files.begin());
  only.key() = checkpoint.filename().string();
  sidecar.files.insert(std::move(only));
  return sidecar;
}

Bytes write_sidecar(const Sidecar& sidecar, std::optional<std::int64_t> generation) {
  nlohmann::ordered_json files = nlohmann::ordered_json::object();
  for (const auto& [name, facts] : sidecar.files) {
    if (!pickle::is_utf8(name)) {
      fail(ErrorCode::invalid_argument,
           "write a sidecar: the name '{}' is not UTF-8, expected one that JSON represents", printable(name));
    }
    nlohmann::ordered_json& file =
        files[name] = {{"bytes", facts.size_bytes}, {"crc32", fmt::format("{:08x}", facts.crc32)}};
    if (facts.block_crcs.empty()) continue;
    std::string digits;
    digits.reserve(facts.block_crcs.size() * kCrcDigits);
    for (const std::uint32_t crc : facts.block_crcs) fmt::format_to(std::back_inserter(digits), "{:08x}", crc);
    file["blocks"] = std::move(digits);
  }
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  json["version"] = kVersion;
  if (generation) json[std::string(kGeneration)] = *generation;
  json["block_bytes"] = Sidecar::kBlockBytes;
  json["files"] = std::move(files);
  Bytes out;
  append(out, json.dump(1));
  out.push_back('\n');
  return out;
}

std::optional<std::int64_t> sidecar_generation(ByteView contents) {
  std::string_view text = as_text(contents);
  text = text.substr(0, text.find("\"files\""));  // a name of a file may be anything
  const std::string member = fmt::format("\"{}\": ", kGeneration);
  const std::size_t at = text.find(member);
  if (at == std::string_view::npos) return std::nullopt;
  text.remove_prefix(at + member.size());
  std::int64_t generation = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), generation);
  if (error != std::errc() || end == text.data() + text.size() || *end != ',' || generation < 0) return std::nullopt;
  return generation;
}

Bytes write_file_sidecar(const Sidecar& sidecar) {
  Sidecar escaped;
  for (const auto& [name, facts] : sidecar.files) {
    escaped.files[pickle::is_utf8(name) ? name : printable(name)] = facts;
  }
  return write_sidecar(escaped);
}

}  // namespace tessera::checkpoint

// Serializes a rank's report to the coordinator.

#include <utility>

#include "checkpoint/byte_cursor.h"
#include "checkpoint/save/format.h"

namespace tessera::checkpoint {

Bytes RankReport::encode() const {
  Bytes out;
  append_little_endian<std::uint64_t>(out, object_bytes.size());
  for (const std::uint64_t bytes : object_bytes) append_little_endian(out, bytes);
  append_little_endian<std::uint64_t>(out, transformed_bytes.size());
  for (const std::uint64_t bytes : transformed_bytes) append_little_endian(out, bytes);
  append_little_endian<std::uint64_t>(out, descriptors.size());
  for (const std::string& descriptor : descriptors) append_text(out, descriptor);
  append_little_endian<std::uint8_t>(out, has_after_commit ? 1 : 0);
  append_little_endian<std::uint64_t>(out, files.files.size());
  for (const auto& [name, facts] : files.files) {
    append_text(out, name);
    append_little_endian(out, facts.size_bytes);
    append_little_endian(out, facts.crc32);
    append_little_endian<std::uint64_t>(out, facts.block_crcs.size());
    for (const std::uint32_t crc : facts.block_crcs) append_little_endian(out, crc);
  }
  return out;
}

RankReport RankReport::decode(ByteView bytes) {
  RankReport report;
  ByteCursor cursor(bytes, "report of a rank");
  for (auto n = cursor.number<std::uint64_t>(); n > 0; --n) {
    report.object_bytes.push_back(cursor.number<std::uint64_t>());
  }
  for (auto n = cursor.number<std::uint64_t>(); n > 0; --n) {
    report.transformed_bytes.push_back(cursor.number<std::uint64_t>());
  }
  for (auto n = cursor.number<std::uint64_t>(); n > 0; --n) report.descriptors.emplace_back(cursor.text());
  report.has_after_commit = cursor.number<std::uint8_t>() == 1;
  for (auto n = cursor.number<std::uint64_t>(); n > 0; --n) {
    const std::string name(cursor.text());
    Sidecar::FileFacts& facts = report.files.files[name];
    facts.size_bytes = cursor.number<std::uint64_t>();
    facts.crc32 = cursor.number<std::uint32_t>();
    for (auto blocks = cursor.number<std::uint64_t>(); blocks > 0; --blocks) {
      facts.block_bytes = Sidecar::kBlockBytes;
      facts.block_crcs.push_back(cursor.number<std::uint32_t>());
    }
  }
  cursor.expect_end();
  return report;
}

}  // namespace tessera::checkpoint

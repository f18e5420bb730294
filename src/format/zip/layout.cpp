// The layout and the records of an archive: byte for byte those of PyTorch's writer (miniz inside of
// caffe2/serialize/inline_container.cc) for the same entries.

#include <algorithm>
#include <limits>

#include "format/zip/format.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/format/zip.h"

namespace tessera::zip {
namespace {

constexpr std::uint64_t kMaxArchiveBytes = std::numeric_limits<std::int64_t>::max();

// The zip64 extra field: the entry's numbers that do not fit into 32 bits. Empty if all fit.
Bytes zip64_extra(const Entry& entry) {
  Bytes values;
  if (entry.size_bytes >= kMax32) {
    append_little_endian<std::uint64_t>(values, entry.size_bytes);
    append_little_endian<std::uint64_t>(values, entry.size_bytes);
  }
  if (entry.header_offset_bytes >= kMax32) append_little_endian<std::uint64_t>(values, entry.header_offset_bytes);
  if (values.empty()) return values;
  Bytes extra;
  append_little_endian<std::uint16_t>(extra, kExtraZip64);
  append_little_endian<std::uint16_t>(extra, static_cast<std::uint16_t>(values.size()));
  append(extra, values);
  return extra;
}

std::size_t zip64_extra_bytes(const Entry& entry) {
  const std::size_t values = (entry.size_bytes >= kMax32 ? 2u : 0u) + (entry.header_offset_bytes >= kMax32 ? 1u : 0u);
  return values == 0 ? 0 : kExtraHeadBytes + 8 * values;
}

// An entry without data has no descriptor.
std::size_t descriptor_bytes(const Entry& entry) {
  if (entry.size_bytes == 0) return 0;
  return zip64_extra_bytes(entry) == 0 ? kDescriptorBytes : kDescriptor64Bytes;
}

std::uint16_t flags(const Entry& entry) {
  return static_cast<std::uint16_t>(kFlagUtf8 | (entry.size_bytes == 0 ? 0u : kFlagDescriptor));
}

std::uint32_t narrowed(std::uint64_t value) {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(value, kMax32));
}

void append_zeros(Bytes& out, std::size_t count) { out.insert(out.end(), count, 0); }

}  // namespace

std::size_t Layout::NameHash::operator()(const std::string& name) const { return TextHash()(name); }

std::size_t Layout::add(std::string name, std::uint64_t size_bytes) {
  if (name.empty() || name.size() > kMax16) {
    fail(ErrorCode::invalid_argument, "zip: an entry name of {} bytes, expected 1 to {}", name.size(), kMax16);
  }
  std::string without_case = name;
  std::transform(name.begin(), name.end(), without_case.begin(), lower_case);
  if (!names_.insert(std::move(without_case)).second) {
    fail(ErrorCode::invalid_argument, "zip: duplicate entry name '{}', expected names that are unique without case",
         printable(name));
  }
  Entry entry;
  entry.name = std::move(name);
  entry.size_bytes = size_bytes;
  entry.header_offset_bytes = end_;
  const std::uint64_t unpadded = end_ + kLocalBytes + entry.name.size() + zip64_extra_bytes(entry) + kExtraHeadBytes;
  entry.data_offset_bytes = (unpadded + kAlignment - 1) / kAlignment * kAlignment;
  // The rest is enough for the directory and the end records of any archive that fits so far.
  const std::uint64_t directory_bytes = directory_bytes_ + kRecordBytes + entry.name.size() + zip64_extra_bytes(entry);
  const std::uint64_t fixed =
      entry.data_offset_bytes + kDescriptor64Bytes + directory_bytes + kEnd64Bytes + kLocatorBytes + kEndBytes;
  if (fixed > kMaxArchiveBytes || size_bytes > kMaxArchiveBytes - fixed) {
    fail(ErrorCode::invalid_argument,
         "zip: entry '{}' of {} bytes makes the archive too large, expected at most {} bytes", printable(entry.name),
         size_bytes, kMaxArchiveBytes);
  }
  end_ = entry.data_offset_bytes + size_bytes + descriptor_bytes(entry);
  directory_bytes_ = directory_bytes;
  entries_.push_back(std::move(entry));
  return entries_.size() - 1;
}

std::uint64_t Layout::total_bytes() const { return end_ + directory_bytes_ + kEnd64Bytes + kLocatorBytes + kEndBytes; }

Bytes Layout::header(std::size_t i) const {
  const Entry& entry = entries_[i];
  const Bytes zip64 = zip64_extra(entry);
  const std::size_t length = entry.data_offset_bytes - entry.header_offset_bytes;
  const std::size_t padding = length - kLocalBytes - entry.name.size() - zip64.size() - kExtraHeadBytes;
  Bytes out;
  out.reserve(length);
  append_little_endian<std::uint32_t>(out, kLocalSignature);
  append_little_endian<std::uint16_t>(out, 0);  // version needed
  append_little_endian<std::uint16_t>(out, flags(entry));
  append_zeros(out, 18);  // method, time, date; CRC-32 and sizes, which are in the descriptor
  append_little_endian<std::uint16_t>(out, static_cast<std::uint16_t>(entry.name.size()));
  append_little_endian<std::uint16_t>(out, static_cast<std::uint16_t>(zip64.size() + kExtraHeadBytes + padding));
  append(out, entry.name);
  append(out, zip64);
  append_little_endian<std::uint16_t>(out, kExtraPadding);
  append_little_endian<std::uint16_t>(out, static_cast<std::uint16_t>(padding));
  out.insert(out.end(), padding, kPaddingByte);
  return out;
}

Bytes Layout::descriptor(std::size_t i, std::uint32_t crc32) const {
  const Entry& entry = entries_[i];
  Bytes out;
  if (entry.size_bytes == 0) return out;
  append_little_endian<std::uint32_t>(out, kDescriptorSignature);
  append_little_endian<std::uint32_t>(out, crc32);
  for (int field = 0; field < 2; ++field) {  // stored size, size
    if (descriptor_bytes(entry) == kDescriptor64Bytes) {
      append_little_endian<std::uint64_t>(out, entry.size_bytes);
    } else {
      append_little_endian<std::uint32_t>(out, static_cast<std::uint32_t>(entry.size_bytes));
    }
  }
  return out;
}

Bytes Layout::directory(const std::vector<std::uint32_t>& crcs) const {
  if (crcs.size() != entries_.size()) {
    fail(ErrorCode::invalid_argument, "zip: {} checksums, expected {} (one per entry)", crcs.size(), entries_.size());
  }
  Bytes out;
  out.reserve(total_bytes() - end_);
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    const Bytes zip64 = zip64_extra(entry);
    append_little_endian<std::uint32_t>(out, kRecordSignature);
    append_zeros(out, 4);  // version made by, version needed
    append_little_endian<std::uint16_t>(out, flags(entry));
    append_zeros(out, 6);  // method, time, date
    append_little_endian<std::uint32_t>(out, entry.size_bytes == 0 ? 0 : crcs[i]);
    append_little_endian<std::uint32_t>(out, narrowed(entry.size_bytes));
    append_little_endian<std::uint32_t>(out, narrowed(entry.size_bytes));
    append_little_endian<std::uint16_t>(out, static_cast<std::uint16_t>(entry.name.size()));
    append_little_endian<std::uint16_t>(out, static_cast<std::uint16_t>(zip64.size()));
    append_zeros(out, 10);  // length of the comment, disk, attributes
    append_little_endian<std::uint32_t>(out, narrowed(entry.header_offset_bytes));
    append(out, entry.name);
    append(out, zip64);
  }
  const std::uint64_t end64_offset = end_ + out.size();
  append_little_endian<std::uint32_t>(out, kEnd64Signature);
  append_little_endian<std::uint64_t>(out, kEnd64Bytes - 12);
  append_little_endian<std::uint16_t>(out, kTorchEndMadeBy);
  append_little_endian<std::uint16_t>(out, kZip64Version);
  append_zeros(out, 8);                                       // disk numbers
  append_little_endian<std::uint64_t>(out, entries_.size());  // on this disk
  append_little_endian<std::uint64_t>(out, entries_.size());
  append_little_endian<std::uint64_t>(out, directory_bytes_);
  append_little_endian<std::uint64_t>(out, end_);

  append_little_endian<std::uint32_t>(out, kLocatorSignature);
  append_zeros(out, 4);  // disk
  append_little_endian<std::uint64_t>(out, end64_offset);
  append_little_endian<std::uint32_t>(out, 1);  // disks

  const auto count = static_cast<std::uint16_t>(std::min<std::size_t>(entries_.size(), kMax16));
  append_little_endian<std::uint32_t>(out, kEndSignature);
  append_zeros(out, 4);                             // disk numbers
  append_little_endian<std::uint16_t>(out, count);  // on this disk
  append_little_endian<std::uint16_t>(out, count);
  append_little_endian<std::uint32_t>(out, narrowed(directory_bytes_));
  append_little_endian<std::uint32_t>(out, narrowed(end_));
  append_zeros(out, 2);  // length of the comment
  return out;
}

}  // namespace tessera::zip

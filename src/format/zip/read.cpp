// Reads a zip directory. Everything that the archive stores twice is compared, and its records must be contiguous, so
// that no flipped bit goes unnoticed.

#include <algorithm>
#include <array>
#include <numeric>

#include "format/zip/end.h"
#include "format/zip/format.h"
#include "format/zip/read.h"
#include "tessera/base/error.h"
#include "tessera/format/zip.h"

namespace tessera::zip {
namespace {

// One entry of the directory. Positions are relative to the archive.
struct Record {
  std::string name;
  std::uint16_t made_by = 0, needed = 0, flags = 0, method = 0, time = 0, date = 0;
  std::uint32_t crc32 = 0;
  std::uint64_t stored_bytes = 0, size_bytes = 0, header_at = 0, data_at = 0;
  bool has_descriptor() const { return (flags & kFlagDescriptor) != 0; }
};

// The 64-bit numbers of an entry's zip64 extra field, in stored order.
struct Zip64Values {
  bool present = false;
  std::array<std::uint64_t, 3> values{};
  std::size_t count = 0;
};

// Compares names without the case of ASCII letters. The result is negative, 0 or positive.
int compare_names(std::string_view a, std::string_view b) {
  const auto [x, y] = std::mismatch(a.begin(), a.end(), b.begin(), b.end(),
                                    [](char c, char d) { return lower_case(c) == lower_case(d); });
  if (x == a.end() || y == b.end()) return (x != a.end() ? 1 : 0) - (y != b.end() ? 1 : 0);
  return lower_case(*x) < lower_case(*y) ? -1 : 1;
}

class Reader {
 public:
  explicit Reader(Window& window) : window_(window), end_(read_end(window)) {}

  Directory read() {
    read_records();
    std::uint64_t at = 0;
    for (std::size_t i = 0; i < records_.size(); ++i) {
      Record& record = records_[i];
      if (record.header_at != at) {
        corrupt(record.header_at, "entry '{}' starts here, expected byte {}, where the previous entry ends",
                printable(record.name), window_.in_source(at));
      }
      at = check_local(record, i + 1 < records_.size() ? records_[i + 1].header_at : end_.directory_at);
    }
    if (at != end_.directory_at) {
      corrupt(end_.directory_at, "the directory starts here, expected byte {}, where the last entry ends",
              window_.in_source(at));
    }
    return take_directory();
  }

 private:
  template <typename... Args>
  [[noreturn]] void corrupt(std::uint64_t at, fmt::format_string<Args...> format, Args&&... args) const {
    window_.corrupt(at, format, std::forward<Args>(args)...);
  }
  void require_equal(std::uint64_t at, std::string_view what, std::uint64_t found, std::uint64_t expected) const {
    window_.require_equal(at, what, found, expected);
  }

  void read_records() {
    const std::uint64_t end = end_.directory_at + end_.directory_bytes;
    const ByteView bytes = window_.view(end_.directory_at, end_.directory_bytes, "directory");
    records_.reserve(end_.entries);
    std::uint64_t at = end_.directory_at;
    for (std::uint64_t i = 0; i < end_.entries; ++i) {
      at += read_record(at, bytes.subspan(at - end_.directory_at));
    }
    if (at != end)
      corrupt(at, "{} bytes of the directory are left after its {} entries, expected none", end - at, end_.entries);
    if (end_.entries == 0) corrupt(end_.directory_at, "the archive has no entry, expected at least one");
  }

  // Reads the record at the beginning of `rest`; returns its length.
  std::uint64_t read_record(std::uint64_t at, ByteView rest) {
    if (rest.size() < kRecordBytes)
      corrupt(at, "{} bytes of the directory are left, expected at least {} for a record", rest.size(), kRecordBytes);
    FieldReader fields(rest);
    require_equal(at, "signature of a directory record", fields.u32(), kRecordSignature);
    Record record;
    record.made_by = fields.u16();
    record.needed = fields.u16();
    record.flags = fields.u16();
    record.method = fields.u16();
    record.time = fields.u16();
    record.date = fields.u16();
    record.crc32 = fields.u32();
    record.stored_bytes = fields.u32();
    record.size_bytes = fields.u32();
    const std::size_t name_bytes = fields.u16(), extra_bytes = fields.u16(), comment_bytes = fields.u16();
    const std::uint16_t disk = fields.u16(), internal_attributes = fields.u16();
    const std::uint32_t external_attributes = fields.u32();
    record.header_at = fields.u32();
    const std::size_t length = kRecordBytes + name_bytes + extra_bytes + comment_bytes;
    if (length > rest.size())
      corrupt(at, "a record has {} bytes, expected at most {}, the rest of the directory", length, rest.size());
    record.name = as_text(rest.subspan(kRecordBytes, name_bytes));
    check_name(at, record.name);
    if (!records_.empty() && is_by_torch(record) != is_by_torch(records_.front())) {
      corrupt(at, "entry '{}' was made by version {}, expected {} as for the first entry", printable(record.name),
              record.made_by, records_.front().made_by);
    }
    if (is_by_torch(record)) {
      if (end_.has_zip64) require_equal(at, "version of the zip64 end record", end_.zip64_made_by, kTorchEndMadeBy);
      require_equal(at, "version needed", record.needed, record.method == 0 ? 0 : 20);
      require_equal(at, "time and date", record.time | record.date, 0);
      require_equal(at, "attributes", internal_attributes | external_attributes, 0);
      require_equal(at, "length of the comment", comment_bytes, 0);
    } else if (end_.zip64_made_by == kTorchEndMadeBy) {
      corrupt(at, "entry '{}' was made by version {}, expected 0 as torch.save wrote the end record",
              printable(record.name), record.made_by);
    } else if (!is_version(record.made_by & 0xFF) || !is_version(record.needed)) {
      corrupt(at, "entry '{}' was made by version {} and needs version {}, expected {} to {}", printable(record.name),
              record.made_by & 0xFF, record.needed, kLeastVersion, kMostVersion);
    }
    widen(at, record, disk, read_extra(at, rest.subspan(kRecordBytes + name_bytes, extra_bytes), record));
    if (!records_.empty() && record.header_at < records_.back().header_at) {
      corrupt(at, "entry '{}' at offset {} is listed after the entry at offset {}, expected them in their order",
              printable(record.name), record.header_at, records_.back().header_at);
    }
    records_.push_back(std::move(record));
    return length;
  }

  // torch.save leaves the version 0; every other writer sets it.
  static bool is_by_torch(const Record& record) { return record.made_by == 0; }

  // Replaces 32-bit fields that are all ones by the zip64 values.
  void widen(std::uint64_t at, Record& record, std::uint16_t disk, const Zip64Values& zip64) const {
    std::size_t used = 0;
    for (std::uint64_t* field : {&record.size_bytes, &record.stored_bytes, &record.header_at}) {
      if (*field != kMax32) continue;
      if (used >= zip64.count)
        corrupt(at, "entry '{}' has {} zip64 values, expected at least {}", printable(record.name), zip64.count,
                used + 1);
      *field = zip64.values[used++];
    }
    require_equal(at, "number of zip64 values", zip64.count, used);
    if (disk != 0) corrupt(at, "entry '{}' is on disk {}, expected 0", printable(record.name), disk);
    if (record.header_at > end_.directory_at || record.stored_bytes > end_.directory_at - record.header_at) {
      corrupt(at, "entry '{}' of {} bytes at offset {}, expected it to end by offset {}, where the directory starts",
              printable(record.name), record.stored_bytes, record.header_at, end_.directory_at);
    }
  }

  void check_name(std::uint64_t at, std::string_view name) const {
    bool bad = name.empty() || name.front() == '/' || name.find('\\') != name.npos || name.find('\0') != name.npos;
    for (std::size_t begin = 0; begin < name.size() && !bad;) {
      const std::size_t end = std::min(name.find('/', begin), name.size());
      const std::string_view part = name.substr(begin, end - begin);
      bad = part.empty() || part == "." || part == "..";
      begin = end + 1;
    }
    if (bad) corrupt(at, "entry name '{}', expected a relative path without '.', '..' and '\\'", printable(name));
  }

  // Walks the extra fields of a record or local header; returns the zip64 one.
  Zip64Values read_extra(std::uint64_t at, ByteView extra, const Record& record) const {
    Zip64Values zip64;
    while (!extra.empty()) {
      if (extra.size() < kExtraHeadBytes)
        corrupt(at, "{} bytes of the extra fields are left, expected at least {}", extra.size(), kExtraHeadBytes);
      FieldReader head(extra);
      const std::uint16_t id = head.u16(), length = head.u16();
      if (length > extra.size() - kExtraHeadBytes)
        corrupt(at, "extra field {:#06x} has {} bytes, expected at most {}", id, length,
                extra.size() - kExtraHeadBytes);
      const ByteView data = extra.subspan(kExtraHeadBytes, length);
      if (id == kExtraZip64) {
        if (zip64.present) corrupt(at, "a second zip64 extra field, expected one");
        if (length % 8 != 0 || length > 24)
          corrupt(at, "a zip64 extra field of {} bytes, expected one of 8, 16 or 24", length);
        zip64.present = true;
        zip64.count = length / 8;
        FieldReader values(data);
        for (std::size_t i = 0; i < zip64.count; ++i) zip64.values[i] = values.u64();
      } else if (id == kExtraPadding) {
        if (!std::all_of(data.begin(), data.end(), [](std::uint8_t byte) { return byte == kPaddingByte; })) {
          corrupt(at, "padding of entry '{}' has another byte, expected 'Z' alone", printable(record.name));
        }
      } else if (is_by_torch(record)) {
        corrupt(at, "extra field {:#06x} of entry '{}', expected {:#06x} or {:#06x} as torch.save writes", id,
                printable(record.name), kExtraZip64, kExtraPadding);
      }
      extra = extra.subspan(kExtraHeadBytes + length);
    }
    return zip64;
  }

  // Compares the local header with the record, and the descriptor if there is one; returns the end of the entry.
  // `limit` is the start of the next entry or of the directory.
  std::uint64_t check_local(Record& record, std::uint64_t limit) {
    const std::uint64_t at = record.header_at;
    FieldReader fields(window_.view(at, kLocalBytes, "local header"));
    require_equal(at, "signature of a local header", fields.u32(), kLocalSignature);
    const std::uint16_t needed = fields.u16();
    if (needed != record.needed && (is_by_torch(record) || !is_version(needed) || needed > record.needed)) {
      corrupt(at, "version needed is {}, expected {} from the directory", needed, record.needed);
    }
    require_equal(at, "flags", fields.u16(), record.flags);
    require_equal(at, "compression method", fields.u16(), record.method);
    require_equal(at, "time", fields.u16(), record.time);
    require_equal(at, "date", fields.u16(), record.date);
    const std::uint32_t crc = fields.u32(), stored32 = fields.u32(), size32 = fields.u32();
    const std::size_t name_bytes = fields.u16(), extra_bytes = fields.u16();
    const ByteView rest = window_.view(at + kLocalBytes, name_bytes + extra_bytes, "local header");
    if (as_text(rest.first(name_bytes)) != record.name) {
      corrupt(at, "name is '{}', expected '{}' from the directory", printable(as_text(rest.first(name_bytes))),
              printable(record.name));
    }
    const Zip64Values zip64 = read_extra(at, rest.subspan(name_bytes), record);
    check_local_sizes(record, crc, stored32, size32, zip64);
    check_supported(record);
    record.data_at = at + kLocalBytes + name_bytes + extra_bytes;
    if (record.data_at > limit || record.size_bytes > limit - record.data_at) {
      corrupt(at,
              "entry '{}' has {} bytes from byte {} on, expected it to end by byte {}, where the next record starts",
              printable(record.name), record.size_bytes, window_.in_source(record.data_at), window_.in_source(limit));
    }
    return check_descriptor(record, limit, zip64.present);
  }

  void check_local_sizes(const Record& record, std::uint32_t crc, std::uint32_t stored32, std::uint32_t size32,
                         const Zip64Values& zip64) const {
    const std::uint64_t at = record.header_at;
    std::uint64_t size = size32, stored = stored32;
    if (is_by_torch(record)) {
      // Sizes are in the descriptor. As in the directory, the zip64 field has the ones that do not fit into 32 bits.
      const bool wide_size = record.size_bytes >= kMax32, wide_offset = at >= kMax32;
      const std::size_t expected = (wide_size ? 2u : 0u) + (wide_offset ? 1u : 0u);
      require_equal(at, "number of zip64 values", zip64.count, expected);
      if (zip64.present != (expected > 0)) corrupt(at, "an empty zip64 extra field, expected none");
      if (wide_size) {
        require_equal(at, "size", zip64.values[0], record.size_bytes);
        if (zip64.values[1] != 0) require_equal(at, "stored size", zip64.values[1], record.stored_bytes);
      }
      if (wide_offset) require_equal(at, "offset", zip64.values[expected - 1], at);
    } else if (zip64.present) {
      require_equal(at, "number of zip64 values", zip64.count, 2);
      if (size32 == kMax32) size = zip64.values[0];
      if (stored32 == kMax32) stored = zip64.values[1];
    }
    if (record.has_descriptor() && crc == 0 && size == 0 && stored == 0) return;
    if (is_by_torch(record) && record.has_descriptor()) {
      corrupt(at, "CRC-32 and sizes of entry '{}' are set in the local header, expected 0", printable(record.name));
    }
    require_equal(at, "CRC-32", crc, record.crc32);
    require_equal(at, "size", size, record.size_bytes);
    require_equal(at, "stored size", stored, record.stored_bytes);
  }

  void check_supported(const Record& record) const {
    const auto unsupported = [&](std::string_view what) {
      fail(ErrorCode::unsupported, "{}: zip, byte {}: entry '{}' {}", window_.name(),
           window_.in_source(record.header_at), printable(record.name), what);
    };
    if ((record.flags & ~(kFlagDescriptor | kFlagUtf8)) != 0 && record.method == 0) {
      unsupported(fmt::format("is encrypted or patched (flags {:#06x}), expected a plain entry", record.flags));
    }
    if (record.method != 0) {
      unsupported(fmt::format(
          "is compressed (method {}), expected a stored entry, as torch.save writes it (TorchScript compresses)",
          record.method));
    }
    require_equal(record.header_at, "stored size", record.stored_bytes, record.size_bytes);
    if (record.size_bytes == 0) require_equal(record.header_at, "CRC-32 of no bytes", record.crc32, 0);
    if (record.name.back() == '/') require_equal(record.header_at, "size of a folder", record.size_bytes, 0);
  }

  std::uint64_t check_descriptor(const Record& record, std::uint64_t limit, bool local_zip64) {
    const std::uint64_t at = record.data_at + record.size_bytes;
    if (!record.has_descriptor()) return at;
    std::size_t length = local_zip64 ? kDescriptor64Bytes : kDescriptorBytes;
    if (!is_by_torch(record) && limit - at == kDescriptor64Bytes) length = kDescriptor64Bytes;
    FieldReader fields(window_.view(at, length, "data descriptor"));
    require_equal(at, "signature of a data descriptor", fields.u32(), kDescriptorSignature);
    require_equal(at, "CRC-32", fields.u32(), record.crc32);
    const bool wide = length == kDescriptor64Bytes;
    require_equal(at, "stored size", wide ? fields.u64() : fields.u32(), record.stored_bytes);
    require_equal(at, "size", wide ? fields.u64() : fields.u32(), record.size_bytes);
    return at + length;
  }

  Directory take_directory() {
    Directory directory;
    directory.entries.reserve(records_.size());
    for (Record& record : records_) {
      directory.entries.push_back({std::move(record.name), record.crc32, record.size_bytes,
                                   window_.in_source(record.header_at), window_.in_source(record.data_at)});
    }
    directory.by_name.resize(directory.entries.size());
    std::iota(directory.by_name.begin(), directory.by_name.end(), 0u);
    const auto name_of = [&](std::uint32_t i) -> const std::string& { return directory.entries[i].name; };
    std::sort(directory.by_name.begin(), directory.by_name.end(),
              [&](std::uint32_t a, std::uint32_t b) { return compare_names(name_of(a), name_of(b)) < 0; });
    for (std::size_t i = 1; i < directory.by_name.size(); ++i) {
      const Entry& entry = directory.entries[directory.by_name[i]];
      if (compare_names(entry.name, name_of(directory.by_name[i - 1])) == 0) {
        fail(ErrorCode::corrupt,
             "{}: zip, byte {}: duplicate entry name '{}', expected names that are unique without case", window_.name(),
             entry.header_offset_bytes, printable(entry.name));
      }
    }
    return directory;
  }

  Window& window_;
  const End end_;
  std::vector<Record> records_;
};

}  // namespace

const Entry* Directory::find(std::string_view name) const {
  const auto found = std::lower_bound(by_name.begin(), by_name.end(), name, [&](std::uint32_t i, std::string_view n) {
    return compare_names(entries[i].name, n) < 0;
  });
  return found != by_name.end() && entries[*found].name == name ? &entries[*found] : nullptr;
}

bool looks_like_zip(ByteView first_bytes) {
  return first_bytes.size() >= 4 && load_little_endian<std::uint32_t>(first_bytes.data()) == kLocalSignature;
}

bool looks_like_zip(const ByteSource& source) {
  std::array<std::uint8_t, 4> first;
  if (source.size_bytes() < first.size()) return false;
  source.read_at(0, first);
  return looks_like_zip(ByteView(first));
}

Directory read_directory(Window& window) { return Reader(window).read(); }

Directory read_directory(const ByteSource& source, std::uint64_t offset_bytes, std::uint64_t length_bytes) {
  Window window(source, offset_bytes, length_bytes);
  return read_directory(window);
}

}  // namespace tessera::zip

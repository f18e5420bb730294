#include "format/zip/end.h"

#include <algorithm>

#include "format/zip/format.h"
#include "tessera/base/error.h"

namespace tessera::zip {
namespace {

constexpr std::uint64_t kMaxDirectoryBytes = 1ull << 30;
constexpr std::uint64_t kTailBytes = 16u << 10;  // normally holds the entire directory
constexpr std::uint64_t kMaxCommentBytes = kMax16;

class EndReader {
 public:
  explicit EndReader(Window& window) : window_(window) {}

  End read() {
    read_end();
    return end_;
  }

 private:
  template <typename... Args>
  [[noreturn]] void corrupt(std::uint64_t at, fmt::format_string<Args...> format, Args&&... args) const {
    window_.corrupt(at, format, std::forward<Args>(args)...);
  }
  void require_equal(std::uint64_t at, std::string_view what, std::uint64_t found, std::uint64_t expected) const {
    window_.require_equal(at, what, found, expected);
  }

  std::uint64_t find_end() {
    const std::uint64_t length = window_.length();
    if (length < kEndBytes) corrupt(0, "{} bytes, expected at least {} for an archive", length, kEndBytes);
    for (const std::uint64_t tail_bytes : {kTailBytes, kEndBytes + kMaxCommentBytes}) {
      const ByteView tail = window_.view_tail(tail_bytes);
      for (std::size_t comment = 0; comment + kEndBytes <= tail.size() && comment <= kMaxCommentBytes; ++comment) {
        const std::uint8_t* record = tail.data() + tail.size() - kEndBytes - comment;
        if (load_little_endian<std::uint32_t>(record) == kEndSignature &&
            load_little_endian<std::uint16_t>(record + kEndBytes - 2) == comment) {
          return length - kEndBytes - comment;
        }
      }
    }
    const std::uint64_t searched = std::min<std::uint64_t>(length, kEndBytes + kMaxCommentBytes);
    corrupt(length - kEndBytes,
            "no end record from byte {} on, expected one that reaches to the end of the archive at byte {}",
            window_.in_source(length - searched), window_.in_source(length));
  }

  void read_end() {
    const std::uint64_t end_at = find_end();
    FieldReader fields(window_.view(end_at + 4, kEndBytes - 4, "end record"));
    const std::uint16_t disk = fields.u16(), directory_disk = fields.u16();
    const std::uint16_t entries_here = fields.u16(), entries = fields.u16();
    const std::uint32_t size = fields.u32(), offset = fields.u32();
    end_.entries = entries;
    end_.directory_bytes = size;
    end_.directory_at = offset;

    std::uint64_t directory_end = end_at;
    if (end_at >= kLocatorBytes) {
      const ByteView locator = window_.view(end_at - kLocatorBytes, kLocatorBytes, "zip64 locator");
      if (load_little_endian<std::uint32_t>(locator.data()) == kLocatorSignature) {
        directory_end = read_end64(end_at - kLocatorBytes);
        require_narrowed(end_at, "number of entries", entries, end_.entries, kMax16);
        require_narrowed(end_at, "directory size", size, end_.directory_bytes, kMax32);
        require_narrowed(end_at, "directory offset", offset, end_.directory_at, kMax32);
        require_narrowed(end_at, "disk number", disk, 0, kMax16);
        require_narrowed(end_at, "disk of the directory", directory_disk, 0, kMax16);
      }
    }
    require_equal(end_at, "number of entries on this disk", entries_here, entries);
    if (!end_.has_zip64 && (disk != 0 || directory_disk != 0)) {
      fail(ErrorCode::unsupported, "{}: zip, byte {}: archive split over {} disks, expected one file", window_.name(),
           window_.in_source(end_at), disk + 1u);
    }
    if (end_.directory_at > directory_end || end_.directory_bytes != directory_end - end_.directory_at) {
      corrupt(end_at, "the directory of {} bytes at offset {} ends elsewhere, expected at offset {}",
              end_.directory_bytes, end_.directory_at, directory_end);
    }
    if (end_.directory_bytes > kMaxDirectoryBytes || end_.entries > end_.directory_bytes / kRecordBytes) {
      corrupt(end_at, "a directory of {} bytes with {} entries, expected at most {} bytes and at least {} per entry",
              end_.directory_bytes, end_.entries, kMaxDirectoryBytes, kRecordBytes);
    }
  }

  // A field of the end record must equal the zip64 field, or be all ones, which refers to it.
  void require_narrowed(std::uint64_t at, std::string_view what, std::uint64_t narrow, std::uint64_t wide,
                        std::uint64_t all_ones) const {
    if (narrow != wide && narrow != all_ones)
      corrupt(at, "{} is {}, expected {} from the zip64 end record", what, narrow, wide);
  }

  // Returns the start of the zip64 end record, which is the end of the directory.
  std::uint64_t read_end64(std::uint64_t locator_at) {
    FieldReader locator(window_.view(locator_at + 4, kLocatorBytes - 4, "zip64 locator"));
    require_equal(locator_at, "disk of the zip64 end record", locator.u32(), 0);
    const std::uint64_t at = locator.u64();
    require_equal(locator_at, "number of disks", locator.u32(), 1);
    if (locator_at < kEnd64Bytes || at != locator_at - kEnd64Bytes) {
      corrupt(locator_at, "the zip64 end record is at offset {}, expected {} bytes before its locator at offset {}", at,
              kEnd64Bytes, locator_at);
    }
    FieldReader fields(window_.view(at, kEnd64Bytes, "zip64 end record"));
    require_equal(at, "signature of the zip64 end record", fields.u32(), kEnd64Signature);
    require_equal(at, "size of the zip64 end record", fields.u64(), kEnd64Bytes - 12);
    end_.has_zip64 = true;
    end_.zip64_made_by = fields.u16();
    const std::uint16_t needed = fields.u16();
    if (needed != kZip64Version && (end_.zip64_made_by == kTorchEndMadeBy || !is_version(needed))) {
      corrupt(at, "version needed by the zip64 end record is {}, expected {}", needed,
              end_.zip64_made_by == kTorchEndMadeBy ? fmt::to_string(kZip64Version)
                                                    : fmt::format("{} to {}", kLeastVersion, kMostVersion));
    }
    require_equal(at, "disk number", fields.u32(), 0);
    require_equal(at, "disk of the directory", fields.u32(), 0);
    const std::uint64_t entries_here = fields.u64();
    end_.entries = fields.u64();
    require_equal(at, "number of entries on this disk", entries_here, end_.entries);
    end_.directory_bytes = fields.u64();
    end_.directory_at = fields.u64();
    return at;
  }

  Window& window_;
  End end_;
};

}  // namespace

End read_end(Window& window) { return EndReader(window).read(); }

}  // namespace tessera::zip

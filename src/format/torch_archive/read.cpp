// Opens an archive written by torch.save.

#include <algorithm>
#include <charconv>

#include "format/torch_archive/names.h"
#include "format/zip/read.h"
#include "tessera/base/crc32.h"
#include "tessera/base/error.h"
#include "tessera/format/torch_archive.h"

namespace tessera::torch_archive {
namespace {

constexpr std::uint64_t kMaxRecordBytes = 4096;  // limit for the small entries, which have 1 to 40 bytes
constexpr std::uint64_t kMaxVersion = 10;        // the highest that PyTorch reads; it writes 3

class Opener {
 public:
  Opener(const ByteSource& source, std::uint64_t offset_bytes, std::uint64_t length_bytes)
      : window_(source, offset_bytes, length_bytes) {}

  Archive open(const OpenLimits& limits) {
    archive_.name = window_.name();
    check_kind();
    archive_.directory = zip::read_directory(window_);
    find_prefix();
    read_small_entries();
    const zip::Entry& entry = *entry_of(kPickleName);
    const auto pickle = std::make_shared<const Bytes>(read_entry(entry, limits.pickle_bytes));
    pickle::ReadResult result = pickle::read(pickle, archive_.name, limits.pickle, entry.data_offset_bytes);
    if (result.length_bytes != entry.size_bytes) {
      corrupt(entry, "{} bytes after the end of the pickle, expected none", entry.size_bytes - result.length_bytes);
    }
    archive_.tree = std::move(result.tree);
    return std::move(archive_);
  }

 private:
  template <typename... Args>
  [[noreturn]] void corrupt(const zip::Entry& entry, fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorCode::corrupt, "{}: torch.save archive, entry '{}' at byte {}: {}", archive_.name, printable(entry.name),
         entry.data_offset_bytes, fmt::format(format, std::forward<Args>(args)...));
  }
  [[noreturn]] void unsupported(std::string_view what) const {
    fail(ErrorCode::unsupported, "{}: at byte {}: {}", archive_.name, window_.in_source(0), what);
  }

  void check_kind() {
    const ByteView first = window_.view(0, std::min<std::uint64_t>(window_.length(), 16), "archive");
    if (looks_like_legacy(first)) {
      unsupported(
          "the form that torch.save had before PyTorch 1.6, expected a zip; load and save it again with a newer "
          "PyTorch");
    }
    if (!zip::looks_like_zip(first)) window_.corrupt(0, "no local header, expected the start of a torch.save archive");
  }

  const zip::Entry* entry_of(std::string_view name) const {
    return archive_.directory.find(archive_.prefix + "/" + std::string(name));
  }

  void find_prefix() {
    const zip::Entry& first = archive_.directory.entries.front();
    const std::size_t slash = first.name.find('/');
    if (slash == std::string::npos) corrupt(first, "is not in a folder, expected a top folder");
    archive_.prefix = first.name.substr(0, slash);
    if (entry_of(kTorchScriptName) != nullptr) unsupported("a TorchScript archive, expected a torch.save archive");
    if (entry_of(kPickleName) == nullptr) {
      unsupported(fmt::format("a zip without the entry '{}/{}', expected an archive that torch.save wrote",
                              printable(archive_.prefix), kPickleName));
    }
  }

  Bytes read_entry(const zip::Entry& entry, std::uint64_t limit) {
    if (entry.size_bytes > limit) corrupt(entry, "has {} bytes, expected at most {}", entry.size_bytes, limit);
    Bytes bytes(entry.size_bytes);
    window_.read(entry.data_offset_bytes - window_.in_source(0), bytes);
    const std::uint32_t found = crc32(bytes);
    if (found != entry.crc32)
      corrupt(entry, "CRC-32 is {:08x}, expected {:08x} from the zip directory", found, entry.crc32);
    return bytes;
  }

  // Returns the contents of a small entry without the line break, or nothing if there is no such entry.
  std::optional<std::string> read_text(std::string_view name) {
    const zip::Entry* entry = entry_of(name);
    if (entry == nullptr) return std::nullopt;
    std::string text(as_text(read_entry(*entry, kMaxRecordBytes)));
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
    return text;
  }

  std::optional<std::uint64_t> read_number(std::string_view name) {
    const std::optional<std::string> text = read_text(name);
    if (!text) return std::nullopt;
    std::uint64_t number = 0;
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
    if (error != std::errc() || end != text->data() + text->size()) {
      corrupt(*entry_of(name), "is '{}', expected a number", printable(*text));
    }
    return number;
  }

  void read_small_entries() {
    const std::optional<std::uint64_t> version = read_number(kVersionName);
    if (!version) {
      fail(ErrorCode::corrupt, "{}: torch.save archive at byte {}: no entry '{}/{}', expected one with its version",
           archive_.name, window_.in_source(0), printable(archive_.prefix), kVersionName);
    }
    if (*version == 0 || *version > kMaxVersion)
      unsupported(fmt::format("torch.save archive version {}, expected 1 to {}", *version, kMaxVersion));
    archive_.version = static_cast<int>(*version);
    read_number(kFormatVersionName);
    read_number(kAlignmentName);
    read_text(kIdName);
    archive_.byte_order = read_text(kByteOrderName).value_or("little");
    if (archive_.byte_order == "big") unsupported("a torch.save archive of big-endian data, expected little-endian");
    if (archive_.byte_order != "little") {
      corrupt(*entry_of(kByteOrderName), "is '{}', expected 'little' or 'big'", printable(archive_.byte_order));
    }
  }

  zip::Window window_;
  Archive archive_;
};

}  // namespace

const zip::Entry& Archive::storage_entry(const StorageRef& storage) const {
  const zip::Entry* entry = directory.find(prefix + std::string(kStorageFolder) + storage.key);
  if (entry == nullptr) {
    fail(ErrorCode::corrupt,
         "{}: torch.save archive: no entry '{}{}{}', expected one of at least {} bytes for a storage", name,
         printable(prefix), kStorageFolder, printable(storage.key), storage.size_bytes);
  }
  if (entry->size_bytes < static_cast<std::uint64_t>(storage.size_bytes)) {
    fail(ErrorCode::corrupt,
         "{}: torch.save archive, entry '{}' at byte {}: {} bytes, expected at least {} for its tensors", name,
         printable(entry->name), entry->data_offset_bytes, entry->size_bytes, storage.size_bytes);
  }
  return *entry;
}

Archive open(const ByteSource& source, std::uint64_t offset_bytes, std::uint64_t length_bytes,
             const OpenLimits& limits) {
  return Opener(source, offset_bytes, length_bytes).open(limits);
}

bool looks_like_legacy(ByteView first_bytes) {
  // A pickle of protocol 2 of the magic number, an int of ten bytes.
  static constexpr std::uint8_t kMagic[] = {0x80, 2,    0x8a, 10,   0x6c, 0xfc, 0x9c, 0x46,
                                            0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, '.'};
  return first_bytes.size() >= sizeof kMagic && std::equal(std::begin(kMagic), std::end(kMagic), first_bytes.begin());
}

}  // namespace tessera::torch_archive

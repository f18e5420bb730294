#include "checkpoint/transform/plain_items.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::checkpoint {

namespace {

constexpr std::uint64_t kReadBytes = std::uint64_t{1} << 20;
// Larger items are stored in a file.
constexpr std::uint64_t kInMemoryBytes = std::uint64_t{4} << 20;

// Creates a file that is removed when it is closed.
File temporary_file() {
  static std::atomic<std::uint64_t> count = 0;
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::temp_directory_path(error);
  if (error) fail(ErrorCode::io, "find the directory for temporary files (TMPDIR): {}", error.message());
  const std::filesystem::path path = folder / fmt::format("tessera-item-{}-{}", ::getpid(), count.fetch_add(1));
  File file = File::create_new(path);
  std::filesystem::remove(path, error);
  if (error) fail(ErrorCode::io, "remove {}: {}", path.string(), error.message());
  return file;
}

// The files of all items of the process, of which descriptors and the directory for temporary files are.
class FilesOfItems {
 public:
  void add_file() { ++files_; }
  void add_bytes(std::uint64_t bytes) { bytes_ += bytes; }
  void remove_file(std::uint64_t bytes) {
    bytes_ -= bytes;
    --files_;
  }
  // Whether there should be fewer.
  bool are_many() const {
    constexpr std::uint64_t kManyBytes = std::uint64_t{4} << 30;
    rlimit descriptors{};
    const bool is_known = ::getrlimit(RLIMIT_NOFILE, &descriptors) == 0;
    return bytes_ > kManyBytes || (is_known && files_ > descriptors.rlim_cur / 2);
  }

 private:
  std::atomic<std::uint64_t> files_ = 0, bytes_ = 0;
};

FilesOfItems& files_of_items() {
  static FilesOfItems files;
  return files;
}

// A temporary file that is counted.
class FileOfItem {
 public:
  FileOfItem() : file_(temporary_file()) { files_of_items().add_file(); }
  FileOfItem(const FileOfItem&) = delete;
  FileOfItem& operator=(const FileOfItem&) = delete;
  ~FileOfItem() { files_of_items().remove_file(size_bytes_); }

  void append(ByteView bytes) {
    file_.write_at(size_bytes_, bytes);
    size_bytes_ += bytes.size();
    files_of_items().add_bytes(bytes.size());
  }
  const File& file() const { return file_; }

 private:
  File file_;
  std::uint64_t size_bytes_ = 0;
};

// An item that is written once and then read.
class WrittenItem final : public ByteSink, public PlainItem {
 public:
  WrittenItem(std::string name, std::uint64_t limit_bytes, std::shared_ptr<MemoryOfItems> memory)
      : name_(std::move(name)), limit_bytes_(limit_bytes), memory_of_items_(std::move(memory)) {}
  ~WrittenItem() override { memory_of_items_->give_back(memory_.size()); }

  void write(ByteView bytes) override {
    if (bytes.size() > limit_bytes_ - size_bytes_) {
      fail(ErrorCode::corrupt, "without its transforms the item has more than {} bytes, expected at most that many",
           limit_bytes_);
    }
    const bool fits = !file_ && size_bytes_ + bytes.size() <= kInMemoryBytes && memory_of_items_->take(bytes.size());
    if (!file_ && !fits) {
      file_.emplace();
      file_->append(memory_);
      memory_of_items_->give_back(memory_.size());
      memory_ = Bytes();
    }
    if (file_) {
      file_->append(bytes);
    } else {
      append(memory_, bytes);
    }
    size_bytes_ += bytes.size();
  }
  void finish() override {}

  void read_at(std::uint64_t offset_bytes, MutableByteView out) const override {
    if (file_) return file_->file().read_at(offset_bytes, out);
    MemorySource(memory_, name_).read_at(offset_bytes, out);
  }
  std::uint64_t size_bytes() const override { return size_bytes_; }
  const std::string& name() const override { return name_; }
  bool has_file() const override { return file_.has_value(); }

 private:
  std::string name_;
  std::uint64_t limit_bytes_;
  const std::shared_ptr<MemoryOfItems> memory_of_items_;
  std::uint64_t size_bytes_ = 0;
  Bytes memory_;
  std::optional<FileOfItem> file_;
};

}  // namespace

std::shared_ptr<const PlainItem> undo_transforms(const ByteSource& file, std::uint64_t offset_bytes,
                                                 std::uint64_t length_bytes, std::span<const TransformPtr> transforms,
                                                 std::uint64_t limit_bytes,
                                                 const std::shared_ptr<MemoryOfItems>& memory) {
  auto item = std::make_shared<WrittenItem>(fmt::format("the item at byte {} of {}", offset_bytes, file.name()),
                                            limit_bytes, memory);
  std::vector<std::unique_ptr<ByteSink>> streams;  // from the item back to the file
  ByteSink* to = item.get();
  for (std::size_t i = transforms.size(); i-- > 0;) {
    streams.push_back(transforms[i]->undo(*to));
    to = streams.back().get();
  }
  Bytes block(std::min(kReadBytes, length_bytes));
  for (std::uint64_t done = 0; done < length_bytes;) {
    const MutableByteView part = MutableByteView(block).first(std::min(kReadBytes, length_bytes - done));
    file.read_at(offset_bytes + done, part);
    to->write(part);
    done += part.size();
  }
  to->finish();
  return item;
}

std::shared_ptr<const ByteSource> PlainItems::get(std::uint32_t number, Make make) {
  std::shared_ptr<Slot> slot;
  {
    const std::lock_guard lock(mutex_);
    const auto found =
        std::find_if(slots_.begin(), slots_.end(), [&](const auto& each) { return each.first == number; });
    if (found != slots_.end()) {
      slot = found->second;
      slots_.erase(found);
    } else {
      slot = std::make_shared<Slot>();
    }
    slots_.emplace_back(number, slot);
    drop_oldest();
  }
  const std::lock_guard lock(slot->mutex);
  if (slot->item != nullptr) return slot->item;
  slot->item = make(memory_);
  const std::lock_guard all_lock(mutex_);
  const bool is_kept = std::any_of(slots_.begin(), slots_.end(), [&](const auto& each) { return each.second == slot; });
  if (is_kept) {
    slot->has_file = slot->item->has_file();
    drop_oldest();
  }
  return slot->item;
}

void PlainItems::drop_oldest() {
  while (slots_.size() > kKept) slots_.pop_front();
  // The memory of the others is the checkpoint's own.
  const auto has_file = [](const auto& each) { return each.second->has_file; };
  auto files = static_cast<std::size_t>(std::ranges::count_if(slots_, has_file));
  for (; files > kAlwaysKept && files_of_items().are_many(); --files) {
    slots_.erase(std::ranges::find_if(slots_, has_file));
  }
}

}  // namespace tessera::checkpoint

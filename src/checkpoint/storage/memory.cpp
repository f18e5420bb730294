#include <algorithm>
#include <map>
#include <mutex>

#include "tessera/base/error.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {
namespace {

// The contents of a file, which may be read and written concurrently.
struct Contents {
  mutable std::mutex mutex;
  Bytes bytes;
};
using ContentsPtr = std::shared_ptr<Contents>;

class MemoryOutput final : public OutputFile {
 public:
  explicit MemoryOutput(ContentsPtr contents) : contents_(std::move(contents)) {}
  void write_at(std::uint64_t offset_bytes, ByteView bytes) override {
    const std::lock_guard lock(contents_->mutex);
    if (contents_->bytes.size() < offset_bytes + bytes.size()) contents_->bytes.resize(offset_bytes + bytes.size());
    std::copy(bytes.begin(), bytes.end(), contents_->bytes.begin() + static_cast<std::ptrdiff_t>(offset_bytes));
  }
  void finish() override {}

 private:
  ContentsPtr contents_;
};

class MemoryFile final : public ByteSource {
 public:
  MemoryFile(ContentsPtr contents, std::string name) : contents_(std::move(contents)), name_(std::move(name)) {}
  void read_at(std::uint64_t offset_bytes, MutableByteView out) const override {
    const std::lock_guard lock(contents_->mutex);
    MemorySource(contents_->bytes, name_).read_at(offset_bytes, out);
  }
  std::uint64_t size_bytes() const override {
    const std::lock_guard lock(contents_->mutex);
    return contents_->bytes.size();
  }
  const std::string& name() const override { return name_; }

 private:
  ContentsPtr contents_;
  std::string name_;
};

class MemoryStorage final : public Storage {
 public:
  explicit MemoryStorage(std::string name) : name_(std::move(name)) {}

  const std::string& name() const override { return name_; }
  void prepare() override {}
  void sync() override {}

  std::vector<std::string> list() const override {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> names;
    names.reserve(files_.size());
    for (const auto& [name, contents] : files_) names.push_back(name);
    return names;
  }

  std::optional<std::uint64_t> size_bytes(const std::string& name) const override {
    const ContentsPtr contents = find(name);
    if (contents == nullptr) return std::nullopt;
    const std::lock_guard lock(contents->mutex);
    return contents->bytes.size();
  }

  std::shared_ptr<const ByteSource> open(const std::string& name) const override {
    ContentsPtr contents = find(name);
    if (contents == nullptr) fail(ErrorCode::not_found, "open {}: no such file", name_of(name));
    return std::make_shared<const MemoryFile>(std::move(contents), name_of(name));
  }

  std::unique_ptr<OutputFile> create(const std::string& name, std::uint64_t size_bytes) override {
    auto contents = std::make_shared<Contents>();
    contents->bytes.resize(size_bytes);
    const std::lock_guard lock(mutex_);
    if (!files_.emplace(name, contents).second) {
      fail(ErrorCode::invalid_argument, "create {}: the file exists, expected a new name", name_of(name));
    }
    return std::make_unique<MemoryOutput>(std::move(contents));
  }

  void rename(const std::string& from, const std::string& to) override {
    const std::lock_guard lock(mutex_);
    const auto found = files_.find(from);
    if (found == files_.end()) fail(ErrorCode::not_found, "rename {}: no such file", name_of(from));
    ContentsPtr contents = std::move(found->second);
    files_.erase(found);
    files_.insert_or_assign(to, std::move(contents));
  }

  bool rename_new(const std::string& from, const std::string& to) override {
    const std::lock_guard lock(mutex_);
    const auto found = files_.find(from);
    if (found == files_.end()) fail(ErrorCode::not_found, "rename {}: no such file", name_of(from));
    if (!files_.emplace(to, found->second).second) return false;
    files_.erase(found);
    return true;
  }

  void remove(const std::string& name) override {
    const std::lock_guard lock(mutex_);
    files_.erase(name);
  }

 private:
  ContentsPtr find(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    const auto found = files_.find(name);
    return found == files_.end() ? nullptr : found->second;
  }

  std::string name_;
  mutable std::mutex mutex_;
  std::map<std::string, ContentsPtr> files_;
};

}  // namespace

std::shared_ptr<Storage> memory_storage(std::string name) { return std::make_shared<MemoryStorage>(std::move(name)); }

}  // namespace tessera::checkpoint

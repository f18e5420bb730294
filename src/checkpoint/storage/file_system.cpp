#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

class FileSystemOutput final : public OutputFile {
 public:
  explicit FileSystemOutput(File file) : file_(std::move(file)) {}
  void write_at(std::uint64_t offset_bytes, ByteView bytes) override { file_.write_at(offset_bytes, bytes); }
  void start_writeback(std::uint64_t offset_bytes, std::uint64_t length_bytes) override {
    file_.start_writeback(offset_bytes, length_bytes);
  }
  void finish() override {
    file_.sync();
    file_.close();
  }

 private:
  File file_;
};

class FileSystemStorage final : public Storage {
 public:
  explicit FileSystemStorage(fs::path directory) : directory_(std::move(directory)), name_(directory_.string()) {
    if (name_.size() > 1 && name_.back() == '/') name_.pop_back();
  }

  const std::string& name() const override { return name_; }

  void prepare() override {
    if (directory_.empty()) {
      fail(ErrorCode::invalid_argument, "create directory: the path is empty, expected the path of a checkpoint");
    }
    std::error_code error;
    const fs::path absolute = fs::absolute(directory_, error);
    if (error) fail(ErrorCode::io, "create directory {}: {}", name_, error.message());
    std::vector<fs::path> made;  // new directories, whose parents must be synced
    for (fs::path path = absolute.lexically_normal(); !fs::exists(path, error); path = path.parent_path()) {
      if (path == path.parent_path()) break;
      made.push_back(path);
    }
    fs::create_directories(directory_, error);
    if (error) fail(ErrorCode::io, "create directory {}: {}", name_, error.message());
    for (const fs::path& path : made) sync_directory(path.parent_path());
  }

  std::vector<std::string> list() const override {
    std::vector<std::string> names;
    std::error_code error;
    for (fs::directory_iterator it(directory_, error), end; !error && it != end; it.increment(error)) {
      std::error_code ignored;
      if (it->is_regular_file(ignored)) names.push_back(it->path().filename().string());
    }
    if (error && error != std::errc::no_such_file_or_directory) {
      fail(ErrorCode::io, "list {}: {}", name_, error.message());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  std::optional<std::uint64_t> size_bytes(const std::string& name) const override {
    std::error_code error;
    const fs::path path = directory_ / name;
    const fs::file_status status = fs::status(path, error);
    if (!fs::exists(status)) return std::nullopt;
    if (!fs::is_regular_file(status)) return File::open_read(path).size_bytes();  // throws, naming its type
    const std::uintmax_t size = fs::file_size(path, error);
    return error ? std::nullopt : std::optional<std::uint64_t>(size);
  }

  std::shared_ptr<const ByteSource> open(const std::string& name) const override {
    return std::make_shared<const File>(File::open_read(directory_ / name));
  }

  std::unique_ptr<OutputFile> create(const std::string& name, std::uint64_t size_bytes) override {
    const fs::path path = directory_ / name;
    File file = File::create_new(path);
    try {
      file.preallocate(size_bytes);
    } catch (...) {
      std::error_code ignored;
      fs::remove(path, ignored);
      throw;
    }
    return std::make_unique<FileSystemOutput>(std::move(file));
  }

  void rename(const std::string& from, const std::string& to) override {
    rename_replacing(directory_ / from, directory_ / to);
  }

  bool rename_new(const std::string& from, const std::string& to) override {
    try {
      tessera::rename_new(directory_ / from, directory_ / to);
      return true;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::invalid_argument) return false;
      if (!size_bytes(from)) fail(ErrorCode::not_found, "rename {}: no such file", name_of(from));
      throw;
    }
  }

  void remove(const std::string& name) override {
    std::error_code error;
    fs::remove(directory_ / name, error);
    if (error) fail(ErrorCode::io, "remove {}: {}", name_of(name), error.message());
  }

  void sync() override { sync_directory(directory_); }

 private:
  fs::path directory_;
  std::string name_;
};

}  // namespace

std::shared_ptr<Storage> file_system_storage(fs::path directory) {
  return std::make_shared<FileSystemStorage>(std::move(directory));
}

void write_new_file(Storage& storage, const std::string& name, ByteView bytes) {
  const std::unique_ptr<OutputFile> file = storage.create(name, bytes.size());
  file->write_at(0, bytes);
  file->finish();
}

Bytes read_file(const Storage& storage, const std::string& name, std::uint64_t limit_bytes) {
  const std::shared_ptr<const ByteSource> file = storage.open(name);
  require_size_within(*file, limit_bytes);
  return read_all(*file);
}

}  // namespace tessera::checkpoint

#include <atomic>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/checkpoint/faulty_storage.h"

namespace tessera::checkpoint {
namespace {

// Decides before each step whether it fails. Shared by the storage and its files.
class Judge {
 public:
  explicit Judge(std::function<StorageFault(const StorageEvent&)> decide) : decide_(std::move(decide)) {}

  // Throws if the step must fail. Returns whether a write must be short.
  bool ask(StorageStep step, const std::string& file) {
    switch (decide_({step, file, next_++})) {
      case StorageFault::none:
        return false;
      case StorageFault::short_write:
        if (step == StorageStep::write) return true;
        [[fallthrough]];
      case StorageFault::io_error:
        refuse(step, file);
    }
    return false;
  }
  [[noreturn]] static void refuse(StorageStep step, const std::string& file) {
    fail(ErrorCode::io, "{} {}: failed on command", storage_step_name(step), file);
  }

 private:
  std::function<StorageFault(const StorageEvent&)> decide_;
  std::atomic<std::uint64_t> next_ = 0;
};
using JudgePtr = std::shared_ptr<Judge>;

class FaultyOutput final : public OutputFile {
 public:
  FaultyOutput(std::unique_ptr<OutputFile> inner, JudgePtr judge, std::string name)
      : inner_(std::move(inner)), judge_(std::move(judge)), name_(std::move(name)) {}
  void write_at(std::uint64_t offset_bytes, ByteView bytes) override {
    if (judge_->ask(StorageStep::write, name_)) {
      inner_->write_at(offset_bytes, bytes.first(bytes.size() / 2));
      Judge::refuse(StorageStep::write, name_);
    }
    inner_->write_at(offset_bytes, bytes);
  }
  void start_writeback(std::uint64_t offset_bytes, std::uint64_t length_bytes) override {
    inner_->start_writeback(offset_bytes, length_bytes);
  }
  void finish() override {
    judge_->ask(StorageStep::finish, name_);
    inner_->finish();
  }

 private:
  std::unique_ptr<OutputFile> inner_;
  JudgePtr judge_;
  std::string name_;
};

class FaultyFile final : public ByteSource {
 public:
  FaultyFile(std::shared_ptr<const ByteSource> inner, JudgePtr judge)
      : inner_(std::move(inner)), judge_(std::move(judge)) {}
  void read_at(std::uint64_t offset_bytes, MutableByteView out) const override {
    judge_->ask(StorageStep::read, name());
    inner_->read_at(offset_bytes, out);
  }
  std::uint64_t size_bytes() const override { return inner_->size_bytes(); }
  const std::string& name() const override { return inner_->name(); }

 private:
  std::shared_ptr<const ByteSource> inner_;
  JudgePtr judge_;
};

class FaultyStorage final : public Storage {
 public:
  FaultyStorage(std::shared_ptr<Storage> inner, std::function<StorageFault(const StorageEvent&)> decide)
      : inner_(std::move(inner)), judge_(std::make_shared<Judge>(std::move(decide))) {}
  const std::string& name() const override { return inner_->name(); }
  void prepare() override {
    judge_->ask(StorageStep::prepare, {});
    inner_->prepare();
  }
  std::vector<std::string> list() const override {
    judge_->ask(StorageStep::list, {});
    return inner_->list();
  }
  std::optional<std::uint64_t> size_bytes(const std::string& name) const override { return inner_->size_bytes(name); }
  std::shared_ptr<const ByteSource> open(const std::string& name) const override {
    judge_->ask(StorageStep::open, name_of(name));
    return std::make_shared<const FaultyFile>(inner_->open(name), judge_);
  }
  std::unique_ptr<OutputFile> create(const std::string& name, std::uint64_t size_bytes) override {
    judge_->ask(StorageStep::create, name_of(name));
    return std::make_unique<FaultyOutput>(inner_->create(name, size_bytes), judge_, name_of(name));
  }
  void rename(const std::string& from, const std::string& to) override {
    judge_->ask(StorageStep::rename, name_of(from));
    inner_->rename(from, to);
  }
  bool rename_new(const std::string& from, const std::string& to) override {
    judge_->ask(StorageStep::rename, name_of(from));
    return inner_->rename_new(from, to);
  }
  void remove(const std::string& name) override {
    judge_->ask(StorageStep::remove, name_of(name));
    inner_->remove(name);
  }
  void sync() override {
    judge_->ask(StorageStep::sync, {});
    inner_->sync();
  }

 private:
  std::shared_ptr<Storage> inner_;
  JudgePtr judge_;
};

}  // namespace

std::string_view storage_step_name(StorageStep step) {
  switch (step) {
    case StorageStep::prepare:
      return "prepare";
    case StorageStep::list:
      return "list";
    case StorageStep::open:
      return "open";
    case StorageStep::read:
      return "read";
    case StorageStep::create:
      return "create";
    case StorageStep::write:
      return "write";
    case StorageStep::finish:
      return "finish";
    case StorageStep::rename:
      return "rename";
    case StorageStep::remove:
      return "remove";
    case StorageStep::sync:
      return "sync";
  }
  return "unknown";
}

std::shared_ptr<Storage> faulty_storage(std::shared_ptr<Storage> inner,
                                        std::function<StorageFault(const StorageEvent&)> decide) {
  return std::make_shared<FaultyStorage>(std::move(inner), std::move(decide));
}

}  // namespace tessera::checkpoint

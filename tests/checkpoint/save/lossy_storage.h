#pragma once
// A storage that, when the machine crashes, loses what was not synced: contents of files that were not finished, and
// any part of the creations, renames and removals since the last sync.

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint::saved {

class LossyStorage final : public Storage {
 public:
  const std::string& name() const override { return now_->name(); }
  void prepare() override {}
  std::vector<std::string> list() const override { return now_->list(); }
  std::optional<std::uint64_t> size_bytes(const std::string& name) const override { return now_->size_bytes(name); }
  std::shared_ptr<const ByteSource> open(const std::string& name) const override { return now_->open(name); }

  std::unique_ptr<OutputFile> create(const std::string& name, std::uint64_t size_bytes) override {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<OutputFile> file = now_->create(name, size_bytes);
    const auto durable = std::make_shared<Bytes>(size_bytes, 0);  // of the file, whatever its name
    files_[name] = durable;
    changes_.push_back([name, durable](Directory& directory) { directory[name] = durable; });
    return std::make_unique<Output>(std::move(file), durable, mutex_);
  }

  void rename(const std::string& from, const std::string& to) override {
    const std::lock_guard lock(mutex_);
    now_->rename(from, to);
    const std::shared_ptr<Bytes> file = files_.at(from);
    files_.erase(from);
    files_[to] = file;
    changes_.push_back([from, to, file](Directory& directory) {
      directory.erase(from);
      directory[to] = file;
    });
  }

  void remove(const std::string& name) override {
    const std::lock_guard lock(mutex_);
    now_->remove(name);
    files_.erase(name);
    changes_.push_back([name](Directory& directory) { directory.erase(name); });
  }

  void sync() override {
    const std::lock_guard lock(mutex_);
    for (const auto& change : changes_) change(durable_);
    changes_.clear();
  }

  // Returns what is there after a crash, if of the changes since the last sync those survive for which `survives`
  // returns true.
  std::shared_ptr<Storage> after_crash(FunctionRef<bool(std::size_t change)> survives) const {
    const std::lock_guard lock(mutex_);
    Directory directory = durable_;
    for (std::size_t i = 0; i < changes_.size(); ++i) {
      if (survives(i)) changes_[i](directory);
    }
    std::shared_ptr<Storage> result = memory_storage();
    for (const auto& [name, contents] : directory) write_new_file(*result, name, *contents);
    return result;
  }

 private:
  using Directory = std::map<std::string, std::shared_ptr<Bytes>>;

  class Output final : public OutputFile {
   public:
    Output(std::unique_ptr<OutputFile> inner, std::shared_ptr<Bytes> durable, std::mutex& mutex)
        : inner_(std::move(inner)), durable_(std::move(durable)), mutex_(mutex), written_(durable_->size(), 0) {}
    void write_at(std::uint64_t offset_bytes, ByteView bytes) override {
      inner_->write_at(offset_bytes, bytes);
      const std::lock_guard lock(mutex_);
      if (written_.size() < offset_bytes + bytes.size()) written_.resize(offset_bytes + bytes.size());
      std::copy(bytes.begin(), bytes.end(), written_.begin() + static_cast<std::ptrdiff_t>(offset_bytes));
    }
    void finish() override {
      inner_->finish();
      const std::lock_guard lock(mutex_);
      *durable_ = written_;
    }

   private:
    std::unique_ptr<OutputFile> inner_;
    std::shared_ptr<Bytes> durable_;
    std::mutex& mutex_;
    Bytes written_;
  };

  mutable std::mutex mutex_;
  std::shared_ptr<Storage> now_ = memory_storage();
  std::map<std::string, std::shared_ptr<Bytes>> files_;  // present names
  Directory durable_;
  std::vector<std::function<void(Directory&)>> changes_;
};

}  // namespace tessera::checkpoint::saved

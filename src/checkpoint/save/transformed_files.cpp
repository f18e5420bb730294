#include "checkpoint/save/transformed_files.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <variant>

#include "checkpoint/buffer.h"
#include "tessera/base/crc32.h"
#include "tessera/base/error.h"
#include "tessera/base/thread_pool.h"

namespace tessera::checkpoint {

namespace {

constexpr std::uint64_t kElementBytes = std::uint64_t{1} << 20;

// A file that is written from its begin to its end.
class SequentialFile final : public ByteSink {
 public:
  explicit SequentialFile(std::unique_ptr<OutputFile> file) : file_(std::move(file)) { block_.reserve(kFileBytes); }

  void write(ByteView bytes) override {
    while (!bytes.empty()) {
      const ByteView part = bytes.first(std::min<std::size_t>(bytes.size(), kFileBytes - block_.size()));
      append(block_, part);
      bytes = bytes.subspan(part.size());
      if (block_.size() == kFileBytes) flush();
    }
  }
  void finish() override {}  // an item ends, but not the file

  std::uint64_t size_bytes() const { return written_bytes_ + block_.size(); }
  // Makes the file durable and returns its facts.
  Sidecar::FileFacts close() {
    flush();
    file_->finish();
    return facts_of_blocks(written_bytes_, std::move(crcs_));
  }

 private:
  // A multiple of a block of the sidecar.
  static constexpr std::size_t kFileBytes = 8 * Sidecar::kBlockBytes;

  void flush() {
    for (std::size_t begin = 0; begin < block_.size(); begin += Sidecar::kBlockBytes) {
      const std::size_t length = std::min<std::size_t>(Sidecar::kBlockBytes, block_.size() - begin);
      crcs_.push_back(crc32(ByteView(block_).subspan(begin, length)));
    }
    if (!block_.empty()) file_->write_at(written_bytes_, block_);
    file_->start_writeback(written_bytes_, block_.size());
    written_bytes_ += block_.size();
    block_.clear();
  }

  std::unique_ptr<OutputFile> file_;
  Bytes block_;
  std::uint64_t written_bytes_ = 0;
  std::vector<std::uint32_t> crcs_;
};

// Writes the segments of a unit in order.
void write_unit(const Unit& unit, ByteSink& out, ProgressSink& progress, const Cancellation* cancellation) {
  std::vector<std::uint32_t> crcs;  // of the data segments
  thread_local Buffer buffer;
  for (const Segment& segment : unit.segments) {
    if (const auto* bytes = std::get_if<Bytes>(&segment)) {
      out.write(*bytes);
      continue;
    }
    if (const auto* late = std::get_if<Late>(&segment)) {
      out.write(late->make(crcs));
      continue;
    }
    const auto& data = std::get<Data>(segment);
    const std::uint64_t granule = std::max<std::uint64_t>(data.granule_bytes, 1);
    const std::uint64_t block = std::max<std::uint64_t>(kElementBytes / granule, 1) * granule;
    std::uint32_t crc = 0;
    for (std::uint64_t done = 0; done < data.length_bytes;) {
      if (cancellation != nullptr) cancellation->check();
      const MutableByteView part = buffer.get(std::min(block, data.length_bytes - done));
      data.produce(done, part);
      crc = crc32(part, crc);
      out.write(part);
      done += part.size();
      progress.advance(part.size());
    }
    crcs.push_back(crc);
  }
}

// Writes a unit through `transforms` and returns its size in the file.
std::uint64_t write_item(const Unit& unit, std::span<const TransformPtr> transforms, SequentialFile& file,
                         ProgressSink& progress, const Cancellation* cancellation) {
  const std::uint64_t begin = file.size_bytes();
  std::vector<std::unique_ptr<ByteSink>> streams;  // from the file back to the item
  ByteSink* to = &file;
  for (std::size_t i = transforms.size(); i-- > 0;) {
    streams.push_back(transforms[i]->apply(*to));
    to = streams.back().get();
  }
  write_unit(unit, *to, progress, cancellation);
  to->finish();
  return file.size_bytes() - begin;
}

}  // namespace

std::uint64_t write_transformed(std::span<const PlannedFile> files, Storage& storage, const WriteOptions& options,
                                std::size_t threads, ProgressSink& progress, RankReport& report,
                                std::vector<std::string>& created) {
  for (std::size_t i = options.transforms.size(); i-- > 0;) {
    report.descriptors.push_back(options.transforms[i]->descriptor());
  }
  std::size_t items = 0;
  for (const PlannedFile& file : files) items += file.units.size();
  report.transformed_bytes.resize(items);
  std::uint64_t total_bytes = 0;
  std::mutex mutex;  // of the results, and of making units, which is done one at a time
  ThreadPool pool(threads);
  std::uint64_t* sizes = report.transformed_bytes.data();
  for (const PlannedFile& planned : files) {
    auto file = std::make_shared<SequentialFile>(storage.create(planned.name, 0));
    created.push_back(planned.name);
    pool.submit([&, file, sizes] {
      std::uint64_t* size = sizes;
      for (const PlannedUnit& each : planned.units) {
        if (options.cancellation != nullptr) options.cancellation->check();
        const Unit unit = [&] {
          const std::lock_guard lock(mutex);
          return each.make();
        }();
        *size++ = write_item(unit, options.transforms, *file, progress, options.cancellation);
      }
      const Sidecar::FileFacts facts = file->close();
      const std::lock_guard lock(mutex);
      report.files.files[planned.name] = facts;
      total_bytes += facts.size_bytes;
    });
    sizes += planned.units.size();
  }
  pool.wait();
  return total_bytes;
}

}  // namespace tessera::checkpoint

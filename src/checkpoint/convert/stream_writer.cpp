#include "checkpoint/convert/stream_writer.h"

#include <algorithm>
#include <utility>

#include "checkpoint/buffer.h"
#include "tessera/base/crc32.h"
#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

// Units up to this size are collected and written together.
constexpr std::uint64_t kSmallUnitBytes = 1u << 20;

std::uint64_t length_of(const Segment& segment) {
  if (const auto* bytes = std::get_if<Bytes>(&segment)) return bytes->size();
  if (const auto* data = std::get_if<Data>(&segment)) return data->length_bytes;
  return std::get<Late>(segment).length_bytes;
}

}  // namespace

std::uint64_t Unit::length_bytes() const {
  std::uint64_t length = 0;
  for (const Segment& segment : segments) length += length_of(segment);
  return length;
}

struct StreamWriter::OpenFile {
  OpenFile(std::unique_ptr<OutputFile> file_in, std::string name_in, std::uint64_t size_in)
      : file(std::move(file_in)), name(std::move(name_in)), size_bytes(size_in) {}
  std::unique_ptr<OutputFile> file;
  std::string name;
  std::uint64_t size_bytes;
  std::mutex mutex;
  std::size_t open_units = 1;  // includes one until end_file
  // The system lets one thread at a time write to a file. Waiting here keeps the other threads from spinning there.
  std::mutex write_mutex;
  // Written bytes, each within one block of the sidecar.
  struct Part {
    std::uint64_t offset_bytes, length_bytes;
    std::uint32_t crc;
  };
  std::vector<Part> parts;

  // Writes `bytes` and returns their CRC-32.
  std::uint32_t write(std::uint64_t offset_bytes, ByteView bytes) {
    std::vector<Part> written;
    std::uint32_t crc = 0;
    for (std::uint64_t done = 0; done < bytes.size(); done += written.back().length_bytes) {
      const std::uint64_t at = offset_bytes + done;
      const ByteView part =
          bytes.subspan(done, std::min(bytes.size() - done, Sidecar::kBlockBytes - at % Sidecar::kBlockBytes));
      written.push_back({at, part.size(), crc32(part)});
      crc = done == 0 ? written.back().crc : crc32_combine(crc, written.back().crc, part.size());
    }
    {
      const std::lock_guard lock(write_mutex);
      file->write_at(offset_bytes, bytes);
      file->start_writeback(offset_bytes, bytes.size());
    }
    const std::lock_guard lock(mutex);
    parts.insert(parts.end(), written.begin(), written.end());
    return crc;
  }

  // Returns the facts of the complete file.
  Sidecar::FileFacts facts() {
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.offset_bytes < b.offset_bytes; });
    std::vector<std::uint32_t> crcs;
    for (const Part& part : parts) {
      if (part.offset_bytes % Sidecar::kBlockBytes == 0) {
        crcs.push_back(part.crc);
      } else {
        crcs.back() = crc32_combine(crcs.back(), part.crc, part.length_bytes);
      }
    }
    return facts_of_blocks(size_bytes, std::move(crcs));
  }
};

struct StreamWriter::Running {
  Unit unit;
  std::shared_ptr<OpenFile> file;
  std::uint64_t offset_bytes = 0;
  std::uint64_t length_bytes = 0;
  std::vector<std::uint64_t> segment_offsets;  // within the unit
  std::vector<std::size_t> data_number;        // number of data segments before each segment
  std::vector<std::uint32_t> data_crcs;        // for late segments
  bool has_late = false;
  std::vector<std::vector<std::uint32_t>> block_crcs;  // for data segments that are written in several blocks
  std::vector<std::uint64_t> block_bytes;
  std::vector<std::size_t> deferred;        // late segments, written after all data
  std::atomic<std::size_t> open_tasks = 1;  // includes one until all are submitted

  Running(Unit unit_in, std::shared_ptr<OpenFile> file_in, std::uint64_t offset_in)
      : unit(std::move(unit_in)), file(std::move(file_in)), offset_bytes(offset_in) {
    std::size_t data = 0;
    segment_offsets.reserve(unit.segments.size());
    data_number.reserve(unit.segments.size());
    for (const Segment& segment : unit.segments) {
      segment_offsets.push_back(length_bytes);
      data_number.push_back(data);
      length_bytes += length_of(segment);
      if (std::holds_alternative<Data>(segment)) ++data;
      has_late = has_late || std::holds_alternative<Late>(segment);
    }
    data_crcs.resize(data);
  }
};

StreamWriter::StreamWriter(std::shared_ptr<Storage> storage, std::size_t threads, ProgressSink& progress,
                           const Cancellation* cancellation)
    : storage_(std::move(storage)), progress_(progress), cancellation_(cancellation), pool_(threads) {}

StreamWriter::~StreamWriter() = default;

void StreamWriter::check_cancelled() const {
  if (cancellation_ != nullptr) cancellation_->check();
}

void StreamWriter::begin_file(const std::string& name, std::uint64_t size_bytes) {
  current_ = std::make_shared<OpenFile>(storage_->create(name, size_bytes), name, size_bytes);
  next_offset_bytes_ = 0;
}

void StreamWriter::add(Unit unit) {
  check_cancelled();
  auto running = std::make_shared<Running>(std::move(unit), current_, next_offset_bytes_);
  next_offset_bytes_ += running->length_bytes;
  {
    const std::lock_guard lock(current_->mutex);
    ++current_->open_units;
  }
  if (running->length_bytes > kSmallUnitBytes) {
    flush_small();
    run_large(std::move(running));
    return;
  }
  if (small_bytes_ + running->length_bytes > kSmallUnitBytes) flush_small();
  small_bytes_ += running->length_bytes;
  small_.push_back(std::move(running));
}

void StreamWriter::flush_small() {
  if (small_.empty()) return;
  pool_.submit([this, units = std::exchange(small_, {}), bytes = std::exchange(small_bytes_, 0)] {
    check_cancelled();
    thread_local Buffer buffer;
    const MutableByteView out = buffer.get(bytes);
    std::uint64_t at = 0;
    for (const auto& unit : units) {
      assemble(*unit, 0, unit->unit.segments.size(), out.subspan(at, unit->length_bytes));
      at += unit->length_bytes;
    }
    OpenFile& file = *units.front()->file;
    file.write(units.front()->offset_bytes, out);
    for (std::size_t i = 0; i < units.size(); ++i) unit_done(file);
  });
}

// Produces segments [first, last) into `out`. Their late segments may depend only on data in this range or on CRCs that
// are already known.
void StreamWriter::assemble(Running& unit, std::size_t first, std::size_t last, MutableByteView out) {
  std::uint64_t at = 0;
  std::uint64_t data_bytes = 0;
  for (std::size_t i = first; i < last; ++i) {
    const Segment& segment = unit.unit.segments[i];
    const MutableByteView part = out.subspan(at, length_of(segment));
    if (const auto* data = std::get_if<Data>(&segment)) {
      data->produce(0, part);
      data_bytes += part.size();
      if (unit.has_late) unit.data_crcs[unit.data_number[i]] = crc32(part);
    } else {
      const auto* fixed = std::get_if<Bytes>(&segment);
      const Bytes made = fixed != nullptr ? Bytes() : std::get<Late>(segment).make(unit.data_crcs);
      const Bytes& bytes = fixed != nullptr ? *fixed : made;
      if (bytes.size() != part.size())
        fail(ErrorCode::internal, "write {}: a segment has {} bytes, expected {}", unit.file->name, bytes.size(),
             part.size());
      std::copy(bytes.begin(), bytes.end(), part.begin());
    }
    at += part.size();
  }
  progress_.advance(data_bytes);
}

// Splits a unit into tasks. Runs of segments that fit into a block are assembled and written together. A larger data
// segment is written block by block, and the late segments that depend on it are written at the end.
void StreamWriter::run_large(std::shared_ptr<Running> unit) {
  const std::vector<Segment>& segments = unit->unit.segments;
  unit->block_crcs.resize(segments.size());
  unit->block_bytes.resize(segments.size());
  const auto submit = [&](std::function<void()> work) {
    unit->open_tasks.fetch_add(1);
    pool_.submit([this, unit, work = std::move(work)] {
      check_cancelled();
      work();
      task_done(unit);
    });
  };
  for (std::size_t i = 0; i < segments.size();) {
    const auto* late = std::get_if<Late>(&segments[i]);
    if (late != nullptr) {
      unit->deferred.push_back(i++);
      continue;
    }
    const auto* data = std::get_if<Data>(&segments[i]);
    if (data != nullptr && data->length_bytes > kBlockBytes) {
      const std::uint64_t granule = std::max<std::uint64_t>(data->granule_bytes, 1);
      const std::uint64_t block = std::max<std::uint64_t>(kBlockBytes / granule, 1) * granule;
      unit->block_bytes[i] = block;
      unit->block_crcs[i].resize((data->length_bytes + block - 1) / block);
      for (std::size_t b = 0; b < unit->block_crcs[i].size(); ++b) {
        submit([this, unit = unit.get(), data, i, b, block] {
          thread_local Buffer buffer;
          const std::uint64_t begin = b * block;
          const MutableByteView out = buffer.get(std::min(block, data->length_bytes - begin));
          data->produce(begin, out);
          const std::uint64_t offset = unit->offset_bytes + unit->segment_offsets[i] + begin;
          unit->block_crcs[i][b] = unit->file->write(offset, out);
          progress_.advance(out.size());
        });
      }
      ++i;
      continue;
    }
    std::size_t last = i;
    std::uint64_t length = 0;
    while (last < segments.size()) {
      const auto* next_late = std::get_if<Late>(&segments[last]);
      if ((next_late != nullptr && next_late->needs_all) ||
          (last > i && length + length_of(segments[last]) > kBlockBytes)) {
        break;
      }
      length += length_of(segments[last++]);
    }
    submit([this, unit = unit.get(), i, last, length] {
      thread_local Buffer buffer;
      const MutableByteView out = buffer.get(length);
      assemble(*unit, i, last, out);
      const std::uint64_t offset = unit->offset_bytes + unit->segment_offsets[i];
      unit->file->write(offset, out);
    });
    i = last;
  }
  task_done(unit);
}

void StreamWriter::task_done(const std::shared_ptr<Running>& unit) {
  if (unit->open_tasks.fetch_sub(1) != 1) return;
  for (std::size_t i = 0; i < unit->unit.segments.size(); ++i) {
    if (unit->block_crcs[i].empty()) continue;
    const std::uint64_t length = length_of(unit->unit.segments[i]);
    std::uint32_t crc = 0;
    for (std::size_t b = 0; b < unit->block_crcs[i].size(); ++b) {
      const std::uint64_t begin = b * unit->block_bytes[i];
      crc = crc32_combine(crc, unit->block_crcs[i][b], std::min(unit->block_bytes[i], length - begin));
    }
    unit->data_crcs[unit->data_number[i]] = crc;
  }
  for (const std::size_t i : unit->deferred) {
    Bytes bytes(length_of(unit->unit.segments[i]));
    assemble(*unit, i, i + 1, bytes);
    unit->file->write(unit->offset_bytes + unit->segment_offsets[i], bytes);
  }
  unit_done(*unit->file);
}

void StreamWriter::unit_done(OpenFile& file) {
  {
    const std::lock_guard lock(file.mutex);
    if (--file.open_units > 0) return;
  }
  file_done(file);
}

void StreamWriter::end_file() {
  flush_small();
  const std::shared_ptr<OpenFile> file = std::exchange(current_, nullptr);
  if (next_offset_bytes_ != file->size_bytes) {
    fail(ErrorCode::internal, "write {}: its units have {} bytes, expected {}", file->name, next_offset_bytes_,
         file->size_bytes);
  }
  {
    const std::lock_guard lock(file->mutex);
    if (--file->open_units > 0) return;
  }
  file_done(*file);
}

void StreamWriter::file_done(OpenFile& file) {
  file.file->finish();
  const std::lock_guard lock(result_mutex_);
  result_.files[file.name] = file.facts();
}

void StreamWriter::add_small_file(const std::string& name, ByteView bytes) {
  write_new_file(*storage_, name, bytes);
  const std::lock_guard lock(result_mutex_);
  result_.files[name] = facts_of(bytes);
}

Sidecar StreamWriter::finish() {
  pool_.wait();
  check_cancelled();
  const std::lock_guard lock(result_mutex_);
  return result_;
}

}  // namespace tessera::checkpoint

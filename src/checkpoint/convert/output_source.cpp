#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "checkpoint/buffer.h"
#include "checkpoint/convert/output_plan.h"
#include "tessera/base/cast.h"
#include "tessera/base/checked.h"
#include "tessera/base/crc32.h"
#include "tessera/base/error.h"
#include "tessera/base/thread_pool.h"
#include "tessera/layout/byte_ranges.h"
#include "tessera/layout/flat_interval.h"

namespace tessera::checkpoint {
namespace {

// The blocks of all threads, if elements are rearranged: with larger blocks, longer runs are read.
constexpr std::uint64_t kRearrangedBytes = 48u << 20;

}  // namespace

std::uint64_t PlannedFile::size_bytes() const {
  std::uint64_t size = 0;
  for (const PlannedUnit& unit : units) size += unit.length_bytes;
  return size;
}

struct OutputSource::ReaderSlot {
  std::mutex mutex;
  std::shared_ptr<const TensorReader> reader;
  std::uint64_t unread_bytes = 0;              // in the source's dtype
  std::atomic<std::int64_t> beyond_range = 0;  // elements

  std::shared_ptr<const TensorReader> get(const std::shared_ptr<const Checkpoint>& checkpoint, std::size_t tensor) {
    const std::lock_guard lock(mutex);
    if (!reader) reader = std::make_shared<const TensorReader>(checkpoint, tensor);
    return reader;
  }

  // Records that `bytes` were read. After the last byte, verifies the checksums and releases the reader.
  void done(std::uint64_t bytes) {
    std::shared_ptr<const TensorReader> finished;
    {
      const std::lock_guard lock(mutex);
      unread_bytes -= bytes;
      if (unread_bytes == 0) finished = std::exchange(reader, nullptr);
    }
    if (!finished) return;
    beyond_range += finished->elements_beyond_range();
    finished->verify_checksums();
  }
};

OutputSource::OutputSource(std::shared_ptr<const Checkpoint> checkpoint, const ConvertOptions& options)
    : checkpoint_(std::move(checkpoint)), options_(&options) {
  const std::vector<TensorInfo>& all = checkpoint_->tensors();
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!options.selection.takes(all[i].name)) continue;
    checkpoint_->check_partition(i);
    OutputTensor tensor{i, &all[i], all[i].dtype};
    if (options.dtype && is_floating_point(all[i].dtype)) {
      if (!can_cast(all[i].dtype, *options.dtype)) {
        fail(ErrorCode::unsupported, "convert tensor '{}': dtype {}, expected one with a cast to {}",
             printable(all[i].name), dtype_name(all[i].dtype), dtype_name(*options.dtype));
      }
      tensor.dtype = *options.dtype;
    }
    tensors_.push_back(tensor);
  }
  for (std::size_t i = 0; i < checkpoint_->objects().size(); ++i) {
    if (options.selection.takes(checkpoint_->objects()[i].name)) objects_.push_back(i);
  }
  readers_ = std::make_shared<std::vector<ReaderSlot>>(tensors_.size());
  for (std::size_t i = 0; i < tensors_.size(); ++i) (*readers_)[i].unread_bytes = tensors_[i].info->size_bytes();
}

void OutputSource::expect_reads(std::size_t tensor, std::uint64_t times) const {
  (*readers_)[tensor].unread_bytes = checked_multiply(tensors_[tensor].info->size_bytes(), times, "bytes to read");
}

void OutputSource::warn(const std::string& message) const {
  if (options_->warn) options_->warn(message);
}

void OutputSource::warn_of_elements_beyond_range() const {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const std::int64_t count = (*readers_)[i].beyond_range;
    if (count == 0) continue;
    const DType dtype = tensors_[i].dtype;
    warn(fmt::format("tensor '{}': {} of {} elements {} beyond the range of {} and became {}",
                     printable(tensors_[i].info->name), count, volume(Box::full(tensors_[i].info->shape)),
                     count == 1 ? "is" : "are", dtype_name(dtype),
                     dtype == DType::float8_e4m3fn                                        ? "448 or -448"
                     : dtype == DType::float8_e4m3fnuz || dtype == DType::float8_e5m2fnuz ? "NaN"
                                                                                          : "infinite"));
  }
}

Data OutputSource::tensor_data(std::size_t tensor, const Box& box) const {
  const OutputTensor& output = tensors_[tensor];
  const auto from_bytes = static_cast<std::uint64_t>(dtype_size(output.info->dtype));
  const auto to_bytes = static_cast<std::uint64_t>(dtype_size(output.dtype));
  // Full rows, full planes and so on are single boxes. The granule is the largest of these up to a quarter of a block.
  std::uint64_t granule = to_bytes;
  for (std::size_t d = box.rank(); d-- > 0;) {
    const std::uint64_t next = granule * static_cast<std::uint64_t>(std::max<std::int64_t>(box.sizes[d], 1));
    if (next > StreamWriter::kBlockBytes / 4) break;
    granule = next;
  }
  if (checkpoint_->is_computed(output.source) && TensorReader(checkpoint_, output.source, false).is_rearranged()) {
    const std::uint64_t block = std::clamp(kRearrangedBytes / threads_for(options_->jobs), StreamWriter::kBlockBytes,
                                           4 * StreamWriter::kBlockBytes);
    granule = std::max<std::uint64_t>(block / granule, 1) * granule;
  }
  Data data;
  data.length_bytes = static_cast<std::uint64_t>(volume(box)) * to_bytes;
  data.granule_bytes = granule;
  data.produce = [checkpoint = checkpoint_, readers = readers_, output, tensor, box, from_bytes, to_bytes](
                     std::uint64_t begin_bytes, MutableByteView out) {
    if (out.empty()) return;
    ReaderSlot& slot = (*readers)[tensor];
    const std::shared_ptr<const TensorReader> reader = slot.get(checkpoint, output.source);
    const bool casts = output.dtype != output.info->dtype;
    thread_local Buffer buffer;
    const std::uint64_t count = out.size() / to_bytes;
    const MutableByteView read_into = casts ? buffer.get(count * from_bytes) : out;
    const auto begin = static_cast<std::int64_t>(begin_bytes / to_bytes);
    std::uint64_t at = 0;
    for (Box& part : boxes_of_flat_interval(box.sizes, begin, begin + static_cast<std::int64_t>(count))) {
      for (std::size_t d = 0; d < part.rank(); ++d) part.offsets[d] += box.offsets[d];
      const std::uint64_t length = static_cast<std::uint64_t>(volume(part)) * from_bytes;
      reader->read(part, read_into.subspan(at, length));
      at += length;
    }
    if (casts) {
      const auto elements = static_cast<std::int64_t>(count);
      slot.beyond_range += count_beyond_range(output.info->dtype, read_into.data(), output.dtype, elements);
      cast(output.info->dtype, read_into.data(), output.dtype, out.data(), elements);
    }
    slot.done(at);
  };
  return data;
}

Data OutputSource::raw_data(std::uint32_t file, const zip::Entry& entry) const {
  Data data;
  data.length_bytes = entry.size_bytes;
  // Parts may be produced in any order; their CRC-32s are combined by offset.
  struct Check {
    std::mutex mutex;
    std::vector<std::pair<std::uint64_t, std::pair<std::uint64_t, std::uint32_t>>> parts;
    std::uint64_t done = 0;
  };
  data.produce = [checkpoint = checkpoint_, file, entry, check = std::make_shared<Check>()](std::uint64_t begin_bytes,
                                                                                            MutableByteView out) {
    const std::shared_ptr<const ByteSource> opened = checkpoint->open_file(file);
    opened->read_at(entry.data_offset_bytes + begin_bytes, out);
    const std::lock_guard lock(check->mutex);
    check->parts.push_back({begin_bytes, {out.size(), crc32(out)}});
    check->done += out.size();
    if (check->done < entry.size_bytes) return;
    std::sort(check->parts.begin(), check->parts.end());
    std::uint32_t crc = 0;
    for (const auto& [offset, part] : check->parts) crc = crc32_combine(crc, part.second, part.first);
    if (crc != entry.crc32) {
      fail(ErrorCode::corrupt, "{} at byte {}: {} has CRC-32 {:08x}, expected {:08x}", opened->name(),
           entry.data_offset_bytes, printable(entry.name), crc, entry.crc32);
    }
  };
  return data;
}

void check_entry(const ByteSource& file, const zip::Entry& entry) {
  constexpr std::uint64_t kBlockBytes = 1u << 20;
  Bytes block(std::min(kBlockBytes, entry.size_bytes));
  std::uint32_t crc = 0;
  for (std::uint64_t done = 0; done < entry.size_bytes;) {
    const MutableByteView part(block.data(), std::min(kBlockBytes, entry.size_bytes - done));
    file.read_at(entry.data_offset_bytes + done, part);
    crc = crc32(part, crc);
    done += part.size();
  }
  if (crc != entry.crc32) {
    fail(ErrorCode::corrupt, "{} at byte {}: {} has CRC-32 {:08x}, expected {:08x}", file.name(),
         entry.data_offset_bytes, printable(entry.name), crc, entry.crc32);
  }
}

ObjectArchive make_object_archive(const ObjectValue& value) {
  ObjectArchive archive;
  // Keys are numbered in order of appearance, so that equal objects give equal archives.
  std::map<std::string, std::string> new_keys;
  pickle::Writer writer(archive.data_pkl, 2);
  writer.value(value.value, [&](pickle::Writer& out, pickle::NodeRef id) {
    std::optional<torch_archive::StorageRef> storage = torch_archive::as_storage(id);
    if (!storage) return false;
    const auto [found, is_new] = new_keys.try_emplace(storage->key, std::to_string(archive.storages.size()));
    if (is_new) archive.storages.push_back(value.storages.at(storage->key));
    storage->key = found->second;
    torch_archive::write_storage_id(out, *storage);
    return true;
  });
  writer.stop();
  return archive;
}

Unit archive_unit(const std::shared_ptr<const torch_archive::ArchiveLayout>& layout, std::vector<Data> storages) {
  Unit unit;
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < storages.size(); ++i) {
    const std::uint64_t offset = layout->storage_offset_bytes(i);
    if (i == 0) {
      unit.segments.emplace_back(layout->before_storage(0, {}));
    } else {
      unit.segments.emplace_back(Late{offset - at, false, [layout, i](const std::vector<std::uint32_t>& crcs) {
                                        return layout->before_storage(i, crcs);
                                      }});
    }
    at = offset + storages[i].length_bytes;
    unit.segments.emplace_back(std::move(storages[i]));
  }
  if (storages.empty()) {
    unit.segments.emplace_back(layout->trailer({}));
  } else {
    unit.segments.emplace_back(Late{layout->total_bytes() - at, true, [layout](const std::vector<std::uint32_t>& crcs) {
                                      return layout->trailer(crcs);
                                    }});
  }
  return unit;
}

}  // namespace tessera::checkpoint

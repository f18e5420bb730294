#include "tessera/checkpoint/load.h"

#include <algorithm>
#include <map>
#include <utility>

#include "checkpoint/buffer.h"
#include "checkpoint/byte_cursor.h"
#include "checkpoint/load/block_scales.h"
#include "checkpoint/load/shared_reads.h"
#include "tessera/base/cast.h"
#include "tessera/base/error.h"
#include "tessera/base/thread_pool.h"
#include "tessera/checkpoint/internal/file_names.h"
#include "tessera/checkpoint/sidecar.h"
#include "tessera/checkpoint/tensor_reader.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera::checkpoint {
namespace {

// Size of a read task: larger items are split, smaller ones are combined.
constexpr std::int64_t kTaskBytes = std::int64_t{4} << 20;
constexpr std::size_t kQueuedTasks = 128;

// A source that keeps the owner of its bytes.
class OwnedSource final : public ByteSource {
 public:
  OwnedSource(std::shared_ptr<const Bytes> owner, ByteView bytes, std::string name)
      : owner_(std::move(owner)), source_(bytes, std::move(name)) {}
  void read_at(std::uint64_t offset_bytes, MutableByteView out) const override { source_.read_at(offset_bytes, out); }
  std::uint64_t size_bytes() const override { return source_.size_bytes(); }
  const std::string& name() const override { return source_.name(); }

 private:
  std::shared_ptr<const Bytes> owner_;
  MemorySource source_;
};

// A stored tensor that is being read.
struct OpenTensor {
  OpenTensor(const std::shared_ptr<const Checkpoint>& checkpoint, std::size_t tensor, const ReadOptions& options)
      : reader(checkpoint, tensor, options.check_checksums) {
    if (options.compare_rest) reader.compare_parts(options.cancellation);
  }
  TensorReader reader;
  std::atomic<std::size_t> open_pieces = 1;  // includes one until all pieces are added
};

// The destination of a box of elements.
struct Place {
  const TargetChunk* chunk;
  std::uint8_t* data;  // of the first element, if the chunk's memory has no `store`

  // Calls `put(data, strides)`, which puts the elements of `box` there.
  template <typename Put>
  void fill(BoxView box, const Put& put) const {
    if (chunk->memory.store) {
      chunk->memory.store(box, [&](std::uint8_t* row_major) {
        const std::vector<std::int64_t> of_box = row_major_strides(box.sizes);
        put(row_major, std::span(of_box));
      });
    } else if (chunk->memory.strides.empty()) {
      const std::vector<std::int64_t> of_chunk = row_major_strides(chunk->box.sizes);
      put(data, std::span(of_chunk));
    } else {
      put(data, std::span(chunk->memory.strides));
    }
  }
};

// Elements that one task reads.
struct Piece {
  std::shared_ptr<OpenTensor> tensor;
  std::size_t stored_chunk = 0;
  Box box;
  DType dtype = DType::float32;  // of the target
  const BlockScales* scales = nullptr;
  Place to;
};

class Loader {
 public:
  Loader(const Targets& targets, std::shared_ptr<const Checkpoint> checkpoint, const ReadOptions& options)
      : targets_(targets),
        checkpoint_(std::move(checkpoint)),
        options_(options),
        progress_(options.progress != nullptr ? *options.progress : no_progress()),
        pool_(options.threads != 0 ? options.threads : std::max<std::size_t>(available_processors(), 4), kQueuedTasks) {
  }

  ReadReport run() {
    RankLink* const among = options_.share_reads_among;
    LoadPlan plan;
    if (among == nullptr || among->size() == 1) {
      plan = make_plan();
      read_items(plan.items);
    } else {
      plan = among->agree_on(kPlanStep, [&] { return make_plan(); });
      read_shared(plan.items, *among);
    }
    for (const LoadPlan::ObjectItem& item : plan.objects) {
      const std::string& name = targets_.at(item.target).name;
      as_damage([&] {
        try {
          report_.objects.emplace(name, checkpoint_->load_object(item.object));
        } catch (const Error& error) {
          fail(error.code(), "{}; read for object '{}'", error.what(), printable(name));
        }
      });
    }
    pool_.wait();
    if (options_.compare_rest) checkpoint_->compare_rest(options_.cancellation);
    progress_.end();
    report_.read_bytes = read_bytes_;
    report_.bytes_not_compared = checkpoint_->bytes_not_compared();
    return std::move(report_);
  }

 private:
  static constexpr std::string_view kPlanStep = "plan the load";
  static constexpr std::string_view kShareStep = "read shared elements";

  LoadPlan make_plan() {
    LoadPlanner planner;
    LoadPlan plan = (options_.planner != nullptr ? *options_.planner : planner)
                        .create_local_plan(targets_, *checkpoint_, options_.rules);
    report_.missing = plan.missing;
    for (const ReadItem& item : plan.items) {
      report_.wanted_bytes += bytes_of(item.tensor, item.box);
      as_damage([&] { read_scales(item.tensor); });
    }
    progress_.begin("load", report_.wanted_bytes);
    return plan;
  }

  void read_scales(std::uint32_t tensor) {
    if (!options_.rules.dequantize_block_size || scales_.contains(tensor)) return;
    const auto found = find_scales(*checkpoint_, checkpoint_->tensors()[tensor]);
    if (!found) return;
    scales_.try_emplace(tensor, checkpoint_, *found, *options_.rules.dequantize_block_size, options_.check_checksums);
  }
  // Returns null if the tensor is not dequantized.
  const BlockScales* scales_of(std::uint32_t tensor) const {
    const auto found = scales_.find(tensor);
    return found == scales_.end() ? nullptr : &found->second;
  }

  std::int64_t element_bytes(std::uint32_t tensor) const { return dtype_size(checkpoint_->tensors()[tensor].dtype); }
  std::uint64_t bytes_of(std::uint32_t tensor, const Box& box) const {
    return static_cast<std::uint64_t>(volume(box) * element_bytes(tensor));
  }

  void read_items(std::span<const ReadItem> items) {
    for (std::size_t i = 0; i < items.size();) {
      std::size_t last = i;
      while (last < items.size() && items[last].tensor == items[i].tensor) ++last;
      read_tensor(items.subspan(i, last - i));
      i = last;
    }
    flush();
  }

  // --- elements that several ranks want, read by one of them

  // Shared elements are exchanged in rounds of this size over all ranks, to bound memory.
  static constexpr std::uint64_t kRoundBytes = std::uint64_t{64} << 20;

  struct SharedPart {
    const SharedRead* read = nullptr;
    Box box;
  };

  void read_shared(const std::vector<ReadItem>& items, RankLink& among) {
    const std::vector<SharedRead> reads = plan_shared_reads(items, among);
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<const ReadItem*>> items_of;  // by stored chunk
    for (const ReadItem& item : items) items_of[{item.tensor, item.stored_chunk}].push_back(&item);
    const auto each_item = [&](const SharedRead& read, const Box& box, const auto& f) {
      for (const ReadItem* item : items_of[{read.tensor, read.stored_chunk}]) {
        if (!contains(item->box, box)) continue;
        ReadItem part = *item;
        part.box = box;
        f(part);
      }
    };
    std::vector<ReadItem> own;
    std::vector<SharedPart> shared;
    for (const SharedRead& read : reads) {
      if (read.ranks.size() > 1) {
        for (Box& box : split_row_major(read.box, element_bytes(read.tensor), kTaskBytes)) {
          shared.push_back({&read, std::move(box)});
        }
      } else if (read.reader == among.rank()) {
        each_item(read, read.box, [&](const ReadItem& part) { own.push_back(part); });
      }
    }
    among.agree_on(kShareStep, [&] {
      read_items(own);
      pool_.wait();
    });
    const auto deliver = [&](const SharedPart& part, const std::uint8_t* elements) {
      each_item(*part.read, part.box, [&](const ReadItem& item) { store(item, elements); });
      progress_.advance(bytes_of(part.read->tensor, part.box));
    };
    for (std::size_t begin = 0; begin < shared.size();) {
      std::size_t end = begin;
      for (std::uint64_t bytes = 0; end < shared.size() && (end == begin || bytes < kRoundBytes); ++end) {
        bytes += bytes_of(shared[end].read->tensor, shared[end].box);
      }
      exchange(std::span(shared).subspan(begin, end - begin), among, deliver);
      begin = end;
    }
    among.agree_on(kShareStep, [&] {
      for (const auto& [number, tensor] : shared_tensors_) as_damage([&, &open = *tensor] { piece_done(open); });
    });
  }

  std::vector<SharedRead> plan_shared_reads(const std::vector<ReadItem>& items, RankLink& among) const {
    std::vector<WantedBox> wanted;
    wanted.reserve(items.size());
    for (const ReadItem& item : items) wanted.push_back({item.tensor, item.stored_chunk, item.box});
    const std::vector<Bytes> gathered = among.gather(encode_wanted(wanted));
    Bytes all;
    for (const Bytes& one : gathered) append_text(all, as_text(one));
    all = among.broadcast(all);
    std::vector<std::vector<WantedBox>> by_rank;
    by_rank.reserve(static_cast<std::size_t>(among.size()));
    ByteCursor cursor(all, "wanted boxes of all ranks");
    for (int rank = 0; rank < among.size(); ++rank) by_rank.push_back(decode_wanted(as_bytes(cursor.text())));
    return share_reads(by_rank, [&](std::uint32_t tensor) { return element_bytes(tensor); });
  }

  // Reads the parts that this rank must read, sends them to the ranks that want them, and delivers the parts that this
  // rank wants.
  template <typename Deliver>
  void exchange(std::span<const SharedPart> parts, RankLink& among, const Deliver& deliver) {
    std::vector<Bytes> read(parts.size());
    among.agree_on(kShareStep, [&] {
      try {
        for (std::size_t i = 0; i < parts.size(); ++i) {
          if (parts[i].read->reader == among.rank()) start_reading(parts[i], read[i]);
        }
      } catch (...) {
        pool_.wait();  // running reads still write to `read`; throws if one of them failed
        throw;
      }
      pool_.wait();
    });
    std::vector<Bytes> to_send(static_cast<std::size_t>(among.size()));
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].read->reader != among.rank()) continue;
      for (const int rank : parts[i].read->ranks) {
        if (rank != among.rank()) append(to_send[static_cast<std::size_t>(rank)], read[i]);
      }
    }
    const std::vector<Bytes> received = among.all_to_all(to_send);
    std::vector<std::size_t> taken(received.size(), 0);  // bytes
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const SharedRead& shared = *parts[i].read;
      if (!std::binary_search(shared.ranks.begin(), shared.ranks.end(), among.rank())) continue;
      if (shared.reader == among.rank()) {
        deliver(parts[i], read[i].data());
        continue;
      }
      const auto from = static_cast<std::size_t>(shared.reader);
      deliver(parts[i], received.at(from).data() + taken[from]);
      taken[from] += bytes_of(shared.tensor, parts[i].box);
    }
  }

  // Submits the read of `part` into `out`. Both must outlive the task.
  void start_reading(const SharedPart& part, Bytes& out) {
    std::shared_ptr<OpenTensor>& tensor = shared_tensors_[part.read->tensor];
    if (!tensor) tensor = std::make_shared<OpenTensor>(checkpoint_, part.read->tensor, options_);
    out.resize(bytes_of(part.read->tensor, part.box));
    pool_.submit([this, &part, &out, tensor] {
      if (options_.cancellation != nullptr) options_.cancellation->check();
      as_damage([&] {
        tensor->reader.read_chunk(part.read->stored_chunk, part.box, out.data(), row_major_strides(part.box.sizes));
      });
    });
  }

  // Copies row-major elements of an item's box, in the stored dtype, to the item's target.
  void store(const ReadItem& item, const std::uint8_t* elements) const {
    const DType wanted = std::get<TargetTensor>(targets_.at(item.target).value).dtype;
    place_of(item, item.box).fill(item.box, [&](std::uint8_t* out, std::span<const std::int64_t> strides) {
      put(item.box, checkpoint_->tensors()[item.tensor].dtype, elements, scales_of(item.tensor), wanted, out, strides);
    });
  }

  // Copies row-major elements of a box to strided memory. Multiplies them by their scales if there are any, and casts
  // them if the dtypes differ.
  static void put(BoxView box, DType stored, const std::uint8_t* elements, const BlockScales* scales, DType wanted,
                  std::uint8_t* out, std::span<const std::int64_t> strides) {
    thread_local Buffer as_float, as_wanted;
    const std::int64_t count = volume(box);
    if (scales != nullptr) {
      std::uint8_t* values = as_float.get(static_cast<std::size_t>(count) * sizeof(float)).data();
      cast(stored, elements, DType::float32, values, count);
      scales->apply(box, reinterpret_cast<float*>(values));
      stored = DType::float32;
      elements = values;
    }
    if (stored != wanted) {
      std::uint8_t* converted = as_wanted.get(static_cast<std::size_t>(count * dtype_size(wanted))).data();
      cast(stored, elements, wanted, converted, count);
      elements = converted;
    }
    copy_strided(box.sizes, dtype_size(wanted), elements, row_major_strides(box.sizes), out, strides);
  }

  // --- elements that this rank reads for itself

  // Returns the destination of `part` of an item.
  Place place_of(const ReadItem& item, const Box& part) const {
    const auto& target = std::get<TargetTensor>(targets_.at(item.target).value);
    const TargetChunk& chunk = target.chunks.at(item.target_chunk);
    if (chunk.memory.store) return {&chunk, nullptr};
    const std::vector<std::int64_t> row_major =
        chunk.memory.strides.empty() ? row_major_strides(chunk.box.sizes) : std::vector<std::int64_t>();
    const std::vector<std::int64_t>& strides = chunk.memory.strides.empty() ? row_major : chunk.memory.strides;
    std::int64_t offset = 0;
    for (std::size_t d = 0; d < part.rank(); ++d) offset += (part.offsets[d] - chunk.box.offsets[d]) * strides[d];
    return {&chunk, chunk.memory.data + offset * dtype_size(target.dtype)};
  }

  // Reads all items of one stored tensor.
  void read_tensor(std::span<const ReadItem> items) {
    const auto tensor = std::make_shared<OpenTensor>(checkpoint_, items[0].tensor, options_);
    for (const ReadItem& item : items) {
      const DType dtype = std::get<TargetTensor>(targets_.at(item.target).value).dtype;
      const BlockScales* const scales = scales_of(item.tensor);
      for_each_row_major_piece(item.box, element_bytes(item.tensor), kTaskBytes, [&](const Box& part) {
        add({tensor, item.stored_chunk, part, dtype, scales, place_of(item, part)});
      });
    }
    piece_done(*tensor);
  }

  void add(Piece piece) {
    piece.tensor->open_pieces.fetch_add(1);
    const std::int64_t bytes = volume(piece.box) * dtype_size(piece.tensor->reader.info().dtype);
    if (bytes + waiting_bytes_ > kTaskBytes) flush();
    waiting_bytes_ += bytes;
    waiting_.push_back(std::move(piece));
  }

  void flush() {
    if (waiting_.empty()) return;
    waiting_bytes_ = 0;
    pool_.submit([this, pieces = std::exchange(waiting_, {})] {
      for (const Piece& piece : pieces) {
        if (options_.cancellation != nullptr) options_.cancellation->check();
        as_damage([&] { read(piece); });
        progress_.advance(
            static_cast<std::uint64_t>(volume(piece.box) * dtype_size(piece.tensor->reader.info().dtype)));
        piece_done(*piece.tensor);
      }
    });
  }

  static void read(const Piece& piece) {
    piece.to.fill(piece.box, [&](std::uint8_t* out, std::span<const std::int64_t> strides) {
      const TensorReader& reader = piece.tensor->reader;
      const DType stored = reader.info().dtype;
      if (stored == piece.dtype && piece.scales == nullptr) {
        reader.read_chunk(piece.stored_chunk, piece.box, out, strides);
        return;
      }
      thread_local Buffer as_stored;
      std::uint8_t* from = as_stored.get(static_cast<std::size_t>(volume(piece.box) * dtype_size(stored))).data();
      reader.read_chunk(piece.stored_chunk, piece.box, from, row_major_strides(piece.box.sizes));
      put(piece.box, stored, from, piece.scales, piece.dtype, out, strides);
    });
  }

  // Runs `f`. A missing file of the checkpoint is damage: not_found becomes corrupt.
  template <typename F>
  static void as_damage(const F& f) {
    try {
      f();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::not_found) throw;
      fail(ErrorCode::corrupt, "a file of the checkpoint is missing, expected all of them: {}", error.what());
    }
  }

  void piece_done(OpenTensor& tensor) {
    if (tensor.open_pieces.fetch_sub(1) != 1) return;
    tensor.reader.verify_complete_chunks();
    read_bytes_ += tensor.reader.read_bytes();
  }

  const Targets& targets_;
  std::shared_ptr<const Checkpoint> checkpoint_;
  const ReadOptions& options_;
  ProgressSink& progress_;
  ReadReport report_;
  std::map<std::uint32_t, BlockScales> scales_;                          // by the tensor that they belong to
  std::map<std::uint32_t, std::shared_ptr<OpenTensor>> shared_tensors_;  // that this rank reads for several ranks
  std::vector<Piece> waiting_;
  std::int64_t waiting_bytes_ = 0;
  std::atomic<std::uint64_t> read_bytes_ = 0;
  ThreadPool pool_;  // last: its threads use all of the above
};

std::string open_step(const Storage& storage) { return fmt::format("open {}", storage.name()); }

}  // namespace

std::function<std::shared_ptr<const Checkpoint>()> prepare_to_open(const std::shared_ptr<const Storage>& storage,
                                                                   RankLink& link, const OpenOptions& given) {
  if (link.size() == 1) return [storage, given] { return Checkpoint::open(storage, given); };
  // The metadata, empty if it is not a DCP checkpoint, and the sidecar, empty if there is none.
  auto description = std::make_shared<const Bytes>(link.broadcast(link.agree_on(open_step(*storage), [&] {
    Bytes both;
    if (!link.is_coordinator()) return both;
    const std::string name(kMetadataFileName);
    append_text(both,
                as_text(storage->size_bytes(name) ? read_file(*storage, name, given.max_metadata_bytes) : Bytes()));
    const std::optional<Sidecar> sidecar = given.check_checksums ? read_sidecar(*storage) : std::nullopt;
    if (sidecar) append(both, write_sidecar(*sidecar));
    return both;
  })));
  return [storage, given, description = std::move(description)] {
    OpenOptions options = given;
    ByteCursor cursor(*description, "metadata from the coordinator");
    const ByteView metadata = as_bytes(cursor.text()), sidecar = cursor.rest();
    if (!metadata.empty()) {
      options.metadata =
          std::make_shared<OwnedSource>(description, metadata, storage->name_of(std::string(kMetadataFileName)));
    }
    if (sidecar.empty()) {
      options.check_checksums = false;
    } else {
      options.sidecar =
          std::make_shared<const Sidecar>(parse_sidecar(sidecar, storage->name_of(std::string(kSidecarFileName))));
    }
    return Checkpoint::open(storage, options);
  };
}

std::shared_ptr<const Checkpoint> open_on_all_ranks(const std::shared_ptr<const Storage>& storage, RankLink& link,
                                                    const OpenOptions& options) {
  const auto open = prepare_to_open(storage, link, options);
  return link.size() == 1 ? open() : link.agree_on(open_step(*storage), open);
}

ReadReport read_state(const Targets& targets, const std::shared_ptr<const Checkpoint>& checkpoint, RankLink& link,
                      const ReadOptions& options) {
  return link.agree_on(fmt::format("load {}", checkpoint->path().string()),
                       [&] { return Loader(targets, checkpoint, options).run(); });
}

}  // namespace tessera::checkpoint

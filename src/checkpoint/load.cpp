#include "tessera/checkpoint/load.h"

#include <algorithm>
#include <utility>

#include "checkpoint/buffer.h"
#include "checkpoint/file_names.h"
#include "tessera/base/cast.h"
#include "tessera/base/error.h"
#include "tessera/base/thread_pool.h"
#include "tessera/checkpoint/tensor_reader.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera::checkpoint {
namespace {

// One thread reads so much at a time: what is more is cut, what is less is taken together.
constexpr std::int64_t kTaskBytes = std::int64_t{4} << 20;

// Bytes that own themselves.
class OwnedSource final : public ByteSource {
 public:
  OwnedSource(Bytes bytes, std::string name) : bytes_(std::move(bytes)), source_(bytes_, std::move(name)) {}
  void read_at(std::uint64_t offset_bytes, MutableByteView out) const override { source_.read_at(offset_bytes, out); }
  std::uint64_t size_bytes() const override { return bytes_.size(); }
  const std::string& name() const override { return source_.name(); }

 private:
  Bytes bytes_;
  MemorySource source_;
};

// A stored tensor while it is read.
struct OpenTensor {
  OpenTensor(const std::shared_ptr<const Checkpoint>& checkpoint, std::size_t tensor) : reader(checkpoint, tensor) {}
  TensorReader reader;
  std::atomic<std::size_t> open_pieces = 1;  // one more until all are known
};

// Elements that are read at once.
struct Piece {
  std::shared_ptr<OpenTensor> tensor;
  std::size_t stored_chunk = 0;
  Box box;
  DType dtype = DType::float32;  // of the target
  std::uint8_t* out = nullptr;
  std::vector<std::int64_t> strides;
};

class Loader {
 public:
  Loader(const Targets& targets, std::shared_ptr<const Checkpoint> checkpoint, const LoadOptions& options)
      : targets_(targets),
        checkpoint_(std::move(checkpoint)),
        options_(options),
        progress_(options.progress != nullptr ? *options.progress : no_progress()),
        pool_(options.threads != 0 ? options.threads : std::max<std::size_t>(available_processors(), 4)) {}

  LoadReport run() {
    LoadPlanner planner;
    const LoadPlan plan = (options_.planner != nullptr ? *options_.planner : planner)
                              .create_local_plan(targets_, *checkpoint_, options_.rules);
    report_.missing = plan.missing;
    for (const ReadItem& item : plan.items) report_.wanted_bytes += wanted_bytes(item);
    progress_.begin("load", report_.wanted_bytes);
    for (std::size_t i = 0; i < plan.items.size();) {
      std::size_t last = i;
      while (last < plan.items.size() && plan.items[last].tensor == plan.items[i].tensor) ++last;
      read_tensor(std::span(plan.items).subspan(i, last - i));
      i = last;
    }
    flush();
    for (const LoadPlan::ObjectItem& item : plan.objects) {
      as_damage([&] { report_.objects.emplace(targets_.at(item.target).name, checkpoint_->load_object(item.object)); });
    }
    pool_.wait();
    progress_.end();
    report_.read_bytes = read_bytes_;
    return std::move(report_);
  }

 private:
  std::uint64_t wanted_bytes(const ReadItem& item) const {
    return static_cast<std::uint64_t>(volume(item.box) * dtype_size(checkpoint_->tensors()[item.tensor].dtype));
  }

  // All items of one stored tensor.
  void read_tensor(std::span<const ReadItem> items) {
    const auto tensor = std::make_shared<OpenTensor>(checkpoint_, items[0].tensor);
    const std::int64_t element_bytes = dtype_size(tensor->reader.info().dtype);
    for (const ReadItem& item : items) {
      const auto& target = std::get<TargetTensor>(targets_.at(item.target).value);
      const TargetChunk& chunk = target.chunks.at(item.target_chunk);
      const std::vector<std::int64_t> strides =
          chunk.memory.strides.empty() ? row_major_strides(chunk.box.sizes) : chunk.memory.strides;
      for (Box& part : split_row_major(item.box, element_bytes, kTaskBytes)) {
        std::int64_t offset = 0;
        for (std::size_t d = 0; d < part.rank(); ++d) offset += (part.offsets[d] - chunk.box.offsets[d]) * strides[d];
        add({tensor, item.stored_chunk, std::move(part), target.dtype,
             chunk.memory.data + offset * dtype_size(target.dtype), strides});
      }
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
    const TensorReader& reader = piece.tensor->reader;
    const DType stored = reader.info().dtype;
    if (stored == piece.dtype) {
      reader.read_chunk(piece.stored_chunk, piece.box, piece.out, piece.strides);
      return;
    }
    thread_local Buffer as_stored, as_wanted;
    const std::int64_t count = volume(piece.box);
    const std::vector<std::int64_t> row_major = row_major_strides(piece.box.sizes);
    std::uint8_t* from = as_stored.get(static_cast<std::size_t>(count * dtype_size(stored))).data();
    std::uint8_t* to = as_wanted.get(static_cast<std::size_t>(count * dtype_size(piece.dtype))).data();
    reader.read_chunk(piece.stored_chunk, piece.box, from, row_major);
    cast(stored, from, piece.dtype, to, count);
    copy_strided(piece.box.sizes, dtype_size(piece.dtype), to, row_major, piece.out, piece.strides);
  }

  // A file that the checkpoint refers to and that isn't there is damage.
  template <typename F>
  static void as_damage(const F& f) {
    try {
      f();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::not_found) throw;
      fail(ErrorCode::corrupt, "a file of the checkpoint is missing: {}", error.what());
    }
  }

  void piece_done(OpenTensor& tensor) {
    if (tensor.open_pieces.fetch_sub(1) != 1) return;
    if (options_.check_checksums) tensor.reader.verify_whole_chunks();
    read_bytes_ += tensor.reader.read_bytes();
  }

  const Targets& targets_;
  std::shared_ptr<const Checkpoint> checkpoint_;
  const LoadOptions& options_;
  ProgressSink& progress_;
  LoadReport report_;
  std::vector<Piece> waiting_;
  std::int64_t waiting_bytes_ = 0;
  std::atomic<std::uint64_t> read_bytes_ = 0;
  ThreadPool pool_;  // last: its threads use all of the above
};

}  // namespace

std::shared_ptr<const Checkpoint> open_on_all_ranks(const std::shared_ptr<const Storage>& storage, RankLink& link) {
  const std::string step = fmt::format("open {}", storage->name());
  if (link.size() == 1) return Checkpoint::open(storage);
  // Empty: no DCP checkpoint, each rank opens it for itself.
  const Bytes said = link.broadcast(link.agree_on(step, [&] {
    const std::string name(kMetadataFileName);
    return link.is_coordinator() && storage->size_bytes(name) ? read_file(*storage, name) : Bytes();
  }));
  return link.agree_on(step, [&] {
    OpenOptions options;
    if (!said.empty()) {
      options.metadata = std::make_shared<OwnedSource>(said, storage->name_of(std::string(kMetadataFileName)));
    }
    return Checkpoint::open(storage, options);
  });
}

LoadReport load(const Targets& targets, const std::shared_ptr<const Checkpoint>& checkpoint, RankLink& link,
                const LoadOptions& options) {
  return link.agree_on(fmt::format("load {}", checkpoint->path().string()),
                       [&] { return Loader(targets, checkpoint, options).run(); });
}

}  // namespace tessera::checkpoint

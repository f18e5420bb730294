#include "tessera/checkpoint/tensor_reader.h"

#include <algorithm>
#include <utility>

#include "checkpoint/buffer.h"
#include "checkpoint/source/mapped.h"
#include "tessera/base/cast.h"
#include "tessera/base/crc32.h"
#include "tessera/base/error.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera::checkpoint {
namespace {

// Contiguous runs shorter than this are expensive to read one by one. Then the span from the first to the last element
// is read at once if it has at most kSmallSpanBytes, or at most kMaxSpanWaste times the wanted bytes.
constexpr std::uint64_t kShortRunBytes = 512;
constexpr std::uint64_t kSmallSpanBytes = 64u << 10;
constexpr double kMaxSpanWaste = 4;
// With longer runs, nearly all of the span must be wanted.
constexpr double kMaxSpanWasteOfLongRuns = 1.05;
// If runs do not stay together in memory, as in a transpose, they are rearranged anyway. Then a span in the cache is
// cheaper than many reads, even with gaps.
constexpr std::uint64_t kRearrangedSpanBytes = 1u << 20;
constexpr double kMaxSpanWasteRearranged = 16;
// Bytes read before their CRC-32 is computed, small enough to stay in the cache.
constexpr std::uint64_t kChecksumBytes = 128u << 10;
constexpr std::uint64_t kVerifyBlockBytes = 4u << 20;

}  // namespace

struct TensorReader::Chunk {
  std::mutex mutex;  // of what follows
  // Whether the next three are set; then they do not change. std::call_once would make a system call for each chunk.
  std::atomic<bool> is_located = false;
  Extent extent;
  std::vector<std::int64_t> strides;  // of the extent; explicit even if row-major
  bool row_major = true;

  // The pieces of the checksummed range that were read, to verify it without reading it again.
  struct Piece {
    std::uint64_t offset_bytes, length_bytes;
    std::uint32_t crc32;
  };
  std::vector<Piece> pieces;

  // Returns the CRC-32 of the range if the pieces have each of its bytes exactly once.
  std::optional<std::uint32_t> crc_of_pieces() {
    std::sort(pieces.begin(), pieces.end(),
              [](const Piece& a, const Piece& b) { return a.offset_bytes < b.offset_bytes; });
    std::uint64_t at = extent.checksum->offset_bytes;
    std::uint32_t crc = 0;
    for (const Piece& piece : pieces) {
      if (piece.offset_bytes != at) return std::nullopt;
      crc = crc32_combine(crc, piece.crc32, piece.length_bytes);
      at += piece.length_bytes;
    }
    if (at != extent.checksum->offset_bytes + extent.checksum->length_bytes) return std::nullopt;
    return crc;
  }
};

TensorReader::TensorReader(std::shared_ptr<const Checkpoint> checkpoint, std::size_t tensor, bool sums_bytes)
    : checkpoint_(std::move(checkpoint)),
      tensor_(tensor),
      info_(&checkpoint_->tensors()[tensor]),
      index_(info_->chunks),
      sums_bytes_(sums_bytes),
      computed_(checkpoint_->backend_->computed()) {
  if (computed_ == nullptr) {
    chunks_ = std::make_unique<Chunk[]>(info_->chunks.size());
    return;
  }
  std::vector<std::size_t> numbers;
  computed_->view(tensor).add_inputs(numbers);
  for (const std::size_t number : numbers) {
    std::shared_ptr<const TensorReader>& reader = input_readers_[number];
    if (!reader) reader = computed_->reader(computed_->inputs()[number].tensor, sums_bytes);
  }
}

TensorReader::~TensorReader() = default;

TensorReader::Chunk& TensorReader::located(std::size_t i) const {
  Chunk& chunk = chunks_[i];
  if (chunk.is_located.load(std::memory_order_acquire)) return chunk;
  const std::lock_guard lock(chunk.mutex);
  if (chunk.is_located.load(std::memory_order_relaxed)) return chunk;
  chunk.extent = checkpoint_->locate(tensor_, i);
  chunk.row_major = chunk.extent.strides.empty();
  chunk.strides = chunk.row_major ? row_major_strides(info_->chunks[i].sizes) : chunk.extent.strides;
  chunk.is_located.store(true, std::memory_order_release);
  return chunk;
}

template <typename Read>
void TensorReader::with_chunk(std::size_t i, const Read& read) const {
  try {
    const Chunk& chunk = located(i);
    const std::shared_ptr<const ByteSource> file = checkpoint_->open_file(chunk.extent.file);
    read(chunk, *file);
  } catch (const Error& error) {
    const std::string name = fmt::format("tensor '{}'", printable(info_->name));
    if (std::string_view(error.what()).find(name) != std::string_view::npos) throw;
    fail(error.code(), "{}; read for {}, chunk {}", error.what(), name, to_string(info_->chunks[i]));
  }
}

void TensorReader::read(BoxView box, MutableByteView out) const {
  const std::int64_t element_bytes = dtype_size(info_->dtype);
  if (out.size() != static_cast<std::uint64_t>(volume(box) * element_bytes)) {
    fail(ErrorCode::internal, "read tensor '{}': a buffer of {} bytes, expected {} for {}", printable(info_->name),
         out.size(), volume(box) * element_bytes, to_string(box));
  }
  if (out.empty()) return;
  const std::vector<std::int64_t> out_strides = row_major_strides(box.sizes);
  if (computed_ != nullptr) return read_computed(Lattice::of(box, out_strides), out.data());
  std::int64_t found = 0;
  for (const std::size_t i : index_.overlapping(box)) {
    const std::optional<Box> part = intersect(box, info_->chunks[i]);
    if (!part) continue;
    found += volume(*part);
    std::int64_t out_offset = 0;
    for (std::size_t d = 0; d < box.rank(); ++d) out_offset += (part->offsets[d] - box.offsets[d]) * out_strides[d];
    read_chunk(i, *part, out.data() + out_offset * element_bytes, out_strides);
  }
  if (found != volume(box)) {
    fail(ErrorCode::corrupt, "{}: tensor '{}': the chunks hold {} elements of {}, expected {}",
         checkpoint_->path().string(), printable(info_->name), found, to_string(box), volume(box));
  }
}

void TensorReader::read_chunk(std::size_t i, BoxView box, std::uint8_t* out,
                              std::span<const std::int64_t> out_strides) const {
  if (is_empty(box)) return;
  if (computed_ != nullptr) return read_computed(Lattice::of(box, out_strides), out);
  with_chunk(i, [&](const Chunk& chunk, const ByteSource& file) {
    const bool is_copy = chunk.row_major && box == info_->chunks[i] && std::ranges::equal(out_strides, chunk.strides);
    if (!is_copy) return read_from(i, chunk, file, Lattice::of(box, out_strides), out);
    const auto bytes = static_cast<std::uint64_t>(volume(box) * dtype_size(info_->dtype));
    read_recorded(chunk, file, chunk.extent.offset_bytes, {out, bytes}, false);
  });
}

bool TensorReader::is_rearranged() const {
  const std::vector<std::int64_t>& shape = info_->shape;
  if (computed_ == nullptr || shape.empty() || is_empty(Box::full(shape))) return false;
  Box row(std::vector<std::int64_t>(shape.size(), 0), std::vector<std::int64_t>(shape.size(), 1));
  row.sizes.back() = shape.back();
  bool rearranged = false;
  const Lattice lattice = Lattice::of(row, row_major_strides(row.sizes));
  computed_->view(tensor_).for_each_part(lattice, [&](std::size_t /*input*/, const Lattice& part) {
    rearranged = rearranged || std::ranges::any_of(part.steps, [&](const Lattice::Step& step) {
                   return step.dim + 1 != part.base.size();
                 });
  });
  return rearranged;
}

void TensorReader::read_lattice(const Lattice& lattice, std::uint8_t* out) const {
  if (computed_ != nullptr) return read_computed(lattice, out);
  // What reaches beyond a chunk is split at its end.
  std::vector<Lattice> open = {lattice};
  while (!open.empty()) {
    Lattice part = std::move(open.back());
    open.pop_back();
    const Box bounds = part.bounds();
    const std::vector<std::size_t> overlapping = index_.overlapping(bounds);
    if (overlapping.empty()) {
      fail(ErrorCode::corrupt, "{}: tensor '{}': no chunk holds {}, expected chunks that cover the tensor",
           checkpoint_->path().string(), printable(info_->name), to_string(bounds));
    }
    const BoxView chunk = info_->chunks[overlapping[0]];
    if (contains(chunk, bounds)) {
      read_part(overlapping[0], part, out);
      continue;
    }
    for (std::size_t d = 0; d < bounds.rank(); ++d) {
      const std::int64_t chunk_end = chunk.offsets[d] + chunk.sizes[d];
      const bool begins_before = bounds.offsets[d] < chunk.offsets[d];
      if (!begins_before && bounds.offsets[d] + bounds.sizes[d] <= chunk_end) continue;
      split_lattice(std::move(part), d, begins_before ? chunk.offsets[d] : chunk_end, open, open);
      break;
    }
  }
}

void TensorReader::read_part(std::size_t i, const Lattice& part, std::uint8_t* out) const {
  with_chunk(i, [&](const Chunk& chunk, const ByteSource& file) { read_from(i, chunk, file, part, out); });
}

void TensorReader::read_from(std::size_t i, const Chunk& chunk, const ByteSource& file, const Lattice& part,
                             std::uint8_t* out) const {
  const LatticeInMemory memory = lattice_in_memory(part, info_->chunks[i].offsets, chunk.strides);
  read_strided(chunk, file, memory.first, memory.sizes, memory.strides, out + memory.out * dtype_size(info_->dtype),
               memory.out_strides, false);
}

void TensorReader::read_computed(const Lattice& lattice, std::uint8_t* out) const {
  computed_->view(tensor_).for_each_part(lattice, [&](std::size_t number, const Lattice& part) {
    const TensorReader& input = *input_readers_.at(number);
    const std::vector<DType>& casts = computed_->inputs()[number].casts;
    read_bytes_ += static_cast<std::uint64_t>(part.count() * dtype_size(input.info().dtype));
    if (casts.empty()) {
      input.read_lattice(part, out);
    } else {
      read_cast(input, casts, part, out);
    }
  });
}

// Reads elements as they are stored, densely, and casts them to each of `casts` in turn.
void TensorReader::read_cast(const TensorReader& input, std::span<const DType> casts, const Lattice& part,
                             std::uint8_t* out) const {
  const std::int64_t count = part.count();
  std::int64_t most_bytes = dtype_size(input.info().dtype);  // of an element on its way
  for (const DType dtype : casts) most_bytes = std::max(most_bytes, dtype_size(dtype));
  const auto buffer_bytes = static_cast<std::uint64_t>(count * most_bytes);
  if (buffer_bytes > kSpanBytes && count > 1) {
    const auto longest = std::ranges::max_element(part.steps, {}, &Lattice::Step::count);
    Lattice first = part, second = part;
    const auto step = static_cast<std::size_t>(longest - part.steps.begin());
    const std::int64_t half = longest->count / 2;
    first.steps[step].count = half;
    second.steps[step].count -= half;
    second.base[longest->dim] += half * longest->step;
    second.out += half * longest->out_stride;
    read_cast(input, casts, first, out);
    read_cast(input, casts, second, out);
    return;
  }
  // The inputs may be computed by a cast too, so the buffers are taken while they are in use.
  thread_local Buffer spare_stored, spare_cast;
  Buffer stored = std::exchange(spare_stored, {}), cast_to = std::exchange(spare_cast, {});
  Lattice dense = part;
  std::ranges::stable_sort(dense.steps, [](const Lattice::Step& a, const Lattice::Step& b) {
    return a.dim != b.dim ? a.dim < b.dim : a.step > b.step;
  });
  std::vector<std::int64_t> sizes, out_strides;
  for (const Lattice::Step& step : dense.steps) {
    sizes.push_back(step.count);
    out_strides.push_back(step.out_stride);
  }
  const std::vector<std::int64_t> strides = row_major_strides(sizes);
  for (std::size_t j = 0; j < sizes.size(); ++j) dense.steps[j].out_stride = strides[j];
  dense.out = 0;
  DType dtype = input.info().dtype;
  std::uint8_t* elements = stored.get(buffer_bytes).data();
  std::uint8_t* other = cast_to.get(buffer_bytes).data();
  input.read_lattice(dense, elements);
  for (const DType to : casts) {
    beyond_range_ += count_beyond_range(dtype, elements, to, count);
    cast(dtype, elements, to, other, count);
    std::swap(elements, other);
    dtype = to;
  }
  copy_strided(sizes, dtype_size(dtype), elements, strides, out + part.out * dtype_size(dtype), out_strides);
  spare_stored = std::move(stored);
  spare_cast = std::move(cast_to);
}

// Reads elements of a chunk at these strides, from element `first` on. Their span is the bytes from the first to the
// last wanted element. If the span is small or mostly wanted, it is read at once. Otherwise the box is halved in the
// dimension of the largest stride.
void TensorReader::read_strided(const Chunk& chunk, const ByteSource& file, std::int64_t first,
                                std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides,
                                std::uint8_t* out, std::span<const std::int64_t> out_strides, bool is_scattered) const {
  const std::int64_t element_bytes = dtype_size(info_->dtype);
  std::int64_t last = 0, count = 1, expected_stride = 1, run = 1;
  std::size_t widest = sizes.size();
  bool dense = true;  // the wanted elements are contiguous, in the file and in memory
  for (std::size_t d = sizes.size(); d-- > 0;) {
    last += (sizes[d] - 1) * strides[d];
    count *= sizes[d];
    if (sizes[d] == 1) continue;
    if (strides[d] == run) run *= sizes[d];
    dense = dense && strides[d] == expected_stride && out_strides[d] == expected_stride;
    expected_stride *= sizes[d];
    if (widest == sizes.size() || strides[d] > strides[widest]) widest = d;
  }
  const std::uint64_t offset_bytes = chunk.extent.offset_bytes + static_cast<std::uint64_t>(first * element_bytes);
  const auto span_bytes = static_cast<std::uint64_t>((last + 1) * element_bytes);
  const auto wanted_bytes = static_cast<std::uint64_t>(count * element_bytes);
  if (dense) {
    read_recorded(chunk, file, offset_bytes, {out, wanted_bytes}, is_scattered);
    return;
  }
  const bool is_short = static_cast<std::uint64_t>(run * element_bytes) < kShortRunBytes;
  const double waste = static_cast<double>(span_bytes) / static_cast<double>(wanted_bytes);
  const bool rearranges = strides.back() == 1 && out_strides.back() != 1 && sizes.back() > 1;
  if ((is_short && span_bytes <= kSmallSpanBytes) ||
      (rearranges && span_bytes <= kRearrangedSpanBytes && waste <= kMaxSpanWasteRearranged) ||
      (waste <= (is_short ? kMaxSpanWaste : kMaxSpanWasteOfLongRuns) && span_bytes <= kSpanBytes)) {
    thread_local Buffer buffer;
    const MutableByteView span = buffer.get(span_bytes);
    read_recorded(chunk, file, offset_bytes, span, is_scattered);
    copy_strided(sizes, element_bytes, span.data(), strides, out, out_strides);
    return;
  }
  // With larger gaps, runs are collected first: rearranging many of them at once uses each cache line of the
  // destination once.
  if (rearranges && waste > kMaxSpanWasteRearranged && wanted_bytes <= kRearrangedSpanBytes) {
    thread_local Buffer buffer;
    const MutableByteView collected = buffer.get(wanted_bytes);
    const std::vector<std::int64_t> dense_strides = row_major_strides(sizes);
    read_strided(chunk, file, first, sizes, strides, collected.data(), dense_strides, is_scattered);
    copy_strided(sizes, element_bytes, collected.data(), dense_strides, out, out_strides);
    return;
  }
  std::vector<std::int64_t> half(sizes.begin(), sizes.end());
  half[widest] = sizes[widest] / 2;
  read_strided(chunk, file, first, half, strides, out, out_strides, true);
  first += half[widest] * strides[widest];
  out += half[widest] * out_strides[widest] * element_bytes;
  half[widest] = sizes[widest] - half[widest];
  read_strided(chunk, file, first, half, strides, out, out_strides, true);
}

void TensorReader::read_recorded(const Chunk& chunk, const ByteSource& file, std::uint64_t offset_bytes,
                                 MutableByteView out, bool is_scattered) const {
  read_bytes_ += out.size();
  if (compares_parts_) {
    if (cancellation_ != nullptr) cancellation_->check();
    is_scattered = false;
  }
  const auto read = [&](std::uint64_t offset, MutableByteView part) {
    if (is_scattered) {
      file.read_scattered_at(offset, part);
    } else {
      file.read_at(offset, part);
    }
  };
  // One checksum is enough.
  if (!sums_bytes_ || !chunk.extent.checksum || (!is_scattered && file.compares_every_byte())) {
    return read(offset_bytes, out);
  }
  std::uint32_t crc = 0;
  for (std::uint64_t done = 0; done < out.size();) {
    const MutableByteView part = out.subspan(done, std::min(kChecksumBytes, out.size() - done));
    read(offset_bytes + done, part);
    crc = crc32(part, crc);
    done += part.size();
  }
  auto& changing = const_cast<Chunk&>(chunk);  // only `pieces` changes, under the mutex
  const std::lock_guard lock(changing.mutex);
  changing.pieces.push_back({offset_bytes, out.size(), crc});
}

void TensorReader::verify_checksums() const {
  if (computed_ != nullptr) {
    verify_complete_chunks();
    return;
  }
  for (std::size_t i = 0; i < info_->chunks.size(); ++i) {
    Chunk& chunk = chunks_[i];
    const std::lock_guard lock(chunk.mutex);
    if (!chunk.extent.checksum || chunk.pieces.empty()) continue;
    const Extent::Checksum& expected = *chunk.extent.checksum;
    std::optional<std::uint32_t> found = chunk.crc_of_pieces();
    const std::shared_ptr<const ByteSource> file = checkpoint_->open_file(chunk.extent.file);
    if (!found) {
      thread_local Buffer buffer;
      std::uint32_t crc = 0;
      for (std::uint64_t done = 0; done < expected.length_bytes;) {
        const MutableByteView block = buffer.get(std::min(kVerifyBlockBytes, expected.length_bytes - done));
        file->read_at(expected.offset_bytes + done, block);
        crc = crc32(block, crc);
        done += block.size();
      }
      found = crc;
    }
    check_checksum(i, *found);
  }
}

bool TensorReader::verify_complete_chunks() const {
  if (computed_ != nullptr) return computed_->verify_complete(input_readers_);
  bool all = true;
  for (std::size_t i = 0; i < info_->chunks.size(); ++i) {
    Chunk& chunk = chunks_[i];
    const std::lock_guard lock(chunk.mutex);
    if (!chunk.extent.checksum || chunk.pieces.empty()) continue;
    const std::optional<std::uint32_t> found = chunk.crc_of_pieces();
    if (found) check_checksum(i, *found);
    all = all && found;
  }
  return all;
}

void TensorReader::check_checksum(std::size_t i, std::uint32_t found) const {
  const Chunk& chunk = chunks_[i];
  const Extent::Checksum& expected = *chunk.extent.checksum;
  if (found == expected.crc32) return;
  fail(ErrorCode::corrupt, "{} at byte {}: tensor '{}', chunk {}: {} bytes have CRC-32 {:08x}, expected {:08x}",
       checkpoint_->open_file(chunk.extent.file)->name(), expected.offset_bytes, printable(info_->name),
       to_string(info_->chunks[i]), expected.length_bytes, found, expected.crc32);
}

}  // namespace tessera::checkpoint

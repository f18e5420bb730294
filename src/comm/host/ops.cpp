#include "comm/host/ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "comm/host/reduce.h"

namespace tessera::comm {

namespace {

using Kind = OpHeader::Kind;

// What is copied before others are told, so that they read it while it is in the cache.
constexpr std::size_t kBlockBytes = std::size_t{64} << 10;
// Blocks of reductions. Law: each is a multiple of kBlockUnit, and that of the size of every element, so that no block
// begins or ends within an element.
constexpr std::size_t kLeastBlockBytes = 4096, kBlockUnit = alignof(OpHeader);
static_assert(kBlockBytes % kBlockUnit == 0 && kLeastBlockBytes % kBlockUnit == 0);

std::uint8_t* bytes_of(const at::Tensor& tensor) { return static_cast<std::uint8_t*>(tensor.data_ptr()); }

std::size_t byte_count(const at::Tensor& tensor) { return tensor.nbytes(); }

std::size_t size_of(const MemoryPieces& pieces) {
  std::size_t size_bytes = 0;
  for (const MemoryPiece& piece : pieces) size_bytes += piece.size_bytes;
  return size_bytes;
}

void copy_or_clear(std::uint8_t* to, const std::uint8_t* from, std::size_t size_bytes) {
  if (from != nullptr) {
    std::memcpy(to, from, size_bytes);
  } else {
    std::memset(to, 0, size_bytes);
  }
}

std::string_view name_of(Kind kind) {
  switch (kind) {
    case Kind::barrier:
      return "barrier";
    case Kind::broadcast:
      return "broadcast";
    case Kind::all_gather:
      return "all-gather";
    case Kind::all_to_all:
      return "all-to-all";
    case Kind::reduce_scatter:
      return "reduce-scatter";
    case Kind::all_reduce:
      return "all-reduce";
  }
  return "no known collective";
}

std::string to_string(const OpHeader& header) {
  return fmt::format("{} {} of {} bytes ({})", name_of(header.kind), header.number, header.common, header.detail);
}

std::uint32_t detail_of(const at::Tensor& tensor, ReduceOp op) {
  return static_cast<std::uint32_t>(tensor.scalar_type()) << 8 | static_cast<std::uint32_t>(op);
}

}  // namespace

MemoryPieces pieces_of(const at::Tensor& tensor) { return {{bytes_of(tensor), byte_count(tensor)}}; }

std::vector<MemoryPieces> each_piece(const std::vector<at::Tensor>& tensors) {
  std::vector<MemoryPieces> pieces;
  pieces.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) pieces.push_back(pieces_of(tensor));
  return pieces;
}

std::vector<std::vector<at::Tensor>> each_alone(const std::vector<at::Tensor>& tensors) {
  std::vector<std::vector<at::Tensor>> alone;
  alone.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) alone.push_back({tensor});
  return alone;
}

std::vector<at::Tensor> parts_of(const at::Tensor& tensor, int parts) {
  const std::int64_t numel = tensor.numel(), most = (numel + parts - 1) / parts;
  std::vector<std::int64_t> numels;
  numels.reserve(static_cast<std::size_t>(parts));
  for (int i = 0; i < parts; ++i) numels.push_back(std::clamp(numel - i * most, std::int64_t{0}, most));
  return divided(tensor, numels);
}

std::vector<at::Tensor> divided(const at::Tensor& tensor, const std::vector<std::int64_t>& numels) {
  const at::Tensor flat = tensor.view({-1});
  std::vector<at::Tensor> parts;
  parts.reserve(numels.size());
  std::int64_t begin = 0;
  for (const std::int64_t numel : numels) {
    parts.push_back(flat.narrow(0, begin, numel));
    begin += numel;
  }
  return parts;
}

std::size_t reduction_block_bytes(std::size_t ring_bytes, std::size_t parts) {
  return std::clamp(ring_bytes / 2 / parts / kBlockUnit * kBlockUnit, kLeastBlockBytes, kBlockBytes);
}

HostOp::HostOp(const Host& host, const OpHeader& header, std::vector<at::Tensor> kept)
    : header_(header), kept_(std::move(kept)), sources_(static_cast<std::size_t>(host.size())) {
  Source& own = source(host.rank());
  own.has_begun = own.has_ended = true;
}

void HostOp::add_piece(MemoryPiece piece) {
  if (piece.size_bytes == 0) return;
  pieces_.push_back(piece);
  header_.following += piece.size_bytes;
}

std::size_t HostOp::fill(std::uint8_t* to, std::size_t most) {
  std::size_t filled = 0;
  while (filled < most && piece_ < pieces_.size()) {
    const MemoryPiece& piece = pieces_[piece_];
    const std::size_t size_bytes = std::min(most - filled, piece.size_bytes - in_piece_);
    copy_or_clear(to + filled, piece.data == nullptr ? nullptr : piece.data + in_piece_, size_bytes);
    filled += size_bytes;
    in_piece_ += size_bytes;
    if (in_piece_ == piece.size_bytes) ++piece_, in_piece_ = 0;
  }
  sent_bytes_ += filled;
  return filled;
}

bool HostOp::send(Host& host) {
  std::size_t room = host.room();
  const std::uint64_t until = most_at_once() == SIZE_MAX ? UINT64_MAX : sent_bytes_ + most_at_once();
  if (!has_sent_header_) {
    if (room < sizeof(header_)) return false;
    padding_ = (alignof(OpHeader) - header_.following % alignof(OpHeader)) % alignof(OpHeader);
    header_.following += padding_;
    std::memcpy(host.space(), &header_, sizeof(header_));
    has_sent_header_ = true;
    // What is small is sent with the header.
    const std::size_t size_bytes =
        sizeof(header_) + fill(host.space() + sizeof(header_), std::min(room, kBlockBytes) - sizeof(header_));
    host.commit(size_bytes);
    room -= size_bytes;
  }
  while (piece_ < pieces_.size()) {
    if (sent_bytes_ >= until) return false;
    if (room == 0 && (room = host.room()) == 0) return false;
    const std::size_t size_bytes = fill(host.space(), std::min(room, kBlockBytes));
    host.commit(size_bytes);
    room -= size_bytes;
  }
  if (padding_ > room && padding_ > host.room()) return false;
  if (padding_ > 0) host.commit(std::exchange(padding_, 0));
  return has_sent_ = true;
}

void HostOp::skip(Host& host, int r, std::uint64_t size_bytes) {
  host.consume(r, size_bytes);
  source(r).position += size_bytes;
}

// Reads the header of another rank.
bool HostOp::begin(Host& host, int r) {
  if (source(r).has_begun) return true;
  OpHeader theirs;
  if (host.available(r) < sizeof(theirs)) return false;
  std::memcpy(&theirs, host.front(r), sizeof(theirs));
  if (theirs.kind != header_.kind || theirs.number != header_.number || theirs.common != header_.common ||
      theirs.detail != header_.detail) {
    mismatch_ = fmt::format("rank {} of those on this host is in {}, expected {} as this rank", r, to_string(theirs),
                            to_string(header_));
    return false;
  }
  host.consume(r, sizeof(theirs));
  source(r).following = theirs.following;
  source(r).has_begun = true;
  source(r).has_ended = theirs.following == 0;
  return true;
}

bool HostOp::receive(Host& host) {
  bool all_have_begun = true;
  for (int r = 0; r < host.size(); ++r) all_have_begun = begin(host, r) && all_have_begun;
  take(host);
  return all_have_begun &&
         std::all_of(sources_.begin(), sources_.end(), [](const Source& source) { return source.has_ended; });
}

bool HostOp::awaits(int r) const { return !has_sent_ || !sources_[static_cast<std::size_t>(r)].has_ended; }

namespace {

// A collective in which elements move. Each rank takes one range of bytes of each other rank's.
class Move final : public HostOp {
 public:
  // The range for a rank among those that follow a table of them.
  struct Place {
    std::uint64_t begin = 0, size_bytes = 0;
  };

  // The ranks' ranges may be preceded by a table of the place of each rank's.
  Move(const Host& host, const OpHeader& header, std::vector<at::Tensor> kept, bool has_table = false)
      : HostOp(host, header, std::move(kept)), has_table_(has_table), ranges_(static_cast<std::size_t>(host.size())) {}

  void send_pieces(const MemoryPieces& pieces) {
    for (const MemoryPiece& piece : pieces) add_piece(piece);
  }
  void send_table(std::vector<Place> places) {
    table_ = std::move(places);
    add_piece({reinterpret_cast<std::uint8_t*>(table_.data()), table_.size() * sizeof(Place)});
  }
  // Appends `out` to where the range of rank `r` is put, which begins at byte 0, or at the place in its table.
  void take_into(int r, const MemoryPieces& out) {
    Range& range = ranges_[static_cast<std::size_t>(r)];
    range.awaits_table = has_table_;
    for (const MemoryPiece& piece : out) {
      if (piece.size_bytes == 0) continue;
      range.size_bytes += piece.size_bytes;
      range.outs.push_back(piece);
    }
  }

 private:
  struct Range {
    MemoryPieces outs;  // none is empty
    std::uint64_t size_bytes = 0, begin = 0;
    bool awaits_table = false;
    std::uint64_t taken = 0;
    std::size_t out = 0, in_out = 0;  // the place in `outs`
  };

  void take(Host& host) override {
    for (int r = 0; r < host.size(); ++r) {
      if (source(r).has_begun && !source(r).has_ended) take_from(host, r);
    }
  }

  // Returns false until the table has arrived.
  bool read_table(Host& host, int r, Range& range) {
    std::vector<Place> places(static_cast<std::size_t>(host.size()));
    const std::size_t size_bytes = places.size() * sizeof(Place);
    if (host.available(r) < size_bytes) return false;
    std::memcpy(places.data(), host.front(r), size_bytes);
    skip(host, r, size_bytes);
    const Place& comes = places[static_cast<std::size_t>(host.rank())];
    if (comes.size_bytes != range.size_bytes) {
      throw std::runtime_error(fmt::format("rank {} of those on this host sends {} bytes to this rank, expected {}", r,
                                           comes.size_bytes, range.size_bytes));
    }
    range.begin = source(r).position + comes.begin;
    range.awaits_table = false;
    return true;
  }

  void take_from(Host& host, int r) {
    Range& range = ranges_[static_cast<std::size_t>(r)];
    if (range.awaits_table && !read_table(host, r, range)) return;
    if (range.taken == 0 && source(r).position < range.begin) skip(host, r, range.begin - source(r).position);
    while (range.taken < range.size_bytes) {
      const std::uint64_t available = host.available(r);
      if (available == 0) return;
      const std::uint64_t most = std::min<std::uint64_t>({available, range.size_bytes - range.taken, kBlockBytes});
      for (std::uint64_t done = 0; done < most;) {
        const MemoryPiece& out = range.outs[range.out];
        const std::uint64_t size_bytes = std::min<std::uint64_t>(most - done, out.size_bytes - range.in_out);
        std::memcpy(out.data + range.in_out, host.front(r) + done, size_bytes);
        done += size_bytes;
        range.in_out += size_bytes;
        if (range.in_out == out.size_bytes) ++range.out, range.in_out = 0;
      }
      range.taken += most;
      skip(host, r, most);
    }
    skip(host, r, source(r).following - source(r).position);
    source(r).has_ended = true;
  }

  bool has_table_;
  std::vector<Place> table_;
  std::vector<Range> ranges_;  // by source
};

// Walks through pieces from their beginning.
class PieceCursor {
 public:
  explicit PieceCursor(const MemoryPieces& pieces) : pieces_(&pieces) {}
  // Returns the next bytes that are together, at most `most` of them.
  MemoryPiece next(std::size_t most) {
    while ((*pieces_)[piece_].size_bytes == done_) ++piece_, done_ = 0;
    const MemoryPiece& piece = (*pieces_)[piece_];
    const MemoryPiece found{piece.data == nullptr ? nullptr : piece.data + done_,
                            std::min(most, piece.size_bytes - done_)};
    done_ += found.size_bytes;
    return found;
  }

 private:
  const MemoryPieces* pieces_;
  std::size_t piece_ = 0, done_ = 0;
};

// A collective in which each rank reduces one part of what all have, of which all ranks send blocks in turn: a row has
// a block of each part but the rank's own.
//
// Law: it ends even if a row is larger than a ring. A rank that waits for its block has skipped what precedes it in all
// streams. So if the ranks before it have reduced their blocks of the row, all writers have room for its block.
class Reduction final : public HostOp {
 public:
  // With one part, each rank reduces all of it.
  Reduction(const Host& host, const OpHeader& header, const at::Tensor& out, std::vector<MemoryPieces> parts,
            std::vector<at::Tensor> kept, ReduceOp op)
      : HostOp(host, header, std::move(kept)),
        out_(out),
        dtype_(out.scalar_type()),
        item_bytes_(out.element_size()),
        op_(op),
        is_shared_(parts.size() == 1),
        parts_(std::move(parts)),
        own_(parts_[is_shared_ ? 0 : static_cast<std::size_t>(host.rank())]) {
    for (const MemoryPieces& part : parts_) part_bytes_.push_back(size_of(part));
    block_bytes_ = reduction_block_bytes(host.ring_bytes(), is_shared_ ? 1 : parts_.size() - 1);
    const std::size_t most = *std::max_element(part_bytes_.begin(), part_bytes_.end());
    rows_ = (most + block_bytes_ - 1) / block_bytes_;
    std::vector<PieceCursor> cursors(parts_.begin(), parts_.end());
    for (std::size_t row = 0; row < rows_; ++row) {
      for (std::size_t part = 0; part < parts_.size(); ++part) {
        if (!is_shared_ && static_cast<int>(part) == host.rank()) continue;
        for (std::size_t left = block_of(part, row); left > 0;) {
          const MemoryPiece piece = cursors[part].next(left);
          add_piece(piece);
          left -= piece.size_bytes;
        }
      }
    }
    is_positioned_.resize(static_cast<std::size_t>(host.size()));
  }

  std::uint64_t moved_bytes() const override { return is_shared_ ? sent_bytes() + row_ * block_bytes_ : 0; }

 private:
  // With one part, what is sent may be overwritten by the result, so that sending is at most a block ahead, and the
  // block is still in the cache.
  std::size_t most_at_once() const override { return is_shared_ ? kBlockBytes : SIZE_MAX; }

  // Returns the bytes of a part in a row.
  std::size_t block_of(std::size_t part, std::size_t row) const {
    const std::size_t begin = row * block_bytes_;
    return begin >= part_bytes_[part] ? 0 : std::min(block_bytes_, part_bytes_[part] - begin);
  }

  // Skips the blocks of rank `r` in this row that are before that of this rank, or after it.
  void skip_blocks(Host& host, int r, bool before) {
    if (is_shared_) return;
    std::uint64_t size_bytes = 0;
    for (int part = before ? 0 : host.rank() + 1; part < (before ? host.rank() : host.size()); ++part) {
      if (part != r) size_bytes += block_of(static_cast<std::size_t>(part), row_);
    }
    skip(host, r, size_bytes);
  }

  // Reduces the block of this row, which all ranks have sent.
  void reduce_block(Host& host, std::size_t size_bytes) {
    alignas(64) static const std::uint8_t kZeros[kBlockBytes] = {};
    std::vector<const void*> sources(static_cast<std::size_t>(host.size()));
    for (std::size_t done = 0; done < size_bytes;) {
      const MemoryPiece own = own_.next(size_bytes - done);
      for (int r = 0; r < host.size(); ++r) {
        sources[static_cast<std::size_t>(r)] = r != host.rank()      ? host.front(r) + done
                                               : own.data != nullptr ? own.data
                                                                     : kZeros;
      }
      reduce_elements(dtype_, op_, bytes_of(out_) + row_ * block_bytes_ + done, sources,
                      static_cast<std::int64_t>(own.size_bytes / item_bytes_));
      done += own.size_bytes;
    }
  }

  void take(Host& host) override {
    for (; row_ < rows_; ++row_) {
      const std::size_t size_bytes = block_of(is_shared_ ? 0 : static_cast<std::size_t>(host.rank()), row_);
      if (is_shared_ && sent_bytes() < row_ * block_bytes_ + size_bytes) return;
      bool have_all_come = true;
      for (int r = 0; r < host.size(); ++r) {
        if (r == host.rank()) continue;
        if (source(r).has_begun && is_positioned_[static_cast<std::size_t>(r)] == 0) {
          skip_blocks(host, r, /*before=*/true);
          is_positioned_[static_cast<std::size_t>(r)] = 1;
        }
        have_all_come = have_all_come && source(r).has_begun && host.available(r) >= size_bytes;
      }
      if (!have_all_come) return;
      reduce_block(host, size_bytes);
      for (int r = 0; r < host.size(); ++r) {
        if (r == host.rank()) continue;
        skip(host, r, size_bytes);
        skip_blocks(host, r, /*before=*/false);
        is_positioned_[static_cast<std::size_t>(r)] = 0;
        if (row_ + 1 < rows_) continue;
        skip(host, r, source(r).following - source(r).position);
        source(r).has_ended = true;
      }
    }
  }

  const at::Tensor out_;
  const at::ScalarType dtype_;
  const std::size_t item_bytes_;
  const ReduceOp op_;
  const bool is_shared_;
  const std::vector<MemoryPieces> parts_;
  PieceCursor own_;
  std::vector<std::size_t> part_bytes_;
  std::size_t block_bytes_ = 0, rows_ = 0, row_ = 0;
  std::vector<std::uint8_t> is_positioned_;  // by source: whether its blocks before this rank's were skipped
};

}  // namespace

EngineOpPtr barrier_op(const Host& host) {
  return std::make_shared<Move>(host, OpHeader{.kind = Kind::barrier}, std::vector<at::Tensor>());
}

EngineOpPtr broadcast_op(const Host& host, const at::Tensor& tensor, int root) {
  const OpHeader header{
      .kind = Kind::broadcast, .detail = static_cast<std::uint32_t>(root), .common = byte_count(tensor)};
  auto op = std::make_shared<Move>(host, header, std::vector<at::Tensor>{tensor});
  if (root == host.rank()) {
    op->send_pieces(pieces_of(tensor));
  } else {
    op->take_into(root, pieces_of(tensor));
  }
  return op;
}

EngineOpPtr all_gather_op(const Host& host, const std::vector<std::vector<at::Tensor>>& parts) {
  std::vector<at::Tensor> kept;
  std::uint64_t all = 0;
  for (const std::vector<at::Tensor>& part : parts) {
    for (const at::Tensor& piece : part) {
      kept.push_back(piece);
      all += byte_count(piece);
    }
  }
  auto op = std::make_shared<Move>(host, OpHeader{.kind = Kind::all_gather, .common = all}, std::move(kept));
  for (int r = 0; r < host.size(); ++r) {
    for (const at::Tensor& piece : parts[static_cast<std::size_t>(r)]) {
      if (r == host.rank()) op->send_pieces(pieces_of(piece));
      op->take_into(r, pieces_of(piece));
    }
  }
  return op;
}

EngineOpPtr all_to_all_op(const Host& host, const std::vector<MemoryPieces>& outs, const std::vector<MemoryPieces>& ins,
                          std::vector<at::Tensor> kept) {
  auto op = std::make_shared<Move>(host, OpHeader{.kind = Kind::all_to_all}, std::move(kept), /*has_table=*/true);
  // What several ranks get is sent once.
  std::vector<Move::Place> places(ins.size());
  std::vector<std::size_t> sent;  // the first rank of each list of pieces
  std::uint64_t size_bytes = 0;
  for (std::size_t i = 1; i < ins.size(); ++i) {
    const std::size_t to = (static_cast<std::size_t>(host.rank()) + i) % ins.size();
    const auto same = std::find_if(sent.begin(), sent.end(), [&](std::size_t other) { return ins[other] == ins[to]; });
    if (same != sent.end()) {
      places[to] = places[*same];
      continue;
    }
    places[to] = {size_bytes, size_of(ins[to])};
    size_bytes += places[to].size_bytes;
    sent.push_back(to);
  }
  op->send_table(std::move(places));
  for (const std::size_t to : sent) op->send_pieces(ins[to]);
  for (int r = 0; r < host.size(); ++r) op->take_into(r, outs[static_cast<std::size_t>(r)]);
  return op;
}

EngineOpPtr reduce_scatter_op(const Host& host, const at::Tensor& out, std::vector<MemoryPieces> parts,
                              std::vector<at::Tensor> kept, ReduceOp op) {
  std::uint64_t all = 0;
  for (const MemoryPieces& part : parts) all += size_of(part);
  const OpHeader header{.kind = Kind::reduce_scatter, .detail = detail_of(out, op), .common = all};
  kept.push_back(out);
  return std::make_shared<Reduction>(host, header, out, std::move(parts), std::move(kept), op);
}

EngineOpPtr all_reduce_op(const Host& host, const at::Tensor& out, const at::Tensor& input, ReduceOp op) {
  const OpHeader header{.kind = Kind::all_reduce, .detail = detail_of(out, op), .common = byte_count(out)};
  return std::make_shared<Reduction>(host, header, out, std::vector<MemoryPieces>{pieces_of(input)},
                                     std::vector<at::Tensor>{out, input}, op);
}

}  // namespace tessera::comm

#pragma once
// Collectives as bytes in streams.
//
// Each rank adds to its stream, for one collective after the other, a header and what it sends; every rank reads all
// streams in the same order and takes what it needs. So ranks need no other agreement on where data is, and may be as
// far apart as rings have room.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/host/host.h"
#include "tessera/base/reduce_op.h"
#include "tessera/comm/internal/memory_pieces.h"

namespace tessera::comm {

MemoryPieces pieces_of(const at::Tensor& tensor);
// Returns the pieces of each tensor.
std::vector<MemoryPieces> each_piece(const std::vector<at::Tensor>& tensors);
// Returns each tensor by itself.
std::vector<std::vector<at::Tensor>> each_alone(const std::vector<at::Tensor>& tensors);
// Divides the elements of a tensor: into parts as equal as possible, of which the last may be smaller, or into these.
std::vector<at::Tensor> parts_of(const at::Tensor& tensor, int parts);
std::vector<at::Tensor> divided(const at::Tensor& tensor, const std::vector<std::int64_t>& numels);

// Returns how many bytes of each part one row of a reduction has, of `parts` that a rank sends. Law: a multiple of
// alignof(OpHeader), and so of the size of every element, and less than a ring.
std::size_t reduction_block_bytes(std::size_t ring_bytes, std::size_t parts);

// What all ranks of a collective have in common. Headers, and so elements, are aligned.
struct alignas(64) OpHeader {
  enum class Kind : std::uint32_t { barrier = 1, broadcast, all_gather, all_to_all, reduce_scatter, all_reduce };
  Kind kind = Kind::barrier;
  std::uint32_t detail = 0;     // of reductions the dtype and operation, of a broadcast the root
  std::uint64_t number = 0;     // of the collective among those of the group
  std::uint64_t common = 0;     // bytes, equal on all ranks; 0 if they have different numbers of bytes
  std::uint64_t following = 0;  // bytes of this rank after the header, with padding
};

// What an engine runs: a collective of the host's ranks, or what one of them does before or after it.
class EngineOp {
 public:
  EngineOp() = default;
  virtual ~EngineOp() = default;
  EngineOp(const EngineOp&) = delete;
  EngineOp& operator=(const EngineOp&) = delete;

  // Takes the number of the next collective of the host. Returns false if it is none.
  virtual bool take_number(std::uint64_t /*number*/) { return false; }
  // Sends what there is room for, or some of it if it sends and receives by turns. Returns whether it has all.
  virtual bool send(Host& host) = 0;
  // Takes what has arrived. Returns whether that was all. Without a call of send() before, nothing arrives.
  virtual bool receive(Host& host) = 0;
  // Returns which rank is in which other collective, empty if none is known to be.
  virtual std::string mismatch() const { return {}; }
  // Returns whether something is missing that rank `r` of the host sends.
  virtual bool awaits(int r) const = 0;
  // Returns how many bytes it has sent and taken if it sends and receives by turns, else 0. While this grows, there may
  // be more to do.
  virtual std::uint64_t moved_bytes() const { return 0; }
  // Whether it uses the link between hosts. What uses it, and what does not, each keep an order of their own.
  virtual bool is_on_link() const { return false; }
};
using EngineOpPtr = std::shared_ptr<EngineOp>;

// One collective of the host's ranks, as this rank takes part in it.
class HostOp : public EngineOp {
 public:
  HostOp(const Host& host, const OpHeader& header, std::vector<at::Tensor> kept);

  bool take_number(std::uint64_t number) final {
    header_.number = number;
    return true;
  }
  bool send(Host& host) final;
  // Returns false if another rank is in another collective.
  bool receive(Host& host) final;
  std::string mismatch() const final { return mismatch_; }
  bool awaits(int r) const final;

 protected:
  struct Source {
    bool has_begun = false, has_ended = false;
    std::uint64_t position = 0;  // bytes after the header that were taken or skipped
    std::uint64_t following = 0;
  };
  void add_piece(MemoryPiece piece);
  // Copies the next bytes of the pieces, at most `most`, and returns how many there were.
  std::size_t fill(std::uint8_t* to, std::size_t most);
  // Returns how many bytes of the pieces were sent.
  std::uint64_t sent_bytes() const { return sent_bytes_; }
  // Returns the most bytes that one call of send() sends.
  virtual std::size_t most_at_once() const { return SIZE_MAX; }
  Source& source(int r) { return sources_[static_cast<std::size_t>(r)]; }
  void skip(Host& host, int r, std::uint64_t size_bytes);
  // Takes what follows the headers. Sets has_ended of sources.
  virtual void take(Host& host) = 0;

 private:
  bool begin(Host& host, int r);

  OpHeader header_;
  std::vector<at::Tensor> kept_;
  MemoryPieces pieces_;  // after the header
  std::vector<Source> sources_;
  std::size_t piece_ = 0, in_piece_ = 0;
  std::uint64_t sent_bytes_ = 0;
  std::size_t padding_ = 0;  // after the pieces
  bool has_sent_header_ = false, has_sent_ = false;
  std::string mismatch_;
};

EngineOpPtr barrier_op(const Host& host);
EngineOpPtr broadcast_op(const Host& host, const at::Tensor& tensor, int root);
// `parts[r]` is where the bytes of rank r are put, in order; this rank sends its own part.
EngineOpPtr all_gather_op(const Host& host, const std::vector<std::vector<at::Tensor>>& parts);
// This rank sends `ins[r]` to rank r, and receives `outs[r]` from it; nothing to and from itself. `kept` is what the
// pieces are in.
EngineOpPtr all_to_all_op(const Host& host, const std::vector<MemoryPieces>& outs, const std::vector<MemoryPieces>& ins,
                          std::vector<at::Tensor> kept);
// Reduces parts of what all ranks have, of which each rank has its own pieces in memory: rank r has the result of part
// r in `out`, which may be that part. `kept` is what the pieces are in.
EngineOpPtr reduce_scatter_op(const Host& host, const at::Tensor& out, std::vector<MemoryPieces> parts,
                              std::vector<at::Tensor> kept, ReduceOp op);
// Reduces `input` to `out`, which may be the same: each rank reduces all of it. So each receives all of all others,
// which is no more than by a reduce-scatter and an all-gather if there are two ranks.
EngineOpPtr all_reduce_op(const Host& host, const at::Tensor& out, const at::Tensor& input, ReduceOp op);

}  // namespace tessera::comm

#pragma once
// Memory that all ranks of a group have in common, where all of them are on one host.
//
// Each rank writes to a part of its own through tensor(), and reads all of it through a SharedMemoryView. The ranks
// order writes and reads by meetings:
//
//   write my part; meet; read through the view; meet; write my part again
//
// Law: a read after a meeting sees what each rank wrote before it called start_meeting.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/comm/internal/memory_pieces.h"
#include "tessera/comm/process_group.h"

namespace tessera::comm {

class Descriptor;
class Mapping;

// A view of host memory that this rank may also write to: no other rank sees that, and this rank until drop_writes().
class SharedMemoryView {
 public:
  SharedMemoryView(const Descriptor& memory, std::size_t size_bytes);
  ~SharedMemoryView();
  SharedMemoryView(const SharedMemoryView&) = delete;
  SharedMemoryView& operator=(const SharedMemoryView&) = delete;

  void* data() const { return data_; }
  // Lets the view be that of the memory again where this rank has written to it.
  void drop_writes() noexcept;

 private:
  std::uint8_t* data_ = nullptr;
  std::size_t size_bytes_;
};

class SharedMemory {
 public:
  // Returns whether the ranks of the group share memory, the same on all of them. Does not communicate.
  static bool is_available(const ProcessGroup& group);
  // Allocates `size_bytes`, set to 0, for the group. A collective. Requires is_available(). Returns null on all ranks
  // if some rank does not want it, or has no such memory.
  static std::shared_ptr<SharedMemory> make(const ProcessGroup& group, std::size_t size_bytes, bool wants_it);

  // Returns a one-dimensional tensor that shares the memory, and keeps it.
  at::Tensor tensor(std::size_t offset_bytes, std::int64_t numel, at::ScalarType dtype) const;
  const std::shared_ptr<SharedMemoryView>& view() const { return view_; }

  // Starts a meeting of the ranks of a group, which has ended when all of them have started it. `name` is that of a
  // collective in errors, and in CommDebugMode if it `is_counted`. As ProcessGroup::start_*, it does not compare the
  // ranks' calls.
  static PendingCollective start_meeting(const ProcessGroup& group, std::string_view name, bool is_counted);

  // Collectives of a group whose ranks share memory, as those of ProcessGroup::start_* of the same name, on memory
  // that is not in one tensor. `kept` has the memory of the pieces. Lists of pieces have one entry for each rank.

  // Sends `ins[r]` to rank r, which has as many bytes in its `outs` of this rank; equal pieces once to all ranks that
  // get them. Nothing is sent to this rank itself.
  static PendingCollective start_all_to_all(const ProcessGroup& group, std::vector<MemoryPieces> outs,
                                            std::vector<MemoryPieces> ins, std::vector<at::Tensor> kept);
  // Reduces `in` to `out`, of its size and dtype. Both are contiguous, and may be the same.
  static PendingCollective start_all_reduce(const ProcessGroup& group, const at::Tensor& out, const at::Tensor& in,
                                            ReduceOp op);
  // Reduces part r of all ranks to `out` of rank r. The parts of different ranks may have different numbers of bytes.
  static PendingCollective start_reduce_scatter(const ProcessGroup& group, const at::Tensor& out,
                                                std::vector<MemoryPieces> parts, std::vector<at::Tensor> kept,
                                                ReduceOp op);
  // The same for parts of equal size: the elements of the tensors, one after the other, in the order in which they are
  // in memory. A tensor is dense, or undefined with `numel` zeros.
  struct Piece {
    at::Tensor tensor;
    std::int64_t numel = 0;
  };
  static PendingCollective start_reduce_scatter(const ProcessGroup& group, const at::Tensor& out,
                                                const std::vector<Piece>& pieces, ReduceOp op);

 private:
  std::shared_ptr<Mapping> mapping_;
  std::shared_ptr<SharedMemoryView> view_;
};

}  // namespace tessera::comm

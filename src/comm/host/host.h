#pragma once
// The ranks of a group that are on one host and share memory, in which each rank has a stream of bytes that all others
// read.
//
// Layout of the memory: a record for each rank, the places up to which each rank has read each stream, the rings of the
// streams. A stream is a ring: its rank writes at `head`, the others read at their `tails`, and the
// room is what the slowest has read. Places are counted in bytes from the beginning of the stream and never wrap
// around.
//
// A rank sleeps on its `bell` if it waits for others: whoever changes something that it may wait for calls ring().
//
// Law: what a rank wrote before commit() is seen by a rank that finds it available; what is read before consume() is
// read before it is overwritten.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/host/descriptor.h"
#include "tessera/base/function_ref.h"

namespace tessera::comm {

// The memory in this process. Ranks that are threads of a process use one object.
class HostMapping {
 public:
  HostMapping(Descriptor memory, int ranks);
  static std::size_t size_bytes(int ranks);
  // Large, so that ranks may be apart; with many ranks less, as each has a ring.
  static std::size_t ring_bytes(int ranks);
  static constexpr int kMostRanks = 256;

  struct alignas(128) Rank {
    std::atomic<std::uint64_t> head;
    alignas(64) std::atomic<std::uint32_t> bell;
    std::atomic<std::uint32_t> sleepers;
    std::atomic<std::uint32_t> has_left;
    std::atomic<std::uint64_t> process;  // a number that no other process has
  };
  Rank& rank(int r) const { return reinterpret_cast<Rank*>(control_.data())[r]; }
  // The place up to which `reader` has read the stream of `writer`.
  std::atomic<std::uint64_t>& tail(int reader, int writer) const;
  // The ring of rank `r`, which follows itself.
  std::uint8_t* ring(int r) const { return rings_[static_cast<std::size_t>(r)].data(); }
  const Descriptor& memory() const { return memory_; }
  // Keeps another descriptor of the memory: a process that closes any of them loses all of its locks.
  void keep(Descriptor memory) { kept_.push_back(std::move(memory)); }

 private:
  Descriptor memory_;
  std::vector<Descriptor> kept_;
  int ranks_;
  Mapping control_;
  std::vector<Mapping> rings_;
};

class Host {
 public:
  // `sockets`: at rank 0 a connection to each other rank in order, elsewhere one to rank 0; none between threads of a
  // process. `may_spin`: whether each rank of the host has a processor.
  Host(std::shared_ptr<HostMapping> mapping, int rank, int ranks, std::vector<Descriptor> sockets, bool may_spin);
  ~Host();
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  int rank() const { return rank_; }
  int size() const { return ranks_; }
  std::size_t ring_bytes() const { return ring_bytes_; }
  // Returns what ranks have in common that are threads of one process, and no other rank has.
  const void* identity() const { return mapping_.get(); }
  const std::vector<Descriptor>& sockets() const { return sockets_; }

  // --- this rank's stream
  std::size_t room() const;
  std::uint8_t* space() const { return mapping_->ring(rank_) + head_ % ring_bytes_; }
  void commit(std::size_t size_bytes);

  // --- the stream of another rank. consume() may skip what has not been written yet.
  std::size_t available(int writer) const;
  const std::uint8_t* front(int writer) const;
  void consume(int writer, std::size_t size_bytes);

  // --- waiting
  // Wakes a rank, or all other ranks, if they sleep.
  void ring(int r) const;
  void ring_all() const;
  // Returns what wakes this rank, from any thread and after this object was destroyed.
  std::function<void()> own_bell() const;
  // Returns true as soon as `poll` does, false at `deadline`. `check` is called now and then while this rank sleeps.
  bool wait(FunctionRef<bool()> poll, FunctionRef<void()> check, std::chrono::steady_clock::time_point deadline) const;
  // Returns whether a rank has destroyed its Host, or its process has ended.
  bool has_left(int r) const;

 private:
  const std::shared_ptr<HostMapping> mapping_;
  const int rank_, ranks_;
  const std::size_t ring_bytes_;
  const std::vector<Descriptor> sockets_;
  const bool may_spin_;
  std::uint64_t head_ = 0;
  std::vector<std::uint64_t> tails_;  // by writer
};

// Returns a number that is this process's alone.
std::uint64_t process_number();

}  // namespace tessera::comm

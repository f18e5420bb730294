#pragma once
// The ranks of a group of the simulated NCCL, as threads of one process, and what their collectives compute.
//
// The n-th collectives of all ranks meet: they run as one task when all of them are at the heads of their streams. The
// result is computed by rank order, in the dtype of the tensors, once for all ranks: a reduction of r ranks is ((x0 +
// x1) + x2) + ..., an average is that divided by r. A task that finds different collectives or sizes fails.

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "support/accelerator/engine.h"
#include "support/accelerator/ops/raw_tensor.h"
#include "tessera/base/function_ref.h"

namespace tessera::sim {

enum class Collective {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  gather,
  reduce_scatter,
  scatter,
  all_to_all,
  barrier,
  message
};

// What a rank contributes to a collective. All tensors are contiguous.
//
//   all_reduce, reduce, broadcast   inputs and outputs are the same tensors; the root alone receives or provides
//   all_gather, gather              inputs[i]; outputs[i * ranks + r] is for rank r's inputs[i]. In a gather the root
//   alone has outputs reduce_scatter, scatter         inputs[i * ranks + r] is for rank r's outputs[i]. In a scatter
//   the root alone has inputs all_to_all                      inputs[r] is for rank r, outputs[r] from it message
//   member 0's inputs are for member 1's outputs
struct Part {
  Collective collective = Collective::barrier;
  ::c10d::ReduceOp::RedOpType reduction = ::c10d::ReduceOp::SUM;
  int root = 0;
  std::vector<RawTensor> inputs = {}, outputs = {};
};

std::string name_of(Collective collective);

// Returns what a rank sends if ranks form a ring, as NCCL's do: its slowest link carries as many bytes.
std::int64_t sent_bytes(const Part& part, std::size_t ranks);

// Runs the collective to which each rank contributes a part.
void run_collective(const std::vector<Part>& parts);

class Group {
 public:
  explicit Group(int size) : size_(size) {}

  // Returns the group of this name, which is made by the first rank that asks and exists as long as a rank holds it.
  static std::shared_ptr<Group> join(const std::string& name, int size);
  // Returns a name that no group had.
  static std::string new_name();

  int size() const { return size_; }

  // Blocks until all ranks have called it as often as this rank. Throws c10::Error if this rank was aborted before, or
  // after 60 seconds.
  void meet(int rank);

  // What a message needs: a connection in its direction, among those of the group if it has any.
  struct Connection {
    int source = 0, destination = 0;
    bool is_of_group = false;
    friend auto operator<=>(const Connection&, const Connection&) = default;
  };
  // Blocks until both ranks of the connection have called it, of which `rank` is one, as meet() does.
  void connect(int rank, const Connection& connection);
  // Makes messages of a rank throw Error(io) from now on, in all groups; of none if it is negative.
  static void refuse_messages_of(int rank);

  // Ends the collectives and messages of a rank that did not run yet, and those that it enqueues from now on.
  void abort(int rank);

  // Enqueues the collective `number` of `rank`.
  void enqueue(std::uint64_t number, int rank, StreamKey stream, Part part);
  // Enqueues the message `number` from `source` to `destination`. `rank` is one of them.
  void enqueue_message(std::uint64_t number, int source, int destination, int rank, StreamKey stream, Part part);

 private:
  struct Gathering {
    MeetingPtr meeting;
    std::shared_ptr<std::vector<Part>> parts;
    std::size_t arrived = 0;
  };
  using Key = std::tuple<int, int, std::uint64_t>;  // source and destination, -1 for a collective, and the number

  // Blocks until `is_met`. Throws c10::Error if `rank` was aborted before, or after 60 seconds.
  void wait(std::unique_lock<std::mutex>& lock, int rank, FunctionRef<bool()> is_met);
  void cancel(const Key& key, const MeetingPtr& meeting, int rank) const;
  void enqueue(const Key& key, std::size_t members, std::size_t member, StreamKey stream, Part part);

  int size_;
  std::mutex mutex_;
  std::map<Key, Gathering> gatherings_;  // of which some ranks are missing
  std::map<Key, MeetingPtr> complete_;   // those of all ranks, of which the latest did not run yet
  std::set<int> aborted_;
  std::map<int, int> meetings_;                       // how often a rank has called meet()
  std::set<std::pair<int, Connection>> connections_;  // the calls of connect()
  std::condition_variable met_;
};

}  // namespace tessera::sim

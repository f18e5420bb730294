#pragma once
// Direct reads of other ranks' memory, for groups whose ranks are processes of one host or threads of one process. A
// read is one copy from memory to memory, whereas a message is copied into the network stack and out of it (Linux:
// process_vm_readv).
//
// All ranks publish their addresses, read from each other, and wait for each other:
//
//   if (PeerMemory::is_available(group)) {
//     PeerMemory peers(group, {addresses of my memory});
//     peers.read(rank, to, from);  // any number of times
//     peers.finish();
//   }
//
// The constructor, is_available and finish are collectives and throw the errors of a collective: if a rank dies, all
// others throw Error(rank_failure) naming it, and the group is broken.

#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/comm/internal/call.h"
#include "tessera/comm/process_group.h"

namespace tessera::comm {

class PeerMemory {
 public:
  // Returns whether each rank may read the memory of every other: all are on one host and in one PID namespace, the
  // kernel permits it, and no rank has TESSERA_PEER_MEMORY set to "0" in its environment. Tested on the first call and
  // then remembered for the group. False for a group of one rank.
  static bool is_available(const ProcessGroup& group);

  // `mine`: any number of addresses where this rank's readable memory begins. It must stay readable until finish()
  // returns. Requires is_available().
  PeerMemory(const ProcessGroup& group, std::span<const std::uint64_t> mine);

  // Returns the addresses that `rank` passed as `mine`.
  std::span<const std::uint64_t> addresses(int rank) const;
  // Copies `from` in the memory of `rank` to `to` in this rank's memory. Both lists have the same number of bytes in
  // total, but may be divided differently. Blocks.
  void read(int rank, std::vector<iovec> to, std::vector<iovec> from) const;
  // Blocks until all ranks have called it, after which no rank reads any more.
  void finish() const;

 private:
  ProcessGroup group_;
  Call call_;
  std::vector<std::vector<std::uint64_t>> addresses_;
};

}  // namespace tessera::comm

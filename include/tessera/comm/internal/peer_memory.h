#pragma once
// Reads of other ranks' memory, for groups whose ranks are processes of one host, or threads of one process: one copy,
// from memory to memory, where a message is copied into the network stack and out of it (Linux: process_vm_readv).
//
// All ranks say where their memory is, read what they want, and wait for each other:
//
//   if (PeerMemory::is_available(group)) {
//     PeerMemory peers(group, {where mine is});
//     peers.read(rank, to, from);  // any number of times
//     peers.finish();
//   }
//
// The constructor, is_available and finish are collectives. Errors are those of a collective: if a rank dies, all
// others throw Error(rank_failure) that names it, and the group is broken.

#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/comm/internal/call.h"
#include "tessera/comm/process_group.h"

namespace tessera::comm {

class PeerMemory {
 public:
  // Whether each rank may read the memory of each other: all are of one host and one PID namespace, the kernel lets
  // them, and TESSERA_PEER_MEMORY is "0" in the environment of none. Tried when first asked, then remembered for the
  // group. False for a group of one rank.
  static bool is_available(const ProcessGroup& group);

  // `mine`: where the memory begins that others may read of this rank, until finish() has returned; as many as it
  // likes. Must be available.
  PeerMemory(const ProcessGroup& group, std::span<const std::uint64_t> mine);

  // What `rank` gave as `mine`.
  std::span<const std::uint64_t> addresses(int rank) const;
  // Copies `from` in the memory of `rank` to `to` in this one's: as many bytes, one stretch behind the other on both
  // sides, which need not be cut alike. Blocks.
  void read(int rank, std::vector<iovec> to, std::vector<iovec> from) const;
  // Returns when all ranks have called it, and so have read what they want.
  void finish() const;

 private:
  ProcessGroup group_;
  Call call_;
  std::vector<std::vector<std::uint64_t>> addresses_;
};

}  // namespace tessera::comm

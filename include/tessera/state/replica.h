#pragma once
/// \file
/// Copies of the ranks' states in the memory of other ranks, from which ranks that lost their state get it back without
/// reading a checkpoint.
///
///     Replica replica(group);
///     for (...) {
///       train();
///       replica.update(state);
///     }
///
/// After a failure, ranks that survived and ranks that were started again make a new group:
///
///     replica.rejoin(group);                // a started rank makes a Replica
///     replica.restore(state, has_lost_it);  // sent by the ranks that hold the copies
///     replica.update(state);
///
/// Rank r keeps the state of rank (r + size / 2) % size. If the number of ranks is even, these are pairs that keep each
/// other's state. Ranks of one host are often neighbours, so that a copy is on another host. A copy costs the size of
/// its rank's part of the state, and another one during `update`. It is what receive_state_dict returns.
///
/// With a storage, which may be on each rank's own disk, each rank also writes the copy to the file
/// "rank_<r>_replica_partner_<of>.pt" in torch.save's format: a dict with "state", in which a tensor that several ranks
/// hold is None, and "parts", which has the elements of these.
///
/// All functions that communicate are collectives of the group. PyTorch: _ReplicationStager in
/// torch/distributed/checkpoint/staging.py.

#include <memory>
#include <optional>
#include <string>

#include "tessera/checkpoint/storage.h"
#include "tessera/comm/process_group.h"
#include "tessera/state/value.h"

namespace tessera {

class Replica {
 public:
  /// Creates a replica without a copy. A collective. `storage`, if not null, gets the copies. Every rank throws
  /// `Error(invalid_argument)` for a group of one rank, and if some ranks pass a storage and others null.
  explicit Replica(const ProcessGroup& group, std::shared_ptr<checkpoint::Storage> storage = nullptr);

  /// Returns the rank whose state this rank keeps.
  int keeps() const;
  /// Returns the rank that keeps the state of this rank.
  int keeper() const;
  /// Returns the copy of the state of `keeps()` as of the last update, or null if there was none. Not a collective.
  const StateDict* copy() const;
  /// Returns the name of the copy's file. Not a collective.
  std::string file_name() const;

  /// Sends each rank's state to its keeper. If a rank fails, every rank throws and keeps the copy that it had. If a
  /// rank dies at the end, some ranks may already have the new one.
  void update(const StateDict& state);

  /// Continues on a new group, which has the same number of ranks and in which this one has the same rank. Ranks that
  /// were started again construct a Replica instead of this call. If the group of any rank differs, every rank throws
  /// `Error(invalid_argument)`.
  void rejoin(const ProcessGroup& group);

  /// Gives each rank that passes true for `has_lost_it` its state as of the last update, received into `state` as by
  /// receive_state_dict_into. A keeper that has no copy in memory reads its file. Other ranks' `state` does not change.
  /// Throws `Error(not_found)` on every rank, before a state is sent, if a keeper has neither.
  void restore(StateDict& state, bool has_lost_it);

 private:
  ProcessGroup group_;
  std::shared_ptr<checkpoint::Storage> storage_;
  std::optional<StateDict> copy_;
};

}  // namespace tessera

#pragma once
/// \file
/// Counts of the collectives that a rank starts, to see what an operation communicates:
///
///     const CommDebugMode mode(group);
///     y = layer(x);
///     mode.counts();  // {"all_reduce": 1}
///
/// A count begins when the object is created, and covers `group` and every other group of the same world (subgroups,
/// groups of meshes), whichever thread calls. Objects do not influence each other. PyTorch: CommDebugMode in
/// torch/distributed/tensor/debug.

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "tessera/comm/process_group.h"

namespace tessera {

class CommDebugMode {
 public:
  explicit CommDebugMode(const ProcessGroup& group);

  /// Returns how many collectives this rank has started since construction, by the name of the function of ProcessGroup
  /// ("all_reduce", "all_gather_into", "broadcast", ...). A collective whose ranks first exchange sizes counts twice
  /// (`all_to_all`, and those of bytes). What a group of one rank does, and a collective without elements, is not
  /// counted.
  std::map<std::string, std::int64_t> counts() const;
  /// Returns the sum of `counts()`.
  std::int64_t total() const;
  /// Returns how often this rank compared its call with those of others (`check_call`, `agree`, `barrier`), which is
  /// not in `counts()`.
  std::int64_t comparisons() const;

 private:
  struct Start;
  std::shared_ptr<const Start> start_;
};

}  // namespace tessera

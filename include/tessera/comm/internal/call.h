#pragma once
// One collective call of a group.

#include <cstdint>
#include <string>

namespace tessera::comm {

// A collective call: its group, its number within the group (from 1), and its name.
struct Call {
  std::string group;
  std::uint64_t number = 0;
  std::string name;
  bool is_comparison = false;  // of the ranks' calls, which may differ
};

}  // namespace tessera::comm

#pragma once
// One collective of a group.

#include <cstdint>
#include <string>

namespace tessera::comm {

// A collective: which one, and the how manieth of its group.
struct Call {
  std::string group;
  std::uint64_t number = 0;
  std::string name;
};

}  // namespace tessera::comm

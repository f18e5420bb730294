#pragma once
// Which ranks are on one host.

#include <string>

namespace tessera::comm {

// Returns a name for the running kernel and this process's namespace of a kind, such as "pid" or "net". Empty if it is
// unknown, or if the environment variable `off_if_0` is "0".
std::string host_place(const char* kind, const char* off_if_0);

}  // namespace tessera::comm

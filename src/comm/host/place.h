#pragma once
// Which ranks are on one host.

#include <string>

namespace tessera::comm {

// Returns a name for the running kernel, this process's namespace of a kind, such as "net", and the value of
// an environment variable. Empty if it is unknown, or if the variable is "0".
std::string host_place(const char* kind, const char* variable);

}  // namespace tessera::comm

#pragma once
// Whether the tests of RPC can run.

#include <dlfcn.h>

namespace tessera::testing {

// Queries the loaded LibTorch, not our build configuration, which could miss TensorPipe.
inline bool libtorch_has_tensorpipe() {
  return ::dlsym(RTLD_DEFAULT, "_ZTVN5torch11distributed3rpc15TensorPipeAgentE") != nullptr;  // its vtable
}

}  // namespace tessera::testing

#pragma once
// Whether there is anything that RPC could be tested with.

#include <dlfcn.h>

namespace tessera::testing {

// Asked of the loaded LibTorch itself, and not of our build, which could fail to find what is there.
inline bool libtorch_has_tensorpipe() {
  return ::dlsym(RTLD_DEFAULT, "_ZTVN5torch11distributed3rpc15TensorPipeAgentE") != nullptr;  // its vtable
}

}  // namespace tessera::testing

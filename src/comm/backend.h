#pragma once
// The backends of c10d, by name. Each is in a file of its own, with one that stands in for it where LibTorch lacks it.

#include <chrono>
#include <string>

#include "comm/c10d.h"

namespace tessera::comm {

struct BackendOptions {
  StorePtr store;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
};

// Null where LibTorch lacks it.
using MakeBackend = BackendPtr (*)(const BackendOptions& options);
extern const MakeBackend make_gloo, make_nccl, make_mpi;

// Throws Error(unsupported) naming those that there are.
BackendPtr make_backend(const std::string& name, const BackendOptions& options);

}  // namespace tessera::comm

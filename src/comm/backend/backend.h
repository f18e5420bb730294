#pragma once
// The backends of c10d, by name. Each has its own file, and a second file that replaces it if LibTorch lacks the
// backend.

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <string>

#include "comm/c10d.h"

namespace tessera::comm {

struct BackendOptions {
  StorePtr store;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
};

// A backend that carries tensors of one kind of device.
struct Transport {
  std::string name;
  BackendPtr backend;
  // Whether its work completes in the current stream, not when the host waits.
  bool on_stream() const { return name == "nccl"; }
};

// The backends of a group. NCCL carries CUDA tensors only, so a Gloo backend carries CPU tensors next to it. The other
// backends carry all tensors.
struct Transports {
  Transport cpu, accelerator;
  const Transport& of(const at::Device& device) const { return device.is_cpu() ? cpu : accelerator; }
};

// Null if LibTorch lacks the backend.
using MakeBackend = BackendPtr (*)(const BackendOptions& options);
extern const MakeBackend make_gloo, make_nccl, make_mpi;

// Returns when the backends have connected to the other ranks. Throws Error(unsupported) listing the available
// backends, and std::runtime_error with what `failure` returns, soon after that is no longer empty.
Transports make_transports(const std::string& name, const BackendOptions& options,
                           const std::function<std::string()>& failure);

}  // namespace tessera::comm

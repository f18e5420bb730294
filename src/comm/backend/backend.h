#pragma once
// The backends of c10d, by name. Each is in a file of its own, with one that stands in for it where LibTorch lacks it.

#include <c10/core/Device.h>

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

// What carries tensors of one kind of device.
struct Transport {
  std::string name;
  BackendPtr backend;
  // Its work is done when the current stream comes to it, not when the host does.
  bool on_stream() const { return name == "nccl"; }
};

// What a group communicates with: NCCL carries CUDA's tensors only, so Gloo stands beside it for those of the CPU. The
// other backends carry all.
struct Transports {
  Transport cpu, accelerator;
  const Transport& of(const at::Device& device) const { return device.is_cpu() ? cpu : accelerator; }
};

// Null where LibTorch lacks it.
using MakeBackend = BackendPtr (*)(const BackendOptions& options);
extern const MakeBackend make_gloo, make_nccl, make_mpi;

// Throws Error(unsupported) naming those that there are.
Transports make_transports(const std::string& name, const BackendOptions& options);

}  // namespace tessera::comm

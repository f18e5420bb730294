#pragma once
// The backends of c10d, by name. Each has its own file, and a second file that replaces it if LibTorch lacks the
// backend.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "comm/c10d.h"
#include "tessera/base/function_ref.h"

namespace tessera::comm {

// A subgroup that takes over the connections of the group it is made from. All ranks of that group take part.
struct Split {
  BackendPtr group;
  c10::Device device;  // on which the group is connected
  int color = 0;       // a number that no other subgroup of the group has
};

struct BackendOptions {
  StorePtr store;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
  std::optional<Split> split = {};  // for a backend with `leave_split`
};

// A backend that carries tensors of one kind of device.
struct Transport {
  std::string name;
  BackendPtr backend;
  // How many elements one call may have; in an all-to-all, those of all ranks.
  std::int64_t most_elements = std::numeric_limits<std::int64_t>::max();
  // Called after the backend was closed in order, if not null.
  void (*after_close)() = nullptr;
  // Whether work with a rank that left never ends. The other backends report an error.
  bool misses_ranks_that_left = false;
  // Whether its work completes in the current stream, not when the host waits. Such a backend carries no tensors on
  // CPU, gathers into one buffer, and reduces half, bfloat16 and averages itself.
  bool is_on_stream = false;
  // Whether it gathers into one buffer, and reduces every dtype and averages itself.
  bool is_complete = false;
  // Ends all work that waits for other ranks, if not null: what streams compute from then on is undefined.
  void (*abort)(Backend& backend) = nullptr;
  // Connects the ranks on a device, if not null. Else the first collective on the device does, where nothing ends it
  // if a rank is missing.
  void (*connect)(Backend& backend, c10::Device device) = nullptr;
  // Takes part in a split by which other ranks of the group make a subgroup, if the backend can split.
  void (*leave_split)(Backend& backend, c10::Device device) = nullptr;
};

// The backends of a group. NCCL carries CUDA tensors only, and a rank that waits in MPI cannot stop waiting. So all but
// Gloo have a Gloo backend next to them, which carries payloads of bytes and the comparison of calls, and with a
// backend on streams the tensors on CPU.
//
// Ranks that share a host's memory communicate through it instead, except for messages and what is on a device.
struct Transports {
  Transport control, cpu, accelerator;
  Transport messages;  // of two ranks
  // Replaces what carries tensors on the CPU and the comparison of calls, unless the group is on MPI.
  void use_on_cpu(const Transport& transport) {
    control = transport;
    if (accelerator.is_on_stream || accelerator.name == "gloo") cpu = transport;
  }
  const Transport& of(const at::Tensor& tensor) const { return tensor.is_cpu() ? cpu : accelerator; }
};

// Null if LibTorch lacks the backend.
using MakeBackend = Transport (*)(const BackendOptions& options);
extern const MakeBackend make_gloo, make_nccl, make_mpi;

// Makes a backend of another library available by a name of its own. Call it before the first group is made.
void register_backend(const std::string& name, MakeBackend make);

// Returns when the backends have connected to the other ranks. Throws Error(unsupported) listing the available
// backends, and std::runtime_error with what `failure` returns, soon after that is no longer empty.
Transports make_transports(const std::string& name, const BackendOptions& options, FunctionRef<std::string()> failure);

// Returns the backend of the subgroups of a group on `name`. All processes would have to make a subgroup on MPI, so
// subgroups of a group on MPI are on Gloo.
std::string backend_of_subgroups(const std::string& name);

// Destroys the backends, which wait for the work that was started. If `has_failed`, that may never end: returns, and
// leaves them to a thread.
void close(Transports transports, FunctionRef<bool()> has_failed);

}  // namespace tessera::comm

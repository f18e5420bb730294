#pragma once
// Groups of this project whose tensors on the accelerator are carried by the simulated NCCL. Programs that include this
// link tessera_comm.

#include <memory>

#include "comm/group_impl.h"
#include "support/accelerator/nccl/rank_threads.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/local_ranks.h"

namespace tessera::sim {

// Reads the private member of a group. An explicit instantiation may name it.
std::shared_ptr<ProcessGroup::Impl> impl_of(const ProcessGroup& group);
template <std::shared_ptr<ProcessGroup::Impl> ProcessGroup::*member>
struct ImplOf {
  friend std::shared_ptr<ProcessGroup::Impl> impl_of(const ProcessGroup& group) { return group.*member; }
};
template struct ImplOf<&ProcessGroup::impl_>;

// Makes `group`, which is on Gloo, carry tensors of the accelerator by the simulated NCCL. All its ranks call this,
// before its first collective on the accelerator. Subgroups of it are on Gloo again; call this for each of them.
inline void attach_nccl(const ProcessGroup& group) {
  const std::shared_ptr<ProcessGroup::Impl> impl = impl_of(group);
  if (impl->is_alone()) return;
  impl->transports.accelerator = {"nccl", c10::make_intrusive<NcclBackend>(impl->store, impl->rank, impl->size())};
}

// Runs `f` in a thread for each rank: rank r has device sim:r, and tensors on it are carried by the simulated NCCL.
inline void run_local_on_devices(int ranks, FunctionRef<void(const ProcessGroup& group)> f) {
  install();
  run_local(ranks, [&](const ProcessGroup& group) {
    const c10::DeviceGuard guard(device(group.rank()));
    attach_nccl(group);
    f(group);
  });
}

}  // namespace tessera::sim

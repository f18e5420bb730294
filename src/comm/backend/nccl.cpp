#include <torch/cuda.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstdlib>
#include <memory>
#include <type_traits>

#include "comm/backend/backend.h"
#include "tessera/base/error.h"

namespace tessera::comm {

namespace {

// Lets Watchdog end work, if LibTorch can abort it, which 1.13 cannot. Then NCCL's own watchdog ends the process.
template <typename Nccl>
void let_watchdog_abort(Transport& transport) {
  if constexpr (requires(Nccl & nccl) { nccl.abort(); }) {
    transport.abort = [](Backend& backend) { static_cast<Nccl&>(backend).abort(); };
    // Before NCCL's watchdog does, which names no rank.
    ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*replace=*/0);
  }
}

// Lets groups connect their ranks at a time of their choice, and make subgroups from their connections, where LibTorch
// can, which 1.13 cannot.
template <typename Nccl>
void let_group_connect(Transport& transport) {
  constexpr bool kConnects = requires(Nccl & nccl, c10::Device device) { nccl.eagerConnectSingleDevice(device); };
  if constexpr (kConnects) {
    transport.connect = [](Backend& backend, c10::Device device) {
      static_cast<Nccl&>(backend).eagerConnectSingleDevice(device);
    };
  }
  if constexpr (kConnects && requires(Nccl & nccl, c10::Device device) { nccl.performNocolorSplit(device); }) {
    transport.leave_split = [](Backend& backend, c10::Device device) {
      static_cast<Nccl&>(backend).performNocolorSplit(device);
    };
  }
}

// Makes `options` of a subgroup those of a split. Its backend keeps that of the group.
template <typename Nccl, typename NcclOptions>
void split_from(NcclOptions& options, const Split& split) {
  if constexpr (requires { options.split_color; }) {
    auto* group = static_cast<Nccl*>(split.group.get());
    using Group = decltype(options.split_from);
    if constexpr (std::is_same_v<Group, std::shared_ptr<Nccl>>) {
      options.split_from = Group(group, [kept = split.group](Nccl*) {});
    } else {
      options.split_from = Group::reclaim_copy(group);
    }
    options.split_color = split.color;
  }
}

}  // namespace

const MakeBackend make_nccl = [](const BackendOptions& options) -> Transport {
  if (torch::cuda::device_count() == 0) {
    fail(ErrorCode::unsupported,
         "init process group: rank {} of {} found no GPU for the backend 'nccl', expected at least one; use 'gloo' for "
         "tensors on the CPU",
         options.rank, options.size);
  }
  Transport transport;
  let_watchdog_abort<::c10d::ProcessGroupNCCL>(transport);
  let_group_connect<::c10d::ProcessGroupNCCL>(transport);
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 8
  // Memory is freed after its stream waits for the work. To note each use on a stream, which NCCL does by default,
  // would keep freed memory from the next allocation.
  ::setenv("TORCH_NCCL_AVOID_RECORD_STREAMS", "1", /*replace=*/0);
#endif
  auto nccl = ::c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  if (options.split) split_from<::c10d::ProcessGroupNCCL>(*nccl, *options.split);
  transport.name = "nccl";
  transport.backend = c10::make_intrusive<::c10d::ProcessGroupNCCL>(options.store, options.rank, options.size, nccl);
  transport.is_on_stream = true;
  if (options.split) transport.connect(*transport.backend, options.split->device);  // the other ranks split now
  return transport;
};

}  // namespace tessera::comm

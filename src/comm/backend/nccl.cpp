#include <torch/cuda.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cstdlib>

#include "comm/backend/backend.h"
#include "tessera/base/error.h"

namespace tessera::comm {

namespace {

template <typename Nccl>
void abort_work(Nccl& nccl) {
  if constexpr (requires { nccl.abort(); }) nccl.abort();  // LibTorch 2
}

}  // namespace

const MakeBackend make_nccl = [](const BackendOptions& options) -> Transport {
  if (torch::cuda::device_count() == 0) {
    fail(ErrorCode::unsupported,
         "init process group: rank {} of {} found no GPU for the backend 'nccl', expected at least one; use 'gloo' for "
         "tensors on the CPU",
         options.rank, options.size);
  }
  // Watchdog finds what failed and names the rank; NCCL's own watchdog would end the process.
  for (const char* name : {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"})
    ::setenv(name, "0", /*replace=*/0);
  auto nccl = ::c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  Transport transport;
  transport.name = "nccl";
  transport.backend = c10::make_intrusive<::c10d::ProcessGroupNCCL>(options.store, options.rank, options.size, nccl);
  transport.is_on_stream = true;
  transport.abort = [](Backend& backend) { abort_work(static_cast<::c10d::ProcessGroupNCCL&>(backend)); };
  return transport;
};

}  // namespace tessera::comm

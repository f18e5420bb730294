#include <torch/cuda.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/backend/backend.h"
#include "tessera/base/error.h"

namespace tessera::comm {

const MakeBackend make_nccl = [](const BackendOptions& options) -> Transport {
  if (torch::cuda::device_count() == 0) {
    fail(ErrorCode::unsupported,
         "init process group: rank {} of {} found no GPU for the backend 'nccl', expected at least one; use 'gloo' for "
         "tensors on the CPU",
         options.rank, options.size);
  }
  auto nccl = ::c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  Transport transport;
  transport.name = "nccl";
  transport.backend = c10::make_intrusive<::c10d::ProcessGroupNCCL>(options.store, options.rank, options.size, nccl);
  transport.is_on_stream = true;
  return transport;
};

}  // namespace tessera::comm

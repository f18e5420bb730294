#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/backend/backend.h"

namespace tessera::comm {

const MakeBackend make_nccl = [](const BackendOptions& options) -> BackendPtr {
  auto nccl = ::c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  return c10::make_intrusive<::c10d::ProcessGroupNCCL>(options.store, options.rank, options.size, nccl);
};

}  // namespace tessera::comm

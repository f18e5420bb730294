#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/backend/backend.h"

namespace tessera::comm {

const MakeBackend make_nccl = [](const BackendOptions& options) -> Transport {
  auto nccl = ::c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  return {"nccl", c10::make_intrusive<::c10d::ProcessGroupNCCL>(options.store, options.rank, options.size, nccl)};
};

}  // namespace tessera::comm

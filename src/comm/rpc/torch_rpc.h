#pragma once
// LibTorch's RPC, by one short name. Debian's LibTorch 1.13 comes without the headers of distributed autograd, so
// nothing here may need them.

#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/rref_context.h>

namespace tessera::comm {

namespace torch_rpc = ::torch::distributed::rpc;

}  // namespace tessera::comm

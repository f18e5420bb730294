#pragma once
// A short name for LibTorch's RPC. Debian's LibTorch 1.13 lacks the headers of distributed autograd, so no included
// header may need them.

#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/rref_context.h>

namespace tessera::comm {

namespace torch_rpc = ::torch::distributed::rpc;

}  // namespace tessera::comm

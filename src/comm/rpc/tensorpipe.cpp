#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>

#include "comm/rpc/agent.h"

namespace tessera::comm {

namespace {

// LibTorch's handler accesses the reference that a deletion returns, which is null unless it was the last one.
class RequestCallback final : public torch_rpc::RequestCallbackNoPython {
  void handleRRefDelete(c10::intrusive_ptr<torch_rpc::RRef>& /*reference*/) const override {}
};

}  // namespace

const MakeAgent make_tensorpipe_agent = [](const AgentOptions& options) -> std::shared_ptr<torch_rpc::RpcAgent> {
  const float seconds = std::chrono::duration<float>(options.timeout).count();
  // Any transport and channel that works here.
  torch_rpc::TensorPipeRpcBackendOptions backend(options.threads, {}, {}, seconds, "");
  return std::make_shared<torch_rpc::TensorPipeAgent>(
      options.store, options.name, static_cast<torch_rpc::worker_id_t>(options.rank), options.size, std::move(backend),
      std::unordered_map<std::string, torch_rpc::DeviceMap>(), std::vector<c10::Device>(),
      std::make_unique<RequestCallback>());
};

}  // namespace tessera::comm

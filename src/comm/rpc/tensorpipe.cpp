#include <torch/csrc/distributed/rpc/request_callback_no_python.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/rpc/agent.h"

namespace tessera::comm {

namespace {

// LibTorch's handler accesses the reference that a deletion returns, which is null unless it was the last one.
class RequestCallback final : public torch_rpc::RequestCallbackNoPython {
  void handleRRefDelete(c10::intrusive_ptr<torch_rpc::RRef>& /*reference*/) const override {}
};

// Any if empty.
using Names = std::remove_const_t<decltype(torch_rpc::TensorPipeRpcBackendOptions::transports)>;

bool have_shared_memory(const AgentOptions& options) {
  return options.is_on_one_host && torch_rpc::TensorPipeTransportRegistry()->Has("shm");
}

// Law: workers that can do without a TCP port have none. TensorPipe opens one for the transport "uv" and 16 for the
// channel "mpt_uv", and ends the process if one receives bytes that it does not expect, even those of a worker of
// another job.
Names transports_for(const AgentOptions& options) {
  if (!have_shared_memory(options)) return {};
  return std::vector<std::string>{"shm"};
}

Names channels_for(const AgentOptions& options) {
  if (!have_shared_memory(options)) return {};
  if (!torch_rpc::TensorPipeChannelRegistry()->Has("cma")) return std::vector<std::string>{"basic"};
  return std::vector<std::string>{"cma", "basic"};
}

}  // namespace

const MakeAgent make_tensorpipe_agent = [](const AgentOptions& options) -> std::shared_ptr<torch_rpc::RpcAgent> {
  torch_rpc::TensorPipeRpcBackendOptions backend(options.threads, transports_for(options), channels_for(options),
                                                 std::chrono::duration<float>(options.timeout).count(), "");
  return std::make_shared<torch_rpc::TensorPipeAgent>(
      options.store, options.name, static_cast<torch_rpc::worker_id_t>(options.rank), options.size, std::move(backend),
      std::unordered_map<std::string, torch_rpc::DeviceMap>(), std::vector<c10::Device>(),
      std::make_unique<RequestCallback>());
};

}  // namespace tessera::comm

#pragma once
// The agent of LibTorch's RPC, if LibTorch has one.

#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "comm/c10d.h"
#include "comm/rpc/torch_rpc.h"

namespace tessera::comm {

// LibTorch counts milliseconds in an int.
constexpr std::chrono::milliseconds kLongestRpcTimeout = std::chrono::hours(24 * 24);

struct AgentOptions {
  StorePtr store;
  std::string name;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
  int threads = 1;
  bool is_on_one_host = false;  // all workers, and they can share memory
};

// Null if LibTorch was built without TensorPipe. The agent knows the names of all workers, and answers after start().
using MakeAgent = std::shared_ptr<torch_rpc::RpcAgent> (*)(const AgentOptions& options);
extern const MakeAgent make_tensorpipe_agent;

// Returns the agent of this process. Throws Error(invalid_argument) without RPC.
std::shared_ptr<torch_rpc::RpcAgent> current_agent(std::string_view call);

}  // namespace tessera::comm

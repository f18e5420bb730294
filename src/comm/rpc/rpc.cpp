#include "tessera/comm/rpc.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>

#include "comm/exceptions.h"
#include "comm/group_impl.h"
#include "comm/rendezvous/store.h"
#include "comm/rpc/agent.h"

namespace tessera {

namespace torch_rpc = comm::torch_rpc;
using std::chrono::milliseconds;

namespace {

constexpr char kInit[] = "init rpc";

// The right to the only agent of this process.
class Claim {
 public:
  Claim() {
    if (torch_rpc::RpcAgent::isCurrentRpcAgentSet() || is_taken().exchange(true)) {
      fail(
          ErrorCode::unsupported,
          "RPC was already initialized in this process, expected once: LibTorch has one agent per process, which ranks "
          "that are threads cannot share");
    }
  }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;
  ~Claim() {
    if (!is_used_) is_taken() = false;
  }

  void use() { is_used_ = true; }

 private:
  static std::atomic<bool>& is_taken() {
    static std::atomic<bool> taken = false;
    return taken;
  }
  bool is_used_ = false;
};

void check(const RpcOptions& options, const std::string& name, int size) {
  if (comm::make_tensorpipe_agent == nullptr) {
    fail(ErrorCode::unsupported, "this LibTorch was built without TensorPipe, expected one that has it");
  }
  constexpr int kMostRanks = std::numeric_limits<torch_rpc::worker_id_t>::max();
  if (size > kMostRanks) fail(ErrorCode::unsupported, "{} ranks, expected at most {}", size, kMostRanks);
  if (options.timeout.count() <= 0 || options.threads < 1) {
    fail(ErrorCode::invalid_argument, "timeout {} ms, {} threads, expected more than 0", options.timeout.count(),
         options.threads);
  }
  const bool is_name =
      name.size() <= torch_rpc::WorkerInfo::MAX_NAME_LEN && std::all_of(name.begin(), name.end(), [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
      });
  if (!is_name) {
    fail(ErrorCode::invalid_argument, "worker name '{}', expected at most {} letters, digits, '_' and '-'",
         printable(name), torch_rpc::WorkerInfo::MAX_NAME_LEN);
  }
}

void check_different(const std::vector<Bytes>& names) {
  for (std::size_t r = 0; r < names.size(); ++r) {
    const auto first = static_cast<std::size_t>(std::find(names.begin(), names.end(), names[r]) - names.begin());
    if (first == r) continue;
    fail(ErrorCode::invalid_argument, "{}: ranks {} and {} are both named '{}', expected different names", kInit, first,
         r, as_text(names[r]));
  }
}

// The unpickler needs a resolver for classes. This library sends none.
c10::StrongTypePtr refuse_type(const c10::QualifiedName& name) {
  fail(ErrorCode::unsupported, "RPC: received a value of type {}, expected no class instances", name.qualifiedName());
}

bool is_on_one_host(const ProcessGroup::Impl& ranks) {
  return ranks.is_alone() || ranks.transports.control.backend->getBackendName() == "host";
}

// Returns whether calls that LibTorch made are still unanswered.
bool has_pending_calls() {
  return torch_rpc::RRefContext::getInstance().getDebugInfo().at("num_pending_futures") != "0";
}

}  // namespace

struct Rpc::Impl {
  ProcessGroup group;
  milliseconds timeout{0};
  std::shared_ptr<torch_rpc::RpcAgent> agent;  // null after RPC has ended

  Impl(const ProcessGroup& group_in, milliseconds timeout_in) : group(group_in), timeout(timeout_in) {}
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() { leave(); }

  void start(std::shared_ptr<torch_rpc::RpcAgent> made) {
    agent = std::move(made);
    torch_rpc::RpcAgent::setCurrentRpcAgent(agent);
    torch_rpc::RRefContext::getInstance();  // binds it to this agent
    agent->setTypeResolver(std::make_shared<torch_rpc::TypeResolver>(refuse_type));
    agent->start();
  }

  // As in PyTorch, references go first, so that none sends through an agent that has ended.
  void leave() noexcept {
    if (!agent) return;
    try {
      torch_rpc::RRefContext::destroyInstance();
      agent->shutdown();
    } catch (const std::exception&) {
      // The error cannot be reported, and the agent must be removed.
    }
    torch_rpc::RpcAgent::setCurrentRpcAgent(nullptr);
    agent.reset();
  }

  void release_references() const {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    torch_rpc::RRefContext::getInstance().delAllUsersAndUnforkedOwners(timeout);
    while (has_pending_calls() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
};

Rpc::Rpc(const ProcessGroup& group, const RpcOptions& options)
    : impl_(std::make_unique<Impl>(group, std::min(options.timeout, comm::kLongestRpcTimeout))) {
  const std::string name = options.name.empty() ? fmt::format("worker{}", group.rank()) : options.name;
  std::optional<Claim> claim;
  group.agree_on(kInit, [&] {
    check(options, name, group.size());
    claim.emplace();
  });
  check_different(group.all_gather_bytes(as_bytes(name)));
  const ProcessGroup::Impl& ranks = *group.impl_;
  const comm::StorePtr store =
      ranks.is_alone() ? comm::make_local_store() : comm::with_prefix(ranks.name + "/rpc", ranks.store);
  group.agree_on(kInit, [&] {
    // The store waits for a rank that dies now, because it does not check signs of life.
    store->setTimeout(impl_->timeout);
    auto agent = comm::make_tensorpipe_agent(
        {store, name, group.rank(), group.size(), impl_->timeout, options.threads, is_on_one_host(ranks)});
    claim->use();
    impl_->start(std::move(agent));
    if (!ranks.is_alone()) store->setTimeout(ranks.timeout);
  });
}

Rpc::Rpc(Rpc&&) noexcept = default;
Rpc& Rpc::operator=(Rpc&&) noexcept = default;
Rpc::~Rpc() = default;

void Rpc::shutdown() {
  if (!impl_ || !impl_->agent) return;
  try {
    impl_->group.barrier();  // all ranks have made their calls
    impl_->release_references();
    impl_->group.barrier();  // no call needs this rank now
  } catch (...) {
    impl_->leave();
    throw;
  }
  impl_->leave();
}

bool is_rpc_available() { return comm::make_tensorpipe_agent != nullptr; }

Rpc init_rpc(const ProcessGroup& group, const RpcOptions& options) { return {group, options}; }

bool is_rpc_initialized() { return torch_rpc::RpcAgent::isCurrentRpcAgentSet(); }

int rpc_rank() { return comm::current_agent("RPC rank")->getWorkerInfo().id_; }

std::optional<int> find_rpc_worker(const std::string& name) {
  for (const torch_rpc::WorkerInfo& worker : comm::current_agent("find an RPC worker")->getWorkerInfos()) {
    if (worker.name_ == name) return worker.id_;
  }
  return std::nullopt;
}

std::shared_ptr<torch_rpc::RpcAgent> comm::current_agent(std::string_view call) {
  if (!is_rpc_initialized()) {
    fail(ErrorCode::invalid_argument, "{}: RPC is not initialized, expected a call of init_rpc before", call);
  }
  return torch_rpc::RpcAgent::getCurrentRpcAgent();
}

}  // namespace tessera

// References to tensors of other ranks. LibTorch counts references at the owner. Each reference is a fork of the
// owner's, and the owner registers it before it is sent, so the owner knows every fork. The forks are sent through the
// process group, whose collectives name the rank that failed.

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/rref_proto.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <algorithm>

#include "comm/exceptions.h"
#include "comm/rpc/agent.h"
#include "tessera/comm/rpc.h"

namespace tessera {

namespace torch_rpc = comm::torch_rpc;

namespace {

constexpr char kShare[] = "share tensors by RPC";

// The size of a fork in a message: 8 bytes each of owner, reference (where it was made, number), fork (the same).
constexpr std::size_t kForkBytes = 40;

void append_fork(Bytes& out, const torch_rpc::RRefForkData& fork) {
  for (const std::int64_t number :
       {std::int64_t{fork.ownerId_}, std::int64_t{fork.rrefId_.createdOn_}, fork.rrefId_.localId_,
        std::int64_t{fork.forkId_.createdOn_}, fork.forkId_.localId_}) {
    append_little_endian(out, static_cast<std::uint64_t>(number));
  }
}

torch_rpc::RRefForkData read_fork(const std::uint8_t* bytes) {
  const auto number = [&](int i) {
    return static_cast<std::int64_t>(load_little_endian<std::uint64_t>(bytes + 8 * i));
  };
  const auto worker = [&](int i) { return static_cast<torch_rpc::worker_id_t>(number(i)); };
  return {worker(0), torch_rpc::RRefId(worker(1), number(2)), torch_rpc::ForkId(worker(3), number(4)), worker(0), ""};
}

// The forks that this rank has made. Unless all arrive, the destructor revokes them, which is harmless for those that
// arrived.
class Forks {
 public:
  explicit Forks(std::size_t ranks) : messages_(ranks) {}
  Forks(const Forks&) = delete;
  Forks& operator=(const Forks&) = delete;
  ~Forks() {
    if (arrived_) return;
    for (const Bytes& message : messages_) {
      for (std::size_t begin = 0; begin < message.size(); begin += kForkBytes) {
        const torch_rpc::RRefForkData fork = read_fork(&message[begin]);
        torch_rpc::RRefContext::getInstance().delForkOfOwner(fork.rrefId_, fork.forkId_);
      }
    }
  }

  void add(std::size_t rank, const c10::intrusive_ptr<torch_rpc::RRef>& reference) {
    append_fork(messages_[rank], torch_rpc::RRefContext::getInstance().prepareChildFork(reference));
  }
  const std::vector<Bytes>& messages() const { return messages_; }
  void arrived() { arrived_ = true; }

 private:
  std::vector<Bytes> messages_;
  bool arrived_ = false;
};

void check_ranks(const ProcessGroup& group) {
  const auto agent = comm::current_agent(kShare);
  if (const int rank = agent->getWorkerInfo().id_; rank != group.world_rank()) {
    fail(ErrorCode::invalid_argument, "rank {} in the world of process groups is RPC rank {}, expected the same",
         group.world_rank(), rank);
  }
  const std::vector<torch_rpc::WorkerInfo> workers = agent->getWorkerInfos();
  for (const int rank : group.world_ranks()) {
    const bool is_there = std::any_of(workers.begin(), workers.end(),
                                      [&](const torch_rpc::WorkerInfo& worker) { return worker.id_ == rank; });
    if (!is_there)
      fail(ErrorCode::invalid_argument,
           "world rank {} is not an RPC worker, expected every rank of the group to be one", rank);
  }
}

std::vector<RemoteTensor> receive(const Bytes& message) {
  torch_rpc::RRefContext& context = torch_rpc::RRefContext::getInstance();
  std::vector<RemoteTensor> tensors;
  for (std::size_t begin = 0; begin < message.size(); begin += kForkBytes) {
    const torch_rpc::RRefForkData fork = read_fork(&message[begin]);
    const auto reference = context.getOrCreateRRef(fork, c10::TensorType::get());
    context.notifyOwnerAndParentOfFork(fork.forkId_, fork.parent_, reference);
    tensors.emplace_back(reference);
  }
  return tensors;
}

}  // namespace

std::vector<std::vector<RemoteTensor>> share_tensors(const ProcessGroup& group, std::span<const at::Tensor> tensors) {
  const auto ranks = static_cast<std::size_t>(group.size());
  Forks forks(ranks);
  group.agree_on(kShare, [&] {
    check_ranks(group);
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.device().is_cpu()) {
        fail(ErrorCode::unsupported, "a tensor is on {}, expected CPU", tensor.device().str());
      }
      const auto reference = torch_rpc::RRefContext::getInstance().createOwnerRRef(c10::TensorType::get());
      reference->setValue(c10::IValue(tensor));
      for (std::size_t r = 0; r < ranks; ++r) {
        if (r != static_cast<std::size_t>(group.rank())) forks.add(r, reference);
      }
    }
  });
  const std::vector<Bytes> messages = group.all_to_all_bytes(forks.messages());
  std::vector<std::vector<RemoteTensor>> shared = group.agree_on(kShare, [&] {
    std::vector<std::vector<RemoteTensor>> by_rank;
    by_rank.reserve(messages.size());
    for (const Bytes& message : messages) by_rank.push_back(receive(message));
    return by_rank;
  });
  forks.arrived();
  return shared;
}

// Replaces LibTorch's UserRRef::toHere, which needs distributed autograd to be initialized.
at::Tensor RemoteTensor::fetch(std::optional<std::chrono::milliseconds> timeout) const {
  if (timeout && timeout->count() <= 0) {
    fail(ErrorCode::invalid_argument, "fetch a tensor of rank {}: timeout {} ms, expected more than 0", owner(),
         timeout->count());
  }
  const auto agent = comm::current_agent("fetch a tensor");
  const auto& reference = static_cast<const torch_rpc::RRef&>(*reference_);
  const float seconds = timeout ? std::chrono::duration<float>(std::min(*timeout, comm::kLongestRpcTimeout)).count()
                                : torch_rpc::kUnsetRpcTimeout;
  try {
    auto answer = agent->send(
        agent->getWorkerInfo(reference.owner()),
        torch_rpc::ScriptRRefFetchCall(agent->getWorkerInfo().id_, reference.rrefId()).toMessage(), seconds);
    answer->waitAndThrow();
    const auto message = answer->constValue().toCustomClass<torch_rpc::Message>();
    torch_rpc::MessageType type = message->type();
    const std::unique_ptr<torch_rpc::RpcCommandBase> response = torch_rpc::deserializeResponse(*message, type);
    return dynamic_cast<torch_rpc::RRefFetchRet&>(*response).values().at(0).toTensor();
  } catch (...) {
    fail(ErrorCode::rank_failure, "fetch a tensor of rank {}: it did not answer or the timeout passed: {}", owner(),
         comm::message_of(std::current_exception()));
  }
}

}  // namespace tessera

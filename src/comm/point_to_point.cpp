// Messages between two ranks, by send and recv of c10d. The ranks compare their calls over Gloo, which ends a wait when
// it is told to, and then send the data.

#include "tessera/comm/point_to_point.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <thread>

#include "comm/backend/run_unless.h"
#include "comm/exceptions.h"
#include "comm/group_impl.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/internal/streams.h"

namespace tessera {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// What the functions of this file need of a group.
namespace comm {
class PointToPoint {
 public:
  static const GroupPtr& group_of(const ProcessGroup& group) { return group.impl_; }
};
}  // namespace comm

namespace {

// c10d matches messages of two ranks by tag.
enum MessageTag : int { kCallTag = 1, kDataTag = 2 };

milliseconds since(Clock::time_point begin) { return std::chrono::duration_cast<milliseconds>(Clock::now() - begin); }

// Waits for messages in a thread, which the destructor ends: c10d closes all connections of a group if a wait for a
// message times out.
class MessageWait {
 public:
  explicit MessageWait(const std::vector<comm::WorkPtr>& messages) : messages_(messages) {
    constexpr auto kLonger = std::chrono::hours(24 * 365);
    thread_ = std::thread([this, limit = std::chrono::duration_cast<milliseconds>(kLonger)] {
      try {
        for (const comm::WorkPtr& message : messages_) message->wait(limit);
        promise_.set_value();
      } catch (...) {
        promise_.set_exception(std::current_exception());
      }
    });
  }
  MessageWait(const MessageWait&) = delete;
  MessageWait& operator=(const MessageWait&) = delete;
  ~MessageWait() {
    if (!has_ended_) {
      for (const comm::WorkPtr& message : messages_) message->abort();
    }
    thread_.join();
  }

  // Returns whether the messages have ended. Throws their error.
  bool wait_for(milliseconds limit) {
    has_ended_ = ended_.wait_for(limit) == std::future_status::ready;
    if (has_ended_) ended_.get();
    return has_ended_;
  }

 private:
  const std::vector<comm::WorkPtr>& messages_;
  std::promise<void> promise_;
  std::future<void> ended_ = promise_.get_future();
  bool has_ended_ = false;
  std::thread thread_;
};

at::Tensor bytes_in(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), {static_cast<std::int64_t>(tensor.nbytes())}, [tensor](void*) {},
      at::TensorOptions().dtype(at::kByte).device(tensor.device()));
}

// The direction of a message of this rank.
struct Direction {
  bool sends;
  int peer;
};

std::string described(const ProcessGroup::Impl& group, const Direction& way, std::string_view content) {
  const int from = way.sends ? group.rank : way.peer, to = way.sends ? way.peer : group.rank;
  return fmt::format("send of {} from rank {} to rank {}", content, from, to);
}

// The other ranks cannot know which of them this rank means.
void check_peer(ProcessGroup::Impl& group, std::string_view name, int peer) {
  if (peer >= 0 && peer < group.size() && peer != group.rank) return;
  const std::string why = fmt::format("{}: rank {}, expected another rank of the group, of 0 to {}", group.where(name),
                                      peer, group.size() - 1);
  if (!group.is_alone()) {
    group.liveness->report(
        fmt::format("rank {} refused {}", group.world_ranks[static_cast<std::size_t>(group.rank)], why));
  }
  fail(ErrorCode::invalid_argument, "{}", why);
}

void check_message(const ProcessGroup::Impl& group, std::string_view name, const at::Tensor& tensor, std::size_t i) {
  const auto refuse = [&](std::string_view what) {
    fail(ErrorCode::invalid_argument, "{}: tensor {} {}", group.where(name), i, what);
  };
  if (!tensor.defined()) refuse("is undefined, expected a tensor");
  if (tensor.is_meta()) refuse("is on meta, expected a device with memory");
  if (tensor.layout() != at::kStrided) refuse("is not strided, expected a strided tensor");
  if (!tensor.is_contiguous()) refuse("is not contiguous, expected a contiguous tensor");
  if (tensor.is_conj() || tensor.is_neg())
    refuse("is a conjugated or negated view, expected a plain tensor, as resolve_conj() returns");
}

comm::Call begin_call(const ProcessGroup::Impl& group, std::string_view name, const Direction& way) {
  group.liveness->count({group.name, group.calls, std::string(name), false});
  return group.call_with(way.peer, fmt::format("{} {} rank {}", name, way.sends ? "to" : "from", way.peer));
}

// NCCL orders messages on the stream; Gloo reads and writes the memory of the CPU.
const comm::Transport& carrier_of(const ProcessGroup::Impl& group, const at::Tensor& tensor) {
  const comm::Transport& own = group.transports.of(tensor);
  return own.is_on_stream ? own : group.transports.messages;
}

// Must run within guard(), which explains a connection that is closed already.
comm::WorkPtr start_message(const comm::Transport& carrier, const Direction& way, const at::Tensor& tensor,
                            MessageTag tag) {
  std::vector<at::Tensor> bytes = {bytes_in(tensor)};
  return way.sends ? carrier.backend->send(bytes, way.peer, tag) : carrier.backend->recv(bytes, way.peer, tag);
}

// As start_message, on the current stream. The first message to or from a rank on a device connects this direction, for
// which the host waits, also for a rank that has failed since the calls were compared. So a thread waits, which is left
// then.
comm::WorkPtr start_on_stream(ProcessGroup::Impl& group, const comm::Transport& carrier, const Direction& way,
                              const at::Tensor& tensor) {
  const comm::MessageConnection connection{tensor.device(), way.peer, way.sends};
  std::vector<comm::MessageConnection>& connected = group.connected_messages;
  if (std::find(connected.begin(), connected.end(), connection) != connected.end())
    return start_message(carrier, way, tensor, kDataTag);
  const c10::Stream stream = comm::guard_of(tensor.device()).getStream(tensor.device());
  comm::WorkPtr work = comm::run_unless([&group] { return group.liveness->failure(); }, group.timeout,
                                        [carrier, way, tensor, stream] {
                                          const comm::OnStream on(stream);
                                          return start_message(carrier, way, tensor, kDataTag);
                                        });
  connected.push_back(connection);
  return work;
}

// Sends or receives tensors after the calls were compared.
void transfer(ProcessGroup::Impl& group, const comm::Call& call, const Direction& way,
              std::span<const at::Tensor> tensors) {
  std::vector<comm::WorkPtr> messages;
  std::vector<std::pair<at::Tensor, at::Tensor>> received;  // to a device, and on the CPU
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const comm::Transport& carrier = carrier_of(group, tensor);
    if (carrier.is_on_stream) {
      start_on_stream(group, carrier, way, tensor)->wait();
      comm::Call watched = call;
      watched.number = 0;  // ranks number messages by themselves
      if (group.watchdog != nullptr)
        group.watchdog->watch(watched, {group.world_ranks[static_cast<std::size_t>(way.peer)]}, tensor.device());
      continue;
    }
    at::Tensor host = tensor.detach();
    if (!tensor.is_cpu()) {
      host = way.sends ? host.cpu() : at::empty_like(host, host.options().device(at::kCPU));
      if (!way.sends) received.emplace_back(tensor.detach(), host);
    }
    messages.push_back(start_message(carrier, way, host, kDataTag));
  }
  group.wait_for_peer(messages, call, way.peer);
  for (const auto& [tensor, host] : received) tensor.copy_(host);
}

void exchange_tensors(const ProcessGroup& of, std::string_view name, const Direction& way,
                      std::span<const at::Tensor> tensors) {
  ProcessGroup::Impl& group = *comm::PointToPoint::group_of(of);
  check_peer(group, name, way.peer);
  const comm::Call call = begin_call(group, name, way);
  group.compare_with(way.peer, call, described(group, way, "tensors"), [&](CallArguments& arguments) {
    std::vector<std::string_view> dtypes, carriers;
    std::vector<std::int64_t> elements;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      check_message(group, name, tensors[i], i);
      dtypes.emplace_back(c10::toString(tensors[i].scalar_type()));
      elements.push_back(tensors[i].numel());
      carriers.emplace_back(carrier_of(group, tensors[i]).name);
    }
    arguments.add("tensors", tensors.size()).add("dtypes", fmt::format("[{}]", fmt::join(dtypes, ", ")));
    arguments.add_list("elements", elements).add("carriers", fmt::format("[{}]", fmt::join(carriers, ", ")));
  });
  group.guard(call, group.timeout, [&] { transfer(group, call, way, tensors); },
              {group.world_ranks[static_cast<std::size_t>(way.peer)]});
}

Bytes exchange_bytes(const ProcessGroup& of, std::string_view name, const Direction& way, ByteView bytes) {
  ProcessGroup::Impl& group = *comm::PointToPoint::group_of(of);
  check_peer(group, name, way.peer);
  const comm::Call call = begin_call(group, name, way);
  const std::int64_t size = group.compare_with(
      way.peer, call, described(group, way, "bytes"), [](CallArguments&) {}, static_cast<std::int64_t>(bytes.size()));
  Bytes received(way.sends ? 0 : static_cast<std::size_t>(size));
  // c10d does not change what it sends.
  const MutableByteView memory =
      way.sends ? MutableByteView(const_cast<std::uint8_t*>(bytes.data()), bytes.size()) : MutableByteView(received);
  const at::Tensor tensor =
      at::from_blob(memory.data(), {static_cast<std::int64_t>(memory.size())}, at::TensorOptions().dtype(at::kByte));
  group.guard(call, group.timeout, [&] { transfer(group, call, way, std::span(&tensor, 1)); },
              {group.world_ranks[static_cast<std::size_t>(way.peer)]});
  return received;
}

}  // namespace

comm::Call ProcessGroup::Impl::call_with(int peer, std::string_view call_name) const {
  // Signs of life name calls by group, and this rank may still be in a collective when another has ended it.
  return {fmt::format("{}:{}-{}", name, std::min(rank, peer), std::max(rank, peer)), calls, std::string(call_name),
          true};
}

std::optional<comm::Call> ProcessGroup::Impl::collective_of(int peer) const {
  try {
    std::optional<comm::Call> theirs = liveness->call_of(world_ranks[static_cast<std::size_t>(peer)], name);
    if (theirs && theirs->number > calls) return theirs;
  } catch (...) {
    // The store is gone. The thread of Liveness reports that.
  }
  return std::nullopt;
}

void ProcessGroup::Impl::wait_for_peer(const std::vector<comm::WorkPtr>& messages, const comm::Call& call, int peer) {
  if (messages.empty()) return;
  constexpr milliseconds kSlice(100), kSecond(1000);
  const int other = world_ranks[static_cast<std::size_t>(peer)];
  const Clock::time_point begin = Clock::now();
  Clock::time_point last_free = begin;  // when the peer was in no collective that needs this rank
  MessageWait messages_end(messages);
  while (!messages_end.wait_for(std::min(kSlice, timeout))) {
    engines->advance();
    if (const std::string why = liveness->failure(); !why.empty()) fail_as(call, why);
    const milliseconds waited = since(begin);
    if (waited >= timeout) {
      comm::Call any = call;
      any.number = 0;
      fail_as(call, liveness->explain_timeout(std::span(&other, 1), any, waited));
    }
    // The collective cannot end without this rank.
    const std::optional<comm::Call> theirs = collective_of(peer);
    if (!theirs) last_free = Clock::now();
    if (theirs && since(last_free) > kSecond) {
      fail_as(call, liveness->report(fmt::format("rank {} is in {} and rank {} in {}, expected calls that match",
                                                 world_ranks[static_cast<std::size_t>(rank)], call.name, other,
                                                 theirs->name)));
    }
  }
}

void ProcessGroup::Impl::swap_with(int peer, const comm::Call& call, const at::Tensor& out, const at::Tensor& in) {
  guard(call, timeout,
        [&] {
          std::vector<comm::WorkPtr> messages;
          for (const bool sends : {true, false}) {
            const at::Tensor& tensor = sends ? out : in;
            if (tensor.numel() != 0) {
              messages.push_back(start_message(transports.messages, {sends, peer}, tensor, kCallTag));
            }
          }
          wait_for_peer(messages, call, peer);
        },
        {world_ranks[static_cast<std::size_t>(peer)]});
}

std::int64_t ProcessGroup::Impl::compare_with(int peer, const comm::Call& call, std::string_view compared_as,
                                              FunctionRef<void(CallArguments&)> describe, std::int64_t number) {
  liveness->count(call);
  const bool is_first = rank < peer;
  comm::CallExchange exchange;
  exchange.ranks = {world_ranks[static_cast<std::size_t>(std::min(rank, peer))],
                    world_ranks[static_cast<std::size_t>(std::max(rank, peer))]};
  exchange.gather = [&](const std::vector<std::int64_t>& numbers) {
    const auto words = static_cast<std::int64_t>(numbers.size());
    const at::Tensor mine = at::empty({words}, at::kLong), theirs = at::empty({words}, at::kLong);
    std::copy(numbers.begin(), numbers.end(), mine.data_ptr<std::int64_t>());
    swap_with(peer, call, mine, theirs);
    std::vector<std::int64_t> all;
    for (const at::Tensor& one : {is_first ? mine : theirs, is_first ? theirs : mine}) {
      all.insert(all.end(), one.data_ptr<std::int64_t>(), one.data_ptr<std::int64_t>() + words);
    }
    return all;
  };
  exchange.gather_bytes = [&](ByteView bytes, const std::vector<std::int64_t>& sizes) {
    const at::Tensor mine = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte),
                     theirs = at::empty({sizes[is_first ? 1 : 0]}, at::kByte);
    if (!bytes.empty()) std::memcpy(mine.data_ptr(), bytes.data(), bytes.size());
    swap_with(peer, call, mine, theirs);
    const auto* data = static_cast<const std::uint8_t*>(theirs.data_ptr());
    const Bytes own(bytes.begin(), bytes.end()), other(data, data + theirs.numel());
    return is_first ? std::vector<Bytes>{own, other} : std::vector<Bytes>{other, own};
  };
  return comm::compare_calls(exchange, call.name, where(call.name), compared_as, describe, number)[is_first ? 1 : 0];
}

void send_tensors(const ProcessGroup& group, std::span<const at::Tensor> tensors, int to) {
  exchange_tensors(group, "send_tensors", {true, to}, tensors);
}

void receive_tensors(const ProcessGroup& group, std::span<const at::Tensor> tensors, int from) {
  exchange_tensors(group, "receive_tensors", {false, from}, tensors);
}

void send_bytes(const ProcessGroup& group, ByteView bytes, int to) {
  exchange_bytes(group, "send_bytes", {true, to}, bytes);
}

Bytes receive_bytes(const ProcessGroup& group, int from) {
  return exchange_bytes(group, "receive_bytes", {false, from}, {});
}

void agree_with(const ProcessGroup& of, int peer, std::string_view step, const std::exception_ptr& failure) {
  ProcessGroup::Impl& group = *comm::PointToPoint::group_of(of);
  check_peer(group, "agree_with", peer);
  const comm::Call call = group.call_with(peer, step);
  group.compare_with(peer, call, "an agreement", [&](CallArguments&) {
    if (failure) std::rethrow_exception(failure);
  });
}

}  // namespace tessera

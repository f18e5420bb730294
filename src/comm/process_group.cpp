#include "tessera/comm/process_group.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "comm/backend/run_unless.h"
#include "comm/exceptions.h"
#include "comm/group_impl.h"
#include "comm/host/connect.h"
#include "comm/rendezvous/store.h"
#include "comm/work.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/internal/streams.h"

namespace tessera {

using comm::Call;
using std::chrono::milliseconds;

namespace {

class Stopwatch {
 public:
  milliseconds elapsed() const {
    return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - begin_);
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Makes `stream` wait for all that was enqueued on the current stream of its device.
void wait_for_current(const c10::Stream& stream) {
  const c10::Device device = stream.device();
  comm::Mark end;
  end.set(device);
  const comm::OnStream on(stream);
  end.block_current();
}

}  // namespace

ProcessGroup::Impl::~Impl() {
  if (watchdog != nullptr && broken_.empty()) watchdog->finish();  // a backend aborts its work when it is destroyed
  watchdog.reset();
  if (is_alone() || (broken_.empty() && transports.accelerator.after_close == nullptr)) return;
  comm::close(std::move(transports), [this] { return !broken_.empty() || !liveness->failure().empty(); });
}

std::string ProcessGroup::Impl::where(std::string_view call) const {
  return fmt::format("{} on rank {} of {} ({})", call, rank, size(), name);
}

void ProcessGroup::Impl::connect(std::string_view operation, const std::optional<comm::Split>& split) {
  liveness->enter({name, 0, "the connection to other ranks"});
  try {
    transports =
        comm::make_transports(backend_name, {store, rank, size(), timeout, split}, [&] { return liveness->failure(); });
  } catch (const Error&) {
    liveness->leave(name);
    throw;
  } catch (...) {
    const std::string why = liveness->explain(world_ranks, comm::message_of(std::current_exception()));
    liveness->leave(name);
    fail(ErrorCode::rank_failure, "{}: rank {} of {} could not connect to the others: {}", operation, rank, size(),
         why);
  }
  liveness->leave(name);
  const comm::Transport& transport = transports.accelerator;
  if (transport.is_on_stream) watchdog = std::make_unique<comm::Watchdog>(transport, liveness, timeout);
  if (split) connected_.push_back(split->device);
}

void ProcessGroup::Impl::connect_devices(const Call& call, std::function<void(comm::Backend&)> step) {
  guard(call, timeout, [&] {
    comm::run_unless([this] { return liveness->failure(); }, timeout,
                     [backend = transports.accelerator.backend, step = std::move(step)] { step(*backend); });
  });
}

const comm::Transport& ProcessGroup::Impl::carrier(const at::Tensor& tensor) {
  const comm::Transport& transport = transports.of(tensor);
  const c10::Device device = tensor.device();
  if (transport.connect == nullptr || std::find(connected_.begin(), connected_.end(), device) != connected_.end())
    return transport;
  connect_devices(next_call("the connection on a device", /*is_counted=*/false),
                  [connect = transport.connect, device](comm::Backend& backend) { connect(backend, device); });
  connected_.push_back(device);
  connected_messages.clear();  // from now on NCCL sends messages through the connections of the group
  return transport;
}

std::optional<comm::Split> ProcessGroup::Impl::next_split() const {
  const comm::Transport& transport = transports.accelerator;
  if (transport.leave_split == nullptr || connected_.empty()) return std::nullopt;
  return comm::Split{transport.backend, connected_.front(), static_cast<int>(subgroups)};
}

// It has the number of the comparison before it: the ranks of the subgroup take none of this group.
void ProcessGroup::Impl::leave_split(const comm::Split& split) {
  const auto leave = [step = transports.accelerator.leave_split, device = split.device](comm::Backend& backend) {
    step(backend, device);
  };
  connect_devices({name, calls, "subgroup"}, leave);
}

Call ProcessGroup::Impl::next_call(std::string_view call_name, bool is_counted) {
  Call call{name, ++calls, std::string(call_name), is_comparing_};
  if (is_counted) liveness->count(call);
  return call;
}

void ProcessGroup::Impl::fail_as(const Call& call, const std::string& why) {
  broken_ = why;
  fail(ErrorCode::rank_failure, "{}: {}", where(call.name), why);
}

void ProcessGroup::Impl::guard(const Call& call, milliseconds limit, FunctionRef<void()> step,
                               const std::vector<int>& others) {
  if (broken_.empty()) broken_ = liveness->failure();
  if (!broken_.empty()) fail_as(call, broken_);
  if (met_steps_ < left_steps_ && call.number > left_after_) meet_after_left_step(call);
  liveness->enter(call);
  const Stopwatch watch;
  try {
    step();
  } catch (const Error&) {
    liveness->leave(call.group);
    throw;
  } catch (...) {
    // The backend has the same timeout and may be the first to notice.
    const milliseconds waited = watch.elapsed();
    const std::string left = left_by_others(call);
    const std::string why = !left.empty()     ? liveness->report(left)
                            : waited >= limit ? liveness->explain_timeout(others, call, waited)
                                              : liveness->explain(others, comm::message_of(std::current_exception()));
    liveness->leave(call.group);
    fail_as(call, why);
  }
  liveness->leave(call.group);
}

comm::WorkPtr ProcessGroup::Impl::start(const comm::Transport& transport, c10::Device device, const Call& call,
                                        Start start) {
  const comm::Watchdog::Starting starting(transport.is_on_stream ? watchdog.get() : nullptr, call, world_ranks, device);
  try {
    return start(*transport.backend);
  } catch (...) {
    // The watchdog ends the call if a rank has failed.
    const std::string failure = liveness->failure();
    fail_as(call, !failure.empty() ? failure
                                   : fmt::format("{} rejected the call: {}", transport.name,
                                                 comm::message_of(std::current_exception())));
  }
}

void ProcessGroup::Impl::run(std::string_view call_name, const comm::Transport& transport, c10::Device device,
                             Start begin, milliseconds limit) {
  const Call call = next_call(call_name);
  guard(call, limit, [&] { wait(transport, device, start(transport, device, call, begin), call, limit); });
}

PendingCollective ProcessGroup::Impl::begin(const std::shared_ptr<Impl>& group, std::string_view call_name,
                                            const comm::Transport& transport, c10::Device device, Start start,
                                            std::function<void()> finish, bool is_counted) {
  PendingCollective pending;
  pending.state_ = std::make_shared<PendingCollective::State>();
  PendingCollective::State& state = *pending.state_;
  state.group = group;
  state.transport = transport;
  state.device = device;
  if (!device.is_cpu()) state.stream = comm::guard_of(device).getStream(device);
  state.call = group->next_call(call_name, is_counted);
  state.finish = std::move(finish);
  group->guard(state.call, group->timeout,
               [&] { state.work = group->start(state.transport, state.device, state.call, start); });
  return pending;
}

// Waits in slices and checks between them whether a rank has reported a failure.
void ProcessGroup::Impl::wait(const comm::Transport& transport, c10::Device device, const comm::WorkPtr& work,
                              const Call& call, milliseconds limit) {
  if (transport.is_on_stream) {  // it makes the current stream of the device wait
    work->wait();
    if (watchdog != nullptr) watchdog->watch(call, world_ranks, device);
    return;
  }
  constexpr milliseconds kSlice(100), kSecond(1000);
  const Stopwatch watch;
  std::optional<Stopwatch> since_left;
  for (;;) {
    if (comm::wait_for(*work, std::min(kSlice, limit))) return;
    engines->advance();
    if (const std::string why = liveness->failure(); !why.empty()) fail_as(call, why);
    if (const std::string why = left_by_others(call); !why.empty()) fail_as(call, liveness->report(why));
    if (transport.misses_ranks_that_left && watch.elapsed() > kSecond) {
      // A rank may leave after the call when this rank is still in it.
      const std::optional<std::string> left = liveness->find_left(world_ranks);
      if (left && !since_left) since_left.emplace();
      if (left && since_left->elapsed() > liveness->dead_after()) fail_as(call, liveness->report(*left));
    }
    const milliseconds waited = watch.elapsed();
    if (waited >= limit) fail_as(call, liveness->explain_timeout(world_ranks, call, waited));
  }
}

PendingCollective::State::~State() {
  if (work == nullptr || !stream || !transport.is_on_stream) return;
  try {
    const comm::OnStream on(*stream);
    group->wait(transport, device, work, call, group->timeout);
  } catch (...) {
    // The device or a rank has failed. The next call of the group reports it.
  }
}

void PendingCollective::wait() {
  const std::shared_ptr<State> state = std::exchange(state_, nullptr);
  if (state == nullptr || state->work == nullptr) return;  // waited for through a copy
  ProcessGroup::Impl& group = *state->group;
  group.guard(state->call, group.timeout,
              [&] { group.wait(state->transport, state->device, state->work, state->call, group.timeout); });
  if (state->finish) {
    state->finish();
    if (state->stream) wait_for_current(*state->stream);  // what finish() frees belongs to that stream
    state->finish = nullptr;
  }
  state->work.reset();
}

bool PendingCollective::completes_on_stream() const { return state_ == nullptr || state_->transport.is_on_stream; }

ProcessGroup::ProcessGroup() : impl_(std::make_shared<Impl>()) {}

int ProcessGroup::rank() const { return impl_->rank; }
int ProcessGroup::size() const { return impl_->size(); }
const std::string& ProcessGroup::name() const { return impl_->name; }
const std::string& ProcessGroup::backend() const { return impl_->backend_name; }
const std::vector<int>& ProcessGroup::world_ranks() const { return impl_->world_ranks; }
int ProcessGroup::world_size() const { return impl_->world_size; }
milliseconds ProcessGroup::timeout() const { return impl_->timeout; }

std::optional<ProcessGroup> ProcessGroup::subgroup(std::span<const int> ranks) const {
  const std::vector<int> members(ranks.begin(), ranks.end());
  std::vector<int> sorted = members;
  std::sort(sorted.begin(), sorted.end());
  const auto check = [&](CallArguments& arguments) {
    if (sorted.empty() || sorted.front() < 0 || sorted.back() >= size() ||
        std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
      fail(ErrorCode::invalid_argument, "{}: ranks [{}], expected some of 0 to {}, each once", impl_->where("subgroup"),
           fmt::join(members, ", "), size() - 1);
    }
    arguments.add("ranks", fmt::format("[{}]", fmt::join(members, ", ")));
  };
  // The last rank of a broken group needs no other for a group of its own.
  if (!impl_->is_broken() || members != std::vector<int>{rank()}) check_call("subgroup", check);
  const std::optional<comm::Split> split = members.size() > 1 ? impl_->next_split() : std::nullopt;
  const std::uint64_t number = impl_->subgroups++;
  const auto mine = std::find(members.begin(), members.end(), rank());
  if (mine == members.end()) {
    if (split) impl_->leave_split(*split);
    return std::nullopt;
  }

  auto group = std::make_shared<Impl>();
  group->name = fmt::format("{}/{}", impl_->name, number);
  group->rank = static_cast<int>(mine - members.begin());
  group->world_ranks.clear();
  for (const int member : members) group->world_ranks.push_back(world_ranks()[static_cast<std::size_t>(member)]);
  group->world_size = impl_->world_size;
  group->timeout = impl_->timeout;
  group->liveness = impl_->liveness;
  group->engines = impl_->engines;
  if (impl_->is_alone() || members.size() == 1) return ProcessGroup(std::move(group));
  group->store = comm::with_prefix(group->name, impl_->store);
  group->backend_name = comm::backend_of_subgroups(impl_->backend_name);
  group->connect(impl_->where("subgroup"), split);
  comm::use_host_memory(group);
  ProcessGroup met(std::move(group));
  met.barrier();  // as for the world: no rank leaves while others connect
  return met;
}

}  // namespace tessera

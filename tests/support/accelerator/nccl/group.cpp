#include "support/accelerator/nccl/group.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"

namespace tessera::sim {

namespace {

using Parts = std::vector<Part>;
using Reduction = ::c10d::ReduceOp;

at::Tensor flat(const RawTensor& tensor) { return tensor.on_cpu().view({-1}); }

void check_alike(const Parts& parts) {
  for (const Part& part : parts) {
    TORCH_CHECK(
        part.collective == parts[0].collective && part.root == parts[0].root && part.reduction == parts[0].reduction,
        "sim: ranks met in different collectives: ", name_of(parts[0].collective), " with root ", parts[0].root,
        " and ", name_of(part.collective), " with root ", part.root);
  }
}

void move(const RawTensor& to, const RawTensor& from) {
  const at::Tensor out = flat(to), in = flat(from);
  TORCH_CHECK(out.numel() == in.numel() && out.scalar_type() == in.scalar_type(), "sim: a rank receives ", out.numel(),
              " elements of ", out.scalar_type(), ", where another sends ", in.numel(), " of ", in.scalar_type());
  out.copy_(in);
}

// Returns the reduction of `size` tensors.
at::Tensor reduce(Reduction::RedOpType reduction, int size, FunctionRef<const RawTensor&(std::size_t rank)> tensor_of) {
  at::Tensor result = at::clone(flat(tensor_of(0)));
  for (int rank = 1; rank < size; ++rank) {
    const at::Tensor next = flat(tensor_of(static_cast<std::size_t>(rank)));
    TORCH_CHECK(next.numel() == result.numel() && next.scalar_type() == result.scalar_type(), "sim: rank ", rank,
                " reduces ", next.numel(), " elements of ", next.scalar_type(), ", rank 0 ", result.numel(), " of ",
                result.scalar_type());
    switch (reduction) {
      case Reduction::SUM:
      case Reduction::AVG:
        result.add_(next);
        break;
      case Reduction::PRODUCT:
        result.mul_(next);
        break;
      case Reduction::MIN:
        at::minimum_out(result, result, next);
        break;
      case Reduction::MAX:
        at::maximum_out(result, result, next);
        break;
      default:
        TORCH_CHECK(false, "sim: found the reduction ", static_cast<int>(reduction),
                    ", expected sum, average, product, min or max");
    }
  }
  if (reduction == Reduction::AVG) {
    if (result.is_floating_point() || result.is_complex()) {
      result.div_(size);
    } else {
      result.div_(size, "trunc");
    }
  }
  return result;
}

void reduce_all(const Parts& parts, bool to_root_alone) {
  for (std::size_t i = 0; i < parts[0].inputs.size(); ++i) {
    const at::Tensor result = reduce(parts[0].reduction, static_cast<int>(parts.size()),
                                     [&](std::size_t rank) -> const RawTensor& { return parts[rank].inputs.at(i); });
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      if (!to_root_alone || static_cast<int>(rank) == parts[0].root) flat(parts[rank].outputs.at(i)).copy_(result);
    }
  }
}

void gather_all(const Parts& parts) {
  for (const Part& part : parts) {
    for (std::size_t i = 0; i < part.outputs.size(); ++i)
      move(part.outputs[i], parts[i % parts.size()].inputs.at(i / parts.size()));
  }
}

void reduce_scatter(const Parts& parts) {
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    for (std::size_t i = 0; i < parts[rank].outputs.size(); ++i) {
      const at::Tensor result = reduce(
          parts[0].reduction, static_cast<int>(parts.size()),
          [&](std::size_t other) -> const RawTensor& { return parts[other].inputs.at(i * parts.size() + rank); });
      flat(parts[rank].outputs[i]).copy_(result);
    }
  }
}

}  // namespace

std::string name_of(Collective collective) {
  switch (collective) {
    case Collective::all_reduce:
      return "nccl:all_reduce";
    case Collective::reduce:
      return "nccl:reduce";
    case Collective::broadcast:
      return "nccl:broadcast";
    case Collective::all_gather:
      return "nccl:all_gather";
    case Collective::gather:
      return "nccl:gather";
    case Collective::reduce_scatter:
      return "nccl:reduce_scatter";
    case Collective::scatter:
      return "nccl:scatter";
    case Collective::all_to_all:
      return "nccl:all_to_all";
    case Collective::barrier:
      return "nccl:barrier";
    case Collective::message:
      return "nccl:message";
  }
  return "nccl";
}

std::int64_t sent_bytes(const Part& part, std::size_t ranks) {
  const auto bytes_of = [](const std::vector<RawTensor>& tensors) {
    std::int64_t bytes = 0;
    for (const RawTensor& tensor : tensors) bytes += tensor.bytes();
    return bytes;
  };
  const std::int64_t bytes = std::max(bytes_of(part.inputs), bytes_of(part.outputs));
  const auto size = static_cast<std::int64_t>(ranks);
  switch (part.collective) {
    case Collective::reduce:
    case Collective::broadcast:
    case Collective::message:
    case Collective::barrier:
      return bytes;
    case Collective::all_reduce:
      return 2 * bytes * (size - 1) / size;
    default:
      return bytes * (size - 1) / size;
  }
}

void run_collective(const Parts& parts) {
  check_alike(parts);
  const auto root = static_cast<std::size_t>(parts[0].root);
  switch (parts[0].collective) {
    case Collective::all_reduce:
      return reduce_all(parts, false);
    case Collective::reduce:
      return reduce_all(parts, true);
    case Collective::broadcast:
      for (std::size_t rank = 0; rank < parts.size(); ++rank) {
        for (std::size_t i = 0; rank != root && i < parts[rank].outputs.size(); ++i)
          move(parts[rank].outputs[i], parts[root].inputs.at(i));
      }
      return;
    case Collective::all_gather:
    case Collective::gather:
      return gather_all(parts);
    case Collective::reduce_scatter:
      return reduce_scatter(parts);
    case Collective::scatter:
      for (std::size_t rank = 0; rank < parts.size(); ++rank) {
        for (std::size_t i = 0; i < parts[rank].outputs.size(); ++i)
          move(parts[rank].outputs[i], parts[root].inputs.at(i * parts.size() + rank));
      }
      return;
    case Collective::all_to_all:
      for (std::size_t rank = 0; rank < parts.size(); ++rank) {
        for (std::size_t from = 0; from < parts.size(); ++from)
          move(parts[rank].outputs.at(from), parts[from].inputs.at(rank));
      }
      return;
    case Collective::message:
      return move(parts[1].outputs.at(0), parts[0].inputs.at(0));
    case Collective::barrier:
      return;
  }
}

std::shared_ptr<Group> Group::join(const std::string& name, int size) {
  static auto& mutex = *new std::mutex;
  static auto& groups = *new std::map<std::string, std::weak_ptr<Group>>;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Group> group = groups[name].lock();
  if (group == nullptr) {
    group = std::make_shared<Group>(size);
    groups[name] = group;
  }
  TORCH_CHECK(group->size() == size, "sim: group ", name, " has ", group->size(), " ranks, expected ", size);
  return group;
}

std::string Group::new_name() {
  static std::atomic<std::uint64_t> names = 0;
  return "sim-nccl-" + std::to_string(++names);
}

void Group::wait(std::unique_lock<std::mutex>& lock, int rank, FunctionRef<bool()> is_met) {
  constexpr std::chrono::seconds kLimit(60);
  met_.notify_all();
  const bool has_ended = met_.wait_for(lock, kLimit, [&] { return aborted_.contains(rank) || is_met(); });
  TORCH_CHECK(has_ended, "sim: another rank did not connect to rank ", rank, " for ", kLimit.count(), " s");
  TORCH_CHECK(is_met(), "sim: rank ", rank, " was aborted while it connected");
}

void Group::meet(int rank) {
  std::unique_lock lock(mutex_);
  const int mine = ++meetings_[rank];
  wait(lock, rank, [&] {
    for (int other = 0; other < size_; ++other) {
      if (meetings_[other] < mine) return false;
    }
    return true;
  });
}

namespace {
std::atomic<int> refused_rank = -1;
}  // namespace

void Group::refuse_messages_of(int rank) { refused_rank = rank; }

void Group::connect(int rank, const Connection& connection) {
  if (rank == refused_rank) fail(ErrorCode::io, "sim: the message of rank {} is refused", rank);
  const int peer = rank == connection.source ? connection.destination : connection.source;
  std::unique_lock lock(mutex_);
  connections_.insert({rank, connection});
  wait(lock, rank, [&] { return connections_.contains({peer, connection}); });
}

void Group::cancel(const Key& key, const MeetingPtr& meeting, int rank) const {
  const auto& [source, destination, number] = key;
  if (source < 0) {
    Engine::get().cancel(meeting, static_cast<std::size_t>(rank));
  } else if (rank == source || rank == destination) {
    Engine::get().cancel(meeting, rank == source ? 0 : 1);
  }
}

void Group::abort(int rank) {
  const std::lock_guard lock(mutex_);
  aborted_.insert(rank);
  met_.notify_all();
  for (const auto& [key, gathering] : gatherings_) cancel(key, gathering.meeting, rank);
  for (const auto& [key, meeting] : complete_) cancel(key, meeting, rank);
}

void Group::enqueue(std::uint64_t number, int rank, StreamKey stream, Part part) {
  enqueue(Key(-1, -1, number), static_cast<std::size_t>(size_), static_cast<std::size_t>(rank), stream,
          std::move(part));
}

void Group::enqueue_message(std::uint64_t number, int source, int destination, int rank, StreamKey stream, Part part) {
  enqueue(Key(source, destination, number), 2, rank == source ? 0 : 1, stream, std::move(part));
}

void Group::enqueue(const Key& key, std::size_t members, std::size_t member, StreamKey stream, Part part) {
  MeetingPtr meeting;
  const std::int64_t bytes = sent_bytes(part, members);
  {
    const std::lock_guard lock(mutex_);
    Gathering& gathering = gatherings_[key];
    if (gathering.meeting == nullptr) {
      gathering.meeting = std::make_shared<Meeting>(name_of(part.collective), members);
      gathering.parts = std::make_shared<Parts>(members);
      gathering.meeting->run = [parts = gathering.parts] { run_collective(*parts); };
    }
    (*gathering.parts)[member] = std::move(part);
    meeting = gathering.meeting;
    const auto& [source, destination, number] = key;
    const int rank = source < 0 ? static_cast<int>(member) : member == 0 ? source : destination;
    if (aborted_.contains(rank)) Engine::get().cancel(meeting, member);
    if (++gathering.arrived == members) {
      std::erase_if(complete_, [](const auto& one) { return Engine::get().is_done(one.second); });
      complete_.emplace(key, meeting);
      gatherings_.erase(key);
    }
  }
  Engine::get().meet(stream, meeting, member, bytes);
}

}  // namespace tessera::sim

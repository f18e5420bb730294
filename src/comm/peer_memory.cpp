#include "tessera/comm/internal/peer_memory.h"

#include <ATen/ops/full.h>
#include <fcntl.h>
#include <unistd.h>

#include <climits>
#include <cstring>
#include <random>
#include <string>
#include <system_error>

#include "comm/group_impl.h"
#include "comm/host/place.h"

namespace tessera::comm {

namespace {

// What a rank tells the others, so that they can test whether they can read its memory.
struct MarkOfRank {
  pid_t pid = 0;
  std::uint64_t address = 0;  // of `mark`
  std::uint64_t mark = 0;
};

std::uint64_t random_mark() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

// The memory ranges that are still to be copied. A system call takes a limited number.
class Stretches {
 public:
  explicit Stretches(std::vector<iovec> all) : all_(std::move(all)) { skip(0); }
  bool empty() const { return first_ == all_.size(); }
  const iovec* data() const { return all_.data() + first_; }
  unsigned long count() const { return std::min<std::size_t>(all_.size() - first_, IOV_MAX); }
  void skip(std::size_t bytes) {
    for (; first_ < all_.size() && bytes >= all_[first_].iov_len; ++first_) bytes -= all_[first_].iov_len;
    if (bytes == 0) return;
    all_[first_].iov_base = static_cast<char*>(all_[first_].iov_base) + bytes;
    all_[first_].iov_len -= bytes;
  }

 private:
  std::vector<iovec> all_;
  std::size_t first_ = 0;
};

void copy_from(pid_t pid, Stretches to, Stretches from) {
  while (!to.empty() && !from.empty()) {
    const ssize_t copied = ::process_vm_readv(pid, to.data(), to.count(), from.data(), from.count(), 0);
    if (copied <= 0) throw std::system_error(copied < 0 ? errno : EFAULT, std::generic_category());
    to.skip(static_cast<std::size_t>(copied));
    from.skip(static_cast<std::size_t>(copied));
  }
}

bool can_read(const MarkOfRank& peer) {
  std::uint64_t mark = 0;
  try {
    copy_from(peer.pid, Stretches({{&mark, sizeof(mark)}}),
              Stretches({{reinterpret_cast<void*>(peer.address), sizeof(mark)}}));
  } catch (const std::system_error&) {
    return false;
  }
  return mark == peer.mark;
}

std::vector<pid_t> find_peers(const ProcessGroup& group) {
  const volatile std::uint64_t mark = random_mark();
  const MarkOfRank mine{::getpid(), reinterpret_cast<std::uintptr_t>(&mark), mark};
  // Ranks with the same name know each other's processes by the same ids.
  const std::string space = host_place("pid", "TESSERA_PEER_MEMORY");
  Bytes message(sizeof(mine));
  std::memcpy(message.data(), &mine, sizeof(mine));
  append(message, space);
  std::vector<pid_t> pids;
  bool can = !space.empty();
  for (const Bytes& other : group.all_gather_bytes(message)) {
    can = can && as_text(ByteView(other).subspan(sizeof(mine))) == space;
    if (!can) break;
    MarkOfRank peer;
    std::memcpy(&peer, other.data(), sizeof(peer));
    can = can_read(peer);
    pids.push_back(peer.pid);
  }
  // The all-reduce also keeps the mark alive until all have read it.
  const at::Tensor all_can = at::full({1}, can ? 1 : 0, at::kLong);
  group.all_reduce(all_can, ReduceOp::min);
  if (*all_can.data_ptr<std::int64_t>() == 0) pids.clear();
  return pids;
}

}  // namespace

bool PeerMemory::is_available(const ProcessGroup& group) {
  if (group.size() == 1) return false;
  std::optional<std::vector<pid_t>>& pids = group.impl_->peer_pids;
  if (!pids) pids = find_peers(group);
  return !pids->empty();
}

PeerMemory::PeerMemory(const ProcessGroup& group, std::span<const std::uint64_t> mine) : group_(group) {
  Bytes message(mine.size_bytes());
  if (!mine.empty()) std::memcpy(message.data(), mine.data(), mine.size_bytes());
  for (const Bytes& other : group.all_gather_bytes(message)) {
    std::vector<std::uint64_t>& theirs = addresses_.emplace_back(other.size() / sizeof(std::uint64_t));
    if (!other.empty()) std::memcpy(theirs.data(), other.data(), other.size());
  }
  call_ = group.impl_->next_call("read_peer_memory");
}

std::span<const std::uint64_t> PeerMemory::addresses(int rank) const {
  return addresses_[static_cast<std::size_t>(rank)];
}

void PeerMemory::read(int rank, std::vector<iovec> to, std::vector<iovec> from) const {
  group_.impl_->guard(call_, group_.timeout(), [&] {
    const pid_t pid = (*group_.impl_->peer_pids)[static_cast<std::size_t>(rank)];
    try {
      copy_from(pid, Stretches(std::move(to)), Stretches(std::move(from)));
    } catch (const std::system_error& error) {
      throw std::runtime_error(fmt::format("read the memory of rank {}: {}", rank, error.code().message()));
    }
  });
}

void PeerMemory::finish() const { group_.barrier(); }

}  // namespace tessera::comm

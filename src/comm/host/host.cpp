#include "comm/host/host.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <mutex>
#include <random>
#include <utility>

namespace tessera::comm {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kAllRingsBytes = std::size_t{16} << 20, kLeastRingBytes = std::size_t{256} << 10,
                      kMostRingBytes = std::size_t{4} << 20;
constexpr std::chrono::microseconds kSpin(20);
constexpr std::chrono::milliseconds kSleep(20);

std::size_t in_pages(std::size_t size_bytes) { return (size_bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

// The numbers of a reader's tails, so that each reader writes to cache lines of its own.
std::size_t tails_of_reader(int ranks) { return (static_cast<std::size_t>(ranks) + 7) / 8 * 8; }

std::size_t control_bytes(int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  return in_pages(n * sizeof(HostMapping::Rank) + n * tails_of_reader(ranks) * sizeof(std::uint64_t));
}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value, Clock::duration limit) {
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(limit).count();
  const timespec time{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);  // whatever it returns, the caller looks again
}

void wake(HostMapping::Rank& rank) {
  if (rank.sleepers.load() == 0) return;
  rank.bell.fetch_add(1);
  ::syscall(SYS_futex, &rank.bell, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

void pause_processor() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

std::uint64_t process_number() {
  static std::atomic<std::uint64_t> number;
  static const auto draw = [] {
    std::random_device device;
    number = (static_cast<std::uint64_t>(device()) << 32) | device();
  };
  static std::once_flag once;
  std::call_once(once, [] {
    draw();
    ::pthread_atfork(nullptr, nullptr, [] { draw(); });  // a child is another process
  });
  return number;
}

HostMapping::HostMapping(Descriptor memory, int ranks)
    : memory_(std::move(memory)), ranks_(ranks), control_(memory_, 0, control_bytes(ranks)) {
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);
  for (int r = 0; r < ranks; ++r)
    rings_.emplace_back(memory_, control_bytes(ranks) + static_cast<std::size_t>(r) * ring_bytes(ranks),
                        ring_bytes(ranks), 2);
}

std::size_t HostMapping::size_bytes(int ranks) {
  return control_bytes(ranks) + static_cast<std::size_t>(ranks) * ring_bytes(ranks);
}

std::size_t HostMapping::ring_bytes(int ranks) {
  return in_pages(std::clamp(kAllRingsBytes / static_cast<std::size_t>(ranks), kLeastRingBytes, kMostRingBytes));
}

std::atomic<std::uint64_t>& HostMapping::tail(int reader, int writer) const {
  auto* const tails =
      reinterpret_cast<std::atomic<std::uint64_t>*>(control_.data() + static_cast<std::size_t>(ranks_) * sizeof(Rank));
  return tails[static_cast<std::size_t>(reader) * tails_of_reader(ranks_) + static_cast<std::size_t>(writer)];
}

Host::Host(std::shared_ptr<HostMapping> mapping, int rank, int ranks, std::vector<Descriptor> sockets, bool may_spin)
    : mapping_(std::move(mapping)),
      rank_(rank),
      ranks_(ranks),
      ring_bytes_(HostMapping::ring_bytes(ranks)),
      sockets_(std::move(sockets)),
      may_spin_(may_spin),
      tails_(static_cast<std::size_t>(ranks)) {
  hold_lock(mapping_->memory(), rank);
  mapping_->rank(rank).process = process_number();
}

Host::~Host() {
  mapping_->rank(rank_).has_left = 1;
  ring_all();
}

std::size_t Host::room() const {
  std::uint64_t room = ring_bytes_;
  for (int r = 0; r < ranks_; ++r) {
    if (r == rank_) continue;
    const std::uint64_t tail = mapping_->tail(r, rank_).load();
    if (tail < head_) room = std::min(room, ring_bytes_ - (head_ - tail));
  }
  return room;
}

void Host::commit(std::size_t size_bytes) {
  head_ += size_bytes;
  mapping_->rank(rank_).head.store(head_);
  ring_all();
}

std::size_t Host::available(int writer) const {
  const std::uint64_t head = mapping_->rank(writer).head.load(), tail = tails_[static_cast<std::size_t>(writer)];
  return head > tail ? head - tail : 0;
}

const std::uint8_t* Host::front(int writer) const {
  return mapping_->ring(writer) + tails_[static_cast<std::size_t>(writer)] % ring_bytes_;
}

void Host::consume(int writer, std::size_t size_bytes) {
  if (size_bytes == 0) return;
  mapping_->tail(rank_, writer).store(tails_[static_cast<std::size_t>(writer)] += size_bytes);
  ring(writer);
}

void Host::ring(int r) const { wake(mapping_->rank(r)); }

std::function<void()> Host::own_bell() const {
  return [mapping = mapping_, rank = rank_] { wake(mapping->rank(rank)); };
}

void Host::ring_all() const {
  for (int r = 0; r < ranks_; ++r) {
    if (r != rank_) ring(r);
  }
}

bool Host::wait(FunctionRef<bool()> poll, FunctionRef<void()> check, Clock::time_point deadline) const {
  if (poll()) return true;
  if (may_spin_) {
    const Clock::time_point end = Clock::now() + kSpin;
    do {
      pause_processor();
      if (poll()) return true;
    } while (Clock::now() < end);
  }
  // A rank that sees a sleeper rings; one that does not has made its change before poll() is called again.
  struct Sleeper {
    explicit Sleeper(HostMapping::Rank& of) : rank(of) { rank.sleepers.fetch_add(1); }
    ~Sleeper() { rank.sleepers.fetch_sub(1); }
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;
    HostMapping::Rank& rank;
  };
  const Sleeper sleeper(mapping_->rank(rank_));
  for (;;) {
    const std::uint32_t bell = sleeper.rank.bell.load();
    if (poll()) return true;
    const Clock::time_point now = Clock::now();
    if (now >= deadline) return false;
    futex_wait(sleeper.rank.bell, bell, std::min<Clock::duration>(deadline - now, kSleep));
    check();
  }
}

bool Host::has_left(int r) const {
  const HostMapping::Rank& other = mapping_->rank(r);
  if (other.has_left.load() != 0) return true;
  return other.process.load() != process_number() && !is_locked(mapping_->memory(), r);
}

}  // namespace tessera::comm

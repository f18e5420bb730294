#include "comm/rendezvous/liveness.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "comm/exceptions.h"
#include "comm/rendezvous/store.h"

namespace tessera::comm {

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr char kFailure[] = "failure";
constexpr char kLeft[] = "left";  // the last sign of a rank, and a key that exists once a rank has left

std::string sign_key(int rank) { return fmt::format("sign/{}", rank); }
std::string reason_key(int rank) { return fmt::format("reason/{}", rank); }

// The time in which a thread that failed reports it, so that others name its failure, not what followed from it.
constexpr milliseconds kReportOfThread(3000);

// Stands for a space within a name.
constexpr char kSpace = '\x1f';
// Begins the name of a comparison.
constexpr char kComparison = '\x1e';

std::string as_word(std::string name) {
  std::replace(name.begin(), name.end(), ' ', kSpace);
  return name;
}

std::string from_word(std::string word) {
  std::replace(word.begin(), word.end(), kSpace, ' ');
  return word;
}

// Returns "<beat>", which is new each time, and " <number> <group> <name>" for each call that the rank is in.
std::string sign_of(std::uint64_t beat, const std::map<std::string, Call>& calls) {
  std::string sign = fmt::to_string(beat);
  for (const auto& [group, call] : calls) {
    sign += fmt::format(" {} {} {}{}", call.number, group,
                        call.is_comparison ? std::string(1, kComparison) : std::string(), as_word(call.name));
  }
  return sign;
}

std::map<std::string, Call> calls_of(const std::string& sign) {
  std::map<std::string, Call> calls;
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin <= sign.size();) {
    const std::size_t end = std::min(sign.find(' ', begin), sign.size());
    words.push_back(sign.substr(begin, end - begin));
    begin = end + 1;
  }
  for (std::size_t i = 1; i + 2 < words.size(); i += 3) {
    std::string& name = words[i + 2];
    const bool is_comparison = name.starts_with(kComparison);
    if (is_comparison) name.erase(0, 1);
    calls[words[i + 1]] = {words[i + 1], std::strtoull(words[i].c_str(), nullptr, 10), from_word(name), is_comparison};
  }
  return calls;
}

// Names the call of `group` if the rank is in one, else those of other groups.
std::string where_it_is(const std::map<std::string, Call>& calls, const std::string& group) {
  if (const auto same = calls.find(group); same != calls.end()) return "in " + same->second.name;
  if (calls.empty()) return "in no collective";
  std::string text = "in ";
  for (const auto& [other, call] : calls) text += (text.size() > 3 ? ", " : "") + call.name;
  return text;
}

std::string list_of(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

}  // namespace

Liveness::Liveness(StorePtr store, bool keeps_store, int rank, int size, std::optional<milliseconds> dead_after,
                   std::string keeper)
    : store_(std::move(store)),
      keeps_store_(keeps_store),
      keeper_(std::move(keeper)),
      rank_(rank),
      size_(size),
      may_die_(dead_after.has_value()),
      dead_after_(dead_after.value_or(kReportOfThread)),
      period_(std::clamp(dead_after_ / 10, milliseconds(20), milliseconds(1000))),
      signs_(keeps_store ? static_cast<std::size_t>(size) : 0, Sign{"", Clock::now()}) {
  try {
    beat();  // before this rank meets others, so that they can miss it, however late the thread starts
  } catch (const std::exception&) {
    // The thread will report it.
  }
  thread_ = std::thread([this] { run(); });
}

Liveness::~Liveness() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  thread_.join();
  try {
    put_text(*store_, kLeft, "yes");
    put_text(*store_, sign_key(rank_), kLeft);
    if (keeps_store_) wait_for_others();
  } catch (const std::exception&) {
    // Rank 0 left before, and the store with it.
  }
}

void Liveness::listen_to_all() {
  const Clock::time_point now = Clock::now();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    Sign& last = signs_[static_cast<std::size_t>(r)];
    if (std::string sign = read(sign_key(r)); sign != last.text) last = {std::move(sign), now};
  }
}

void Liveness::wait_for_others() {
  const Clock::time_point deadline = Clock::now() + dead_after_;
  const auto may_read = [&](const Sign& sign) {
    return sign.text != kLeft && Clock::now() - sign.since <= dead_after_;
  };
  signs_[static_cast<std::size_t>(rank_)].text = kLeft;
  for (;;) {
    listen_to_all();
    if (Clock::now() >= deadline || std::none_of(signs_.begin(), signs_.end(), may_read)) return;
    std::this_thread::sleep_for(milliseconds(5));
  }
}

void Liveness::enter(const Call& call) {
  const std::lock_guard lock(mutex_);
  calls_[call.group] = call;
}

void Liveness::enter_if_in_none(const Call& call) {
  const std::lock_guard lock(mutex_);
  calls_.try_emplace(call.group, call);
}

void Liveness::leave_if_in(const Call& call) {
  const std::lock_guard lock(mutex_);
  const auto found = calls_.find(call.group);
  if (found != calls_.end() && found->second.number == call.number && found->second.name == call.name)
    calls_.erase(found);
}

void Liveness::leave(const std::string& group) {
  const std::lock_guard lock(mutex_);
  calls_.erase(group);
}

void Liveness::count(const Call& call) {
  const std::lock_guard lock(mutex_);
  ++(call.is_comparison ? counts_.comparisons : counts_.collectives[call.name]);
}

CallCounts Liveness::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::string Liveness::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

std::uint64_t Liveness::looks() const {
  const std::lock_guard lock(mutex_);
  return looks_;
}

std::string Liveness::report(::c10d::Store& store, const std::string& what) {
  const std::vector<std::uint8_t> reported =
      store.compareSet(kFailure, {}, std::vector<std::uint8_t>(what.begin(), what.end()));
  return {reported.begin(), reported.end()};
}

std::string Liveness::report(const std::string& what) {
  std::string first = what;
  try {
    const std::lock_guard lock(store_mutex_);
    first = report(*store_, what);
  } catch (const std::exception&) {
    // Without a store the failure cannot be reported.
  }
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = first;
  return failure_;
}

void Liveness::put(const std::string& key, const std::string& text) {
  const std::lock_guard lock(store_mutex_);
  put_text(*store_, key, text);
}

std::string Liveness::read(const std::string& key) {
  const std::lock_guard lock(store_mutex_);
  return get_text(*store_, key);
}

void Liveness::record_reason(const std::string& reason) noexcept {
  try {
    put(reason_key(rank_), reason);
  } catch (...) {
    // The store is gone. The thread reports that.
  }
}

std::optional<Call> Liveness::call_of(int rank, const std::string& group) {
  const std::map<std::string, Call> calls = calls_of(read(sign_key(rank)));
  const auto found = calls.find(group);
  return found != calls.end() ? std::optional(found->second) : std::nullopt;
}

std::string Liveness::without_store(const std::string& why) const {
  return fmt::format("{}, which keeps the store, is gone ({})", keeper_, why);
}

void Liveness::run() {
  last_heard_ = Clock::now();
  for (;;) {
    try {
      beat();
      watch_next();
      if (keeps_store_) listen_to_all();
      if (const std::string reported = read(kFailure); !reported.empty()) {
        const std::lock_guard lock(mutex_);
        if (failure_.empty()) failure_ = reported;
      }
    } catch (...) {
      const std::string why = message_of(std::current_exception());
      const std::lock_guard lock(mutex_);
      if (failure_.empty()) failure_ = without_store(why);
      return;
    }
    std::unique_lock lock(mutex_);
    ++looks_;
    if (changed_.wait_for(lock, period_, [&] { return stops_; })) return;
  }
}

void Liveness::beat() {
  std::string sign;
  {
    const std::lock_guard lock(mutex_);
    sign = sign_of(++beats_, calls_);
  }
  const std::lock_guard lock(store_mutex_);
  put_text(*store_, sign_key(rank_), sign);
}

// Watches the next rank that has not left. A rank that has not arrived yet has as much time as one that died.
void Liveness::watch_next() {
  const Clock::time_point now = Clock::now();
  for (int i = 1; i < size_; ++i) {
    const int next = (rank_ + i) % size_;
    const std::string sign = read(sign_key(next));
    if (sign == kLeft) continue;
    if (next != watched_ || sign != last_sign_) {
      watched_ = next;
      last_sign_ = sign;
      last_heard_ = now;
      compare_calls(next, calls_of(sign));
    } else if (may_die_ && now - last_heard_ > dead_after_ && !sign.empty()) {
      const std::string reason = read(reason_key(next));
      const std::string before = reason.empty() ? std::string() : reason + "; then ";
      report(fmt::format("{}rank {} died: no sign of life for {} ms", before, next, dead_after_.count()));
    }
    return;
  }
}

// Ranks that do not compare their calls would wait for each other, or take the other's data for their own.
void Liveness::compare_calls(int other, const std::map<std::string, Call>& theirs) {
  std::map<std::string, Call> ours;
  {
    const std::lock_guard lock(mutex_);
    ours = calls_;
  }
  for (const auto& [group, call] : ours) {
    const auto same = theirs.find(group);
    if (same == theirs.end() || same->second.number != call.number || same->second.name == call.name) continue;
    if (same->second.is_comparison && call.is_comparison) continue;  // all ranks will throw, and the group stays usable
    report(fmt::format("rank {} is in {} and rank {} in {} (call {} of {}), expected the same call", rank_, call.name,
                       other, same->second.name, call.number, group));
  }
}

std::optional<std::string> Liveness::find_left(std::span<const int> ranks) {
  if (read(kLeft).empty()) return std::nullopt;
  std::vector<int> left;
  for (const int other : ranks) {
    if (other != rank_ && read(sign_key(other)) == kLeft) left.push_back(other);
  }
  if (left.empty()) return std::nullopt;
  return fmt::format("{} left the group", list_of(left));
}

std::string Liveness::explain(std::span<const int> ranks, const std::string& cause) {
  // Long enough for the rank that watches a dead one, or for this rank's thread, which may rarely run on a busy
  // machine.
  const Clock::time_point begin = Clock::now();
  const std::uint64_t last_look = looks() + static_cast<std::uint64_t>(dead_after_ / period_) + 4;
  const auto may_still_come = [&] {
    const auto waited = Clock::now() - begin;
    return waited < 2 * dead_after_ || (looks() < last_look && waited < 10 * dead_after_);
  };
  try {
    do {
      if (std::string reported = failure(); !reported.empty()) return reported;
      if (const auto left = find_left(ranks)) return report(*left);
      std::this_thread::sleep_for(period_ / 2);
    } while (may_still_come());
  } catch (...) {
    return report(without_store(message_of(std::current_exception())));
  }
  return report(fmt::format("on rank {}: {}", rank_, cause));
}

std::string Liveness::explain_timeout(std::span<const int> ranks, const Call& call, milliseconds waited) {
  if (std::string reported = failure(); !reported.empty()) return reported;
  std::vector<int> missing;
  std::string where;
  try {
    if (const auto left = find_left(ranks)) return report(*left);
    for (const int other : ranks) {
      if (other == rank_) continue;
      const std::map<std::string, Call> there = calls_of(read(sign_key(other)));
      const auto same = there.find(call.group);
      if (same != there.end() && same->second.number >= call.number) continue;
      missing.push_back(other);
      where += fmt::format("; rank {} is {}", other, where_it_is(there, call.group));
    }
  } catch (...) {
    return report(without_store(message_of(std::current_exception())));
  }
  if (missing.empty()) {
    return report(fmt::format("not complete after {} ms, although all ranks arrived", waited.count()));
  }
  return report(fmt::format("{} did not arrive within {} ms{}", list_of(missing), waited.count(), where));
}

}  // namespace tessera::comm

#include "tessera/comm/internal/step.h"

#include <charconv>
#include <numeric>
#include <thread>
#include <vector>

#include "comm/exceptions.h"
#include "comm/group_impl.h"

namespace tessera {

namespace {

// A note "<calls> <text>" of a rank that left a step after so many calls of the group.
struct Note {
  std::uint64_t calls = 0;
  std::string text;
};

std::string to_text(const Note& note) { return fmt::format("{} {}", note.calls, note.text); }

Note note_of(const std::string& text) {
  Note note;
  const auto [end, _] = std::from_chars(text.data(), text.data() + text.size(), note.calls);
  if (end != text.data() + text.size()) note.text.assign(end + 1, text.data() + text.size());
  return note;
}

// The key of a rank's note, and of that of any rank, which is written after it.
std::string key_of(const std::string& group, std::uint64_t number, int rank) {
  return fmt::format("left/{}/{}/{}", number, rank, group);
}
std::string key_of(const std::string& group, std::uint64_t number) {
  return fmt::format("left/{}/any/{}", number, group);
}

}  // namespace

void ProcessGroup::Impl::leave_step(std::string_view step, std::string_view reason) {
  if (is_alone() || !broken_.empty() || !liveness->failure().empty()) return;
  const int world_rank = world_ranks[static_cast<std::size_t>(rank)];
  const std::string text = fmt::format("rank {} left {}: {}", world_rank, step, reason);
  const std::string note = to_text({calls, text});
  ++left_steps_;
  left_after_ = calls;
  liveness->record_reason(text);
  liveness->put(key_of(name, left_steps_, rank), note);
  liveness->put(key_of(name, left_steps_), note);
}

std::string ProcessGroup::Impl::left_by_others(const comm::Call& call) const {
  try {
    if (liveness->read(key_of(name, left_steps_ + 1)).empty()) return {};
    // Ranks may have left after different calls.
    for (int other = 0; other < size(); ++other) {
      const Note note = note_of(liveness->read(key_of(name, left_steps_ + 1, other)));
      if (!note.text.empty() && call.number > note.calls) return note.text;
    }
  } catch (...) {
    // The store is gone. The thread of Liveness reports that.
  }
  return {};
}

void ProcessGroup::Impl::meet_after_left_step(const comm::Call& call) {
  const auto begin = std::chrono::steady_clock::now();
  const auto read = [&](int of_rank) {
    try {
      return note_of(liveness->read(key_of(name, met_steps_ + 1, of_rank)));
    } catch (...) {
      fail_as(call, liveness->explain(world_ranks, comm::message_of(std::current_exception())));
    }
  };
  for (; met_steps_ < left_steps_; ++met_steps_) {
    const Note mine = read(rank);
    std::vector<int> missing(static_cast<std::size_t>(size()));
    std::iota(missing.begin(), missing.end(), 0);
    const auto has_left = [&](int other) {
      const Note note = read(other);
      if (!note.text.empty() && mine.calls != note.calls)
        fail_as(call, liveness->report(fmt::format("{}; {}", mine.text, note.text)));
      return !note.text.empty();
    };
    for (;;) {
      std::erase_if(missing, has_left);
      if (missing.empty()) break;
      if (const std::string why = liveness->failure(); !why.empty()) fail_as(call, why);
      const auto waited =
          std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin);
      if (waited >= timeout) fail_as(call, liveness->explain_timeout(world_ranks, call, waited));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  liveness->record_reason({});
}

void comm::leave_step(const ProcessGroup& group, std::string_view step, std::string_view reason) noexcept {
  try {
    group.impl_->leave_step(step, reason);
  } catch (...) {
    // Without a store nothing can be noted. The thread of Liveness reports that.
  }
}

void comm::leave_step(const ProcessGroup& group, std::string_view step, const std::exception_ptr& reason) noexcept {
  try {
    leave_step(group, step, message_of(reason));
  } catch (...) {
    leave_step(group, step, std::string_view("an exception"));
  }
}

}  // namespace tessera

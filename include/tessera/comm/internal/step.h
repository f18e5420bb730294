#pragma once
// Parts of a training step, in which the ranks do not compare their calls.
//
// A rank that leaves such a step by an exception notes in the store after which call of the group it did so. Ranks that
// wait in a later call find the note within a tenth of a second: they throw Error(rank_failure) naming the rank and its
// reason, and the group is broken. If all ranks of the group leave the step after the same call, as they do if they all
// refuse the same arguments, the group stays usable: the next call begins when all have noted it.

#include <exception>
#include <string_view>
#include <utility>

#include "tessera/comm/process_group.h"

namespace tessera::comm {

// Notes that this rank leaves `step` because of `reason`. Does nothing if the group is broken or has one rank.
void leave_step(const ProcessGroup& group, std::string_view step, std::string_view reason) noexcept;
void leave_step(const ProcessGroup& group, std::string_view step, const std::exception_ptr& reason) noexcept;

// Returns f(). If it throws, leaves the step on each of `groups`.
template <typename Groups, typename F>
auto in_step(const Groups& groups, std::string_view step, F&& f) {
  try {
    return std::forward<F>(f)();
  } catch (...) {
    for (const ProcessGroup& group : groups) leave_step(group, step, std::current_exception());
    throw;
  }
}

}  // namespace tessera::comm

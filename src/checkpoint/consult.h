#pragma once
// A round trip between all ranks and the coordinator.

#include <string_view>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/internal/save_steps.h"
#include "tessera/checkpoint/rank_link.h"

namespace tessera::checkpoint {

// Sends the result of `request` on every rank to the coordinator, calls `answer` there with all of them, and returns
// this rank's part of its result. If either function throws on any rank, every rank throws, naming `step` and the
// ranks. A collective: one gather and one scatter.
//
// `known_to_have_failed`, if not null, is set to true if this rank knows that `answer` has no effect: it was not
// called, or it threw an exception other than OutcomeUnknown. If this function throws and the flag is not set, for
// example because a rank died, the outcome of `answer` is unknown.
Bytes consult(RankLink& link, std::string_view step, FunctionRef<Bytes()> request,
              FunctionRef<std::vector<Bytes>(std::vector<Bytes>)> answer, bool* known_to_have_failed = nullptr);

}  // namespace tessera::checkpoint

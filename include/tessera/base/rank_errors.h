#pragma once
/// \file
/// One error of what went wrong on several ranks.

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tessera/base/error.h"

namespace tessera {

struct RankFailure {
  int rank = 0;
  ErrorCode code = ErrorCode::rank_failure;
  std::string message;
};

/// "<step>: 2 of 8 ranks failed; rank 1: ...; rank 5: ...", the first few of them in full, with the code that they have
/// in common, else rank_failure. `failures` is not empty and by rank. Throws it.
[[noreturn]] void fail_for_ranks(std::string_view step, std::span<const RankFailure> failures, int ranks);

}  // namespace tessera

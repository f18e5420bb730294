#pragma once
/// \file
/// One error of what went wrong on several ranks.

#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

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

/// Runs `f`, calls `agree` with what it threw or null, and returns what `f` returned. `agree` throws if any rank's `f`
/// did.
template <typename F, typename Agree>
auto agree_on_outcome(F&& f, const Agree& agree) {
  using Result = decltype(f());
  std::exception_ptr failure;
  if constexpr (std::is_void_v<Result>) {
    try {
      f();
    } catch (...) {
      failure = std::current_exception();
    }
    agree(failure);
  } else {
    std::optional<Result> result;
    try {
      result.emplace(f());
    } catch (...) {
      failure = std::current_exception();
    }
    agree(failure);
    return *std::move(result);
  }
}

}  // namespace tessera

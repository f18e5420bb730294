#pragma once
/// \file
/// One error that reports failures of several ranks.

#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "tessera/base/error.h"

namespace tessera {

/// The failure of one rank.
struct RankFailure {
  int rank = 0;  ///< in the world
  ErrorCode code = ErrorCode::rank_failure;
  std::string message;
};

/// Throws `Error` "<step>: 2 of 8 ranks failed; rank 1: ...; rank 5: ...", quoting the first 8 failures in full. Its
/// code is the one that all failures share, else rank_failure. `failures` must not be empty.
[[noreturn]] void fail_for_ranks(std::string_view step, std::span<const RankFailure> failures, int ranks);

/// Runs `f`, passes its exception (or null) to `agree`, and returns the result of `f`. `agree` must throw if `f` threw
/// on any rank.
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

#include "tessera/base/rank_errors.h"

#include <algorithm>

namespace tessera {

void fail_for_ranks(std::string_view step, std::span<const RankFailure> failures, int ranks) {
  constexpr std::size_t kQuoted = 8;
  const bool in_common = std::all_of(failures.begin(), failures.end(),
                                     [&](const RankFailure& failure) { return failure.code == failures.front().code; });
  std::string messages;
  for (const RankFailure& failure : failures.first(std::min(kQuoted, failures.size()))) {
    messages += fmt::format("; rank {}: {}", failure.rank, failure.message);
  }
  if (failures.size() > kQuoted) messages += fmt::format("; and {} more ranks", failures.size() - kQuoted);
  fail(in_common ? failures.front().code : ErrorCode::rank_failure, "{}: {} of {} ranks failed{}", step,
       failures.size(), ranks, messages);
}

}  // namespace tessera

#include "tessera/base/rank_errors.h"

#include <algorithm>

namespace tessera {

void fail_for_ranks(std::string_view step, std::span<const RankFailure> failures, int ranks) {
  constexpr std::size_t kSaid = 8;
  const bool in_common = std::all_of(failures.begin(), failures.end(),
                                     [&](const RankFailure& failure) { return failure.code == failures.front().code; });
  std::string said;
  for (const RankFailure& failure : failures.first(std::min(kSaid, failures.size()))) {
    said += fmt::format("; rank {}: {}", failure.rank, failure.message);
  }
  if (failures.size() > kSaid) said += fmt::format("; and {} ranks more", failures.size() - kSaid);
  fail(in_common ? failures.front().code : ErrorCode::rank_failure, "{}: {} of {} ranks failed{}", step,
       failures.size(), ranks, said);
}

}  // namespace tessera

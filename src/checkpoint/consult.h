#pragma once
// All ranks say something, rank 0 answers each.

#include <functional>
#include <string_view>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/checkpoint/rank_link.h"

namespace tessera::checkpoint {

// What `bring` makes on every rank goes to rank 0, where `answer` makes of it what each rank gets back. Whatever either
// throws on any rank, all ranks throw, naming `step` and the ranks. A collective: a gather and a scatter.
//
// `known_to_have_failed`, if given, is set where this rank has learned that `answer` did not run or threw; an exception
// without it, say of a rank that died, leaves that open.
Bytes consult(RankLink& link, std::string_view step, const std::function<Bytes()>& bring,
              const std::function<std::vector<Bytes>(std::vector<Bytes>)>& answer,
              bool* known_to_have_failed = nullptr);

}  // namespace tessera::checkpoint

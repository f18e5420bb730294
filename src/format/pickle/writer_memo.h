#pragma once
// What a Writer has written.

#include <cstdint>
#include <unordered_map>

#include "format/pickle/walk.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/format/pickle_writer.h"

namespace tessera::pickle {

struct Writer::Memo {
  TextMap<std::uint32_t> strings, globals;
  std::unordered_map<std::uint64_t, std::uint32_t, NumberHash> nodes;  // by identity
  TextBudget texts;                                                    // that the memo does not have once each
};

}  // namespace tessera::pickle

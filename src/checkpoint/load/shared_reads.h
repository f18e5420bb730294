#pragma once
// Plans which stored elements several ranks want and which of these ranks reads them.

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/base/function_ref.h"
#include "tessera/layout/box.h"

namespace tessera::checkpoint {

struct WantedBox {
  std::uint32_t tensor = 0, stored_chunk = 0;
  Box box;  // never empty
  bool operator==(const WantedBox&) const = default;
};

// Law: decode_wanted(encode_wanted(w)) == w. decode_wanted throws Error(corrupt) for malformed bytes.
Bytes encode_wanted(std::span<const WantedBox> wanted);
std::vector<WantedBox> decode_wanted(ByteView bytes);

// Elements of a stored chunk that the same set of ranks wants.
struct SharedRead {
  std::uint32_t tensor = 0, stored_chunk = 0;
  Box box;
  std::vector<int> ranks;  // ascending, not empty
  int reader = 0;          // usually one of `ranks`; see the laws of share_reads
};

// Laws: the boxes of one stored chunk are disjoint; the boxes whose `ranks` contain r partition what rank r wants; all
// boxes of a stored chunk that several ranks want have the same reader, the rank that wants most of the chunk, so that
// a rank that reads an entire chunk can verify its checksum. Sorted by tensor, then by stored chunk. `element_bytes` is
// called for wanted tensors only.
std::vector<SharedRead> share_reads(const std::vector<std::vector<WantedBox>>& wanted_by_rank,
                                    FunctionRef<std::int64_t(std::uint32_t tensor)> element_bytes);

}  // namespace tessera::checkpoint

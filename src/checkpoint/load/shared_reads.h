#pragma once
// Which stored elements several ranks want, and which of them reads those.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tessera/base/bytes.h"
#include "tessera/layout/box.h"

namespace tessera::checkpoint {

struct WantedBox {
  std::uint32_t tensor = 0, stored_chunk = 0;
  Box box;  // never empty
  bool operator==(const WantedBox&) const = default;
};

// Law: decode_wanted(encode_wanted(w)) == w. Throws Error(corrupt) for what that doesn't write.
Bytes encode_wanted(std::span<const WantedBox> wanted);
std::vector<WantedBox> decode_wanted(ByteView bytes);

// Elements of a stored chunk that the same ranks want.
struct SharedRead {
  std::uint32_t tensor = 0, stored_chunk = 0;
  Box box;
  std::vector<int> ranks;  // ascending, not empty
  int reader = 0;          // one of them, unless another reads more of this stored chunk
};

// Laws: boxes of one stored chunk are disjoint; those which rank r is among are what r wants; all of a stored chunk
// that several ranks want has one reader, that of them which wants most of it, so that who reads a chunk whole can look
// at its checksum. By tensor, then by stored chunk. `element_bytes` is asked for the tensors that are wanted.
std::vector<SharedRead> share_reads(const std::vector<std::vector<WantedBox>>& wanted_by_rank,
                                    const std::function<std::int64_t(std::uint32_t tensor)>& element_bytes);

}  // namespace tessera::checkpoint

#include "checkpoint/load/shared_reads.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "checkpoint/byte_cursor.h"
#include "tessera/base/function_ref.h"

namespace tessera::checkpoint {
namespace {

// Splits the disjoint `pieces`, and adds new ones, so that the box that `rank` wants is a union of pieces.
void add(std::vector<SharedRead>& pieces, const WantedBox& wanted, int rank) {
  std::vector<Box> rest = {wanted.box};  // not in any piece
  const std::size_t before = pieces.size();
  for (std::size_t i = 0; i < before; ++i) {
    const std::optional<Box> shared = intersect(pieces[i].box, wanted.box);
    if (!shared) continue;
    for (Box& outside : subtract(pieces[i].box, *shared)) {
      pieces.push_back({wanted.tensor, wanted.stored_chunk, std::move(outside), pieces[i].ranks});
    }
    pieces[i].box = *shared;
    if (pieces[i].ranks.back() != rank) pieces[i].ranks.push_back(rank);
    std::vector<Box> still;
    for (const Box& box : rest) {
      for (Box& outside : subtract(box, *shared)) still.push_back(std::move(outside));
    }
    rest = std::move(still);
  }
  for (Box& box : rest) pieces.push_back({wanted.tensor, wanted.stored_chunk, std::move(box), {rank}});
}

}  // namespace

Bytes encode_wanted(std::span<const WantedBox> wanted) {
  Bytes out;
  out.reserve(8 + wanted.size() * 64);
  append_little_endian<std::uint64_t>(out, wanted.size());
  for (const WantedBox& one : wanted) {
    append_little_endian(out, one.tensor);
    append_little_endian(out, one.stored_chunk);
    append_little_endian(out, static_cast<std::uint32_t>(one.box.rank()));
    for (const auto* members : {&one.box.offsets, &one.box.sizes}) {
      for (const std::int64_t member : *members) append_little_endian(out, static_cast<std::uint64_t>(member));
    }
  }
  return out;
}

std::vector<WantedBox> decode_wanted(ByteView bytes) {
  ByteCursor cursor(bytes, "wanted boxes of a rank");
  std::vector<WantedBox> wanted;
  for (auto n = cursor.number<std::uint64_t>(); n > 0; --n) {
    WantedBox& one = wanted.emplace_back();
    one.tensor = cursor.number<std::uint32_t>();
    one.stored_chunk = cursor.number<std::uint32_t>();
    const auto rank = cursor.number<std::uint32_t>();
    for (auto* members : {&one.box.offsets, &one.box.sizes}) {
      for (std::uint32_t d = 0; d < rank; ++d) {
        members->push_back(static_cast<std::int64_t>(cursor.number<std::uint64_t>()));
      }
    }
  }
  cursor.expect_end();
  return wanted;
}

std::vector<SharedRead> share_reads(const std::vector<std::vector<WantedBox>>& wanted_by_rank,
                                    FunctionRef<std::int64_t(std::uint32_t tensor)> element_bytes) {
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<SharedRead>> chunks;
  for (std::size_t rank = 0; rank < wanted_by_rank.size(); ++rank) {
    for (const WantedBox& one : wanted_by_rank[rank]) {
      add(chunks[{one.tensor, one.stored_chunk}], one, static_cast<int>(rank));
    }
  }
  std::vector<std::int64_t> load(wanted_by_rank.size());  // bytes that each rank reads
  std::vector<SharedRead> reads;
  for (auto& [chunk, pieces] : chunks) {
    std::map<int, std::int64_t> wanted_bytes;  // by rank, of this chunk
    for (const SharedRead& piece : pieces) {
      for (const int rank : piece.ranks) wanted_bytes[rank] += volume(piece.box) * element_bytes(chunk.first);
    }
    int reader = wanted_bytes.begin()->first;
    for (const auto& [rank, bytes] : wanted_bytes) {
      const auto r = static_cast<std::size_t>(rank), best = static_cast<std::size_t>(reader);
      if (std::pair(bytes, -load[r]) > std::pair(wanted_bytes[reader], -load[best])) reader = rank;
    }
    for (SharedRead& piece : pieces) {
      piece.reader = piece.ranks.size() > 1 ? reader : piece.ranks.front();
      load[static_cast<std::size_t>(piece.reader)] += volume(piece.box) * element_bytes(chunk.first);
      reads.push_back(std::move(piece));
    }
  }
  return reads;
}

}  // namespace tessera::checkpoint

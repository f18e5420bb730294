/// \file
/// Reads bytes as a safetensors file, an index, and sharding information. Accepted input is written and read again.

#include <algorithm>
#include <cstdint>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/format/safetensors.h"

namespace st = tessera::safetensors;

namespace {

void file(tessera::ByteView bytes) {
  const st::Header header = st::read_header(tessera::MemorySource(bytes, "input"));
  if (!st::looks_like_safetensors(bytes.first(std::min<std::size_t>(bytes.size(), 16)), bytes.size())) __builtin_trap();
  tessera::Bytes again = st::write_header(header.tensors, header.metadata);
  const tessera::ByteView data = bytes.subspan(header.data_offset_bytes);
  again.insert(again.end(), data.begin(), data.end());
  const st::Header reread = st::read_header(tessera::MemorySource(again, "again"));
  if (reread.tensors != header.tensors || reread.metadata != header.metadata) __builtin_trap();
  if (const auto offsets = st::dcp_saved_offsets(header, "input")) st::dcp_metadata(*offsets);
}

void index(tessera::ByteView bytes) {
  const st::Index index = st::read_index(bytes, "input");
  const st::Index again = st::read_index(st::write_index(index), "again");
  if (again.weight_map != index.weight_map || again.total_size != index.total_size) __builtin_trap();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  for (const auto target : {file, index}) {
    try {
      target({data, size});
    } catch (const tessera::Error&) {
    }
  }
  return 0;
}

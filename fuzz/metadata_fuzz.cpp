/// \file
/// Reads bytes as `.metadata`. Both readers must give the same result. If it can be read, it must be writable, and the
/// written bytes must read the same.

#include <cstdint>
#include <cstdlib>

#include "format/dcp/read.h"
#include "tessera/base/error.h"
#include "tessera/format/dcp_metadata.h"

namespace {

using namespace tessera;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  dcp::Metadata metadata;
  try {
    metadata = dcp::read(MemorySource({data, size}, "fuzz"));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::corrupt && error.code() != ErrorCode::unsupported) std::abort();
    return 0;
  }
  if (!dcp::equal(dcp::read_tree(MemorySource({data, size}, "tree")), metadata)) std::abort();
  const Bytes written = dcp::write(metadata);
  const dcp::Metadata again = dcp::read(MemorySource(written, "written"));
  if (!dcp::equal(again, metadata) || dcp::write(again) != written) std::abort();
  return 0;
}

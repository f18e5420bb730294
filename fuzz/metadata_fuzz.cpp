/// \file
/// Reads bytes as `.metadata`. What can be read must be written, and the writing must say the same. So must the same
/// pickle in protocol 2, of which the whole tree is read, whereas of protocol 4 most records are not in the tree.

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/format/dcp_metadata.h"
#include "tessera/format/pickle_reader.h"
#include "tessera/format/pickle_writer.h"

namespace {

using namespace tessera;

void read_tree(ByteView bytes, const dcp::Metadata& metadata) {
  const pickle::ReadResult tree = pickle::read(bytes, "tree");
  Bytes written;
  pickle::Writer writer(written, 2);
  try {
    writer.value(tree.tree.root());
  } catch (const Error&) {
    return;  // deeper than the writer goes
  }
  writer.stop();
  // Protocol 2 reaches dotted names by calls of getattr, which stay calls.
  if (as_text(written).find("getattr") != std::string_view::npos) return;
  if (!dcp::equal(dcp::read(MemorySource(written, "protocol 2")), metadata)) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  dcp::Metadata metadata;
  try {
    metadata = dcp::read(MemorySource({data, size}, "fuzz"));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::corrupt && error.code() != ErrorCode::unsupported) std::abort();
    return 0;
  }
  read_tree({data, size}, metadata);
  const Bytes written = dcp::write(metadata);
  const dcp::Metadata again = dcp::read(MemorySource(written, "written"));
  if (!dcp::equal(again, metadata) || dcp::write(again) != written) std::abort();
  return 0;
}

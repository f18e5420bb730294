#pragma once
/// \file
/// Reads pickles of protocols 0 to 5, every opcode, into an inert tree. Executes nothing, imports nothing, and does not
/// recurse.
///
/// Every error is `Error(corrupt)` (`unsupported` for out-of-band buffers and protocols past 5) that names the pickle,
/// the opcode and its byte offset. Source: CPython Lib/pickle.py, Lib/pickletools.py.
///
/// So that the same value is the same tree in every protocol, calls that Python writes for want of an opcode become
/// what they make: `_codecs.encode(text, 'latin1')` bytes, `bytearray(...)`, `set([...])`, `frozenset([...])`,
/// `copyreg.__newobj__` and `__newobj_ex__`. Globals of protocols 0 to 2 get their Python 3 names. Python 2's str is a
/// string where it is UTF-8, else bytes.

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

struct ReadLimits {
  /// Nesting of marks, and of values. A container that is filled after it was memoized counts, where the memo gives it
  /// out again, as it was when it was memoized; so who walks the tree limits depth as well.
  std::size_t depth = 1000;
  std::uint64_t items = 400'000'000;  ///< opcodes
  std::uint64_t memo = 200'000'000;   ///< highest memo index + 1; a PUT's index may also not pass its byte offset
  std::uint64_t memory_bytes = 0;     ///< bytes of nodes; 0 means 64 MiB + 48 times the pickle
};

struct ReadResult {
  Tree tree;
  std::uint64_t length_bytes = 0;  ///< up to and including STOP
};

/// Reads the pickle at the beginning of `bytes`. Bytes behind STOP are left alone (`length_bytes` tells). `bytes` must
/// outlive the tree: strings point into it. Linear in the pickle.
/// \param name what messages call it, normally the file's name.
/// \param base_offset_bytes added to the offsets in messages.
ReadResult read(ByteView bytes, const std::string& name, const ReadLimits& limits = {},
                std::uint64_t base_offset_bytes = 0);

/// As above; the tree keeps the buffer.
ReadResult read(std::shared_ptr<const Bytes> bytes, const std::string& name, const ReadLimits& limits = {},
                std::uint64_t base_offset_bytes = 0);

}  // namespace tessera::pickle

#pragma once
/// \file
/// Reads pickles of protocols 0 to 5, with every opcode, into an inert tree. Executes nothing, imports nothing, and
/// does not recurse.
///
/// Every error is `Error(corrupt)`, or `Error(unsupported)` for out-of-band buffers and protocols above 5. It names the
/// pickle, the opcode and its byte offset. Source: CPython Lib/pickle.py, Lib/pickletools.py.
///
/// The same value gives the same tree in every protocol. Where a protocol lacks an opcode, Python writes a call; the
/// reader replaces these calls by their results: `_codecs.encode(text, 'latin1')` becomes bytes; `bytearray(...)`,
/// `set([...])`, `frozenset([...])`, `copyreg.__newobj__` and `__newobj_ex__` likewise. Globals of protocols 0 to 2 get
/// their Python 3 names. Python 2's str becomes a string if it is UTF-8, and bytes otherwise.

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

struct ReadLimits {
  /// Nesting of marks and of values. A container fetched from the memo counts with the depth that it had when it was
  /// memoized, even if it was filled later. Code that walks the tree must therefore limit the depth as well.
  std::size_t depth = 1000;
  std::uint64_t items = 400'000'000;  ///< opcodes
  std::uint64_t memo = 200'000'000;   ///< highest memo index + 1; the index of a PUT is also limited by its byte offset
  std::uint64_t memory_bytes = 0;     ///< bytes of nodes; 0 means 64 MiB + 48 times the pickle
};

struct ReadResult {
  Tree tree;
  std::uint64_t length_bytes = 0;  ///< up to and including STOP
};

/// Reads the pickle at the beginning of `bytes`, in time linear in its length. Ignores bytes after STOP; see
/// `length_bytes`. `bytes` must outlive the tree, whose strings point into it.
/// \param name the name used in messages, normally the file's.
/// \param base_offset_bytes added to the byte offsets in messages.
ReadResult read(ByteView bytes, const std::string& name, const ReadLimits& limits = {},
                std::uint64_t base_offset_bytes = 0);

/// As above, but the tree shares ownership of the buffer.
ReadResult read(std::shared_ptr<const Bytes> bytes, const std::string& name, const ReadLimits& limits = {},
                std::uint64_t base_offset_bytes = 0);

}  // namespace tessera::pickle

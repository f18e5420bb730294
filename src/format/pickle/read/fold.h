#pragma once
// Protocols before 4 have no opcode for bytes, sets and the like, and Python writes calls instead. Those that make
// plain data become that data, so that the same value is the same tree in every protocol.

#include <optional>

#include "format/pickle/nodes.h"

namespace tessera::pickle {

// What `callable(*arguments)` makes, if we know: _codecs.encode(text, 'latin1'), bytes(), bytearray(...), set([...]),
// frozenset([...]), copyreg.__newobj__, copyreg.__newobj_ex__. Nothing for any other call.
std::optional<NodeRef> fold_call(Nodes& nodes, NodeRef callable, NodeRef arguments);

}  // namespace tessera::pickle

#pragma once
// Protocols before 4 have no opcode for bytes, sets and the like, so Python writes calls instead. Calls that make plain
// data are replaced by that data, so that the same value is the same tree in every protocol.

#include <optional>

#include "format/pickle/nodes.h"

namespace tessera::pickle {

// Returns the result of `callable(*arguments)` for _codecs.encode(text, 'latin1'), bytes(), bytearray(...), set([...]),
// frozenset([...]), copyreg.__newobj__ and copyreg.__newobj_ex__. Returns nothing for any other call.
std::optional<NodeRef> fold_call(Nodes& nodes, NodeRef callable, NodeRef arguments);

}  // namespace tessera::pickle

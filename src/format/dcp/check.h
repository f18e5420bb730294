#pragma once
// What must hold of a `Metadata` that is to be written.

#include "tessera/format/dcp_metadata.h"

namespace tessera::dcp {

// Throws `Error(invalid_argument)` naming the entry if no file can say what `metadata` says.
void check_writable(const Metadata& metadata);

}  // namespace tessera::dcp

#pragma once
// Validates a `Metadata` before it is written.

#include "tessera/format/dcp_metadata.h"

namespace tessera::dcp {

// Throws `Error(invalid_argument)` naming the entry if no file can represent `metadata`.
void check_writable(const Metadata& metadata);

}  // namespace tessera::dcp

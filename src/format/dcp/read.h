#pragma once
// The two ways of reading `.metadata`. Both must give the same result.

#include "tessera/base/file.h"
#include "tessera/format/dcp_metadata.h"

namespace tessera::dcp {

// Reads through a moving window and keeps records out of the tree. For files that it cannot read it throws an Error,
// which is not always the right one.
Metadata read_records(const ByteSource& source);

// Reads the complete file into one tree.
Metadata read_tree(const ByteSource& source);

}  // namespace tessera::dcp

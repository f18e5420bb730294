#pragma once
// The two ways in which `.metadata` is read, which must say the same.

#include "tessera/base/file.h"
#include "tessera/format/dcp_metadata.h"

namespace tessera::dcp {

// Through a moving window, with records taken out of the tree. Throws an Error, not always the right one, for files
// that this way can't read.
Metadata read_records(const ByteSource& source);

// From the whole tree of the whole file.
Metadata read_tree(const ByteSource& source);

}  // namespace tessera::dcp

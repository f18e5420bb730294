#pragma once
/// \file
/// Reading a directory through a window that the caller goes on using.

#include "format/zip/window.h"
#include "tessera/format/zip.h"

namespace tessera::zip {

/// As the public function, of the archive that is the window's slice.
Directory read_directory(Window& window);

}  // namespace tessera::zip

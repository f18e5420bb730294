#pragma once
/// \file
/// Reads a directory through a window that the caller keeps using.

#include "format/zip/window.h"
#include "tessera/format/zip.h"

namespace tessera::zip {

/// As the public function, for the archive in the window's slice.
Directory read_directory(Window& window);

}  // namespace tessera::zip

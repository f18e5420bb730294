#pragma once
// Modules and names that Python 3 calls otherwise than Python 2: pickles of protocols 0 to 2 hold the old ones. Source:
// CPython Lib/_compat_pickle.py.

#include <optional>

#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

// What Python 3 makes of a global of protocol 0 to 2.
GlobalName python3_name(GlobalName name);

// A global for which python3_name gives `name`; nothing if there is none.
std::optional<GlobalName> python2_name(GlobalName name);

}  // namespace tessera::pickle

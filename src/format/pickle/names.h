#pragma once
// Modules and names that differ between Python 2 and 3. Pickles of protocols 0 to 2 contain the old names. Source:
// CPython Lib/_compat_pickle.py.

#include <optional>

#include "tessera/format/pickle_value.h"

namespace tessera::pickle {

// Returns Python 3's name for a global of protocols 0 to 2.
GlobalName python3_name(GlobalName name);

// Returns a global for which python3_name gives `name`, or nothing if there is none.
std::optional<GlobalName> python2_name(GlobalName name);

}  // namespace tessera::pickle

#pragma once

#include "tessera/base/internal/timeout.h"

namespace tessera::comm {

using tessera::bounded;

}  // namespace tessera::comm

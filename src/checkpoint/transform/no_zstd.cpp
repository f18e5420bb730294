// Zstandard, if libzstd was not found.

#include "tessera/base/error.h"
#include "tessera/checkpoint/transform.h"

namespace tessera::checkpoint {

bool has_zstd() { return false; }

TransformPtr zstd_transform(int /*level*/) {
  fail(ErrorCode::unsupported, "zstd: this tessera was built without libzstd; build it where libzstd-dev is installed");
}

}  // namespace tessera::checkpoint

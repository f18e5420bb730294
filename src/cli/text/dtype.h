#pragma once
// Dtypes as people write them.

#include <string>

#include "tessera/base/dtype.h"

namespace tessera::cli {

// Returns the dtype that PyTorch calls `text`, or "fp16", "bf16", "fp32", "fp64". Throws UsageError, beginning with
// `operation`, for another text, and for "fp8", which names several.
DType parse_dtype(const std::string& operation, const std::string& text);

}  // namespace tessera::cli

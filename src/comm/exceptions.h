#pragma once
// What exceptions of any kind say, on one line.

#include <exception>
#include <string>

#include "tessera/base/error.h"

namespace tessera::comm {

// Without LibTorch's backtrace.
std::string message_of(const std::exception_ptr& exception);

// That of an `Error`, else rank_failure.
ErrorCode code_of(const std::exception_ptr& exception);

}  // namespace tessera::comm

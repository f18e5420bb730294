#pragma once
// The message and code of exceptions of any type.

#include <exception>
#include <string>

#include "tessera/base/error.h"

namespace tessera::comm {

// Returns the message on one line, without LibTorch's backtrace.
std::string message_of(const std::exception_ptr& exception);

// Returns the code of an `Error`, else rank_failure.
ErrorCode code_of(const std::exception_ptr& exception);

}  // namespace tessera::comm

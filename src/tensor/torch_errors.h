#pragma once
// Conversion of LibTorch's exceptions.

#include <string_view>

namespace tessera {

// Throws the exception that is being handled. LibTorch's is thrown as Error(invalid_argument), or as Error(unsupported)
// if LibTorch lacks an implementation, with `where` and the first line of its message, without the backtrace.
[[noreturn]] void rethrow_as_error(std::string_view where);

}  // namespace tessera

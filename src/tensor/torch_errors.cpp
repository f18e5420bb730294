#include "tensor/torch_errors.h"

#include <c10/util/Exception.h>

#include "tessera/base/error.h"

namespace tessera {

namespace {

[[noreturn]] void fail_as(ErrorCode code, std::string_view where, const c10::Error& error) {
  const std::string_view text = error.what_without_backtrace();
  fail(code, "{}: {}", where, printable(text.substr(0, text.find('\n')), 1000));
}

}  // namespace

void rethrow_as_error(std::string_view where) {
  try {
    throw;
  } catch (const c10::NotImplementedError& error) {
    fail_as(ErrorCode::unsupported, where, error);
  } catch (const c10::Error& error) {
    fail_as(ErrorCode::invalid_argument, where, error);
  }
}

}  // namespace tessera

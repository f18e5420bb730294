#include "tensor/torch_errors.h"

#include <c10/util/Exception.h>

#include <stdexcept>

#include "tessera/base/error.h"

namespace tessera {

namespace {

[[noreturn]] void fail_as(ErrorCode code, std::string_view where, std::string_view text) {
  fail(code, "{}: {}", where, printable(text.substr(0, text.find('\n')), 1000));
}

}  // namespace

void rethrow_as_error(std::string_view where) {
  try {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const c10::NotImplementedError& error) {
    fail_as(ErrorCode::unsupported, where, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    fail_as(ErrorCode::invalid_argument, where, error.what_without_backtrace());
  } catch (const std::runtime_error& error) {
    // What c10::Scalar throws for a number that the dtype cannot hold; others are no exceptions of LibTorch.
    const std::string_view text = error.what();
    if (text.find("cannot be converted to type") == std::string_view::npos) throw;
    fail_as(ErrorCode::invalid_argument, where, text);
  }
}

}  // namespace tessera

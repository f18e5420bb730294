#include "comm/exceptions.h"

#include <c10/util/Exception.h>

namespace tessera::comm {

namespace {

std::string first_line(std::string_view text) { return printable(text.substr(0, text.find('\n')), 1000); }

}  // namespace

std::string message_of(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const c10::Error& error) {
    return first_line(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return first_line(error.what());
  } catch (...) {
    return "an exception of unknown type";
  }
}

ErrorCode code_of(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return error.code();
  } catch (...) {
    return ErrorCode::rank_failure;
  }
}

}  // namespace tessera::comm

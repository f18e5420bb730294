#include "c/call.h"

#include <filesystem>
#include <new>
#include <string>

namespace tessera::c {
namespace {

// A thread has either a text that it owns, or a literal where there was no memory for one.
thread_local std::string last_error;
thread_local const char* last_literal = nullptr;

tessera_status status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return TESSERA_INVALID_ARGUMENT;
    case ErrorCode::corrupt:
      return TESSERA_CORRUPT;
    case ErrorCode::unsupported:
      return TESSERA_UNSUPPORTED;
    case ErrorCode::not_found:
      return TESSERA_NOT_FOUND;
    case ErrorCode::io:
      return TESSERA_IO;
    case ErrorCode::rank_failure:
      return TESSERA_RANK_FAILURE;
    case ErrorCode::cancelled:
      return TESSERA_CANCELLED;
    case ErrorCode::internal:
      return TESSERA_INTERNAL;
  }
  return TESSERA_INTERNAL;
}

void keep_text(const char* text) noexcept {
  try {
    last_error = text;
    last_literal = nullptr;
  } catch (...) {
    last_literal = "out of memory, also for the message of an error";
  }
}

}  // namespace

tessera_status keep_error(const std::exception_ptr& exception) noexcept {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    keep_text(error.what());
    return status_of(error.code());
  } catch (const std::bad_alloc&) {
    keep_text("out of memory");
  } catch (const std::filesystem::filesystem_error& error) {
    keep_text(error.what());
    return TESSERA_IO;
  } catch (const std::exception& error) {
    keep_text(error.what());
  } catch (...) {
    keep_text("an exception of an unknown type");
  }
  return TESSERA_INTERNAL;
}

}  // namespace tessera::c

extern "C" {

const char* tessera_version(void) { return TESSERA_VERSION; }

const char* tessera_status_name(tessera_status status) {
  switch (status) {
    case TESSERA_OK:
      return "ok";
    case TESSERA_INVALID_ARGUMENT:
      return "invalid_argument";
    case TESSERA_CORRUPT:
      return "corrupt";
    case TESSERA_UNSUPPORTED:
      return "unsupported";
    case TESSERA_NOT_FOUND:
      return "not_found";
    case TESSERA_IO:
      return "io";
    case TESSERA_RANK_FAILURE:
      return "rank_failure";
    case TESSERA_CANCELLED:
      return "cancelled";
    case TESSERA_INTERNAL:
      return "internal";
  }
  return "unknown";
}

const char* tessera_last_error(void) {
  return tessera::c::last_literal != nullptr ? tessera::c::last_literal : tessera::c::last_error.c_str();
}

}  // extern "C"

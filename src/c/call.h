#pragma once
// What every function of the C interface does: errors become a status and a message of the thread, options are read by
// their size, and arguments that must not be NULL are checked.

#include <cstring>
#include <exception>
#include <memory>
#include <string_view>
#include <type_traits>

#include "tessera/base/error.h"
#include "tessera/c/tessera.h"

namespace tessera::c {

// Keeps the message of `exception` for tessera_last_error and returns its status.
tessera_status keep_error(const std::exception_ptr& exception) noexcept;

// Runs `f`, of which an exception becomes a status.
template <typename F>
tessera_status call(const F& f) noexcept {
  try {
    f();
    return TESSERA_OK;
  } catch (...) {
    return keep_error(std::current_exception());
  }
}

// Returns `pointer`. Throws Error(invalid_argument) if it is null.
template <typename T>
T* required(T* pointer, std::string_view function, std::string_view argument) {
  if (pointer == nullptr) fail(ErrorCode::invalid_argument, "{}: {} is NULL, expected a pointer", function, argument);
  return pointer;
}

// The same for an element of a column.
template <typename T>
T* required(T* pointer, std::string_view function, std::string_view column, std::size_t row) {
  if (pointer == nullptr) {
    fail(ErrorCode::invalid_argument, "{}: {}[{}] is NULL, expected a pointer", function, column, row);
  }
  return pointer;
}

// Calls f(*handle) unless `handle` is null. Only functions without a status take a handle by this; the others refuse
// NULL by `required`.
template <typename T, typename F>
void if_given(T* handle, const F& f) noexcept {
  if (handle != nullptr) f(*handle);
}
// Returns f(*handle), or `otherwise` if `handle` is null.
template <typename T, typename R, typename F>
R if_given(T* handle, R otherwise, const F& f) noexcept {
  return handle == nullptr ? otherwise : static_cast<R>(f(*handle));
}

// Returns the options that a caller passed, who may know fewer or more members than this library. Those that it does
// not know are zero. Throws Error(invalid_argument) if the caller sets a member that this library does not know.
template <typename T>
T options_of(const T* given, std::string_view function) {
  static_assert(std::is_trivially_copyable_v<T>);
  T options{};
  if (given == nullptr) return options;
  const std::size_t size = given->struct_size;
  if (size < sizeof given->struct_size) {
    fail(ErrorCode::invalid_argument,
         "{}: struct_size of the options is {}, expected their size, as of {{.struct_size = sizeof options}}", function,
         size);
  }
  std::memcpy(static_cast<void*>(&options), given, std::min(size, sizeof options));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof options; i < size; ++i) {
    if (bytes[i] != 0) {
      fail(ErrorCode::unsupported,
           "{}: options of {} bytes set a member that this library does not know, expected {} bytes", function, size,
           sizeof options);
    }
  }
  return options;
}

// Releases a handle to the caller.
template <typename T>
void give(std::unique_ptr<T> made, T** out) noexcept {
  *out = made.release();
}

}  // namespace tessera::c

#pragma once
// Expects an Error with a code and with fragments of its message: EXPECT_ERROR(statement, ErrorCode::corrupt, "at byte
// 12", "found").

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::testing {

class ExpectedError {
 public:
  ExpectedError(ErrorCode code, std::vector<std::string> words, const char* file, int line)
      : code_(code), words_(std::move(words)), file_(file), line_(line) {}

  void came(const Error& error) const {
    const std::string message = error.what();
    if (error.code() != code_) {
      ADD_FAILURE_AT(file_, line_) << "code " << error_code_name(error.code()) << ", expected "
                                   << error_code_name(code_) << ": " << message;
    }
    for (const std::string& word : words_) {
      if (message.find(word) == std::string::npos) {
        ADD_FAILURE_AT(file_, line_) << "\"" << message << "\" does not contain \"" << word << "\"";
      }
    }
    if (message.find('\n') != std::string::npos) ADD_FAILURE_AT(file_, line_) << "more than one line: " << message;
  }
  void did_not_come() const { ADD_FAILURE_AT(file_, line_) << "no error, expected " << error_code_name(code_); }

 private:
  ErrorCode code_;
  std::vector<std::string> words_;
  const char* file_;
  int line_;
};

}  // namespace tessera::testing

// Not a lambda: the statement may use a structured binding, which clang 14's lambdas cannot capture.
#define EXPECT_ERROR(statement, code, ...)                                                           \
  do {                                                                                               \
    const ::tessera::testing::ExpectedError expected_error(code, {__VA_ARGS__}, __FILE__, __LINE__); \
    try {                                                                                            \
      static_cast<void>(statement);                                                                  \
      expected_error.did_not_come();                                                                 \
    } catch (const ::tessera::Error& thrown) {                                                       \
      expected_error.came(thrown);                                                                   \
    }                                                                                                \
  } while (false)

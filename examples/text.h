#pragma once
/// \file
/// A text as the numbers of its characters, and the rows of it that a training step learns from.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::examples {

/// The files one behind the other; for a directory those in it, but for links, by name. Of several blanks in a row
/// there is one: a model would learn little else from a text that is set in columns. Throws `Error`.
std::string read_text(const std::vector<std::filesystem::path>& paths);

class Text {
 public:
  /// Characters are those of UTF-8. Throws `Error(invalid_argument)` for an empty text.
  explicit Text(std::string_view text);

  /// The different characters, sorted: that of number i is the i-th.
  const std::vector<std::string>& characters() const { return characters_; }
  /// The same in one string.
  std::string vocabulary() const;
  /// int32, one for each character of the text.
  const at::Tensor& tokens() const { return tokens_; }

  /// Of the `batch` rows of a step those whose number is `part` modulo `parts`: int64 [rows, length], each a piece of
  /// the text. Where they begin follows from the step alone. Throws `Error(invalid_argument)` if the text is shorter.
  at::Tensor rows(std::int64_t step, std::int64_t batch, std::int64_t length, std::int64_t part,
                  std::int64_t parts) const;

 private:
  std::vector<std::string> characters_;
  at::Tensor tokens_;
};

}  // namespace tessera::examples

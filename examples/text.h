#pragma once
/// \file
/// Tokenizes a text by characters and selects the rows of each training step.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::examples {

/// Returns the concatenated files. A directory stands for the files in it, sorted by name, except links. Collapses runs
/// of blanks to one, since a model would learn little else from text in columns. Throws `Error`.
std::string read_text(const std::vector<std::filesystem::path>& paths);

class Text {
 public:
  /// Splits `text` into UTF-8 characters. Throws `Error(invalid_argument)` for an empty text.
  explicit Text(std::string_view text);

  /// Returns the distinct characters, sorted; token i is the i-th.
  const std::vector<std::string>& characters() const { return characters_; }
  /// Returns the same characters as one string.
  std::string vocabulary() const;
  /// Returns the tokens of the text: int32, one for each character.
  const at::Tensor& tokens() const { return tokens_; }

  /// Returns those of the `batch` rows of a step whose number is `part` modulo `parts`: int64 [rows, length], each a
  /// slice of the text. The slices depend only on the step. Throws `Error(invalid_argument)` if the text is shorter
  /// than a row.
  at::Tensor rows(std::int64_t step, std::int64_t batch, std::int64_t length, std::int64_t part,
                  std::int64_t parts) const;

 private:
  std::vector<std::string> characters_;
  at::Tensor tokens_;
};

}  // namespace tessera::examples

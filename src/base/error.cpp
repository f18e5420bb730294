#include "tessera/base/error.h"

#include "tessera/base/internal/utf8.h"

namespace tessera {

std::string_view error_code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::corrupt:
      return "corrupt";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::not_found:
      return "not_found";
    case ErrorCode::io:
      return "io";
    case ErrorCode::rank_failure:
      return "rank_failure";
    case ErrorCode::cancelled:
      return "cancelled";
    case ErrorCode::internal:
      return "internal";
  }
  return "unknown";
}

std::string printable(std::string_view text, std::size_t limit) {
  std::string out;
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t length = utf8_sequence_length(text.substr(at));
    std::string piece;
    if (length == 0 || control_sequence_length(text.substr(at)) > 0) {
      for (std::size_t i = 0; i < (length == 0 ? 1 : length); ++i) {
        piece += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[at + i]));
      }
      at += length == 0 ? 1 : length;
    } else {
      piece = text.substr(at, length);
      at += length;
    }
    if (out.size() + piece.size() > limit) return out + "...";
    out += piece;
  }
  return out;
}

}  // namespace tessera

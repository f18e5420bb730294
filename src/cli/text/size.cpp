#include "cli/text/size.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <string_view>
#include <utility>

#include "cli/command.h"

namespace tessera::cli {

std::uint64_t parse_size(const std::string& operation, const std::string& text) {
  static constexpr std::array<std::pair<std::string_view, double>, 14> kUnits = {{{"", 1},
                                                                                  {"B", 1},
                                                                                  {"K", 1e3},
                                                                                  {"KB", 1e3},
                                                                                  {"M", 1e6},
                                                                                  {"MB", 1e6},
                                                                                  {"G", 1e9},
                                                                                  {"GB", 1e9},
                                                                                  {"T", 1e12},
                                                                                  {"TB", 1e12},
                                                                                  {"KIB", 1024.0},
                                                                                  {"MIB", 1048576.0},
                                                                                  {"GIB", 1073741824.0},
                                                                                  {"TIB", 1099511627776.0}}};
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  std::string unit;
  for (const char* c = end; c != text.data() + text.size(); ++c) {
    if (*c != ' ' || !unit.empty()) unit += static_cast<char>(std::toupper(static_cast<unsigned char>(*c)));
  }
  if (error == std::errc() && std::isfinite(number)) {
    for (const auto& [name, factor] : kUnits) {
      if (name != unit) continue;
      const double bytes = number * factor;
      if (bytes >= 1 && bytes < 9.2e18) return static_cast<std::uint64_t>(bytes);
      throw UsageError(fmt::format("{}: '{}' is out of range, expected 1 byte to 9.2e18 bytes", operation, text));
    }
  }
  throw UsageError(fmt::format("{}: '{}' is not a size, expected one such as 5GB, 500MB, 2GiB or a number of bytes",
                               operation, text));
}

}  // namespace tessera::cli

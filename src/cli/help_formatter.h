#pragma once
// How --help looks: each option with the name of its value and nothing of how it is checked; text as it was written,
// not wrapped anew as CLI11 does since 2.5.

#include <CLI/Formatter.hpp>
#include <string>

namespace tessera::cli {

class HelpFormatter final : public CLI::Formatter {
 public:
  HelpFormatter();
  std::string make_option_opts(const CLI::Option* option) const override;
  std::string make_usage(const CLI::App* app, std::string name) const override;
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
};

}  // namespace tessera::cli

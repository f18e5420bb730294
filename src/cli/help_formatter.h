#pragma once
// How --help looks: each option with the name of its value and nothing of how it is checked.

#include <CLI/Formatter.hpp>
#include <string>

namespace tessera::cli {

class HelpFormatter final : public CLI::Formatter {
 public:
  HelpFormatter();
  std::string make_option_opts(const CLI::Option* option) const override;
};

}  // namespace tessera::cli

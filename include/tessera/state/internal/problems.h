#pragma once
// Collects all problems of a state, for one error that lists them.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/error.h"

namespace tessera {

class Problems {
 public:
  // Adds a problem of `kind`, such as "missing".
  void add(std::string_view kind, std::string problem) {
    for (auto& [known, problems] : kinds_) {
      if (known == kind) return problems.push_back(std::move(problem));
    }
    kinds_.push_back({std::string(kind), {std::move(problem)}});
  }

  // Throws if there are problems: "<operation>: missing: a, b; size mismatch: c". The code is unsupported if all
  // problems are of the kind "unsupported", else invalid_argument.
  void raise(std::string_view operation) const {
    if (kinds_.empty()) return;
    const bool is_unsupported = kinds_.size() == 1 && kinds_[0].first == "unsupported";
    std::string message(operation);
    std::string_view separator = ": ";
    for (const auto& [kind, problems] : kinds_) {
      message += separator;
      message += kind + ": ";
      for (std::size_t i = 0; i < problems.size() && i < kListed; ++i) {
        if (i != 0) message += ", ";
        message += problems[i];
      }
      if (problems.size() > kListed) message += fmt::format(" and {} more", problems.size() - kListed);
      separator = "; ";
    }
    throw Error(is_unsupported ? ErrorCode::unsupported : ErrorCode::invalid_argument, message);
  }

 private:
  static constexpr std::size_t kListed = 20;
  std::vector<std::pair<std::string, std::vector<std::string>>> kinds_;
};

}  // namespace tessera

#pragma once
// "did you mean": the names that are similar to one that is not known.

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::cli {

// Collects the names that are similar to `wanted`. Both must outlive it.
class SimilarNames {
 public:
  explicit SimilarNames(std::string_view wanted);
  void add(std::string_view name);
  // Returns "; did you mean 'a', 'b'?", with the most similar names, or nothing if none is similar.
  std::string suggestion();

 private:
  std::string_view wanted_;
  std::size_t limit_;  // names from this distance on are not similar
  std::vector<std::pair<std::size_t, std::string_view>> close_;
};

}  // namespace tessera::cli

#include "cli/text/names.h"

#include <fmt/format.h>

#include <string_view>

#include "cli/output.h"
#include "cli/text/similar_names.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/convert.h"

namespace tessera::cli {
namespace {

class Names {
 public:
  explicit Names(const checkpoint::Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (std::size_t i = 0; i < checkpoint_.tensors().size(); ++i) visit(checkpoint_.tensors()[i].name, i, true);
    for (std::size_t i = 0; i < checkpoint_.objects().size(); ++i) visit(checkpoint_.objects()[i].name, i, false);
  }

  std::string counted_names() const {
    return counted(checkpoint_.tensors().size() + checkpoint_.objects().size(), "name");
  }

  std::string suggestion(std::string_view wanted) const {
    std::size_t below = 0;
    const std::string prefix = std::string(wanted) + ".";
    SimilarNames similar(wanted);
    for_each([&](const std::string& name, std::size_t, bool) {
      below += name.starts_with(prefix) ? 1 : 0;
      similar.add(name);
    });
    if (below > 0) return fmt::format("; '{}*' has {}", printable(prefix), counted(below, "name"));
    return similar.suggestion();
  }

 private:
  const checkpoint::Checkpoint& checkpoint_;
};

bool is_glob(std::string_view text) { return text.find_first_of("*?[") != std::string_view::npos; }

}  // namespace

NamedItems find_names(const checkpoint::Checkpoint& checkpoint, const std::vector<std::string>& names) {
  std::vector<bool> tensors(checkpoint.tensors().size(), names.empty());
  std::vector<bool> objects(checkpoint.objects().size(), names.empty());
  const Names all(checkpoint);
  for (const std::string& name : names) {
    bool found = false;
    if (const auto tensor = checkpoint.find_tensor(name)) {
      tensors[*tensor] = found = true;
    } else if (const auto object = checkpoint.find_object(name)) {
      objects[*object] = found = true;
    } else if (is_glob(name)) {
      all.for_each([&](const std::string& candidate, std::size_t i, bool is_tensor) {
        if (!checkpoint::glob_matches(name, candidate)) return;
        (is_tensor ? tensors : objects)[i] = found = true;
      });
      if (!found) {
        fail(ErrorCode::not_found, "{}: no name matches '{}', expected a match among {}", checkpoint.path().string(),
             printable(name), all.counted_names());
      }
    }
    if (!found) {
      fail(ErrorCode::not_found, "{}: no tensor or object is named '{}', expected one of {}{}",
           checkpoint.path().string(), printable(name), all.counted_names(), all.suggestion(name));
    }
  }
  NamedItems result;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i]) result.tensors.push_back(i);
  }
  for (std::size_t i = 0; i < objects.size(); ++i) {
    if (objects[i]) result.objects.push_back(i);
  }
  return result;
}

}  // namespace tessera::cli

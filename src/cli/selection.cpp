#include "cli/selection.h"

#include <fmt/format.h>

#include <string_view>

namespace tessera::cli {

Option select_option(checkpoint::Selection& selection) {
  return {.name = "select",
          .value_name = "GLOB",
          .help = "Take only names that match this glob; can be given several times",
          .target = &selection.select};
}

Option exclude_option(checkpoint::Selection& selection) {
  return {.name = "exclude",
          .value_name = "GLOB",
          .help = "Leave out names that match this glob; can be given several times",
          .target = &selection.exclude};
}

void check_selection(const checkpoint::Selection& selection,
                     const std::vector<const checkpoint::Checkpoint*>& checkpoints) {
  if (selection.select.empty() && selection.exclude.empty()) return;
  std::vector<bool> matched(selection.select.size(), false);
  bool any_name = false, any_selected = false;
  const auto visit = [&](std::string_view name) {
    any_name = true;
    any_selected = any_selected || selection.takes(name);
    for (std::size_t i = 0; i < matched.size(); ++i) {
      if (!matched[i]) matched[i] = checkpoint::glob_matches(selection.select[i], name);
    }
  };
  for (const checkpoint::Checkpoint* checkpoint : checkpoints) {
    for (const auto& tensor : checkpoint->tensors()) visit(tensor.name);
    for (const auto& object : checkpoint->objects()) visit(object.name);
  }
  for (std::size_t i = 0; i < matched.size(); ++i) {
    if (!matched[i]) throw UsageError(fmt::format("--select: no name matches '{}'", selection.select[i]));
  }
  if (any_name && !any_selected) throw UsageError("--select and --exclude leave nothing");
}

}  // namespace tessera::cli

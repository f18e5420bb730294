// Plans one torch.save file with the nested state dict.

#include <utility>

#include "checkpoint/convert/nested_archive.h"

namespace tessera::checkpoint {

OutputPlan plan_torch(const std::shared_ptr<const OutputSource>& source, const std::string& file_name) {
  std::vector<NestedArchivePlanner::Leaf> leaves = leaves_of(*source);
  const std::string stem = file_name.substr(0, file_name.find_last_of('.'));
  PlannedFile file{file_name, source->tensors().size(), {}};
  file.units.push_back(NestedArchivePlanner(source).plan(leaves, stem.empty() ? "archive" : stem));
  OutputPlan result;
  result.files.push_back(std::move(file));
  return result;
}

}  // namespace tessera::checkpoint

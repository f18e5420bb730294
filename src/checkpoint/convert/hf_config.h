#pragma once
// The configuration and tokenizer files that belong beside the tensors of a Hugging Face model.

#include <filesystem>
#include <vector>

#include "checkpoint/convert/output_plan.h"

namespace tessera::checkpoint {

// Plans a copy of each of hf_config_files(directory). Throws Error(not_found), Error(io).
std::vector<PlannedFile> plan_hf_config(const std::filesystem::path& directory);

}  // namespace tessera::checkpoint

#pragma once
/// \file
/// Reports of operations on checkpoints as JSON, for programs: what the command prints with --json.

#include <nlohmann/json_fwd.hpp>

#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/verify.h"

namespace tessera::checkpoint {

/// {"good", "problems": [{"file", "offset_bytes", "name", "what"}], "problem_count", "tensors", "chunks", "objects",
/// "files", "bytes_checked", "bytes_without_checksum", "has_sidecar", "sidecar_agrees", "left_over", "other_files"}
nlohmann::ordered_json report_json(const VerifyReport& report);
/// {"same", "differences": [{"kind", "name", "a", "b", "index", "differing_elements"}], "tensors", "objects", "bytes"},
/// the last two members of a difference only if its kind is "elements"
nlohmann::ordered_json report_json(const DiffReport& report);
/// {"tensors", "objects", "tensor_bytes", "files": [{"name", "bytes", "tensors"}]}
nlohmann::ordered_json report_json(const ConvertReport& report);

}  // namespace tessera::checkpoint

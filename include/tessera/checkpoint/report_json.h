#pragma once
/// \file
/// Reports of operations on checkpoints as JSON, for programs: what the command prints with --json. `docs/json` has a
/// schema of each. The first member, "schema", names it.

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/inspect/size_tree.h"
#include "tessera/checkpoint/inspect/stats.h"
#include "tessera/checkpoint/manage/add_sidecar.h"
#include "tessera/checkpoint/manage/prune.h"
#include "tessera/checkpoint/manage/run_directory.h"
#include "tessera/checkpoint/verify.h"

namespace tessera::checkpoint {

/// Returns the value of "schema" for `output`, the name of a schema in `docs/json`: "tessera/verify/1" for "verify".
/// The number is the version of the schema. It changes if a member is removed or gets another meaning.
std::string json_schema(std::string_view output);

/// Returns {"schema", "good", "problems": [{"file", "offset_bytes", "name", "what"}], "problem_count", "tensors",
/// "chunks", "objects", "files", "bytes_checked", "bytes_without_checksum", "has_sidecar", "sidecar_agrees",
/// "left_over", "other_files", "warnings"}.
nlohmann::ordered_json report_json(const VerifyReport& report);
/// Returns {"schema", "same", "differences": [{"kind", "name", "a", "b", "index", "differing_elements", "elements",
/// "worst_absolute", "worst_relative"}], "tensors", "objects", "bytes"}. "kind" is an enumerator of Difference::Kind.
/// From "index" on, the members of a difference are there only if its kind is "elements". The worst elements are
/// {"value", "index", "a", "b"}, or null for elements without numbers.
nlohmann::ordered_json report_json(const DiffReport& report);
/// Returns {"schema", "tensors": [{"name", "dtype", "shape", "bytes", "elements", "nan", "inf", "zeros", "min", "max",
/// "mean", "std", "norm"}], "total": {"tensors", "bytes", "elements", "nan", "inf", "zeros", "norm"}}. What a tensor
/// does not have is null, and so is everything from "elements" on of a tensor without numbers. Numbers that JSON does
/// not have are text: "inf", "-inf", "nan", "(1-2j)".
nlohmann::ordered_json report_json(const StatsReport& report);
/// Returns {"schema", "name", "bytes", "tensors", "objects", "children": [the same, without "schema"]}.
nlohmann::ordered_json report_json(const SizeNode& node);
/// Returns {"schema", "tensors", "objects", "tensor_bytes", "files": [{"name", "bytes", "tensors"}]}.
nlohmann::ordered_json report_json(const ConvertReport& report);
/// Returns {"schema", "run", "steps": [{"name", "step", "unit", "kind", "format", "modified", "ranks", "bytes",
/// "complete", "newest", "in_use", "problem"}], "newest"}: `kind` is "step", "link", "unfinished" or "removed",
/// `modified` a time of UTC as "2026-01-31T12:00:00Z", `newest` the name of the newest complete step. What is not known
/// is null.
nlohmann::ordered_json report_json(const RunDirectory& run);
/// Returns {"schema", "removed": [{"name", "why", "bytes"}], "kept": [{"name", "why"}], "failed": [message],
/// "freed_bytes"}.
nlohmann::ordered_json report_json(const PruneReport& report);
/// Returns {"schema", "sidecar", "written", "replaced", "files", "bytes", "problems": as in a VerifyReport,
/// "problem_count"}.
nlohmann::ordered_json report_json(const AddSidecarReport& report);

}  // namespace tessera::checkpoint

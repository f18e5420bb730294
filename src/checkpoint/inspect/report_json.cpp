#include "tessera/checkpoint/report_json.h"

#include <nlohmann/json.hpp>

namespace tessera::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

std::string_view kind_name(Difference::Kind kind) {
  switch (kind) {
    case Difference::Kind::only_in_a:
      return "only_in_a";
    case Difference::Kind::only_in_b:
      return "only_in_b";
    case Difference::Kind::dtype:
      return "dtype";
    case Difference::Kind::shape:
      return "shape";
    case Difference::Kind::elements:
      return "elements";
    case Difference::Kind::object:
      return "object";
    case Difference::Kind::kind:
      return "kind";
    case Difference::Kind::metadata:
      return "metadata";
  }
  return "unknown";
}

}  // namespace

Json report_json(const VerifyReport& report) {
  Json problems = Json::array();
  for (const Problem& problem : report.problems) {
    problems.push_back({{"file", problem.file.empty() ? Json() : Json(problem.file)},
                        {"offset_bytes", problem.offset_bytes ? Json(*problem.offset_bytes) : Json()},
                        {"name", problem.name.empty() ? Json() : Json(problem.name)},
                        {"what", problem.what}});
  }
  return {{"good", report.good()},
          {"problems", problems},
          {"problem_count", report.problem_count},
          {"tensors", report.tensors},
          {"chunks", report.chunks},
          {"objects", report.objects},
          {"files", report.files},
          {"bytes_checked", report.bytes_checked},
          {"bytes_without_checksum", report.bytes_without_checksum},
          {"has_sidecar", report.has_sidecar},
          {"sidecar_agrees", report.sidecar_agrees},
          {"left_over", report.left_over},
          {"other_files", report.other_files}};
}

Json report_json(const DiffReport& report) {
  Json differences = Json::array();
  for (const Difference& difference : report.differences) {
    Json one = {
        {"kind", kind_name(difference.kind)}, {"name", difference.name}, {"a", difference.a}, {"b", difference.b}};
    if (difference.kind == Difference::Kind::elements) {
      one["index"] = difference.index;
      one["differing_elements"] = difference.differing_elements;
    }
    differences.push_back(std::move(one));
  }
  return {{"same", report.same()},
          {"differences", differences},
          {"tensors", report.tensors},
          {"objects", report.objects},
          {"bytes", report.bytes}};
}

Json report_json(const ConvertReport& report) {
  Json files = Json::array();
  for (const ConvertReport::OutputFile& file : report.files) {
    files.push_back({{"name", file.name}, {"bytes", file.size_bytes}, {"tensors", file.tensors}});
  }
  return {{"tensors", report.tensors},
          {"objects", report.objects},
          {"tensor_bytes", report.tensor_bytes},
          {"files", files}};
}

}  // namespace tessera::checkpoint

#include "tessera/checkpoint/report_json.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>

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

Json number_json(double value) { return std::isfinite(value) ? Json(value) : Json(to_string(Number(value))); }

Json number_json(const Number& number) {
  if (const auto* real = std::get_if<double>(&number)) return number_json(*real);
  if (const auto* integer = std::get_if<std::int64_t>(&number)) return *integer;
  if (const auto* integer = std::get_if<std::uint64_t>(&number)) return *integer;
  return to_string(number);
}

template <typename T>
Json optional_json(const std::optional<T>& number) {
  return number ? number_json(*number) : Json();
}

Json worst_json(const std::optional<WorstElement>& worst) {
  if (!worst) return {};
  return {{"value", number_json(worst->value)}, {"index", worst->index}, {"a", worst->a}, {"b", worst->b}};
}

std::string_view kind_name(RunEntry::Kind kind) {
  switch (kind) {
    case RunEntry::Kind::step:
      return "step";
    case RunEntry::Kind::link:
      return "link";
    case RunEntry::Kind::staging:
      return "unfinished";
    case RunEntry::Kind::removed:
      return "removed";
  }
  return "unknown";
}

std::string utc_time(std::int64_t seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts = {};
  ::gmtime_r(&time, &parts);
  std::array<char, 64> text{};
  return {text.data(), std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts)};
}

Json problems_json(const VerifyReport& report) {
  Json problems = Json::array();
  for (const Problem& problem : report.problems) {
    problems.push_back({{"file", problem.file.empty() ? Json() : Json(problem.file)},
                        {"offset_bytes", problem.offset_bytes ? Json(*problem.offset_bytes) : Json()},
                        {"name", problem.name.empty() ? Json() : Json(problem.name)},
                        {"what", problem.what}});
  }
  return problems;
}

// The sizes of a node and of those below it.
Json node_json(const SizeNode& node) {
  Json children = Json::array();
  for (const SizeNode& child : node.children) children.push_back(node_json(child));
  return {{"name", node.name},
          {"bytes", node.bytes},
          {"tensors", node.tensors},
          {"objects", node.objects},
          {"children", children}};
}

}  // namespace

std::string json_schema(std::string_view output) { return fmt::format("tessera/{}/1", output); }

Json report_json(const VerifyReport& report) {
  return {{"schema", json_schema("verify")},
          {"good", report.good()},
          {"problems", problems_json(report)},
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
          {"other_files", report.other_files},
          {"warnings", report.warnings}};
}

Json report_json(const DiffReport& report) {
  Json differences = Json::array();
  for (const Difference& difference : report.differences) {
    Json one = {
        {"kind", kind_name(difference.kind)}, {"name", difference.name}, {"a", difference.a}, {"b", difference.b}};
    if (difference.kind == Difference::Kind::elements) {
      one["index"] = difference.index;
      one["differing_elements"] = difference.differing_elements;
      one["elements"] = difference.elements;
      one["worst_absolute"] = worst_json(difference.worst_absolute);
      one["worst_relative"] = worst_json(difference.worst_relative);
    }
    differences.push_back(std::move(one));
  }
  return {{"schema", json_schema("diff")}, {"same", report.same()},     {"differences", differences},
          {"tensors", report.tensors},     {"objects", report.objects}, {"bytes", report.bytes}};
}

Json report_json(const StatsReport& report) {
  Json tensors = Json::array();
  for (const TensorStats& tensor : report.tensors) {
    const auto count = [&](std::uint64_t value) { return tensor.is_numeric ? Json(value) : Json(); };
    tensors.push_back({{"name", tensor.name},
                       {"dtype", dtype_name(tensor.dtype)},
                       {"shape", tensor.shape},
                       {"bytes", tensor.size_bytes},
                       {"elements", count(tensor.elements)},
                       {"nan", count(tensor.nans)},
                       {"inf", count(tensor.infs)},
                       {"zeros", count(tensor.zeros)},
                       {"min", optional_json(tensor.min)},
                       {"max", optional_json(tensor.max)},
                       {"mean", optional_json(tensor.mean)},
                       {"std", optional_json(tensor.stddev)},
                       {"norm", optional_json(tensor.norm)}});
  }
  const Json total = {{"tensors", report.tensors.size()},
                      {"bytes", report.bytes},
                      {"elements", report.elements},
                      {"nan", report.nans},
                      {"inf", report.infs},
                      {"zeros", report.zeros},
                      {"norm", number_json(report.norm)}};
  return {{"schema", json_schema("stats")}, {"tensors", tensors}, {"total", total}};
}

Json report_json(const SizeNode& node) {
  Json json = {{"schema", json_schema("inspect-tree")}};
  json.update(node_json(node));
  return json;
}

Json report_json(const ConvertReport& report) {
  Json files = Json::array();
  for (const ConvertReport::OutputFile& file : report.files) {
    files.push_back({{"name", file.name}, {"bytes", file.size_bytes}, {"tensors", file.tensors}});
  }
  return {{"schema", json_schema("convert")},
          {"tensors", report.tensors},
          {"objects", report.objects},
          {"tensor_bytes", report.tensor_bytes},
          {"files", files}};
}

Json report_json(const RunDirectory& run) {
  const auto name_or_null = [&](const std::optional<std::size_t>& entry) {
    return entry ? Json(run.entries[*entry].name) : Json();
  };
  Json steps = Json::array();
  for (std::size_t i = 0; i < run.entries.size(); ++i) {
    const RunEntry& entry = run.entries[i];
    steps.push_back({{"name", entry.name},
                     {"step", entry.of.step},
                     {"unit", entry.of.unit},
                     {"kind", kind_name(entry.kind)},
                     {"format", entry.format ? Json(source_kind_name(*entry.format)) : Json()},
                     {"modified", entry.modified_s == 0 ? Json() : Json(utc_time(entry.modified_s))},
                     {"ranks", entry.ranks ? Json(*entry.ranks) : Json()},
                     {"bytes", entry.size_bytes},
                     {"complete", entry.complete},
                     {"newest", run.newest_complete == i},
                     {"in_use", entry.in_use},
                     {"problem", entry.problem.empty() ? Json() : Json(entry.problem)}});
  }
  return {{"schema", json_schema("inspect-steps")},
          {"run", run.path.string()},
          {"steps", steps},
          {"newest", name_or_null(run.newest_complete)}};
}

Json report_json(const PruneReport& report) {
  Json removed = Json::array(), kept = Json::array();
  for (const PrunedEntry& entry : report.removed) {
    removed.push_back({{"name", entry.name}, {"why", entry.why}, {"bytes", entry.size_bytes}});
  }
  for (const KeptEntry& entry : report.kept) kept.push_back({{"name", entry.name}, {"why", entry.why}});
  return {{"schema", json_schema("prune")},
          {"removed", removed},
          {"kept", kept},
          {"failed", report.failed},
          {"freed_bytes", report.freed_bytes}};
}

Json report_json(const AddSidecarReport& report) {
  return {{"schema", json_schema("sum")},
          {"sidecar", report.sidecar.string()},
          {"written", report.written},
          {"replaced", report.replaced},
          {"files", report.files},
          {"bytes", report.bytes},
          {"problems", problems_json(report.verified)},
          {"problem_count", report.verified.problem_count}};
}

}  // namespace tessera::checkpoint

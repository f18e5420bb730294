// `tessera inspect`: tables.

#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cli/commands/inspect.h"
#include "cli/text/text_table.h"
#include "tessera/base/bytes.h"
#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

using checkpoint::Checkpoint;
using checkpoint::StoredRange;
using checkpoint::TensorInfo;
using Align = TextTable::Align;

constexpr std::size_t kReprColumns = 160;  // if standard output is not a terminal

std::string name_text(std::string_view name) { return printable(name, SIZE_MAX); }

// "1", "4 x [2, 16]", "3 x [3, 5] + 1 x [2, 5]", "9 of 4 sizes"
std::string sharding(const TensorInfo& tensor) {
  if (tensor.chunks.size() == 1 && std::ranges::equal(tensor.chunks[0].sizes, tensor.shape)) return "1";
  std::vector<std::pair<std::vector<std::int64_t>, std::size_t>> groups;
  for (std::size_t c = 0; c < tensor.chunks.size(); ++c) {
    const auto sizes = tensor.chunks[c].sizes;
    const auto found =
        std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return std::ranges::equal(g.first, sizes); });
    if (found != groups.end()) {
      ++found->second;
    } else {
      groups.emplace_back(std::vector<std::int64_t>(sizes.begin(), sizes.end()), 1);
    }
    if (groups.size() > 2) return fmt::format("{} of several sizes", tensor.chunks.size());
  }
  std::string text;
  for (const auto& [sizes, count] : groups) {
    text += fmt::format("{}{} x {}", text.empty() ? "" : " + ", count, shape_to_string(sizes));
  }
  return text.empty() ? "none" : text;
}

std::string file_name(const Checkpoint& checkpoint, std::uint32_t file) {
  return file == StoredRange::kNoFile ? "nowhere" : name_text(checkpoint.files()[file].name);
}

// The name of the first file and the number of others.
std::string files_of(const Checkpoint& checkpoint, const TensorInfo& tensor) {
  std::unordered_set<std::uint32_t> files;
  for (const StoredRange& stored : tensor.stored) files.insert(stored.file);
  if (files.empty()) return "";
  const std::string first = file_name(checkpoint, tensor.stored.front().file);
  return files.size() == 1 ? first : fmt::format("{} +{}", first, files.size() - 1);
}

void print_head(Session& session, const Checkpoint& checkpoint) {
  const std::string kind(checkpoint::source_kind_name(checkpoint.kind())), version = one_line(checkpoint.version());
  session.out.print("{}\n",
                    session.out.bold(fmt::format("{}: {}", version.starts_with(kind) ? version : kind + ", " + version,
                                                 name_text(checkpoint.path().string()))));
}

void print_tensors(Session& session, const Checkpoint& checkpoint) {
  TextTable table({{"TENSOR", Align::left, 26, true},
                   {"DTYPE"},
                   {"SHAPE", Align::left, 14},
                   {"BYTES", Align::right},
                   {"CHUNKS", Align::left, 12},
                   {"FILE", Align::left, 15}});
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    table.add({name_text(tensor.name), std::string(dtype_name(tensor.dtype)), shape_to_string(tensor.shape),
               format_bytes(tensor.size_bytes()), sharding(tensor), files_of(checkpoint, tensor)});
  }
  session.out.write("\n");
  table.print(session.out);
}

void print_objects(Session& session, const Checkpoint& checkpoint) {
  TextTable table({{"OBJECT", Align::left, 30, true}, {"TYPE", Align::left, 10}, {"VALUE", Align::left, 16}});
  for (std::size_t i = 0; i < checkpoint.objects().size(); ++i) {
    session.cancellation.check();
    const ShownObject shown = show_object(checkpoint, i);
    table.add({name_text(checkpoint.objects()[i].name), name_text(shown.type),
               truncate(name_text(shown.repr), kReprColumns)});
  }
  session.out.write("\n");
  table.print(session.out);
}

void print_metadata(Session& session, const Checkpoint& checkpoint) {
  TextTable table({{"METADATA", Align::left, 20, true}, {"VALUE", Align::left, 16}});
  for (const auto& [key, value] : checkpoint.metadata()) {
    table.add({name_text(key), truncate(name_text(value), kReprColumns)});
  }
  session.out.write("\n");
  table.print(session.out);
}

void print_files(Session& session, const Checkpoint& checkpoint) {
  TextTable table({{"FILE", Align::left, 20, true}, {"BYTES", Align::right}});
  for (const checkpoint::SourceFile& file : checkpoint.files()) {
    table.add({name_text(file.name), file.size_bytes ? format_bytes(*file.size_bytes) : "missing"});
  }
  session.out.write("\n");
  table.print(session.out);
}

}  // namespace

void print_overview(Session& session, const Checkpoint& checkpoint) {
  print_head(session, checkpoint);
  if (!checkpoint.tensors().empty()) print_tensors(session, checkpoint);
  if (!checkpoint.objects().empty()) print_objects(session, checkpoint);
  if (!checkpoint.metadata().empty()) print_metadata(session, checkpoint);
  if (!checkpoint.files().empty()) print_files(session, checkpoint);
  std::size_t chunks = 0;
  for (const TensorInfo& tensor : checkpoint.tensors()) chunks += tensor.chunks.size();
  std::uint64_t on_disk = 0;
  for (const checkpoint::SourceFile& file : checkpoint.files()) on_disk += file.size_bytes.value_or(0);
  const std::string totals = fmt::format(
      "{} in {}, {}, {}; {} of tensors, {} in files", counted(checkpoint.tensors().size(), "tensor"),
      counted(chunks, "chunk"), counted(checkpoint.objects().size(), "object"),
      counted(checkpoint.files().size(), "file"), format_bytes(checkpoint.tensor_bytes()), format_bytes(on_disk));
  session.out.write("\n");
  print_wrapped(session.out, totals);
}

void print_details(Session& session, const Checkpoint& checkpoint, const NamedItems& items) {
  print_head(session, checkpoint);
  for (const std::size_t i : items.tensors) {
    session.cancellation.check();
    const TensorInfo& tensor = checkpoint.tensors()[i];
    session.out.print("\n{}  {} {}, {}, {}\n", session.out.bold(name_text(tensor.name)), dtype_name(tensor.dtype),
                      shape_to_string(tensor.shape), format_bytes(tensor.size_bytes()),
                      counted(tensor.chunks.size(), "chunk"));
    TextTable table(
        {{"OFFSETS"}, {"SIZES"}, {"BYTES", Align::right}, {"AT BYTE", Align::right}, {"FILE", Align::left, 12, true}},
        2);
    for (std::size_t c = 0; c < tensor.chunks.size(); ++c) {
      const BoxView box = tensor.chunks[c];
      const Place place = place_of(checkpoint, i, c);
      const bool known = place.file != StoredRange::kNoFile;
      table.add({shape_to_string(box.offsets), shape_to_string(box.sizes),
                 known ? fmt::to_string(place.length_bytes) : "", known ? fmt::to_string(place.offset_bytes) : "",
                 file_name(checkpoint, place.file)});
    }
    table.print(session.out);
  }
  for (const std::size_t i : items.objects) {
    const ShownObject shown = show_object(checkpoint, i);
    session.out.print("\n{}  {}\n  {}\n", session.out.bold(name_text(checkpoint.objects()[i].name)),
                      name_text(shown.type), name_text(shown.repr));
    if (shown.opaque) session.out.print("  {}\n", session.out.faint("opaque: " + name_text(*shown.opaque)));
  }
}

}  // namespace tessera::cli

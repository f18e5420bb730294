// `tessera inspect --json`: writes one tensor per line as it goes, so that memory does not grow with the chunks.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <thread>

#include "cli/commands/inspect.h"
#include "cli/text/json_text.h"
#include "tessera/base/thread_pool.h"
#include "tessera/checkpoint/report_json.h"

namespace tessera::cli {
namespace {

using checkpoint::Checkpoint;
using checkpoint::StoredRange;
using checkpoint::TensorInfo;

// Number of tensors that are located together, and the number of chunks from which threads pay off.
constexpr std::size_t kBatch = 512;
constexpr std::size_t kChunksForThreads = 1000;

std::string tensor_line(const Checkpoint& checkpoint, std::size_t tensor, const std::vector<std::string>& file_names) {
  const TensorInfo& info = checkpoint.tensors()[tensor];
  std::string line =
      fmt::format("\n    {}: {{\"dtype\": \"{}\", \"shape\": [{}], \"bytes\": {}, \"chunks\": [",
                  json_string(info.name), dtype_name(info.dtype), fmt::join(info.shape, ", "), info.size_bytes());
  for (std::size_t c = 0; c < info.chunks.size(); ++c) {
    const BoxView box = info.chunks[c];
    const Place place = place_of(checkpoint, tensor, c);
    fmt::format_to(std::back_inserter(line), "{}{{\"offsets\": [{}], \"sizes\": [{}], \"file\": ", c == 0 ? "" : ", ",
                   fmt::join(box.offsets, ", "), fmt::join(box.sizes, ", "));
    if (place.file == StoredRange::kNoFile) {
      line += "null, \"offset_bytes\": null, \"length_bytes\": null}";
    } else {
      fmt::format_to(std::back_inserter(line), "{}, \"offset_bytes\": {}, \"length_bytes\": {}", file_names[place.file],
                     place.offset_bytes, place.length_bytes);
      if (!place.strides.empty()) {
        fmt::format_to(std::back_inserter(line), ", \"strides\": [{}]", fmt::join(place.strides, ", "));
      }
      line += '}';
    }
  }
  return line + "]}";
}

void print_tensors(Session& session, const Checkpoint& checkpoint, const std::vector<std::size_t>& tensors,
                   const std::vector<std::string>& file_names) {
  std::size_t chunks = 0;
  for (const std::size_t tensor : tensors) chunks += checkpoint.tensors()[tensor].chunks.size();
  const std::size_t threads = chunks < kChunksForThreads ? 1 : std::min<std::size_t>(available_processors(), 8);
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < tensors.size(); begin += kBatch) {
    session.cancellation.check();
    const std::size_t count = std::min(kBatch, tensors.size() - begin);
    lines.assign(count, {});
    const auto fill = [&](std::size_t first) {
      for (std::size_t i = first; i < count; i += threads) {
        lines[i] = tensor_line(checkpoint, tensors[begin + i], file_names);
      }
    };
    if (threads == 1) {
      fill(0);
    } else {
      ThreadPool pool(threads);
      for (std::size_t first = 0; first < threads; ++first) pool.submit([&fill, first] { fill(first); });
      pool.wait();
    }
    for (std::size_t i = 0; i < count; ++i) {
      session.out.write(begin + i == 0 ? "" : ",");
      session.out.write(lines[i]);
    }
  }
}

void print_objects(Session& session, const Checkpoint& checkpoint, const std::vector<std::size_t>& objects) {
  bool first = true;
  for (const std::size_t object : objects) {
    session.cancellation.check();
    const ShownObject shown = show_object(checkpoint, object);
    session.out.print("{}\n    {}: {{\"type\": {}, \"value\": {}, \"repr\": {}", first ? "" : ",",
                      json_string(checkpoint.objects()[object].name), json_string(shown.type), shown.json,
                      json_string(shown.repr));
    if (shown.opaque) session.out.print(", \"opaque\": {}", json_string(*shown.opaque));
    session.out.write("}");
    first = false;
  }
}

// The files of the shown items; every file if everything is shown.
std::vector<bool> files_of(const Checkpoint& checkpoint, const NamedItems& items) {
  const bool everything =
      items.tensors.size() == checkpoint.tensors().size() && items.objects.size() == checkpoint.objects().size();
  std::vector<bool> shown(checkpoint.files().size(), everything);
  const auto add = [&](const StoredRange& stored) {
    if (stored.file != StoredRange::kNoFile) shown[stored.file] = true;
  };
  for (const std::size_t tensor : items.tensors) {
    for (const StoredRange& stored : checkpoint.tensors()[tensor].stored) add(stored);
  }
  for (const std::size_t object : items.objects) add(checkpoint.objects()[object].stored);
  return shown;
}

}  // namespace

void print_json(Session& session, const Checkpoint& checkpoint, const NamedItems& items) {
  std::vector<std::string> file_names;
  for (const checkpoint::SourceFile& file : checkpoint.files()) file_names.push_back(json_string(file.name));
  session.out.print("{{\n  \"schema\": \"{}\",\n  \"kind\": \"{}\",\n  \"version\": {},\n  \"tensors\": {{",
                    checkpoint::json_schema("inspect"), checkpoint::source_kind_name(checkpoint.kind()),
                    json_string(checkpoint.version()));
  print_tensors(session, checkpoint, items.tensors, file_names);
  session.out.write("\n  },\n  \"objects\": {");
  print_objects(session, checkpoint, items.objects);
  session.out.write("\n  },\n  \"files\": {");
  const std::vector<bool> shown = files_of(checkpoint, items);
  bool first = true;
  for (std::size_t i = 0; i < file_names.size(); ++i) {
    if (!shown[i]) continue;
    const auto& bytes = checkpoint.files()[i].size_bytes;
    session.out.print("{}\n    {}: {{\"bytes\": {}}}", first ? "" : ",", file_names[i],
                      bytes ? fmt::to_string(*bytes) : "null");
    first = false;
  }
  std::uint64_t total = 0;
  for (const std::size_t tensor : items.tensors) total += checkpoint.tensors()[tensor].size_bytes();
  session.out.write("\n  },\n  \"metadata\": {");
  first = true;
  for (const auto& [key, value] : checkpoint.metadata()) {
    session.out.print("{}\n    {}: {}", first ? "" : ",", json_string(key), json_string(value));
    first = false;
  }
  session.out.print("\n  }},\n  \"total_bytes\": {}\n}}\n", total);
}

}  // namespace tessera::cli

// Operations on checkpoints that take long: they can be observed and cancelled, and report in JSON.

#include <mutex>
#include <nlohmann/json.hpp>

#include "c/call.h"
#include "c/handles.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/report_json.h"
#include "tessera/checkpoint/verify.h"

namespace tessera::c {
namespace {

using checkpoint::SourceKind;
using nlohmann::ordered_json;

std::unique_ptr<tessera_bytes> text_of(const ordered_json& json) {
  return std::make_unique<tessera_bytes>(json.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
}

std::vector<std::string> globs_of(const char* const* given) {
  std::vector<std::string> globs;
  for (; given != nullptr && *given != nullptr; ++given) globs.emplace_back(*given);
  return globs;
}
// An empty `select` is refused: a program that computes it and finds nothing would get everything.
checkpoint::Selection selection_of(const tessera_selection& given, std::string_view function) {
  if (given.select != nullptr && *given.select == nullptr) {
    fail(ErrorCode::invalid_argument, "{}: select is an empty list, expected globs, or NULL for all names", function);
  }
  return {globs_of(given.select), globs_of(given.exclude)};
}

SourceKind kind_of(std::string_view format) {
  for (const SourceKind kind :
       {SourceKind::dcp, SourceKind::safetensors, SourceKind::torch, SourceKind::torch_checkpointing}) {
    if (format == source_kind_name(kind)) return kind;
  }
  fail(ErrorCode::invalid_argument,
       "convert: the format is '{}', expected dcp, safetensors, torch or torch_checkpointing", printable(format));
}

// Converts with what convert and reshard share, and reports. `work` is called with the options set.
template <typename Options, typename Work>
void convert(std::string_view function, const tessera_checkpoint* source, const char* destination,
             const tessera_convert_options* given, tessera_bytes** json, Options options, const Work& work) {
  required(source, function, "source");
  required(destination, function, "destination");
  const tessera_convert_options all = options_of(given, function);
  options.selection = selection_of(all.selection, function);
  check_selection(options.selection, {source->checkpoint.get()});
  if (all.dtype != nullptr) {
    options.dtype = find_dtype(all.dtype);
    if (!options.dtype) {
      fail(ErrorCode::invalid_argument, "{}: the dtype is '{}', expected one of PyTorch such as bfloat16", function,
           printable(all.dtype));
    }
  }
  options.max_shard_bytes = all.max_shard_bytes;
  options.dry_run = all.dry_run != 0;
  options.expand = all.expand != 0;
  options.jobs = all.jobs;
  observe(all.task, options);
  std::mutex mutex;
  std::vector<std::string> warnings;
  options.warn = [&](const std::string& text) {
    const std::lock_guard lock(mutex);
    warnings.push_back(text);
  };
  ordered_json report = report_json(work(options));
  report["warnings"] = warnings;
  if (json != nullptr) give(text_of(report), json);
}

}  // namespace
}  // namespace tessera::c

using namespace tessera;

extern "C" {

tessera_status tessera_task_new(tessera_task** task) {
  return c::call([&] { *c::required(task, "tessera_task_new", "task") = std::make_unique<tessera_task>().release(); });
}
void tessera_task_cancel(tessera_task* task) {
  c::if_given(task, [](tessera_task& given) { given.cancellation.request(); });
}
void tessera_task_progress(const tessera_task* task, uint64_t* done_bytes, uint64_t* total_bytes) {
  uint64_t done = 0, total = 0;
  c::if_given(task, [&](const tessera_task& given) {
    done = given.done_bytes.load(std::memory_order_relaxed);
    total = given.total_bytes.load(std::memory_order_relaxed);
  });
  if (done_bytes != nullptr) *done_bytes = done;
  if (total_bytes != nullptr) *total_bytes = total;
}
void tessera_task_free(tessera_task* task) { delete task; }

tessera_status tessera_verify(const char* path, const tessera_verify_options* options, uint64_t* problems,
                              tessera_bytes** json) {
  return c::call([&] {
    c::required(path, "tessera_verify", "path");
    c::required(problems, "tessera_verify", "problems");
    const tessera_verify_options given = c::options_of(options, "tessera_verify");
    checkpoint::VerifyOptions verify;
    verify.jobs = given.jobs;
    c::observe(given.task, verify);
    const checkpoint::VerifyReport report = checkpoint::verify(path, verify);
    std::unique_ptr<tessera_bytes> text = json == nullptr ? nullptr : c::text_of(report_json(report));
    *problems = report.problem_count;
    if (json != nullptr) c::give(std::move(text), json);
  });
}

tessera_status tessera_diff(const tessera_checkpoint* a, const tessera_checkpoint* b,
                            const tessera_diff_options* options, uint64_t* differences, tessera_bytes** json) {
  return c::call([&] {
    c::required(a, "tessera_diff", "a");
    c::required(b, "tessera_diff", "b");
    c::required(differences, "tessera_diff", "differences");
    const tessera_diff_options given = c::options_of(options, "tessera_diff");
    checkpoint::DiffOptions diff;
    diff.selection = c::selection_of(given.selection, "tessera_diff");
    check_selection(diff.selection, {a->checkpoint.get(), b->checkpoint.get()});
    diff.expand = given.expand != 0;
    diff.jobs = given.jobs;
    c::observe(given.task, diff);
    const checkpoint::DiffReport report = checkpoint::diff(a->checkpoint, b->checkpoint, diff);
    std::unique_ptr<tessera_bytes> text = json == nullptr ? nullptr : c::text_of(report_json(report));
    *differences = report.differences.size();
    if (json != nullptr) c::give(std::move(text), json);
  });
}

tessera_status tessera_convert(const tessera_checkpoint* source, const char* destination, const char* format,
                               const tessera_convert_options* options, tessera_bytes** json) {
  return c::call([&] {
    checkpoint::ConvertOptions convert;
    convert.to = c::kind_of(c::required(format, "tessera_convert", "format"));
    c::convert("tessera_convert", source, destination, options, json, convert,
               [&](const auto& all) { return checkpoint::convert(source->checkpoint, destination, all); });
  });
}

tessera_status tessera_reshard(const tessera_checkpoint* source, const char* destination, int64_t ranks, int64_t dim,
                               const tessera_checkpoint* like, const tessera_convert_options* options,
                               tessera_bytes** json) {
  return c::call([&] {
    checkpoint::ReshardOptions reshard;
    if (like != nullptr) {
      reshard.like = like->checkpoint;
    } else {
      reshard.ranks = ranks;
      reshard.dim = dim;
    }
    c::convert("tessera_reshard", source, destination, options, json, reshard,
               [&](const auto& all) { return checkpoint::reshard(source->checkpoint, destination, all); });
  });
}

}  // extern "C"

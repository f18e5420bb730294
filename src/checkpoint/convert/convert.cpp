#include "tessera/checkpoint/convert.h"

#include <numeric>
#include <optional>
#include <utility>

#include "checkpoint/convert/hf_config.h"
#include "checkpoint/convert/output_plan.h"
#include "checkpoint/convert/staging.h"
#include "checkpoint/save/format.h"
#include "checkpoint/source/expansion.h"
#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t kMaxRanks = 1 << 20;
// Of a safetensors file: which library wrote it.
constexpr std::string_view kFormatKey = "format";

ConvertReport report_of(const OutputSource& source, const OutputPlan& plan) {
  ConvertReport report;
  report.tensors = source.tensors().size();
  report.objects = source.objects().size();
  for (const OutputTensor& tensor : source.tensors()) {
    report.tensor_bytes += tensor.info->size_bytes() / static_cast<std::uint64_t>(dtype_size(tensor.info->dtype)) *
                           static_cast<std::uint64_t>(dtype_size(tensor.dtype));
  }
  for (const PlannedFile& file : plan.files) report.files.push_back({file.name, file.size_bytes(), file.tensors});
  for (const auto& [name, bytes] : plan.small_files) report.files.push_back({name, bytes.size(), 0});
  for (const PlannedFile& file : plan.companions) report.files.push_back({file.name, file.size_bytes(), 0});
  return report;
}

// Writes the files of `plan` that are those of a rank.
Sidecar write_files(const Checkpoint& source, const OutputPlan& plan, const fs::path& folder,
                    const ConvertOptions& options, std::uint64_t tensor_bytes, std::size_t rank = 0,
                    std::size_t ranks = 1) {
  ProgressSink& progress = options.progress != nullptr ? *options.progress : no_progress();
  progress.begin("write", tensor_bytes);
  StreamWriter writer(file_system_storage(folder), threads_for(options.jobs), progress, options.cancellation);
  const auto write = [&](const PlannedFile& file) {
    writer.begin_file(file.name, file.size_bytes());
    for (const PlannedUnit& unit : file.units) writer.add(unit.make());
    writer.end_file();
  };
  for (std::size_t i = rank; i < plan.files.size(); i += ranks) write(plan.files[i]);
  if (rank == 0) {
    for (const auto& [name, bytes] : plan.small_files) writer.add_small_file(name, bytes);
    for (const PlannedFile& file : plan.companions) write(file);
  }
  Sidecar sidecar = writer.finish();
  for (const PlannedFile& file : plan.companions) sidecar.files.erase(file.name);
  source.compare_rest();
  progress.end();
  return sidecar;
}

void commit_folder(Staging& staging, const Sidecar& sidecar, const ConvertOptions& options) {
  write_new_file(staging.folder() / kSidecarFileName, write_sidecar(sidecar));
  if (options.cancellation != nullptr) options.cancellation->check();
  staging.commit_folder();
}

void write_folder(const Checkpoint& source, const OutputPlan& plan, Staging& staging, const ConvertOptions& options,
                  std::uint64_t tensor_bytes) {
  commit_folder(staging, write_files(source, plan, staging.folder(), options, tensor_bytes), options);
}

// A torch.save file has checksums of its own; a safetensors file gets a sidecar beside it.
void write_single_file(const Checkpoint& source, const OutputPlan& plan, Staging& staging,
                       const ConvertOptions& options, std::uint64_t tensor_bytes) {
  const Sidecar sidecar = write_files(source, plan, staging.folder(), options, tensor_bytes);
  fs::path companion;
  if (options.to == SourceKind::safetensors) {
    companion = kSidecarFileName;
    write_new_file(staging.folder() / companion, write_file_sidecar(sidecar));
  }
  if (options.cancellation != nullptr) options.cancellation->check();
  staging.commit_file(plan.files.front().name, companion, std::string(kSidecarFileName));
}

Existing existing_of(const ConvertOptions& options) { return options.replace ? Existing::replace : Existing::refuse; }

bool is_single_file(const fs::path& destination, SourceKind to) {
  return to == SourceKind::torch || (to == SourceKind::safetensors && destination.extension() == ".safetensors");
}

template <typename MakePlan>
ConvertReport run(const std::shared_ptr<const Checkpoint>& source, const fs::path& destination,
                  const ConvertOptions& options, const MakePlan& make_plan) {
  Staging::check_destination(destination, source->path(), existing_of(options));
  if (!options.expand) check_expansion(*source, options.selection);
  const auto output = std::make_shared<const OutputSource>(source, options);
  if (options.to != SourceKind::safetensors) {
    for (const auto& [key, value] : source->metadata()) {
      if (key != kFormatKey) output->warn(fmt::format("metadata '{}': only safetensors can store it", printable(key)));
    }
  }
  const OutputPlan plan = make_plan(output);
  ConvertReport report = report_of(*output, plan);
  if (options.before_writing) options.before_writing(report);
  if (options.dry_run) return report;
  Staging staging(destination, source->path(), existing_of(options));
  if (is_single_file(destination, options.to)) {
    write_single_file(*source, plan, staging, options, report.tensor_bytes);
  } else {
    write_folder(*source, plan, staging, options, report.tensor_bytes);
  }
  output->warn_of_elements_beyond_range();
  return report;
}

void check_limits(const fs::path& destination, const ConvertOptions& options) {
  if (is_single_file(destination, options.to) && options.max_shard_bytes != 0) {
    fail(ErrorCode::invalid_argument, "convert to {}: found a limit on shard size, expected none for a single file",
         destination.string());
  }
  if (options.to == SourceKind::torch_checkpointing && options.max_shard_bytes != 0) {
    fail(ErrorCode::invalid_argument,
         "convert to {}: found a limit on shard size, expected none for torch_checkpointing, which has one file for "
         "each item and rank",
         destination.string());
  }
  if (!options.hf_config.empty() &&
      (options.to != SourceKind::safetensors || is_single_file(destination, options.to))) {
    fail(ErrorCode::invalid_argument, "convert to {}: found hf_config, expected it only for a directory of safetensors",
         destination.string());
  }
  if (options.file_of_tensor.empty()) return;
  if (options.to == SourceKind::safetensors && !is_single_file(destination, options.to) &&
      options.max_shard_bytes == 0) {
    return;
  }
  fail(ErrorCode::invalid_argument,
       "convert to {}: found file_of_tensor, expected it only for a directory of safetensors, without a limit on shard "
       "size",
       destination.string());
}

OutputPlan plan_safetensors_folder_or_file(const std::shared_ptr<const OutputSource>& output,
                                           const std::string& file_name, const ConvertOptions& options) {
  OutputPlan plan = plan_safetensors(output, file_name);
  if (!options.hf_config.empty()) plan.companions = plan_hf_config(options.hf_config);
  return plan;
}

// A conversion of which each rank writes some files into a folder that the coordinator makes and commits.
class SharedConversion {
 public:
  SharedConversion(const Checkpoint& source, const OutputPlan& plan, const ConvertOptions& options, RankLink& link)
      : source_(source), plan_(plan), options_(options), link_(link) {}

  void run(const fs::path& destination, std::uint64_t tensor_bytes, const std::string& step) {
    const Bytes folder = link_.broadcast(link_.agree_on(step, [&] {
      if (!link_.is_coordinator()) return Bytes();
      staging_.emplace(destination, source_.path(), existing_of(options_));
      const std::string name = staging_->folder().string();
      return Bytes(name.begin(), name.end());
    }));
    const Bytes report = link_.agree_on(step, [&] {
      RankReport mine;
      mine.files = write_files(source_, plan_, fs::path(std::string(as_text(folder))), options_, tensor_bytes,
                               static_cast<std::size_t>(link_.rank()), static_cast<std::size_t>(link_.size()));
      return mine.encode();
    });
    const std::vector<Bytes> reports = link_.gather(report);
    link_.agree_on(step, [&] {
      if (!link_.is_coordinator()) return;
      Sidecar sidecar;
      for (const Bytes& one : reports) sidecar.files.merge(RankReport::decode(one).files.files);
      if (is_single_file(destination, options_.to)) {
        write_new_file(staging_->folder() / kSidecarFileName, write_file_sidecar(sidecar));
        staging_->commit_file(plan_.files.front().name, kSidecarFileName, std::string(kSidecarFileName));
      } else {
        commit_folder(*staging_, sidecar, options_);
      }
    });
  }

 private:
  const Checkpoint& source_;
  const OutputPlan& plan_;
  const ConvertOptions& options_;
  RankLink& link_;
  std::optional<Staging> staging_;  // on the coordinator
};

}  // namespace

std::uint64_t ConvertReport::file_bytes() const {
  return std::accumulate(files.begin(), files.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const OutputFile& file) { return sum + file.size_bytes; });
}

ConvertReport convert(const std::shared_ptr<const Checkpoint>& source, const fs::path& destination,
                      const ConvertOptions& options) {
  const bool single = is_single_file(destination, options.to);
  check_limits(destination, options);
  return run(source, destination, options, [&](const std::shared_ptr<const OutputSource>& output) {
    const std::string file_name = single ? destination.filename().string() : std::string();
    switch (options.to) {
      case SourceKind::dcp:
        return plan_dcp(output, layout_of_source(*output));
      case SourceKind::safetensors:
        return plan_safetensors_folder_or_file(output, file_name, options);
      case SourceKind::torch:
        return plan_torch(output, file_name);
      case SourceKind::torch_checkpointing:
        return plan_torch_checkpointing(output);
    }
    fail(ErrorCode::invalid_argument, "convert: destination format {}, expected a SourceKind",
         static_cast<int>(options.to));
  });
}

ConvertReport convert(const std::shared_ptr<const Checkpoint>& source, const fs::path& destination,
                      const ConvertOptions& options, RankLink& link) {
  if (link.size() == 1) return convert(source, destination, options);
  const std::string step = fmt::format("convert to {}", destination.string());
  std::shared_ptr<const OutputSource> output;
  OutputPlan plan;
  ConvertReport report = link.agree_on(step, [&] {
    if (options.to != SourceKind::safetensors) {
      fail(ErrorCode::unsupported, "{}: by several ranks to {}, expected safetensors", step,
           source_kind_name(options.to));
    }
    check_limits(destination, options);
    Staging::check_destination(destination, source->path(), existing_of(options));
    if (!options.expand) check_expansion(*source, options.selection);
    output = std::make_shared<const OutputSource>(source, options);
    plan = plan_safetensors_folder_or_file(
        output, is_single_file(destination, options.to) ? destination.filename().string() : "", options);
    ConvertReport planned = report_of(*output, plan);
    if (options.before_writing && link.is_coordinator()) options.before_writing(planned);
    return planned;
  });
  if (options.dry_run) return report;
  SharedConversion(*source, plan, options, link).run(destination, report.tensor_bytes, step);
  output->warn_of_elements_beyond_range();
  return report;
}

ConvertReport reshard(const std::shared_ptr<const Checkpoint>& source, const fs::path& destination,
                      const ReshardOptions& options) {
  if (options.ranks < 1 || options.ranks > kMaxRanks) {
    fail(ErrorCode::invalid_argument, "reshard: {} ranks, expected 1 to {}", options.ranks, kMaxRanks);
  }
  ReshardOptions dcp_options = options;
  dcp_options.to = SourceKind::dcp;
  return run(source, destination, dcp_options, [&](const std::shared_ptr<const OutputSource>& output) {
    return plan_dcp(output, layout_for_ranks(*output, dcp_options));
  });
}

}  // namespace tessera::checkpoint

#include "cli/command.h"

#include <algorithm>

namespace tessera::cli {

Program tessera_program(bool& show_version) {
  return {.summary = "Inspect, verify, convert, reshard and compare PyTorch checkpoints without Python.",
          .details =
              "Checkpoints are PyTorch's distributed checkpoints (DCP), directories of Meta's torch_checkpointing, "
              "files of "
              "torch.save, and safetensors, as single files or sharded. The format is detected.",
          .exit_statuses = {"Success; verify: no problem was found; diff: the checkpoints are equal.",
                            "verify, sum: the checkpoint is damaged; inspect --verify: a complete step is; diff: the "
                            "checkpoints differ; stats: found what --fail-on names; convert, reshard --check: the map "
                            "does not fit.",
                            "The command line is invalid.", "The operation failed; standard error has the reason."},
          .examples = {"tessera inspect step-1000", "tessera convert step-1000 model.safetensors --select 'model.*'"},
          .options = {{.name = "version", .help = "Print the version and exit", .target = &show_version}},
          .commands = {inspect_command(), stats_command(), show_command(), verify_command(), convert_command(),
                       reshard_command(), diff_command(), map_command(), sum_command(), prune_command(), plan_command(),
                       run_command()}};
}

std::string command_names(const Program& program) {
  std::string names;
  for (const Command& command : program.commands) {
    names += names.empty() ? "" : ", ";
    names += command.name;
  }
  return names;
}

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  while (!text.empty()) {
    words.emplace_back(text.substr(0, text.find(' ')));
    text.remove_prefix(std::min(text.size(), words.back().size() + 1));
  }
  return words;
}

Option checkpoint_argument(std::string_view name, std::string& path) {
  return {.name = name,
          .help = "Checkpoint: a directory or a single file",
          .target = &path,
          .positional = true,
          .required = true,
          .is_path = true};
}

Option json_option(bool& json) {
  return {.name = "json", .help = "Print JSON and nothing else on standard output", .target = &json};
}

Option no_checksums_option(bool& no_checksums) {
  return {.name = "no-checksums",
          .help = "Do not compare what is read with the sidecar: damage may be copied",
          .target = &no_checksums};
}

Option expand_option(bool& expand) {
  return {.name = "expand",
          .help = "Allow repeated elements to take more than 64 MiB and 16 times the files",
          .target = &expand};
}

Option quiet_option(bool& quiet) {
  return {.name = "quiet", .letter = 'q', .help = "Show no progress", .target = &quiet};
}

Option all_warnings_option(bool& all_warnings) {
  return {
      .name = "all-warnings", .help = "Print every warning, not only the first 5 of a kind", .target = &all_warnings};
}

Option jobs_option(std::int64_t& jobs) {
  return {.name = "jobs",
          .value_name = "N",
          .help = "Number of threads that read and write",
          .target = &jobs,
          .default_text = "one per processor",
          .range = Range{1, 1024}};
}

}  // namespace tessera::cli

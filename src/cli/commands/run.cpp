#include <fmt/format.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/output.h"
#include "tessera/base/launcher.h"

namespace tessera::cli {
namespace {

struct RunFlags {
  std::int64_t ranks = 1;
  std::string master_addr = "127.0.0.1";
  std::int64_t master_port = 0;
  bool no_prefix = false;
  std::vector<std::string> command;
};

int run(const RunFlags& flags) {
  LaunchOptions options;
  options.ranks = static_cast<int>(flags.ranks);
  options.command = flags.command;
  options.master_addr = flags.master_addr;
  options.master_port = static_cast<std::uint16_t>(flags.master_port);
  const std::size_t digits = fmt::to_string(flags.ranks - 1).size();
  options.output = [&](int rank, bool is_standard_error, std::string_view line) {
    std::string text = flags.no_prefix ? "" : fmt::format("[{:>{}}] ", rank, digits);
    text += line;
    if (!flags.no_prefix && text.back() != '\n') text += '\n';
    // An error is ignored: a reader that has left is no reason to end the training.
    static_cast<void>(write_all(is_standard_error ? STDERR_FILENO : STDOUT_FILENO, text));
  };
  const LaunchResult result = launch_ranks(options);
  if (result.rank < 0) return kYes;
  print_error(fmt::format("run: rank {} {}{}", result.rank, result.how,
                          flags.ranks > 1 ? "; the other ranks were terminated" : ""));
  return result.status;
}

}  // namespace

Command run_command() {
  const auto flags = std::make_shared<RunFlags>();
  return {.name = "run",
          .summary = "Run a program as several ranks on this machine.",
          .details =
              "Ranks find each other through RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun. "
              "If a rank fails, the others are terminated, and the exit status is that of the first that "
              "failed.",
          .examples = {"tessera run -n 4 -- ./train --steps 1000"},
          .options = {{.name = "ranks",
                       .letter = 'n',
                       .value_name = "N",
                       .help = "Number of ranks",
                       .target = &flags->ranks,
                       .required = true,
                       .range = Range{1, 4096}},
                      {.name = "master-addr",
                       .value_name = "HOST",
                       .help = "Address on which rank 0 listens",
                       .target = &flags->master_addr,
                       .default_text = "127.0.0.1"},
                      {.name = "master-port",
                       .value_name = "PORT",
                       .help = "Port on which rank 0 listens",
                       .target = &flags->master_port,
                       .default_text = "a free one",
                       .range = Range{1, 65535}},
                      {.name = "no-prefix",
                       .help = "Pass on the output of ranks without their numbers in front",
                       .target = &flags->no_prefix},
                      {.name = "COMMAND",
                       .help = "Program, and all arguments after it as its own",
                       .target = &flags->command,
                       .positional = true,
                       .required = true,
                       .is_path = true,
                       .takes_rest = true}},
          .run = [flags](Session&) { return run(*flags); }};
}

}  // namespace tessera::cli

#include <fmt/format.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "cli/command.h"
#include "tessera/base/launcher.h"

namespace tessera::cli {
namespace {

struct Flags {
  int ranks = 1;
  std::string master_addr = "127.0.0.1";
  std::uint16_t master_port = 0;
  bool no_prefix = false;
  std::vector<std::string> command;
};

// As much as can be written; who no longer listens is no reason to end a training.
void write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

int run(const Flags& flags) {
  LaunchOptions options;
  options.ranks = flags.ranks;
  options.command = flags.command;
  options.master_addr = flags.master_addr;
  options.master_port = flags.master_port;
  const std::size_t digits = fmt::formatted_size("{}", flags.ranks - 1);
  options.output = [&](int rank, bool is_standard_error, std::string_view line) {
    std::string text = flags.no_prefix ? "" : fmt::format("[{:>{}}] ", rank, digits);
    text += line;
    if (!flags.no_prefix && text.back() != '\n') text += '\n';
    write_all(is_standard_error ? STDERR_FILENO : STDOUT_FILENO, text);
  };
  const LaunchResult result = launch_ranks(options);
  if (result.rank < 0) return kYes;
  print_error(
      fmt::format("run: rank {} {}{}", result.rank, result.how, flags.ranks > 1 ? "; the others were ended" : ""));
  return result.status;
}

}  // namespace

Command add_run(CLI::App& parent) {
  auto flags = std::make_shared<Flags>();
  CLI::App* app = parent.add_subcommand("run", "Run a program as several ranks on this machine");
  app->add_option("-n,--ranks", flags->ranks, "How many ranks")->required()->check(CLI::Range(1, 4096))->type_name("N");
  app->add_option("--master-addr", flags->master_addr, "Where rank 0 listens (default: 127.0.0.1)")->type_name("HOST");
  app->add_option("--master-port", flags->master_port, "The port for that (default: one that is free)")
      ->check(CLI::Range(1, 65535))
      ->type_name("PORT");
  app->add_flag("--no-prefix", flags->no_prefix, "Pass on what ranks write without their number in front");
  app->add_option("COMMAND", flags->command, "The program and its arguments, behind --")->required();
  app->footer(
      "Ranks find each other through RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun.\n"
      "When one fails, the others are ended, and the exit status is that of the first that failed.\n\n"
      "Example:\n"
      "  tessera run -n 4 -- ./train --steps 1000");
  return {app, [flags](Session&) { return run(*flags); }};
}

}  // namespace tessera::cli

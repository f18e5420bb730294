// The command: registers the subcommands, runs the one that was asked for, and turns every outcome into an exit status.

#include <fmt/format.h>

#include <CLI/Error.hpp>
#include <algorithm>
#include <exception>
#include <filesystem>
#include <memory>
#include <new>
#include <string_view>
#include <vector>

#include "cli/command.h"
#include "cli/help_formatter.h"
#include "cli/interruption.h"
#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

std::string names_of(const std::vector<Command>& commands) {
  std::string names;
  for (const Command& command : commands) names += (names.empty() ? "" : ", ") + command.app->get_name();
  return names;
}

// The first argument that is no flag must be a command; CLI11 would say less about one that isn't.
void check_command_name(int argc, char** argv, const std::vector<Command>& commands) {
  const auto last = argv + argc;
  const auto word = std::find_if(argv + 1, last, [](const char* argument) { return *argument != '-'; });
  if (word == last) {
    const bool has_flag = argc > 1;
    if (!has_flag) throw UsageError(fmt::format("no command given; there are {}", names_of(commands)));
    return;
  }
  const std::string_view name = *word;
  const auto is_it = [&](const Command& command) { return command.app->get_name() == name; };
  if (std::none_of(commands.begin(), commands.end(), is_it)) {
    throw UsageError(fmt::format("unknown command '{}'; there are {}", name, names_of(commands)));
  }
}

const Command* parsed_command(const std::vector<Command>& commands) {
  const auto found = std::find_if(commands.begin(), commands.end(), [](const Command& c) { return c.app->parsed(); });
  return found == commands.end() ? nullptr : &*found;
}

int usage_failure(std::string_view message, const std::vector<Command>& commands) {
  const Command* command = parsed_command(commands);
  const std::string name = command == nullptr ? "" : command->app->get_name();
  print_error(fmt::format("{}{}{} (see 'tessera {}{}--help')", name, name.empty() ? "" : ": ", message, name,
                          name.empty() ? "" : " "));
  return kUsage;
}

int run(int argc, char** argv) {
  Session session(watch_signals());
  CLI::App app("Inspects, verifies, converts, reshards and compares checkpoints of PyTorch, without Python", "tessera");
  app.formatter(std::make_shared<HelpFormatter>());
  bool version = false;
  app.add_flag("--version", version, "Print the version");
  app.require_subcommand(0, 1);
  app.footer(
      "'tessera COMMAND --help' says more.\n"
      "Exit status: 0 yes or done, 1 the answer is no, 2 usage, 3 it could not be done.\n\n"
      "Examples:\n"
      "  tessera inspect step-1000\n"
      "  tessera convert step-1000 model.safetensors --select 'model.*'");
  const std::vector<Command> commands = {add_inspect(app), add_verify(app), add_convert(app), add_reshard(app),
                                         add_diff(app),    add_map(app),    add_plan(app),    add_run(app)};
  try {
    check_command_name(argc, argv, commands);
    app.parse(argc, argv);
    const Command* command = parsed_command(commands);
    if (version) {
      session.out.print("tessera {}\n", TESSERA_VERSION);
      session.out.flush();
      return kYes;
    }
    if (command == nullptr) throw UsageError(fmt::format("no command given; there are {}", names_of(commands)));
    const int status = command->run(session);
    session.out.flush();
    return status;
  } catch (const CLI::CallForHelp&) {
    const Command* command = parsed_command(commands);
    session.out.write(command == nullptr ? app.help() : command->app->help(app.get_name()));
    session.out.flush();
    return kYes;
  } catch (const CLI::ParseError& error) {
    return usage_failure(error.what(), commands);
  } catch (const UsageError& error) {
    return usage_failure(error.what(), commands);
  }
}

int run_and_report(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const ClosedPipe&) {
    return kFailed;
  } catch (const Error& error) {
    print_error(error.code() == ErrorCode::cancelled ? "interrupted" : error.what());
  } catch (const std::bad_alloc&) {
    print_error("out of memory");
  } catch (const std::filesystem::filesystem_error& error) {
    print_error(fmt::format("{}: {}", error.path1().string(), error.code().message()));
  } catch (const std::exception& error) {
    print_error(fmt::format("internal error: {}", error.what()));
  }
  return kFailed;
}

}  // namespace
}  // namespace tessera::cli

int main(int argc, char** argv) {
  tessera::cli::occupy_standard_streams();
  return tessera::cli::run_and_report(argc, argv);
}

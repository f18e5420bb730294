// The command: runs the subcommand that is named and turns every outcome into an exit status.

#include <fmt/format.h>

#include <exception>
#include <filesystem>
#include <new>
#include <string_view>

#include "cli/command.h"
#include "cli/interruption.h"
#include "cli/parser.h"
#include "cli/session.h"
#include "cli/text/help.h"
#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

int usage_failure(std::string_view message, const Command* command) {
  const std::string_view name = command == nullptr ? "" : command->name;
  print_error(fmt::format("{}{}{} (see 'tessera {}{}--help')", name, name.empty() ? "" : ": ", message, name,
                          name.empty() ? "" : " "));
  return kUsage;
}

int run(int argc, char** argv) {
  Session session(watch_signals());
  bool show_version = false;
  const Program program = tessera_program(show_version);
  const CommandLine line = parse(program, argc, argv);
  if (!line.error.empty()) return usage_failure(line.error, line.command);
  int status = kYes;
  if (line.wants_help) {
    session.out.write(line.command == nullptr ? program_help(program) : command_help(*line.command));
  } else if (show_version) {
    session.out.print("tessera {}\n", TESSERA_VERSION);
  } else if (line.command == nullptr) {
    return usage_failure("no command given, expected one of " + command_names(program), nullptr);
  } else {
    try {
      status = line.command->run(session);
    } catch (const UsageError& error) {
      return usage_failure(error.what(), line.command);
    }
  }
  session.out.flush();
  return status;
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

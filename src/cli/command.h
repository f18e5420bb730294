#pragma once
// A command of `tessera` as plain data: its options, its texts, and the function that runs it. The parser, the help
// texts, the man pages and the shell completions are all made from these tables. Texts are literals.

#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tessera::cli {

struct Session;

enum ExitStatus : int { kYes = 0, kNo = 1, kUsage = 2, kFailed = 3 };

// Options that contradict each other or the rest of the command line.
class UsageError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where the parser stores a value. The type is the option's kind: a flag, a string, a number, or a list of either.
// A variable keeps its initial value if the option is not given.
using Target = std::variant<bool*, std::string*, std::int64_t*, std::vector<std::string>*, std::vector<std::int64_t>*>;

// Inclusive.
struct Range {
  std::int64_t min = 0, max = 0;
};

struct Option {
  std::string_view name{};        // "jobs" for --jobs; for a positional argument the name in the usage line, "CKPT"
  char letter = '\0';             // 'o' for -o; none by default
  std::string_view value_name{};  // of an option that is not a flag: "N"
  std::string_view help{};        // a phrase without a period
  Target target{};
  bool positional = false;
  bool required = false;
  bool is_path = false;             // not empty; shells complete file names; "-" only for options
  bool takes_rest = false;          // a positional list: takes all arguments from its first on, options too
  std::string_view default_text{};  // for the help text only
  std::string_view choices{};       // if not empty, the words that are accepted, separated by spaces
  // The numbers that are accepted; all if it is not set. Law: it is within what the operation accepts, so that a number
  // that no checkpoint makes valid is a UsageError with the range.
  std::optional<Range> range{};
  std::size_t max_count = 0;     // of a list of numbers, separated by commas
  std::string_view conflicts{};  // names of options that cannot be given together with this one, separated by spaces

  bool is_list() const { return std::holds_alternative<std::vector<std::string>*>(target); }
};

struct Command {
  std::string_view name{};
  std::string_view summary{};  // one sentence
  std::string_view details{};  // a paragraph; lines are filled when printed
  std::vector<std::string_view> examples{};
  std::vector<Option> options{};
  std::string_view alias{};            // another name of the command
  std::function<int(Session&)> run{};  // returns the exit status: an ExitStatus, or that of the program that `run` ran
};

// Each makes its command. What the options are bound to is owned by `run`.
Command inspect_command();
Command stats_command();
Command show_command();
Command verify_command();
Command sum_command();
Command prune_command();
Command convert_command();
Command reshard_command();
Command diff_command();
Command map_command();
Command plan_command();
Command run_command();

// All commands, in the order of the help text, and what --help prints around them.
struct Program {
  std::string_view summary;
  std::string_view details;
  std::vector<std::string_view> exit_statuses;  // of 0, 1, ...
  std::vector<std::string_view> examples;
  std::vector<Option> options;
  std::vector<Command> commands;
};

// `show_version` is where --version is stored.
Program tessera_program(bool& show_version);

// "inspect, verify, ..."
std::string command_names(const Program& program);

// The words of a text, which single spaces separate.
std::vector<std::string> words_of(std::string_view text);

// Options that mean the same in every command.
Option checkpoint_argument(std::string_view name, std::string& path);
Option json_option(bool& json);
Option jobs_option(std::int64_t& jobs);
Option no_checksums_option(bool& no_checksums);
Option expand_option(bool& expand);
Option quiet_option(bool& quiet);
Option all_warnings_option(bool& all_warnings);

}  // namespace tessera::cli

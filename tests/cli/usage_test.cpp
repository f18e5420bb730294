// An invalid command line gives exit status 2 and one line on standard error. Help is not an error.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <regex>
#include <set>
#include <sstream>

#include "cli/command.h"
#include "support/paths.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

const std::vector<std::string> kCommands = {"inspect", "stats", "show", "verify", "convert", "reshard",
                                            "diff",    "map",   "sum",  "prune",  "plan",    "run"};

void expect_usage_error(const std::vector<std::string>& arguments, const std::string& message) {
  const Outcome outcome = run_tessera(arguments);
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.out, "");
  EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr(message));
}

TEST(UsageTest, VersionIsOneLine) {
  const Outcome outcome = run_tessera({"--version"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_THAT(outcome.out, ::testing::MatchesRegex("tessera [0-9]+\\.[0-9]+\\.[0-9]+\n"));
  EXPECT_EQ(outcome.err, "");
}

TEST(UsageTest, HelpListsEveryCommand) {
  const Outcome outcome = run_tessera({"--help"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err, "");
  for (const std::string& command : kCommands) EXPECT_THAT(outcome.out, HasSubstr("  " + command));
}

TEST(UsageTest, EveryCommandHasHelpWithAnExample) {
  for (const std::string& command : kCommands) {
    const Outcome outcome = run_tessera({command, "--help"});
    EXPECT_EQ(outcome.status, 0);
    EXPECT_THAT(outcome.out, HasSubstr("Example"));
    EXPECT_THAT(outcome.out, HasSubstr("tessera " + command + " "));
    EXPECT_EQ(outcome.err, "");
  }
}

TEST(UsageTest, HelpFitsAHundredColumnsAndSaysWhatItIs) {
  std::vector<std::vector<std::string>> all = {{"--help"}};
  for (const std::string& command : kCommands) all.push_back({command, "--help"});
  for (const std::vector<std::string>& arguments : all) {
    const std::string help = run_tessera(arguments).out;
    std::istringstream lines(help);
    std::string first, second;
    std::getline(lines, first);
    std::getline(lines, second);
    EXPECT_THAT(first, ::testing::ContainsRegex("^[A-Z].{10}")) << help;
    EXPECT_THAT(second, HasSubstr(arguments.size() == 1 ? "Usage: tessera [" : "Usage: tessera " + arguments[0] + " "));
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << line;
  }
}

TEST(UsageTest, NoCommandListsTheCommands) {
  expect_usage_error(
      {},
      "no command given, expected one of inspect, stats, show, verify, convert, reshard, diff, map, sum, prune, plan, "
      "run");
}

TEST(UsageTest, UnknownCommandListsTheCommands) {
  expect_usage_error({"inspekt", "x"},
                     "unknown command 'inspekt', expected one of inspect, stats, show, verify, convert, reshard, diff, "
                     "map, sum, prune, plan, run");
  expect_usage_error({"plan"}, "--ranks is required");
  expect_usage_error({"plan", "--ranks", "2", "--tensors", "3", "--shard", "x"}, "--shard: 'x', expected a dimension");
}

TEST(UsageTest, UnknownCommandNameIsPrintedHarmlessly) {
  expect_usage_error({"a\nb\x1b[2J"}, "unknown command 'a b\\x1b[2J'");
}

TEST(UsageTest, UnknownFlagIsNamed) {
  expect_usage_error({"--frobnicate"}, "--frobnicate");
  for (const std::string& command : kCommands) {
    expect_usage_error({command, "--frobnicate"}, "(see 'tessera " + command + " --help')");
  }
}

TEST(UsageTest, HelpOfACommandIsThatOfItsOption) {
  EXPECT_EQ(run_tessera({"help"}).out, run_tessera({"--help"}).out);
  for (const std::string& command : kCommands) {
    const Outcome outcome = run_tessera({"help", command});
    EXPECT_EQ(outcome.status, 0);
    EXPECT_EQ(outcome.out, run_tessera({command, "--help"}).out);
  }
  EXPECT_EQ(run_tessera({"help", "ls"}).out, run_tessera({"inspect", "--help"}).out);
  expect_usage_error({"help", "inspekt"}, "unknown command 'inspekt'");
}

// A new command must have both, or be named here.
TEST(UsageTest, ProgressAndWarningsHaveTheirOptionsInEveryCommand) {
  const std::set<std::string> without_progress = {"map", "plan", "prune", "run"};
  const std::set<std::string> without_warnings = {"plan", "prune", "run", "sum"};
  for (const std::string& command : kCommands) {
    const std::string help = run_tessera({command, "--help"}).out;
    const auto has = [&](const char* option) { return help.find(option) != std::string::npos; };
    EXPECT_EQ(has("-q, --quiet "), !without_progress.contains(command)) << help;
    EXPECT_EQ(has("--all-warnings "), !without_warnings.contains(command)) << help;
  }
}

TEST(UsageTest, SimilarNamesAreSuggested) {
  expect_usage_error({"inspekt", "x"}, "; did you mean 'inspect'?");
  expect_usage_error({"verify", "x", "--jsn"}, "unknown option '--jsn'; did you mean '--json'");
  expect_usage_error({"convert", "a", "b.pt", "--dtyp=bf16"}, "unknown option '--dtyp'; did you mean '--dtype'");
  expect_usage_error({"convert", "a", "b.pt", "--dtype", "bfloat61"}, "did you mean 'bfloat16'");
  EXPECT_THAT(run_tessera({"frobnicate"}).err, ::testing::Not(HasSubstr("did you mean")));
}

TEST(UsageTest, ShortNamesOfDtypesAreKnown) {
  const TemporaryDirectory folder;
  for (const char* name : {"bf16", "fp16", "fp32", "fp64", "bfloat16"}) {
    EXPECT_EQ(run_tessera({"convert", golden("2.14-optim"), folder / "a.pt", "--dtype", name, "--dry-run"}).status, 0);
  }
  const Outcome shown = run_tessera({"show", golden("2.14-optim"), "model.0.weight", "--dtype", "bf16"});
  EXPECT_EQ(shown.status, 0) << shown.err;
  expect_usage_error({"convert", "a", "b.pt", "--dtype", "fp8"}, "'fp8' names several dtypes, expected float8_e4m3fn");
}

TEST(UsageTest, AMeasurementThatNeedsTooMuchMemoryIsRefused) {
  expect_usage_error({"plan", "--ranks", "1000000", "--tensors", "1000000"}, "1.0e+12 items take about 118.2 TiB");
  expect_usage_error({"plan", "--ranks", "1000000", "--tensors", "1000000"}, "--large measures them all the same");
}

TEST(UsageTest, MissingArgumentsAreNamed) {
  expect_usage_error({"inspect"}, "CKPT is required");
  expect_usage_error({"verify"}, "CKPT is required");
  expect_usage_error({"convert"}, "is required");
  expect_usage_error({"convert", "a"}, "DST is required");
  expect_usage_error({"diff", "a"}, "B is required");
  expect_usage_error({"map", golden("2.14-optim")}, "--output is required");
}

TEST(UsageTest, SurplusArgumentsAreNamed) {
  expect_usage_error({"verify", "a", "b"}, "b");
  expect_usage_error({"diff", "a", "b", "c"}, "unexpected argument 'c', expected only A B");
  expect_usage_error({"verify", "a", "verify"}, "unexpected argument 'verify', expected only CKPT");
  expect_usage_error({"verify", "a", "++"}, "unexpected argument '++'");
  expect_usage_error({"plan", "--ranks", "2", "--tensors", "3", "plan"},
                     "unexpected argument 'plan', expected only options");
}

TEST(UsageTest, AnOptionTakesNoOtherForItsValue) {
  const std::string source = golden("2.14-optim");
  expect_usage_error({"map", source, "--output=", "--force"}, "--output: the path is empty");
  expect_usage_error({"convert", "a", "b.pt", "--dtype=", "--dry-run"}, "--dtype: the value is empty, expected one");
  for (const auto& [option, message] : {std::pair("--jobs=", "--jobs: the value is empty, expected one"),
                                        std::pair("--jobs", "--jobs: found no value, expected one")}) {
    expect_usage_error({"verify", "a", option, "--json"}, message);
    expect_usage_error({"verify", "a", option}, message);
  }
  expect_usage_error({"verify", "--jobs", "--", "a"}, "--jobs: found no value, expected one");
}

TEST(UsageTest, LettersOfOptionsAreGrouped) {
  const TemporaryDirectory folder;
  EXPECT_EQ(run_tessera({"map", golden("2.14-optim"), "-o" + (folder / "map.html").string()}).status, 0);
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"map.html"});
  EXPECT_EQ(run_tessera({"verify", golden("2.14-optim"), "-qq"}).status, 0);
  expect_usage_error({"verify", golden("2.14-optim"), "-qx"}, "unknown option '-x'");
}

TEST(UsageTest, ADashIsNoLetterOfAnOption) {
  for (const std::string option : {"-q-json", "-q-", "-q--"}) {
    expect_usage_error({"verify", golden("2.14-optim"), option}, "unknown option '-' in '" + option + "'");
  }
}

TEST(UsageTest, AnOptionOfACommandFollowsIt) {
  expect_usage_error({"--json", "inspect", "x"},
                     "tessera: '--json' stands before the command, expected it after 'inspect' (see 'tessera --help')");
  expect_usage_error({"--jobs=2", "verify", "x"}, "'--jobs=2' stands before the command, expected it after 'verify'");
  expect_usage_error({"-q", "verify", "x"}, "'-q' stands before the command, expected it after 'verify'");
  expect_usage_error({"--frob", "verify", "x"}, "tessera: unknown option '--frob' (see 'tessera --help')");
  EXPECT_EQ(run_tessera({"--help", "verify"}).out, run_tessera({"verify", "--help"}).out);
}

TEST(UsageTest, TheValueOfAnOptionBeforeTheCommandIsNoCommand) {
  expect_usage_error({"--jobs", "4", "verify", "x"}, "'--jobs' stands before the command, expected it after 'verify'");
  expect_usage_error({"--json", "--depth", "2", "ls", "x"}, "'--json' stands before the command, expected it after");
  expect_usage_error({"-n", "4", "run", "true"}, "'-n' stands before the command, expected it after 'run'");
  expect_usage_error({"--dim", "1o", "map", "x"}, "tessera: unknown option '--dim' (see 'tessera --help')");
  expect_usage_error({"--frob", "4", "verify", "x"}, "tessera: unknown option '--frob'");
  expect_usage_error({"--jobs", "4"}, "tessera: unknown option '--jobs'");
  expect_usage_error({"--jobs", "4", "inspekt", "x"}, "unknown command 'inspekt'");
  EXPECT_EQ(run_tessera({"--jobs", "4", "help", "verify"}).out, run_tessera({"verify", "--help"}).out);
  for (const std::string option : {"--jobs=2", "-n2", "-q", "--version", "--help", "-h", "--"}) {
    expect_usage_error({option, "44", "verify", "x"}, "unknown command '44'");
  }
}

TEST(UsageTest, FormatMustBeKnown) {
  expect_usage_error({"convert", "a", "b", "--to", "onnx"}, "onnx");
  expect_usage_error({"convert", "a", "b"}, "--to is required: 'b' does not end in .safetensors, .pt, .pth or .bin");
}

TEST(UsageTest, NumbersAreChecked) {
  expect_usage_error({"verify", "a", "--jobs", "0"}, "--jobs");
  expect_usage_error({"verify", "a", "--jobs", "many"}, "--jobs");
  expect_usage_error({"reshard", "a", "b", "--ranks", "0"}, "--ranks");
  expect_usage_error({"reshard", "a", "b", "--ranks", "-2"}, "--ranks");
  expect_usage_error({"reshard", "a", "b", "--ranks", "2", "--dim", "first"},
                     "--dim: 'first', expected a 64-bit integer");
  expect_usage_error({"plan", "--ranks", "2", "--tensors", "2", "--shape", "4,x"},
                     "--shape: 'x', expected a number from 1 to 9223372036854775807");
  for (const std::string shape : {"4,,4", ",4", "4,"}) {
    expect_usage_error({"plan", "--ranks", "2", "--tensors", "2", "--shape", shape}, "--shape: '', expected a number");
  }
  expect_usage_error({"plan", "--ranks", "2", "--tensors", "2", "--shape", "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1"},
                     "--shape: 17 numbers, expected at most 16");
  expect_usage_error({"plan", "--ranks", "2", "--tensors", "2", "--files", "-1"},
                     "--files: '-1', expected a number from 0");
  expect_usage_error({"verify", "a", "--jobs", "99999999999999999999"}, "expected a number from 1 to 1024");
}

// Every option that the help texts show with a number must be here.
TEST(UsageTest, ANumberOutOfItsRangeIsAnErrorThatStatesTheRange) {
  struct Case {
    std::vector<std::string> command;  // with all options that are required
    std::string option;
    std::int64_t least = 0;
    std::uint64_t most = 0;
  };
  const std::vector<std::string> plan = {"plan", "--ranks=2", "--tensors=2"};
  std::vector<Case> cases = {{{"inspect", "x", "--du"}, "depth", 1, 64},
                             {{"reshard", "x", "y"}, "ranks", 1, 1 << 20},
                             {{"prune", "x"}, "keep", 1, INT32_MAX},
                             {{"prune", "x", "--keep=1"}, "every", 1, INT64_MAX},
                             {{"plan", "--tensors=2"}, "ranks", 1, 1 << 24},
                             {{"plan", "--ranks=2"}, "tensors", 1, 1 << 24},
                             {plan, "shape", 1, INT64_MAX},
                             {plan, "files", 0, 1 << 20},
                             {{"run", "true"}, "ranks", 1, 4096},
                             {{"run", "--ranks=1", "true"}, "master-port", 1, 65535}};
  for (const std::string command : {"inspect", "stats", "verify", "convert", "reshard", "sum"}) {
    cases.push_back({{command, "x"}, "jobs", 1, 1024});
  }
  cases.push_back({{"diff", "x", "y"}, "jobs", 1, 1024});
  std::set<std::string> checked, shown;
  for (const Case& one : cases) {
    checked.insert(one.command[0] + " --" + one.option);
    for (const std::string& number : {std::to_string(one.least - 1), std::to_string(one.most + 1)}) {
      std::vector<std::string> arguments = one.command;
      arguments.insert(arguments.begin() + 1, "--" + one.option + "=" + number);
      expect_usage_error(arguments, "--" + one.option + ": '" + number + "', expected a number from " +
                                        std::to_string(one.least) + " to " + std::to_string(one.most));
    }
  }
  const std::regex option("\n  (?:-., )?(--[a-z-]+) (?:N|K|PORT|N,N,\\.\\.\\.)(?= |\n)");
  for (const std::string& command : kCommands) {
    const std::string help = run_tessera({command, "--help"}).out;
    for (std::sregex_iterator found(help.begin(), help.end(), option), end; found != end; ++found) {
      shown.insert(command + " " + found->str(1));
    }
  }
  EXPECT_EQ(shown, checked);
}

TEST(UsageTest, PlanRefusesDimensionsAndSizesOutOfTheirRange) {
  const auto plan = [](const std::string& option) {
    return std::vector<std::string>{"plan", "--ranks=2", "--tensors=4", "--files=1", option};
  };
  for (const std::string dim : {"2", "-3", "x", "9223372036854775808"}) {
    expect_usage_error(plan("--shard=" + dim), "--shard: '" + dim + "', expected a dimension from -2 to 1 or 'repl");
  }
  EXPECT_EQ(run_tessera(plan("--shard=-2")).status, 0);
  // 4 tensors of 2^58 float32 have 2^62 bytes.
  EXPECT_EQ(run_tessera(plan("--shape=288230376151711744")).status, 0);
  expect_usage_error(plan("--shape=576460752303423488"),
                     "--shape: 4 tensors of [576460752303423488] have 9.2e+18 bytes, expected at most 4.6e+18");
  expect_usage_error(plan("--shape=9223372036854775807,9223372036854775807"), "expected at most 4.6e+18");
}

TEST(UsageTest, SizesAreChecked) {
  for (const std::string size : {"", "big", "5 apples", "-1", "0", "0.1", "1e400", "99999999TB", "nan", "inf"}) {
    expect_usage_error({"convert", "a", "b.pt", "--max-shard-size=" + size}, size.empty() ? "max-shard-size" : size);
  }
}

TEST(UsageTest, SelectionMustFindSomething) {
  const std::string source = golden("2.14-optim");
  const TemporaryDirectory folder;
  for (const std::vector<std::string>& command :
       std::vector<std::vector<std::string>>{{"convert", source, folder / "a.pt"},
                                             {"reshard", source, folder / "ck", "--ranks", "2"},
                                             {"diff", source, source}}) {
    const auto with = [&](const std::vector<std::string>& flags) {
      std::vector<std::string> arguments = command;
      arguments.insert(arguments.end(), flags.begin(), flags.end());
      return arguments;
    };
    expect_usage_error(with({"--select", "nope.*"}), "--select: no name matches 'nope.*'");
    expect_usage_error(with({"--select", "model.*", "--select", "modle.0"}), "--select: no name matches 'modle.0'");
    expect_usage_error(with({"--exclude", "*"}), "--select and exclude leave nothing");
    EXPECT_EQ(run_tessera(with({"--select", "model.*", "--exclude", "nope", "--jobs", "1"})).status, 0);
  }
}

TEST(UsageTest, PathsAreNotEmptyAndCheckpointsAreNotStreams) {
  expect_usage_error({"map", golden("2.14-optim"), "-o", ""}, "--output: the path is empty");
  // With all that the command requires: versions of CLI11 differ in which of two errors they give.
  const std::vector<std::pair<std::string, std::vector<std::string>>> commands = {
      {"inspect", {}}, {"stats", {}}, {"verify", {}}, {"map", {"--output", "page.html"}}, {"sum", {}}, {"ls", {}}};
  for (const auto& [command, required] : commands) {
    for (const auto& [path, message] : {std::pair("", "the path is empty"), std::pair("-", "'-', expected a path")}) {
      std::vector<std::string> arguments = {command, path};
      arguments.insert(arguments.end(), required.begin(), required.end());
      expect_usage_error(arguments, message);
    }
  }
  expect_usage_error({"convert", golden("2.14-optim"), "-", "--to", "torch"}, "DST: '-', expected a path");
  EXPECT_THAT(run_tessera({"map", golden("2.14-optim"), "-o", "-"}).out, ::testing::StartsWith("<!doctype html>"));
}

TEST(UsageTest, ArgumentsThatBeginWithADashFollowTwoDashes) {
  const TemporaryDirectory folder;
  std::filesystem::copy(golden("2.14-optim"), folder / "-dash");
  const auto in_folder = [&](const std::string& arguments) {
    return run_program({"bash", "-c", "cd \"$1\" && \"$0\" " + arguments, command_path(), folder.path()});
  };
  EXPECT_EQ(in_folder("verify -- -dash").status, 0);
  const Outcome name = in_folder("inspect -- -dash --json");
  EXPECT_EQ(name.status, 3);
  EXPECT_THAT(name.err, HasSubstr("no tensor or object is named '--json'"));
  const Outcome without = in_folder("verify -dash");
  EXPECT_EQ(without.status, 2);
  EXPECT_THAT(without.err, HasSubstr("unknown option '-dash'; expected '--' before arguments that begin with '-'"));
  EXPECT_EQ(in_folder("diff -- -dash -dash").status, 0);
  EXPECT_EQ(in_folder("inspect -- -dash").status, 0);
  EXPECT_EQ(in_folder("stats -- -dash").status, 0);
  for (const char* names : {"-- -w", "model.0.weight -- -w", "-- model.0.weight -w"}) {
    EXPECT_THAT(in_folder(std::string("inspect ./-dash ") + names).err, HasSubstr("no tensor or object is named '-w'"));
  }
  EXPECT_THAT(in_folder("inspect -- -dash --").err, HasSubstr("no tensor or object is named '--'"));
  expect_usage_error({"verify", "x", "--jobs", "--frob"}, "unknown option '--frob'");
  const Outcome value = in_folder("diff --atol -1 -- -dash -dash");
  EXPECT_THAT(value.err, HasSubstr("--atol: '-1', expected a finite number of at least 0"));
}

TEST(UsageTest, DtypeMustBeOne) {
  expect_usage_error({"convert", "a", "b.pt", "--dtype", "float33"}, "PyTorch has no dtype 'float33'");
}

TEST(UsageTest, ReshardNeedsAGoal) {
  expect_usage_error({"reshard", "a", "b"}, "either --ranks or --like is required");
  expect_usage_error({"reshard", "a", "b", "--ranks", "2", "--like", "c"}, "excludes");
}

}  // namespace
}  // namespace tessera::testing

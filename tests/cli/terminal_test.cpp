// Standard output as a terminal: no line wraps, and attributes are used if the terminal has them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "cli/command.h"
#include "support/safetensors_file.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// The lines without the line ends of the terminal.
std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    while (!line.empty() && line.back() == '\r') line.pop_back();
    lines.push_back(line);
  }
  return lines;
}

std::size_t characters(const std::string& line) {
  return static_cast<std::size_t>(std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

Conditions terminal(unsigned short columns, const std::string& no_color = "1", const std::string& term = "xterm") {
  Conditions conditions;
  conditions.terminal_columns = columns;
  conditions.environment = {{"NO_COLOR", no_color}, {"TERM", term}};
  return conditions;
}

class TerminalTest : public ::testing::TestWithParam<unsigned short> {};

TEST_P(TerminalTest, NoLineIsWiderThanTheTerminal) {
  const TemporaryDirectory folder;
  for (const std::vector<std::string>& command :
       std::vector<std::vector<std::string>>{{"inspect", "."},
                                             {"inspect", ".", "model.head.weight"},
                                             {"inspect", ".", "--tree"},
                                             {"stats", "."},
                                             {"show", ".", "model.head.weight", "--all"},
                                             {"verify", "."},
                                             {"diff", ".", golden("2.14-optim")},
                                             {"convert", ".", folder / "a.pt"},
                                             {"reshard", ".", folder / "ck", "--ranks", "3", "--dry-run"}}) {
    for (const std::string& checkpoint : {demo(), golden("2.6-dtensor"), golden("2.14-hf")}) {
      if (checkpoint != demo() && command.size() > 2) continue;
      std::vector<std::string> arguments = command;
      arguments[1] = checkpoint;
      // Only the path as given may be longer.
      for (const std::string& line : lines_of(run_tessera(arguments, terminal(GetParam())).out)) {
        if (line.find('/') != std::string::npos) continue;
        EXPECT_LE(characters(line), GetParam()) << command[0] << ": " << line;
      }
    }
  }
}

TEST_P(TerminalTest, NamesAreCutInTheMiddleAndColumnsStayAligned) {
  const Outcome outcome = run_tessera({"inspect", demo()}, terminal(GetParam()));
  const std::vector<std::string> lines = lines_of(outcome.out);
  ASSERT_GT(lines.size(), 50u);
  EXPECT_THAT(lines[2], ::testing::StartsWith("TENSOR "));
  const std::size_t dtype = lines[2].find("DTYPE");
  for (std::size_t i = 3; i < 51; ++i) {
    EXPECT_EQ(lines[i].find("float32"), dtype) << lines[i];
    EXPECT_THAT(lines[i].substr(0, dtype), ::testing::ContainsRegex("(weight|exp_avg|exp_avg_sq|step) *$"));
  }
}

INSTANTIATE_TEST_SUITE_P(Columns, TerminalTest, ::testing::Values(80, 120),
                         [](const auto& columns) { return std::to_string(columns.param); });

TEST(AttributesTest, OnlyOnATerminalThatKnowsThemAndWithoutNoColor) {
  const std::vector<std::string> command = {"inspect", golden("2.14-optim")};
  EXPECT_THAT(run_tessera(command, terminal(120, "", "xterm")).out, HasSubstr("\x1b[1m"));
  EXPECT_THAT(run_tessera(command, terminal(120, "1", "xterm")).out, Not(HasSubstr("\x1b")));
  EXPECT_THAT(run_tessera(command, terminal(120, "", "dumb")).out, Not(HasSubstr("\x1b")));
  EXPECT_THAT(run_tessera(command).out, Not(HasSubstr("\x1b")));
  const auto forced = [&](const std::string& force, const std::string& no_color) {
    Conditions conditions;
    conditions.environment = {{"CLICOLOR_FORCE", force}, {"NO_COLOR", no_color}};
    return run_tessera(command, conditions).out;
  };
  EXPECT_THAT(forced("1", ""), HasSubstr("\x1b[1m"));
  EXPECT_THAT(forced("0", ""), Not(HasSubstr("\x1b")));
  EXPECT_THAT(forced("1", "1"), Not(HasSubstr("\x1b")));
}

TEST(AttributesTest, AreNotSplitWhereANameIsWrapped) {
  const TemporaryDirectory folder;
  SafetensorsFile file;
  for (std::size_t length = 66; length < 82; ++length) {
    file.add<float>(std::string(length, 'n'), DType::float32, {1}, {1});
  }
  file.write(folder / "x.safetensors");
  for (const safetensors::Tensor& tensor : file.tensors) {
    const Outcome shown = run_tessera({"show", folder / "x.safetensors", tensor.name}, terminal(80, ""));
    std::string plain = shown.out;
    for (const std::string attributes : {"\x1b[1m", "\x1b[0m"}) {
      ASSERT_THAT(plain, HasSubstr(attributes)) << tensor.name.size();
      plain.erase(plain.find(attributes), attributes.size());
    }
    EXPECT_EQ(plain, run_tessera({"show", folder / "x.safetensors", tensor.name}, terminal(80)).out);
  }
}

TEST(TableTest, AnEndlessNameDoesNotWidenTheOtherRows) {
  const TemporaryDirectory folder;
  const std::string name(10'000, 'n');
  const std::string header = R"({")" + name +
                             R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})";
  std::string length;
  for (int i = 0; i < 8; ++i) length += static_cast<char>(header.size() >> (8 * i));
  write_text(folder / "x.safetensors", length + header + "ab");
  const Outcome piped = run_tessera({"inspect", folder / "x.safetensors"});
  EXPECT_THAT(piped.out, HasSubstr(name + "  uint8"));
  EXPECT_LT(piped.out.size(), name.size() + 1000);
  const Outcome shown = run_tessera({"inspect", folder / "x.safetensors"}, terminal(80));
  EXPECT_THAT(shown.out, HasSubstr("nnn...nnn"));
  EXPECT_LT(shown.out.size(), 1000u);
}

}  // namespace
}  // namespace tessera::testing

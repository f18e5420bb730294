// Names and shapes on the way: `--map`, `--rename`, `--set`, `--invert`, `--check` and `--hf-config`.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "support/paths.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> names_of(const fs::path& checkpoint) {
  std::vector<std::string> names;
  const json report = json::parse(run_tessera({"inspect", "--json", checkpoint}).out);
  for (const auto& [name, tensor] : report["tensors"].items()) names.push_back(name);
  return names;
}

constexpr const char* kHalves = R"j({"tessera_map": 1, "unmatched": "keep", "parameters": {"parts": 2}, "rules": [
  {"op": "unflatten", "match": "model\\.layers\\.\\d+\\.up\\.weight", "dim": 0, "sizes": ["parts", -1]},
  {"op": "rename", "match": "model\\.layers\\.(\\d+)\\.up\\.weight", "to": "up.\\1"}]})j";

TEST(MappingTest, ANameIsReplacedAsSedDoes) {
  const TemporaryDirectory folder;
  const Outcome outcome = run_tessera({"convert", demo(), folder / "a.safetensors", "--rename", "s/^model\\.//",
                                       "--rename", "s/norm/ln/", "--select", "ln.*"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(names_of(folder / "a.safetensors"), ElementsAre("ln.weight"));
}

TEST(MappingTest, AMapAndItsInverseRestoreTheCheckpoint) {
  const TemporaryDirectory folder;
  write_text(folder / "m.json", kHalves);
  EXPECT_EQ(
      run_tessera({"convert", demo(), folder / "a", "--to", "dcp", "--map", folder / "m.json", "--set", "parts=7"})
          .status,
      0);
  EXPECT_EQ(run_tessera({"diff", demo(), folder / "a"}).status, 1);
  const Outcome back = run_tessera({"reshard", folder / "a", folder / "b", "--ranks", "3", "--map", folder / "m.json",
                                    "--set", "parts=7", "--invert"});
  EXPECT_EQ(back.status, 0) << back.err;
  const Outcome same = run_tessera({"diff", demo(), folder / "b"});
  EXPECT_EQ(same.status, 0) << same.out;
}

TEST(MappingTest, AMapIsReadFromAPipe) {
  const TemporaryDirectory folder;
  write_text(folder / "m.json", kHalves);
  const auto convert = [&](const std::string& name, const std::string& input, const std::string& map) {
    return run_program({"bash", "-c", fmt::format(R"("$0" convert "$1" "$2" --map {} {} --set parts=7)", map, input),
                        command_path(), demo(), folder / name});
  };
  const Outcome file = convert("a.safetensors", "", "\"${2%/*}/m.json\"");
  EXPECT_EQ(file.status, 0) << file.err;
  const Outcome standard_input = convert("b.safetensors", "<\"${2%/*}/m.json\"", "-");
  EXPECT_EQ(standard_input.status, 0) << standard_input.err;
  const Outcome pipe = convert("c.safetensors", "", "<(cat \"${2%/*}/m.json\")");
  EXPECT_EQ(pipe.status, 0) << pipe.err;
  for (const char* other : {"b.safetensors", "c.safetensors"})
    EXPECT_TRUE(read_text(folder / other) == read_text(folder / "a.safetensors")) << other;
  const Outcome endless = convert("d.safetensors", "</dev/zero", "-");
  EXPECT_EQ(endless.status, 3);
  EXPECT_THAT(endless.err, HasSubstr("standard input: 16777217 bytes, expected at most 16777216"));
}

TEST(MappingTest, ACheckPrintsWhatDoesNotFitAndWritesNothing) {
  const TemporaryDirectory folder;
  write_text(folder / "m.json", kHalves);
  const std::vector<std::string> command = {"convert", demo(),  folder / "a",      "--to",
                                            "dcp",     "--map", folder / "m.json", "--check"};
  const Outcome good = run_tessera(command);
  EXPECT_EQ(good.status, 0);
  EXPECT_EQ(good.out, "the map fits: 48 tensors and 26 objects become 48 tensors and 26 objects\n");
  std::vector<std::string> wrong = command;
  wrong.insert(wrong.end(), {"--set", "parts=4"});
  const Outcome bad = run_tessera(wrong);
  EXPECT_EQ(bad.status, 1);
  EXPECT_EQ(bad.err, "");
  EXPECT_THAT(bad.out, HasSubstr("rule 1 (unflatten): tensor 'model.layers.0.up.weight' of shape"));
  EXPECT_THAT(bad.out, HasSubstr("problems\n"));
  wrong.emplace_back("--json");
  EXPECT_EQ(json::parse(run_tessera(wrong).out)["problems"].size(), 2U);
  wrong.resize(wrong.size() - 1);
  std::erase(wrong, "--check");
  const Outcome refused = run_tessera(wrong);
  EXPECT_EQ(refused.status, 3);
  EXPECT_THAT(refused.err, HasSubstr("rule 1 (unflatten)"));
  EXPECT_FALSE(fs::exists(folder / "a"));
}

TEST(MappingTest, ACheckNeedsNoDestination) {
  for (const char* command : {"convert", "reshard"}) {
    const Outcome good = run_tessera({command, demo(), "--rename", "s/norm/ln/", "--check"});
    EXPECT_EQ(good.status, 0) << good.err;
    EXPECT_THAT(good.out, HasSubstr("the map fits"));
    EXPECT_EQ(run_tessera({command, demo(), "--rename", "s/norm/ln/"}).status, 2);
  }
}

TEST(MappingTest, AModelsConfigIsNeitherLargeNorWithoutText) {
  const TemporaryDirectory folder;
  write_text(folder / "m.json", R"j({"tessera_map": 1, "unmatched": "keep", "rules": [],
                                     "parameters": {"heads": {"config": "num_attention_heads", "default": 1}}})j");
  write_text(folder / "config.json", "");
  const std::vector<std::string> command = {
      "convert", demo(), folder / "a", "--to", "safetensors", "--map", folder / "m.json", "--hf-config", folder.path()};
  const Outcome empty = run_tessera(command);
  EXPECT_EQ(empty.status, 3);
  EXPECT_THAT(empty.err, HasSubstr("config.json: found 0 bytes, expected a JSON object"));
  fs::resize_file(folder / "config.json", 64 << 20);
  const Outcome large = run_tessera(command);
  EXPECT_EQ(large.status, 3);
  EXPECT_THAT(large.err, HasSubstr("config.json: found 67108864 bytes, expected at most 16777216"));
  EXPECT_FALSE(fs::exists(folder / "a"));
}

TEST(MappingTest, WrongOptionsAreUsageErrors) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--check"}, "--check needs --map"},
      {{"--invert"}, "--invert needs --map"},
      {{"--set", "a=1"}, "--set needs --map"},
      {{"--rename", "s/a/"}, "--rename: 's/a/' is not a substitution, expected s/PATTERN/REPLACEMENT/"},
      {{"--map", "gpt2-nanogpt-to-hf", "--set", "a"}, "--set: found 'a', expected NAME=NUMBER"},
      {{"--map", "gpt2-nanogpt-to-hf", "--set", "a=1x"}, "--set: found 'a=1x', expected NAME=NUMBER"},
      {{"--map", "gpt2-nanogpt-to-hf", "--set", "a=9223372036854775808"}, "expected NAME=NUMBER, a 64-bit integer"},
      {{"--map", "gpt2-nanogpt-to-hf", "--set", "a=1", "--set", "a=2"},
       "--set: found 'a' twice, expected each parameter once"},
      {{"--map", "gpt2-nanogpt-to-hf", "--set", "=1"}, "--set: found '=1', expected NAME=NUMBER"},
  };
  for (const auto& [options, message] : cases) {
    std::vector<std::string> command = {"convert", demo(), "out.pt"};
    command.insert(command.end(), options.begin(), options.end());
    const Outcome outcome = run_tessera(command);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_THAT(outcome.err, HasSubstr(message));
  }
  const Outcome unset = run_tessera({"convert", demo(), "out.pt", "--map", "llama-torchtitan-to-hf"});
  EXPECT_EQ(unset.status, 3);
  EXPECT_THAT(
      unset.err,
      HasSubstr("llama-torchtitan-to-hf: the parameter 'heads' has no value, expected an integer; set it: heads=N"));
}

TEST(MappingTest, ConfigurationAndTokenizerAreCopiedBesideTheTensors) {
  const TemporaryDirectory folder;
  fs::create_directory(folder / "hf");
  const std::vector<std::string> copied = {"config.json",    "generation_config.json", "merges.txt",
                                           "tokenizer.json", "tokenizer_config.json",  "vocab.json"};
  for (const std::string& name : copied) write_text(folder / "hf" / name, "{\"name\": \"" + name + "\"}");
  write_text(folder / "hf" / "tokenizer.safetensors", "no");
  write_text(folder / "hf" / "modeling.py", "no");
  const Outcome outcome = run_tessera(
      {"convert", demo(), folder / "out", "--to", "safetensors", "--select", "model.*", "--hf-config", folder / "hf"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(names_in(folder / "out"),
              ElementsAre(".tessera.json", "config.json", "generation_config.json", "merges.txt", "model.safetensors",
                          "tokenizer.json", "tokenizer_config.json", "vocab.json"));
  for (const std::string& name : copied) {
    EXPECT_EQ(read_text(folder / "out" / name), read_text(folder / "hf" / name));
  }
  write_text(folder / "out" / "config.json", "{\"changed\": true}");
  const Outcome verified = run_tessera({"verify", folder / "out"});
  EXPECT_EQ(verified.status, 0) << verified.out;
  fs::remove(folder / "hf" / "config.json");
  const Outcome missing =
      run_tessera({"convert", demo(), folder / "b", "--to", "safetensors", "--hf-config", folder / "hf"});
  EXPECT_EQ(missing.status, 3);
  EXPECT_THAT(missing.err, HasSubstr("found no config.json, expected the directory of a Hugging Face model"));
  EXPECT_FALSE(fs::exists(folder / "b"));
  const Outcome file = run_tessera({"convert", demo(), folder / "b.safetensors", "--hf-config", folder / "hf"});
  EXPECT_EQ(file.status, 3);
  EXPECT_THAT(file.err, HasSubstr("found hf_config, expected it only for a directory of safetensors"));
}

}  // namespace
}  // namespace tessera::testing

// `tessera convert` and `tessera reshard`: their output, and that a failure leaves no files.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

void expect_done(const std::vector<std::string>& arguments) {
  const Outcome outcome = run_tessera(arguments);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
}

void expect_failure(const Outcome& outcome, const std::string& message) {
  EXPECT_EQ(outcome.status, 3);
  EXPECT_EQ(outcome.out, "");
  EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr(message));
}

TEST(ConvertCommandTest, TheEndingTellsTheFormat) {
  const TemporaryDirectory folder;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"a.safetensors", "safetensors"}, {"a.pt", "torch"}, {"a.pth", "torch"}, {"a.bin", "torch"}};
  for (const auto& [name, kind] : cases) {
    expect_done({"convert", golden("2.14-optim"), folder / name});
    EXPECT_EQ(json::parse(run_tessera({"inspect", "--json", folder / name}).out)["kind"], kind);
    EXPECT_EQ(run_tessera({"diff", golden("2.14-optim"), folder / name}).status, 0) << name;
  }
}

TEST(ConvertCommandTest, SaysWhatWasDone) {
  const TemporaryDirectory folder;
  const Outcome outcome = run_tessera({"convert", golden("2.14-optim"), folder / "a.pt"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, StartsWith("wrote " + (folder / "a.pt").string() + ": 16 tensors ("));
  EXPECT_THAT(outcome.out, HasSubstr("1 file of "));
}

TEST(ConvertCommandTest, JsonSaysTheSizesOfTheFiles) {
  const TemporaryDirectory folder;
  const Outcome outcome =
      run_tessera({"convert", golden("2.14-dtensor"), folder / "ck", "--to", "dcp", "--json", "--jobs", "2"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report["tensors"], 23);
  EXPECT_EQ(report["dry_run"], false);
  ASSERT_FALSE(report["files"].empty());
  for (const json& file : report["files"]) {
    EXPECT_EQ(file["bytes"], fs::file_size(folder / "ck" / file["name"].get<std::string>())) << file["name"];
  }
}

TEST(ConvertCommandTest, DryRunWritesNothingAndNamesTheFiles) {
  const TemporaryDirectory folder;
  const Outcome outcome = run_tessera({"convert", golden("2.14-optim"), folder / "a.safetensors", "--dry-run"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("would write"));
  EXPECT_THAT(outcome.out, HasSubstr("a.safetensors"));
  EXPECT_THAT(names_in(folder.path()), IsEmpty());
}

// A dry run reports what the conversion then writes.
TEST(ConvertCommandTest, DryRunSaysWhatIsThenWritten) {
  const TemporaryDirectory folder;
  for (const std::vector<std::string>& rest :
       std::vector<std::vector<std::string>>{{"convert", "a.pt"},
                                             {"convert", "a.safetensors"},
                                             {"convert", "hf", "--to", "safetensors", "--max-shard-size", "1KiB"},
                                             {"convert", "ck", "--to", "dcp"},
                                             {"reshard", "three", "--ranks", "3"}}) {
    std::vector<std::string> arguments = {rest[0], golden("2.14-optim"), folder / rest[1], "--json"};
    arguments.insert(arguments.end(), rest.begin() + 2, rest.end());
    const Outcome done_dry = run_tessera([&] {
      std::vector<std::string> dry = arguments;
      dry.emplace_back("--dry-run");
      return dry;
    }());
    EXPECT_FALSE(fs::exists(folder / rest[1]));
    json announced = json::parse(done_dry.out);
    json written = json::parse(run_tessera(arguments).out);
    EXPECT_EQ(announced["dry_run"], true);
    for (json* report : {&announced, &written}) {
      report->erase("seconds");
      report->erase("dry_run");
    }
    EXPECT_EQ(announced, written);
    EXPECT_FALSE(announced["files"].empty());
  }
}

TEST(ConvertCommandTest, SelectsAndExcludes) {
  const TemporaryDirectory folder;
  expect_done({"convert", "--select", "model.*", "--select=*.step", golden("2.14-optim"), folder / "a.pt", "--exclude",
               "*.bias"});
  const json shown = json::parse(run_tessera({"inspect", "--json", folder / "a.pt"}).out);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : shown["tensors"].items()) names.push_back(name);
  EXPECT_THAT(names, ElementsAre("model.0.weight", "model.2.weight", "optim.state.0.step", "optim.state.1.step",
                                 "optim.state.2.step", "optim.state.3.step"));
}

TEST(ConvertCommandTest, ChangesTheDtype) {
  const TemporaryDirectory folder;
  expect_done({"convert", golden("2.14-optim"), folder / "a.safetensors", "--dtype", "bfloat16"});
  const json shown = json::parse(run_tessera({"inspect", "--json", folder / "a.safetensors"}).out);
  for (const auto& [name, tensor] : shown["tensors"].items()) EXPECT_EQ(tensor["dtype"], "bfloat16") << name;
}

TEST(ConvertCommandTest, ShardSizeLimitsTheFiles) {
  const TemporaryDirectory folder;
  expect_done({"convert", golden("2.14-optim"), folder / "out", "--to", "safetensors", "--max-shard-size", "1KiB"});
  int shards = 0;
  for (const std::string& name : names_in(folder / "out")) shards += name.ends_with(".safetensors") ? 1 : 0;
  EXPECT_GT(shards, 1);
  EXPECT_EQ(run_tessera({"diff", golden("2.14-optim"), folder / "out"}).status, 0);
}

TEST(ConvertCommandTest, WhatSafetensorsHasNotIsWarnedOf) {
  const TemporaryDirectory folder;
  const Outcome outcome = run_tessera({"convert", golden("2.14-dtensor"), folder / "a.safetensors", "--select", "lr",
                                       "--select", "model.layers.0.*", "--json"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report["tensors"], 1);
  for (const json& warning : report["warnings"]) {
    EXPECT_THAT(outcome.err, HasSubstr("tessera: warning: " + warning.get<std::string>()));
  }
}

TEST(ReshardCommandTest, LaysOutForRanks) {
  const TemporaryDirectory folder;
  expect_done({"reshard", golden("2.14-optim"), folder / "ck", "--ranks", "3"});
  EXPECT_EQ(run_tessera({"diff", golden("2.14-optim"), folder / "ck"}).status, 0);
  EXPECT_EQ(run_tessera({"verify", folder / "ck"}).status, 0);
  const json shown = json::parse(run_tessera({"inspect", "--json", folder / "ck"}).out);
  EXPECT_EQ(shown["tensors"]["model.0.weight"]["chunks"].size(), 3u);
  EXPECT_EQ(shown["tensors"]["model.0.weight"]["chunks"][0]["sizes"], json::parse("[5, 9]"));
}

TEST(ReshardCommandTest, NegativeDimensionCountsFromTheEnd) {
  const TemporaryDirectory folder;
  expect_done({"reshard", golden("2.14-optim"), folder / "ck", "--ranks", "3", "--dim", "-1"});
  const json shown = json::parse(run_tessera({"inspect", "--json", folder / "ck"}).out);
  EXPECT_EQ(shown["tensors"]["model.0.weight"]["chunks"][0]["sizes"], json::parse("[14, 3]"));
}

TEST(ReshardCommandTest, WithoutTheDimensionATensorIsShardedInItsLastOne) {
  for (const std::string dim : {"-9", "9"}) {
    const TemporaryDirectory folder;
    expect_done({"reshard", golden("2.14-optim"), folder / "ck", "--ranks", "3", "--dim", dim});
    const json shown = json::parse(run_tessera({"inspect", "--json", folder / "ck"}).out);
    EXPECT_EQ(shown["tensors"]["model.0.weight"]["chunks"][0]["sizes"], json::parse("[14, 3]")) << dim;
  }
}

TEST(ReshardCommandTest, LaysOutLikeAnother) {
  const TemporaryDirectory folder;
  expect_done({"reshard", golden("2.14-optim"), folder / "four", "--ranks", "4"});
  expect_done({"reshard", golden("2.14-optim"), folder / "like", "--like", folder / "four"});
  const json a = json::parse(run_tessera({"inspect", "--json", folder / "four"}).out);
  const json b = json::parse(run_tessera({"inspect", "--json", folder / "like"}).out);
  for (const auto& [name, tensor] : a["tensors"].items()) {
    ASSERT_EQ(tensor["chunks"].size(), b["tensors"][name]["chunks"].size()) << name;
    for (std::size_t i = 0; i < tensor["chunks"].size(); ++i) {
      EXPECT_EQ(tensor["chunks"][i]["offsets"], b["tensors"][name]["chunks"][i]["offsets"]) << name;
    }
  }
}

class DestinationTest : public ::testing::Test {
 protected:
  DestinationTest() { fs::copy(golden("2.14-optim"), folder_ / "ck", fs::copy_options::recursive); }

  const TemporaryDirectory folder_;
};

TEST_F(DestinationTest, MustNotExist) {
  write_text(folder_ / "a.pt", "precious");
  expect_failure(run_tessera({"convert", folder_ / "ck", folder_ / "a.pt"}), "exists");
  EXPECT_EQ(read_text(folder_ / "a.pt"), "precious");
  fs::create_directory(folder_ / "out");
  expect_failure(run_tessera({"convert", folder_ / "ck", folder_ / "out", "--to", "dcp"}), "exists");
  EXPECT_THAT(names_in(folder_.path()), ElementsAre("a.pt", "ck", "out"));
}

TEST_F(DestinationTest, MustNotBeTheSource) {
  const std::vector<std::string> before = names_in(folder_ / "ck");
  const Outcome outcome = run_tessera({"convert", folder_ / "ck", folder_ / "ck", "--to", "dcp"});
  EXPECT_EQ(outcome.status, 3);
  EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
  EXPECT_EQ(names_in(folder_ / "ck"), before);
}

TEST_F(DestinationTest, MustNotLieWithinTheSource) {
  const std::vector<std::string> before = names_in(folder_ / "ck");
  expect_failure(run_tessera({"convert", folder_ / "ck", folder_ / "ck/in", "--to", "dcp"}), "within");
  expect_failure(run_tessera({"reshard", folder_ / "ck", folder_ / "ck/in", "--ranks", "2"}), "within");
  EXPECT_EQ(names_in(folder_ / "ck"), before);
}

TEST_F(DestinationTest, NeedsAName) {
  const Outcome outcome = run_tessera({"convert", folder_ / "ck", "", "--to", "dcp"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("DST: the path is empty"));
}

TEST_F(DestinationTest, NeedsAFolderToBeIn) {
  const std::string parent = (folder_ / "missing").string();
  expect_failure(run_tessera({"convert", folder_ / "ck", parent + "/a.pt"}), parent);
  EXPECT_FALSE(fs::exists(parent));
}

TEST_F(DestinationTest, NeedsAFolderThatCanBeWritten) {
  fs::create_directory(folder_ / "readonly");
  fs::permissions(folder_ / "readonly", fs::perms::owner_read | fs::perms::owner_exec);
  Conditions conditions;
  conditions.without_root_rights = true;
  const Outcome outcome = run_tessera({"convert", folder_ / "ck", folder_ / "readonly/a.pt"}, conditions);
  fs::permissions(folder_ / "readonly", fs::perms::owner_all);
  expect_failure(outcome, "Permission denied");
  EXPECT_THAT(names_in(folder_ / "readonly"), IsEmpty());
}

TEST_F(DestinationTest, DamagedSourceLeavesNothing) {
  std::string data = read_text(folder_ / "ck/__0_0.distcp");
  // The first elements of the first stored tensor.
  const json shown = json::parse(run_tessera({"inspect", "--json", folder_ / "ck"}).out);
  for (const auto& [name, tensor] : shown["tensors"].items()) {
    const json& chunk = tensor["chunks"][0];
    if (chunk["file"] == "__0_0.distcp") data[chunk["offset_bytes"].get<std::size_t>()] ^= 1;
  }
  write_text(folder_ / "ck/__0_0.distcp", data);
  for (const std::string name : {"a.pt", "a.safetensors"}) {
    expect_failure(run_tessera({"convert", folder_ / "ck", folder_ / name}), "__0_0.distcp");
  }
  EXPECT_THAT(names_in(folder_.path()), ElementsAre("ck"));
}

TEST(ConvertForceTest, ReplacesTheDestination) {
  const TemporaryDirectory folder;
  const std::vector<std::string> command = {"convert", golden("2.14-optim"), folder / "a.safetensors", "--select",
                                            "model.*"};
  EXPECT_EQ(run_tessera(command).status, 0);
  const Outcome refused = run_tessera(command);
  EXPECT_EQ(refused.status, 3);
  EXPECT_THAT(refused.err, HasSubstr("already exists"));
  std::vector<std::string> forced = command;
  forced.insert(forced.end(), {"--force", "--quiet"});
  EXPECT_EQ(run_tessera(forced).status, 0);
  EXPECT_EQ(run_tessera({"verify", folder / "a.safetensors"}).status, 0);
}

TEST(LargeTest, WhatHasNoRoomIsRefusedBeforeAnythingIsWritten) {
  const TemporaryDirectory folder;
  const std::uint64_t bytes = 2 * fs::space(folder.path()).available;
  try {
    write_sparse_safetensors(folder / "w.safetensors", 1, bytes);
  } catch (const fs::filesystem_error& error) {
    GTEST_SKIP() << "the file system has no sparse files of " << bytes << " bytes: " << error.what();
  }
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"convert", folder / "w.safetensors", folder / "ck", "--to", "dcp"},
        {"convert", folder / "w.safetensors", folder / "model/", "--to", "safetensors"},
        {"reshard", folder / "w.safetensors", folder / "ck", "--ranks", "4"}}) {
    Conditions conditions;
    conditions.max_file = 1 << 20;  // if it began all the same
    expect_failure(run_tessera(command, conditions), "free in its file system; --large begins all the same");
    std::vector<std::string> dry = command;
    dry.emplace_back("--dry-run");
    const Outcome warned = run_tessera(dry);
    EXPECT_EQ(warned.status, 0) << warned.err;
    EXPECT_THAT(warned.err, HasSubstr("free in its file system"));
    dry.emplace_back("--large");
    expect_done(dry);
  }
  EXPECT_THAT(names_in(folder.path()), ElementsAre("w.safetensors"));
}

TEST(LargeTest, APlanThatDoesNotFitTheMemoryIsRefused) {
  const TemporaryDirectory folder;
  write_sparse_safetensors(folder / "w.safetensors", 11, 4 << 20);
  const Outcome outcome = run_tessera({"reshard", folder / "w.safetensors", folder / "ck", "--ranks", "1000000"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err,
              HasSubstr("--ranks 1000000 makes 1.1e+07 pieces of tensors, expected at most 1e+07; --large"));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("w.safetensors"));
}

TEST(WarningsTest, ManyOfAKindAreCountedUnlessAllAreWanted) {
  const TemporaryDirectory folder;
  ASSERT_EQ(run_tessera({"convert", golden("2.14-optim"), folder / "m", "--to", "safetensors", "--select", "model.*",
                         "--max-shard-size", "100"})
                .status,
            0);
  for (int i = 0; i < 9; ++i) write_text(folder / ("m/stray-" + std::to_string(i) + ".safetensors"), "");
  const Outcome outcome = run_tessera({"inspect", folder / "m"});
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 6) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("and 4 more of the kind \"'...' is not in the index and is ignored\""));
  EXPECT_THAT(outcome.err, HasSubstr("--all-warnings"));
  const Outcome all = run_tessera({"inspect", folder / "m", "--all-warnings"});
  EXPECT_EQ(std::count(all.err.begin(), all.err.end(), '\n'), 9) << all.err;
  const Outcome verified = run_tessera({"verify", folder / "m"});
  EXPECT_EQ(verified.status, 0) << verified.out;
  EXPECT_EQ(verified.err, outcome.err);
}

}  // namespace
}  // namespace tessera::testing

// `tessera verify` and `tessera diff`: the exit status is the result; problems and differences are on standard output.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "support/golden.h"
#include "support/temporary_directory.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class VerifyGoldenTest : public ::testing::TestWithParam<std::string> {};

TEST_P(VerifyGoldenTest, RealCheckpointsAreGood) {
  const Outcome outcome = run_tessera({"verify", golden(GetParam())});
  EXPECT_EQ(outcome.status, 0) << outcome.out;
  EXPECT_THAT(outcome.out, StartsWith("good: "));
  EXPECT_EQ(outcome.err, "");
}

TEST_P(VerifyGoldenTest, EqualThemselvesInEveryFormat) {
  const TemporaryDirectory folder;
  ASSERT_EQ(run_tessera({"convert", golden(GetParam()), folder / "a.pt"}).status, 0);
  const Outcome outcome = run_tessera({"diff", golden(GetParam()), folder / "a.pt"});
  EXPECT_EQ(outcome.status, 0) << outcome.out;
  EXPECT_THAT(outcome.out, StartsWith("same: "));
}

INSTANTIATE_TEST_SUITE_P(Golden, VerifyGoldenTest, ::testing::ValuesIn(golden_names()),
                         [](const auto& name) { return test_name(name.param); });

class DamagedTest : public ::testing::Test {
 protected:
  DamagedTest() {
    fs::copy(golden("2.14-optim"), folder_ / "ck", fs::copy_options::recursive);
    chunk_ = json::parse(run_tessera({"inspect", "--json", folder_ / "ck", "model.0.weight"}).out);
    chunk_ = chunk_["tensors"]["model.0.weight"]["chunks"][0];
    const fs::path file = folder_ / "ck" / chunk_["file"].get<std::string>();
    std::string data = read_text(file);
    // The sign of element [1, 2].
    data[chunk_["offset_bytes"].get<std::size_t>() + (9 + 2) * 4 + 3] ^= static_cast<char>(0x80);
    write_text(file, data);
  }

  const TemporaryDirectory folder_;
  json chunk_;
};

TEST_F(DamagedTest, VerifySaysWhere) {
  const Outcome outcome = run_tessera({"verify", folder_ / "ck"});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, HasSubstr(chunk_["file"].get<std::string>()));
  EXPECT_THAT(outcome.out, HasSubstr("model.0.weight"));
  EXPECT_THAT(outcome.out, HasSubstr("\n1 problem: "));
}

TEST_F(DamagedTest, VerifySaysItAsJson) {
  const Outcome outcome = run_tessera({"verify", "--json", folder_ / "ck", "--jobs", "2"});
  EXPECT_EQ(outcome.status, 1);
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report["good"], false);
  EXPECT_EQ(report["problem_count"], 1);
  EXPECT_EQ(report["problems"][0]["file"], chunk_["file"]);
  EXPECT_EQ(report["problems"][0]["name"], "model.0.weight");
}

TEST_F(DamagedTest, DiffFailsRatherThanCompareDamagedBytes) {
  const Outcome outcome = run_tessera({"diff", golden("2.14-optim"), folder_ / "ck"});
  EXPECT_EQ(outcome.status, 3);
  EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("model.0.weight"));
}

TEST(VerifyCommandTest, MissingCheckpointIsAFailureAndNoAnswer) {
  const Outcome outcome = run_tessera({"verify", "/nowhere/at/all"});
  EXPECT_EQ(outcome.status, 3);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.err, "tessera: /nowhere/at/all: no such file or directory\n");
}

class DiffCommandTest : public ::testing::Test {
 protected:
  // Writes a safetensors file of three int32 elements, and optionally a second tensor.
  void write(const std::string& name, const std::string& elements, bool second = false) {
    std::string header = R"({"w":{"dtype":"I32","shape":[3],"data_offsets":[0,12]})";
    if (second) header += R"(,"x.y":{"dtype":"U8","shape":[0],"data_offsets":[12,12]})";
    header += "}";
    header.append(8 - header.size() % 8, ' ');
    std::string length(8, '\0');
    length[0] = static_cast<char>(header.size());
    write_text(folder_ / name, length + header + elements);
  }

  const TemporaryDirectory folder_;
};

TEST_F(DiffCommandTest, SaysIndexAndBothValues) {
  write("a.safetensors", std::string("\1\0\0\0\2\0\0\0\3\0\0\0", 12));
  write("b.safetensors", std::string("\1\0\0\0\7\0\0\0\x9\0\0\0", 12));
  const Outcome outcome = run_tessera({"diff", folder_ / "a.safetensors", folder_ / "b.safetensors"});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, HasSubstr("[1]"));
  EXPECT_THAT(outcome.out, HasSubstr("2"));
  EXPECT_THAT(outcome.out, HasSubstr("7"));
  EXPECT_THAT(outcome.out, HasSubstr("\n1 difference: "));
  const Outcome as_json = run_tessera({"diff", "--json", folder_ / "a.safetensors", folder_ / "b.safetensors"});
  EXPECT_EQ(as_json.status, 1);
  const json difference = json::parse(as_json.out)["differences"][0];
  EXPECT_EQ(difference["kind"], "elements");
  EXPECT_EQ(difference["name"], "w");
  EXPECT_EQ(difference["index"], json::parse("[1]"));
  EXPECT_EQ(difference["a"], "2");
  EXPECT_EQ(difference["b"], "7");
  EXPECT_EQ(difference["differing_elements"], 2);
}

TEST_F(DiffCommandTest, OneSidedNamesDifferAndCanBeExcluded) {
  write("a.safetensors", std::string(12, '\0'));
  write("b.safetensors", std::string(12, '\0'), true);
  const Outcome outcome = run_tessera({"diff", folder_ / "a.safetensors", folder_ / "b.safetensors"});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.out, HasSubstr("x.y"));
  EXPECT_EQ(run_tessera({"diff", folder_ / "a.safetensors", folder_ / "b.safetensors", "--exclude", "x.*"}).status, 0);
  const Outcome as_json = run_tessera({"diff", "--json", folder_ / "b.safetensors", folder_ / "b.safetensors"});
  EXPECT_EQ(as_json.status, 0);
  EXPECT_EQ(json::parse(as_json.out)["same"], true);
}

}  // namespace
}  // namespace tessera::testing

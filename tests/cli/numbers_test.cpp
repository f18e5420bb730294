// The commands that print numbers: `tessera stats`, `tessera show`, `tessera diff` with tolerances, and the sizes of
// `tessera inspect`.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "cli/command.h"
#include "support/paths.h"
#include "support/safetensors_file.h"
#include "support/temporary_directory.h"
#include "support/torch_file.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr float kNanNumber = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfNumber = std::numeric_limits<float>::infinity();

std::string text_of(ByteView bytes) { return std::string(as_text(bytes)); }

class NumbersTest : public ::testing::Test {
 protected:
  NumbersTest() {
    SafetensorsFile file;
    std::vector<float> counting;
    for (int i = 0; i < 40 * 60; ++i) counting.push_back(static_cast<float>(i));
    file.add("large", DType::float32, {40, 60}, counting);
    file.add<float>("m.weight", DType::float32, {2, 3}, {1, -2, 0, 4, 5.5f, 6});
    file.add<float>("m.bad", DType::float32, {3}, {kNanNumber, 1, kInfNumber});
    file.add<std::int64_t>("count", DType::int64, {}, {INT64_MAX});
    file.add<std::uint16_t>("half", DType::bfloat16, {2}, {0x3f80, 0xc000});
    file.add<std::uint8_t>("flags", DType::bool_, {2}, {1, 0});
    file.add<float>("none", DType::float32, {0, 3}, {});
    file.add<float>("w[0]", DType::float32, {2}, {7, 8});
    file.write(path_);
  }

  static std::string lines_after_first(const std::string& text) { return text.substr(text.find('\n') + 1); }
  std::string shown(const std::string& name, const std::vector<std::string>& options = {}) const {
    std::vector<std::string> arguments = {"show", path_, name};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const Outcome outcome = run_tessera(arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    return lines_after_first(outcome.out);
  }
  void expect_failure(const std::vector<std::string>& arguments, int status, const std::string& message) const {
    const Outcome outcome = run_tessera(arguments);
    EXPECT_EQ(outcome.status, status) << outcome.out;
    EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(message));
  }

  const TemporaryDirectory folder_;
  const std::string path_ = folder_ / "a.safetensors";
};

TEST_F(NumbersTest, StatsPrintsARowForEachTensorAndATotal) {
  const Outcome outcome = run_tessera({"stats", path_, "m.*", "--jobs", "2"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, StartsWith("TENSOR "));
  EXPECT_THAT(outcome.out,
              ::testing::ContainsRegex("m.weight +0 +0 +-2 +6 +2.41667 +3.23136 +9.34077 +1 +float32 +\\[2, 3\\]\n"));
  EXPECT_THAT(outcome.out, ::testing::ContainsRegex("m.bad +1 +1 +1 +inf +inf +nan +inf +0 "));
  EXPECT_THAT(outcome.out, HasSubstr("\ntotal: 2 tensors (36 B), 9 elements: 1 NaN, 1 Inf, 1 zero, norm inf\n"));
}

TEST_F(NumbersTest, StatsAsJson) {
  const Outcome outcome = run_tessera({"stats", path_, "--json", "--select", "m.*", "--select", "count"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json report = json::parse(outcome.out);
  EXPECT_EQ(report["total"]["tensors"], 3);
  EXPECT_EQ(report["total"]["nan"], 1);
  EXPECT_EQ(report["total"]["norm"], "inf");
  for (const json& tensor : report["tensors"]) {
    if (tensor["name"] == "count") {
      EXPECT_EQ(tensor["min"], INT64_MAX);
      EXPECT_EQ(tensor["std"], nullptr);
    } else if (tensor["name"] == "m.bad") {
      EXPECT_EQ(tensor["max"], "inf");
      EXPECT_EQ(tensor["std"], "nan");
      EXPECT_EQ(tensor["inf"], 1);
    } else {
      EXPECT_EQ(tensor["shape"], json::parse("[2, 3]"));
      EXPECT_EQ(tensor["mean"].get<double>(), 14.5 / 6);
      EXPECT_EQ(tensor["zeros"], 1);
    }
  }
}

TEST_F(NumbersTest, StatsSortsAndFailsOnWhatIsNamed) {
  const Outcome sorted = run_tessera({"stats", path_, "--json", "--sort", "size"});
  EXPECT_EQ(json::parse(sorted.out)["tensors"][0]["name"], "large");
  for (const std::string what : {"nan", "inf", "nan,inf", "inf,nan"}) {
    EXPECT_EQ(run_tessera({"stats", path_, "--fail-on", what}).status, 1) << what;
    EXPECT_EQ(run_tessera({"stats", path_, "--fail-on", what, "--exclude", "m.bad"}).status, 0) << what;
  }
}

TEST_F(NumbersTest, StatsOfWrongNames) {
  expect_failure({"stats", path_, "m.weigth"}, 3, "did you mean 'm.weight'?");
  expect_failure({"stats", path_, "m.weight", "--exclude", "m.*"}, 2, "leave no tensor");
  expect_failure({"stats", path_, "--select", "x*"}, 2, "--select: no name matches 'x*'");
  expect_failure({"stats", path_, "--sort", "median"}, 2, "--sort: 'median', expected one of name, size");
  expect_failure({"stats", path_, "--fail-on", "zero"}, 2, "--fail-on");
  expect_failure({"stats", golden("2.14-optim"), "step"}, 3, "");
}

TEST_F(NumbersTest, ShowPrintsValuesInBrackets) {
  EXPECT_EQ(shown("m.weight"), "[[  1,  -2,   0],\n [  4, 5.5,   6]]\n");
  EXPECT_EQ(shown("m.weight[:, -1]"), "[0, 6]\n");
  EXPECT_EQ(shown("m.weight[1, 1]"), "5.5\n");
  EXPECT_EQ(shown("m.weight[..., ::2]"), "[[1, 0],\n [4, 6]]\n");
  EXPECT_EQ(shown("count"), "9223372036854775807\n");
  EXPECT_EQ(shown("half"), "[ 1, -2]\n");
  EXPECT_EQ(shown("flags"), "[ True, False]\n");
  EXPECT_EQ(shown("none"), "[]\n");
  EXPECT_EQ(shown("m.weight[2:]"), "[]\n");
  EXPECT_EQ(shown("m.bad"), "[nan,   1, inf]\n");
  EXPECT_EQ(run_tessera({"show", path_, "m.weight[1:]"}).out, "m.weight[1:]  float32 [1, 3]\n[[  4, 5.5,   6]]\n");
}

TEST_F(NumbersTest, ANameWithBracketsIsTakenAsItIs) {
  EXPECT_EQ(shown("w[0]"), "[7, 8]\n");
  EXPECT_EQ(shown("w[0][1]"), "8\n");
}

TEST_F(NumbersTest, LargeTensorsAreSummarizedAsNumPyDoes) {
  EXPECT_EQ(shown("large"),
            "[[   0,    1,    2, ...,   57,   58,   59],\n"
            " [  60,   61,   62, ...,  117,  118,  119],\n"
            " [ 120,  121,  122, ...,  177,  178,  179],\n"
            " ...,\n"
            " [2220, 2221, 2222, ..., 2277, 2278, 2279],\n"
            " [2280, 2281, 2282, ..., 2337, 2338, 2339],\n"
            " [2340, 2341, 2342, ..., 2397, 2398, 2399]]\n");
  const std::string all = shown("large", {"--all"});
  EXPECT_EQ(all.find("..."), std::string::npos);
  EXPECT_THAT(all, HasSubstr(" 1234,"));
  for (const std::string& line : {all.substr(0, all.find('\n'))}) EXPECT_LE(line.size(), 80u);
  EXPECT_THAT(shown("large[0]"), StartsWith("[ 0,  1,  2,  3,"));
}

TEST_F(NumbersTest, ShowPrintsObjects) {
  const json objects = json::parse(run_tessera({"inspect", "--json", golden("2.14-optim")}).out)["objects"];
  ASSERT_FALSE(objects.empty());
  const std::string name = objects.begin().key();
  const Outcome object = run_tessera({"show", golden("2.14-optim"), name});
  EXPECT_EQ(object.status, 0) << object.err;
  EXPECT_EQ(object.out, name + "  " + objects[name]["type"].get<std::string>() + "\n" +
                            objects[name]["repr"].get<std::string>() + "\n");
  expect_failure({"show", golden("2.14-optim"), name, "--npy", folder_ / "x.npy"}, 3,
                 "is an object, expected a tensor");
}

TEST_F(NumbersTest, NpyIsWhatNumPyWrites) {
  // float32.npy has the elements [[0, 1.5, -2], [3, 4, 5]].
  SafetensorsFile file;
  file.add<float>("t", DType::float32, {3, 3}, {9, 9, 9, 0, 1.5f, -2, 3, 4, 5});
  file.write(folder_ / "t.safetensors");
  const std::string expected =
      text_of(read_file(fs::path(golden("2.14-optim")).parent_path().parent_path().parent_path() / "npy/float32.npy"));
  const Outcome outcome = run_tessera({"show", folder_ / "t.safetensors", "t[1:]", "--npy", folder_ / "t.npy"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, StartsWith("wrote " + std::string(folder_ / "t.npy") + ": float32 [2, 3], 152 B"));
  EXPECT_EQ(read_text(folder_ / "t.npy"), expected);
  EXPECT_EQ(run_tessera({"show", folder_ / "t.safetensors", "t[1:]", "--npy", "-"}).out, expected);
}

TEST_F(NumbersTest, WhatNumPyLacksNeedsADtype) {
  expect_failure({"show", path_, "half", "--npy", folder_ / "h.npy"}, 3,
                 "NumPy has no dtype bfloat16, expected one such as float32; use --dtype float32");
  EXPECT_FALSE(fs::exists(folder_ / "h.npy"));
  EXPECT_EQ(run_tessera({"show", path_, "half", "--npy", folder_ / "h.npy", "--dtype", "float32"}).status, 0);
  EXPECT_THAT(read_text(folder_ / "h.npy"), ::testing::EndsWith(std::string("\x00\x00\x80\x3f\x00\x00\x00\xc0", 8)));
  expect_failure({"show", path_, "count", "--dtype", "float32"}, 3, "dtype int64, expected one with a cast to float32");
}

TEST_F(NumbersTest, FilesThatKilledProcessesLeftAreRemoved) {
  const TemporaryDirectory folder;
  const std::string script =
      "cd \"$1\"; touch w.npy.$$.partial w.npy.1.partial w.npy.x.partial; exec 9>w.npy.7.partial; flock 9; "
      "exec \"$0\" show \"$2\" m.weight --npy w.npy";
  const Outcome outcome = run_program({"sh", "-c", script, command_path(), folder.path(), path_});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  // A process writes the one that is locked.
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"w.npy", "w.npy.7.partial", "w.npy.x.partial"}));
}

TEST_F(NumbersTest, AFileThatIsNotLockedYetIsWrittenAgainIfItIsTakenForALeftover) {
  const TemporaryDirectory folder;
  std::atomic<bool> has_ended = false;
  std::thread other([&] {  // as another process that writes the same file
    while (!has_ended) {
      for (const std::string& name : names_in(folder.path())) {
        if (!name.ends_with(".partial")) continue;
        const int file = ::open((folder / name).c_str(), O_RDWR | O_CLOEXEC);
        if (file >= 0 && ::flock(file, LOCK_EX | LOCK_NB) == 0) ::unlink((folder / name).c_str());
        if (file >= 0) ::close(file);
      }
    }
  });
  for (int i = 0; i < 30; ++i) {
    const Outcome outcome = run_tessera({"show", path_, "half", "--raw", folder / std::to_string(i)});
    EXPECT_EQ(outcome.status, 0) << outcome.err;
  }
  has_ended = true;
  other.join();
  EXPECT_EQ(names_in(folder.path()).size(), 30u);
}

// Rows of 128 KiB, of which a column has 4 bytes each.
TEST_F(NumbersTest, DamageIsAnErrorBeforeElementsWithGapsAreShown) {
  SafetensorsFile file;
  file.add("w", DType::float32, {4, 32768}, std::vector<float>(4 * 32768, 1));
  const fs::path path = folder_ / "w.safetensors";
  file.write(path);
  ASSERT_EQ(run_tessera({"sum", path}).status, 0);
  EXPECT_EQ(run_tessera({"show", path, "w[:, 7]"}).out, "w[:, 7]  float32 [4]\n[1, 1, 1, 1]\n");
  put_byte(path, static_cast<std::int64_t>(fs::file_size(path)) - 3 * 32768 * 4 + 7 * 4, 0x55);
  for (const std::vector<std::string>& options :
       std::vector<std::vector<std::string>>{{}, {"--npy", "-"}, {"--raw", "-"}, {"--raw", folder_ / "w.raw"}}) {
    std::vector<std::string> arguments = {"show", path, "w[:, 7]"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    const Outcome outcome = run_tessera(arguments);
    EXPECT_EQ(outcome.status, 3);
    EXPECT_EQ(outcome.out, "");
    EXPECT_THAT(outcome.err, HasSubstr("as in the sidecar"));
    arguments.emplace_back("--no-checksums");
    EXPECT_EQ(run_tessera(arguments).status, 0);
  }
}

TEST_F(NumbersTest, DamageIsAnErrorBeforeAnythingIsOnStandardOutput) {
  const fs::path path = folder_ / "large.safetensors";
  write_sparse_safetensors(path, 1, 9 << 20);
  ASSERT_EQ(run_tessera({"sum", path}).status, 0);
  put_byte(path, static_cast<std::int64_t>(fs::file_size(path)) - 1, 1);
  for (const std::string option : {"--npy", "--raw"}) {
    const Outcome outcome = run_tessera({"show", path, "t0", option, "-"});
    EXPECT_EQ(outcome.status, 3);
    EXPECT_EQ(outcome.out.size(), 0u);
    EXPECT_THAT(outcome.err, HasSubstr("as in the sidecar"));
  }
}

TEST_F(NumbersTest, RawIsTheLittleEndianElements) {
  EXPECT_EQ(run_tessera({"show", path_, "half", "--raw", "-"}).out, std::string("\x80\x3f\x00\xc0", 4));
  const Outcome outcome = run_tessera({"show", path_, "large[1:3, ::2]", "--raw", folder_ / "raw"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  const std::string bytes = read_text(folder_ / "raw");
  ASSERT_EQ(bytes.size(), 2u * 30 * 4);
  float last = 0;
  std::memcpy(&last, bytes.data() + bytes.size() - 4, 4);
  EXPECT_EQ(last, 178);
}

TEST_F(NumbersTest, AFileAppearsCompleteOrNotAtAll) {
  write_text(folder_ / "old", "old");
  expect_failure({"show", path_, "half", "--raw", folder_ / "old"}, 3, "the file exists");
  EXPECT_EQ(read_text(folder_ / "old"), "old");
  Conditions full;
  full.max_file = 4096;
  const Outcome outcome = run_tessera({"show", path_, "large", "--raw", folder_ / "new"}, full);
  EXPECT_EQ(outcome.status, 3);
  EXPECT_EQ(names_in(folder_.path()), (std::vector<std::string>{"a.safetensors", "old"}));
}

TEST_F(NumbersTest, ShowFindsDamage) {
  ASSERT_EQ(run_tessera({"convert", path_, folder_ / "a.pt"}).status, 0);
  const json chunk =
      json::parse(run_tessera({"inspect", "--json", folder_ / "a.pt"}).out)["tensors"]["large"]["chunks"][0];
  put_byte(folder_ / "a.pt", chunk["offset_bytes"].get<std::int64_t>() + 5000, 77);
  for (const std::string option : {"--all", "--raw"}) {
    std::vector<std::string> arguments = {"show", folder_ / "a.pt", "large", "--no-checksums", option};
    if (option == "--raw") arguments.push_back(folder_ / "raw");
    const Outcome outcome = run_tessera(arguments);
    EXPECT_EQ(outcome.status, 3);
    EXPECT_THAT(outcome.err, HasSubstr("tensor 'large'"));
    EXPECT_THAT(outcome.err, HasSubstr("CRC-32"));
    EXPECT_FALSE(fs::exists(folder_ / "raw"));
  }
  EXPECT_EQ(run_tessera({"show", folder_ / "a.pt", "large[0]", "--no-checksums"}).status, 0) << "not read";
}

TEST_F(NumbersTest, ElementsThatAreRepeatedDoNotFillADisk) {
  TorchFile file;
  file.storages.push_back({0, 0, 0x80, 0x3f});
  file.add("t", DType::float32, 0, 0, {1 << 20, 1 << 12}, {0, 0});
  overwrite_file(folder_ / "a.pt", file.bytes());
  expect_failure({"show", folder_ / "a.pt", "t", "--raw", folder_ / "raw"}, 3, "--expand allows it");
  expect_failure({"show", folder_ / "a.pt", "t", "--all"}, 3, "--expand allows it");
  EXPECT_EQ(run_tessera({"show", folder_ / "a.pt", "t[0]", "--raw", folder_ / "raw", "--expand"}).status, 0);
  EXPECT_EQ(fs::file_size(folder_ / "raw"), 4u << 12);
  EXPECT_THAT(shown("count"), HasSubstr("9223372036854775807"));
  EXPECT_THAT(run_tessera({"show", folder_ / "a.pt", "t"}).out, HasSubstr("[1, 1, 1, ..., 1, 1, 1],\n ...,\n"));
}

TEST_F(NumbersTest, ShowOfWrongNamesAndSlices) {
  expect_failure({"show", path_, "m.weigth[0]"}, 3, "did you mean 'm.weight'?");
  expect_failure({"show", path_, "m.*"}, 3, "2 names match 'm.*', expected one");
  expect_failure({"show", path_, "m.weight[0, 0, 0]"}, 3, "found 3 dimensions");
  expect_failure({"show", path_, "[0, 1]"}, 3, "no name matches '[0, 1]'");
  expect_failure({"show", path_, "m.weight[2]"}, 3, "index 2 in dimension 0");
  expect_failure({"show", path_, "m.weight", "--dtype", "float33"}, 2, "PyTorch has no dtype 'float33'");
  expect_failure({"show", path_, "m.weight", "--npy", "-", "--raw", "-"}, 2, "excludes");
  expect_failure({"show", path_}, 2, "NAME is required");
}

TEST_F(NumbersTest, SizesByPrefix) {
  const std::string tree = run_tessera({"inspect", path_, "--tree"}).out;
  EXPECT_THAT(tree, ::testing::ContainsRegex("9.4 KiB +100.0 %  total +8 +0\n"));
  EXPECT_THAT(tree, ::testing::ContainsRegex(" 36 B +0.4 %    m +2 +0\n +24 B +0.2 %      weight +1 +0\n"));
  const std::string du = run_tessera({"inspect", path_, "--du"}).out;
  EXPECT_THAT(du, ::testing::ContainsRegex(" %  m.weight +1 +0\n"));
  EXPECT_EQ(run_tessera({"inspect", path_, "--du", "--depth", "1"}).out.find("m.weight"), std::string::npos);
  const json as_json = json::parse(run_tessera({"inspect", path_, "--tree", "--json"}).out);
  EXPECT_EQ(as_json["children"][0]["name"], "large");
  EXPECT_EQ(as_json["tensors"], 8);
  const json list = json::parse(run_tessera({"inspect", path_, "m.*", "--du", "--json"}).out);
  EXPECT_EQ(list["prefixes"][0], json::parse(R"({"prefix": "m", "bytes": 36, "tensors": 2, "objects": 0})"));
  expect_failure({"inspect", path_, "--depth", "1"}, 2, "--depth is for --tree and --du");
  expect_failure({"inspect", path_, "--tree", "--du"}, 2, "excludes");
}

TEST_F(NumbersTest, DiffWithTolerances) {
  const std::string other = folder_ / "b.safetensors";
  ASSERT_EQ(run_tessera({"convert", path_, other, "--dtype", "bfloat16"}).status, 0);
  EXPECT_EQ(run_tessera({"diff", path_, other}).status, 1);
  EXPECT_EQ(run_tessera({"diff", path_, other, "--rtol", "0.004"}).status, 1) << "NaN differs from NaN";
  const Outcome same = run_tessera({"diff", path_, other, "--rtol", "0.004", "--equal-nan"});
  EXPECT_EQ(same.status, 0) << same.out;
  const Outcome exact = run_tessera({"diff", path_, other, "--atol", "0", "--equal-nan", "--json"});
  EXPECT_EQ(exact.status, 1);
  const json differences = json::parse(exact.out)["differences"];
  ASSERT_EQ(differences.size(), 1u);
  EXPECT_EQ(differences[0]["name"], "large");
  EXPECT_EQ(differences[0]["elements"], 2400);
  EXPECT_GT(differences[0]["worst_absolute"]["value"], 0);
  EXPECT_EQ(differences[0]["worst_relative"]["index"].size(), 2u);
  for (const std::string wrong : {"x", "-1", "inf", "nan", "1e999", "1 "}) {
    expect_failure({"diff", path_, other, "--rtol=" + wrong}, 2,
                   "--rtol: '" + wrong + "', expected a finite number of at least 0");
    expect_failure({"diff", path_, other, "--atol=" + wrong}, 2,
                   "--atol: '" + wrong + "', expected a finite number of at least 0");
  }
}

TEST_F(NumbersTest, DiffPrintsAScreenUnlessAskedForAll) {
  for (const bool second : {false, true}) {
    SafetensorsFile file;
    for (int i = 0; i < 50; ++i) {
      file.add<float>("t" + std::to_string(100 + i), DType::float32, {1}, {second ? 2.0f : 1.0f});
    }
    file.write(folder_ / (second ? "2.safetensors" : "1.safetensors"));
  }
  const std::vector<std::string> command = {"diff", folder_ / "1.safetensors", folder_ / "2.safetensors"};
  const auto lines = [&](const std::vector<std::string>& options) {
    std::vector<std::string> arguments = command;
    arguments.insert(arguments.end(), options.begin(), options.end());
    const std::string out = run_tessera(arguments).out;
    return std::pair(std::count(out.begin(), out.end(), '\n'), out);
  };
  EXPECT_EQ(lines({}).first, 42);
  EXPECT_THAT(lines({}).second, HasSubstr("\n... and 10 more differences; --all prints them\n50 differences: "));
  EXPECT_EQ(lines({"--all"}).first, 51);
  EXPECT_EQ(json::parse(lines({"--json"}).second)["differences"].size(), 50u);
}

}  // namespace
}  // namespace tessera::testing

// `tessera inspect`: the JSON agrees with the manifests of real checkpoints, and its offsets lead to the right bytes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cli/command.h"
#include "support/golden.h"
#include "support/temporary_directory.h"
#include "tessera/base/crc32.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

json inspect_json(const std::vector<std::string>& arguments) {
  std::vector<std::string> all = {"inspect", "--json"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  const Outcome outcome = run_tessera(all);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  return json::parse(outcome.out);
}

std::uint64_t count_of(const json& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{1},
                         [](std::uint64_t n, const json& size) { return n * size.get<std::uint64_t>(); });
}

// Copies the row-major bytes of a chunk to their place in the bytes of the tensor.
void place(const json& chunk, const json& shape, std::uint64_t item, const std::string& bytes,
           std::string& tensor_bytes) {
  const std::uint64_t count = count_of(chunk["sizes"]);
  ASSERT_EQ(bytes.size(), count * item);
  for (std::uint64_t i = 0; i < count; ++i) {
    std::uint64_t rest = i, stride = 1, at = 0;
    for (std::size_t d = shape.size(); d-- > 0;) {
      const std::uint64_t size = chunk["sizes"][d];
      at += (chunk["offsets"][d].get<std::uint64_t>() + rest % size) * stride;
      rest /= size;
      stride *= shape[d].get<std::uint64_t>();
    }
    ASSERT_LE((at + 1) * item, tensor_bytes.size());
    tensor_bytes.replace(at * item, item, bytes, i * item, item);
  }
}

class InspectGoldenTest : public ::testing::TestWithParam<std::string> {};

TEST_P(InspectGoldenTest, JsonHasEveryTensorOfTheManifest) {
  const Golden expected = read_golden(GetParam());
  const json shown = inspect_json({expected.checkpoint});
  ASSERT_EQ(shown["tensors"].size(), expected.tensors.size());
  std::uint64_t total = 0;
  for (const auto& [name, tensor] : expected.tensors) {
    const json& found = shown["tensors"].at(name);
    EXPECT_EQ(found["dtype"], tensor.dtype) << name;
    EXPECT_EQ(found["shape"], tensor.shape) << name;
    total += found["bytes"].get<std::uint64_t>();
  }
  EXPECT_EQ(shown["total_bytes"], total);
}

TEST_P(InspectGoldenTest, JsonPointsAtTheBytesOfEveryElement) {
  const Golden expected = read_golden(GetParam());
  const json shown = inspect_json({expected.checkpoint});
  for (const auto& [name, tensor] : expected.tensors) {
    const json& found = shown["tensors"].at(name);
    const std::uint64_t bytes = found["bytes"], count = count_of(found["shape"]);
    std::string tensor_bytes(bytes, '\xff');
    for (const json& chunk : found["chunks"]) {
      std::ifstream file(expected.checkpoint / chunk["file"].get<std::string>(), std::ios::binary);
      std::string part(chunk["length_bytes"].get<std::size_t>(), '\0');
      file.seekg(chunk["offset_bytes"].get<std::streamoff>());
      file.read(part.data(), static_cast<std::streamsize>(part.size()));
      ASSERT_TRUE(file.good()) << name;
      if (count > 0) place(chunk, found["shape"], bytes / count, part, tensor_bytes);
    }
    EXPECT_EQ(crc32(as_bytes(tensor_bytes)), tensor.crc32) << name;
  }
}

TEST_P(InspectGoldenTest, JsonHasPythonsReprOfEveryPlainValue) {
  const Golden expected = read_golden(GetParam());
  const json shown = inspect_json({expected.checkpoint});
  for (const auto& [name, repr] : expected.plain) {
    if (shown["objects"].contains(name)) {
      EXPECT_EQ(shown["objects"][name]["repr"], repr) << name;
      continue;
    }
    // PyTorch stores each value of a nested dict on its own, and 2.14 also each of a list in it; the manifest has one.
    ASSERT_EQ(name, "nested");
    ASSERT_EQ(repr, "{'deep': {'er': [1, {'x': 2}]}}");
    if (shown["objects"].contains("nested.deep.er")) {
      EXPECT_EQ(shown["objects"]["nested.deep.er"]["repr"], "[1, {'x': 2}]");
    } else {
      EXPECT_EQ(shown["objects"]["nested.deep.er.0"]["repr"], "1");
      EXPECT_EQ(shown["objects"]["nested.deep.er.1.x"]["repr"], "2");
    }
  }
}

TEST_P(InspectGoldenTest, JsonHasEveryFileWithItsSize) {
  const fs::path checkpoint = golden(GetParam());
  const json shown = inspect_json({checkpoint});
  for (const auto& [name, facts] : shown["files"].items()) {
    EXPECT_EQ(facts["bytes"], fs::file_size(checkpoint / name)) << name;
  }
  for (const auto& [name, tensor] : shown["tensors"].items()) {
    for (const json& chunk : tensor["chunks"]) EXPECT_TRUE(shown["files"].contains(chunk["file"])) << name;
  }
}

TEST_P(InspectGoldenTest, TextHasEveryNameOnALineOfItsOwn) {
  const Golden expected = read_golden(GetParam());
  const Outcome outcome = run_tessera({"inspect", expected.checkpoint});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, Not(HasSubstr("\x1b")));
  for (const auto& [name, tensor] : expected.tensors) EXPECT_THAT(outcome.out, HasSubstr("\n" + name + " "));
}

INSTANTIATE_TEST_SUITE_P(Golden, InspectGoldenTest, ::testing::ValuesIn(golden_names()),
                         [](const auto& name) { return test_name(name.param); });

TEST(InspectTest, KindAndVersionAreRecognised) {
  EXPECT_EQ(inspect_json({golden("1.13-sharded")})["kind"], "dcp");
  EXPECT_EQ(inspect_json({golden("1.13-sharded")})["version"], "PyTorch 1.13");
  EXPECT_EQ(inspect_json({golden("2.14-hf")})["kind"], "safetensors");
}

TEST(InspectTest, ObjectsHaveTypeAndJsonValue) {
  const json objects = inspect_json({golden("2.14-dtensor")})["objects"];
  EXPECT_EQ(objects["history"]["value"], json::parse(R"([1, 2.5, "three", null, true])"));
  EXPECT_EQ(objects["history"]["type"], "list");
  EXPECT_EQ(objects["pair"]["type"], "tuple");
  EXPECT_EQ(objects["pair"]["value"], json::parse(R"([4, "five"])"));
  EXPECT_EQ(objects["nothing"]["value"], nullptr);
  EXPECT_FALSE(objects["nothing"].contains("opaque"));
}

TEST(InspectTest, NamesAndGlobsRestrict) {
  const json shown = inspect_json({golden("2.14-optim"), "optim.state.?.step", "model.0.bias"});
  std::vector<std::string> names;
  for (const auto& [name, tensor] : shown["tensors"].items()) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"model.0.bias", "optim.state.0.step", "optim.state.1.step",
                                             "optim.state.2.step", "optim.state.3.step"}));
  EXPECT_EQ(shown["total_bytes"], 14 * 4 + 4 * 4);
}

TEST(InspectTest, ABracketGlobIsOneArgument) {
  const json shown = inspect_json({golden("2.14-optim"), "[m]odel.[!2].bias"});
  EXPECT_EQ(shown["tensors"].size(), 1u);
}

TEST(InspectTest, ANameMayBeThatOfACommand) {
  const Outcome outcome = run_tessera({"inspect", golden("2.14-optim"), "diff"});
  EXPECT_EQ(outcome.status, 3);
  EXPECT_THAT(outcome.err, HasSubstr("no tensor or object is named 'diff'"));
}

TEST(InspectTest, FlagsMayStandAnywhere) {
  for (const std::vector<std::string>& arguments :
       std::vector<std::vector<std::string>>{{"inspect", golden("2.14-optim"), "model.0.bias", "--json"},
                                             {"inspect", golden("2.14-optim"), "--json", "model.0.bias"}}) {
    const Outcome outcome = run_tessera(arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_EQ(json::parse(outcome.out)["tensors"].size(), 1u);
  }
}

TEST(InspectTest, UnknownFlagAmongNamesIsUsage) {
  const Outcome outcome = run_tessera({"inspect", golden("2.14-optim"), "model.0.bias", "--jsn"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.err,
            "tessera: inspect: unknown option '--jsn'; did you mean '--json'? (see 'tessera inspect --help')\n");
}

TEST(InspectTest, NamedTensorShowsEveryChunkWithItsPlace) {
  const json shown = inspect_json({golden("2.14-dtensor"), "model.layers.13.scale"});
  const Outcome outcome = run_tessera({"inspect", golden("2.14-dtensor"), "model.layers.13.scale"});
  EXPECT_EQ(outcome.status, 0);
  for (const json& chunk : shown["tensors"]["model.layers.13.scale"]["chunks"]) {
    EXPECT_THAT(outcome.out, HasSubstr(chunk["file"].get<std::string>()));
    EXPECT_THAT(outcome.out, HasSubstr(" " + chunk["offset_bytes"].dump() + " "));
  }
}

TEST(InspectTest, UnknownNameSuggestsCloseOnes) {
  const Outcome outcome = run_tessera({"inspect", golden("2.14-optim"), "model.0.wieght"});
  EXPECT_EQ(outcome.status, 3);
  EXPECT_EQ(outcome.out, "");
  EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("no tensor or object is named 'model.0.wieght', expected one of "));
  EXPECT_THAT(outcome.err, HasSubstr(" names; did you mean 'model.0.weight'"));
}

TEST(InspectTest, AModulesNameSuggestsItsGlob) {
  const Outcome outcome = run_tessera({"inspect", golden("2.14-optim"), "model.0"});
  EXPECT_EQ(outcome.status, 3);
  EXPECT_THAT(outcome.err, HasSubstr("'model.0.*' has 2 names"));
}

TEST(InspectTest, GlobWithoutMatchIsAnError) {
  const Outcome outcome = run_tessera({"inspect", golden("2.14-optim"), "missing.*"});
  EXPECT_EQ(outcome.status, 3);
  EXPECT_THAT(outcome.err, HasSubstr("no name matches 'missing.*'"));
}

TEST(InspectTest, MissingDataFileIsShownAsMissing) {
  const TemporaryDirectory folder;
  fs::copy(golden("2.14-optim"), folder / "ck", fs::copy_options::recursive);
  fs::remove(folder / "ck" / "__0_1.distcp");
  const json shown = inspect_json({folder / "ck"});
  EXPECT_EQ(shown["files"]["__0_1.distcp"]["bytes"], nullptr);
  EXPECT_EQ(shown["tensors"].size(), 16u);
  const Outcome outcome = run_tessera({"inspect", folder / "ck"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_THAT(outcome.out, HasSubstr("missing"));
}

TEST(InspectTest, WideAndHostileNamesStayInTheirColumnAndLine) {
  const TemporaryDirectory folder;
  const std::string header = R"({"\u540d\u524d":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("a\u001b[2J\nb":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}  )";
  std::string file(8, '\0');
  file[0] = static_cast<char>(header.size());
  write_text(folder / "x.safetensors", file + header + "ab");
  const Outcome outcome = run_tessera({"inspect", folder / "x.safetensors"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, Not(HasSubstr("\x1b")));
  EXPECT_THAT(outcome.out, HasSubstr("a\\x1b[2J\\x0ab  uint8"));
  EXPECT_THAT(outcome.out, HasSubstr("\u540d\u524d           uint8"));
}

TEST(InspectTest, WhatIsNoCheckpointIsSaid) {
  const TemporaryDirectory folder;
  fs::create_directory(folder / "empty");
  write_text(folder / "noise", "this is no checkpoint at all, and long enough to be looked at by everybody who may");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {folder / "missing", "no such file or directory"},
      {folder / "empty", "no checkpoint in this directory"},
      {folder / "noise",
       "noise at byte 0: found 'this is no check...', expected a torch.save archive or a safetensors file"},
      {golden("2.14-optim") + "/.metadata", "expected the checkpoint's directory"},
      {"/dev/null", "/dev/null"},
  };
  for (const auto& [path, message] : cases) {
    const Outcome outcome = run_tessera({"inspect", path});
    EXPECT_EQ(outcome.status, 3) << path;
    EXPECT_EQ(outcome.out, "");
    EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(message));
  }
}

TEST(InspectTest, UnreadableFileIsSaid) {
  const TemporaryDirectory folder;
  fs::copy(golden("2.14-optim"), folder / "ck", fs::copy_options::recursive);
  fs::permissions(folder / "ck" / ".metadata", fs::perms::none);
  Conditions conditions;
  conditions.without_root_rights = true;
  const Outcome outcome = run_tessera({"inspect", folder / "ck"}, conditions);
  EXPECT_EQ(outcome.status, 3);
  EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr(".metadata"));
  EXPECT_THAT(outcome.err, HasSubstr("Permission denied"));
}

TEST(InspectTest, UnreadableFolderIsSaid) {
  const TemporaryDirectory folder;
  fs::copy(golden("2.14-optim"), folder / "ck", fs::copy_options::recursive);
  fs::permissions(folder / "ck", fs::perms::none);
  Conditions conditions;
  conditions.without_root_rights = true;
  const Outcome outcome = run_tessera({"inspect", folder / "ck"}, conditions);
  fs::permissions(folder / "ck", fs::perms::owner_all);
  EXPECT_EQ(outcome.status, 3);
  EXPECT_TRUE(is_one_error_line(outcome.err)) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("Permission denied"));
}

}  // namespace
}  // namespace tessera::testing

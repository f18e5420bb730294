// What `__metadata__` of a safetensors file has for tessera and for PyTorch's DCP is refused if it does not fit.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "support/error_matchers.h"
#include "support/golden.h"
#include "support/temporary_directory.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/format/safetensors.h"

namespace tessera::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using TextByKey = std::map<std::string, std::string>;

class SourceSafetensorsTest : public ::testing::Test {
 protected:
  // Writes a file with the tensor 'a' of this shape.
  void write(const std::string& name, const std::vector<std::int64_t>& shape, const TextByKey& metadata,
             DType dtype = DType::float32) const {
    const auto bytes = static_cast<std::uint64_t>(volume(Box::full(shape)) * dtype_size(dtype));
    Bytes file = safetensors::write_header({{"a", dtype, shape, 0, bytes}}, metadata);
    file.resize(file.size() + bytes);
    std::filesystem::remove(directory_ / name);
    write_new_file(directory_ / name, file);
  }
  std::shared_ptr<const Checkpoint> open_with(const TextByKey& metadata) const {
    write("x.safetensors", {2}, metadata);
    return Checkpoint::open(directory_ / "x.safetensors");
  }

  const testing::TemporaryDirectory directory_;
};

TEST_F(SourceSafetensorsTest, ATensorWithoutOffsetsIsNamedAsSuch) {
  write("x.safetensors", {}, safetensors::dcp_metadata({}));
  EXPECT_ERROR(Checkpoint::open(directory_ / "x.safetensors"), ErrorCode::corrupt,
               "x.safetensors: tensor 'a' is not in DCP_SHARDING_INFO, expected its offsets there");
}

TEST_F(SourceSafetensorsTest, KeysThatOccurTwiceAreRefused) {
  for (const auto& [key, text, twice] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {"tessera.objects", R"({"o": 1, "o": 2})", "o"},
           {"tessera.objects", R"({"o": {"k": 1, "k": 2}})", "k"},
           {"tessera.objects", R"({"": 1, "": 2})", ""},
           {"tessera.paths", R"({"a": ["x"], "a": ["y"]})", "a"},
           {"tessera.dtypes", R"({"a": "float32", "a": "int32"})", "a"}}) {
    EXPECT_ERROR(open_with({{key, text}}), ErrorCode::corrupt,
                 "x.safetensors: the key '" + twice + "' occurs twice in " + key + " in __metadata__",
                 "expected unique keys");
  }
}

TEST_F(SourceSafetensorsTest, WhatIsNoJsonObjectIsRefused) {
  EXPECT_ERROR(open_with({{"tessera.paths", "{"}}), ErrorCode::corrupt,
               "tessera.paths in __metadata__ is no JSON, expected a JSON object");
  EXPECT_ERROR(open_with({{"tessera.objects", "[]"}}), ErrorCode::corrupt,
               "tessera.objects in __metadata__ is a JSON array, expected a JSON object");
}

TEST_F(SourceSafetensorsTest, AnIndexInAPathHas64Bits) {
  EXPECT_EQ(open_with({{"tessera.paths", R"({"a": ["x", 9223372036854775807]})"}})->tensors()[0].path,
            (Path{"x", INT64_MAX}));
  for (const char* number : {"9223372036854775808", "18446744073709551615"}) {
    EXPECT_ERROR(open_with({{"tessera.paths", R"({"a": ["x", )" + std::string(number) + "]}"}}), ErrorCode::corrupt,
                 "x.safetensors: tessera.paths of 'a': found " + std::string(number),
                 "expected strings and integers from -2^63 to 2^63 - 1");
  }
  EXPECT_ERROR(open_with({{"tessera.paths", R"({"a": [[]]})"}}), ErrorCode::corrupt, "found a JSON array in the path");
  EXPECT_ERROR(open_with({{"tessera.paths", R"({"a": "x"})"}}), ErrorCode::corrupt,
               "x.safetensors: tessera.paths of 'a': found a JSON string, expected a list");
}

TEST_F(SourceSafetensorsTest, AnErrorNamesFileAndTensorOrObject) {
  EXPECT_ERROR(open_with({{"tessera.dtypes", R"({"a": "float7"})"}}), ErrorCode::unsupported,
               "x.safetensors: tessera.dtypes of 'a': unknown dtype 'float7'");
  EXPECT_ERROR(open_with({{"tessera.dtypes", R"({"a": 7})"}}), ErrorCode::corrupt,
               "x.safetensors: tessera.dtypes of 'a': found a JSON number, expected a string");
  EXPECT_ERROR(open_with({{"tessera.objects", R"({"o": {"__tessera__": "nonsense"}})"}}), ErrorCode::corrupt,
               "x.safetensors: tessera.objects of 'o': ", "unknown tag");
}

TEST_F(SourceSafetensorsTest, ATensorInTwoFilesIsRefused) {
  write("x.safetensors", {2}, {});
  write("y.safetensors", {2}, {});
  EXPECT_ERROR(Checkpoint::open(directory_.path()), ErrorCode::corrupt,
               "y.safetensors: tensor 'a' is in 'x.safetensors' too, expected it in one file");
  write("x.safetensors", {2}, safetensors::dcp_metadata({{"a", {0}}}));
  write("y.safetensors", {2}, safetensors::dcp_metadata({{"a", {2}}}), DType::int32);
  EXPECT_ERROR(Checkpoint::open(directory_.path()), ErrorCode::corrupt,
               "y.safetensors: tensor 'a' has dtype int32 and 1 dimensions, expected float32 and 1 as in "
               "'x.safetensors'");
}

// The count in the names is that of a mapping from names to files, which may have tensors that the state does not.
TEST_F(SourceSafetensorsTest, ANumberOfPyTorchsShardsThatNoRankHasIsAWarning) {
  const testing::Golden golden = testing::read_golden("2.14-hf");
  for (const std::string rank : {"shard-00001-", "shard-00002-"}) {
    std::filesystem::copy_file(golden.checkpoint / (rank + "model-00001-of-00001.safetensors"),
                               directory_ / (rank + "model-00001-of-00003.safetensors"));
  }
  const auto checkpoint = Checkpoint::open(directory_.path());
  EXPECT_EQ(testing::read_tensors(checkpoint), golden.tensors);
  EXPECT_THAT(checkpoint->warnings(), ElementsAre(HasSubstr("no rank has a file 'model-00002-of-00003.safetensors'"),
                                                  HasSubstr("no rank has a file 'model-00003-of-00003.safetensors'")));
}

}  // namespace
}  // namespace tessera::checkpoint

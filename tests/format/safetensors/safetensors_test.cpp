#include "tessera/format/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "support/chaos.h"
#include "support/error_matchers.h"
#include "support/paths.h"

namespace tessera::safetensors {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

const fs::path kGolden = fs::path(tessera::testing::source_dir()) / "tests" / "golden" / "safetensors";

Bytes with_length(std::uint64_t length, std::string_view rest) {
  Bytes bytes;
  append_little_endian<std::uint64_t>(bytes, length);
  append(bytes, rest);
  return bytes;
}

Header read(const Bytes& bytes) { return read_header(MemorySource(bytes, "mem.safetensors")); }

// Reads a file of this header and so many bytes of data.
Header read_text(std::string_view json, std::size_t data_bytes = 0) {
  return read(with_length(json.size(), std::string(json) + std::string(data_bytes, 'd')));
}

// A header with one tensor `a`, described by `fields`.
Header read_tensor(const std::string& fields, std::size_t data_bytes) {
  return read_text("{\"a\":{" + fields + "}}", data_bytes);
}

Tensor tensor(std::string name, DType dtype, std::vector<std::int64_t> shape, std::uint64_t begin, std::uint64_t end) {
  return {std::move(name), dtype, std::move(shape), begin, end};
}

std::vector<fs::path> golden_files() {
  std::vector<fs::path> paths;
  for (const fs::directory_entry& file : fs::directory_iterator(kGolden)) {
    if (file.path().extension() == ".safetensors") paths.push_back(file.path());
  }
  return paths;
}

TEST(SafetensorsReadTest, FilesOfTheReferenceImplementationAreRead) {
  ASSERT_EQ(golden_files().size(), 6u);
  for (const fs::path& path : golden_files()) {
    SCOPED_TRACE(path);
    const Bytes bytes = read_file(path);
    std::ifstream in(fs::path(path).replace_extension(".json"));
    const nlohmann::json expected = nlohmann::json::parse(in);
    EXPECT_TRUE(looks_like_safetensors(ByteView(bytes).first(std::min<std::size_t>(bytes.size(), 16)), bytes.size()));
    const Header header = read(bytes);
    EXPECT_EQ(header.metadata, (expected.at("metadata").get<std::map<std::string, std::string>>()));
    ASSERT_EQ(header.tensors.size(), expected.at("tensors").size());
    for (const Tensor& found : header.tensors) {
      const nlohmann::json& facts = expected.at("tensors").at(found.name);
      EXPECT_EQ(dtype_name(found.dtype), facts.at("dtype").get<std::string>()) << found.name;
      EXPECT_EQ(found.shape, facts.at("shape").get<std::vector<std::int64_t>>()) << found.name;
      std::string hex;
      for (std::uint64_t i = found.begin_bytes; i < found.end_bytes; ++i) {
        hex += fmt::format("{:02x}", bytes[header.data_offset_bytes + i]);
      }
      EXPECT_EQ(hex, facts.at("bytes").get<std::string>()) << found.name;
    }
  }
}

TEST(SafetensorsReadTest, AllTypesOfTheNewestReferenceAreInTheGoldenFile) {
  std::size_t codes = 0;
  for (std::size_t i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (const auto code = type_code(dtype)) {
      ++codes;
      EXPECT_EQ(dtype_of_type_code(*code), dtype);
    }
  }
  EXPECT_EQ(read(read_file(kGolden / "0.8.0-dtypes.safetensors")).tensors.size(), codes);
  EXPECT_EQ(type_code(DType::float32), "F32");
  EXPECT_FALSE(type_code(DType::complex128));
  EXPECT_FALSE(dtype_of_type_code("F6_E2M3"));
}

TEST(SafetensorsReadTest, LengthsThatCanNotBeEndAtOnce) {
  EXPECT_ERROR(read({}), ErrorCode::corrupt, "mem.safetensors", "0 bytes, expected at least 8");
  EXPECT_ERROR(read(with_length(std::uint64_t{1} << 63, "{}")), ErrorCode::corrupt, "byte 0", "9223372036854775808",
               "at most 2");
  EXPECT_ERROR(read(with_length(UINT64_MAX, "{}")), ErrorCode::corrupt, "header of 18446744073709551615 bytes");
  EXPECT_ERROR(read(with_length(3, "{}")), ErrorCode::corrupt, "header of 3 bytes, expected at most 2");
  EXPECT_ERROR(read(with_length(0, "")), ErrorCode::corrupt, "byte 8");
  EXPECT_TRUE(read(with_length(2, "{}")).tensors.empty());
}

TEST(SafetensorsReadTest, AFileCutOrContinuedAnywhereIsRefused) {
  for (const fs::path& path : golden_files()) {
    SCOPED_TRACE(path);
    Bytes bytes = read_file(path);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      const Bytes prefix(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
      EXPECT_ERROR(read(prefix), ErrorCode::corrupt, "mem.safetensors");
    }
    bytes.push_back(0);
    EXPECT_ERROR(read(bytes), ErrorCode::corrupt, "bytes of data, expected");
  }
}

TEST(SafetensorsReadTest, AnyBitFlippedInTheHeaderIsRefusedOrSaysSomething) {
  for (const fs::path& path : golden_files()) {
    SCOPED_TRACE(path);
    Bytes bytes = read_file(path);
    const std::size_t header_bits = static_cast<std::size_t>(read(bytes).data_offset_bytes) * 8;
    for (std::size_t bit = 0; bit < header_bits; bit += testing::stride_if_sanitized(7)) {
      const auto mask = static_cast<std::uint8_t>(1u << (bit % 8));
      bytes[bit / 8] ^= mask;
      try {
        for (const Tensor& found : read(bytes).tensors) EXPECT_LE(found.begin_bytes, found.end_bytes);
      } catch (const Error& error) {
        EXPECT_TRUE(error.code() == ErrorCode::corrupt || error.code() == ErrorCode::unsupported) << error.what();
      }
      bytes[bit / 8] ^= mask;
    }
  }
}

TEST(SafetensorsReadTest, AHeaderThatIsNoJsonSaysWhere) {
  EXPECT_ERROR(read_text("{\"a\":}"), ErrorCode::corrupt, "mem.safetensors", "byte 14", "syntax error");
  EXPECT_ERROR(read_text("[]"), ErrorCode::corrupt, "byte 8", "the header starts with '[', expected '{'");
  EXPECT_ERROR(read_text(" {}"), ErrorCode::corrupt, "byte 8");
  EXPECT_ERROR(read_text("{}x"), ErrorCode::corrupt, "byte 11");
  EXPECT_ERROR(read_text(std::string_view("{}\0", 3)), ErrorCode::corrupt, "byte 10", "zero byte");
  EXPECT_ERROR(read_text(std::string_view("{}\0garbage", 10)), ErrorCode::corrupt, "byte 10", "zero byte");
  EXPECT_ERROR(read_text("{\"a\xff\":1}"), ErrorCode::corrupt, "byte 12", "UTF-8", "; expected string literal");
  EXPECT_ERROR(read_text("{\"__metadata__\":{\"a\":\"\xff\"}}"), ErrorCode::corrupt, "ill-formed UTF-8 byte",
               ", expected strict JSON in UTF-8");
  EXPECT_ERROR(read_text("{\"\\ud800\":1}"), ErrorCode::corrupt, "surrogate");
  EXPECT_ERROR(read_text("{\"a\":1}"), ErrorCode::corrupt, "'a' is an integer, expected an object");
  EXPECT_ERROR(read_text("{/**/}"), ErrorCode::corrupt, "byte");
  EXPECT_ERROR(read_text("{\"a\":1e999}"), ErrorCode::corrupt, "1e999", "with finite numbers");
  EXPECT_NO_THROW(read_text("{}  \n"));
}

TEST(SafetensorsReadTest, DeepNestingIsRefused) {
  EXPECT_NO_THROW(read_tensor(R"("x":[[[{}]]],"dtype":"U8","shape":[0],"data_offsets":[0,0])", 0));
  EXPECT_ERROR(read_text("{\"a\":{\"x\":" + std::string(1'000'000, '[')), ErrorCode::corrupt,
               "nested deeper than the limit, expected at most 32 levels");
}

TEST(SafetensorsReadTest, KeysThatAreThereTwiceAreRefused) {
  const std::string a = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_ERROR(read_text("{" + a + "," + a + "}", 1), ErrorCode::corrupt, "byte 64", "duplicate key 'a'");
  EXPECT_ERROR(read_tensor(R"("dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1])", 1), ErrorCode::corrupt,
               "duplicate key 'dtype'");
  EXPECT_ERROR(read_text(R"({"__metadata__":{"k":"1","k":"2"}})"), ErrorCode::corrupt, "duplicate key 'k'");
}

TEST(SafetensorsReadTest, MembersOfATensorMustBeWellFormed) {
  const std::string expected = ", expected dtype, shape and two data_offsets";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("shape":[1],"data_offsets":[0,1])", "found no or an empty dtype, a shape and 2 data_offsets" + expected},
      {R"("dtype":"U8","data_offsets":[0,1])", "found a dtype, no shape and 2 data_offsets" + expected},
      {R"("dtype":"U8","shape":[1])", "found a dtype, a shape and 0 data_offsets" + expected},
      {R"("dtype":"U8","shape":[1],"data_offsets":[0,1,1])", "a shape and 3 data_offsets" + expected},
      {R"("dtype":"U8","shape":[1],"data_offsets":[0])", "a shape and 1 data_offsets" + expected},
      {R"("dtype":8,"shape":[1],"data_offsets":[0,1])", "dtype is or contains an integer"},
      {R"("dtype":["U8"],"shape":[1],"data_offsets":[0,1])", "dtype is or contains an array"},
      {R"("dtype":"U8","shape":1,"data_offsets":[0,1])", "shape is or contains an integer"},
      {R"("dtype":"U8","shape":{},"data_offsets":[0,1])", "shape is or contains an object"},
      {R"("dtype":"U8","shape":[[1]],"data_offsets":[0,1])", "shape is or contains an array"},
      {R"("dtype":"U8","shape":[1.0],"data_offsets":[0,1])", "shape is or contains a number with a fraction"},
      {R"("dtype":"U8","shape":[-1],"data_offsets":[0,1])", "shape is or contains a negative integer"},
      {R"("dtype":"U8","shape":[-0],"data_offsets":[0,0])", "shape is or contains a negative integer"},
      {R"("dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1])", "contains 9223372036854775808"},
      {R"("dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,1])", "beyond 64 bits"},
      {R"("dtype":"U8","shape":[1],"data_offsets":["0",1])", "data_offsets is or contains a string"},
  };
  for (const auto& [fields, message] : cases) {
    SCOPED_TRACE(fields);
    EXPECT_ERROR(read_tensor(fields, 1), ErrorCode::corrupt, "mem.safetensors", "byte ", "tensor 'a'", message);
  }
}

TEST(SafetensorsReadTest, UnknownMembersArePassedOverAndUnknownTypesAreUnsupported) {
  EXPECT_EQ(read_tensor(R"("x":{"dtype":1},"dtype":"U8","shape":[1],"data_offsets":[0,1])", 1).tensors.size(), 1u);
  EXPECT_ERROR(read_tensor(R"("dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3])", 3), ErrorCode::unsupported, "byte ",
               "tensor 'a'", "unknown dtype 'F6_E2M3', expected one of safetensors such as 'F32'");
}

TEST(SafetensorsReadTest, FourBitNumbersArePairs) {
  const Header header = read_tensor(R"("dtype":"F4","shape":[2,6],"data_offsets":[0,6])", 6);
  EXPECT_EQ(header.tensors[0], tensor("a", DType::float4_e2m1fn_x2, {2, 3}, 0, 6));
  EXPECT_ERROR(read_tensor(R"("dtype":"F4","shape":[2,3],"data_offsets":[0,3])", 3), ErrorCode::unsupported,
               "F4 with a last dimension of 3, expected a last dimension of even size");
  EXPECT_ERROR(read_tensor(R"("dtype":"F4","shape":[],"data_offsets":[0,1])", 1), ErrorCode::unsupported,
               "F4 with no dimension, expected");
}

TEST(SafetensorsReadTest, MetadataIsStringsOrNull) {
  EXPECT_THAT(read_text(R"({"__metadata__":{"b":"2","a":""}})").metadata, ElementsAre(Pair("a", ""), Pair("b", "2")));
  EXPECT_TRUE(read_text(R"({"__metadata__":null})").metadata.empty());
  EXPECT_ERROR(read_text(R"({"__metadata__":{"a":1}})"), ErrorCode::corrupt,
               "'a' of __metadata__ is an integer, expected a string");
  EXPECT_ERROR(read_text(R"({"__metadata__":{"a":{}}})"), ErrorCode::corrupt,
               "'a' of __metadata__ is an object, expected a string");
  EXPECT_ERROR(read_text(R"({"__metadata__":[]})"), ErrorCode::corrupt, "an array, expected an object");
  EXPECT_ERROR(read_text(R"({"__metadata__":"x"})"), ErrorCode::corrupt, "'__metadata__' is a string");
}

TEST(SafetensorsReadTest, RangesMustBeAsLongAsTheirTensors) {
  EXPECT_ERROR(read_tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])", 4), ErrorCode::corrupt,
               "data_offsets are [0, 4], expected a range of 8 bytes for its shape in F32");
  EXPECT_ERROR(read_tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])", 4), ErrorCode::corrupt,
               "data_offsets are [4, 0]");
  EXPECT_ERROR(
      read_tensor(R"("dtype":"F32","shape":[9223372036854775807,9223372036854775807],"data_offsets":[0,4])", 4),
      ErrorCode::corrupt, "tensor 'a'", "overflows");
  EXPECT_ERROR(read_tensor(R"("dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0])", 0),
               ErrorCode::corrupt, "tensor 'a'", "overflows");
}

TEST(SafetensorsReadTest, HolesOverlapsAndTrailingBytesAreRefused) {
  const auto two = [](const std::string& first, const std::string& second, std::size_t data_bytes) {
    return read_text(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)" + first +
                         R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + second + "}}",
                     data_bytes);
  };
  EXPECT_EQ(two("[2,4]", "[0,2]", 4).tensors[0].name, "b") << "in order of offset";
  EXPECT_ERROR(two("[0,2]", "[3,5]", 5), ErrorCode::corrupt, "byte 112", "tensor 'b' at [3, 5)", "begin at 2");
  EXPECT_ERROR(two("[0,2]", "[1,3]", 3), ErrorCode::corrupt, "tensor 'b' at [1, 3)", "begin at 2");
  EXPECT_ERROR(two("[0,2]", "[0,2]", 2), ErrorCode::corrupt, "tensor 'b' at [0, 2)", "begin at 2");
  EXPECT_ERROR(two("[1,3]", "[3,5]", 5), ErrorCode::corrupt, "tensor 'a' at [1, 3)", "begin at 0");
  EXPECT_ERROR(two("[0,2]", "[2,4]", 5), ErrorCode::corrupt, "5 bytes of data, expected 4");
  EXPECT_ERROR(two("[0,2]", "[2,4]", 3), ErrorCode::corrupt, "tensor 'b' at [2, 4)", "within its 3 bytes");
  EXPECT_ERROR(read_text("{}", 1), ErrorCode::corrupt, "1 bytes of data, expected 0");
}

TEST(SafetensorsReadTest, EmptyTensorsLieBetweenOthersNotInside) {
  const auto file = [](const std::string& at) {
    return read_text(
        R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
        R"("e":{"dtype":"U8","shape":[0],"data_offsets":[)" +
            at + "]}}",
        4);
  };
  EXPECT_EQ(file("2,2").tensors[1].name, "e");
  EXPECT_EQ(file("4,4").tensors[2].name, "e");
  EXPECT_ERROR(file("1,1"), ErrorCode::corrupt, "tensor 'e' at [1, 1)");
  EXPECT_ERROR(file("5,5"), ErrorCode::corrupt, "tensor 'e' at [5, 5)");
}

TEST(SafetensorsReadTest, AFileIsRecognisedByItsLength) {
  EXPECT_TRUE(looks_like_safetensors(with_length(2, "{}"), 10));
  EXPECT_TRUE(looks_like_safetensors(with_length(2, ""), 10));
  EXPECT_FALSE(looks_like_safetensors(with_length(2, "[]"), 10));
  EXPECT_FALSE(looks_like_safetensors(with_length(3, "{}"), 10));
  EXPECT_FALSE(looks_like_safetensors(with_length(1, "{"), 10));
  EXPECT_FALSE(looks_like_safetensors(as_bytes("PK\x03\x04"), 10));
  EXPECT_FALSE(looks_like_safetensors(as_bytes(std::string_view("PK\x03\x04\0\0\x08\x08", 8)), 1u << 30));
}

TEST(SafetensorsWriteTest, HeadersAreThoseOfTheReferenceByteForByte) {
  for (const fs::path& path : golden_files()) {
    SCOPED_TRACE(path);
    const Bytes bytes = read_file(path);
    const Header header = read(bytes);
    EXPECT_EQ(as_text(write_header(header.tensors, header.metadata)),
              as_text(ByteView(bytes).first(header.data_offset_bytes)));
  }
}

TEST(SafetensorsWriteTest, WhatIsWrittenIsReadBack) {
  const std::vector<Tensor> tensors = {tensor("x", DType::float32, {}, 0, 4),
                                       tensor("\x01\"\\/\xc3\xbc", DType::bool_, {2, 0}, 4, 4),
                                       tensor("", DType::float4_e2m1fn_x2, {3}, 4, 7)};
  const std::map<std::string, std::string> metadata = {{"k\n", "v\t"}, {"", ""}};
  Bytes bytes = write_header(tensors, metadata);
  EXPECT_EQ(bytes.size() % 8, 0u);
  append(bytes, "1234567");
  const Header header = read(bytes);
  EXPECT_EQ(header.tensors, tensors);
  EXPECT_EQ(header.metadata, metadata);
}

TEST(SafetensorsWriteTest, WhatReadersWouldRefuseIsNotWritten) {
  const auto write = [](std::vector<Tensor> tensors) { return write_header(tensors, {}); };
  const Tensor a = tensor("a", DType::uint8, {2}, 0, 2);
  EXPECT_ERROR(write({a, tensor("a", DType::uint8, {2}, 2, 4)}), ErrorCode::invalid_argument,
               "duplicate tensor name 'a'");
  EXPECT_ERROR(write({tensor("__metadata__", DType::uint8, {2}, 0, 2)}), ErrorCode::invalid_argument,
               "duplicate tensor name");
  EXPECT_ERROR(write({a, tensor("b", DType::uint8, {2}, 3, 5)}), ErrorCode::invalid_argument, "'b'", "2 bytes from 2");
  EXPECT_ERROR(write({tensor("b", DType::float32, {2}, 0, 2)}), ErrorCode::invalid_argument, "expected 8 bytes from 0");
  EXPECT_ERROR(write({tensor("b\xff", DType::uint8, {2}, 0, 2)}), ErrorCode::invalid_argument, "not UTF-8");
  EXPECT_ERROR(write({tensor("b", DType::complex128, {1}, 0, 16)}), ErrorCode::unsupported, "'b'", "complex128",
               "expected a dtype that has one");
}

TEST(SafetensorsIndexTest, AnIndexIsReadAndWritten) {
  const std::string json =
      "{\n  \"metadata\": {\n    \"format\": \"pt\",\n    \"total_size\": 12\n  },\n  \"weight_map\": {\n"
      "    \"a\": \"model-00001-of-00002.safetensors\",\n    \"b\": \"model-00002-of-00002.safetensors\"\n  }\n}\n";
  const Index index = read_index(as_bytes(json), "index.json");
  EXPECT_EQ(index.total_size, 12u);
  EXPECT_THAT(index.metadata, ElementsAre(Pair("format", "pt")));
  EXPECT_THAT(index.weight_map, ElementsAre(Pair("a", "model-00001-of-00002.safetensors"),
                                            Pair("b", "model-00002-of-00002.safetensors")));
  EXPECT_EQ(as_text(write_index(index)), json);
  EXPECT_NO_THROW(read_index(write_index(Index()), "empty"));
}

TEST(SafetensorsIndexTest, OtherMembersArePassedOver) {
  const Index index =
      read_index(as_bytes(R"({"x":[1],"metadata":{"total_size":12.0,"n":{"a":[1]}},"weight_map":{}})"), "i");
  EXPECT_EQ(index.total_size, 12u);
  EXPECT_TRUE(index.metadata.empty());
}

TEST(SafetensorsIndexTest, FilesOutsideOfTheFolderAreRefused) {
  for (const char* file : {"../secret", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a\\\\b", "a\\u0000b"}) {
    SCOPED_TRACE(file);
    EXPECT_ERROR(read_index(as_bytes(fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", file)), "index.json"),
                 ErrorCode::corrupt, "index.json", "byte ", "the file of 'a'", "without folders");
  }
}

TEST(SafetensorsIndexTest, MalformedIndexesAreRefused) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[]", "expected an object"},
      {"1", "expected an object"},
      {"{}", "without weight_map"},
      {R"({"weight_map":[]})", "weight_map is an array"},
      {R"({"weight_map":1})", "weight_map is an integer, expected an object"},
      {R"({"weight_map":{"a":1}})", "the file of 'a' is an integer, expected a string"},
      {R"({"weight_map":{"a":{}}})", "the file of 'a' is an object, expected a string"},
      {R"({"weight_map":{"a":"x","a":"y"}})", "duplicate key 'a'"},
      {R"({"metadata":{"total_size":"1"},"weight_map":{}})", "total_size is a string"},
      {R"({"metadata":{"total_size":[]},"weight_map":{}})", "total_size is an array, expected a number of bytes"},
      {R"({"metadata":{"total_size":-1},"weight_map":{}})", "total_size is a negative integer"},
      {R"({"metadata":{"total_size":1.5},"weight_map":{}})", "total_size is a number with a fraction"},
      {R"({"weight_map":{})", "syntax error"},
  };
  for (const auto& [json, message] : cases) {
    SCOPED_TRACE(json);
    EXPECT_ERROR(read_index(as_bytes(json), "index.json"), ErrorCode::corrupt, "index.json", message);
  }
}

Header sharded(std::string info, std::string version = "1.0") {
  Header header;
  header.tensors = {tensor("w", DType::float32, {2, 3}, 0, 24), tensor("b", DType::float32, {2}, 24, 32)};
  header.metadata = {{"DCP_SHARDING_INFO", std::move(info)}, {"DCP_VERSION", std::move(version)}};
  return header;
}

TEST(SafetensorsDcpTest, OffsetsOfShardsThatPyTorchSavedAreRead) {
  const fs::path folder = kGolden.parent_path() / "checkpoints/2.14-hf/ck";
  const Header header = read(read_file(folder / "shard-00002-model-00001-of-00001.safetensors"));
  const auto offsets = dcp_saved_offsets(header, "shard 2");
  ASSERT_TRUE(offsets);
  EXPECT_EQ(offsets->size(), header.tensors.size());
  for (const Tensor& stored : header.tensors) EXPECT_EQ(offsets->at(stored.name).size(), stored.shape.size());
  EXPECT_EQ(header.metadata.at("format"), "pt");
}

TEST(SafetensorsDcpTest, MetadataIsReadBackAndIsPythonsText) {
  const std::map<std::string, std::vector<std::int64_t>> offsets = {{"b", {7}}, {"w", {4, 0}}};
  const std::map<std::string, std::string> metadata = dcp_metadata(offsets);
  EXPECT_THAT(metadata, UnorderedElementsAre(Pair("format", "pt"), Pair("DCP_VERSION", "1.0"),
                                             Pair("DCP_SHARDING_INFO",
                                                  R"({"b": {"saved_offsets": [7]}, "w": {"saved_offsets": [4, 0]}})")));
  Header header = sharded("");
  header.metadata = metadata;
  EXPECT_EQ(dcp_saved_offsets(header, "f"), offsets);
  EXPECT_EQ(dcp_metadata({{"\xc3\xbc", {}}}).at("DCP_SHARDING_INFO"), R"({"\u00fc": {"saved_offsets": []}})");
  header.metadata.erase("DCP_SHARDING_INFO");
  EXPECT_FALSE(dcp_saved_offsets(header, "f"));
}

TEST(SafetensorsDcpTest, MalformedShardingInfoIsRefused) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "JSON, byte 0: parse error"},
      {"[]", "expected an object"},
      {"1", "an integer"},
      {R"({"w":[]})", "an array, expected an object"},
      {R"({"w":1})", "an integer"},
      {R"({"w":{}})", "tensor 'w' has no saved_offsets, expected a list of 2 numbers"},
      {R"({"w":{"saved_offsets":{}}})", "an object, expected an array"},
      {R"({"w":{"saved_offsets":1}})", "an integer"},
      {R"({"w":{"saved_offsets":[[1]]}})", "saved_offsets of 'w' has an array, expected integers"},
      {R"({"w":{"saved_offsets":[-1,0]}})", "a negative integer"},
      {R"({"w":{"saved_offsets":[0,9223372036854775808]}})", "expected integers"},
      {R"({"w":{"saved_offsets":[0]}})", "2 dimensions and 1 saved_offsets"},
      {R"({"z":{"saved_offsets":[0]}})", "tensor 'z' is not in this file, expected one of its 2 tensors"},
  };
  for (const auto& [info, message] : cases) {
    SCOPED_TRACE(info);
    EXPECT_ERROR(dcp_saved_offsets(sharded(info), "f"), ErrorCode::corrupt, "f: DCP_SHARDING_INFO", message);
  }
  EXPECT_ERROR(dcp_saved_offsets(sharded("{}", "2.0"), "f"), ErrorCode::unsupported, "DCP_VERSION '2.0'");
}

TEST(SafetensorsNameTest, ShardsAreNumberedFromOne) {
  EXPECT_EQ(shard_file_name(0, 1), "model.safetensors");
  EXPECT_EQ(shard_file_name(1, 5), "model-00002-of-00005.safetensors");
  EXPECT_EQ(shard_file_name(99'999, 100'000), "model-100000-of-100000.safetensors");
}

}  // namespace
}  // namespace tessera::safetensors

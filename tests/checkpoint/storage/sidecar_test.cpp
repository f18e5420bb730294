#include "tessera/checkpoint/sidecar.h"

#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/base/crc32.h"

namespace tessera::checkpoint {
namespace {

using testing::TemporaryDirectory;

TEST(FileSumsTest, PiecesOfAnySizeHaveTheFactsOfAllTogether) {
  Bytes contents(3 * Sidecar::kBlockBytes + 77);
  for (std::size_t i = 0; i < contents.size(); ++i) contents[i] = static_cast<std::uint8_t>(i * i >> 7);
  for (const std::size_t piece : {std::size_t{1000}, std::size_t{Sidecar::kBlockBytes}, contents.size()}) {
    FileSums sums;
    for (std::size_t at = 0; at < contents.size(); at += piece)
      sums.add(ByteView(contents).subspan(at, std::min(piece, contents.size() - at)));
    EXPECT_EQ(sums.size_bytes(), contents.size());
    EXPECT_EQ(sums.facts(), facts_of(contents));
    EXPECT_EQ(sums.facts().crc32, crc32(contents));
    EXPECT_EQ(sums.facts().blocks(), 4u);
  }
  EXPECT_EQ(FileSums().facts(), facts_of({}));
}

TEST(SidecarTest, WhatIsWrittenIsRead) {
  const TemporaryDirectory directory;
  Sidecar sidecar;
  sidecar.files[".metadata"] = {17, 0x00000abc, 0, {}};
  sidecar.files["__0_0.distcp"] = {std::uint64_t{1} << 40, 0xffffffff, 0, {}};
  sidecar.files["blocks"] = facts_of(Bytes(3 * Sidecar::kBlockBytes + 1, 7));
  write_new_file(directory / std::string(kSidecarFileName), write_sidecar(sidecar));
  EXPECT_EQ(read_sidecar(directory.path()), sidecar);
}

TEST(SidecarTest, TheGenerationIsAtTheBeginningAndReadersIgnoreIt) {
  Sidecar sidecar;
  sidecar.files["\"generation\": 7,"] = facts_of_blocks(200 * Sidecar::kBlockBytes, std::vector<std::uint32_t>(200));
  EXPECT_EQ(sidecar_generation(write_sidecar(sidecar)), std::nullopt);
  for (const std::int64_t generation : {std::int64_t{0}, std::int64_t{17}, INT64_MAX - 1}) {
    const Bytes contents = write_sidecar(sidecar, generation);
    EXPECT_EQ(parse_sidecar(contents, "a"), sidecar);
    EXPECT_EQ(sidecar_generation(contents), generation);
    EXPECT_EQ(sidecar_generation(ByteView(contents).first(1024)), generation);
  }
}

TEST(SidecarTest, ADamagedGenerationIsNone) {
  for (const char* text : {"", "{", R"({"version": 2, "generation": 17)", R"({"generation": -1, "files": {}})",
                           R"({"generation": 1.5, "files": {}})", R"({"generation": "1", "files": {}})",
                           R"({"generation": 99999999999999999999, "files": {}})"}) {
    EXPECT_EQ(sidecar_generation(as_bytes(std::string_view(text))), std::nullopt) << text;
  }
}

TEST(SidecarTest, ADirectoryWithoutOneHasNone) {
  const TemporaryDirectory directory;
  EXPECT_EQ(read_sidecar(directory.path()), std::nullopt);
}

TEST(SidecarTest, ASingleFileHasItsBeside) {
  EXPECT_EQ(sidecar_path("/x/model.safetensors"), "/x/model.safetensors.tessera.json");
}

TEST(SidecarTest, AnIndexHasThatOfItsDirectory) {
  EXPECT_EQ(sidecar_path("/x/model.safetensors.index.json"), "/x/.tessera.json");
  EXPECT_EQ(sidecar_path("pytorch_model.bin.index.json"), "./.tessera.json");
}

TEST(SidecarTest, OneThatASaveLeftIsNotComparedWithMetadataOfAnotherSize) {
  const TemporaryDirectory directory;
  write_new_file(directory / std::string(".tessera.json.tmp"),
                 as_bytes(R"({"version": 2, "files": {".metadata": {"bytes": 1, "crc32": "00000000"}}})"));
  write_new_file(directory / std::string(".metadata"), {});
  std::filesystem::resize_file(directory / std::string(".metadata"), std::uint64_t{1} << 40);  // without data
  EXPECT_EQ(read_sidecar(directory.path()), std::nullopt);
}

TEST(SidecarTest, DamagedOnesAreRefused) {
  const auto read = [](std::string_view text) {
    const TemporaryDirectory directory;
    write_new_file(directory / std::string(kSidecarFileName), as_bytes(text));
    return read_sidecar(directory.path());
  };
  EXPECT_ERROR(read("{"), ErrorCode::corrupt, "found no JSON, expected a JSON object");
  EXPECT_ERROR(read("[]"), ErrorCode::corrupt, "found a JSON array, expected a JSON object");
  EXPECT_ERROR(read("{}"), ErrorCode::corrupt, "no version");
  EXPECT_ERROR(read(R"({"version": 3})"), ErrorCode::unsupported, "version 3, expected 1 to 2");
  EXPECT_ERROR(read(R"({"version": 2, "block_bytes": 0, "files": {}})"), ErrorCode::corrupt, "block_bytes is 0");
  for (const char* blocks : {"00000000", "0000000000000000000000", "000000000000000g", "000000000000000000000000"}) {
    EXPECT_ERROR(read(fmt::format(R"({{"version": 2, "block_bytes": 4096, "files": {{"a": {{"bytes": 8192,
                                      "crc32": "00000000", "blocks": "{}"}}}}}})",
                                  blocks)),
                 ErrorCode::corrupt, "'a'", "expected");
  }
  EXPECT_ERROR(read(R"({"version": 1})"), ErrorCode::corrupt, "found nothing for files, expected an object");
  EXPECT_ERROR(read(R"({"version": 1, "files": {"a": {"bytes": -1, "crc32": "00000000"}}})"), ErrorCode::corrupt, "'a'",
               "found -1 for bytes, expected an integer of at least 0");
  EXPECT_ERROR(read(R"({"version": 1, "files": {"a": {"bytes": 1, "crc32": "0000000g"}}})"), ErrorCode::corrupt, "'a'",
               "crc32 '0000000g'");
  EXPECT_ERROR(read(R"({"version": 1, "files": {"a": {"bytes": 1, "crc32": "00000000"}, "a": {}}})"),
               ErrorCode::corrupt, "occurs twice");
  // To print it would take a stack as deep.
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  EXPECT_ERROR(read(R"({"version": 2, "block_bytes": )" + deep + "}"), ErrorCode::corrupt,
               "block_bytes is a JSON array, expected at least");
}

}  // namespace
}  // namespace tessera::checkpoint

// Files of PyTorch, truncated at every length and with every bit flipped.

#include <gtest/gtest.h>

#include <filesystem>
#include <optional>
#include <string_view>

#include "support/chaos.h"
#include "support/paths.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/format/dcp_metadata.h"

namespace tessera::dcp {
namespace {

// Returns the contents of `bytes`, or nothing if they are refused with an error about the contents.
std::optional<Metadata> read_or_refuse(const Bytes& bytes) {
  try {
    return read(MemorySource(bytes, "ck/.metadata"));
  } catch (const Error& error) {
    EXPECT_TRUE(error.code() == ErrorCode::corrupt || error.code() == ErrorCode::unsupported) << error.what();
    EXPECT_NE(std::string_view(error.what()).find("ck/.metadata"), std::string_view::npos) << error.what();
    return std::nullopt;
  }
}

class DcpMetadataBitsTest : public ::testing::TestWithParam<const char*> {
 protected:
  // Every bit of one file. The other files are similar: a step there that visits all eight bit positions.
  const std::size_t step =
      (GetParam() == std::string_view("2.14-optim") ? 1 : 11) * tessera::testing::stride_if_sanitized(17);
  Bytes bytes = read_file(std::filesystem::path(tessera::testing::source_dir()) / "tests/golden/checkpoints" /
                          GetParam() / "ck/.metadata");
};

TEST_P(DcpMetadataBitsTest, CutAnywhereItIsCorrupt) {
  for (std::size_t size = 0; size < bytes.size(); size += step) {
    const MemorySource prefix(ByteView(bytes).first(size), "ck/.metadata");
    try {
      read(prefix);
      ADD_FAILURE() << "read of the first " << size << " bytes";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt) << error.what();
      EXPECT_NE(std::string_view(error.what()).find(" at byte "), std::string_view::npos) << error.what();
    }
  }
}

// The format has no checksum (the sidecar has one), so a flipped bit may change the contents. These must be consistent.
TEST_P(DcpMetadataBitsTest, WithAnyBitFlippedItIsRefusedOrSaysSomething) {
  std::size_t refused = 0, tried = 0;
  for (std::size_t bit = 0; bit < bytes.size() * 8; bit += step, ++tried) {
    SCOPED_TRACE(::testing::Message() << "bit " << bit % 8 << " of byte " << bit / 8);
    const auto mask = static_cast<std::uint8_t>(1u << (bit % 8));
    bytes[bit / 8] ^= mask;
    if (const auto metadata = read_or_refuse(bytes)) {
      const auto again = read_or_refuse(write(*metadata));
      EXPECT_TRUE(again && equal(*again, *metadata));
    } else {
      ++refused;
    }
    bytes[bit / 8] ^= mask;
  }
  EXPECT_GT(refused, tried / 2) << "most bits are opcodes, lengths and names of classes";
}

INSTANTIATE_TEST_SUITE_P(PyTorch, DcpMetadataBitsTest, ::testing::Values("1.13-sharded", "2.6-optim", "2.14-optim"),
                         [](const auto& test) {
                           std::string name = test.param;
                           for (char& c : name) {
                             if (c == '.' || c == '-') c = '_';
                           }
                           return name;
                         });

}  // namespace
}  // namespace tessera::dcp

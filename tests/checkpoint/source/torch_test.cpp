#include <gtest/gtest.h>

#include <string>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/format/torch_archive.h"

namespace tessera::checkpoint {
namespace {

using namespace std::literals;

class SourceTorchTest : public ::testing::Test {
 protected:
  // Opens a torch.save file without storages.
  std::shared_ptr<const Checkpoint> open(const std::string& data_pkl) {
    const ByteView pickle = as_bytes(data_pkl);
    const torch_archive::ArchiveLayout layout("archive", Bytes(pickle.begin(), pickle.end()), {});
    const auto path = directory_ / "in.pt";
    std::filesystem::remove(path);
    write_new_file(path, layout.trailer({}));
    return Checkpoint::open(path);
  }

  testing::TemporaryDirectory directory_;
};

// 40 nested containers, each of which holds the previous one ten times.
std::string bomb(const std::string& empty, const std::string& key, const std::string& fill) {
  std::string bytes = "\x80\x02" + empty + "q" + '\0';
  for (char i = 0; i < 40; ++i) {
    bytes += "0" + empty + "(";
    for (char j = 0; j < 10; ++j) {
      if (!key.empty()) bytes += key + static_cast<char>('a' + j);
      bytes += std::string("h") + i;
    }
    bytes += fill + "q" + static_cast<char>(i + 1);
  }
  return bytes + ".";
}

TEST_F(SourceTorchTest, ListsThatAreSharedManyTimesAreOneObject) {
  const auto checkpoint = open(bomb("]", "", "e"));
  EXPECT_EQ(checkpoint->objects().size(), 1u);
}

TEST_F(SourceTorchTest, DictsThatAreSharedTooManyTimesAreRefused) {
  EXPECT_ERROR(open(bomb("}", std::string("X\x01\0\0\0", 5), "u")), ErrorCode::corrupt, "in.pt",
               "repeats the same containers many times");
}

TEST_F(SourceTorchTest, ATensorOfManyDimensionsThatIsSharedIsRefused) {
  // 20,000 references to a tensor of 20,000 dimensions.
  std::string pickle = "\x80\x02(" + std::string("K\0", 2);
  for (int i = 1; i < 20'000; ++i) pickle += "K\x01";
  pickle += "tq" + std::string("\0", 1) + "0";
  pickle +=
      "ctorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\nFloatStorage\nU\x01"
      "0U\x03"
      "cpuK"s +
      '\0' + "tQK" + '\0';
  pickle += "h\0h\0"s +
            "I00\nccollections\nOrderedDict\n)RtRq\x01"
            "0}U\x01"
            "a](";
  for (int i = 0; i < 20'000; ++i) pickle += "h\x01";
  pickle += "es.";
  const ByteView bytes = as_bytes(pickle);
  const torch_archive::ArchiveLayout layout("archive", Bytes(bytes.begin(), bytes.end()), {{"0", 0}});
  Bytes file = layout.before_storage(0, {});
  append(file, layout.trailer({0}));
  write_new_file(directory_ / "in.pt", file);
  EXPECT_ERROR(Checkpoint::open(directory_ / "in.pt"), ErrorCode::corrupt, "in.pt",
               "the flattened state takes more than 64.0 MiB");
}

TEST_F(SourceTorchTest, AListThatHoldsItselfIsOneObject) {
  const auto checkpoint = open(
      "\x80\x02]q\x01h\x01"
      "a.");
  EXPECT_EQ(checkpoint->objects().size(), 1u);
}

TEST_F(SourceTorchTest, ADictThatIsSharedAFewTimesHasItsNamesEachTime) {
  const auto checkpoint = open(
      "\x80\x02}(X\x01\0\0\0"
      "a}q\x01X\x01\0\0\0xK\x05sX\x01\0\0\0"
      "bh\x01u."s);
  ASSERT_EQ(checkpoint->objects().size(), 2u);
  EXPECT_EQ(checkpoint->objects()[0].name, "a.x");
  EXPECT_EQ(checkpoint->objects()[1].name, "b.x");
}

}  // namespace
}  // namespace tessera::checkpoint

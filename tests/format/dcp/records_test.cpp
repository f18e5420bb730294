#include "format/dcp/records.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "format/dcp/read.h"
#include "support/error_matchers.h"
#include "support/paths.h"
#include "tessera/base/file.h"
#include "tessera/format/dcp_metadata.h"
#include "tessera/format/pickle_writer.h"
#include "tessera/format/python_value.h"

namespace tessera::dcp {
namespace {

namespace fs = std::filesystem;
using pickle::Kind;
using pickle::NodeRef;
using pickle::RecordCursor;
namespace op = pickle::op;

// Takes m.C followed by an int, and m.S followed by a string, each with an optional MEMOIZE after it.
class Taker final : public pickle::RecordTaker {
 public:
  std::optional<std::uint64_t> take(NodeRef global, RecordCursor& cursor) override {
    std::int64_t number = 0;
    NodeRef text;
    if (global.is_global("m", "C")) {
      if (!cursor.integer(number)) return std::nullopt;
      cursor.memoize();
      taken.push_back(std::to_string(number));
    } else if (global.is_global("m", "S")) {
      if (!cursor.string(text)) return std::nullopt;
      cursor.memoize();
      taken.emplace_back(text.string());
    } else {
      return std::nullopt;
    }
    return taken.size() - 1;
  }
  std::vector<std::string> taken;
};

// The pickle after `cm\nC\n` has been put at 0 and `cm\nS\n` at 1, with nothing but a mark on the stack.
struct Read {
  std::vector<std::string> taken;
  std::string root;
};
Read read_taking(const std::string& opcodes) {
  const std::string bytes =
      "\x80\x04"
      "cm\nC\n\x94"
      "0cm\nS\n\x94"
      "0(" +
      opcodes + "t.";
  Taker taker;
  const pickle::ReadResult result = pickle::read_taking(MemorySource(as_bytes(bytes), "test.pkl"), taker);
  return {taker.taken, pickle::repr(result.tree.root())};
}

const std::string kC = std::string("h") + '\0', kS = "h\x01";

TEST(RecordsTest, IntegersOfEveryForm) {
  using Texts = std::vector<std::string>;
  EXPECT_EQ(read_taking(kC + "K\xff\x94").taken, Texts{"255"});
  EXPECT_EQ(read_taking(kC + "M\xff\xff\x94").taken, Texts{"65535"});
  EXPECT_EQ(read_taking(kC + "J\xff\xff\xff\xff\x94").taken, Texts{"-1"});
  EXPECT_EQ(read_taking(kC + std::string("\x8a\x05\0\0\0\0\x01\x94", 8)).taken, Texts{"4294967296"});
  EXPECT_EQ(read_taking(kC + "K\xff\x94" + kC + "K\x07\x94").root, "(<taken record>, <taken record>)");
}

TEST(RecordsTest, WhatTheTakerDoesNotKnowIsReadAsItIs) {
  const Read none = read_taking(kC + "N" + kS + "K\x01" + kC + "\x8a\x09" + std::string(8, '\xff') + '\x7f');
  EXPECT_EQ(none.taken, std::vector<std::string>{});
  EXPECT_EQ(none.root, "(<m.C>, None, <m.S>, 1, <m.C>, 2361183241434822606847)");
}

TEST(RecordsTest, WhatIsPutBehindRecordsHasItsNumber) {
  // Indices 2 and 3 are the records'; then a list is 4.
  EXPECT_EQ(read_taking(kC + "K\x01\x94" + kC + "K\x02\x94" + "]\x94h\x04").root,
            "(<taken record>, <taken record>, [], [])");
}

// Writers do not memoize values that are never fetched.
TEST(RecordsTest, WhatIsNotPutHasNoNumber) {
  EXPECT_EQ(read_taking(kC + "K\x01" + kC + "K\x02\x94" + "]\x94h\x03").root,
            "(<taken record>, <taken record>, [], [])");
  const Read read = read_taking(kS + "\x8c\x02hi" + kS + "\x8c\x02ho\x94" + "h\x02");
  EXPECT_EQ(read.taken, (std::vector<std::string>{"hi", "ho"}));
  EXPECT_EQ(read.root, "(<taken record>, <taken record>, 'ho')");
}

TEST(RecordsTest, TextInARecordCanBeFetched) {
  const Read read = read_taking(kS + "\x8c\x02hi\x94\x94" + kS + "h\x02\x94" + "h\x02");
  EXPECT_EQ(read.taken, (std::vector<std::string>{"hi", "hi"}));
  EXPECT_EQ(read.root, "(<taken record>, <taken record>, 'hi')");
}

TEST(RecordsTest, NothingElseInARecordCanBeFetched) {
  EXPECT_ERROR(read_taking(kC + "K\x01\x94h\x02"), ErrorCode::corrupt, "memo index 2 was never put");
  EXPECT_ERROR(read_taking(kS + "\x8c\x02hi\x94\x94h\x03"), ErrorCode::corrupt, "memo index 3 was never put");
  EXPECT_ERROR(read_taking(kC + "K\x01\x94]q\x02"), ErrorCode::corrupt, "memo index 2 after records");
}

TEST(RecordsTest, EveryPrefixIsCorrupt) {
  const std::string start = kC + std::string("\x8a\x05\0\0\0\0\x01\x94", 8) + kS + "\x8c\x02hi\x94\x94";
  const std::string bytes =
      "\x80\x04"
      "cm\nC\n\x94"
      "0cm\nS\n\x94"
      "0(" +
      start + "t.";
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    Taker taker;
    const MemorySource prefix(as_bytes(std::string_view(bytes).substr(0, size)), "test.pkl");
    EXPECT_ERROR(pickle::read_taking(prefix, taker), ErrorCode::corrupt, "test.pkl", "at byte");
  }
}

std::vector<fs::path> all_metadata() {
  std::vector<fs::path> found;
  for (const auto& entry :
       fs::recursive_directory_iterator(fs::path(tessera::testing::source_dir()) / "tests" / "golden")) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".metadata")) found.push_back(entry.path());
  }
  return found;
}

TEST(RecordsTest, TheSameIsReadFromRecordsAsFromTheTree) {
  for (const fs::path& path : all_metadata()) {
    const File file = File::open_read(path);
    EXPECT_TRUE(equal(read_records(file), read_tree(file))) << path;
  }
}

// The fraction of the records of storage_data that are taken.
double part_taken(const ByteSource& source) {
  Input input(source.name(), source.size_bytes());
  Records records(input, source.size_bytes());
  const pickle::ReadResult result = pickle::read_taking(source, records);
  const NodeRef fields = result.tree.root().object().state;
  std::size_t taken = 0;
  const auto pairs = fields.find("storage_data")->pairs();
  for (const pickle::Pair& pair : pairs) {
    taken += (pair.key.is(Kind::taken) ? 1u : 0u) + (pair.value.is(Kind::taken) ? 1u : 0u);
  }
  return static_cast<double>(taken) / static_cast<double>(2 * pairs.size());
}

// Checkpoints that PyTorch saved from several ranks. If no record were taken, reading would only be slower.
TEST(RecordsTest, WhatPyTorchWritesIsTaken) {
  const fs::path path = fs::path(tessera::testing::source_dir()) / "tests/golden/demo/ck/.metadata";
  EXPECT_GT(part_taken(File::open_read(path)), 0.9);
}

// A pickle that is read in one piece and in windows.
TEST(RecordsTest, MovingTheWindowChangesNothing) {
  Bytes bytes;
  pickle::Writer writer(bytes, 4);
  pickle::Tree tree;
  std::vector<NodeRef> items;
  for (std::int64_t i = 0; i < 300'000; ++i) {
    items.push_back(tree.make_integer(i * i));
    items.push_back(tree.make_string("text " + std::to_string(i % 1000)));
  }
  const NodeRef list = tree.make_list();
  tree.append(list, items);
  writer.value(list);
  writer.stop();
  ASSERT_GT(bytes.size(), std::size_t{5} << 20);
  Taker taker;
  const pickle::ReadResult windows = pickle::read_taking(MemorySource(bytes, "test.pkl"), taker);
  EXPECT_EQ(windows.length_bytes, bytes.size());
  EXPECT_TRUE(pickle::equal(windows.tree.root(), list));

  // The end is reported as for a pickle in one piece.
  bytes.back() = op::POP;
  EXPECT_ERROR(pickle::read_taking(MemorySource(bytes, "test.pkl"), taker), ErrorCode::corrupt,
               "end of the bytes at byte " + std::to_string(bytes.size()) + ": the pickle ends without STOP");
}

// `count` chunks of tensors of 1000 chunks.
Metadata many_chunks(std::size_t count) {
  Metadata metadata;
  metadata.files = {"__0_0.distcp", "__1_0.distcp"};
  for (std::size_t i = 0; i < count / 1000; ++i) {
    MetadataEntry& entry = metadata.entries.emplace_back();
    entry.name = "layers." + std::to_string(i) + ".weight";
    entry.is_tensor = true;
    entry.shape = {1000, 4};
    entry.chunks = BoxList(2);
    for (std::int64_t row = 0; row < 1000; ++row) {
      const std::int64_t offsets[] = {row, 0}, sizes[] = {1, 4};
      entry.chunks.push_back({offsets, sizes});
      entry.items.push_back({static_cast<std::uint32_t>(row % 2), 0, row * 1000, 16});
    }
  }
  return metadata;
}

TEST(RecordsTest, ManyChunksAreTakenFromWindows) {
  const Metadata metadata = many_chunks(40'000);
  const Bytes bytes = write(metadata);
  ASSERT_GT(bytes.size(), std::size_t{3} << 20);
  EXPECT_TRUE(equal(read_records(MemorySource(bytes, "test")), metadata));
  EXPECT_GT(part_taken(MemorySource(bytes, "test")), 0.999);
}

// None has the identity 0, as a name that was never seen might have.
TEST(RecordsTest, NoneIsNoNameOfAField) {
  const auto is_taken = [](std::string_view offsets, std::string_view sizes) {
    const pickle::GlobalName chunk = class_name(Class::chunk, Dialect::torch_2);
    std::string bytes =
        "\x80\x04"
        "c";
    bytes.append(chunk.module)
        .append("\n")
        .append(chunk.name)
        .append(
            "\n\x94"
            "0ctorch\nSize\n\x94"
            "0");
    bytes.append(offsets)
        .append(
            "\x94"
            "0")
        .append(sizes)
        .append(
            "\x94"
            "0");
    bytes += std::string("h\0)\x81}(h\2h\1K\0\x85\x85Rh\3h\1K\4\x85\x85Rub.", 27);
    const MemorySource source(as_bytes(bytes), "test.pkl");
    Input input(source.name(), source.size_bytes());
    Records records(input, source.size_bytes());
    return pickle::read_taking(source, records).tree.root().is(Kind::taken);
  };
  EXPECT_TRUE(is_taken("\x8c\x07offsets", "\x8c\x05sizes"));
  EXPECT_FALSE(is_taken("N", "N"));
}

// Then the tree is read from the complete file.
TEST(RecordsTest, AStringThatIsLongerThanTheWindow) {
  Metadata metadata = many_chunks(10'000);
  metadata.storage_meta.emplace().checkpoint_id = std::string(std::size_t{3} << 20, 'x');
  const Bytes bytes = write(metadata);
  EXPECT_TRUE(equal(read(MemorySource(bytes, "test")), metadata));
  EXPECT_ERROR(read_records(MemorySource(bytes, "test")), ErrorCode::corrupt, "truncated");
}

}  // namespace
}  // namespace tessera::dcp

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "checkpoint/source/torch/flatten.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/format/torch_archive.h"

namespace tessera::checkpoint {
namespace {

using namespace std::literals;
using pickle::NodeRef;

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

  // Opens a file of a list of many references to one empty tensor of many dimensions.
  std::shared_ptr<const Checkpoint> open_tensors(int dimensions, const std::string& storage_class, int references) {
    std::string pickle = "\x80\x02(" + std::string("K\0", 2);
    for (int i = 1; i < dimensions; ++i) pickle += "K\x01";
    pickle += "tq" + std::string("\0", 1) + "0";
    pickle += "ctorch._utils\n_rebuild_tensor_v2\n((U\x07storagectorch\n" + storage_class +
              "\nU\x01"
              "0U\x03"
              "cpuK"s +
              '\0' + "tQK" + '\0';
    pickle += "h\0h\0"s +
              "I00\nccollections\nOrderedDict\n)RtRq\x01"
              "0}U\x01"
              "a](";
    for (int i = 0; i < references; ++i) pickle += "h\x01";
    pickle += "es.";
    const ByteView bytes = as_bytes(pickle);
    const torch_archive::ArchiveLayout layout("archive", Bytes(bytes.begin(), bytes.end()), {{"0", 0}});
    Bytes file = layout.before_storage(0, {});
    append(file, layout.trailer({0}));
    std::filesystem::remove(directory_ / "in.pt");
    write_new_file(directory_ / "in.pt", file);
    return Checkpoint::open(directory_ / "in.pt");
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
               "for containers, tensors and long keys that occur often");
}

TEST_F(SourceTorchTest, ATensorOfManyDimensionsThatIsSharedIsRefused) {
  EXPECT_ERROR(open_tensors(1000, "FloatStorage", 20'000), ErrorCode::corrupt, "in.pt",
               "the flattened state takes more than 64.0 MiB");
}

TEST_F(SourceTorchTest, ATensorThatIsNotUnderstoodIsRefusedLikewise) {
  EXPECT_EQ(open_tensors(1000, "QInt8Storage", 2)->objects().size(), 2u);
  EXPECT_ERROR(open_tensors(100'000, "QInt8Storage", 100'000), ErrorCode::corrupt, "in.pt: 'a.42'",
               "the parts that objects share stand for more than 64.0 MiB");
}

// Text that is defined once and is the value of many keys: each use takes as much in a report or another format.
TEST_F(SourceTorchTest, LongTextOfManyObjectsIsRefused) {
  const auto open_texts = [&](std::size_t bytes, int count) {
    std::string pickle = "\x80\x02X";
    for (int shift = 0; shift < 32; shift += 8) pickle += static_cast<char>(bytes >> shift & 0xff);
    pickle += std::string(bytes, 'x') + "q" + '\0' + "0}(";
    for (int i = 0; i < count; ++i) {
      pickle += std::string("M") + static_cast<char>(i & 0xff) + static_cast<char>(i >> 8) + "h" + '\0';
    }
    return open(pickle + "u.");
  };
  EXPECT_EQ(open_texts(64, 20'000)->objects().size(), 20'000u);
  EXPECT_EQ(open_texts(64 << 10, 1000)->objects().size(), 1000u);
  EXPECT_ERROR(open_texts(64 << 10, 1100), ErrorCode::corrupt, "in.pt: '1025'",
               "the parts that objects share stand for more than 64.0 MiB, expected at most 64 MiB or 16 times");
}

// A list of 100 numbers in each of many objects, as groups of parameters may share it.
TEST_F(SourceTorchTest, SmallPartsOfManyObjectsAreNot) {
  std::string pickle = "\x80\x02](";
  for (int i = 0; i < 100; ++i) pickle += std::string("K") + static_cast<char>(i);
  pickle += std::string("eq") + '\0' + "0}(";
  for (int i = 0; i < 20'000; ++i) {
    pickle += std::string("M") + static_cast<char>(i & 0xff) + static_cast<char>(i >> 8) + "h" + '\0' + "N\x86";
  }
  EXPECT_EQ(open(pickle + "u.")->objects().size(), 20'000u);
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

class StateFlattenerTest : public ::testing::Test {
 protected:
  // Returns a dict of 0: 0, 1: 1, and so on.
  NodeRef ints(std::int64_t count) {
    std::vector<NodeRef> items;
    for (std::int64_t i = 0; i < count; ++i) items.insert(items.end(), 2, tree_.make_integer(i));
    return dict(items);
  }
  NodeRef dict(const std::vector<NodeRef>& items) {
    const NodeRef made = tree_.make_dict();
    tree_.set_items(made, items);
    return made;
  }
  // Returns `value` in dicts around it.
  NodeRef within(NodeRef value, const std::vector<std::string>& keys) {
    for (const std::string& key : keys) value = dict({tree_.make_string(key), value});
    return value;
  }

  // Flattens `state` with a budget of which this much is left.
  void flatten(NodeRef state, std::uint64_t left_bytes) {
    ExpansionBudget budget(0);
    budget.charge(budget.left_bytes() - left_bytes);
    StateFlattener flattener("in.pt", budget, StateFlattener::Tuples::are_leaves);
    leaves_ = 0;
    flattener.flatten(state, {}, [&](NodeRef, const LeafPlace&) { ++leaves_; });
  }

  pickle::Tree tree_;
  std::size_t leaves_ = 0;
};

constexpr const char* kTooMuch = "in.pt: the flattened state takes more than 64.0 MiB for containers, tensors";

// Each of them takes far more memory than its bytes in the file, which is why there is no limit for all together.
TEST_F(StateFlattenerTest, ManySmallValuesAreFree) {
  flatten(within(ints(10'000), {"values", "of", "a", "state"}), 0);
  EXPECT_EQ(leaves_, 10'000u);
  std::vector<NodeRef> items(10'000, NodeRef());
  items[0] = ints(1);
  flatten(within(tree_.make_list(items), {"list"}), 0);
  EXPECT_EQ(leaves_, 10'000u);
}

TEST_F(StateFlattenerTest, TheValuesOfAContainerThatOccursAgainAreNot) {
  const NodeRef shared = ints(100);
  const std::vector<NodeRef> items = {tree_.make_string("a"), shared, tree_.make_string("b"), shared};
  EXPECT_ERROR(flatten(dict(items), 10'000), ErrorCode::corrupt, kTooMuch);
  flatten(dict(items), 100'000);
  EXPECT_EQ(leaves_, 200u);
}

TEST_F(StateFlattenerTest, TheLongNameOfAContainerIsChargedForEachValue) {
  const NodeRef state = within(ints(100), {std::string(10'000, 'x')});
  EXPECT_ERROR(flatten(state, 1'000'000), ErrorCode::corrupt, kTooMuch);
  EXPECT_GT(leaves_, 40u);
  EXPECT_LT(leaves_, 60u);
  flatten(state, 3'000'000);
  EXPECT_EQ(leaves_, 100u);
}

// Nothing but the first characters of such a key is kept, but it takes a walk through all of it to know that.
TEST_F(StateFlattenerTest, TheLongPartOfKeysThatAreNotUnderstoodIsCharged) {
  const NodeRef part = tree_.make_tuple(std::vector<NodeRef>(100'000, NodeRef()));
  std::vector<NodeRef> items;
  for (int i = 0; i < 100; ++i) {
    const NodeRef member = tree_.make_object(pickle::Object::Made::reduce, tree_.make_global("mine", "Member"),
                                             tree_.make_tuple(std::vector<NodeRef>{tree_.make_integer(i)}));
    items.push_back(tree_.make_tuple(std::vector<NodeRef>{part, member}));
    items.push_back(NodeRef());
  }
  EXPECT_ERROR(flatten(dict(items), 1'000'000), ErrorCode::corrupt, kTooMuch);
  EXPECT_EQ(leaves_, 1u);
}

}  // namespace
}  // namespace tessera::checkpoint

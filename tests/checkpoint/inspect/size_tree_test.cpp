#include "tessera/checkpoint/inspect/size_tree.h"

#include <gtest/gtest.h>

#include <numeric>

#include "support/golden.h"
#include "support/safetensors_file.h"

namespace tessera::checkpoint {
namespace {

using testing::SafetensorsFile;
using testing::TemporaryDirectory;

SizeNode tree_of(const Checkpoint& checkpoint, std::size_t depth = kMaxSizeTreeDepth) {
  std::vector<std::size_t> tensors(checkpoint.tensors().size()), objects(checkpoint.objects().size());
  std::iota(tensors.begin(), tensors.end(), std::size_t{0});
  std::iota(objects.begin(), objects.end(), std::size_t{0});
  return size_tree(checkpoint, tensors, objects, depth);
}

// "a 12 (b 8, c 4)"
std::string text_of(const SizeNode& node) {
  std::string text = node.name + " " + std::to_string(node.bytes);
  for (std::size_t i = 0; i < node.children.size(); ++i) {
    text += (i == 0 ? " (" : ", ") + text_of(node.children[i]) + (i + 1 == node.children.size() ? ")" : "");
  }
  return text;
}

TEST(SizeTreeTest, NamesAreSplitAtDotsAndSortedBySize) {
  SafetensorsFile file;
  file.add<float>("m.a.w", DType::float32, {2}, {1, 2});
  file.add<float>("m.b.w", DType::float32, {3}, {1, 2, 3});
  file.add<float>("m.b", DType::float32, {1}, {1});
  file.add<float>("z", DType::float32, {1}, {1});
  file.add<float>("..", DType::float32, {}, {1});
  const TemporaryDirectory directory;
  file.write(directory / "a.safetensors");
  const auto checkpoint = Checkpoint::open(directory / "a.safetensors");
  EXPECT_EQ(text_of(tree_of(*checkpoint)), " 32 (m 24 (b 16 (w 12), a 8 (w 8)),  4 ( 4 ( 4)), z 4)");
  EXPECT_EQ(text_of(tree_of(*checkpoint, 1)), " 32 (m 24,  4, z 4)");
  EXPECT_EQ(text_of(tree_of(*checkpoint, 0)), " 32 (m 24,  4, z 4)");
  EXPECT_EQ(tree_of(*checkpoint).tensors, 5u);
}

TEST(SizeTreeTest, AVeryDeepNameEndsAtTheDeepestLevel) {
  SafetensorsFile file;
  file.add<float>(std::string(200000, '.'), DType::float32, {}, {1});
  const TemporaryDirectory directory;
  file.write(directory / "a.safetensors");
  const auto checkpoint = Checkpoint::open(directory / "a.safetensors");
  std::size_t levels = 0, length = 0;
  const SizeNode root = tree_of(*checkpoint);
  for (const SizeNode* node = &root; !node->children.empty(); node = node->children.data()) {
    ++levels;
    length += node->children[0].name.size() + 1;
  }
  EXPECT_EQ(levels, kMaxSizeTreeDepth);
  EXPECT_EQ(length, 200001u) << "the name is complete";
}

TEST(SizeTreeTest, KeysOfNestedStateDictsAreLevelsAndEachLevelIsTheSumOfTheNext) {
  for (const std::string& name : testing::golden_names()) {
    const auto checkpoint = Checkpoint::open(testing::read_golden(name).checkpoint);
    const SizeNode root = tree_of(*checkpoint);
    EXPECT_EQ(root.bytes, checkpoint->tensor_bytes()) << name;
    EXPECT_EQ(root.tensors, checkpoint->tensors().size()) << name;
    EXPECT_EQ(root.objects, checkpoint->objects().size()) << name;
    std::uint64_t bytes = 0;
    for (const SizeNode& child : root.children) bytes += child.bytes;
    EXPECT_EQ(bytes, root.bytes) << name;
  }
}

}  // namespace
}  // namespace tessera::checkpoint

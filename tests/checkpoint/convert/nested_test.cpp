#include "checkpoint/convert/nested.h"

#include <gtest/gtest.h>

#include "support/error_matchers.h"

namespace tessera::checkpoint {
namespace {

TEST(NestedTest, TextMakesDictsAndIntegersMakeLists) {
  Nested root;
  root.set({"optim", "groups", std::int64_t{1}, "lr"}, 7, "optim.groups.1.lr");
  root.set({"step"}, 8, "step");
  ASSERT_EQ(root.kind, Nested::Kind::dict);
  EXPECT_EQ(root.keys, (std::vector<std::string>{"optim", "step"}));
  const Nested& groups = *root.children[0]->children[0];
  ASSERT_EQ(groups.kind, Nested::Kind::list);
  ASSERT_EQ(groups.children.size(), 2u);
  EXPECT_EQ(groups.children[0], nullptr) << "a gap in a list is null";
  EXPECT_EQ(groups.children[1]->children[0]->leaf, 7u);
  EXPECT_EQ(root.children[1]->leaf, 8u);
}

TEST(NestedTest, ContradictoryPathsAreRefused) {
  Nested root;
  root.set({"a", "b"}, 0, "a.b");
  EXPECT_ERROR(root.set({"a"}, 1, "a"), ErrorCode::corrupt, "'a'", "is taken");
  EXPECT_ERROR(root.set({"a", std::int64_t{0}}, 1, "a.0"), ErrorCode::corrupt, "'a.0'",
               "passes through a list, expected a dict");
  EXPECT_ERROR(root.set({"a", "b", "c"}, 1, "a.b.c"), ErrorCode::corrupt, "expected a value");
}

TEST(NestedTest, AbsurdIndicesAndDepthsAreRefused) {
  Nested root;
  EXPECT_ERROR(root.set({std::int64_t{-1}}, 0, "x"), ErrorCode::corrupt, "index -1");
  EXPECT_ERROR(root.set({std::int64_t{1} << 60}, 0, "x"), ErrorCode::corrupt, "the list index");
  EXPECT_ERROR(root.set(Path(1000, "a"), 0, "x"), ErrorCode::corrupt, "1000 parts");
}

}  // namespace
}  // namespace tessera::checkpoint

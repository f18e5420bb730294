#include "checkpoint/convert/nested.h"

#include <gtest/gtest.h>

#include "support/error_matchers.h"

namespace tessera::checkpoint {
namespace {

TEST(NestedTest, TextMakesDictsAndIntegersMakeLists) {
  Nested root;
  ExpansionBudget budget(0);
  root.set({"optim", "groups", std::int64_t{1}, "lr"}, 7, "optim.groups.1.lr", budget);
  root.set({"step"}, 8, "step", budget);
  ASSERT_EQ(root.kind, Nested::Kind::dict);
  EXPECT_EQ(root.keys, (std::vector<Nested::DictKey>{{"optim"}, {"step"}}));
  const Nested& groups = *root.children[0]->children[0];
  ASSERT_EQ(groups.kind, Nested::Kind::list);
  ASSERT_EQ(groups.children.size(), 2u);
  EXPECT_EQ(groups.children[0], nullptr) << "a gap in a list is null";
  EXPECT_EQ(groups.children[1]->children[0]->leaf, 7u);
  EXPECT_EQ(root.children[1]->leaf, 8u);
}

TEST(NestedTest, KeysThatAreNoTextHaveTheirPlaces) {
  Nested root;
  ExpansionBudget budget(0);
  root.set({"1", "a"}, 0, "1.a", budget, {{0, "1"}});
  root.set({"1", "b"}, 1, "1.b", budget);
  root.set({"1", "c"}, 2, "1.c", budget, {{0, "1"}});
  root.set({"x", "y", "None"}, 3, "x.y.None", budget, {{1, ""}, {2, "null"}});
  EXPECT_EQ(root.keys, (std::vector<Nested::DictKey>{{"1", true}, {"1", false}, {"x", false}}));
  EXPECT_EQ(root.children[0]->keys, (std::vector<Nested::DictKey>{{"a"}, {"c"}}));
  const Nested& inner = *root.children[2];
  EXPECT_EQ(inner.keys, (std::vector<Nested::DictKey>{{"y"}})) << "without JSON it is its text";
  EXPECT_EQ(inner.children[0]->keys, (std::vector<Nested::DictKey>{{"null", true}}));
}

TEST(NestedTest, ContradictoryPathsAreRefused) {
  Nested root;
  ExpansionBudget budget(0);
  root.set({"a", "b"}, 0, "a.b", budget);
  EXPECT_ERROR(root.set({"a"}, 1, "a", budget), ErrorCode::corrupt, "'a'", "is taken");
  EXPECT_ERROR(root.set({"a", std::int64_t{0}}, 1, "a.0", budget), ErrorCode::corrupt, "'a.0'",
               "passes through a list, expected a dict");
  EXPECT_ERROR(root.set({"a", "b", "c"}, 1, "a.b.c", budget), ErrorCode::corrupt, "expected a value");
}

TEST(NestedTest, AbsurdIndicesAndDepthsAreRefused) {
  Nested root;
  ExpansionBudget budget(0);
  EXPECT_ERROR(root.set({std::int64_t{-1}}, 0, "x", budget), ErrorCode::corrupt, "index -1");
  EXPECT_ERROR(root.set({std::int64_t{1} << 60}, 0, "x", budget), ErrorCode::corrupt, "the list index");
  EXPECT_ERROR(root.set(Path(1000, "a"), 0, "x", budget), ErrorCode::corrupt, "1000 parts");
}

// Gaps of lists are charged: neither one index nor many lists take more than the budget.
TEST(NestedTest, GapsOfListsAreLimited) {
  Nested root;
  ExpansionBudget budget(0);
  const auto last = static_cast<std::int64_t>(ExpansionBudget::kLeastBytes / 16 - 1);
  EXPECT_ERROR(root.set({"a", last + 1}, 0, "a", budget), ErrorCode::corrupt, "lists of at most 64.0 MiB in all");
  for (int i = 0; i < 4; ++i) root.set({fmt::format("b{}", i), last / 5}, 0, "b", budget);
  EXPECT_ERROR(root.set({"c", last / 2}, 0, "c", budget), ErrorCode::corrupt, "'c'", "the list index");
  root.set({"d", last / 10}, 0, "d", budget);
}

}  // namespace
}  // namespace tessera::checkpoint

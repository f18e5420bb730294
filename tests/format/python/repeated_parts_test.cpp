#include "tessera/format/internal/repeated_parts.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::pickle {
namespace {

constexpr std::uint64_t kNoLimit = UINT64_MAX, kValueBytes = 16;

class RepeatedPartsTest : public ::testing::Test {
 protected:
  NodeRef ints(std::int64_t count) {
    std::vector<NodeRef> items;
    for (std::int64_t i = 0; i < count; ++i) items.push_back(tree_.make_integer(i));
    return tree_.make_list(items);
  }
  NodeRef pair(NodeRef first, NodeRef second) {
    const std::vector<NodeRef> items = {first, second};
    return tree_.make_tuple(items);
  }
  std::uint64_t count(NodeRef value) { return parts_.count(value, kNoLimit); }

  Tree tree_;
  RepeatedParts parts_;
};

TEST_F(RepeatedPartsTest, WhatIsDefinedOnceAndUsedOnceIsFree) {
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(count(pair(ints(3), tree_.make_string(std::string(100, 'x')))), 0u);
    EXPECT_EQ(count(tree_.make_integer(i)), 0u);
    EXPECT_EQ(count(tree_.make_tuple({})), 0u) << "the empty tuple is one value, and takes no more than a reference";
  }
}

TEST_F(RepeatedPartsTest, APartOfSeveralValuesIsCountedForEachButTheFirst) {
  const NodeRef shared = ints(10);
  EXPECT_EQ(count(pair(shared, tree_.make_integer(1))), 0u);
  EXPECT_EQ(count(pair(shared, tree_.make_integer(2))), 11 * kValueBytes);
  EXPECT_EQ(count(pair(shared, shared)), 11 * kValueBytes);
  EXPECT_EQ(count(tree_.make_list(std::vector<NodeRef>(1000, shared))), 11 * kValueBytes);
  EXPECT_EQ(count(shared), 11 * kValueBytes);
}

TEST_F(RepeatedPartsTest, LongTextCountsWithItsLength) {
  const NodeRef text = tree_.make_string(std::string(1000, 'x')), bytes = tree_.make_bytes(Bytes(500));
  EXPECT_EQ(count(pair(text, bytes)), 0u);
  EXPECT_EQ(count(pair(text, bytes)), 1500u);
  EXPECT_EQ(count(text), 1000u);
  const NodeRef word = tree_.make_string(std::string(64, 'x'));
  EXPECT_EQ(count(word) + count(word), 0u) << "costs little more than in the pickle";
}

// As `repr` and JSON allow it for one value.
TEST_F(RepeatedPartsTest, EightTimesWhatAValueHasOnceIsFreeWithinIt) {
  const NodeRef inner = ints(100);
  EXPECT_EQ(RepeatedParts::within(tree_.make_list(std::vector<NodeRef>(9, inner))), 0u);
  const std::uint64_t once = 1000 + 1 + 101, repeated = 999 * 101;
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(RepeatedParts::within(tree_.make_list(std::vector<NodeRef>(1000, inner))),
              (repeated - 8 * once) * kValueBytes);
  }
}

TEST_F(RepeatedPartsTest, AValueThatCannotBePrintedCountsForWhatIsPrintedUntilThen) {
  NodeRef nested = ints(1);
  for (int depth = 0; depth < 40; ++depth) nested = tree_.make_list(std::vector<NodeRef>(10, nested));
  EXPECT_EQ(RepeatedParts::within(nested), 100'000 * kValueBytes);
  const NodeRef text = tree_.make_string(std::string(1 << 20, 'x'));
  EXPECT_EQ(RepeatedParts::within(tree_.make_list(std::vector<NodeRef>(1000, text))), std::uint64_t{16} << 20);
}

// They are neither printed nor copied more than once, as a program's own objects share much.
TEST_F(RepeatedPartsTest, WhatObjectsShareWithinAValueIsFree) {
  const NodeRef callable = tree_.make_global("mine", "Node");
  NodeRef object;
  for (int depth = 0; depth < 40; ++depth) {
    object = tree_.make_object(Object::Made::reduce, callable, pair(object, object));
  }
  EXPECT_EQ(RepeatedParts::within(object), 0u);
  EXPECT_EQ(count(object), 0u);
  EXPECT_EQ(count(object), 40 * (5 + 3) * kValueBytes) << "5 of each object and 3 of its arguments";
}

TEST_F(RepeatedPartsTest, AValueWithinItselfIsCountedOnce) {
  const NodeRef list = tree_.make_list();
  tree_.append(list, std::vector<NodeRef>{list, tree_.make_integer(1)});
  EXPECT_EQ(RepeatedParts::within(list), 0u);
  EXPECT_EQ(count(list), 0u);
  EXPECT_EQ(count(list), 3 * kValueBytes);
}

TEST_F(RepeatedPartsTest, StopsBeyondTheLimit) {
  NodeRef chain;
  for (int i = 0; i < 400; ++i) chain = pair(chain, tree_.make_integer(i));
  EXPECT_EQ(parts_.count(chain, 0), 0u);
  const std::uint64_t counted = parts_.count(chain, 1000);
  EXPECT_GT(counted, 1000u);
  EXPECT_LT(counted, 1100u);
}

}  // namespace
}  // namespace tessera::pickle

#include "tessera/format/pickle_value.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <unordered_map>

#include "support/error_matchers.h"
#include "support/pickle_golden.h"
#include "tessera/format/python_value.h"

namespace tessera::pickle {
namespace {

using namespace std::literals;
using testing::read_pickle;
using testing::read_pickled_values;

TEST(PickleValueTest, IntegersOf64BitsComeBack) {
  Tree tree;
  for (const int bits : {0, 1, 7, 31, 53, 54, 55, 62, 63}) {
    const std::int64_t power = bits == 63 ? INT64_MAX : std::int64_t{1} << bits;
    for (const std::int64_t value : {power - 1, power, -power - 1, -power}) {
      EXPECT_EQ(tree.make_integer(value).integer(), value);
      EXPECT_TRUE(tree.make_integer(value).is(Kind::integer));
    }
  }
}

TEST(PickleValueTest, ABigIntegerIsAnIntegerWhereItFits) {
  Tree tree;
  EXPECT_EQ(tree.make_big_integer(Bytes{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}).integer(), -1);
  EXPECT_EQ(tree.make_big_integer({}).integer(), 0);
  EXPECT_EQ(tree.make_big_integer(Bytes{0x80, 0}).integer(), 128);
  const NodeRef big = tree.make_big_integer(Bytes{0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0});
  EXPECT_TRUE(big.is(Kind::big_integer));
  EXPECT_EQ(big.big_integer().size(), 9u);
  EXPECT_EQ(integer_to_decimal(big), "9223372036854775808");
}

TEST(PickleValueTest, IntegersOfMoreThan4300DigitsAreHexadecimal) {
  Tree tree;
  Bytes bytes(2001, 0);
  bytes[2000] = 1;
  EXPECT_EQ(integer_to_decimal(tree.make_big_integer(bytes)), "0x1" + std::string(4000, '0'));
  bytes.assign(1786, 0);
  bytes.back() = 0x7f;  // 4301 digits
  EXPECT_EQ(integer_to_decimal(tree.make_big_integer(bytes)), "0x7f" + std::string(3570, '0'));
  bytes.assign(1785, 0);
  bytes.back() = 0x7f;
  EXPECT_EQ(integer_to_decimal(tree.make_big_integer(bytes)).size(), 4299u);
}

TEST(PickleValueTest, TextOfEveryLengthComesBack) {
  Tree tree;
  for (const std::size_t size : {0, 1, 255, 256, 70'000}) {
    const std::string text(size, 'x');
    EXPECT_EQ(tree.make_string(text).string(), text);
    EXPECT_EQ(tree.make_borrowed_string(text).string(), text);
    EXPECT_EQ(as_text(tree.make_bytes(as_bytes(text)).bytes()), text);
    EXPECT_EQ(as_text(tree.make_byte_array(as_bytes(text)).bytes()), text);
  }
}

TEST(PickleValueTest, ContainersOfEveryLengthComeBack) {
  Tree tree;
  for (const std::size_t size : {0, 1, 255, 256, 20'000}) {
    std::vector<NodeRef> items;
    for (std::size_t i = 0; i < size; ++i) items.push_back(tree.make_integer(static_cast<std::int64_t>(i)));
    for (const NodeRef value : {tree.make_tuple(items), tree.make_list(items), tree.make_frozen_set(items)}) {
      ASSERT_EQ(value.items().size(), size);
      for (std::size_t i = 0; i < size; ++i) EXPECT_TRUE(value.items()[i].same(items[i]));
    }
  }
}

TEST(PickleValueTest, ContainersGrowInPieces) {
  Tree tree;
  const NodeRef list = tree.make_list(), dict = tree.make_dict(), other = tree.make_list();
  for (std::int64_t i = 0; i < 30'000; ++i) {
    const NodeRef both[] = {tree.make_integer(i), tree.make_integer(-i)};
    tree.append(list, {both, 1});
    tree.append(other, {both, 1});  // so that neither is at the end of the memory
    tree.set_items(dict, both);
  }
  ASSERT_EQ(list.items().size(), 30'000u);
  ASSERT_EQ(dict.pairs().size(), 30'000u);
  for (std::int64_t i = 0; i < 30'000; ++i) {
    ASSERT_EQ(list.items()[static_cast<std::size_t>(i)].integer(), i);
    ASSERT_EQ(dict.pairs()[static_cast<std::size_t>(i)].value.integer(), -i);
  }
}

TEST(PickleValueTest, FindGivesTheLastOfEqualKeys) {
  const ReadResult result = read_pickle(
      "}(U\x01"
      "aK\x01U\x01"
      "bK\x02U\x01"
      "aK\x03u.");
  EXPECT_EQ(result.tree.root().find("a")->integer(), 3);
  EXPECT_FALSE(result.tree.root().find("c").has_value());
  EXPECT_FALSE(NodeRef().find("a").has_value());
}

TEST(PickleValueTest, ChangingTheWrongKindIsRefused) {
  Tree tree;
  const NodeRef tuple = tree.make_tuple({});
  const NodeRef one[] = {tuple};
  EXPECT_ERROR(tree.append(tuple, one), ErrorCode::invalid_argument,
               "append to a tuple, expected a list, a set or an object");
  EXPECT_ERROR(tree.set_items(tree.make_list(), {}), ErrorCode::invalid_argument,
               "set items of a list, expected a dict or an object");
  EXPECT_ERROR(tree.set_items(tree.make_dict(), one), ErrorCode::invalid_argument,
               "a key without a value among 1 keys and values, expected pairs");
  EXPECT_ERROR(tree.set_state(tuple, NodeRef()), ErrorCode::invalid_argument,
               "set the state of a tuple, expected an object");
  EXPECT_ERROR(tree.add_setter_call(tuple, NodeRef()), ErrorCode::invalid_argument,
               "add a call of a setter to a tuple, expected an object");
}

bool equal_pickles(std::string_view a, std::string_view b) {
  const ReadResult x = read_pickle(a), y = read_pickle(b);
  return equal(x.tree.root(), y.tree.root()) && equal(y.tree.root(), x.tree.root());
}

TEST(PickleValueTest, EqualityIsOfContentsAndTypes) {
  EXPECT_TRUE(equal_pickles("](K\x01K\x02\x65.", "(K\x01K\x02l."));
  EXPECT_FALSE(equal_pickles("K\x01.", "I01\n."));
  EXPECT_FALSE(equal_pickles("K\x01.", "F1.0\n."));
  EXPECT_FALSE(
      equal_pickles("U\x01"
                    "a.",
                    "C\x01"
                    "a."));
  EXPECT_FALSE(equal_pickles(").", "]."));
  EXPECT_TRUE(equal_pickles("F0.0\n.", "F-0.0\n."));
  EXPECT_TRUE(equal_pickles("Fnan\n.", "Fnan\n."));
  EXPECT_FALSE(equal_pickles("Fnan\n.", "F-nan\n."));
}

TEST(PickleValueTest, EqualityIgnoresTheOrderOfDictsAndSets) {
  EXPECT_TRUE(equal_pickles("}(K\x01K\x02K\x03K\x04u.", "}(K\x03K\x04K\x01K\x02u."));
  EXPECT_FALSE(equal_pickles("}(K\x01K\x02K\x03K\x04u.", "}(K\x03K\x04K\x01K\x05u."));
  EXPECT_FALSE(equal_pickles("}(K\x01K\x02K\x03K\x04u.", "}(K\x01K\x02u."));
  EXPECT_TRUE(equal_pickles("}(K\x01K\x02K\x01K\x04u.", "}(K\x01K\x04u.")) << "of equal keys the last counts";
  EXPECT_TRUE(equal_pickles("\x8f(K\x01)K\x03\x90.", "\x8f(K\x03K\x01)\x90."));
  EXPECT_FALSE(equal_pickles("\x8f(K\x01)K\x03\x90.", "\x8f(K\x03K\x01\x90."));
  EXPECT_FALSE(equal_pickles("\x8f(K\x01\x90.", "(K\x01\x91."));
}

TEST(PickleValueTest, EqualityOfObjectsIsThatOfTheirParts) {
  const std::string_view object =
      "ca\nb\nK\x01\x85RK\x02"
      "bK\x03"
      "a.";
  EXPECT_TRUE(equal_pickles(object, object));
  for (const std::string_view other : {"ca\nc\nK\x01\x85RK\x02"
                                       "bK\x03"
                                       "a.",
                                       "ca\nb\nK\x04\x85RK\x02"
                                       "bK\x03"
                                       "a.",
                                       "ca\nb\nK\x01\x85RK\x04"
                                       "bK\x03"
                                       "a.",
                                       "ca\nb\nK\x01\x85RK\x02"
                                       "bK\x04"
                                       "a.",
                                       "ca\nb\nK\x01\x85\x81K\x02"
                                       "bK\x03"
                                       "a.",
                                       "ca\nb\nK\x01\x85RK\x03"
                                       "a."}) {
    EXPECT_FALSE(equal_pickles(object, other)) << printable(other);
  }
}

TEST(PickleValueTest, EqualityEndsWhereValuesContainThemselves) {
  const std::string_view one = "]\x94h\x00\x61."sv;
  EXPECT_TRUE(equal_pickles(one, one));
  EXPECT_TRUE(equal_pickles(one, "]]\x94h\x00\x61\x61."sv)) << "the same without end";
  EXPECT_FALSE(equal_pickles("]\x94(h\x00K\x01\x65."sv, "]\x94(h\x00K\x02\x65."sv));
}

// A small pickle can make a dict be compared with itself many times.
TEST(PickleValueTest, HashingKeysCountsAsWork) {
  Tree tree;
  const NodeRef dict = tree.make_dict(), other = tree.make_dict();
  for (std::int64_t i = 0; i < 100; ++i) {
    const NodeRef pair[] = {tree.make_integer(i), NodeRef()};
    tree.set_items(dict, pair);
    tree.set_items(other, pair);
  }
  EXPECT_TRUE(equal(dict, other, {.nodes = 600}));
  EXPECT_ERROR(equal(dict, other, {.nodes = 300}), ErrorCode::corrupt,
               "more nodes than the limit, expected at most 300");
  const NodeRef long_text = tree.make_tuple(std::vector<NodeRef>{tree.make_string(std::string(100'000, 'x'))});
  const NodeRef set = tree.make_frozen_set(std::vector<NodeRef>{long_text});
  EXPECT_ERROR(equal(set, set, {.nodes = 300}), ErrorCode::corrupt, "more nodes than the limit, expected at most 300");
}

// Keys that are all in one bucket of a table of this size if they are hashed by a multiplication with a fixed factor.
TEST(PickleValueTest, NoKeysCanBeChosenToCollide) {
  constexpr std::size_t kKeys = 300'000;
  constexpr std::uint64_t kFactor = 0x9e37'79b9'7f4a'7c15;
  std::uint64_t inverse = kFactor;
  for (int i = 0; i < 6; ++i) inverse *= 2 - kFactor * inverse;
  std::unordered_multimap<std::uint64_t, int> table;
  for (std::uint64_t i = 0; i < kKeys; ++i) table.emplace(i, 0);
  Tree tree;
  std::vector<NodeRef> pairs;
  for (std::uint64_t i = 0; i < kKeys; ++i) {
    const std::uint64_t key = ((i * table.bucket_count() - 256) * inverse) ^ static_cast<std::uint64_t>(Kind::integer);
    pairs.insert(pairs.end(), {tree.make_integer(static_cast<std::int64_t>(key)), NodeRef()});
  }
  const NodeRef dict = tree.make_dict(), other = tree.make_dict();
  tree.set_items(dict, pairs);
  tree.set_items(other, pairs);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(equal(dict, other));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

// Compared again at each reference, these are 200 GB.
TEST(PickleValueTest, LongTextThatIsSharedIsComparedOnce) {
  const std::string text(1 << 20, 'x');
  const auto list_in = [&](Tree& tree, bool is_global) {
    const NodeRef value = is_global ? tree.make_global("m", text) : tree.make_string(text);
    return tree.make_list(std::vector(100'000, value));
  };
  for (const bool is_global : {true, false}) {
    Tree a, b;
    EXPECT_TRUE(equal(list_in(a, is_global), list_in(b, is_global)));
  }
  // Each of 40 texts with each.
  const std::string shorter(1 << 18, 'x');
  Tree a, b;
  const auto texts_in = [&](Tree& tree, bool by_columns) {
    std::vector<NodeRef> texts, all;
    for (int i = 0; i < 40; ++i) texts.push_back(tree.make_string(shorter));
    for (std::size_t i = 0; i < 40 * 40; ++i) all.push_back(texts[by_columns ? i / 40 : i % 40]);
    return tree.make_list(all);
  };
  EXPECT_ERROR(equal(texts_in(a, true), texts_in(b, false)), ErrorCode::corrupt,
               "compare pickled values: shared parts stand for ", " bytes of text, expected at most ");
}

TEST(PickleValueTest, NamesThatShareLongTextAreNotCopiedWithoutLimit) {
  const std::string text(1 << 20, 'x');
  std::string bytes = "\x80\x04X" + std::string("\0\0\x10\0", 4) + text + "\x94" + "0(";
  for (int i = 0; i < 100; ++i) bytes += std::string("\x8c\x01mh\0\x93", 6);
  const ReadResult result = read_pickle(bytes + "l.");
  Tree copies;
  EXPECT_ERROR(copy_into(copies, result.tree.root()), ErrorCode::corrupt,
               "copy a pickled value: shared parts stand for ", " bytes of text, expected at most ");
}

TEST(PickleValueTest, AFailedTryLeavesNoTrace) {
  // {((1,), 1), ((1,), 2)} tries the first item against both; the assumptions about (1,) and 1 must be undone.
  const std::string_view a = "\x8f(K\x01\x85K\x01\x86K\x01\x85K\x02\x86\x90.";
  const std::string_view b = "\x8f(K\x01\x85K\x02\x86K\x01\x85K\x01\x86\x90.";
  const std::string_view c = "\x8f(K\x01\x85K\x02\x86K\x01\x85K\x03\x86\x90.";
  EXPECT_TRUE(equal_pickles(a, b));
  EXPECT_FALSE(equal_pickles(a, c));
}

// 60 lists, each holding the previous one ten times: 10^60 values in 2 kB.
std::string laughs() {
  std::string bytes = "]\x94";
  for (int i = 0; i < 60; ++i) bytes += std::string("0](") + std::string("hXhXhXhXhXhXhXhXhXhX") + "e\x94";
  int next = 0;
  std::size_t at = 0;
  for (int i = 0; i < 60; ++i, ++next) {
    for (int j = 0; j < 10; ++j) {
      at = bytes.find('X', at);
      bytes[at] = static_cast<char>(next);
    }
  }
  return bytes + ".";
}

TEST(PickleValueTest, SharedPartsAreWalkedOnce) {
  const ReadResult a = read_pickle(laughs()), b = read_pickle(laughs());
  EXPECT_TRUE(equal(a.tree.root(), b.tree.root()));
  Tree copies;
  const NodeRef copy = copy_into(copies, a.tree.root());
  EXPECT_TRUE(equal(copy, a.tree.root()));
  EXPECT_LT(copies.memory_bytes(), 20'000u);
}

TEST(PickleValueTest, CopiesAreEqualAndOwnTheirBytes) {
  for (const auto& golden : read_pickled_values()) {
    Tree copies;
    NodeRef copy;
    {
      const ReadResult result = read(std::make_shared<const Bytes>(golden.pickles[4]), golden.name);
      copy = copy_into(copies, result.tree.root());
      EXPECT_TRUE(equal(copy, result.tree.root())) << golden.name;
    }
    const ReadResult again = read(ByteView(golden.pickles[4]), golden.name);
    EXPECT_TRUE(equal(copy, again.tree.root())) << golden.name;
  }
}

TEST(PickleValueTest, CopiesKeepSharing) {
  const ReadResult result = read_pickle("(]\x94h\x00h\x00\x85t."sv);
  Tree copies;
  const auto items = copy_into(copies, result.tree.root()).items();
  EXPECT_TRUE(items[0].same(items[1]));
  EXPECT_TRUE(items[0].same(items[2].items()[0]));
}

TEST(PickleValueTest, WalksAreLimited) {
  const ReadResult result = read_pickle("]]]]]aaaa.");
  Tree copies;
  EXPECT_NO_THROW(copy_into(copies, result.tree.root(), {.depth = 4}));
  EXPECT_ERROR(copy_into(copies, result.tree.root(), {.depth = 3}), ErrorCode::corrupt,
               "deeper than the limit, expected at most 3 levels");
  EXPECT_ERROR(copy_into(copies, result.tree.root(), {.nodes = 4}), ErrorCode::corrupt,
               "more nodes than the limit, expected at most 4");
  EXPECT_ERROR(equal(result.tree.root(), result.tree.root(), {.depth = 3}), ErrorCode::corrupt,
               "deeper than the limit, expected at most 3 levels");
  EXPECT_ERROR(equal(result.tree.root(), result.tree.root(), {.nodes = 4}), ErrorCode::corrupt,
               "more nodes than the limit, expected at most 4");
}

}  // namespace
}  // namespace tessera::pickle

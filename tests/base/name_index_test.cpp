#include "tessera/base/internal/name_index.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <deque>
#include <string>
#include <unordered_map>

namespace tessera {
namespace {

TEST(NameIndexTest, FindsNothingWhenEmpty) {
  EXPECT_EQ(NameIndex().find(""), std::nullopt);
  NameIndex reserved;
  reserved.reserve(0);
  EXPECT_FALSE(reserved.contains("x"));
  EXPECT_TRUE(reserved.add("", 7));
  EXPECT_EQ(reserved.find(""), 7U);
}

// Names of a few characters, so that many occur again; with room for all of them, for some, and for none.
RC_GTEST_PROP(NameIndexTest, IsAMapFromNamesToTheirFirstNumbers, ()) {
  const auto names =
      *rc::gen::container<std::deque<std::string>>(rc::gen::container<std::string>(rc::gen::inRange('a', 'd')));
  NameIndex index;
  index.reserve(*rc::gen::inRange<std::size_t>(0, 2 * names.size() + 1));
  std::unordered_map<std::string, std::size_t> expected;
  for (std::size_t i = 0; i < names.size(); ++i) {
    RC_ASSERT(index.find(names[i]).has_value() == expected.contains(names[i]));
    RC_ASSERT(index.add(names[i], 3 * i) == expected.emplace(names[i], 3 * i).second);
  }
  for (const std::string& name : names) RC_ASSERT(index.find(name) == expected.at(name));
  RC_ASSERT(!index.contains("e"));
}

}  // namespace
}  // namespace tessera

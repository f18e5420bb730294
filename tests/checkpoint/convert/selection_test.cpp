#include <gtest/gtest.h>

#include "tessera/checkpoint/convert.h"

namespace tessera::checkpoint {
namespace {

TEST(GlobTest, StarsMatchAnyCharactersAndQuestionMarksOne) {
  EXPECT_TRUE(glob_matches("*", ""));
  EXPECT_TRUE(glob_matches("model.*.weight", "model.layers.3.weight"));
  EXPECT_FALSE(glob_matches("model.*.weight", "model.layers.3.bias"));
  EXPECT_TRUE(glob_matches("l?yer", "layer"));
  EXPECT_FALSE(glob_matches("l?yer", "lyer"));
  EXPECT_TRUE(glob_matches("*a*b*c*", "xxaxxbxxcxx"));
  EXPECT_FALSE(glob_matches("abc", "abcd"));
}

TEST(GlobTest, SetsMatchOneOfTheirMembers) {
  EXPECT_TRUE(glob_matches("layer.[0-3].weight", "layer.2.weight"));
  EXPECT_FALSE(glob_matches("layer.[0-3].weight", "layer.4.weight"));
  EXPECT_TRUE(glob_matches("[!a]b", "cb"));
  EXPECT_FALSE(glob_matches("[!a]b", "ab"));
  EXPECT_TRUE(glob_matches("[]]", "]"));
  EXPECT_TRUE(glob_matches("[ab", "[ab")) << "an unterminated set matches itself";
}

TEST(GlobTest, ManyStarsEndInTimeThatIsNotExponential) {
  EXPECT_FALSE(glob_matches("*a*a*a*a*a*a*a*a*a*a*a*a*b", std::string(20000, 'a')));
}

TEST(SelectionTest, AnEmptySelectionTakesEverythingThatIsNotExcluded) {
  EXPECT_TRUE((Selection{{}, {}}).takes("x"));
  EXPECT_FALSE((Selection{{}, {"x"}}).takes("x"));
  EXPECT_FALSE((Selection{{"y*"}, {}}).takes("x"));
  EXPECT_FALSE((Selection{{"x*"}, {"*z"}}).takes("xz"));
}

}  // namespace
}  // namespace tessera::checkpoint

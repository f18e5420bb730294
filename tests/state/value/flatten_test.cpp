#include "tessera/state/flatten.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "state/golden_values.h"
#include "state/names.h"
#include "state/random_values.h"
#include "support/error_matchers.h"

namespace tessera {
namespace {

using testing::names_of;

TEST(FlattenTest, NamesAreThoseOfPyTorch) {
  const nlohmann::json cases = testing::read_state_json("traversal.json");
  for (const nlohmann::json& item : cases) {
    SCOPED_TRACE(item.at("state").dump());
    const StateDict state = testing::decode(item.at("state")).get<Dict>();
    for (const auto& [rules, name] :
         {std::pair(TraversalRules::since_2_4, "since_2_4"), std::pair(TraversalRules::until_2_3, "until_2_3")}) {
      const nlohmann::json& expected = item.at(name);
      if (expected.at("names").is_null()) {
        EXPECT_ERROR(flatten_state_dict(state, rules), ErrorCode::invalid_argument, "two values have the name");
        continue;
      }
      const FlatStateDict flat = flatten_state_dict(state, rules);
      EXPECT_EQ(names_of(flat.state_dict), expected.at("names").get<std::vector<std::string>>());
      ASSERT_EQ(flat.mapping.size(), flat.state_dict.size());
      std::size_t i = 0;
      for (const auto& [key, value] : flat.state_dict) {
        const nlohmann::json& visited = expected.at("visited")[i++];
        EXPECT_EQ(flat.mapping.at(std::get<std::string>(key)), testing::decode_path(visited[0]));
        EXPECT_EQ(value, testing::decode(visited[1]));
      }
    }
  }
}

TEST(FlattenTest, TwoValuesOfOneNameAreAnErrorThatNamesIt) {
  EXPECT_ERROR(flatten_state_dict({{"a", Dict{{"b", 1}}}, {"a.b", 2}}), ErrorCode::invalid_argument, "'a.b'");
  EXPECT_ERROR(flatten_state_dict({{1, 1}, {"1", 2}}), ErrorCode::invalid_argument, "'1'");
}

TEST(FlattenTest, ElementsAreShared) {
  const at::Tensor tensor = at::zeros({2});
  const FlatStateDict flat = flatten_state_dict({{"a", Dict{{"b", tensor}}}});
  EXPECT_TRUE(flat.state_dict.at("a.b").get<at::Tensor>().is_same(tensor));
}

TEST(UnflattenTest, ANameWithoutAPathIsAnError) {
  EXPECT_ERROR(unflatten_state_dict({{"a.b", 1}}, {{"a", {"a"}}}), ErrorCode::not_found, "'a.b'");
  EXPECT_ERROR(unflatten_state_dict({{3, 1}}, {}), ErrorCode::not_found, "no path for 3");
}

TEST(UnflattenTest, APathThroughAnotherValueIsAnErrorThatNamesIt) {
  EXPECT_ERROR(unflatten_state_dict({{"a", 1}, {"a.b", 2}}, {{"a", {"a"}}, {"a.b", {"a", "b"}}}),
               ErrorCode::invalid_argument, "'a.b'", "int (1)");
}

TEST(UnflattenTest, OfAPartMakesThatPart) {
  const FlatStateDict flat = flatten_state_dict({{"a", List{Dict{{"x", 1}}, Dict{{"x", 2}}}}, {"b", 3}});
  EXPECT_EQ(Value(unflatten_state_dict({{"a.1.x", 5}}, flat.mapping)),
            Value(Dict{{"a", List{nullptr, Dict{{"x", 5}}}}}));
}

// Returns whether no traversed dict is empty.
RC_GTEST_PROP(FlattenTest, UnflattenIsTheInverse, ()) {
  testing::RandomValues random;
  random.with_int_keys = random.with_dots = random.with_empty_dicts = false;
  const StateDict state = random.dict(4);
  for (const TraversalRules rules : {TraversalRules::since_2_4, TraversalRules::until_2_3}) {
    const FlatStateDict flat = flatten_state_dict(state, rules);
    RC_ASSERT(Value(unflatten_state_dict(flat.state_dict, flat.mapping)) == Value(state));
  }
}

RC_GTEST_PROP(FlattenTest, EveryNameHasThePathThatSaysIt, ()) {
  const StateDict state = testing::RandomValues().dict(4);
  try {
    const FlatStateDict flat = flatten_state_dict(state);
    RC_ASSERT(flat.mapping.size() == flat.state_dict.size());
    for (const auto& [name, path] : flat.mapping) {
      RC_ASSERT(flat_name(path) == name);
      RC_ASSERT(flat.state_dict.contains(name));
    }
  } catch (const Error& error) {
    RC_ASSERT(error.code() == ErrorCode::invalid_argument);
  }
}

}  // namespace
}  // namespace tessera

#include "tessera/state/traverse.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>

#include "state/golden_values.h"
#include "state/random_values.h"
#include "support/error_matchers.h"

namespace tessera {
namespace {

using Visits = std::vector<std::pair<Path, Value>>;

Visits visits(const StateDict& state, TraversalRules rules, KeepTraversing keep_traversing = keep_visiting_tensors) {
  Visits result;
  traverse_state_dict(
      state, [&](const Path& path, const Value& value) { result.emplace_back(path, value); }, rules, keep_traversing);
  return result;
}

Visits decode_visits(const nlohmann::json& json) {
  Visits result;
  for (const nlohmann::json& visit : json) {
    result.emplace_back(testing::decode_path(visit[0]), testing::decode(visit[1]));
  }
  return result;
}

TEST(TraverseTest, VisitsWhatPyTorchVisits) {
  const nlohmann::json cases = testing::read_state_json("traversal.json");
  ASSERT_GT(cases.size(), 100u);
  for (const nlohmann::json& item : cases) {
    SCOPED_TRACE(item.at("state").dump());
    const StateDict state = testing::decode(item.at("state")).get<Dict>();
    EXPECT_EQ(visits(state, TraversalRules::since_2_4), decode_visits(item.at("since_2_4").at("visited")));
    EXPECT_EQ(visits(state, TraversalRules::until_2_3), decode_visits(item.at("until_2_3").at("visited")));
  }
}

TEST(TraverseTest, KeepTraversingSaysWhichListsAreWalkedThrough) {
  const StateDict state{{"numbers", List{1, 2}}, {"tensors", List{at::zeros({1})}}, {"dict", Dict{{"a", 1}}}};
  const auto ints = [](const Value& item) { return item.is<std::int64_t>(); };
  const Visits by_ints = visits(state, TraversalRules::since_2_4, ints);
  ASSERT_EQ(by_ints.size(), 4u);
  EXPECT_EQ(by_ints[1].first, (Path{"numbers", 1}));
  EXPECT_EQ(by_ints[2].first, Path{"tensors"});
  EXPECT_EQ(visits(state, TraversalRules::until_2_3, ints).back().first, (Path{"dict", "a"}));
  for (const TraversalRules rules : {TraversalRules::since_2_4, TraversalRules::until_2_3}) {
    EXPECT_EQ(visits(state, rules, nullptr).size(), 3u);
  }
}

TEST(TraverseTest, AStateThatNestsTooDeeplyIsRefused) {
  Value value(at::zeros({1}));
  for (int i = 0; i < 550; ++i) {
    List list;
    list.push_back(std::move(value));
    Dict dict;
    dict["a"] = std::move(list);
    value = std::move(dict);
  }
  const StateDict state{{"x", std::move(value)}};
  for (const TraversalRules rules : {TraversalRules::since_2_4, TraversalRules::until_2_3}) {
    EXPECT_ERROR(visits(state, rules), ErrorCode::invalid_argument, "nests deeper than 1000", "'x");
  }
}

TEST(SetElementTest, DoesWhatPyTorchDoes) {
  const nlohmann::json cases = testing::read_state_json("elements.json").at("set");
  for (const nlohmann::json& item : cases) {
    SCOPED_TRACE(item.dump());
    StateDict root = testing::decode(item.at("root")).get<Dict>();
    const Path path = testing::decode_path(item.at("path"));
    if (item.at("result").is_null()) {
      EXPECT_ERROR(set_element(root, path, testing::decode(item.at("value"))), ErrorCode::invalid_argument,
                   "'" + flat_name(path) + "'");
    } else {
      set_element(root, path, testing::decode(item.at("value")));
      EXPECT_EQ(Value(root), testing::decode(item.at("result")));
    }
  }
}

TEST(SetElementTest, AListIsFilledUpWithNone) {
  StateDict root;
  set_element(root, {"a", 2, "b"}, 1);
  set_element(root, {"a", 0}, 2);
  EXPECT_EQ(Value(root), Value(Dict{{"a", List{2, nullptr, Dict{{"b", 1}}}}}));
}

TEST(SetElementTest, WhatIsThereOnTheWayIsKept) {
  StateDict root{{"a", Dict{{"b", Dict{{"c", 1}}}}}, {"l", List{Dict{{"x", 1}}}}};
  set_element(root, {"a", "b", "d"}, 2);
  set_element(root, {"l", 0, "y"}, 2);
  EXPECT_EQ(Value(root),
            Value(Dict{{"a", Dict{{"b", Dict{{"c", 1}, {"d", 2}}}}}, {"l", List{Dict{{"x", 1}, {"y", 2}}}}}));
}

TEST(SetElementTest, ADictTakesAnIntAtTheEndOfAPath) {
  StateDict root{{"a", Dict{}}};
  set_element(root, {"a", 3}, 1);
  set_element(root, {5}, 2);
  EXPECT_EQ(Value(root), Value(Dict{{"a", Dict{{3, 1}}}, {5, 2}}));
}

TEST(SetElementTest, WhatCannotBeIsAnErrorThatNamesPathAndPlace) {
  StateDict root{{"a", 5}, {"l", List{1}}};
  EXPECT_ERROR(set_element(root, {}, 1), ErrorCode::invalid_argument, "path is empty");
  EXPECT_ERROR(set_element(root, {"a", "b"}, 1), ErrorCode::invalid_argument, "'a.b'", "part 1 ('b')", "int (5)");
  StateDict none{{"a", Dict{{"b", nullptr}}}};
  EXPECT_ERROR(set_element(none, {"a", "b", "c"}, 1), ErrorCode::invalid_argument, "'a.b.c'", "part 2 ('c')", "None");
  EXPECT_ERROR(set_element(root, {"l", "b"}, 1), ErrorCode::invalid_argument, "'l.b'", "list ([1])");
  EXPECT_ERROR(set_element(root, {"l", -1}, 1), ErrorCode::invalid_argument, "'l.-1'", "index is -1");
  EXPECT_ERROR(set_element(root, {"l", 10'000'000}, 1), ErrorCode::invalid_argument, "index is 10000000", "9999999");
}

TEST(GetElementTest, FindsWhatPyTorchFinds) {
  const nlohmann::json cases = testing::read_state_json("elements.json").at("get");
  for (const nlohmann::json& item : cases) {
    SCOPED_TRACE(item.dump());
    const StateDict root = testing::decode(item.at("root")).get<Dict>();
    const Value* found = get_element(root, testing::decode_path(item.at("path")));
    ASSERT_EQ(found != nullptr, item.at("found").get<bool>());
    if (found) {
      EXPECT_EQ(*found, testing::decode(item.at("result")));
    }
  }
}

TEST(GetElementTest, AnIndexBehindOrBeforeAListFindsNothing) {
  const StateDict root{{"l", List{1, 2}}};
  EXPECT_NE(get_element(root, {"l", 1}), nullptr);
  EXPECT_EQ(get_element(root, {"l", 2}), nullptr);
  EXPECT_EQ(get_element(root, {"l", -1}), nullptr);
  EXPECT_EQ(get_element(root, {}), nullptr);
}

TEST(GetElementTest, WhatIsFoundCanBeChanged) {
  StateDict root{{"l", List{1, Dict{{"a", 2}}}}};
  *get_element(root, {"l", 1, "a"}) = "new";
  EXPECT_EQ(Value(root), Value(Dict{{"l", List{1, Dict{{"a", "new"}}}}}));
}

TEST(RequireElementTest, SaysWhatIsWrongWithWhichPath) {
  const StateDict root{{"l", List{1}}};
  EXPECT_EQ(require_element<std::int64_t>(root, {"l", 0}), 1);
  EXPECT_ERROR(require_element<double>(root, {"l", 0}), ErrorCode::invalid_argument,
               "'l.0' is int (1), expected float");
  EXPECT_ERROR(require_element<double>(root, {"l", 1}), ErrorCode::not_found, "nothing at 'l.1'");
}

// An independent implementation of the rules by which values are visited.
bool is_walked_through(const Value& value, TraversalRules rules) {
  std::vector<Value> items;
  if (const auto* list = value.get_if<List>()) items.assign(list->begin(), list->end());
  if (const auto* dict = value.get_if<Dict>()) {
    if (rules == TraversalRules::since_2_4) return true;
    for (const auto& [key, item] : *dict) items.push_back(item);
  }
  return std::any_of(items.begin(), items.end(),
                     [&](const Value& item) { return item.is<at::Tensor>() || is_walked_through(item, rules); });
}

RC_GTEST_PROP(TraverseTest, WhatIsVisitedIsThereAndNotWalkedThrough, ()) {
  testing::RandomValues random;
  random.with_int_keys = false;
  const StateDict state = random.dict(4);
  for (const TraversalRules rules : {TraversalRules::since_2_4, TraversalRules::until_2_3}) {
    for (const auto& [path, value] : visits(state, rules)) {
      const Value* found = get_element(state, path);
      RC_ASSERT(found != nullptr);
      RC_ASSERT(*found == value);
      RC_ASSERT(!is_walked_through(value, rules));
      for (std::size_t length = 1; length < path.size(); ++length) {
        RC_ASSERT(is_walked_through(*get_element(state, Path(path.begin(), path.begin() + length)), rules));
      }
    }
  }
}

}  // namespace
}  // namespace tessera

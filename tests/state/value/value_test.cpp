#include "tessera/state/value.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <chrono>
#include <limits>
#include <map>
#include <sstream>
#include <unordered_map>

#include "state/random_values.h"
#include "support/error_matchers.h"
#include "tensor/sharding_support.h"

namespace tessera {
namespace {

using testing::RandomValues;

class Piece : public Checkpointable {
 public:
  const std::vector<std::int64_t>& size() const override { return size_; }
  std::optional<TensorProperties> properties() const override { return TensorProperties(); }
  const std::vector<Box>& local_chunks() const override { return chunks_; }
  at::Tensor local_tensor(std::size_t) const override { return at::zeros({2}); }

 private:
  std::vector<std::int64_t> size_ = {4};
  std::vector<Box> chunks_ = {{{0}, {2}}};
};

TEST(ValueTest, KindsAreThoseOfPython) {
  EXPECT_EQ(Value().kind(), ValueKind::none);
  EXPECT_EQ(Value(nullptr).kind(), ValueKind::none);
  EXPECT_EQ(Value(true).kind(), ValueKind::boolean);
  EXPECT_EQ(Value(3).kind(), ValueKind::integer);
  EXPECT_EQ(Value(std::size_t{3}).kind(), ValueKind::integer);
  EXPECT_EQ(Value(0.5F).kind(), ValueKind::floating);
  EXPECT_EQ(Value("text").kind(), ValueKind::string);
  EXPECT_EQ(Value(std::string_view("text")).kind(), ValueKind::string);
  EXPECT_EQ(Value(Bytes{1}).kind(), ValueKind::bytes);
  EXPECT_EQ(Value(List{1}).kind(), ValueKind::list);
  EXPECT_EQ(Value(Tuple{1}).kind(), ValueKind::tuple);
  EXPECT_EQ(Value(Dict{{"a", 1}}).kind(), ValueKind::dict);
  EXPECT_EQ(Value(at::zeros({1})).kind(), ValueKind::tensor);
  EXPECT_EQ(Value(ShardedTensor::zeros(testing::chunk_spec(0, {0}), {2})).kind(), ValueKind::sharded_tensor);
  EXPECT_EQ(Value(NestedShardedTensor()).kind(), ValueKind::nested_sharded_tensor);
  EXPECT_EQ(Value(std::make_shared<Piece>()).kind(), ValueKind::checkpointable);
  EXPECT_EQ(Value(std::make_shared<const OpaqueObject>()).kind(), ValueKind::opaque);
}

TEST(ValueTest, TensorsOfEveryKindAreTensors) {
  EXPECT_TRUE(Value(at::zeros({1})).is_any_tensor());
  EXPECT_TRUE(Value(ShardedTensor::zeros(testing::chunk_spec(0, {0}), {2})).is_any_tensor());
  EXPECT_TRUE(Value(NestedShardedTensor()).is_any_tensor());
  EXPECT_TRUE(Value(std::make_shared<Piece>()).is_any_tensor());
  EXPECT_FALSE(Value(std::make_shared<const OpaqueObject>()).is_any_tensor());
  EXPECT_FALSE(Value(Dict()).is_any_tensor());
}

TEST(ValueTest, GetGivesWhatWasPutIn) {
  const at::Tensor tensor = at::arange(3);
  const StateDict state{{"model", Dict{{"weight", tensor}}}, {"betas", Tuple{0.9, 0.999}}, {"step", 3}, {7, "seven"}};
  EXPECT_TRUE(state.at("model").get<Dict>().at("weight").get<at::Tensor>().is_same(tensor));
  EXPECT_EQ(state.at("betas").get<Tuple>()[1].get<double>(), 0.999);
  EXPECT_EQ(state.at("step").get<std::int64_t>(), 3);
  EXPECT_EQ(state.at(7).get<std::string>(), "seven");
  EXPECT_EQ(state.at("step").get_if<double>(), nullptr);
  EXPECT_EQ(state.at("step").number(), 3.0);
  EXPECT_EQ(Value(2.5).number(), 2.5);
}

TEST(ValueTest, AnotherKindIsAnErrorThatNamesBoth) {
  EXPECT_ERROR(Value(3).get<double>(), ErrorCode::invalid_argument, "found int (3)", "expected float");
  EXPECT_ERROR(Value("x").get<at::Tensor>(), ErrorCode::invalid_argument, "found str ('x')", "expected tensor");
  EXPECT_ERROR(Value(true).number(), ErrorCode::invalid_argument, "found bool (True)", "expected int or float");
}

TEST(ValueTest, WhatPythonHasNotIsRefused) {
  EXPECT_ERROR(Value(std::numeric_limits<std::uint64_t>::max()), ErrorCode::invalid_argument, "18446744073709551615");
  EXPECT_ERROR(Value(at::Tensor()), ErrorCode::invalid_argument, "undefined tensor");
  EXPECT_ERROR(Value(std::shared_ptr<Piece>()), ErrorCode::invalid_argument, "null pointer", "checkpointable");
  EXPECT_ERROR(Value(std::shared_ptr<const OpaqueObject>()), ErrorCode::invalid_argument, "null pointer", "opaque");
}

TEST(ValueTest, ACopyIsAnotherValueWithTheSameElements) {
  Value value(Dict{{"list", List{1, 2}}, {"tensor", at::zeros({2})}});
  const Value copy = value;
  value.get<Dict>().at("list").get<List>().push_back(3);
  value.get<Dict>()["new"] = 1;
  EXPECT_EQ(copy.get<Dict>().at("list"), Value(List{1, 2}));
  EXPECT_FALSE(copy.get<Dict>().contains("new"));
  value.get<Dict>().at("tensor").get<at::Tensor>().fill_(1);
  EXPECT_TRUE(at::equal(copy.get<Dict>().at("tensor").get<at::Tensor>(), at::ones({2})));
}

TEST(ValueTest, APartCanTakeThePlaceOfTheWhole) {
  Value value(Dict{{"a", List{1, 2}}});
  value = value.get<Dict>().at("a");
  EXPECT_EQ(value, Value(List{1, 2}));
  value = std::move(value.get<List>()[1]);
  EXPECT_EQ(value, Value(2));
}

TEST(ValueTest, WhatIsMovedFromIsNone) {
  Value value("text");
  const Value taken = std::move(value);
  EXPECT_TRUE(value.is_none());  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(taken, Value("text"));
}

TEST(ValueEqualTest, KindsCount) {
  const std::vector<Value> values = {Value(), false, true, 0, 1, 1.0, "1", Bytes{'1'}, List{}, Tuple{}, Dict{}};
  for (std::size_t i = 0; i < values.size(); ++i) {
    for (std::size_t j = 0; j < values.size(); ++j) EXPECT_EQ(values[i] == values[j], i == j) << i << " " << j;
  }
}

TEST(ValueEqualTest, FloatsAreComparedByBits) {
  EXPECT_EQ(Value(std::numeric_limits<double>::quiet_NaN()), Value(std::numeric_limits<double>::quiet_NaN()));
  EXPECT_NE(Value(0.0), Value(-0.0));
}

TEST(ValueEqualTest, TensorsAreComparedByDtypeSizesAndBits) {
  const at::Tensor tensor = at::arange(6).view({2, 3});
  EXPECT_EQ(Value(tensor), Value(tensor.t().contiguous().t()));
  EXPECT_NE(Value(tensor), Value(tensor.to(at::kInt)));
  EXPECT_NE(Value(at::zeros({2}, at::kFloat)), Value(at::zeros({2}, at::kInt)));
  EXPECT_NE(Value(tensor), Value(tensor.view({3, 2})));
  EXPECT_NE(Value(tensor), Value(tensor + 1));
  const at::Tensor nan = at::full({2}, std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(Value(nan), Value(nan.clone()));
  EXPECT_NE(Value(at::zeros({1})), Value(at::zeros({1}).neg()));
  EXPECT_EQ(Value(at::zeros({0, 2})), Value(at::zeros({0, 2})));
}

TEST(ValueEqualTest, ShardedTensorsAreComparedByTheirShards) {
  const auto spec = testing::chunk_spec(0, {0});
  EXPECT_EQ(Value(ShardedTensor::ones(spec, {2})), Value(ShardedTensor::ones(spec, {2})));
  EXPECT_NE(Value(ShardedTensor::ones(spec, {2})), Value(ShardedTensor::zeros(spec, {2})));
  EXPECT_NE(Value(ShardedTensor::ones(spec, {2})), Value(ShardedTensor::ones(spec, {3})));
}

TEST(ValueEqualTest, TheOrderOfADictDoesNotCount) {
  EXPECT_EQ(Value(Dict{{"a", 1}, {"b", 2}}), Value(Dict{{"b", 2}, {"a", 1}}));
  EXPECT_NE(Value(Dict{{"a", 1}}), Value(Dict{{"a", 1}, {"b", 2}}));
  EXPECT_NE(Value(Dict{{1, 1}}), Value(Dict{{"1", 1}}));
}

TEST(DictTest, KeepsTheOrderOfInsertion) {
  Dict dict{{"b", 1}, {"a", 2}, {"b", 3}};
  dict["c"] = 4;
  dict.insert_or_assign("a", 5);
  std::ostringstream text;
  text << dict;
  EXPECT_EQ(text.str(), "{'b': 3, 'a': 5, 'c': 4}");
}

TEST(DictTest, AKeyThatIsNotThereIsAnErrorThatNamesIt) {
  EXPECT_ERROR((Dict{{"a", 1}}.at("b")), ErrorCode::not_found, "no key 'b'", "the 1 keys");
  EXPECT_ERROR(Dict().at(3), ErrorCode::not_found, "no key 3");
  EXPECT_ERROR(Dict().at("caf\xe9"), ErrorCode::not_found, R"(no key 'caf\udce9')");
  EXPECT_ERROR((List{1}.at(1)), ErrorCode::not_found, "found index 1, expected less than 1");
}

// For `std::hash`, these are all in one bucket of a table of this size.
TEST(DictTest, NoKeysCanBeChosenToCollide) {
  constexpr std::int64_t kKeys = 300'000;
  std::unordered_map<Key, std::size_t> table;
  for (std::int64_t i = 0; i < kKeys; ++i) table.emplace(i, 0);
  const auto buckets = static_cast<std::int64_t>(table.bucket_count());
  const auto begin = std::chrono::steady_clock::now();
  Dict dict;
  for (std::int64_t i = 0; i < kKeys; ++i) dict[i * buckets - 1] = i;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
  EXPECT_EQ(dict.at(7 * buckets - 1), Value(7));
}

RC_GTEST_PROP(DictTest, IsAMapThatKnowsItsOrder, ()) {
  Dict dict;
  std::vector<std::pair<std::int64_t, std::int64_t>> oracle;
  const auto steps = *rc::gen::container<std::vector<std::pair<int, int>>>(
      200, rc::gen::pair(rc::gen::inRange(0, 40), rc::gen::inRange(-2, 100)));
  for (const auto& [key, value] : steps) {
    const auto found =
        std::find_if(oracle.begin(), oracle.end(), [k = key](const auto& entry) { return entry.first == k; });
    if (value < 0) {
      RC_ASSERT(dict.erase(key) == (found != oracle.end()));
      if (found != oracle.end()) oracle.erase(found);
    } else {
      dict[key] = value;
      if (found == oracle.end()) {
        oracle.emplace_back(key, value);
      } else {
        found->second = value;
      }
    }
  }
  RC_ASSERT(dict.size() == oracle.size());
  std::size_t i = 0;
  for (const auto& [key, value] : dict) {
    RC_ASSERT(key == Key(oracle[i].first));
    RC_ASSERT(value == Value(oracle[i].second));
    RC_ASSERT(dict.find(key) == &value);
    ++i;
  }
}

RC_GTEST_PROP(ValueEqualTest, ACopyIsEqual, ()) {
  const Value value = RandomValues().value(4);
  const Value copy = value;  // NOLINT(performance-unnecessary-copy-initialization)
  RC_ASSERT(copy == value);
  RC_ASSERT(to_string(copy) == to_string(value));
}

TEST(ValueTextTest, IsPythons) {
  const Value value(Dict{{"w", at::zeros({2, 3})},
                         {"betas", Tuple{0.9, 1e-8}},
                         {"one", Tuple{1}},
                         {3, List{nullptr, true, "it's"}},
                         {"b", Bytes{0, 'x'}}});
  EXPECT_EQ(
      to_string(value),
      "{'w': <float32 tensor [2, 3]>, 'betas': (0.9, 1e-08), 'one': (1,), 3: [None, True, \"it's\"], 'b': b'\\x00x'}");
  EXPECT_EQ(to_string(Value(ShardedTensor::zeros(testing::chunk_spec(0, {0}), {2}))),
            "<sharded float32 tensor [2], 1 of 1 shards here>");
  EXPECT_EQ(to_string(Value(std::make_shared<Piece>())), "<checkpointable float32 tensor [4], 1 chunks here>");
}

TEST(ValueTextTest, IsCutAtTheLimit) {
  EXPECT_EQ(to_string(Value(List{1, 2, 3, 4, 5}), 7), "[1, 2, ...");
  EXPECT_EQ(to_string(Value(12), 2), "12");
  EXPECT_EQ(to_string(Value("a\xff")), R"('a\udcff')") << "text that is no UTF-8";
  EXPECT_EQ(to_string(Value(std::string(1000, 'x')), 5).size(), 8u);
}

}  // namespace
}  // namespace tessera

#include <gtest/gtest.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "tessera/format/internal/json_structure.h"

namespace tessera::json {
namespace {

TEST(JsonStructureTest, AKeyThatOccursTwiceInOneObjectIsFound) {
  EXPECT_EQ(structure_of(R"({"a": 1, "b": {"a": 2}, "c": [{"a": 3}, {"a": 4}]})").duplicate_key, std::nullopt);
  EXPECT_EQ(structure_of(R"({"a": 1, "b": [{"x": 0, "y": {}, "x": 1}], "a": 2})").duplicate_key, "x");
  EXPECT_EQ(structure_of(R"({"": 1, "": 2})").duplicate_key, "");
}

TEST(JsonStructureTest, DepthCountsArraysAndObjects) {
  EXPECT_EQ(structure_of("1").depth, 0u);
  EXPECT_EQ(structure_of(R"([{"a": []}, [[[1]]]])").depth, 4u);
  constexpr std::size_t kDeep = 1'000'000;  // no recursion
  EXPECT_EQ(structure_of(std::string(kDeep, '[') + std::string(kDeep, ']')).depth, kDeep);
}

TEST(JsonStructureTest, WhatPrecedesAnErrorCounts) {
  const Structure found = structure_of(R"([{"a": 1, "a": 2}, [[}]])");
  EXPECT_EQ(found.duplicate_key, "a");
  EXPECT_EQ(found.depth, 3u);
}

TEST(OrderedJsonTest, EqualsNlohmannsAndKeepsTheOrder) {
  const std::string text = R"({"z": [1, -2, 2.5, true, null, "x", {}, [], [{"b": {"y": 1, "a": 2}}]], "a": {"": ""}})";
  const OrderedJson parsed = parse_ordered(text);
  EXPECT_EQ(parsed.value, nlohmann::ordered_json::parse(text));
  EXPECT_EQ(parsed.value.dump(), nlohmann::ordered_json::parse(text).dump());
  EXPECT_EQ(parse_ordered("7").value, 7);
  EXPECT_EQ(parse_ordered(R"({"a": 1, "a": 2})").structure.duplicate_key, "a");
  for (const char* broken : {"", "{", "[1,]", R"({"a"})", "[1] 2", "[1e999]", "\"\xff\""}) {
    EXPECT_TRUE(parse_ordered(broken).value.is_discarded()) << broken;
  }
}

// Each compared with all others would take hours.
TEST(OrderedJsonTest, ManyObjectsAndMembersTakeTimeInProportion) {
  constexpr int kMany = 1'000'000;
  std::string list = "[", object = "{";
  nlohmann::ordered_json added = nlohmann::ordered_json::object();
  for (int i = 0; i < kMany; ++i) {
    list += "{},";
    object += "\"" + std::to_string(i) + "\":0,";
    add_member(added, std::to_string(i), 0);
  }
  EXPECT_EQ(structure_of(list + "{}]").depth, 2u);
  EXPECT_EQ(parse_ordered(list + "{}]").value.size(), kMany + 1u);
  const OrderedJson parsed = parse_ordered(object + "\"last\":0}");
  EXPECT_EQ(parsed.value.size(), kMany + 1u);
  EXPECT_EQ(parsed.structure.duplicate_key, std::nullopt);
  EXPECT_EQ(added.size(), static_cast<std::size_t>(kMany));
}

}  // namespace
}  // namespace tessera::json

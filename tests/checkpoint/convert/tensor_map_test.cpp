#include "tessera/checkpoint/tensor_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "checkpoint/convert/tensor_maps.h"
#include "support/box_generators.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/base/cast.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/tensor_reader.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/format/safetensors.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera::checkpoint {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Shape;
using testing::TemporaryDirectory;
using namespace tensor_maps;

std::vector<float> elements_of(const std::shared_ptr<const Checkpoint>& checkpoint, const std::string& name) {
  const auto tensor = checkpoint->find_tensor(name);
  if (!tensor) {
    ADD_FAILURE() << "no tensor " << name;
    return {};
  }
  const TensorReader reader(checkpoint, *tensor);
  Bytes bytes(reader.info().size_bytes());
  reader.read(Box::full(reader.info().shape), bytes);
  std::vector<float> values(bytes.size() / static_cast<std::size_t>(dtype_size(reader.info().dtype)));
  cast(reader.info().dtype, bytes.data(), DType::float32, reinterpret_cast<std::uint8_t*>(values.data()),
       static_cast<std::int64_t>(values.size()));
  return values;
}

// Names and shapes, in the checkpoint's order.
std::vector<std::string> described(const Checkpoint& checkpoint) {
  std::vector<std::string> result;
  for (const TensorInfo& info : checkpoint.tensors()) result.push_back(info.name + " " + shape_to_string(info.shape));
  return result;
}

// "0, 1, 2, ..."
std::string ranks(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += (i == 0 ? "" : ", ") + std::to_string(i);
  return text;
}

class TensorMapTest : public ::testing::Test {
 protected:
  std::shared_ptr<const Checkpoint> source(const std::vector<NamedTensor>& tensors) const {
    return counting_tensors(folder_, tensors);
  }
  const TemporaryDirectory folder_;
};

TEST_F(TensorMapTest, RenamesDropsAndCopies) {
  const auto from = source({{"layers.0.w", {2}}, {"layers.1.w", {2}}, {"mask", {3}}, {"emb", {1}}});
  const auto view = map_of_rules(R"j({"op": "rename", "match": "layers\\.(\\d+)\\.w", "to": "h.\\1.weight"},
                                    {"op": "drop", "match": "mask"},
                                    {"op": "copy", "match": "emb", "to": "head"})j")
                        .apply(from);
  EXPECT_THAT(described(*view), ElementsAre("h.0.weight [2]", "h.1.weight [2]", "emb [1]", "head [1]"));
  EXPECT_EQ(elements_of(view, "h.1.weight"), (std::vector<float>{1000, 1001}));
  EXPECT_EQ(elements_of(view, "head"), (std::vector<float>{3000}));
}

TEST_F(TensorMapTest, TransposesPermutesAndReshapes) {
  const auto from = source({{"a", {2, 3}}, {"b", {2, 2, 2}}, {"c", {4, 2}}});
  const auto view = map_of_rules(R"j({"op": "transpose", "match": "a", "dims": [0, -1]},
                                    {"op": "permute", "match": "b", "dims": [2, 0, 1]},
                                    {"op": "reshape", "match": "c", "shape": ["rows / 2", -1, "d1"]})j",
                                 {{"rows", 4}}, R"j({"rows": null})j")
                        .apply(from);
  EXPECT_THAT(described(*view), ElementsAre("a [3, 2]", "b [2, 2, 2]", "c [2, 2, 2]"));
  EXPECT_EQ(elements_of(view, "a"), (std::vector<float>{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(elements_of(view, "b"), (std::vector<float>{1000, 1002, 1004, 1006, 1001, 1003, 1005, 1007}));
  EXPECT_EQ(elements_of(view, "c"), (std::vector<float>{2000, 2001, 2002, 2003, 2004, 2005, 2006, 2007}));
}

TEST_F(TensorMapTest, SplitsAndConcatenates) {
  const auto from = source({{"0.qkv", {4, 2}}, {"0.gate", {1, 2}}, {"0.up", {2, 2}}});
  const auto view = map_of_rules(
                        R"j({"op": "split", "match": "(\\d+)\\.qkv", "dim": 0, "sizes": ["q", 1, 1],
                            "to": ["\\1.q", "\\1.k", "\\1.v"]},
                           {"op": "concat", "match": ["(\\d+)\\.gate", "(\\d+)\\.up"], "dim": 0, "to": "\\1.fc"})j",
                        {}, R"j({"q": 2})j")
                        .apply(from);
  EXPECT_THAT(described(*view), ElementsAre("0.q [2, 2]", "0.k [1, 2]", "0.v [1, 2]", "0.fc [3, 2]"));
  EXPECT_EQ(elements_of(view, "0.k"), (std::vector<float>{4, 5}));
  EXPECT_EQ(elements_of(view, "0.fc"), (std::vector<float>{1000, 1001, 2000, 2001, 2002, 2003}));
}

TEST_F(TensorMapTest, SizesOfPartsMayDependOnTheShape) {
  const auto from = source({{"q", {4, 3}}, {"k", {2, 3}}, {"gate", {3, 2}}, {"up", {3, 2}}});
  const TensorMap map = map_of_rules(
      R"j({"op": "concat", "match": ["q", "k"], "dim": 0, "to": "qk", "sizes": ["d0 - d1 + 1", 2]},
          {"op": "concat", "match": ["gate", "up"], "dim": -1, "to": "fc", "sizes": ["d1 / 2", "d1 / 2"]})j");
  const auto view = map.apply(from);
  EXPECT_THAT(described(*view), ElementsAre("qk [6, 3]", "fc [3, 4]"));
  EXPECT_TRUE(diff(map.inverse().apply(view), from).same());
}

TEST_F(TensorMapTest, ATensorIsPartOfOneResult) {
  const auto from = source({{"a1b2", {2}}, {"b1", {2}}, {"a2", {2}}});
  const TensorMap map =
      map_of_rules(R"j({"op": "concat", "match": ["a(\\d).*", ".*b(\\d)"], "dim": 0, "to": "c\\1"})j");
  EXPECT_THAT(map.check(from),
              ElementsAre("m: rule 1 (concat): 'a1b2' is a part of 'c1' and of 'c2', expected a part of one tensor"));
  // As several parts too.
  const auto twice =
      map_of_rules(R"j({"op": "concat", "match": ["b(1)", "b(\\d)"], "dim": 0, "to": "c\\1"})j").apply(from);
  EXPECT_EQ(elements_of(twice, "c1"), (std::vector<float>{1000, 1001, 1000, 1001}));
}

TEST_F(TensorMapTest, AListWithoutElementsIsTheShapeOfATensorWithoutDimensions) {
  const auto from = source({{"one", {1}}, {"scalar", {}}});
  const TensorMap map = map_of_rules(R"j({"op": "reshape", "match": "one", "shape": [], "from": [1]},
                                        {"op": "reshape", "match": "scalar", "shape": [1, 1], "from": []})j");
  const auto view = map.apply(from);
  EXPECT_THAT(described(*view), ElementsAre("one []", "scalar [1, 1]"));
  EXPECT_TRUE(diff(map.inverse().apply(view), from).same());
  EXPECT_THAT(map_of_rules(R"j({"op": "reshape", "match": "one", "shape": [1, 1], "from": []})j").check(from),
              ElementsAre(HasSubstr("tensor 'one' of shape [1]: expected the shape []")));
}

TEST_F(TensorMapTest, StacksAndUnstacksExperts) {
  const auto from = source({{"e.10.w", {2}}, {"e.0.w", {2}}, {"e.1.w", {2}}, {"all", {2, 3}}});
  const auto few = source({{"e.1.w", {2}}, {"e.0.w", {2}}, {"all", {2, 3}}});
  const TensorMap map = map_of_rules(R"j({"op": "stack", "match": "e\\.(\\d+)\\.w", "index": 1, "to": "experts.w"},
                                        {"op": "unstack", "match": "all", "to": "one.{i}", "count": 2})j");
  EXPECT_THAT(map.check(from),
              ElementsAre(HasSubstr("m: rule 1 (stack): tensor 'e.0.w' of shape [2]: found 3 tensors up "
                                    "to the index 10, expected one for each index from 0")));
  const auto view = map.apply(few);
  EXPECT_THAT(described(*view), ElementsAre("experts.w [2, 2]", "one.0 [3]", "one.1 [3]"));
  EXPECT_EQ(elements_of(view, "experts.w"), (std::vector<float>{1000, 1001, 0, 1}));
  EXPECT_EQ(elements_of(view, "one.1"), (std::vector<float>{2003, 2004, 2005}));
}

TEST_F(TensorMapTest, CastsSomeTensorsAndConcatenatesThem) {
  const auto from = source({{"a", {2}}, {"b", {2}}});
  const auto view = map_of_rules(R"j({"op": "cast", "match": "a", "dtype": "bfloat16"},
                                    {"op": "cast", "match": "a", "dtype": "float32"},
                                    {"op": "copy", "match": "b", "to": "c"},
                                    {"op": "cast", "match": "c", "dtype": "bfloat16"},
                                    {"op": "concat", "match": ["b", "a"], "dim": 0, "to": "ba"})j")
                        .apply(from);
  EXPECT_THAT(described(*view), ElementsAre("ba [4]", "c [2]"));
  EXPECT_EQ(elements_of(view, "ba"), (std::vector<float>{1000, 1001, 0, 1}));
  EXPECT_EQ(elements_of(view, "c"), (std::vector<float>{1000, 1000}));  // as bfloat16 has 8 bits of precision
}

TEST_F(TensorMapTest, SubstitutesAsSedDoes) {
  const auto from = source({{"model.a.model", {1}}, {"x/y", {1}}});
  const auto names = [&](const std::string& text) {
    const auto view = TensorMap::substitution(text).apply(from);
    std::vector<std::string> result;
    for (const TensorInfo& info : view->tensors()) result.push_back(info.name);
    return result;
  };
  EXPECT_THAT(names("s/^model\\.//"), ElementsAre("a.model", "x/y"));
  EXPECT_THAT(names("s/model/m/g"), ElementsAre("m.a.m", "x/y"));
  EXPECT_THAT(names("s/\\//./"), ElementsAre("model.a.model", "x.y"));
  EXPECT_THAT(names("s|(.)/(.)|\\2/\\1|"), ElementsAre("model.a.model", "y/x"));
  for (const char* wrong : {"", "s", "s/a/b", "s/a/b/c", "s/a", "x/a/b/", "s/a/b/g/"}) {
    EXPECT_ERROR(TensorMap::substitution(wrong), ErrorCode::invalid_argument, "is not a substitution, expected s");
  }
  EXPECT_ERROR(TensorMap::substitution("s/(/x/"), ErrorCode::invalid_argument, "'(' is not a regular expression");
  EXPECT_ERROR(TensorMap::substitution("s/a/\\1/"), ErrorCode::invalid_argument, "does not fit to the pattern");
}

TEST_F(TensorMapTest, AViewIsConvertedAndReshardedAndRead) {
  const auto from = source({{"w", {6, 4}}, {"b", {6}}});
  const auto view = map_of_rules(R"j({"op": "transpose", "match": "w", "dims": [0, 1]},
                                    {"op": "rename", "match": "b", "to": "bias"})j")
                        .apply(from);
  ConvertOptions options;
  for (const auto& [name, kind] : std::vector<std::pair<std::string, SourceKind>>{
           {"a", SourceKind::safetensors}, {"b", SourceKind::dcp}, {"c.pt", SourceKind::torch}}) {
    options.to = kind;
    convert(view, folder_ / name, options);
    EXPECT_TRUE(diff(view, Checkpoint::open(folder_ / name)).same()) << name;
    EXPECT_TRUE(verify(folder_ / name).problems.empty()) << name;
  }
  ReshardOptions reshard_options;
  reshard_options.ranks = 3;
  reshard(view, folder_ / "ranks", reshard_options);
  EXPECT_TRUE(diff(Checkpoint::open(folder_ / "ranks"), view).same());
  // From three ranks' files, and read by a program.
  const auto again =
      map_of_rules(R"j({"op": "transpose", "match": "w", "dims": [0, 1]})j").apply(Checkpoint::open(folder_ / "ranks"));
  std::vector<float> values(12);
  Targets targets;
  targets.push_back({"w", TargetTensor{DType::float32, {6, 4}, {}}});
  std::get<TargetTensor>(targets[0].value)
      .chunks.push_back({Box({2, 0}, {3, 4}), {reinterpret_cast<std::uint8_t*>(values.data()), {}}});
  read_state(targets, again);
  std::vector<float> expected(12);
  std::iota(expected.begin(), expected.end(), 8.0F);
  EXPECT_EQ(values, expected);
}

TEST_F(TensorMapTest, AViewKeepsTheChunksOfRanks) {
  ReshardOptions options;
  options.ranks = 2;
  reshard(source({{"w", {8, 6}}}), folder_ / "ranks", options);
  const auto view = map_of_rules(R"j({"op": "unflatten", "match": "w", "dim": 0, "sizes": [2, 2, 2]},
                                    {"op": "permute", "match": "w", "dims": [3, 0, 2, 1]})j")
                        .apply(Checkpoint::open(folder_ / "ranks"));
  EXPECT_EQ(view->tensors()[0].chunks, (BoxList{Box({0, 0, 0, 0}, {6, 1, 2, 2}), Box({0, 1, 0, 0}, {6, 1, 2, 2})}));
  ConvertOptions to_dcp;
  convert(view, folder_ / "out", to_dcp);
  EXPECT_EQ(Checkpoint::open(folder_ / "out")->files().size(), 2U);
  EXPECT_TRUE(diff(view, Checkpoint::open(folder_ / "out")).same());
}

TEST_F(TensorMapTest, DamageIsFoundThoughEachOutputReadsAPartOfAChunk) {
  ConvertOptions to_torch;
  to_torch.to = SourceKind::torch;
  convert(source({{"w", {256, 8}}}), folder_ / "good.pt", to_torch);
  const TensorMap map = map_of_rules(R"j({"op": "unstack", "match": "w", "to": "row.{i}"})j");
  const Extent extent = Checkpoint::open(folder_ / "good.pt")->locate(0, 0);
  Bytes bytes = read_file(folder_ / "good.pt");
  bytes[extent.offset_bytes + 1234] ^= 4;
  write_new_file(folder_ / "bad.pt", bytes);
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  convert(map.apply(Checkpoint::open(folder_ / "good.pt")), folder_ / "good", options);
  EXPECT_ERROR(convert(map.apply(Checkpoint::open(folder_ / "bad.pt")), folder_ / "bad", options), ErrorCode::corrupt,
               "tensor 'w'", "CRC-32");
  options.selection.select = {"row.3"};  // whose bytes are good: the others are read to compare the checksum
  EXPECT_ERROR(convert(map.apply(Checkpoint::open(folder_ / "bad.pt")), folder_ / "bad", options), ErrorCode::corrupt,
               "tensor 'w'", "CRC-32");
}

TEST_F(TensorMapTest, PathsOfAStateDictFollowTheNames) {
  const auto from = source({{"model.a", {1}}, {"b", {1}}});
  ConvertOptions options;
  options.to = SourceKind::dcp;
  convert(from, folder_ / "flat", options);
  const auto renamed = map_of_rules(R"j({"op": "rename", "match": "model\\.(.*)", "to": "x.\\1"})j");
  const auto view = renamed.apply(Checkpoint::open(folder_ / "flat"));
  EXPECT_EQ(view->tensors()[0].name, "x.a");
  EXPECT_TRUE(view->tensors()[0].path.empty());
}

TEST_F(TensorMapTest, ACheckNamesEverythingThatDoesNotFit) {
  const auto from = source({{"a", {5, 2}}, {"b", {2, 2}}, {"c", {2}}, {"d.0", {2}}, {"d.1", {3}}, {"other", {1}}});
  const TensorMap map = TensorMap::parse(R"j({"tessera_map": 1, "rules": [
      {"op": "split", "match": "a", "dim": 0, "to": ["a0", "a1"]},
      {"op": "rename", "match": "nothing", "to": "x"},
      {"op": "rename", "match": "b", "to": "c"},
      {"op": "rename", "match": "absent", "to": "x", "optional": true},
      {"op": "transpose", "match": "c", "dims": [0, 1]},
      {"op": "stack", "match": "d\\.(\\d)", "index": 1, "to": "d"}]})j",
                                         "m");
  EXPECT_THAT(
      map.check(from),
      ElementsAre(
          "m: rule 1 (split): tensor 'a' of shape [5, 2]: found 5 elements, expected a multiple of 2 for equal parts",
          "m: rule 2 (rename): its pattern matches no name, expected one or more; \"optional\": true allows none",
          "m: rule 5 (transpose): tensor 'c' of shape [2]: found dimension 1, expected -1 to 0",
          "m: rule 6 (stack): tensor 'd.0' of shape [2]: found tensor 'd.1' of shape [3], expected the shape [2]",
          "m: no rule matches 'other', expected one for each name, as \"unmatched\" is \"error\"",
          HasSubstr("m: two results have the name 'c': of m: rule 3 (rename) and of the checkpoint")));
  EXPECT_ERROR(map.apply(from), ErrorCode::invalid_argument, "map ", "rule 1 (split)", "no rule matches 'other'");
}

TEST_F(TensorMapTest, AnErrorOfTheTextNamesRuleKeyFoundAndExpected) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"j({"op": "renam", "match": "a", "to": "b"})j",
       "m: rule 1: key 'op': found \"renam\", expected one of rename, "},
      {R"j({"match": "a"})j", "m: rule 1: found no key 'op', expected a string"},
      {R"j([])j", "m: rule 1: found [], expected an object"},
      {R"j({"op": "rename", "match": "a"})j", "m: rule 1 (rename): found no key 'to', expected a string"},
      {R"j({"op": "rename", "match": "a", "to": 3})j", "m: rule 1 (rename): key 'to': found 3, expected a string"},
      {R"j({"op": "rename", "match": "a", "to": ""})j", "m: rule 1 (rename): key 'to': found \"\", expected a name"},
      {R"j({"op": "drop", "match": "a"}, {"op": "drop", "match": "("})j",
       "m: rule 2 (drop): key 'match': '(' is not a regular expression, expected the syntax of RE2: missing )"},
      {R"j({"op": "rename", "match": "(a)", "to": "\\2"})j",
       "m: rule 1 (rename): key 'to': '\\2' has \\2, expected groups up to \\1, which the pattern has"},
      {R"j({"op": "rename", "match": "a", "to": "{i}"})j", "has {i} 1 times, expected none: only unstack has an index"},
      {R"j({"op": "unstack", "match": "a", "to": "b"})j", "has {i} 0 times, expected once"},
      {R"j({"op": "drop", "match": "a", "dim": 0})j",
       "m: rule 1 (drop): found key 'dim', expected one of match, op, optional, comment"},
      {R"j({"op": "split", "match": "a", "dim": "x", "to": ["b", "c"]})j",
       "m: rule 1 (split): key 'dim': found \"x\", expected an integer"},
      {R"j({"op": "split", "match": "a", "dim": 0, "to": ["b"]})j", "expected a list of 2 or more strings"},
      {R"j({"op": "split", "match": "a", "dim": 0, "to": ["b", "c"], "sizes": [1]})j",
       "key 'sizes': found [1], expected a size for each of 2 parts"},
      {R"j({"op": "split", "match": "a", "dim": 0, "to": ["b", "c"], "sizes": []})j",
       "m: rule 1 (split): key 'sizes': found [], expected a list of 1 to 64 integers or expressions"},
      {R"j({"op": "concat", "match": ["a", "b"], "dim": 0, "to": "c", "sizes": []})j",
       "key 'sizes': found [], expected"},
      {R"j({"op": "flatten", "match": "a", "dims": [0, 1], "sizes": []})j", "key 'sizes': found [], expected a list"},
      {R"j({"op": "unflatten", "match": "a", "dim": 0, "sizes": []})j", "key 'sizes': found [], expected a list"},
      {R"j({"op": "unflatten", "match": "a", "dim": 0})j",
       "m: rule 1 (unflatten): found no key 'sizes', expected a list of 1 to 64 integers or expressions"},
      {R"j({"op": "unflatten", "match": "a", "sizes": [1]})j", "found no key 'dim', expected an integer"},
      {R"j({"op": "split", "match": "a", "to": ["b", "c"]})j", "found no key 'dim', expected an integer"},
      {R"j({"op": "concat", "match": ["a", "b"], "to": "c"})j", "found no key 'dim', expected an integer"},
      {R"j({"op": "reshape", "match": "a"})j", "found no key 'shape', expected a list of 0 to 64 integers"},
      {R"j({"op": "transpose", "match": "a"})j", "found no key 'dims', expected a list of two integers"},
      {R"j({"op": "permute", "match": "a"})j", "found no key 'dims', expected a list of integers"},
      {R"j({"op": "flatten", "match": "a"})j", "found no key 'dims', expected a list of two integers"},
      {R"j({"op": "concat", "match": ["(a)", "b"], "dim": 0, "to": "c"})j", "expected 1 groups in each pattern"},
      {R"j({"op": "stack", "match": "(a)", "index": 2, "to": "c"})j",
       "key 'index': found 2, expected the number of a group of the pattern, 1 to 1"},
      {R"j({"op": "cast", "match": "a", "dtype": "float31"})j",
       "key 'dtype': found \"float31\", expected a dtype of PyTorch"},
      {R"j({"op": "transpose", "match": "a", "dims": [0]})j", "key 'dims': found [0], expected a list of two integers"},
      {R"j({"op": "drop", "match": "a", "optional": 1})j", "key 'optional': found 1, expected true or false"},
      {R"j({"op": "drop", "op": "drop", "match": "a"})j", "m: the key 'op' occurs twice"},
  };
  for (const auto& [rules, message] : cases) {
    EXPECT_ERROR(map_of_rules(rules), ErrorCode::invalid_argument, message);
  }
  EXPECT_ERROR(TensorMap::parse("{", "m"), ErrorCode::invalid_argument,
               "m at byte 2: this is not JSON, expected a JSON object: parse error at line 1, column 2");
  EXPECT_ERROR(TensorMap::parse("[]", "m"), ErrorCode::invalid_argument, "m: found [], expected an object");
  EXPECT_ERROR(TensorMap::parse("{}", "m"), ErrorCode::invalid_argument, "m: found no key 'tessera_map'");
  EXPECT_ERROR(TensorMap::parse(R"j({"tessera_map": 2})j", "m"), ErrorCode::invalid_argument,
               "m: key 'tessera_map': found 2, expected 1, the version of the format");
  EXPECT_ERROR(TensorMap::parse(R"j({"tessera_map": 1, "rules": [], "unmatched": "x"})j", "m"),
               ErrorCode::invalid_argument, "m: key 'unmatched': found \"x\", expected error, keep or drop");
  EXPECT_ERROR(TensorMap::read("no-such-map"), ErrorCode::not_found, "no such file", "llama-torchtitan-to-hf");
  EXPECT_ERROR(TensorMap::read(std::string(300, 'a')), ErrorCode::io, "File name too long");
}

TEST_F(TensorMapTest, ParametersComeFromTheCallerTheModelsConfigAndTheText) {
  const std::string text = R"j({"tessera_map": 1, "unmatched": "keep", "rules": [
      {"op": "reshape", "match": "a", "shape": ["n", "m"]}],
      "parameters": {"n": {"config": "heads"}, "m": {"config": "kv", "default": "n * 2"}}})j";
  const auto from = source({{"a", {32}}});
  const auto shape = [&](const TensorMap::Parameters& set, const std::string& config) {
    return TensorMap::parse(text, "m", set, config).apply(from)->tensors()[0].shape;
  };
  EXPECT_EQ(shape({{"n", 4}}, ""), (Shape{4, 8}));
  EXPECT_EQ(shape({}, R"j({"heads": 4})j"), (Shape{4, 8}));
  EXPECT_EQ(shape({}, R"j({"heads": 16, "kv": 2})j"), (Shape{16, 2}));
  EXPECT_EQ(shape({{"m", 4}, {"n", 8}}, R"j({"heads": 16, "kv": 2})j"), (Shape{8, 4}));
  EXPECT_ERROR(shape({}, ""), ErrorCode::invalid_argument,
               "m: the parameter 'n' has no value, expected an integer; set it: n=N");
  EXPECT_ERROR(shape({{"n", 1}, {"x", 1}}, ""), ErrorCode::invalid_argument,
               "m: found a value for the parameter 'x', expected one of m, n");
  EXPECT_ERROR(shape({{"n", INT64_MAX}}, ""), ErrorCode::invalid_argument, "'n * 2' overflows");
  EXPECT_ERROR(shape({}, "{"), ErrorCode::invalid_argument, "config.json at byte 2: this is not JSON");
  // A value that is there is not replaced by the default.
  EXPECT_EQ(shape({{"n", 4}}, R"j({"kv": null})j"), (Shape{4, 8}));
  for (const char* value : {"\"2\"", "2.0", "[2]", "9223372036854775808"}) {
    EXPECT_ERROR(shape({{"n", 4}}, "{\"kv\": " + std::string(value) + "}"), ErrorCode::invalid_argument,
                 "config.json: key 'kv': found " + std::string(value) + ", expected an integer");
  }
  EXPECT_ERROR(shape({}, "[]"), ErrorCode::invalid_argument, "config.json: found [], expected an object");
  EXPECT_ERROR(shape({}, "{\"heads\": 1e999}"), ErrorCode::invalid_argument, "config.json: ", "1e999",
               ", expected finite numbers");
  EXPECT_ERROR(shape({}, R"j({"": 1, "": 2})j"), ErrorCode::invalid_argument, "config.json: the key '' occurs twice");
}

TEST_F(TensorMapTest, ExpressionsDivideByMinusOneAndSizesThatDoNotFitAreShown) {
  const auto from = source({{"a", {12}}});
  const auto problems = [&](const std::string& shape) {
    return map_of_rules(R"j({"op": "reshape", "match": "a", "shape": )j" + shape + "}").check(from);
  };
  EXPECT_THAT(problems(R"j(["-12 / -1"])j"), ElementsAre());
  EXPECT_THAT(problems(R"j(["-9223372036854775808 / -1"])j"), ElementsAre(HasSubstr("overflows, expected numbers")));
  EXPECT_THAT(problems("[2, 3]"), ElementsAre(HasSubstr("the sizes [2, 3] multiply to 6, expected 12")));
  EXPECT_THAT(problems("[5, -1]"),
              ElementsAre(HasSubstr("the sizes [5, -1] multiply to 5 without the -1, expected a divisor of 12")));
  EXPECT_THAT(
      map_of_rules(R"j({"op": "split", "match": "a", "dim": 0, "to": ["b", "c"], "sizes": [13, -1]})j").check(from),
      ElementsAre(HasSubstr("the sizes [13, -1] add up to 13 without the -1, expected at most 12")));
}

TEST_F(TensorMapTest, HostileMapsAreRefused) {
  const auto from = source({{"a", {4}}, {"empty", {0, 3}}, {std::string(100'000, 'a'), {1}}});
  const auto problems = [&](const std::string& rule) { return map_of_rules(rule).check(from); };
  EXPECT_THAT(problems(R"j({"op": "reshape", "match": "a", "shape": [0, -1]})j"),
              ElementsAre(HasSubstr("the sizes [0, -1] multiply to 0 without the -1, expected a product above 0")));
  EXPECT_THAT(problems(R"j({"op": "reshape", "match": "a", "shape": [-1, -1]})j"), ElementsAre(HasSubstr("-1 twice")));
  EXPECT_THAT(problems(R"j({"op": "reshape", "match": "a", "shape": ["4 / 0"]})j"),
              ElementsAre(HasSubstr("'4 / 0': 4 is not divisible by 0, expected a division without remainder")));
  EXPECT_THAT(problems(R"j({"op": "reshape", "match": "a", "shape": [4000000000, 4000000000]})j"),
              ElementsAre(HasSubstr("overflows")));
  EXPECT_THAT(problems(R"j({"op": "reshape", "match": "empty", "shape": [4611686018427387904, 0, 4]})j"),
              ElementsAre(HasSubstr("overflows")));
  EXPECT_THAT(problems(R"j({"op": "reshape", "match": "a", "shape": ["(((((((((((((x"]})j"),
              ElementsAre(HasSubstr("there is no parameter 'x'")));
  std::string nested(200, '(');
  EXPECT_THAT(problems(R"j({"op": "reshape", "match": "a", "shape": [")j" + nested + R"j("]})j"),
              ElementsAre(HasSubstr("expected at most 50 parentheses")));
  EXPECT_ERROR(map_of_rules(R"j({"op": "permute", "match": "a", "dims": [)j" + ranks(65) + "]}"),
               ErrorCode::invalid_argument, "key 'dims'", "expected a list of integers");
  // A pattern that takes exponential time elsewhere, and one that takes much memory.
  EXPECT_THAT(problems(R"j({"op": "drop", "match": "(a*)*(a|aa)*b"})j"), ElementsAre(HasSubstr("matches no name")));
  EXPECT_ERROR(map_of_rules(R"j({"op": "drop", "match": "((a{1000}){1000}){1000}"})j"), ErrorCode::invalid_argument,
               "is not a regular expression");
  // Many operations on one tensor, and many tensors of one.
  std::string rules;
  for (int i = 0; i < 300; ++i) {
    rules += std::string(i == 0 ? "" : ",") + R"j({"op": "unflatten", "match": "a", "dim": 0, "sizes": [2, -1]},
                                                 {"op": "permute", "match": "a", "dims": [1, 0]},
                                                 {"op": "flatten", "match": "a", "dims": [0, 1]})j";
  }
  EXPECT_THAT(problems(rules).at(0), HasSubstr("a tensor is the result of over 256 operations"));
  EXPECT_THAT(
      map_of_rules(R"j({"op": "unstack", "match": "large", "to": "{i}"})j").check(source({{"large", {2'000'000}}})),
      ElementsAre(HasSubstr("it makes 2000000 tensors, expected at most 1048576 in all")));
}

TEST_F(TensorMapTest, ADeeplyNestedMapIsRefused) {
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  EXPECT_ERROR(TensorMap::parse(deep, "m"), ErrorCode::invalid_argument, " levels of nesting, expected at most 64");
  EXPECT_ERROR(map_of_rules(deep), ErrorCode::invalid_argument, " levels of nesting, expected at most 64");
}

// Each key compared with all others would take minutes.
TEST_F(TensorMapTest, MapsAndModelsConfigsWithManyKeysTakeTimeInProportion) {
  std::string config, parameters;
  for (int i = 0; i < 120'000; ++i) {
    config += (i == 0 ? "{\"" : ",\"") + std::to_string(i) + "\":" + std::to_string(i);
    if (i < 115'000) continue;
    parameters +=
        (parameters.empty() ? "{\"p" : ",\"p") + std::to_string(i) + R"(":{"config":")" + std::to_string(i) + "\"}";
  }
  const TensorMap map = TensorMap::parse(R"j({"tessera_map": 1, "rules": [
      {"op": "reshape", "match": "a", "shape": ["p119999 - p119997", -1]}], "parameters": )j" +
                                             parameters + "}}",
                                         "m", {}, config + "}");
  EXPECT_THAT(described(*map.apply(source({{"a", {4}}}))), ElementsAre("a [2, 2]"));
}

TEST_F(TensorMapTest, AMapAfterOneWithTooManyProblemsIsNotApplied) {
  std::vector<NamedTensor> tensors;
  for (int i = 0; i < 1200; ++i) tensors.push_back({std::to_string(i), {2}});
  const TensorMap map = map_of_rules(R"j({"op": "transpose", "match": ".*", "dims": [0, 1]})j");
  EXPECT_EQ(map.then(map).check(source(tensors)).size(), 1000u);
}

TEST_F(TensorMapTest, AMapThatCannotBeInvertedNamesTheRules) {
  const auto inverse = [](const std::string& rules) { return map_of_rules(rules).inverse(); };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"j({"op": "drop", "match": "a"})j", "m: rule 1 (drop) cannot be inverted: what it drops cannot be made again"},
      {R"j({"op": "rename", "match": "(a)(b)", "to": "\\1"})j",
       "rule 1 (rename) cannot be inverted: '\\1' does not have \\2"},
      {R"j({"op": "rename", "match": "(a)", "to": "\\1\\1"})j", "'\\1\\1' has \\1 twice, expected it once"},
      {R"j({"op": "rename", "match": "a.*", "to": "b"})j",
       "its pattern is 'a.*', expected text with groups that capture, and nothing else"},
      {R"j({"op": "rename", "match": "((a))", "to": "\\1"})j",
       "its pattern is '((a))', expected text with groups that capture"},
      {R"j({"op": "cast", "match": "a", "dtype": "float32"})j",
       "found no key 'from', expected the dtype before: its inverse needs it"},
      {R"j({"op": "cast", "match": "a", "dtype": "bfloat16", "from": "float32"})j",
       "bfloat16 cannot represent all values of float32"},
      {R"j({"op": "reshape", "match": "a", "shape": [4]})j", "found no key 'from', expected the shape before"},
      {R"j({"op": "flatten", "match": "a", "dims": [0, 1]})j",
       "found no key 'sizes', expected the sizes of the dimensions before"},
      {R"j({"op": "substitute", "match": "a", "to": "b"})j", "use rename"},
      {R"j({"op": "copy", "match": "a", "to": "b", "unless_exists": true})j",
       "which of the names existed before is not known, expected a copy without unless_exists"},
      {R"j({"op": "split", "match": "(a)(b)", "dim": 0, "to": ["\\1\\2", "\\2\\1"]})j", "groups in another order"},
      {R"j({"op": "concat", "match": ["a(\\d)", "b(.)"], "dim": 0, "to": "c\\1", "sizes": [1, 1]})j",
       "the groups of 'b(.)' are not those of"},
      {R"j({"op": "concat", "match": ["q", "k", "v"], "dim": 0, "to": "qkv"})j",
       "found no key 'sizes', expected the sizes of the parts: its inverse needs it"},
  };
  for (const auto& [rules, message] : cases) EXPECT_ERROR(inverse(rules), ErrorCode::invalid_argument, message);
  EXPECT_ERROR(TensorMap::parse(R"j({"tessera_map": 1, "unmatched": "drop", "rules": []})j", "m").inverse(),
               ErrorCode::invalid_argument, "m: \"unmatched\" is \"drop\"");
}

}  // namespace
}  // namespace tessera::checkpoint

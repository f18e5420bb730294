#include "tessera/format/python_value.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "format/python/text.h"
#include "support/error_matchers.h"
#include "support/pickle_generators.h"
#include "support/pickle_golden.h"

namespace tessera::pickle {
namespace {

using namespace std::literals;
using Json = nlohmann::ordered_json;
using testing::read_pickle;
using testing::read_pickled_values;

constexpr std::string_view kLoop = "]\x94h\x00\x61."sv;  // l = [l]

// 40 lists, each holding the previous one ten times.
std::string nested_lists() {
  std::string bytes = "]\x94";
  for (char i = 0; i < 40; ++i) {
    bytes += "0](";
    for (int j = 0; j < 10; ++j) bytes.append(1, 'h').push_back(i);
    bytes += "e\x94";
  }
  return bytes + ".";
}

TEST(PythonValueTest, ReprIsPythons) {
  for (const auto& golden : read_pickled_values()) {
    if (golden.repr.empty()) continue;
    for (std::size_t protocol = 0; protocol < golden.pickles.size(); ++protocol) {
      if (!golden.understood && protocol < 2) continue;  // other calls make the objects
      const ReadResult result = read(ByteView(golden.pickles[protocol]), golden.name);
      if (golden.name == "keywords" && protocol < 4) continue;  // by functools.partial
      EXPECT_EQ(repr(result.tree.root()), golden.repr) << golden.name << " in protocol " << protocol;
    }
  }
}

TEST(PythonValueTest, ReprOfOpaqueValuesNamesWhatWouldBeCalled) {
  const auto shown = [](std::string_view bytes) { return repr(read_pickle(bytes).tree.root()); };
  EXPECT_EQ(shown("cos\nsystem\n(S'ls'\ntR."), "<os.system(...)>");
  EXPECT_EQ(shown("]cos\nsystem\na."), "[<os.system>]");
  EXPECT_EQ(shown("c__builtin__\ngetattr\n(cos\npath\nS'join'\ntR."), "<builtins.getattr(...)>");
  EXPECT_EQ(shown("c__builtin__\ngetattr\n(cos\npath\nS'join'\ntR(tR."), "<os.path.join(...)>");
  EXPECT_EQ(shown("cm\nf\n)R)R."), "<m.f(...)(...)>");
  EXPECT_EQ(shown("N)R."), "<a None(...)>");
  EXPECT_EQ(shown("\x80\x04\x8c\x01m\x8c\x03\x61\n\x1b\x93."), "<m.a\\x0a\\x1b>") << "on one line";
  EXPECT_EQ(shown("(S'storage'\nK\x01tQ."), "<persistent id ('storage', 1)>");
}

TEST(PythonValueTest, ReprIsCutAtTheLimit) {
  const ReadResult list = read_pickle("](K\x01K\x02K\x03\x65.");
  EXPECT_EQ(repr(list.tree.root(), 9), "[1, 2, 3]");
  EXPECT_EQ(repr(list.tree.root(), 8), "[1, 2, 3...");
  EXPECT_EQ(repr(list.tree.root(), 0), "...");
  const ReadResult text = read_pickle("\x8c\x06\xc3\xa9\xc3\xa9\xc3\xa9.");
  EXPECT_EQ(repr(text.tree.root(), 4), "'\xc3\xa9...") << "never within a character";
  for (std::size_t limit = 0; limit < 12; ++limit) EXPECT_LE(repr(text.tree.root(), limit).size(), limit + 3);
}

TEST(PythonValueTest, ALimitIsOfIntsToo) {
  Tree tree;
  Bytes bytes(100'000, 0xa5);
  for (const int highest : {0x01, 0x0f, 0x7f, 0x80, 0xff}) {
    bytes.back() = static_cast<std::uint8_t>(highest);
    const NodeRef value = tree.make_big_integer(bytes);
    const std::string all = repr(value);
    for (const std::size_t limit : {0, 1, 2, 3, 4, 99, 100, 1000}) {
      EXPECT_EQ(repr(value, limit), all.substr(0, limit) + "...") << highest << " " << limit;
    }
  }
  bytes.assign(10'000, 0);
  bytes.back() = 0xff;  // -2^79992
  EXPECT_EQ(repr(tree.make_big_integer(bytes), 6), "-0x100...");
  // If each call converted all of its 4 MiB, these took minutes.
  bytes.assign(std::size_t{4} << 20, 0x55);
  const NodeRef value = tree.make_big_integer(bytes);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 20'000; ++i) EXPECT_EQ(repr(value, 4), "0x55...");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

// What follows the part that is printed is not searched for quotes.
TEST(PythonValueTest, QuotesAreThoseForThePartThatIsPrinted) {
  const std::string text = "it's " + std::string(100, 'x') + "\"";
  Tree tree;
  for (const auto& [value, prefix] : {std::pair(tree.make_string(text), ""), {tree.make_bytes(as_bytes(text)), "b"}}) {
    EXPECT_TRUE(repr(value).starts_with(prefix + "'it\\'s x"s)) << repr(value);
    EXPECT_TRUE(repr(value, 20).starts_with(prefix + "\"it's x"s)) << repr(value, 20);
  }
  EXPECT_EQ(repr(tree.make_string("it's")), "\"it's\"");
  EXPECT_EQ(repr(tree.make_string("it's"), 6), "\"it's\"") << "all of it";
  EXPECT_EQ(repr(tree.make_string("'\""), 5), "'\\'\"'") << "all of it";
}

TEST(PythonValueTest, ReprOfFloats) {
  EXPECT_EQ(float_repr(1e16), "1e+16");
  EXPECT_EQ(float_repr(1e15), "1000000000000000.0");
  EXPECT_EQ(float_repr(0.0001), "0.0001");
  EXPECT_EQ(float_repr(0.00001), "1e-05");
  EXPECT_EQ(float_repr(-1.25), "-1.25");
  EXPECT_EQ(float_repr(-0.0), "-0.0");
  EXPECT_EQ(float_repr(123456789.125), "123456789.125");
}

TEST(PythonValueTest, SharingWithoutEndIsAnError) {
  const ReadResult result = read_pickle(nested_lists());
  EXPECT_EQ(repr(result.tree.root(), 100).size(), 103u);
  EXPECT_ERROR(repr(result.tree.root()), ErrorCode::corrupt, "repr of a pickled value: shared parts stand for ",
               " values, expected at most ");
  EXPECT_ERROR(to_json(result.tree.root()), ErrorCode::corrupt, "shared parts");
  EXPECT_ERROR(to_lossless_json(result.tree.root()), ErrorCode::corrupt, "shared parts");
  EXPECT_EQ(opaque_reason(result.tree.root()), std::nullopt) << "each part is looked at once";
}

// One text of a MiB, 1000 times.
TEST(PythonValueTest, LongTextThatIsSharedIsLimited) {
  for (const char opcode : {'X', 'B'}) {
    std::string bytes = std::string(1, opcode) + std::string("\0\0\x10\0", 4) + std::string(1 << 20, 'x') + "\x94";
    const std::size_t once = bytes.size();
    bytes += "0](";
    for (int i = 0; i < 1000; ++i) bytes += std::string("h\0", 2);
    const ReadResult result = read_pickle(bytes + "e.");
    EXPECT_EQ(repr(result.tree.root(), 100).size(), 103u);
    EXPECT_ERROR(repr(result.tree.root()), ErrorCode::corrupt, "shared parts stand for ",
                 " bytes of text, expected at most 25165824");
    EXPECT_ERROR(to_json(result.tree.root()), ErrorCode::corrupt, "bytes of text");
    EXPECT_ERROR(to_lossless_json(result.tree.root()), ErrorCode::corrupt, "bytes of text");
    const ReadResult alone = read_pickle(bytes.substr(0, once) + ".");
    EXPECT_GT(repr(alone.tree.root()).size(), std::size_t{1} << 20);
  }
  // As the type of a device, and as the name of a global.
  for (const std::string& made :
       {std::string("ctorch\ndevice\nh\0\x85R\x94", 19), std::string("\x8c\x01mh\0\x93\x94", 7)}) {
    std::string bytes =
        "\x80\x04X" + std::string("\0\0\x10\0", 4) + std::string(1 << 20, 'x') + "\x94" + "0" + made + "0](";
    for (int i = 0; i < 1000; ++i) bytes += "h\x01";
    const ReadResult result = read_pickle(bytes + "e.");
    if (opaque_reason(result.tree.root())) {
      EXPECT_LT(repr(result.tree.root()).size(), 1u << 20);  // long names are truncated
      continue;
    }
    EXPECT_ERROR(repr(result.tree.root()), ErrorCode::corrupt, "bytes of text");
    EXPECT_ERROR(to_json(result.tree.root()), ErrorCode::corrupt, "bytes of text");
    EXPECT_ERROR(to_lossless_json(result.tree.root()), ErrorCode::corrupt, "bytes of text");
  }
  // In tuples that are keys.
  std::string tuples = "X" + std::string("\0\0\x10\0", 4) + std::string(1 << 20, 'x') + "\x94" + "0}(";
  for (int i = 0; i < 100; ++i) tuples += std::string("h\0K", 3) + static_cast<char>(i) + "\x86N";
  EXPECT_ERROR(to_json(read_pickle(tuples + "u.").tree.root()), ErrorCode::corrupt, "bytes of text");
  // As a key of many dicts.
  std::string keys = "X" + std::string("\0\0\x10\0", 4) + std::string(1 << 20, 'x') + "\x94" + "0](";
  for (int i = 0; i < 1000; ++i) keys += std::string("}h\0Ns", 5);
  const ReadResult result = read_pickle(keys + "e.");
  EXPECT_ERROR(to_json(result.tree.root()), ErrorCode::corrupt, "bytes of text");
  EXPECT_ERROR(to_lossless_json(result.tree.root()), ErrorCode::corrupt, "bytes of text");
}

TEST(PythonValueTest, SizesThatAreSharedAreLimited) {
  const auto sizes = [](std::size_t items) {
    std::string bytes = "ctorch\nSize\n(";
    for (std::size_t i = 0; i < items; ++i) bytes += "K\x01";
    bytes += "t\x85R\x94" + std::string("0](");
    for (int i = 0; i < 1000; ++i) bytes += std::string("h\0", 2);
    return read_pickle(bytes + "e.");
  };
  const ReadResult shared = sizes(1000);
  EXPECT_ERROR(repr(shared.tree.root()), ErrorCode::corrupt, "shared parts stand for ", " values, expected at most ");
  EXPECT_ERROR(to_json(shared.tree.root()), ErrorCode::corrupt, "shared parts");
  EXPECT_EQ(opaque_reason(shared.tree.root()), std::nullopt);
  EXPECT_TRUE(opaque_reason(sizes(1001).tree.root())) << "no tensor has as many dimensions";
}

// As Python prints text that was decoded with "surrogateescape".
TEST(PythonValueTest, BytesThatAreNoUtf8AreEscaped) {
  EXPECT_EQ(string_repr("\xc3"), "'\\udcc3'");
  EXPECT_EQ(string_repr("a\xff\xc3\xa9"), "'a\\udcff\xc3\xa9'");
}

TEST(PythonValueTest, SharingAsOptimizersHaveItIsNoHarm) {
  // 50,000 groups that share one pair of betas.
  std::string bytes =
      "G\x3f\xec\xcc\xcc\xcc\xcc\xcc\xcdG\x3f\xef\xf7\xce\xd9\x16\x87\x2b\x86\x94"
      "0](";
  for (int i = 0; i < 50'000; ++i) bytes += std::string("}X\5\0\0\0betash\0s", 14);
  const ReadResult result = read_pickle(bytes + "e.");
  EXPECT_EQ(to_json(result.tree.root()).size(), 50'000u);
}

TEST(PythonValueTest, TooDeepIsAnError) {
  const std::string bytes = ")" + std::string(600, '\x85') + ".";
  const ReadResult result = read_pickle(bytes);
  EXPECT_ERROR(repr(result.tree.root()), ErrorCode::corrupt,
               "nests deeper than the limit, expected at most 500 levels");
  EXPECT_ERROR(to_json(result.tree.root()), ErrorCode::corrupt,
               "nests deeper than the limit, expected at most 500 levels");
  EXPECT_ERROR(opaque_reason(result.tree.root()), ErrorCode::corrupt,
               "nests deeper than the limit, expected at most 500 levels");
}

TEST(PythonValueTest, WhatContainsItself) {
  const ReadResult result = read_pickle(kLoop);
  EXPECT_EQ(repr(result.tree.root()), "[[...]]");
  EXPECT_EQ(opaque_reason(result.tree.root()), "contains itself");
  EXPECT_EQ(to_json(result.tree.root()).dump(), "[null]");
  EXPECT_EQ(to_lossless_json(result.tree.root()), std::nullopt);
}

TEST(PythonValueTest, TypeNames) {
  const std::pair<std::string_view, std::string> cases[] = {
      {"N.", "NoneType"},
      {"I01\n.", "bool"},
      {"I1\n.", "int"},
      {"L99999999999999999999L\n.", "int"},
      {"F1\n.", "float"},
      {"U\x01\x61.", "str"},
      {"C\x01\x61.", "bytes"},
      {"c__builtin__\nbytearray\n)R.", "bytearray"},
      {"].", "list"},
      {").", "tuple"},
      {"}.", "dict"},
      {"\x8f.", "set"},
      {"(\x91.", "frozenset"},
      {"ccollections\nOrderedDict\n)R.", "OrderedDict"},
      {"ctorch\nSize\n)\x85R.", "torch.Size"},
      {"ctorch\nfloat32\n.", "dtype"},
      {"ctorch\ndevice\nU\x03\x63pu\x85R.", "device"},
      {"c__builtin__\ncomplex\nF1\nF2\n\x86R.", "complex"},
      {"cargparse\nNamespace\n)R.", "argparse.Namespace"},
      {"cargparse\nNamespace\n)\x81.", "argparse.Namespace"},
      {"c__builtin__\neval\n.", "builtins.eval"},
      {"K\x01Q.", "persistent id"},
      {"\x82\x05.", "extension 5"},
  };
  for (const auto& [bytes, name] : cases) EXPECT_EQ(type_name(read_pickle(bytes).tree.root()), name);
}

TEST(PythonValueTest, AnUnusualCallOfAKnownTypeIsOpaque) {
  for (const std::string_view bytes :
       {"ccollections\nOrderedDict\nK\x01\x85R."sv, "ccollections\nOrderedDict\n)RK\x01\x62."sv, "ctorch\nSize\n)R."sv,
        "ctorch\nSize\nN\x85\x85R."sv, "ctorch\nSize\n)\x85\x81."sv, "ctorch\ndevice\nN\x85R."sv,
        "ctorch\ndevice\n)R."sv, "c__builtin__\ncomplex\nK\x01\x85R."sv, "ctorch\nSize\n)\x85RNb."sv,
        "ctorch\nload\n."sv, "ctorch\nhalf\n."sv, "ctorch\nSize\n)\x85RNa."sv}) {
    EXPECT_TRUE(opaque_reason(read_pickle(bytes).tree.root())) << printable(bytes);
  }
}

TEST(PythonValueTest, OpaquePartsAreFoundAnywhere) {
  const auto reason = [](std::string_view bytes) { return opaque_reason(read_pickle(bytes).tree.root()); };
  EXPECT_EQ(reason("]ca\nb\n)R\x61."), "calls a.b, which is not executed");
  EXPECT_EQ(reason("ca\nb\n\x85."), "is the global a.b, which is not imported");
  EXPECT_EQ(reason("}K\x01K\x02Qs."), "refers to something outside of the pickle");
  EXPECT_EQ(reason("}ca\nb\nK\x02s."), "is the global a.b, which is not imported");
  EXPECT_EQ(reason("\x8f(ca\nb\n\x90."), "is the global a.b, which is not imported");
  EXPECT_EQ(reason("ccollections\nOrderedDict\n)R}K\x01\x63\x61\nb\nsb."), "is the global a.b, which is not imported");
  EXPECT_EQ(reason("](]K\x01\x65."), std::nullopt);
}

TEST(PythonValueTest, UnderstoodIsWhatTheGoldenFilesSay) {
  for (const auto& golden : read_pickled_values()) {
    const ReadResult result = read(ByteView(golden.pickles[4]), golden.name);
    EXPECT_EQ(!opaque_reason(result.tree.root()), golden.understood) << golden.name;
    EXPECT_EQ(to_lossless_json(result.tree.root()).has_value(), golden.understood) << golden.name;
  }
}

TEST(PythonValueTest, DtypesAndIntLists) {
  EXPECT_EQ(as_dtype(read_pickle("ctorch\nbfloat16\n.").tree.root()), DType::bfloat16);
  EXPECT_EQ(as_dtype(read_pickle("cnumpy\nfloat32\n.").tree.root()), std::nullopt);
  EXPECT_EQ(as_dtype(read_pickle("U\x07\x66loat32.").tree.root()), std::nullopt);
  const std::vector<std::int64_t> expected = {2, 3};
  EXPECT_EQ(as_int_list(read_pickle("ctorch\nSize\nK\x02K\x03\x86\x85R.").tree.root()), expected);
  EXPECT_EQ(as_int_list(read_pickle("K\x02K\x03\x86.").tree.root()), expected);
  EXPECT_EQ(as_int_list(read_pickle("](K\x02K\x03\x65.").tree.root()), expected);
  EXPECT_EQ(as_int_list(read_pickle("](K\x02I01\ne.").tree.root()), std::nullopt);
  EXPECT_EQ(as_int_list(read_pickle("L99999999999999999999L\n\x85.").tree.root()), std::nullopt);
  EXPECT_EQ(as_int_list(read_pickle("K\x02.").tree.root()), std::nullopt);
}

TEST(PythonValueTest, JsonForReaders) {
  const std::pair<std::string_view, std::string> cases[] = {
      {"N.", "null"},
      {"I01\n.", "true"},
      {"F0.5\n.", "0.5"},
      {"Fnan\n.", R"("nan")"},
      {"L99999999999999999999L\n.", R"("99999999999999999999")"},
      {"(K\x01\x8c\x01\x61t.", R"([1,"a"])"},
      {"(K\x01\x91.", "[1]"},
      {"C\x01\xe9.", "\"\xc3\xa9\""},
      {"\x8c\x04\x61\xed\xa0\x80.", R"("a\\ud800")"},
      {"}(K\x01K\x02\x8c\x01\x61]u.", R"({"1":2,"a":[]})"},
      {"}(\x8c\x01\x61K\x01\x8c\x01\x62K\x02\x8c\x01\x61K\x03u.", R"({"a":3,"b":2})"},
      {"ccollections\nOrderedDict\n)RU\x01\x61K\x01s.", R"({"a":1})"},
      {"ctorch\nSize\nK\x02\x85\x85R.", "[2]"},
      {"ctorch\nfloat32\n.", R"("torch.float32")"},
      {"ctorch\ndevice\nU\x04\x63udaK\x01\x86R.", R"("cuda:1")"},
      {"c__builtin__\ncomplex\nF1\nF2\n\x86R.", "\"(1+2j)\""},
      {"](ca\nb\nK\x01\x65.", "[null,1]"},
  };
  for (const auto& [bytes, json] : cases) EXPECT_EQ(to_json(read_pickle(bytes).tree.root()).dump(), json);
}

TEST(PythonValueTest, LosslessJson) {
  const std::pair<std::string_view, std::string> cases[] = {
      {"N.", "null"},
      {"K\x05.", "5"},
      {"F1.0\n.", "1.0"},
      {"Finf\n.", R"({"__tessera__":"float","value":"inf"})"},
      {"L99999999999999999999L\n.", R"({"__tessera__":"int","value":"99999999999999999999"})"},
      {"}\x8c\x01\x61)s.", R"({"a":{"__tessera__":"tuple","items":[]}})"},
      {"}K\x01K\x02s.", R"({"__tessera__":"dict","items":[[1,2]]})"},
      {"}\x8c\x0b__tessera__K\x02s.", R"({"__tessera__":"dict","items":[["__tessera__",2]]})"},
      {"C\x02\x00\xff."sv, R"({"__tessera__":"bytes","base64":"AP8="})"},
      {"\x8c\x03\xed\xa0\x80.", R"({"__tessera__":"str","base64":"7aCA"})"},
      {"ctorch\ndevice\nU\x04\x63udaK\x01\x86R.", R"({"__tessera__":"device","type":"cuda","index":1})"},
  };
  for (const auto& [bytes, json] : cases) {
    EXPECT_EQ(to_lossless_json(read_pickle(bytes).tree.root()).value().dump(), json);
  }
}

TEST(PythonValueTest, LosslessJsonComesBackEqual) {
  for (const auto& golden : read_pickled_values()) {
    if (!golden.understood) continue;
    const ReadResult result = read(ByteView(golden.pickles[4]), golden.name);
    const std::string text = to_lossless_json(result.tree.root()).value().dump();
    Tree tree;
    EXPECT_TRUE(equal(from_lossless_json(Json::parse(text), tree), result.tree.root())) << golden.name;
  }
}

RC_GTEST_PROP(PythonValueTest, LosslessJsonOfAnyTreeComesBackEqual, ()) {
  testing::RandomTree random;
  random.with_opaque = false;
  const NodeRef value = random.value(4);
  const auto json = to_lossless_json(value);
  RC_ASSERT(json.has_value());
  Tree tree;
  RC_ASSERT(equal(from_lossless_json(*json, tree), value));
  RC_ASSERT(equal(from_lossless_json(Json::parse(json->dump()), tree), value));
}

TEST(PythonValueTest, ForeignJsonIsRefused) {
  const std::pair<std::string, std::string> cases[] = {
      {R"({"__tessera__": "lambda"})", "unknown tag \"lambda\", expected one of tessera"},
      {R"({"__tessera__": 5})", "\"__tessera__\" is number, expected a string"},
      {R"({"__tessera__": "tuple"})", "\"tuple\" has no \"items\", expected this member"},
      {R"({"__tessera__": "tuple", "items": 5})", "\"items\" is number, expected an array"},
      {R"({"__tessera__": "dict", "items": [[1]]})", "an item is array of size 1, expected a pair of key and value"},
      {R"({"__tessera__": "int", "value": "1x"})", "\"1x\" is not an int, expected one of at most 4300 digits"},
      {R"({"__tessera__": "float", "value": "x"})", "\"x\" is not a float, expected a number, inf or nan"},
      {R"({"__tessera__": "float", "bits": -1})", "the bits of a float are number"},
      {R"({"__tessera__": "bytes", "base64": "AP8"})", "malformed base64 \"AP8\", expected padded base64"},
      {R"({"__tessera__": "bytes", "base64": "AP9="})", "malformed base64"},
      {R"({"__tessera__": "str", "base64": "/w=="})", "the 1 bytes of a str are not UTF-8, expected UTF-8"},
      {R"({"__tessera__": "dtype", "name": "torch.load"})",
       "a malformed dtype, expected a name of PyTorch such as torch.float32"},
      {R"({"__tessera__": "torch.Size", "items": ["a"]})", "a malformed torch.Size, expected items of ints"},
      {R"({"__tessera__": "device", "type": 5})", "a malformed device, expected a type as string"},
      {R"({"__tessera__": "complex", "real": 1, "imag": 2.0})",
       "a malformed complex, expected real and imag as floats"},
      {R"({"__tessera__": "OrderedDict", "items": [], "state": 1})",
       "a malformed OrderedDict, expected items and at most a state that is a dict"},
      {"18446744073709551615", "too large"},
      {std::string(600, '[') + std::string(600, ']'), "nests deeper than the limit, expected at most 500 levels"},
  };
  for (const auto& [text, problem] : cases) {
    Tree tree;
    EXPECT_ERROR(from_lossless_json(Json::parse(text), tree), ErrorCode::corrupt, "read a value from JSON: ", problem);
  }
}

}  // namespace
}  // namespace tessera::pickle

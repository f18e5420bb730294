#include "tessera/format/pickle_reader.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "support/chaos.h"
#include "support/error_matchers.h"
#include "support/pickle_golden.h"
#include "support/temporary_directory.h"
#include "tessera/format/python_value.h"

namespace tessera::pickle {
namespace {

using namespace std::literals;
using testing::read_pickle;
using testing::read_pickled_values;
using testing::write_pickle;

// Returns the repr of a pickle's value.
std::string shown(std::string_view text) { return repr(read_pickle(text).tree.root()); }

TEST(PickleReaderTest, EveryProtocolGivesTheSameTree) {
  for (const auto& golden : read_pickled_values()) {
    if (!golden.understood) continue;  // protocols 0 and 1 make objects otherwise
    const ReadResult last = read(ByteView(golden.pickles[5]), golden.name);
    for (const Bytes& bytes : golden.pickles) {
      const ReadResult result = read(ByteView(bytes), golden.name);
      EXPECT_TRUE(equal(result.tree.root(), last.tree.root())) << golden.name;
      EXPECT_EQ(result.length_bytes, bytes.size()) << golden.name;
    }
  }
}

TEST(PickleReaderTest, EveryPrefixIsCorrupt) {
  for (const auto& golden : read_pickled_values()) {
    for (const Bytes& bytes : golden.pickles) {
      const std::size_t step = (bytes.size() / 2000 + 1) * testing::stride_if_sanitized(7);
      for (std::size_t size = 0; size < bytes.size(); size += step) {
        const Bytes prefix(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
        EXPECT_ERROR(read(ByteView(prefix), golden.name), ErrorCode::corrupt, golden.name, "at byte");
      }
    }
  }
}

TEST(PickleReaderTest, OpcodesOfEveryKind) {
  const std::pair<std::string_view, std::string> cases[] = {
      {"N."sv, "None"},
      {"\x88."sv, "True"},
      {"\x89."sv, "False"},
      {"I01\n."sv, "True"},
      {"I00\n."sv, "False"},
      {"I1\n."sv, "1"},
      {"I -17 \n."sv, "-17"},
      {"I0x1f\n."sv, "31"},
      {"L123456789012345678901234567890L\n."sv, "123456789012345678901234567890"},
      {"L-1L\n."sv, "-1"},
      {"K\xff."sv, "255"},
      {"M\x01\x02."sv, "513"},
      {"J\xfe\xff\xff\xff."sv, "-2"},
      {"\x8a\x00."sv, "0"},
      {"\x8a\x01\xff."sv, "-1"},
      {"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00."sv, "9223372036854775808"},
      {"\x8a\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff."sv, "-1"},
      {"\x8b\x02\x00\x00\x00\x00\x01."sv, "256"},
      {"F1e5\n."sv, "100000.0"},
      {"F-inf\n."sv, "-inf"},
      {"F-1.5e400\n."sv, "-inf"},
      {"F1.5e-400\n."sv, "0.0"},
      {"G\x3f\xf8\x00\x00\x00\x00\x00\x00."sv, "1.5"},
      {"S'a\\x41\\101\\n\\q'\n."sv, R"('aAA\n\\q')"},
      {"S\"it's\"\n."sv, R"("it's")"},
      {"S'\\xff'\n."sv, R"(b'\xff')"},
      {"T\x02\x00\x00\x00hi."sv, "'hi'"},
      {"U\x02hi."sv, "'hi'"},
      {"U\x01\xff."sv, R"(b'\xff')"},
      {"V\\u0041\\\\u0041\\U0001f600\xe9\n."sv, "'A\\\\\\\\u0041\xf0\x9f\x98\x80\xc3\xa9'"},
      {"X\x02\x00\x00\x00hi."sv, "'hi'"},
      {"\x8c\x02hi."sv, "'hi'"},
      {"\x8d\x02\x00\x00\x00\x00\x00\x00\x00hi."sv, "'hi'"},
      {"\x8c\x03\xed\xa0\x80."sv, R"('\ud800')"},
      {"B\x02\x00\x00\x00hi."sv, "b'hi'"},
      {"C\x02hi."sv, "b'hi'"},
      {"\x8e\x02\x00\x00\x00\x00\x00\x00\x00hi."sv, "b'hi'"},
      {"\x96\x02\x00\x00\x00\x00\x00\x00\x00hi."sv, "bytearray(b'hi')"},
      {"]."sv, "[]"},
      {"(l."sv, "[]"},
      {"(K\x01K\x02l."sv, "[1, 2]"},
      {"]K\x01"
       "a."sv,
       "[1]"},
      {"](K\x01K\x02"
       "e."sv,
       "[1, 2]"},
      {")."sv, "()"},
      {"(t."sv, "()"},
      {"(K\x01K\x02K\x03K\x04t."sv, "(1, 2, 3, 4)"},
      {"K\x01\x85."sv, "(1,)"},
      {"K\x01K\x02\x86."sv, "(1, 2)"},
      {"K\x01K\x02K\x03\x87."sv, "(1, 2, 3)"},
      {"}."sv, "{}"},
      {"(K\x01K\x02"
       "d."sv,
       "{1: 2}"},
      {"}K\x01K\x02s."sv, "{1: 2}"},
      {"}(K\x01K\x02K\x03K\x04u."sv, "{1: 2, 3: 4}"},
      {"\x8f."sv, "set()"},
      {"\x8f(K\x01\x90."sv, "{1}"},
      {"(K\x01\x91."sv, "frozenset({1})"},
      {"K\x01K\x02"
       "0."sv,
       "1"},
      {"K\x01(K\x02K\x03"
       "1."sv,
       "1"},
      {"K\x01(0."sv, "1"},
      {"K\x01"
       "2\x86."sv,
       "(1, 1)"},
      {"K\x01p0\n0g0\n."sv, "1"},
      {"K\x01q\x00"
       "0h\x00."sv,
       "1"},
      {"K\x01r\x01\x00\x00\x00"
       "0j\x01\x00\x00\x00."sv,
       "1"},
      {"K\x01\x94"
       "0h\x00."sv,
       "1"},
      {"ctorch\nfloat32\n."sv, "torch.float32"},
      {"\x80\x04\x8c\x05torch\x8c\x05int64\x93."sv, "torch.int64"},
      {"ctorch\nSize\nK\x02K\x03\x86\x85R."sv, "torch.Size([2, 3])"},
      {"\x82\x07."sv, "<extension 7>"},
      {"\x83\x07\x01."sv, "<extension 263>"},
      {"\x84\x07\x01\x00\x00."sv, "<extension 263>"},
      {"Pkey\n."sv, "<persistent id 'key'>"},
      {"K\x05Q."sv, "<persistent id 5>"},
      {"(K\x01ia\nb\n."sv, "<a.b(...)>"},
      {"(ca\nb\nK\x01o."sv, "<a.b(...)>"},
      {"ca\nb\n)\x81."sv, "<a.b(...)>"},
      {"ca\nb\n)}\x92."sv, "<a.b(...)>"},
      {"ca\nb\n)\x81}b."sv, "<a.b(...)>"},
      {"\x80\x04\x95\x02\x00\x00\x00\x00\x00\x00\x00N."sv, "None"},
  };
  for (const auto& [bytes, expected] : cases) EXPECT_EQ(shown(bytes), expected) << printable(bytes);
}

TEST(PickleReaderTest, CallsRememberWhatWasPassed) {
  const ReadResult result = read_pickle(
      "\x80\x04(ca\nb\nK\x01\x85}(U\x01kK\x02u\x92K\x07K\x08\x86"
      "b(K\x05"
      "e(K\x06K\x07ul."sv);
  const NodeRef item = result.tree.root().items()[0];
  const Object& object = item.object();
  EXPECT_EQ(object.made, Object::Made::new_object_ex);
  EXPECT_TRUE(object.calls("a", "b"));
  EXPECT_EQ(repr(object.arguments), "(1,)");
  EXPECT_EQ(repr(object.keyword_arguments()), "{'k': 2}");
  EXPECT_TRUE(object.has_state);
  EXPECT_EQ(repr(object.state), "(7, 8)");
  ASSERT_EQ(object.list_items().size(), 1u);
  EXPECT_EQ(repr(object.list_items()[0]), "5");
  ASSERT_EQ(object.dict_items().size(), 1u);
  EXPECT_EQ(repr(object.dict_items()[0].value), "7");
}

TEST(PickleReaderTest, ADroppedCallBelongsToTheObjectBelowIfThatIsItsFirstArgument) {
  const auto setters = [](std::string_view bytes) {
    return read_pickle(bytes).tree.root().object().setter_calls().size();
  };
  const std::string object = "ca\nb\n)R\x94";
  EXPECT_EQ(setters(object + "ca\nset\nh" + '\0' + "N\x86R0."), 1u);
  EXPECT_EQ(setters(object + "ca\nset\nNh" + '\0' + "\x86R0."), 0u);
  EXPECT_EQ(setters(object + "ca\nset\nh" + '\0' + "\x85R0."), 0u);
  EXPECT_EQ(setters(object + "N0."), 0u);
}

TEST(PickleReaderTest, SeveralStatesAreKeptApart) {
  const ReadResult result = read_pickle(
      "ca\nb\n)RK\x01"
      "bK\x02"
      "bK\x03"
      "b."sv);
  EXPECT_EQ(result.tree.root().object().state_count(), 3u);
  EXPECT_EQ(repr(result.tree.root().object().state), "(1, 2, 3)");
}

TEST(PickleReaderTest, OldNamesBecomeThoseOfPython3) {
  const auto name = [](std::string_view bytes) {
    const ReadResult result = read_pickle(bytes);
    const GlobalName global = result.tree.root().global();
    return std::string(global.module) + "." + std::string(global.name);
  };
  EXPECT_EQ(name("c__builtin__\neval\n."), "builtins.eval");
  EXPECT_EQ(name("\x80\x02"
                 "ccommands\ngetoutput\n."),
            "subprocess.getoutput");
  EXPECT_EQ(name("c__builtin__\nxrange\n."), "builtins.range");
  EXPECT_EQ(name("cexceptions\nKeyError\n."), "builtins.KeyError");
  EXPECT_EQ(name("\x80\x04"
                 "c__builtin__\neval\n."),
            "__builtin__.eval");
}

TEST(PickleReaderTest, SharingIsKept) {
  const ReadResult result = read_pickle("(]\x94h\x00h\x00\x85t."sv);
  const auto items = result.tree.root().items();
  EXPECT_TRUE(items[0].same(items[1]));
  EXPECT_TRUE(items[0].same(items[2].items()[0]));
}

TEST(PickleReaderTest, BytesBehindStopAreLeftAlone) {
  const ReadResult result = read_pickle("K\x01.K\x02.");
  EXPECT_EQ(repr(result.tree.root()), "1");
  EXPECT_EQ(result.length_bytes, 3u);
}

TEST(PickleReaderTest, TheTreeKeepsASharedBuffer) {
  auto buffer = std::make_shared<const Bytes>(Bytes{'U', 2, 'h', 'i', '.'});
  const ReadResult result = read(buffer, "test.pkl");
  const std::weak_ptr<const Bytes> watched = buffer;
  buffer.reset();
  EXPECT_FALSE(watched.expired());
  EXPECT_EQ(result.tree.root().string(), "hi");
}

TEST(PickleReaderTest, HostilePicklesAreInert) {
  const std::pair<std::string_view, std::string> cases[] = {
      {"cos\nsystem\n(S'rm -rf /'\ntR."sv, "calls os.system, which is not executed"},
      {"\x80\x04\x8c\x08"
       "builtins\x8c\x04"
       "eval\x93\x8c\x01x\x85R."sv,
       "calls builtins.eval, which is not executed"},
      {"c__builtin__\ngetattr\n(c__builtin__\n__import__\n(S'os'\ntRS'system'\ntR(S'id'\ntR."sv,
       "calls builtins.__import__(...).system, which is not executed"},
      {"(S'id'\nisubprocess\nPopen\n."sv, "calls subprocess.Popen, which is not executed"},
      {"]cposix\nsystem\na."sv, "is the global posix.system, which is not imported"},
      {"\x82\x01."sv, "is extension 1, which is not looked up"},
  };
  for (const auto& [bytes, reason] : cases) {
    const ReadResult result = read_pickle(bytes);
    EXPECT_EQ(opaque_reason(result.tree.root()), reason);
  }
}

// Python's pickle.load would create the file for each of these.
TEST(PickleReaderTest, WhatAPickleCallsIsNotDone) {
  const testing::TemporaryDirectory directory;
  const auto file = directory.path() / "made";
  const std::string path = file.string();
  const std::string cases[] = {
      "cos\nmkdir\n(S'" + path + "'\ntR.",
      "(S'touch " + path + "'\nios\nsystem\n.",
      "cbuiltins\nopen\n(S'" + path + "'\nS'w'\nt\x81.",
      "csubprocess\nPopen\n(lp0\nS'touch'\naS'" + path + "'\na\x85R.",
      "cbuiltins\nexec\n(S'open(\"" + path + "\", \"w\")'\ntR.",
  };
  for (const std::string& bytes : cases) {
    const ReadResult result = read_pickle(bytes);
    EXPECT_TRUE(opaque_reason(result.tree.root())) << printable(bytes);
    repr(result.tree.root());
    to_json(result.tree.root());
    write_pickle(result.tree.root(), 4);
    EXPECT_FALSE(std::filesystem::exists(file)) << printable(bytes);
  }
}

TEST(PickleReaderTest, MalformedPicklesAreRefused) {
  struct Case {
    std::string_view bytes, opcode, problem;
  };
  const Case cases[] = {
      {""sv, "end of the bytes at byte 0", "the pickle ends without STOP"},
      {"N"sv, "end of the bytes at byte 1", "the pickle ends without STOP"},
      {"."sv, "STOP at byte 0", "0 objects on the stack, expected at least 1"},
      {"\xff."sv, "opcode 0xff at byte 0", "unknown opcode, expected one of protocols 0 to 5"},
      {"NN(R."sv, "REDUCE at byte 3", "0 objects on the stack, expected at least 2"},
      {"0."sv, "POP at byte 0", "expected at least 1"},
      {"2."sv, "DUP at byte 0", "expected at least 1"},
      {"1."sv, "POP_MARK at byte 0", "no mark on the stack"},
      {"t."sv, "TUPLE at byte 0", "no mark on the stack"},
      {"N\x86."sv, "TUPLE2 at byte 1", "1 objects on the stack, expected at least 2"},
      {"]e."sv, "APPENDS at byte 1", "no mark"},
      {"(e."sv, "APPENDS at byte 1", "expected at least 1"},
      {"N(Ne."sv, "APPENDS at byte 3", "appends to None"},
      {")Na."sv, "APPEND at byte 2", "appends to tuple"},
      {"](NNu."sv, "SETITEMS at byte 4", "sets items of list"},
      {"}(Nu."sv, "SETITEMS at byte 3", "an even number"},
      {"(Nd."sv, "DICT at byte 2", "an even number"},
      {"](N\x90."sv, "ADDITEMS at byte 3", "expected a set"},
      {"]Nb."sv, "BUILD at byte 2", "sets the state of list"},
      {"(o."sv, "OBJ at byte 1", "expected a class"},
      {"N\x8c\x01x\x93."sv, "STACK_GLOBAL at byte 4", "found None and str"},
      {"h\x00."sv, "BINGET at byte 0", "memo index 0 was never put"},
      {"g12\n."sv, "GET at byte 0", "memo index 12 was never put"},
      {"]q\x00g18446744073709551615\n."sv, "GET at byte 3", "memo index 18446744073709551615 was never put"},
      {"g-1\n."sv, "GET at byte 0", "\"-1\" is not a memo index, expected an int from 0 to 2^64 - 1"},
      {"Nr\xff\xff\xff\xff."sv, "LONG_BINPUT at byte 1",
       "memo index 4294967295 exceeds the limit, expected less than 2"},
      {"Np18446744073709551615\n."sv, "PUT at byte 1", "exceeds the limit"},
      {"q\x00."sv, "BINPUT at byte 0", "expected at least 1"},
      {"(\x94."sv, "MEMOIZE at byte 1", "expected at least 1"},
      {"M\x01"sv, "BININT2 at byte 0", "truncated: 1 bytes left, expected 2"},
      {"X\xff\xff\xff\x7fhi."sv, "BINUNICODE at byte 0", "truncated: 3 bytes left, expected 2147483647"},
      {"\x8d\xff\xff\xff\xff\xff\xff\xff\xffhi."sv, "BINUNICODE8 at byte 0", "truncated"},
      {"\x8c\x05hi."sv, "SHORT_BINUNICODE at byte 0", "truncated"},
      {"T\xff\xff\xff\xff."sv, "BINSTRING at byte 0", "a negative length of -1, expected 0 or more"},
      {"\x8b\xff\xff\xff\xff."sv, "LONG4 at byte 0", "a negative length of -1, expected 0 or more"},
      {"\x8c\x01\xff."sv, "SHORT_BINUNICODE at byte 0", "not UTF-8"},
      {"X\x02\x00\x00\x00\xc3\x28."sv, "BINUNICODE at byte 0", "not UTF-8"},
      {"c\xff\nx\n."sv, "GLOBAL at byte 0", "a name of 1 bytes is not UTF-8, expected UTF-8"},
      {"cos\nsystem"sv, "GLOBAL at byte 0", "no line break"},
      {"I1x\n."sv, "INT at byte 0", "\"1x\" is not an int, expected one of at most 4300 digits"},
      {"L\n."sv, "LONG at byte 0", "is not an int"},
      {"I010\n."sv, "INT at byte 0", "\"010\" is not an int"},
      {"Fone\n."sv, "FLOAT at byte 0", "\"one\" is not a float, expected a number, inf or nan"},
      {"F+-1\n."sv, "FLOAT at byte 0", "is not a float"},
      {"Sx\n."sv, "STRING at byte 0", "\"x\" is not a quoted string, expected a str literal of Python"},
      {"S'\\x4'\n."sv, "STRING at byte 0", "not a quoted string"},
      {"V\\u12\n."sv, "UNICODE at byte 0", "\"\\u12\" has a malformed escape"},
      {"V\\U00110000\n."sv, "UNICODE at byte 0", "malformed escape"},
      {"\x82\x00."sv, "EXT1 at byte 0", "extension code 0, expected 1 to 2^31 - 1"},
      {"\x84\xff\xff\xff\xff."sv, "EXT4 at byte 0", "extension code -1"},
      {"\x95\x05\x00\x00\x00\x00\x00\x00\x00N."sv, "FRAME at byte 0",
       "a frame of 5 bytes, expected at most the 2 bytes left"},
  };
  for (const Case& bad : cases) {
    EXPECT_ERROR(read_pickle(bad.bytes), ErrorCode::corrupt, "read pickle test.pkl: ", std::string(bad.opcode),
                 std::string(bad.problem));
  }
}

TEST(PickleReaderTest, WhatIsNotInThePickleIsUnsupported) {
  EXPECT_ERROR(read_pickle("\x97."), ErrorCode::unsupported, "NEXT_BUFFER at byte 0", "out-of-band buffer");
  EXPECT_ERROR(read_pickle("\x98."), ErrorCode::unsupported, "READONLY_BUFFER at byte 0");
  EXPECT_ERROR(read_pickle("\x80\x06N."), ErrorCode::unsupported, "PROTO at byte 0", "protocol 6");
}

TEST(PickleReaderTest, OffsetsInMessagesBeginAtTheBase) {
  EXPECT_ERROR(read(as_bytes("N0."), "data.pkl", {}, 1000), ErrorCode::corrupt, "data.pkl: STOP at byte 1002");
}

std::string repeated(std::string_view step, std::size_t count) {
  std::string bytes;
  for (std::size_t i = 0; i < count; ++i) bytes += step;
  return bytes;
}

std::string fetch(std::size_t index) {
  std::string bytes = "j";
  for (int shift = 0; shift < 32; shift += 8) bytes.push_back(static_cast<char>((index >> shift) & 0xff));
  return bytes;
}

TEST(PickleReaderTest, DepthIsLimited) {
  const std::string_view too_deep = "nests deeper than the limit, expected at most 1000 levels";
  EXPECT_NO_THROW(read_pickle(")" + repeated("\x85", 999) + "."));
  EXPECT_ERROR(read_pickle(")" + repeated("\x85", 1000) + "."), ErrorCode::corrupt, "TUPLE1 at byte 1000",
               std::string(too_deep));
  EXPECT_ERROR(read_pickle(repeated("(", 1001) + "."), ErrorCode::corrupt, "MARK at byte 1000", std::string(too_deep));
  EXPECT_ERROR(read_pickle(repeated("]", 1001) + repeated("a", 1000) + "."), ErrorCode::corrupt, "APPEND",
               std::string(too_deep));
  EXPECT_ERROR(read_pickle(repeated("}N", 1001) + "N" + repeated("s", 1001) + "."), ErrorCode::corrupt, "SETITEM",
               std::string(too_deep));
  EXPECT_ERROR(read_pickle(repeated("ca\nb\n", 600) + ")" + repeated("R\x85", 600) + "."), ErrorCode::corrupt,
               std::string(too_deep));
  EXPECT_ERROR(read_pickle("N" + repeated("Q", 1001) + "."), ErrorCode::corrupt, "BINPERSID", std::string(too_deep));
  std::string through_memo = ")";
  for (std::size_t i = 0; i < 1000; ++i)
    through_memo +=
        "\x85\x94"
        "0" +
        fetch(i);
  EXPECT_ERROR(read_pickle(through_memo + "."), ErrorCode::corrupt, "TUPLE1", std::string(too_deep));
}

TEST(PickleReaderTest, TheNumberOfOpcodesIsLimited) {
  ReadLimits limits;
  limits.items = 4;
  EXPECT_NO_THROW(read_pickle("N0N.", limits));
  EXPECT_ERROR(read_pickle("N0N0N.", limits), ErrorCode::corrupt, "more opcodes than the limit, expected at most 4");
}

TEST(PickleReaderTest, TheMemoIsLimited) {
  ReadLimits limits;
  limits.memo = 2;
  EXPECT_NO_THROW(read_pickle("N\x94\x94.", limits));
  EXPECT_ERROR(read_pickle("N\x94\x94\x94.", limits), ErrorCode::corrupt, "MEMOIZE at byte 3",
               "memo index 2 exceeds the limit, expected less than 2");
}

TEST(PickleReaderTest, NodesAreLimited) {
  ReadLimits limits;
  limits.memory_bytes = 100'000;
  EXPECT_NO_THROW(read_pickle("(" + repeated("}", 2000) + "l.", limits));
  EXPECT_ERROR(read_pickle("(" + repeated("}", 20000) + "l.", limits), ErrorCode::corrupt, "EMPTY_DICT",
               "needs more memory than the limit, expected at most 100000 bytes");
  // One list of 10,000, made a set again and again.
  const std::string list = "(" + repeated("N", 10000) +
                           "l\x85\x94"
                           "0c__builtin__\nset\n\x94"
                           "0";
  EXPECT_ERROR(read_pickle(list + repeated("h\x01h\x00R0"sv, 100) + "N.", limits), ErrorCode::corrupt, "REDUCE");
}

TEST(PickleReaderTest, NodesOfTheSizeOfThePickleAreAllowed) {
  const std::string dicts = repeated("]" + ("(" + repeated("}\x94", 1000) + "e"), 200);
  EXPECT_NO_THROW(read_pickle(dicts + "."));
}

// Without limits each of these takes minutes.
TEST(PickleReaderTest, HostileSizesEndSoon) {
  // Text that is no Latin-1 up to its last character, encoded again and again.
  std::string futile = "X";
  futile += std::string("\x02\x00\x10\x00", 4) + std::string(0x100000 - 1, 'a') + "\xe2\x82\xac";
  futile +=
      "U\x06latin1\x86\x94"
      "0c_codecs\nencode\n\x94"
      "0" +
      repeated("h\x01h\x00R0"sv, 10000) + "N.";
  EXPECT_ERROR(read_pickle(futile), ErrorCode::corrupt, "REDUCE", "memory");
  EXPECT_ERROR(read_pickle("I" + std::string(1'000'000, '9') + "\n."), ErrorCode::corrupt, "is not an int");
  std::string states = "ca\nb\n)R" + repeated("Nb", 100'000) + ".";
  EXPECT_ERROR(read_pickle(states), ErrorCode::corrupt, "BUILD", "memory");
}

// A small fuzzer.
RC_GTEST_PROP(PickleReaderTest, ChangedBytesGiveATreeOrAnError, ()) {
  static const auto values = read_pickled_values();
  const auto& golden = values[*rc::gen::inRange<std::size_t>(0, values.size())];
  Bytes bytes = golden.pickles[*rc::gen::inRange<std::size_t>(0, 6)];
  for (int i = *rc::gen::inRange(1, 6); i > 0; --i) {
    bytes[*rc::gen::inRange<std::size_t>(0, bytes.size())] = *rc::gen::arbitrary<std::uint8_t>();
  }
  try {
    const ReadResult result = read(ByteView(bytes), golden.name);
    RC_ASSERT(result.length_bytes <= bytes.size());
    RC_ASSERT(repr(result.tree.root(), 1000).size() <= 1003);
  } catch (const Error& error) {
    RC_ASSERT(error.code() == ErrorCode::corrupt || error.code() == ErrorCode::unsupported);
  }
}

}  // namespace
}  // namespace tessera::pickle

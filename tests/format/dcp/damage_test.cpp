// Damage that the reader refuses in a `.metadata`, and the writer in a `Metadata`.

#include <gtest/gtest.h>

#include "format/dcp/forged_metadata.h"
#include "support/error_matchers.h"
#include "tessera/base/function_ref.h"
#include "tessera/format/dcp_metadata.h"

namespace tessera::dcp {
namespace {

using pickle::NodeRef;
using testing::Forge;

Metadata read_bytes(const Bytes& bytes) { return read(MemorySource(bytes, "ck/.metadata")); }

#define EXPECT_CORRUPT(bytes, ...) EXPECT_ERROR(read_bytes(bytes), ErrorCode::corrupt, "ck/.metadata", __VA_ARGS__)
#define EXPECT_UNSUPPORTED(bytes, ...) \
  EXPECT_ERROR(read_bytes(bytes), ErrorCode::unsupported, "ck/.metadata", __VA_ARGS__)

class DcpMetadataDamageTest : public ::testing::Test {
 protected:
  // A file whose only tensor is 'w'.
  Bytes tensor(NodeRef value) { return forge.bytes({{"w", value}}, {}); }
  Bytes tensor(const std::vector<std::int64_t>& shape, const std::vector<Forge::Chunk>& chunks) {
    return tensor(forge.tensor(shape, chunks));
  }
  // A file in which the tensor 'w' of 4 elements has these items.
  Bytes storage(const Forge::Pairs& items) { return forge.bytes({{"w", forge.tensor({4}, {{{0}, {4}}})}}, items); }
  Forge::Pairs item(NodeRef info) { return {{forge.index("w", std::vector<std::int64_t>{0}), info}}; }
  NodeRef instance(Class what, const Forge::Fields& fields) { return forge.instance(what, fields); }

  Forge forge;
};

TEST_F(DcpMetadataDamageTest, WhatIsNoMetadata) {
  EXPECT_CORRUPT(forge.pickled(forge.dict({})), "found a dict", "expected an object of torch.distributed");
  EXPECT_CORRUPT(forge.pickled(forge.info("f", 0, 1)),
                 "found an object of torch.distributed.checkpoint.filesystem._StorageInfo");
  EXPECT_CORRUPT(forge.pickled(forge.object(forge.class_of(Class::metadata), std::nullopt)), "Metadata",
                 "'state_dict_metadata'");
  EXPECT_CORRUPT(forge.pickled(forge.object(forge.class_of(Class::metadata), forge.number(3))), "Metadata", "found 3",
                 "a dict of fields");
  EXPECT_CORRUPT(forge.pickled(instance(Class::metadata, {{"state_dict_metadata", forge.number(3)}})),
                 "state_dict_metadata", "found 3", "a dict");
  EXPECT_CORRUPT(Bytes{}, "byte 0");
}

TEST_F(DcpMetadataDamageTest, BytesBehindThePickle) {
  Bytes bytes = storage({});
  const std::string end = std::to_string(bytes.size());
  bytes.push_back(0);
  EXPECT_CORRUPT(bytes, "1 bytes after the end of the pickle at byte " + end);
}

TEST_F(DcpMetadataDamageTest, AnObjectMadeInAnotherWay) {
  const NodeRef called = forge.call(class_name(Class::metadata, Dialect::torch_2), {});
  EXPECT_UNSUPPORTED(forge.pickled(called), "Metadata", "made in another way", "NEWOBJ");
}

TEST_F(DcpMetadataDamageTest, ANameTwice) {
  const NodeRef tensor_value = forge.tensor({4}, {});
  EXPECT_CORRUPT(forge.bytes({{"w", tensor_value}, {"w", tensor_value}}, {}), "'w'", "the name twice");
}

TEST_F(DcpMetadataDamageTest, ANameThatIsNoString) {
  EXPECT_CORRUPT(forge.pickled(instance(Class::metadata, {{"state_dict_metadata",
                                                           forge.dict({{forge.number(1), forge.tensor({}, {})}})}})),
                 "a name in state_dict_metadata", "found 1", "a str");
}

TEST_F(DcpMetadataDamageTest, AFieldTwice) {
  const NodeRef info = instance(Class::storage_info, {{"relative_path", forge.text("f")},
                                                      {"offset", forge.number(0)},
                                                      {"offset", forge.number(1)},
                                                      {"length", forge.number(1)}});
  EXPECT_CORRUPT(storage(item(info)), "'w'", "_StorageInfo", "the field 'offset' twice");
  EXPECT_CORRUPT(forge.bytes({}, {}, {{"new", forge.number(1)}, {"new", forge.number(2)}}), "new", "the field twice");
}

// Each compared with all others would take minutes.
TEST_F(DcpMetadataDamageTest, ManyUnknownFieldsAreReadSoon) {
  Forge::Fields fields;
  for (int i = 0; i < 100'000; ++i) fields.emplace_back("f" + std::to_string(i), NodeRef());
  EXPECT_EQ(read_bytes(forge.bytes({}, {}, fields)).extra.size(), fields.size());
}

TEST_F(DcpMetadataDamageTest, UnknownFieldsThatShareAValueHaveOneCopy) {
  Forge::Fields fields;
  const NodeRef value = forge.tree.make_list(std::vector(10'000, forge.number(1)));
  for (int i = 0; i < 1000; ++i) fields.emplace_back("f" + std::to_string(i), value);
  const Metadata metadata = read_bytes(forge.bytes({}, {}, fields));
  ASSERT_EQ(metadata.extra.size(), fields.size());
  EXPECT_TRUE(metadata.extra[0].value.same(metadata.extra[999].value));
  EXPECT_LT(metadata.extra_tree->memory_bytes(), 1'000'000u);
}

TEST_F(DcpMetadataDamageTest, ACallOfNoneIsNoSize) {
  const NodeRef none = forge.tree.make_object(pickle::Object::Made::reduce, NodeRef(),
                                              forge.tree.make_tuple(std::vector<NodeRef>{forge.tree.make_tuple({})}));
  EXPECT_CORRUPT(tensor(forge.tensor_of(none, {})), "'w'", "a torch.Size");
}

TEST_F(DcpMetadataDamageTest, AnUnknownFieldOfAnInnerClass) {
  const NodeRef chunk =
      instance(Class::chunk, {{"offsets", forge.size({0})}, {"sizes", forge.size({4})}, {"strides", forge.size({1})}});
  EXPECT_UNSUPPORTED(tensor(forge.tensor_of(forge.size({4}), {chunk})), "'w'", "ChunkStorageMetadata",
                     "the unknown field 'strides'");
  EXPECT_UNSUPPORTED(tensor(instance(Class::object, {{"size", forge.number(1)}})), "'w'", "BytesStorageMetadata",
                     "the unknown field 'size'");
}

TEST_F(DcpMetadataDamageTest, AMissingField) {
  EXPECT_CORRUPT(tensor(forge.tensor_of(forge.size({4}), {instance(Class::chunk, {{"sizes", forge.size({4})}})})),
                 "'w'", "ChunkStorageMetadata", "'offsets'");
  EXPECT_CORRUPT(tensor(instance(Class::tensor, {{"size", forge.size({4})}})), "'w'", "TensorStorageMetadata",
                 "'properties'");
  EXPECT_CORRUPT(storage(item(instance(Class::storage_info, {{"offset", forge.number(0)}}))), "'w'", "_StorageInfo",
                 "'relative_path'");
  EXPECT_CORRUPT(storage({{instance(Class::index, {}), forge.info("f", 0, 1)}}), "MetadataIndex", "'fqn'");
}

TEST_F(DcpMetadataDamageTest, AnEntryOfAnotherClass) {
  EXPECT_UNSUPPORTED(tensor(forge.call({"acme", "Quilt"}, {})), "'w'", "an object of acme.Quilt",
                     "TensorStorageMetadata");
  EXPECT_CORRUPT(tensor(forge.text("tensor")), "'w'", "found 'tensor'", "TensorStorageMetadata");
}

TEST_F(DcpMetadataDamageTest, AnUnknownDtype) {
  forge.dtype = forge.tree.make_global("torch", "float5_e2m2");
  EXPECT_UNSUPPORTED(tensor({4}, {}), "'w'", "dtype", "torch.float5_e2m2");
  forge.dtype = forge.tree.make_global("numpy", "float32");
  EXPECT_CORRUPT(tensor({4}, {}), "'w'", "dtype", "numpy.float32", "a torch.dtype");
}

TEST_F(DcpMetadataDamageTest, WrongProperties) {
  {
    Forge other;
    other.requires_grad = other.number(1);
    EXPECT_CORRUPT(other.bytes({{"w", other.tensor({}, {})}}, {}), "'w'", "requires_grad", "found 1", "a bool");
  }
  {
    Forge other;
    other.layout = other.text("torch.strided");
    EXPECT_CORRUPT(other.bytes({{"w", other.tensor({}, {})}}, {}), "'w'", "layout", "a torch.layout");
  }
  {
    Forge other;
    other.memory_format = other.call(class_name(Class::memory_format, Dialect::torch_2), {other.number(3)});
    EXPECT_CORRUPT(other.bytes({{"w", other.tensor({}, {})}}, {}), "'w'", "memory_format", "found 3", "0, 1 or 2");
  }
  {
    Forge other;
    other.memory_format = other.number(0);
    EXPECT_CORRUPT(other.bytes({{"w", other.tensor({}, {})}}, {}), "'w'", "memory_format", "MEM_FORMAT_ENCODING");
  }
  const NodeRef short_state = forge.object(forge.class_of(Class::properties), forge.tree.make_tuple({}));
  EXPECT_UNSUPPORTED(
      tensor(instance(Class::tensor,
                      {{"properties", short_state}, {"size", forge.size({4})}, {"chunks", forge.tree.make_list({})}})),
      "'w'", "TensorProperties", "a state of 0 values", "a tuple of 5");
}

TEST_F(DcpMetadataDamageTest, NumbersThatAreNone) {
  const auto with_size = [&](NodeRef value) { return tensor(forge.tensor_of(forge.call(kSize, {value}), {})); };
  const auto tuple_of = [&](NodeRef value) { return forge.tree.make_tuple(std::vector<NodeRef>{value}); };
  EXPECT_CORRUPT(with_size(tuple_of(forge.tree.make_boolean(true))), "'w'", "size", "found True", "an int");
  EXPECT_CORRUPT(with_size(tuple_of(forge.number(-1))), "'w'", "size", "found -1", "from 0 to 2**63 - 1");
  EXPECT_CORRUPT(with_size(tuple_of(forge.tree.make_big_integer(Bytes{0, 0, 0, 0, 0, 0, 0, 0, 1}))), "'w'", "size",
                 "found 18446744073709551616", "from 0 to 2**63 - 1");
  EXPECT_CORRUPT(with_size(tuple_of(forge.tree.make_big_integer(Bytes(10'000, 1)))), "'w'", "size", "found 0x1010",
                 "1010..., expected an int from 0 to 2**63 - 1");
  EXPECT_CORRUPT(with_size(forge.number(4)), "'w'", "size", "a torch.Size");
}

TEST_F(DcpMetadataDamageTest, NumbersThatOverflow) {
  EXPECT_CORRUPT(tensor({std::int64_t{1} << 40, std::int64_t{1} << 40}, {}), "'w'", "size", "overflow at dimension 1");
  EXPECT_CORRUPT(tensor({4}, {{{INT64_MAX}, {4}}}), "'w'", "chunks", "offsets [9223372036854775807] and sizes [4]",
                 "overflow at dimension 0");
  EXPECT_CORRUPT(tensor({4}, {{{0}, {INT64_MAX}}}), "'w'", "chunks", "overflow at dimension 0");
  EXPECT_CORRUPT(storage(item(forge.info("f", INT64_MAX, 1))), "'w'", "_StorageInfo", "whose sum overflows");
}

TEST_F(DcpMetadataDamageTest, ChunksOfAnotherRank) {
  EXPECT_CORRUPT(tensor({4, 2}, {{{0}, {4}}}), "'w'", "chunks", "offsets [0] and sizes [4]",
                 "2 dimensions as in size [4, 2]");
  EXPECT_CORRUPT(tensor({4}, {{{0, 0}, {4}}}), "'w'", "offsets [0, 0] and sizes [4]");
  EXPECT_CORRUPT(
      tensor(instance(Class::tensor,
                      {{"properties", forge.properties()}, {"size", forge.size({4})}, {"chunks", forge.number(1)}})),
      "'w'", "chunks", "found 1", "a list");
}

TEST_F(DcpMetadataDamageTest, ItemsOfAnotherRank) {
  EXPECT_CORRUPT(storage({{forge.index("w", std::vector<std::int64_t>{0, 0}), forge.info("f", 0, 1)}}), "'w'",
                 "storage_data", "offsets [0, 0]", "1 dimensions as in size [4]");
}

TEST_F(DcpMetadataDamageTest, TwoItemsForOneChunk) {
  Forge::Pairs items = item(forge.info("f", 0, 1));
  items.emplace_back(forge.index("w", std::vector<std::int64_t>{0}, 5), forge.info("g", 0, 1));
  EXPECT_CORRUPT(storage(items), "'w'", "storage_data", "two items at offsets [0]");
}

TEST_F(DcpMetadataDamageTest, TwoItemsForOneObject) {
  const Forge::Pairs items = {{forge.index("o", std::nullopt, 0), forge.info("f", 0, 1)},
                              {forge.index("o", std::nullopt, 1), forge.info("f", 0, 1)}};
  EXPECT_CORRUPT(forge.bytes({{"o", instance(Class::object, {})}}, items), "'o'", "storage_data", "two items");
}

TEST_F(DcpMetadataDamageTest, TwoItemsThatNothingClaims) {
  const auto index = [&](std::int64_t hint) { return forge.index("gone", std::vector<std::int64_t>{2}, hint); };
  EXPECT_CORRUPT(storage({{index(0), forge.info("f", 0, 1)}, {index(1), forge.info("f", 0, 1)}}), "'gone'",
                 "storage_data", "two items at offsets [2]");
}

TEST_F(DcpMetadataDamageTest, WrongIndices) {
  const auto index = [&](NodeRef name, NodeRef hint, NodeRef offset) {
    return storage(
        {{instance(Class::index, {{"fqn", name}, {"index", hint}, {"offset", offset}}), forge.info("f", 0, 1)}});
  };
  EXPECT_CORRUPT(index(forge.number(3), {}, {}), "fqn of a MetadataIndex", "found 3", "a str");
  EXPECT_CORRUPT(index(forge.text("w"), forge.text("0"), {}), "'w'", "index of a MetadataIndex", "found '0'");
  EXPECT_CORRUPT(index(forge.text("w"), {}, forge.number(0)), "'w'", "offset of a MetadataIndex", "a torch.Size");
  EXPECT_CORRUPT(storage({{forge.text("w"), forge.info("f", 0, 1)}}), "MetadataIndex", "found 'w'");
}

TEST_F(DcpMetadataDamageTest, WrongStoredItems) {
  EXPECT_UNSUPPORTED(storage(item(forge.call({"acme", "Info"}, {}))), "'w'", "storage_data", "acme.Info",
                     "_StorageInfo");
  EXPECT_CORRUPT(storage(item(forge.number(7))), "'w'", "storage_data", "found 7", "_StorageInfo");
  EXPECT_CORRUPT(storage(item(forge.info("f", -1, 1))), "'w'", "offset in the file", "found -1");
  EXPECT_CORRUPT(storage(item(forge.info("f", 0, -1))), "'w'", "length in the file", "found -1");
  const auto with_transforms = [&](NodeRef transforms) {
    return storage(item(instance(Class::storage_info, {{"relative_path", forge.text("f")},
                                                       {"offset", forge.number(0)},
                                                       {"length", forge.number(1)},
                                                       {"transform_descriptors", transforms}})));
  };
  EXPECT_CORRUPT(with_transforms(forge.text("zstd")), "'w'", "transform_descriptors", "found 'zstd'", "a list");
  EXPECT_CORRUPT(with_transforms(forge.tree.make_list(std::vector<NodeRef>{forge.number(1)})), "'w'",
                 "transform_descriptors", "found 1", "a str");
  EXPECT_UNSUPPORTED(forge.pickled(instance(Class::metadata, {{"state_dict_metadata", forge.dict({})},
                                                              {"storage_data", forge.tree.make_list({})}})),
                     "storage_data", "found a list", "a dict");
}

TEST_F(DcpMetadataDamageTest, TwoPathsForOneName) {
  const NodeRef path = forge.tree.make_tuple(std::vector<NodeRef>{forge.text("w")});
  const auto with_paths = [&](std::string_view name) {
    const NodeRef paths = forge.dict({{forge.text(name), path}, {forge.text(name), path}});
    return forge.bytes({{"w", forge.tensor({}, {})}}, {}, {{"planner_data", paths}});
  };
  EXPECT_CORRUPT(with_paths("w"), "'w'", "planner_data", "two paths");
  EXPECT_CORRUPT(with_paths("gone"), "'gone'", "planner_data", "two paths");
}

// 200 names share a tensor of 20,000 chunks: four million chunks from a file of a few hundred kilobytes.
TEST_F(DcpMetadataDamageTest, AFileThatSaysMuchByReferringToLittle) {
  const NodeRef shared_tensor = forge.tensor_of(forge.size({4}), std::vector<NodeRef>(20'000, forge.chunk({{0}, {4}})));
  Forge::Fields entries;
  for (int i = 0; i < 200; ++i) entries.emplace_back("w" + std::to_string(i), shared_tensor);
  const Bytes repeating = forge.bytes(entries, {});
  EXPECT_CORRUPT(repeating, "repeats chunks or texts beyond the limit",
                 fmt::format("expected at most {} bytes of them", 16 * repeating.size() + (1 << 20)));

  const NodeRef path = forge.tree.make_tuple(std::vector<NodeRef>(20'000, forge.text("w")));
  Forge::Pairs paths;
  for (int i = 0; i < 200; ++i) paths.emplace_back(forge.text("w" + std::to_string(i)), path);
  EXPECT_CORRUPT(forge.bytes({}, {}, {{"planner_data", forge.dict(paths)}}),
                 "repeats chunks or texts beyond the limit");
}

TEST(DcpMetadataWriteTest, RefusesWhatNoFileCanSay) {
  Metadata good;
  good.files = {"f"};
  good.entries.resize(2);
  good.entries[0].name = "w";
  good.entries[0].is_tensor = true;
  good.entries[0].shape = {4};
  good.entries[0].chunks = BoxList({Box({0}, {2}), Box({2}, {2})});
  good.entries[0].items = {{0, 0, 0, 8}, {0, 0, 8, 8}};
  good.entries[1].name = "o";
  good.entries[1].items = {{0, 0, 16, 1}};
  good.paths = {{{"w"}, {"o"}}};
  EXPECT_NO_THROW(write(good));

  const auto refuses = [&](FunctionRef<void(Metadata&)> change, const std::string& word, const std::string& more) {
    Metadata bad = good;
    change(bad);
    EXPECT_ERROR(write(bad), ErrorCode::invalid_argument, "write DCP metadata", word, more);
  };
  refuses([](Metadata& m) { m.entries[1].name = "w"; }, "'w'", "duplicate name in entries");
  refuses([](Metadata& m) { m.entries[1].name = "\xff"; }, "'\\xff'", "not UTF-8, expected UTF-8");
  refuses([](Metadata& m) { m.entries[0].items.pop_back(); }, "'w'", "1 items for 2 chunks");
  refuses([](Metadata& m) { m.entries[0].shape = {4, 1}; }, "'w'", "chunks have 1 dimensions, expected 2");
  refuses([](Metadata& m) { m.entries[0].shape = {-4}; }, "'w'", "size -4 in dimension 0");
  refuses([](Metadata& m) { m.entries[0].chunks = BoxList({Box({-1}, {2}), Box({2}, {2})}); }, "'w'", "offset -1");
  refuses(
      [](Metadata& m) {
        m.entries[0].chunks = BoxList({Box({2}, {0}), Box({2}, {2})});
      },
      "'w'", "chunks 0 and 1 begin at the same offsets [2]");
  refuses([](Metadata& m) { m.entries[0].items[0].file = 1; }, "'w'",
          "file 1 and transforms 0, expected less than 1 and 1");
  refuses([](Metadata& m) { m.entries[0].items[0].transforms = 1; }, "'w'", "file 0 and transforms 1");
  refuses([](Metadata& m) { m.entries[0].items[0].length_bytes = -1; }, "'w'", "length -1");
  refuses([](Metadata& m) { m.entries[0].items[0].offset_bytes = INT64_MAX; }, "'w'",
          "expected none negative and their sum below 2^63");
  refuses([](Metadata& m) { m.entries[1].items.clear(); }, "'o'", "0 items");
  refuses([](Metadata& m) { m.files = {"f", "f"}; }, "'f'", "duplicate file");
  refuses([](Metadata& m) { m.transforms = {{"x"}}; }, "transforms", "empty");
  refuses([](Metadata& m) { m.paths->pop_back(); }, "1 paths for 2 entries", "");
  refuses([](Metadata& m) { m.unclaimed_paths = {{"w", {"w"}}}; }, "'w'", "an unclaimed path");
  refuses([](Metadata& m) { m.unclaimed_paths = {{"gone", {}}}; }, "'gone'", "an unclaimed path");
  refuses(
      [](Metadata& m) {
        m.unclaimed = {{"w", std::vector<std::int64_t>{2}, {0, 0, 0, 1}}};
      },
      "'w'", "an unclaimed item at offsets [2] of shape [4]");
  refuses(
      [](Metadata& m) {
        m.unclaimed = {{"w", std::vector<std::int64_t>{1, 1}, {0, 0, 0, 1}}};
      },
      "'w'", "an unclaimed item at offsets [1, 1] of shape [4]");
  refuses([](Metadata& m) { m.unclaimed = {{"o", std::nullopt, {0, 0, 0, 1}}}; }, "'o'", "is the object's");
  refuses(
      [](Metadata& m) {
        m.unclaimed = {{"x", std::nullopt, {0, 0, 0, 1}}, {"x", std::nullopt, {0, 0, 0, 1}}};
      },
      "'x'", "duplicate unclaimed item");
  refuses([](Metadata& m) { m.unclaimed = {{"x", std::nullopt, {}}}; }, "'x'", "file 4294967295");
  refuses([](Metadata& m) { m.version = "1.0.0"; }, "'1.0.0'", "torch_2_14");
  refuses([](Metadata& m) { m.extra = {{"storage_data", {}}}; }, "'storage_data'", "duplicate extra field");
  refuses([](Metadata& m) { m.storage_meta_extra = {{"x", {}}}; }, "'x'", "none without storage_meta");
}

}  // namespace
}  // namespace tessera::dcp

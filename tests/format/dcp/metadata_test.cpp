#include "tessera/format/dcp_metadata.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "format/dcp/forged_metadata.h"
#include "support/box_generators.h"
#include "support/paths.h"
#include "tessera/base/file.h"
#include "tessera/format/internal/pickle_text.h"

namespace tessera::dcp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::ElementsAre;
using testing::Forge;
using ::testing::IsEmpty;

const fs::path kGolden = fs::path(tessera::testing::source_dir()) / "tests" / "golden" / "dcp_metadata";

Metadata read_golden(const std::string& name) { return read(File::open_read(kGolden / name)); }
Metadata read_again(const Bytes& bytes) { return read(MemorySource(bytes, "again")); }

// The form that golden/dcp_metadata/describe.py gives it.

json item_to_json(const Metadata& metadata, const StoredItem& item) {
  if (item.file == StoredItem::kNoFile) return nullptr;
  return {metadata.files.at(item.file), item.offset_bytes, item.length_bytes, metadata.transforms.at(item.transforms)};
}

json entry_to_json(const Metadata& metadata, const MetadataEntry& entry) {
  json result = {{"name", pickle::utf8_from_latin1(entry.name)}};
  if (!entry.is_tensor) {
    result["item"] = item_to_json(metadata, entry.items.at(0));
    return result;
  }
  constexpr const char* kFormats[] = {"torch.contiguous_format", "torch.channels_last", "torch.preserve_format"};
  result["dtype"] = dtype_name(entry.properties.dtype);
  result["layout"] = entry.properties.layout;
  result["requires_grad"] = entry.properties.requires_grad;
  result["memory_format"] = kFormats[static_cast<std::size_t>(entry.properties.memory_format)];
  result["pin_memory"] = entry.properties.pin_memory;
  result["shape"] = entry.shape;
  result["chunks"] = result["items"] = json::array();
  for (std::size_t i = 0; i < entry.chunks.size(); ++i) {
    const Box box(entry.chunks[i]);
    result["chunks"].push_back({box.offsets, box.sizes});
    result["items"].push_back(item_to_json(metadata, entry.items.at(i)));
  }
  return result;
}

json path_to_json(const Path& path) {
  json result = json::array();
  for (const Key& item : path) std::visit([&](const auto& key) { result.push_back(key); }, item);
  return result;
}

json paths_to_json(const Metadata& metadata) {
  if (!metadata.paths) return nullptr;
  json result = json::object();
  for (std::size_t i = 0; i < metadata.entries.size(); ++i) {
    const Path& path = metadata.paths->at(i);
    if (!path.empty()) result[pickle::utf8_from_latin1(metadata.entries[i].name)] = path_to_json(path);
  }
  for (const UnclaimedPath& other : metadata.unclaimed_paths) {
    result[pickle::utf8_from_latin1(other.name)] = path_to_json(other.path);
  }
  return result;
}

json to_json(const Metadata& metadata) {
  const auto optional = [](const std::optional<std::string>& text) { return text ? json(*text) : json(nullptr); };
  json result = {
      {"version", optional(metadata.version)}, {"paths", paths_to_json(metadata)}, {"storage_meta", nullptr}};
  result["module"] = metadata.dialect == Dialect::torch_1_13 ? "torch.distributed._shard.checkpoint.metadata"
                                                             : "torch.distributed.checkpoint.metadata";
  result["entries"] = result["unclaimed"] = json::array();
  for (const MetadataEntry& entry : metadata.entries) result["entries"].push_back(entry_to_json(metadata, entry));
  for (const UnclaimedItem& item : metadata.unclaimed) {
    result["unclaimed"].push_back({pickle::utf8_from_latin1(item.name),
                                   item.offsets ? json(*item.offsets) : json(nullptr),
                                   item_to_json(metadata, item.item)});
  }
  if (metadata.storage_meta) {
    const StorageMeta& meta = *metadata.storage_meta;
    result["storage_meta"] = {{"checkpoint_id", optional(meta.checkpoint_id)},
                              {"save_id", optional(meta.save_id)},
                              {"load_id", optional(meta.load_id)},
                              {"modules", meta.modules}};
  }
  return result;
}

class DcpMetadataGoldenTest : public ::testing::TestWithParam<std::string> {
 protected:
  static json expected() {
    static const json all = [] {
      std::ifstream in(kGolden / "expected.json");
      return json::parse(in);
    }();
    return all.at(GetParam());
  }
};

TEST_P(DcpMetadataGoldenTest, SaysWhatPyTorchReadsFromIt) {
  const Metadata metadata = read_golden(GetParam());
  EXPECT_EQ(to_json(metadata), expected());
  for (const MetadataEntry& entry : metadata.entries) EXPECT_EQ(metadata.find(entry.name), &entry);
  EXPECT_EQ(metadata.find("no such entry"), nullptr);
}

TEST_P(DcpMetadataGoldenTest, ReadsTheSameAfterWriting) {
  const Metadata metadata = read_golden(GetParam());
  const Bytes written = write(metadata);
  const Metadata again = read_again(written);
  EXPECT_TRUE(equal(again, metadata));
  EXPECT_EQ(again.files, metadata.files);
  EXPECT_EQ(again.transforms, metadata.transforms);
  EXPECT_EQ(again.entries, metadata.entries);
  EXPECT_EQ(again.dialect, metadata.dialect);
  EXPECT_EQ(to_json(again), expected());
  EXPECT_EQ(write(again), written);
}

TEST_P(DcpMetadataGoldenTest, NumbersFilesByFirstUse) {
  const Metadata metadata = read_golden(GetParam());
  std::vector<std::string> seen;
  const auto see = [&](const StoredItem& item) {
    if (item.file == StoredItem::kNoFile) return;
    const std::string& file = metadata.files.at(item.file);
    if (std::find(seen.begin(), seen.end(), file) == seen.end()) seen.push_back(file);
  };
  for (const MetadataEntry& entry : metadata.entries) std::for_each(entry.items.begin(), entry.items.end(), see);
  for (const UnclaimedItem& item : metadata.unclaimed) see(item.item);
  EXPECT_EQ(metadata.files, seen);
}

INSTANTIATE_TEST_SUITE_P(PyTorch, DcpMetadataGoldenTest,
                         ::testing::Values("../checkpoints/1.13-sharded/ck/.metadata",
                                           "../checkpoints/2.6-dtensor/ck/.metadata",
                                           "../checkpoints/2.14-dtensor/ck/.metadata",
                                           "../checkpoints/2.14-optim/ck/.metadata", "odd-protocol2.metadata",
                                           "odd-protocol3.metadata", "odd-protocol4.metadata",
                                           "odd-protocol5.metadata"),
                         [](const auto& golden) {
                           std::string name = golden.param;
                           std::erase_if(name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; });
                           return name;
                         });

TEST(DcpMetadataTest, TellsTheDialectByClassesAndFields) {
  EXPECT_EQ(read_golden("../checkpoints/1.13-sharded/ck/.metadata").dialect, Dialect::torch_1_13);
  EXPECT_EQ(read_golden("odd-protocol2.metadata").dialect, Dialect::torch_2_0);
  EXPECT_EQ(read_golden("../checkpoints/2.6-dtensor/ck/.metadata").dialect, Dialect::torch_2);
  EXPECT_EQ(read_golden("../checkpoints/2.14-dtensor/ck/.metadata").dialect, Dialect::torch_2_14);
}

TEST(DcpMetadataTest, KeepsUnknownFields) {
  const Metadata metadata = read_again(write(read_golden("odd-protocol2.metadata")));
  ASSERT_EQ(metadata.extra.size(), 1u);
  EXPECT_EQ(metadata.extra[0].name, "future");
  ASSERT_EQ(metadata.extra[0].value.items().size(), 3u);
  EXPECT_EQ(metadata.extra[0].value.items()[1].floating(), 2.5);
  ASSERT_EQ(metadata.storage_meta_extra.size(), 1u);
  EXPECT_EQ(metadata.storage_meta_extra[0].name, "future");
}

TEST(DcpMetadataTest, GivesChunksOfEqualOffsetsTheOneItem) {
  const Metadata metadata = read_golden("odd-protocol4.metadata");
  const MetadataEntry& uneven = *metadata.find("uneven");
  ASSERT_EQ(uneven.items.size(), 4u);
  EXPECT_EQ(uneven.items[2].offset_bytes, 110);
  EXPECT_EQ(uneven.items[3], uneven.items[2]);
}

TEST(DcpMetadataTest, KeepsPathsOfTheirKind) {
  const Metadata windows = read_golden("odd-protocol4.metadata");
  EXPECT_EQ(windows.storage_meta->checkpoint_id, "C:\\runs\\1");
  EXPECT_EQ(windows.storage_meta->checkpoint_id_kind, StorageMeta::PathKind::windows_path);
  const Metadata posix = read_golden("../checkpoints/2.6-dtensor/ck/.metadata");
  EXPECT_EQ(posix.storage_meta->checkpoint_id_kind, StorageMeta::PathKind::posix_path);
}

TEST(DcpMetadataTest, JoinsThePartsOfAPath) {
  Forge forge;
  const auto checkpoint_id = [&](std::string_view module, std::string_view name, std::vector<std::string> parts) {
    std::vector<pickle::NodeRef> values;
    for (const std::string& part : parts) values.push_back(forge.tree.make_string(part));
    const auto path = forge.tree.make_object(pickle::Object::Made::reduce, forge.tree.make_global(module, name),
                                             forge.tree.make_tuple(values));
    const auto meta = forge.instance(Class::storage_meta, {{"checkpoint_id", path}});
    return *read_again(forge.bytes({}, {}, {{"storage_meta", meta}})).storage_meta;
  };
  EXPECT_EQ(checkpoint_id("pathlib", "PosixPath", {"/", "data", "ck"}).checkpoint_id, "/data/ck");
  EXPECT_EQ(checkpoint_id("pathlib._local", "PurePosixPath", {"data", "ck"}).checkpoint_id, "data/ck");
  EXPECT_EQ(checkpoint_id("pathlib", "WindowsPath", {"C:\\", "data", "ck"}).checkpoint_id, "C:\\data\\ck");
  EXPECT_EQ(checkpoint_id("pathlib", "PosixPath", {}).checkpoint_id, "");
}

TEST(DcpMetadataTest, KeepsFieldsOfAnotherKindThanExpected) {
  Forge forge;
  const auto list = forge.tree.make_list(std::vector<pickle::NodeRef>{forge.tree.make_integer(7)});
  const auto meta = forge.instance(Class::storage_meta, {{"checkpoint_id", list}, {"save_id", forge.text("s")}});
  const Metadata metadata =
      read_again(forge.bytes({}, {}, {{"planner_data", list}, {"storage_meta", meta}, {"version", list}}));
  EXPECT_FALSE(metadata.paths);
  EXPECT_FALSE(metadata.version);
  EXPECT_EQ(metadata.dialect, Dialect::torch_2_14);
  ASSERT_EQ(metadata.extra.size(), 2u);
  EXPECT_EQ(metadata.extra[0].name, "planner_data");
  EXPECT_EQ(metadata.extra[1].name, "version");
  EXPECT_EQ(metadata.storage_meta->save_id, "s");
  ASSERT_EQ(metadata.storage_meta_extra.size(), 1u);
  EXPECT_EQ(metadata.storage_meta_extra[0].name, "checkpoint_id");
  EXPECT_TRUE(equal(read_again(write(metadata)), metadata));
}

TEST(DcpMetadataTest, KnowsTheMemoryFormatByItsName) {
  Forge forge;
  const std::vector<pickle::NodeRef> arguments = {forge.class_of(Class::memory_format),
                                                  forge.text("TORCH_CHANNELS_LAST")};
  const auto format = forge.tree.make_object(
      pickle::Object::Made::reduce, forge.tree.make_global("builtins", "getattr"), forge.tree.make_tuple(arguments));
  forge.memory_format = format;
  const Metadata metadata = read_again(forge.bytes({{"x", forge.tensor({2}, {{{0}, {2}}})}}, {}));
  EXPECT_EQ(metadata.entries.at(0).properties.memory_format, MemoryFormat::channels_last);
}

TEST(DcpMetadataTest, NeedsOnlyTheStateDictMetadata) {
  Forge forge;
  const Metadata metadata =
      read_again(forge.pickled(forge.instance(Class::metadata, {{"state_dict_metadata", forge.dict({})}})));
  EXPECT_THAT(metadata.entries, IsEmpty());
  EXPECT_FALSE(metadata.paths);
  EXPECT_FALSE(metadata.storage_meta);
  EXPECT_THAT(metadata.transforms, ElementsAre(IsEmpty()));
}

TEST(DcpMetadataTest, FindsEachChunkWhateverTheOrderAndTheHint) {
  Forge forge;
  const auto tensor = forge.tensor({6}, {{{4}, {2}}, {{0}, {2}}, {{2}, {2}}});
  const auto item = [&](std::int64_t offset, std::int64_t hint) {
    return std::pair(forge.index("x", std::vector{offset}, hint), forge.info("f", offset * 10, 20));
  };
  const Metadata metadata = read_again(forge.bytes({{"x", tensor}}, {item(2, 0), item(4, -7), item(0, 99)}));
  ASSERT_EQ(metadata.entries.at(0).items.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(metadata.entries[0].items[i].offset_bytes, metadata.entries[0].chunks[i].offsets[0] * 10);
  }
  EXPECT_THAT(metadata.unclaimed, IsEmpty());
}

TEST(DcpMetadataTest, WritesTheClassNamesOfTheDialect) {
  Metadata metadata;
  metadata.entries.resize(1);
  metadata.entries[0].name = "x";
  metadata.entries[0].is_tensor = true;
  const std::map<Dialect, std::pair<std::string, std::string>> expected = {
      {Dialect::torch_1_13, {"torch.distributed._shard.checkpoint.metadata", "sharded_tensor.metadata"}},
      {Dialect::torch_2_0, {"torch.distributed.checkpoint.metadata", "sharded_tensor.metadata"}},
      {Dialect::torch_2, {"torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"}},
      {Dialect::torch_2_14, {"torch.distributed.checkpoint.metadata", "version"}}};
  for (const auto& [dialect, names] : expected) {
    metadata.dialect = dialect;
    const Bytes bytes = write(metadata);
    EXPECT_NE(as_text(bytes).find(names.first), std::string_view::npos) << names.first;
    EXPECT_NE(as_text(bytes).find(names.second), std::string_view::npos) << names.second;
    EXPECT_EQ(read_again(bytes).dialect, dialect);
  }
}

TEST(DcpMetadataTest, WritesManyItemsInBatches) {
  Metadata metadata;
  metadata.files = {"f"};
  metadata.entries.resize(2001);
  metadata.paths.emplace();
  for (std::size_t i = 0; i < metadata.entries.size(); ++i) {
    MetadataEntry& entry = metadata.entries[i];
    entry.name = std::to_string(i);
    entry.items = {{0, 0, static_cast<std::int64_t>(i), 1}};
    metadata.paths->push_back({entry.name, std::int64_t{1}, "b", std::int64_t{2}});
  }
  MetadataEntry& tensor = metadata.entries[0];
  tensor.is_tensor = true;
  tensor.shape = {2500};
  tensor.chunks = BoxList(1);
  tensor.items.clear();
  for (std::int64_t i = 0; i < 2500; ++i) {
    tensor.chunks.push_back(Box({i}, {1}));
    tensor.items.push_back({0, 0, i, 1});
  }
  EXPECT_TRUE(equal(read_again(write(metadata)), metadata));
}

TEST(DcpMetadataTest, WritesTheSameInPieces) {
  Metadata metadata;
  metadata.files = {"__0_0.distcp"};
  for (int i = 0; i < 3; ++i) {
    MetadataEntry& entry = metadata.entries.emplace_back();
    entry.name = fmt::format("tensor {}", i);
    entry.is_tensor = true;
    entry.shape = {20'000, 2};
    entry.chunks = BoxList(2);
    for (std::int64_t row = 0; row < entry.shape[0]; ++row) {
      entry.chunks.push_back(Box({row, 0}, {1, 2}));
      entry.items.push_back({0, 0, row * 1000, 1000});
    }
  }
  Bytes all;
  std::size_t pieces = 0, most = 0;
  write(metadata, [&](ByteView piece) {
    append(all, piece);
    ++pieces;
    most = std::max(most, piece.size());
  });
  EXPECT_TRUE(all == write(metadata));
  EXPECT_GT(pieces, 3u);
  EXPECT_LT(most, std::size_t{2} << 20);
}

TEST(DcpMetadataTest, LeavesOutWhatNothingRefersTo) {
  Metadata metadata;
  metadata.files = {"unused", "used"};
  metadata.transforms = {{}, {"unused"}};
  metadata.entries.resize(1);
  metadata.entries[0].items = {{1, 0, 0, 5}};
  const Metadata again = read_again(write(metadata));
  EXPECT_THAT(again.files, ElementsAre("used"));
  EXPECT_THAT(again.transforms, ElementsAre(IsEmpty()));
  EXPECT_TRUE(equal(again, metadata));
}

TEST(DcpMetadataTest, DiffersInEveryPart) {
  const Metadata metadata = read_golden("odd-protocol4.metadata");
  const auto changed = [&](auto&& change) {
    Metadata other = metadata;
    change(other);
    return !equal(metadata, other);
  };
  EXPECT_FALSE(changed([](Metadata&) {}));
  EXPECT_TRUE(changed([](Metadata& m) { m.dialect = Dialect::torch_2; }));
  EXPECT_TRUE(changed([](Metadata& m) { m.version = "1"; }));
  EXPECT_TRUE(changed([](Metadata& m) { m.storage_meta->load_id = "1"; }));
  EXPECT_TRUE(changed([](Metadata& m) { m.paths->at(0).emplace_back("more"); }));
  EXPECT_TRUE(changed([](Metadata& m) { m.unclaimed_paths.clear(); }));
  EXPECT_TRUE(changed([](Metadata& m) { m.unclaimed.pop_back(); }));
  EXPECT_TRUE(changed([](Metadata& m) { m.unclaimed[0].item.length_bytes += 1; }));
  EXPECT_TRUE(changed([](Metadata& m) { m.extra[0].name = "other"; }));
  EXPECT_TRUE(changed([](Metadata& m) { m.extra[0].value = {}; }));
  EXPECT_TRUE(changed([](Metadata& m) { m.storage_meta_extra.clear(); }));
  EXPECT_TRUE(changed([](Metadata& m) { m.entries[0].name = "other"; }));
  EXPECT_TRUE(changed([](Metadata& m) { m.entries[0].items[0] = {}; }));
  EXPECT_TRUE(changed([](Metadata& m) { m.entries[0].properties.pin_memory = true; }));
  EXPECT_TRUE(changed([](Metadata& m) { m.files[0] = "other"; }));
}

// Names, paths, files and chunks of all kinds; chunks may be repeated, items missing.
Metadata any_metadata() {
  const auto below = [](std::size_t end) {
    return static_cast<std::size_t>(testing::any_between(0, static_cast<std::int64_t>(end) - 1));
  };
  Metadata metadata;
  metadata.dialect = static_cast<Dialect>(below(4));
  metadata.files = {"a", "b/c", "\xc3\xa9"};
  metadata.transforms = {{}, {"x"}, {"x", "y"}};
  const auto any_item = [&] {
    StoredItem item;
    if (below(5) == 0) return item;
    return StoredItem{static_cast<std::uint32_t>(below(3)), static_cast<std::uint32_t>(below(3)),
                      *rc::gen::inRange<std::int64_t>(0, std::int64_t{1} << 40), testing::any_between(0, 300)};
  };
  const bool has_paths = below(2) == 0;
  if (has_paths) metadata.paths.emplace();
  const std::size_t count = below(6);
  for (std::size_t i = 0; i < count; ++i) {
    MetadataEntry entry;
    entry.name = "entry" + std::to_string(i);
    entry.is_tensor = below(3) != 0;
    if (entry.is_tensor) {
      entry.properties = {static_cast<DType>(below(kDTypeCount)), "torch.strided", below(2) == 0,
                          static_cast<MemoryFormat>(below(3)), below(2) == 0};
      entry.shape = testing::any_shape();
      entry.chunks = BoxList(entry.shape.size());
      std::map<testing::Shape, StoredItem> items;
      for (const Box& box : testing::any_partition(entry.shape, testing::any_between(0, 5))) {
        entry.chunks.push_back(box);
        entry.items.push_back(items.try_emplace(box.offsets, any_item()).first->second);
      }
    } else {
      entry.items = {any_item()};
    }
    if (has_paths) {
      Path path;
      for (std::size_t k = below(5); k > 0; --k) {
        path.push_back(below(2) == 0 ? Key("key" + std::to_string(below(2))) : Key(testing::any_between(-9, 9)));
      }
      metadata.paths->push_back(below(3) == 0 ? Path{entry.name} : path);
    }
    metadata.entries.push_back(std::move(entry));
  }
  for (std::size_t k = below(3); k > 0; --k) {
    metadata.unclaimed.push_back({"gone", testing::Shape{static_cast<std::int64_t>(k)}, {0, 1, 2, 3}});
  }
  return metadata;
}

RC_GTEST_PROP(DcpMetadataProperty, ReadsWhatWasWritten, ()) {
  const Metadata metadata = any_metadata();
  const Bytes written = write(metadata);
  const Metadata again = read_again(written);
  RC_ASSERT(equal(again, metadata));
  RC_ASSERT(write(again) == written);
}

}  // namespace
}  // namespace tessera::dcp

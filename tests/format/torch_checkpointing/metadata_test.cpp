#include <gtest/gtest.h>

#include <string>

#include "support/error_matchers.h"
#include "support/paths.h"
#include "tessera/base/file.h"
#include "tessera/format/pickle_reader.h"
#include "tessera/format/pickle_writer.h"
#include "tessera/format/python_value.h"
#include "tessera/format/torch_checkpointing.h"

namespace tessera::torch_checkpointing {
namespace {

Bytes golden_bytes(const std::string& name) {
  return read_file(tessera::testing::source_dir() + "/tests/golden/checkpoints/" + name + "/ck/metadata.pkl");
}

// A source in memory.
class BytesSource final : public ByteSource {
 public:
  explicit BytesSource(Bytes bytes) : bytes_(std::move(bytes)) {}
  void read_at(std::uint64_t offset_bytes, MutableByteView out) const override {
    std::copy_n(bytes_.begin() + static_cast<std::ptrdiff_t>(offset_bytes), out.size(), out.begin());
  }
  std::uint64_t size_bytes() const override { return bytes_.size(); }
  const std::string& name() const override { return name_; }

 private:
  Bytes bytes_;
  std::string name_ = "metadata.pkl";
};

CheckpointMetadata read_bytes(Bytes bytes) { return read(BytesSource(std::move(bytes))); }

pickle::NodeRef get(pickle::NodeRef dict, std::string_view key) { return dict.find(key).value(); }

// Reads the golden metadata with one text replaced by another of the same length.
CheckpointMetadata read_changed(const std::string& from, const std::string& to) {
  Bytes bytes = golden_bytes("2.14-tc-fsdp");
  std::string text(bytes.begin(), bytes.end());
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos);
  text.replace(at, from.size(), to);
  return read_bytes(Bytes(text.begin(), text.end()));
}

TEST(TorchCheckpointingMetadataTest, ReadsWhatThePackageWrote) {
  const CheckpointMetadata metadata = read_bytes(golden_bytes("2.14-tc-mesh"));
  EXPECT_EQ(metadata.version, "2.0");
  EXPECT_EQ(metadata.ranks, 4);
  ASSERT_EQ(metadata.items.size(), 1u);
  EXPECT_EQ(metadata.items[0].key, "model");
  EXPECT_TRUE(metadata.items[0].files.empty());
  for (const TensorEntry& entry : metadata.items[0].entries) {
    if (entry.path != Path{"strided"}) continue;
    ASSERT_EQ(entry.groups.size(), 1u);
    const Group& group = entry.groups[0];
    EXPECT_EQ(group.dtype, DType::float32);
    EXPECT_EQ(group.shape, (std::vector<std::int64_t>{8, 2}));
    EXPECT_EQ(group.mesh->shape, (std::vector<std::int64_t>{2, 2}));
    EXPECT_EQ(group.mesh->ranks, (std::vector<std::int64_t>{0, 1, 2, 3}));
    EXPECT_EQ(to_string(group.placements), "[_S(0, 2), S(0)]");
    return;
  }
  FAIL() << "no entry 'strided'";
}

TEST(TorchCheckpointingMetadataTest, WhatIsWrittenIsWhatWasRead) {
  for (const std::string name : {"2.14-tc-fsdp", "2.14-tc-mesh", "2.14-tc-files", "2.14-tc-one"}) {
    const Bytes theirs = golden_bytes(name);
    const Bytes ours = write(read_bytes(theirs));
    const pickle::ReadResult a = pickle::read(theirs, "theirs"), b = pickle::read(ours, "ours");
    // All but the strides of tensors, which PyTorch takes from the tensors, and the names of mesh dimensions.
    EXPECT_EQ(pickle::repr(get(a.tree.root(), "world_size")), pickle::repr(get(b.tree.root(), "world_size")));
    EXPECT_TRUE(pickle::equal(a.tree.root(), b.tree.root())) << name << "\n"
                                                             << pickle::repr(a.tree.root()) << "\n"
                                                             << pickle::repr(b.tree.root());
  }
}

TEST(TorchCheckpointingMetadataTest, UnknownClassesAndVersionsAreNamed) {
  EXPECT_ERROR(read_changed("DTensorShardingMetadata", "MyTensorShardingMetadat"), ErrorCode::unsupported,
               "item 'model'", "MyTensorShardingMetadat", "expected DTensorShardingMetadata");
  EXPECT_ERROR(read_changed("Replicate", "Scattered"), ErrorCode::unsupported, "the placement Scattered");
  EXPECT_ERROR(read_changed("torch.float64", "torch.float65"), ErrorCode::unsupported,
               "unknown dtype torch.float65, expected one of PyTorch such as torch.float32");
  const std::string version(
      "\x8c\x03"
      "2.0",
      5);
  EXPECT_ERROR(read_changed(version,
                            "\x8c\x03"
                            "3.0"),
               ErrorCode::unsupported, "metadata of version 3.0");
}

TEST(TorchCheckpointingMetadataTest, MissingFieldsAndWrongKindsAreErrors) {
  EXPECT_ERROR(read_changed("world_size", "world_sise"), ErrorCode::corrupt, "metadata has no 'world_size'");
  EXPECT_ERROR(read_changed("mesh_data", "mesh_dada"), ErrorCode::corrupt, "has no 'mesh_data', expected that key");
  EXPECT_ERROR(read_changed("[\"count\"]", "[\"count\"}"), ErrorCode::corrupt,
               "is not a JSON list, expected one such as [\"layers\", 0]");
  EXPECT_ERROR(read_changed("[\"count\"]", "[{\"c\":0}]"), ErrorCode::corrupt,
               "a part of type object, expected strings and integers from -2^63 to 2^63 - 1");
  Bytes list;
  pickle::Writer writer(list, 4);
  writer.empty_list();
  writer.stop();
  EXPECT_ERROR(read_bytes(list), ErrorCode::corrupt, "found a list, expected a dict");
}

TEST(TorchCheckpointingMetadataTest, RanksAreThoseOfTheMeshAndTheWorld) {
  const auto bytes_with = [](std::int64_t ranks, std::vector<std::int64_t> of_mesh) {
    CheckpointMetadata metadata;
    metadata.ranks = ranks;
    auto mesh = std::make_shared<Mesh>();
    mesh->shape = {std::ssize(of_mesh)};
    mesh->ranks = std::move(of_mesh);
    metadata.items.push_back({"model", {{{"w"}, {{DType::float32, {4}, mesh, {Placement::shard(0)}}}}}, {}});
    return write(metadata);
  };
  EXPECT_EQ(read_bytes(bytes_with(2, {1, 0})).items[0].entries[0].groups[0].mesh->places.at(0), 1);
  EXPECT_ERROR(read_bytes(bytes_with(2, {0, 2})), ErrorCode::corrupt, "has 2, expected a rank from 0 to 1");
  EXPECT_ERROR(read_bytes(bytes_with(2, {1, 1})), ErrorCode::corrupt,
               "has rank 1 twice in its mesh, expected each once");
  EXPECT_ERROR(read_bytes(bytes_with(0, {})), ErrorCode::corrupt, "world_size is 0");
}

TEST(TorchCheckpointingMetadataTest, OneDictThatManyItemsShareIsRefused) {
  constexpr int kRanks = 3000, kItems = 3000;
  Bytes bytes;
  pickle::Writer writer(bytes, 4);
  writer.empty_dict();
  writer.mark();
  writer.string("version");
  writer.string("2.0");
  writer.string("world_size");
  writer.integer(kRanks);
  writer.string("metadata");
  writer.empty_dict();
  writer.mark();
  std::uint32_t layouts = 0;
  for (int i = 0; i < kItems; ++i) {
    writer.string("item" + std::to_string(i));
    writer.empty_dict();
    writer.mark();
    writer.string("nested_path_to_metadata");
    writer.empty_dict();
    writer.string("rank_to_layout_info");
    if (i == 0) {
      writer.empty_dict();
      layouts = writer.memoize();
      writer.mark();
      for (int rank = 0; rank < kRanks; ++rank) {
        writer.integer(rank);
        writer.none();
      }
      writer.set_items();
    } else {
      writer.get(layouts);
    }
    writer.set_items();
  }
  writer.set_items();
  writer.set_items();
  writer.stop();
  EXPECT_ERROR(read_bytes(bytes), ErrorCode::corrupt, "it describes more than 64.0 MiB", "repeats the same dicts");
}

// Metadata of one tensor, whose parts a test repeats.
struct SharedParts {
  using NodeRef = pickle::NodeRef;
  pickle::ReadResult original;
  pickle::Tree& tree = original.tree;
  NodeRef entries, name, groups;

  SharedParts(std::int64_t ranks, std::vector<std::int64_t> mesh_shape, const std::string& key) {
    CheckpointMetadata metadata;
    metadata.ranks = ranks;
    auto mesh = std::make_shared<Mesh>();
    for (std::int64_t rank = 0; rank < ranks; ++rank) mesh->ranks.push_back(rank);
    const Placements placements(mesh_shape.size(), Placement::replicate());
    mesh->shape = std::move(mesh_shape);
    metadata.items.push_back({"model", {{{key}, {{DType::float32, {4}, mesh, placements}}}}, {}});
    original = pickle::read(std::make_shared<const Bytes>(write(metadata)), "test");
    entries = get(get(get(tree.root(), "metadata"), "model"), "nested_path_to_metadata");
    name = entries.pairs()[0].key;
    groups = entries.pairs()[0].value;
  }
  NodeRef group() const { return groups.items()[0]; }
  NodeRef data() const { return get(get(group(), "sharding_metadata"), "data"); }
  // A new dict that has `value` at `key`.
  NodeRef changed(NodeRef dict, std::string_view key, NodeRef value) {
    const NodeRef result = tree.make_dict();
    for (const pickle::Pair& pair : dict.pairs()) {
      tree.set_items(result, std::vector{pair.key, pair.key.is_string(key) ? value : pair.value});
    }
    return result;
  }
  CheckpointMetadata read() const {
    Bytes bytes;
    pickle::Writer writer(bytes, 4);
    writer.value(tree.root());
    writer.stop();
    return read_bytes(std::move(bytes));
  }
};

TEST(TorchCheckpointingMetadataTest, PartsThatAreSharedTooManyTimesAreRefused) {
  const std::string problem = "it describes more than 64.0 MiB";
  SharedParts names(1, {1}, std::string(100'000, 'x'));
  for (int i = 0; i < 3000; ++i) names.tree.set_items(names.entries, std::vector{names.name, names.groups});
  EXPECT_ERROR(names.read(), ErrorCode::corrupt, problem);

  SharedParts placements(1, std::vector<std::int64_t>(3000, 1), "w");
  placements.tree.append(placements.groups, std::vector(3000, placements.group()));
  EXPECT_ERROR(placements.read(), ErrorCode::corrupt, problem);

  SharedParts meshes(3000, {3000}, "w");
  for (int i = 0; i < 2000; ++i) {
    const pickle::NodeRef mesh = meshes.changed(get(meshes.data(), "mesh_spec"), "", {});
    const pickle::NodeRef data = meshes.changed(meshes.data(), "mesh_spec", mesh);
    const pickle::NodeRef sharding = meshes.changed(get(meshes.group(), "sharding_metadata"), "data", data);
    const pickle::NodeRef group[] = {meshes.changed(meshes.group(), "sharding_metadata", sharding)};
    meshes.tree.append(meshes.groups, group);
  }
  EXPECT_ERROR(meshes.read(), ErrorCode::corrupt, problem);

  SharedParts keys(1, {1}, "w");
  keys.tree.set_items(keys.data(), std::vector<pickle::NodeRef>(200'000));
  keys.tree.append(keys.groups, std::vector(1000, keys.group()));
  EXPECT_ERROR(keys.read(), ErrorCode::corrupt, problem);
}

TEST(TorchCheckpointingMetadataTest, APathThatIsNoUtf8IsRefused) {
  CheckpointMetadata metadata;
  metadata.ranks = 1;
  auto mesh = std::make_shared<Mesh>();
  mesh->shape = {1};
  mesh->ranks = {0};
  metadata.items.push_back(
      {"model", {{{"w\xed\xa0\x80"}, {{DType::float32, {4}, mesh, {Placement::replicate()}}}}}, {}});
  EXPECT_ERROR(write(metadata), ErrorCode::invalid_argument, "torch_checkpointing: key", "is not UTF-8");
}

TEST(TorchCheckpointingMetadataTest, FileNames) {
  EXPECT_EQ(parse_file_name("model_0.pt"), (FileName{"model", 0}));
  EXPECT_EQ(parse_file_name("my-item_2_17.pt"), (FileName{"my-item_2", 17}));
  for (const std::string name : {"model.pt", "model_.pt", "_1.pt", "model_01.pt", "model_1.pth", "a b_1.pt",
                                 "model_-1.pt", "model_1234567890.pt", ""}) {
    EXPECT_FALSE(parse_file_name(name)) << name;
  }
  EXPECT_EQ(to_string(FileName{"optimizer", 12}), "optimizer_12.pt");
}

}  // namespace
}  // namespace tessera::torch_checkpointing

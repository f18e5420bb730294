// Keys of mappings that are no str: they keep their type where the destination is a pickle, and are text elsewhere.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "checkpoint/convert/tensor_maps.h"
#include "checkpoint/source/torch/flatten.h"
#include "support/error_matchers.h"
#include "support/safetensors_file.h"
#include "support/temporary_directory.h"
#include "tessera/base/crc32.h"
#include "tessera/base/file.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/format/pickle_writer.h"
#include "tessera/format/python_value.h"
#include "tessera/format/torch_archive.h"
#include "tessera/format/torch_checkpointing.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using pickle::NodeRef;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Writes a state to the pickle of a torch.save file.
class StateWriter {
 public:
  explicit StateWriter(Bytes& data_pkl) : writer_(data_pkl, 2) {}

  StateWriter& dict(FunctionRef<void()> items) {
    writer_.empty_dict();
    writer_.mark();
    items();
    writer_.set_items();
    return *this;
  }
  StateWriter& list(FunctionRef<void()> items) {
    writer_.empty_list();
    writer_.mark();
    items();
    writer_.appends();
    return *this;
  }
  StateWriter& key(NodeRef key) {
    writer_.value(key);
    return *this;
  }
  StateWriter& key(std::string_view text) {
    writer_.string(text);
    return *this;
  }
  // All of them share the only storage.
  void tensor() {
    torch_archive::TensorRef tensor;
    tensor.storage = {"0", "cpu", DType::float32, 8};
    tensor.sizes = {2};
    tensor.strides = {1};
    torch_archive::write_tensor(writer_, tensor);
  }
  void integer(std::int64_t value) { writer_.integer(value); }
  void stop() { writer_.stop(); }

 private:
  pickle::Writer writer_;
};

// Returns a value as Python prints it, with T for each tensor, and with every mapping as a dict.
std::string outline(NodeRef value) {
  if (torch_archive::is_tensor_like(value)) return "T";
  std::string text;
  const auto separate = [&] { text += text.empty() ? "" : ", "; };
  if (value.is(pickle::Kind::dict)) {
    for (const pickle::Pair& pair : value.pairs()) {
      separate();
      text += pickle::repr(pair.key) + ": " + outline(pair.value);
    }
    return "{" + text + "}";
  }
  if (!value.is(pickle::Kind::list)) return pickle::repr(value);
  for (const NodeRef item : value.items()) {
    separate();
    text += outline(item);
  }
  return "[" + text + "]";
}

std::string outline_of_file(const fs::path& path) {
  const File file = File::open_read(path);
  return outline(torch_archive::open(file, 0, file.size_bytes()).tree.root());
}

class KeysTest : public ::testing::Test {
 protected:
  void write_state(const fs::path& path, FunctionRef<void(StateWriter& out)> write) const {
    Bytes data_pkl;
    StateWriter out(data_pkl);
    write(out);
    out.stop();
    const Bytes storage(8, 3);
    const std::vector<std::uint32_t> crcs = {crc32(storage)};
    const torch_archive::ArchiveLayout layout("archive", std::move(data_pkl), {{"0", 8}});
    Bytes bytes = layout.before_storage(0, crcs);
    append(bytes, storage);
    append(bytes, layout.trailer(crcs));
    fs::create_directories(path.parent_path());
    write_new_file(path, bytes);
  }

  // Writes what torch.save writes of a model of one parameter and its optimizer.
  fs::path training() {
    const fs::path path = directory_ / "training.pt";
    write_state(path, [&](StateWriter& out) {
      out.dict([&] {
        out.key("model").dict([&] { out.key("w").tensor(); });
        out.key("optim").dict([&] {
          out.key("state").dict([&] {
            out.key(tree_.make_integer(0)).dict([&] {
              out.key("step").tensor();
              out.key("exp_avg").tensor();
            });
          });
          out.key("param_groups").list([&] { out.dict([&] { out.key("params").list([&] { out.integer(0); }); }); });
        });
      });
    });
    return path;
  }

  std::shared_ptr<const Checkpoint> convert_to(const fs::path& from, const fs::path& to, SourceKind kind) {
    ConvertOptions options;
    options.to = kind;
    options.warn = [&](const std::string& text) { warnings_.push_back(text); };
    convert(Checkpoint::open(from), to, options);
    for (const Problem& problem : verify(to).problems) ADD_FAILURE() << problem.what;
    return Checkpoint::open(to);
  }

  const testing::TemporaryDirectory directory_;
  pickle::Tree tree_;
  std::vector<std::string> warnings_;
};

// torch.optim looks up the state of a parameter by its number: under "0" it would find nothing, without an error.
TEST_F(KeysTest, AnOptimizersIntKeysStayInts) {
  const fs::path from = training();
  const std::string expected =
      "{'model': {'w': T}, 'optim': {'state': {0: {'step': T, 'exp_avg': T}}, 'param_groups': [{'params': [0]}]}}";
  EXPECT_EQ(outline_of_file(from), expected);
  convert_to(from, directory_ / "out.pt", SourceKind::torch);
  EXPECT_EQ(outline_of_file(directory_ / "out.pt"), expected);
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(KeysTest, EveryKindOfKeyStaysWhatItIs) {
  const NodeRef parts[] = {tree_.make_integer(1), tree_.make_string("a"), NodeRef()};
  const NodeRef complex[] = {tree_.make_floating(1), tree_.make_floating(-2)};
  const std::vector<NodeRef> keys = {
      tree_.make_integer(1),
      tree_.make_string("1.0"),
      tree_.make_integer(-7),
      tree_.make_big_integer(Bytes{0, 0, 0, 0, 0, 0, 0, 0, 1}),
      tree_.make_boolean(false),
      NodeRef(),
      tree_.make_floating(2.5),
      tree_.make_floating(1e300),
      tree_.make_bytes(Bytes{0, 255}),
      tree_.make_tuple(parts),
      tree_.make_tuple({}),
      tree_.make_frozen_set(parts),
      tree_.make_global("torch", "bfloat16"),
      tree_.make_object(pickle::Object::Made::reduce, tree_.make_global("builtins", "complex"),
                        tree_.make_tuple(complex)),
      tree_.make_string("text"),
  };
  const fs::path from = directory_ / "in.pt";
  write_state(from, [&](StateWriter& out) {
    out.dict([&] {
      out.key("keys").dict([&] {
        std::int64_t i = 0;
        for (const NodeRef key : keys) {
          out.key(key).dict([&] {
            out.key("t").tensor();
            out.key("number").integer(i++);
          });
        }
      });
    });
  });
  const std::string expected = outline_of_file(from);
  EXPECT_THAT(expected, HasSubstr("b'\\x00\\xff': {'t': T, 'number': 8}, (1, 'a', None): {'t': T, 'number': 9}"));
  convert_to(from, directory_ / "out.pt", SourceKind::torch);
  EXPECT_EQ(outline_of_file(directory_ / "out.pt"), expected);
  convert_to(from, directory_ / "out", SourceKind::torch_checkpointing);
  EXPECT_EQ("{'keys': " + outline_of_file(directory_ / "out" / "keys_0.pt") + "}", expected);
  convert_to(directory_ / "out", directory_ / "back.pt", SourceKind::torch);
  EXPECT_EQ(outline_of_file(directory_ / "back.pt"), expected);
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(KeysTest, AnIntAndItsTextAreTwoKeys) {
  const fs::path from = directory_ / "in.pt";
  write_state(from, [&](StateWriter& out) {
    out.dict([&] {
      out.key(tree_.make_integer(1)).dict([&] { out.key("a").tensor(); });
      out.key("1").dict([&] { out.key("b").tensor(); });
    });
  });
  convert_to(from, directory_ / "out.pt", SourceKind::torch);
  EXPECT_EQ(outline_of_file(directory_ / "out.pt"), "{1: {'a': T}, '1': {'b': T}}");
}

// PyTorch: _traverse.py takes str(key), so that a load from DCP finds the name.
TEST_F(KeysTest, OtherFormatsHaveThemAsText) {
  const fs::path from = training();
  for (const SourceKind kind : {SourceKind::dcp, SourceKind::safetensors}) {
    const fs::path to = directory_ / std::string(source_kind_name(kind));
    const auto result = convert_to(from, to, kind);
    const TensorInfo& info = result->tensors()[result->find_tensor("optim.state.0.exp_avg").value()];
    EXPECT_EQ(info.path, (Path{"optim", "state", "0", "exp_avg"}));
    EXPECT_EQ(info.keys, nullptr);
    convert_to(to, to.string() + ".pt", SourceKind::torch);
    EXPECT_THAT(outline_of_file(to.string() + ".pt"), HasSubstr("'state': {'0': {"));
  }
  EXPECT_THAT(warnings_, IsEmpty());
}

// Its loader compares the paths in metadata.pkl with those of the state that it loads into.
TEST_F(KeysTest, TorchCheckpointingListsIntsAsNumbers) {
  convert_to(training(), directory_ / "out", SourceKind::torch_checkpointing);
  const auto metadata = torch_checkpointing::read(File::open_read(directory_ / "out" / "metadata.pkl"));
  std::vector<Path> paths;
  for (const torch_checkpointing::Item& item : metadata.items) {
    for (const torch_checkpointing::TensorEntry& entry : item.entries) paths.push_back(entry.path);
  }
  EXPECT_THAT(
      paths, ElementsAre(Path{"w"}, Path{"state", std::int64_t{0}, "step"}, Path{"state", std::int64_t{0}, "exp_avg"}));
  EXPECT_THAT(outline_of_file(directory_ / "out" / "optim_0.pt"), HasSubstr("{'state': {0: {"));
}

TEST_F(KeysTest, AnIntAtTheRootNamesNoItem) {
  const fs::path from = directory_ / "in.pt";
  write_state(from, [&](StateWriter& out) { out.dict([&] { out.key(tree_.make_integer(3)).tensor(); }); });
  convert_to(from, directory_ / "out", SourceKind::torch_checkpointing);
  EXPECT_EQ(outline_of_file(directory_ / "out" / "model_0.pt"), "{3: T}");
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr("the key of '3' at its root cannot name an item")));
}

TEST_F(KeysTest, TheSameKeyInFilesOfSeveralRanksIsOneKey) {
  const fs::path from = directory_ / "ranks";
  for (const std::string rank : {"0", "1"}) {
    pickle::Tree tree;
    const NodeRef parts[] = {tree.make_string("layer"), tree.make_integer(2)};
    write_state(from / ("model_" + rank + ".pt"), [&](StateWriter& out) {
      out.dict([&] { out.key(tree.make_tuple(parts)).dict([&] { out.key("of_" + rank).tensor(); }); });
    });
  }
  convert_to(from, directory_ / "out.pt", SourceKind::torch);
  EXPECT_EQ(outline_of_file(directory_ / "out.pt"), "{'model': {('layer', 2): {'of_0': T, 'of_1': T}}}");
}

// metadata.pkl has the same path for a key of a dict.
TEST_F(KeysTest, IntsOfATensorThatTorchCheckpointingStoresInSafetensorsAreIndices) {
  const fs::path from = directory_ / "in";
  fs::create_directory(from);
  testing::SafetensorsFile file;
  torch_checkpointing::CheckpointMetadata metadata;
  metadata.ranks = 1;
  const auto mesh = std::make_shared<torch_checkpointing::Mesh>();
  mesh->shape = {1};
  mesh->ranks = {0};
  torch_checkpointing::Item& item = metadata.items.emplace_back();
  item.key = "model";
  item.files[0] = {"model.safetensors", torch_checkpointing::Serialization::safetensors};
  for (const std::int64_t i : {0, 1}) {
    file.add<float>("experts." + std::to_string(i) + ".w", DType::float32, {1}, {1.0f});
    item.entries.push_back({{"experts", i, "w"}, {{DType::float32, {1}, mesh, {Placement::replicate()}}}});
  }
  file.write(from / "model.safetensors");
  write_new_file(from / "metadata.pkl", torch_checkpointing::write(metadata));
  convert_to(from, directory_ / "out.pt", SourceKind::torch);
  EXPECT_EQ(outline_of_file(directory_ / "out.pt"), "{'model': {'experts': [{'w': T}, {'w': T}]}}");
}

TEST_F(KeysTest, AKeyThatIsNotUnderstoodBecomesTextWithAWarning) {
  const NodeRef key =
      tree_.make_object(pickle::Object::Made::reduce, tree_.make_global("mine", "Layer"), tree_.make_tuple({}));
  const fs::path from = directory_ / "in.pt";
  write_state(from, [&](StateWriter& out) {
    out.dict([&] {
      out.key(key).dict([&] {
        out.key("a").tensor();
        out.key("b").tensor();
      });
    });
  });
  convert_to(from, directory_ / "out.pt", SourceKind::torch);
  EXPECT_EQ(outline_of_file(directory_ / "out.pt"), "{'<mine.Layer(...)>': {'a': T, 'b': T}}");
  EXPECT_THAT(warnings_, ElementsAre("'<mine.Layer(...)>.a': the key <mine.Layer(...)> is of a type that is not "
                                     "understood, and becomes a str"));
}

TEST_F(KeysTest, AViewKeepsTheKeysOfTheNamesThatItKeeps) {
  const fs::path from = training();
  const auto view = tensor_maps::map_of_rules(
                        R"j({"op": "rename", "match": "optim\\.state\\.(\\d+)\\.exp_avg", "to": "optim.state.\\1.m"},
                            {"op": "rename", "match": "optim\\.state\\.(\\d+)\\.step", "to": "optim.step.\\1"})j")
                        .apply(Checkpoint::open(from));
  ConvertOptions options;
  options.to = SourceKind::torch;
  convert(view, directory_ / "out.pt", options);
  EXPECT_EQ(outline_of_file(directory_ / "out.pt"),
            "{'model': {'w': T}, 'optim': {'step.0': T, 'state': {0: {'m': T}}, 'param_groups': [{'params': [0]}]}}");
}

// A pickle can define a long text once and refer to it in many keys.
TEST_F(KeysTest, WhatIsKeptOfKeysIsCharged) {
  const NodeRef text = tree_.make_bytes(Bytes(64 << 10)), dict = tree_.make_dict();
  std::vector<NodeRef> items;
  for (std::int64_t i = 0; i < 100; ++i) {
    const NodeRef parts[] = {tree_.make_integer(i), text};
    items.insert(items.end(), {tree_.make_tuple(parts), tree_.make_integer(i)});
  }
  tree_.set_items(dict, items);
  ExpansionBudget budget(0);
  budget.charge(budget.limit_bytes() - (1 << 20));
  StateFlattener flattener("in.pt", budget, StateFlattener::Tuples::are_leaves);
  std::size_t leaves = 0;
  EXPECT_ERROR(flattener.flatten(dict, {}, [&](NodeRef, const LeafPlace&) { ++leaves; }), ErrorCode::corrupt,
               "in.pt: the flattened state takes more than 64.0 MiB");
  EXPECT_EQ(leaves, 7u) << "of 87 KiB each, and 64 KiB for the text in each but the first";
}

}  // namespace
}  // namespace tessera::checkpoint

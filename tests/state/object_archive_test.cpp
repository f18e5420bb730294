#include "tessera/state/object_archive.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <fstream>

#include "state/golden_values.h"
#include "state/random_values.h"
#include "support/error_matchers.h"
#include "support/golden.h"
#include "support/temporary_directory.h"
#include "tensor/sharding_support.h"
#include "tessera/base/function_ref.h"
#include "tessera/format/pickle_writer.h"
#include "tessera/format/python_value.h"

namespace tessera {
namespace {

using pickle::Writer;

Value round_trip(const Value& value) { return load_object(save_object(value), "archive"); }

// Returns an archive with the given pickle and storages "0", "1", ...
Bytes archive_of(FunctionRef<void(Writer&)> write, const std::vector<Bytes>& storages = {}) {
  Bytes pkl;
  Writer writer(pkl, 2);
  write(writer);
  writer.stop();
  std::vector<torch_archive::ArchiveLayout::Storage> planned;
  for (std::size_t i = 0; i < storages.size(); ++i) planned.push_back({std::to_string(i), storages[i].size()});
  const torch_archive::ArchiveLayout layout("archive", pkl, planned);
  Bytes archive;
  std::vector<std::uint32_t> crcs;
  for (std::size_t i = 0; i < storages.size(); ++i) {
    append(archive, layout.before_storage(i, crcs));
    append(archive, storages[i]);
    crcs.push_back(crc32(storages[i]));
  }
  append(archive, layout.trailer(crcs));
  return archive;
}

torch_archive::TensorRef float_tensor(const std::string& key, std::int64_t storage_bytes) {
  torch_archive::TensorRef tensor;
  tensor.storage = {key, "cuda:0", DType::float32, storage_bytes};
  tensor.sizes = {2};
  tensor.strides = {1};
  return tensor;
}

const OpaqueObject& opaque_of(const Value& value) { return *value.get<std::shared_ptr<const OpaqueObject>>(); }

class ObjectArchiveGoldenTest : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(PyTorch, ObjectArchiveGoldenTest, ::testing::Values("2.6", "2.14"),
                         [](const auto& instance) { return testing::test_name(instance.param); });

TEST_P(ObjectArchiveGoldenTest, LoadsWhatTorchSaveWrote) {
  const std::string name = std::string(GetParam()) + "-objects";
  const Value value = load_object(read_file(testing::state_golden(name + ".pt")), name);
  const nlohmann::json expected = testing::read_state_json("objects.json");
  const List& list = value.get<List>();
  ASSERT_EQ(list.size(), expected.size());
  for (std::size_t i = 0; i < list.size(); ++i) EXPECT_EQ(list[i], testing::decode(expected[i])) << i;
}

TEST(ObjectArchiveTest, SharedStoragesAreSharedAgain) {
  const at::Tensor base = at::arange(6, at::kFloat);
  const Value loaded = round_trip(List{base.narrow(0, 0, 3), Tuple{base.view({2, 3})}, at::zeros({6})});
  const List& list = loaded.get<List>();
  const at::Tensor first = list[0].get<at::Tensor>(), second = list[1].get<Tuple>()[0].get<at::Tensor>();
  EXPECT_TRUE(at::equal(second, base.view({2, 3})));
  first.fill_(9);
  EXPECT_EQ(second[0][2].item<float>(), 9);
  EXPECT_EQ(second[1][0].item<float>(), 3);
  EXPECT_EQ(list[2], Value(at::zeros({6})));
}

TEST(ObjectArchiveTest, ViewsComeBackAsViewsOfTheWholeStorage) {
  const at::Tensor view = at::arange(12, at::kFloat).view({3, 4}).t().narrow(0, 1, 2);
  const at::Tensor loaded = round_trip(view).get<at::Tensor>();
  EXPECT_TRUE(at::equal(loaded, view));
  EXPECT_EQ(loaded.strides(), view.strides());
  EXPECT_EQ(loaded.storage_offset(), view.storage_offset());
  EXPECT_EQ(loaded.storage().nbytes(), 48u);
}

TEST(ObjectArchiveTest, RequiresGradIsKept) {
  const Value loaded = round_trip(at::ones({2}).set_requires_grad(true));
  EXPECT_TRUE(loaded.get<at::Tensor>().requires_grad());
  EXPECT_FALSE(round_trip(at::ones({2})).get<at::Tensor>().requires_grad());
}

TEST(ObjectArchiveTest, AConjugatedViewIsSavedAsItsValues) {
  const at::Tensor conjugated = at::complex(at::ones({2}), at::ones({2})).conj();
  EXPECT_EQ(round_trip(conjugated), Value(at::complex(at::ones({2}), -at::ones({2}))));
}

TEST(ObjectArchiveTest, TheArchiveIsAsTorchSavesIntoAStream) {
  const Bytes bytes = save_object(Tuple{at::arange(2), "text"});
  const torch_archive::Archive archive = torch_archive::open(MemorySource(bytes, "x"), 0, bytes.size());
  EXPECT_EQ(archive.prefix, "archive");
  EXPECT_NE(archive.directory.find("archive/data/0"), nullptr);
  EXPECT_EQ(pickle::repr(archive.tree.root().items()[1]), "'text'");
  const auto tensor = torch_archive::as_tensor(archive.tree.root().items()[0]);
  ASSERT_TRUE(tensor.has_value());
  EXPECT_EQ(tensor->storage.location, "cpu");
  EXPECT_EQ(tensor->sizes, std::vector<std::int64_t>{2});
  EXPECT_EQ(save_object(Tuple{at::arange(2), "text"}), bytes);
}

TEST(ObjectArchiveTest, WhatHasNoPlaceInAnArchiveIsUnsupported) {
  EXPECT_ERROR(save_object(List{ShardedTensor::ones(testing::chunk_spec(0, {0}), {2})}), ErrorCode::unsupported,
               "sharded float32 tensor [2]");
  EXPECT_ERROR(save_object(at::zeros({2}).to_sparse()), ErrorCode::unsupported, "expected a strided tensor");
  EXPECT_ERROR(save_object(at::empty({2}, at::kMeta)), ErrorCode::unsupported, "expected a strided tensor");
  const at::Tensor bytes = at::zeros({8}, at::kByte);
  EXPECT_ERROR(save_object(List{bytes, bytes.view(at::kFloat)}), ErrorCode::unsupported, "uint8 and float32");
  Value deep;
  for (int i = 0; i < 600; ++i) deep = List{std::move(deep)};
  EXPECT_ERROR(save_object(deep), ErrorCode::unsupported, "nests deeper than 500");
}

TEST(ObjectArchiveTest, TextMayHoldWhatPythonsMay) {
  const Value value = Dict{{"a \xed\xa0\x80 key", "lone \xed\xbf\xbf one"}, {"\xf0\x9f\x99\x82", ""}};
  EXPECT_EQ(round_trip(value), value);
}

TEST(ObjectArchiveTest, TextThatIsNoUtf8IsRefused) {
  EXPECT_ERROR(save_object("a\xed\xa0"), ErrorCode::invalid_argument, "not UTF-8 at byte 1, expected UTF-8");
  EXPECT_ERROR(save_object("ab\xff"), ErrorCode::invalid_argument, "not UTF-8 at byte 2");
  EXPECT_ERROR(save_object(Dict{{"\xc3", 1}}), ErrorCode::invalid_argument, "not UTF-8 at byte 0");
}

TEST(ObjectArchiveTest, AnUnknownObjectStaysOpaqueAmongTheRest) {
  const Bytes archive = archive_of([](Writer& writer) {
    writer.empty_dict();
    writer.mark();
    writer.string("args");
    writer.global("argparse", "Namespace");
    writer.tuple(0);
    writer.reduce();
    writer.empty_dict();
    writer.build();
    writer.string("step");
    writer.integer(3);
    writer.set_items();
  });
  const Value value = load_object(archive, "archive");
  EXPECT_EQ(value.get<Dict>().at("step"), Value(3));
  EXPECT_EQ(to_string(value.get<Dict>().at("args")), "<argparse.Namespace(...)>");
  EXPECT_EQ(load_object(save_object(value), "again"), value);
}

TEST(ObjectArchiveTest, AnOpaqueObjectKeepsItsStorages) {
  const Bytes archive = archive_of(
      [](Writer& writer) {
        writer.mark();
        writer.global("my.module", "Averaged");
        torch_archive::write_tensor(writer, float_tensor("1", 8));
        writer.tuple(1);
        writer.reduce();
        torch_archive::write_tensor(writer, float_tensor("0", 8));
        writer.tuple_from_mark();
      },
      {Bytes{0, 0, 0x80, 0x3f, 0, 0, 0, 0}, Bytes{1, 2, 3, 4, 5, 6, 7, 8}});
  Value value = load_object(archive, "archive");
  value = load_object(save_object(value), "archive");
  const OpaqueObject& object = opaque_of(value.get<Tuple>()[0]);
  ASSERT_EQ(object.storages.size(), 1u);
  EXPECT_EQ(*object.storages.begin()->second, (Bytes{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_TRUE(object.value.object().calls("my.module", "Averaged"));
  EXPECT_EQ(value.get<Tuple>()[1], Value(at::tensor({1.0F, 0.0F})));
}

TEST(ObjectArchiveTest, WhatIsNotPlainIsOpaque) {
  const auto loaded = [](FunctionRef<void(pickle::Tree&)> make) {
    pickle::Tree tree;
    make(tree);
    return load_object(archive_of([&](Writer& writer) { writer.value(tree.root()); }), "archive").kind();
  };
  using pickle::Tree;
  EXPECT_EQ(loaded([](Tree& tree) { tree.set_root(tree.make_set()); }), ValueKind::opaque);
  EXPECT_EQ(loaded([](Tree& tree) { tree.set_root(tree.make_byte_array({})); }), ValueKind::opaque);
  EXPECT_EQ(loaded([](Tree& tree) { tree.set_root(tree.make_big_integer(Bytes(9, 1))); }), ValueKind::opaque);
  EXPECT_EQ(loaded([](Tree& tree) { tree.set_root(tree.make_global("torch", "float32")); }), ValueKind::opaque);
  EXPECT_EQ(loaded([](Tree& tree) {
              const pickle::NodeRef dict = tree.make_dict();
              tree.set_items(dict, std::vector<pickle::NodeRef>{tree.make_tuple({}), tree.make_integer(1)});
              tree.set_root(dict);
            }),
            ValueKind::opaque);
}

TEST(ObjectArchiveTest, ASmallPickleThatStandsForFarMoreIsCorrupt) {
  pickle::Tree tree;
  pickle::NodeRef value = tree.make_list();
  for (int i = 0; i < 40; ++i) value = tree.make_list(std::vector<pickle::NodeRef>(10, value));
  const Bytes many = archive_of([&](Writer& writer) { writer.value(value); });
  EXPECT_ERROR(load_object(many, "archive"), ErrorCode::corrupt, "too many values, expected at most ");
  const pickle::NodeRef text = tree.make_string(std::string(1 << 20, 'x'));
  const pickle::NodeRef texts = tree.make_list(std::vector<pickle::NodeRef>(1000, text));
  const Bytes long_text = archive_of([&](Writer& writer) { writer.value(texts); });
  EXPECT_ERROR(load_object(long_text, "archive"), ErrorCode::corrupt, "too much text");
}

TEST(ObjectArchiveTest, AListThatHoldsItselfIsCorrupt) {
  const Bytes archive = archive_of([](Writer& writer) {
    writer.empty_list();
    const std::uint32_t itself = writer.memoize();
    writer.mark();
    writer.get(itself);
    writer.appends();
  });
  EXPECT_ERROR(load_object(archive, "archive"), ErrorCode::corrupt, "nests deeper");
}

TEST(ObjectArchiveTest, AFlippedBitInAStorageIsCorrupt) {
  Bytes bytes = save_object(at::arange(4));
  const torch_archive::Archive archive = torch_archive::open(MemorySource(bytes, "x"), 0, bytes.size());
  bytes[archive.directory.find("archive/data/0")->data_offset_bytes] ^= 1;
  EXPECT_ERROR(load_object(bytes, "flipped"), ErrorCode::corrupt, "flipped at byte", "archive/data/0", "CRC-32");
}

TEST(ObjectArchiveTest, ObjectsOfACheckpointAreValues) {
  // A torch.save file opened as a checkpoint: values that are not tensors are its objects.
  const testing::TemporaryDirectory folder;
  const at::Tensor tensor = at::arange(3);
  const Value state(Dict{{"w", tensor}, {"betas", Tuple{0.9, 0.999}}, {"pair", Tuple{tensor, "x"}}});
  write_new_file(folder.path() / "state.pt", save_object(state));
  const auto checkpoint = checkpoint::Checkpoint::open(folder.path() / "state.pt");
  const std::size_t betas = checkpoint->find_object("betas").value(), pair = checkpoint->find_object("pair").value();
  EXPECT_EQ(load_object(*checkpoint, betas), Value(Tuple{0.9, 0.999}));
  EXPECT_EQ(load_object(*checkpoint, pair), Value(Tuple{tensor, "x"}));
}

TEST(ObjectArchiveTest, ObjectsOfPyTorchsCheckpointsAreWhatTheyPrint) {
  for (const std::string& name : testing::golden_names()) {
    const testing::Golden golden = testing::read_golden(name);
    const auto checkpoint = checkpoint::Checkpoint::open(golden.checkpoint);
    for (std::size_t i = 0; i < checkpoint->objects().size(); ++i) {
      const auto expected = golden.plain.find(checkpoint->objects()[i].name);
      if (expected == golden.plain.end()) continue;
      const Value value = load_object(*checkpoint, i);
      if (value.is<std::shared_ptr<const OpaqueObject>>()) continue;
      EXPECT_EQ(to_string(value), expected->second) << name << " " << expected->first;
    }
  }
}

RC_GTEST_PROP(ObjectArchiveTest, LoadIsTheInverseOfSave, ()) {
  const Value value = testing::RandomValues().value(4);
  RC_ASSERT(round_trip(value) == value);
}

}  // namespace
}  // namespace tessera

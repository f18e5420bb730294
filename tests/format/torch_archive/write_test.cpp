#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "format/torch_archive/support.h"
#include "support/error_matchers.h"
#include "tessera/base/crc32.h"
#include "tessera/format/torch_archive.h"

namespace tessera::torch_archive {
namespace {

using pickle::Kind;
using pickle::NodeRef;

Bytes assemble(const ArchiveLayout& layout, const std::vector<Bytes>& storages) {
  Bytes out;
  std::vector<std::uint32_t> crcs;
  for (std::size_t i = 0; i < storages.size(); ++i) {
    append(out, layout.before_storage(i, crcs));
    EXPECT_EQ(out.size(), layout.storage_offset_bytes(i));
    EXPECT_EQ(storages[i].size(), layout.storage_size_bytes(i));
    append(out, storages[i]);
    crcs.push_back(crc32(storages[i]));
  }
  append(out, layout.trailer(crcs));
  EXPECT_EQ(out.size(), layout.total_bytes());
  return out;
}

// data.pkl of a dict of the tensors of a golden file, as we write it.
Bytes rewrite_pickle(const Archive& archive) {
  Bytes out;
  pickle::Writer writer(out, 2);
  const NodeRef root = archive.tree.root();
  if (root.is(Kind::dict)) {
    writer.empty_dict();
    writer.memoize();
    writer.mark();
    for (const pickle::Pair& pair : root.pairs()) {
      writer.interned_string(pair.key.string());
      write_tensor(writer, *as_tensor(pair.value));
    }
    writer.set_items();
  } else {
    write_tensor(writer, *as_tensor(root));
  }
  writer.stop();
  return out;
}

TEST(WriteTensorTest, ThePickleIsTorchSavesByteForByte) {
  for (const char* name :
       {"2.6-tensor", "2.6-dtypes", "2.6-parameters", "2.14-tensor", "2.14-dtypes", "2.14-parameters"}) {
    SCOPED_TRACE(name);
    const Bytes file = golden(name).file;
    const Archive archive = open_bytes(file);
    EXPECT_EQ(as_text(rewrite_pickle(archive)), as_text(entry_bytes(archive, file, "data.pkl")));
  }
}

TEST(WriteTensorTest, QuantizedTensorsAreUnsupported) {
  Bytes out;
  pickle::Writer writer(out, 2);
  TensorRef tensor = float_tensor({1}, {1}, 4);
  tensor.dtype = DType::qint8;
  EXPECT_ERROR(write_tensor(writer, tensor), ErrorCode::unsupported, "qint8", "quantizer");
}

TEST(ArchiveLayoutTest, TheArchiveIsThatOfPyTorch26ButForItsId) {
  for (const char* name : {"2.6-tensor", "2.6-dtypes", "2.6-parameters"}) {
    SCOPED_TRACE(name);
    const Bytes file = golden(name).file;
    const Archive archive = open_bytes(file);
    std::vector<ArchiveLayout::Storage> storages;
    std::vector<Bytes> data;
    const std::string folder = fmt::format("{}/data/", name);
    for (const zip::Entry& entry : archive.directory.entries) {  // PyTorch sorts keys as text
      if (!entry.name.starts_with(folder)) continue;
      storages.push_back({entry.name.substr(folder.size()), entry.size_bytes});
      data.push_back(entry_bytes(archive, file, "data/" + storages.back().key));
    }
    Bytes ours = assemble(ArchiveLayout(name, rewrite_pickle(archive), storages), data);
    ASSERT_EQ(ours.size(), file.size());
    const Archive reopened = open_bytes(ours);
    const zip::Entry& id = *reopened.directory.find(std::string(name) + "/.data/serialization_id");
    EXPECT_THAT(std::string(as_text(entry_bytes(reopened, ours, ".data/serialization_id"))),
                ::testing::MatchesRegex("[0-9]{40}"));
    // The id, and its CRC-32 in the descriptor after it and in its record, the last of the directory.
    Bytes theirs = file;
    const std::size_t record = as_text(file).rfind("PK\x01\x02");
    for (Bytes* bytes : {&ours, &theirs}) {
      std::fill_n(bytes->begin() + static_cast<std::ptrdiff_t>(id.data_offset_bytes), 40 + 8, 0);
      std::fill_n(bytes->begin() + static_cast<std::ptrdiff_t>(record + 16), 4, 0);
    }
    EXPECT_EQ(ours, theirs);
  }
}

TEST(ArchiveLayoutTest, WhatPrecedesAStorageDependsOnThePreviousChecksumAlone) {
  const ArchiveLayout layout("archive", to_bytes(kNonePickle), {{"0", 3}, {"1", 0}, {"2", 5}});
  EXPECT_EQ(layout.before_storage(0, {}), layout.before_storage(0, {7, 8, 9}));
  EXPECT_EQ(layout.before_storage(1, {7}), layout.before_storage(1, {7, 8, 9}));
  EXPECT_NE(layout.before_storage(1, {7}), layout.before_storage(1, {6}));
  EXPECT_EQ(layout.before_storage(2, {7, 8}), layout.before_storage(2, {1, 8, 9}));
}

TEST(ArchiveLayoutTest, OverheadIsSmall) {
  const ArchiveLayout layout("archive", to_bytes(kNonePickle), {{"0", 1 << 20}});
  EXPECT_LT(layout.total_bytes(), (1u << 20) + 1200u);
}

TEST(ArchiveLayoutTest, AnArchiveWithoutStoragesIsItsTrailer) {
  const ArchiveLayout layout("archive", to_bytes(kNonePickle), {});
  const Bytes bytes = layout.trailer({});
  EXPECT_EQ(bytes.size(), layout.total_bytes());
  EXPECT_TRUE(open_bytes(bytes).tree.root().is_none());
}

TEST(ArchiveLayoutTest, EqualInputGivesEqualBytesAndOtherInputAnotherId) {
  const auto id_of = [](std::string_view pkl, std::uint64_t size) {
    const ArchiveLayout layout("archive", to_bytes(pkl), {{"0", size}});
    const Bytes bytes = assemble(layout, {Bytes(size, 1)});
    return entry_bytes(open_bytes(bytes), bytes, ".data/serialization_id");
  };
  EXPECT_EQ(id_of("\x80\x02N.", 4), id_of("\x80\x02N.", 4));
  EXPECT_NE(id_of("\x80\x02N.", 4), id_of("\x80\x02N.", 5));
  EXPECT_NE(id_of("\x80\x02N.", 4), id_of("\x80\x02).", 4));
}

TEST(ArchiveLayoutTest, NamesThatWouldLeaveTheArchiveAreRefused) {
  const auto layout = [](const std::string& prefix, const std::string& key) {
    ArchiveLayout(prefix, to_bytes(kNonePickle), {{key, 1}});
  };
  for (const char* bad : {"", "..", "a/b", "a\\b"}) {
    EXPECT_ERROR(
        layout(bad, "0"), ErrorCode::invalid_argument,
        std::string("the folder '") + printable(bad) + "' of an archive, expected a name without '/' and '\\'");
    EXPECT_ERROR(layout("archive", bad), ErrorCode::invalid_argument,
                 std::string("the storage key '") + printable(bad) + "', expected a name without '/' and '\\'");
  }
  EXPECT_ERROR(ArchiveLayout("archive", {}, {{"0", 1}, {"0", 1}}), ErrorCode::invalid_argument, "archive/data/0");
  EXPECT_ERROR(ArchiveLayout("archive", {}, {{"0", 1}}).trailer({}), ErrorCode::invalid_argument,
               "0 checksums, expected 1");
}

RC_GTEST_PROP(ArchiveLayoutTest, WhatIsWrittenIsReadBack, ()) {
  const auto data = *rc::gen::container<std::vector<Bytes>>(rc::gen::arbitrary<Bytes>());
  std::vector<ArchiveLayout::Storage> storages;
  Bytes pkl;
  pickle::Writer writer(pkl, 2);
  writer.empty_list();
  writer.mark();
  for (std::size_t i = 0; i < data.size(); ++i) {
    storages.push_back({"k" + std::to_string(i), data[i].size()});
    TensorRef tensor;
    tensor.dtype = i % 2 == 0 ? DType::uint8 : DType::float8_e5m2;
    tensor.storage = {storages[i].key, "cuda:1", std::nullopt, static_cast<std::int64_t>(data[i].size())};
    tensor.sizes = {tensor.storage.size_bytes};
    tensor.strides = {1};
    tensor.is_parameter = tensor.requires_grad = i % 3 == 0;
    write_tensor(writer, tensor);
  }
  writer.appends();
  writer.stop();
  const Bytes bytes = assemble(ArchiveLayout("a", pkl, storages), data);
  const Archive archive = open_bytes(bytes);
  RC_ASSERT(archive.tree.root().items().size() == data.size());
  for (std::size_t i = 0; i < data.size(); ++i) {
    const std::optional<TensorRef> tensor = as_tensor(archive.tree.root().items()[i]);
    RC_ASSERT(tensor.has_value());
    RC_ASSERT(tensor->storage.location == "cuda:1");
    RC_ASSERT(tensor->is_parameter == (i % 3 == 0));
    RC_ASSERT(archive.storage_entry(tensor->storage).crc32 == crc32(data[i]));
    RC_ASSERT(entry_bytes(archive, bytes, "data/" + tensor->storage.key) == data[i]);
  }
}

}  // namespace
}  // namespace tessera::torch_archive

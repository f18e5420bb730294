// The parts that objects share are charged to one budget of a checkpoint, whatever command reads them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/base/file.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/format/dcp_metadata.h"
#include "tessera/format/pickle_writer.h"
#include "tessera/format/torch_archive.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr std::size_t kMiB = 1 << 20;

class SharedObjectsTest : public ::testing::Test {
 protected:
  using WriteValue = std::function<void(pickle::Writer& writer)>;

  // The storages have no bytes.
  static Bytes archive_of_value(const WriteValue& write,
                                const std::vector<torch_archive::ArchiveLayout::Storage>& storages = {}) {
    Bytes data_pkl;
    pickle::Writer writer(data_pkl, 2);
    write(writer);
    writer.stop();
    const std::vector<std::uint32_t> crcs(storages.size());
    const torch_archive::ArchiveLayout layout("archive", std::move(data_pkl), storages);
    Bytes out;
    for (std::size_t i = 0; i < crcs.size(); ++i) append(out, layout.before_storage(i, crcs));
    append(out, layout.trailer(crcs));
    return out;
  }

  // Returns an archive of a list that has one text `count` times.
  static Bytes list_of_text(std::size_t bytes, int count) {
    return archive_of_value([&](pickle::Writer& writer) {
      writer.empty_list();
      writer.mark();
      for (int i = 0; i < count; ++i) writer.interned_string(std::string(bytes, 'x'));
      writer.appends();
    });
  }

  // Returns an archive of a dict of which each value is one text.
  static Bytes dict_of_text(std::size_t bytes, int count) {
    return archive_of_value([&](pickle::Writer& writer) {
      writer.empty_dict();
      writer.mark();
      for (int i = 0; i < count; ++i) {
        writer.string("key " + std::to_string(i));
        writer.interned_string(std::string(bytes, 'x'));
      }
      writer.set_items();
    });
  }

  // Returns an archive of a dict of an empty tensor, and of lists that each have one text `count` times.
  static Bytes dict_of_lists(const std::string& tensor_key, const std::vector<std::string>& keys, std::size_t bytes,
                             int count) {
    const auto write = [&](pickle::Writer& writer) {
      writer.empty_dict();
      writer.mark();
      torch_archive::TensorRef tensor;
      tensor.storage = {"0", "cpu", DType::float32, 0};
      tensor.sizes = {0};
      tensor.strides = {1};
      writer.string(tensor_key);
      torch_archive::write_tensor(writer, tensor);
      for (const std::string& key : keys) {
        writer.string(key);
        writer.empty_list();
        writer.mark();
        for (int i = 0; i < count; ++i) writer.interned_string(std::string(bytes, 'x'));
        writer.appends();
      }
      writer.set_items();
    };
    return archive_of_value(write, {{"0", 0}});
  }

  // Writes a DCP checkpoint of objects that are stored in these ranges of `data`.
  std::shared_ptr<const Checkpoint> open_dcp_of(const Bytes& data,
                                                const std::vector<std::pair<std::size_t, std::size_t>>& ranges) const {
    dcp::Metadata metadata;
    metadata.files = {"__0_0.distcp"};
    for (const auto& [offset, length] : ranges) {
      dcp::MetadataEntry& entry = metadata.entries.emplace_back();
      entry.name = "object " + std::to_string(metadata.entries.size());
      entry.items = {{0, 0, static_cast<std::int64_t>(offset), static_cast<std::int64_t>(length)}};
    }
    fs::create_directory(directory_ / "ck");
    write_new_file(directory_ / "ck" / ".metadata", dcp::write(metadata));
    write_new_file(directory_ / "ck" / "__0_0.distcp", data);
    return Checkpoint::open(directory_ / "ck");
  }

  const testing::TemporaryDirectory directory_;
};

TEST_F(SharedObjectsTest, ObjectsOfDcpThatNameTheSameBytesAreCharged) {
  const Bytes item = list_of_text(kMiB, 1);
  const auto checkpoint = open_dcp_of(item, std::vector(100, std::pair(std::size_t{0}, item.size())));
  for (int i = 0; i < 100; ++i) checkpoint->load_object(0);  // is charged once
  for (std::size_t i = 1; i < 64; ++i) checkpoint->load_object(i);
  EXPECT_ERROR(checkpoint->load_object(64), ErrorCode::corrupt, "__0_0.distcp at byte 0: object 'object 65'",
               "the stored bytes that objects share stand for more than 64.0 MiB");
  checkpoint->load_object(63);
  ConvertOptions options;
  options.to = SourceKind::dcp;
  EXPECT_ERROR(convert(Checkpoint::open(directory_ / "ck"), directory_ / "out", options), ErrorCode::corrupt,
               "'object 65'");
}

TEST_F(SharedObjectsTest, VerifyReadsNoMoreThanTheBudget) {
  const Bytes item = list_of_text(kMiB, 1);
  open_dcp_of(item, std::vector(100, std::pair(std::size_t{0}, item.size())));
  const VerifyReport report = verify(directory_ / "ck");
  EXPECT_LE(report.bytes_checked, 66 * kMiB);
  std::string all;
  for (const Problem& problem : report.problems) all += problem.what + "\n";
  EXPECT_THAT(all,
              HasSubstr("the stored bytes that items share stand for more than 64.0 MiB, expected at most 64 MiB or "
                        "16 times the files; not all items were read"));
}

// Each of them is allowed by itself.
TEST_F(SharedObjectsTest, WhatObjectsOfDcpRepeatIsCharged) {
  const Bytes item = list_of_text(64 << 10, 200);
  Bytes data;
  std::vector<std::pair<std::size_t, std::size_t>> ranges;
  for (int i = 0; i < 10; ++i) {
    ranges.emplace_back(data.size(), item.size());
    append(data, item);
  }
  const auto checkpoint = open_dcp_of(data, ranges);
  for (std::size_t i = 0; i < 5; ++i) checkpoint->load_object(i);
  EXPECT_ERROR(checkpoint->load_object(5), ErrorCode::corrupt, "object 'object 6'",
               "the parts that objects share stand for more than 64.0 MiB");
  checkpoint->load_object(4);
  ConvertOptions options;
  options.to = SourceKind::torch;
  EXPECT_NO_THROW(convert(Checkpoint::open(directory_ / "ck"), directory_ / "out.pt", options));
  options.to = SourceKind::safetensors;
  EXPECT_ERROR(convert(Checkpoint::open(directory_ / "ck"), directory_ / "out", options), ErrorCode::corrupt,
               "'object 6'");
}

// Each list is 16 MiB as text. Any number of them can be opened and copied.
TEST_F(SharedObjectsTest, WhatObjectsOfTorchFilesRepeatIsChargedWhenTheyAreLoaded) {
  const fs::path path = directory_ / "in.pt";
  write_new_file(path, dict_of_lists("t", {"a", "b", "c", "d", "e", "f"}, 64 << 10, 300));
  const auto checkpoint = Checkpoint::open(path);
  ASSERT_EQ(checkpoint->objects().size(), 6u);
  for (std::size_t i = 0; i < 4; ++i) checkpoint->load_object(i);
  EXPECT_ERROR(checkpoint->load_object(4), ErrorCode::corrupt, "in.pt: object 'e'",
               "the parts that objects share stand for more than 64.0 MiB");
  checkpoint->load_object(3);
  for (const Problem& problem : verify(path).problems) ADD_FAILURE() << problem.what;
  for (const SourceKind kind : {SourceKind::dcp, SourceKind::torch, SourceKind::torch_checkpointing}) {
    ConvertOptions options;
    options.to = kind;
    const fs::path out = directory_ / std::string(source_kind_name(kind));
    convert(Checkpoint::open(path), out, options);
    for (const Problem& problem : verify(out).problems) ADD_FAILURE() << problem.what;
  }
}

TEST_F(SharedObjectsTest, WhatObjectsOfAnIndexRepeatIsChargedLikewise) {
  write_new_file(directory_ / "a.bin", dict_of_lists("t", {"a", "b", "c"}, 64 << 10, 300));
  write_new_file(directory_ / "b.bin", dict_of_lists("u", {"d", "e", "f"}, 64 << 10, 300));
  write_new_file(directory_ / "pytorch_model.bin.index.json",
                 as_bytes(R"({"metadata": {}, "weight_map": {"t": "a.bin", "u": "b.bin"}})"));
  const auto checkpoint = Checkpoint::open(directory_.path());
  for (std::size_t i = 0; i < 4; ++i) checkpoint->load_object(i);
  EXPECT_ERROR(checkpoint->load_object(4), ErrorCode::corrupt, "object 'e'",
               "the parts that objects share stand for more than 64.0 MiB");
}

TEST_F(SharedObjectsTest, WhatObjectsOfSeveralRanksRepeatIsChargedBeforeTheyAreCompared) {
  const fs::path folder = directory_ / "ranks";
  const Bytes file = dict_of_lists("t", {"a", "b", "c", "d", "e", "f"}, 64 << 10, 300);
  fs::create_directory(folder);
  write_new_file(folder / "model_0.pt", file);
  EXPECT_EQ(Checkpoint::open(folder)->objects().size(), 6u);
  write_new_file(folder / "model_1.pt", file);
  EXPECT_ERROR(Checkpoint::open(folder), ErrorCode::corrupt, "model_1.pt: 'model.b'",
               "the parts that objects share stand for more than 64.0 MiB");
}

TEST_F(SharedObjectsTest, TheFilesOfRanksHaveOneBudget) {
  const fs::path folder = directory_ / "ranks";
  fs::create_directory(folder);
  write_new_file(folder / "model_0.pt", dict_of_text(kMiB, 40));
  EXPECT_EQ(Checkpoint::open(folder)->objects().size(), 40u);
  write_new_file(folder / "other_0.pt", dict_of_text(kMiB, 40));
  EXPECT_ERROR(Checkpoint::open(folder), ErrorCode::corrupt, "other_0.pt: 'other.key 26'",
               "the parts that objects share stand for more than 64.0 MiB");
}

TEST_F(SharedObjectsTest, TheFilesOfAnIndexHaveOneBudget) {
  for (const std::string name : {"a", "b"}) {
    write_new_file(directory_ / (name + ".bin"), archive_of_value([&](pickle::Writer& writer) {
                     writer.empty_dict();
                     writer.mark();
                     for (int i = 0; i < 40; ++i) {
                       writer.string(name + std::to_string(i));
                       writer.interned_string(std::string(kMiB, 'x'));
                     }
                     writer.set_items();
                   }));
  }
  write_new_file(directory_ / "pytorch_model.bin.index.json",
                 as_bytes(R"({"metadata": {}, "weight_map": {"t": "a.bin", "u": "b.bin"}})"));
  EXPECT_ERROR(Checkpoint::open(directory_.path()), ErrorCode::corrupt, "b.bin: 'b26'",
               "the parts that objects share stand for more than 64.0 MiB");
}

}  // namespace
}  // namespace tessera::checkpoint

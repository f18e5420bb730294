#include "checkpoint/source/known_items.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "checkpoint/save/item_layouts.h"
#include "tessera/base/crc32.h"
#include "tessera/base/error.h"
#include "tessera/format/torch_archive.h"

namespace tessera::checkpoint {
namespace {

using ItemSizes = std::vector<std::int64_t>;

// The item that a save writes for a chunk whose bytes count up.
Bytes item_of(DType dtype, const ItemSizes& sizes) {
  const torch_archive::ArchiveLayout layout = chunk_layout(dtype, sizes);
  Bytes data(layout.storage_size_bytes(0));
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::uint8_t>(i * 7 + 1);
  Bytes item = layout.before_storage(0, {});
  append(item, data);
  append(item, layout.trailer({crc32(data)}));
  return item;
}

std::vector<DType> dtypes_that_are_written() {
  std::vector<DType> dtypes;
  for (std::size_t i = 0; i < kDTypeCount; ++i) {
    try {
      chunk_layout(static_cast<DType>(i), ItemSizes{2});
      dtypes.push_back(static_cast<DType>(i));
    } catch (const Error&) {  // read, not written
    }
  }
  return dtypes;
}

TEST(ItemFormTest, IsWhatTheLayoutWrites) {
  for (const DType dtype : dtypes_that_are_written()) {
    for (const ItemSizes& sizes : {ItemSizes{}, ItemSizes{3, 5}, ItemSizes{0}, ItemSizes{2, 0}}) {
      const torch_archive::ArchiveLayout layout = chunk_layout(dtype, sizes);
      const ItemForm form = item_form(dtype, sizes);
      EXPECT_EQ(form.head, layout.before_storage(0, {}));
      EXPECT_EQ(form.length_bytes, layout.storage_size_bytes(0));
      EXPECT_EQ(form.total_bytes(), layout.total_bytes());
      for (const std::uint32_t crc : {0u, 0x01020304u, UINT32_MAX}) {
        EXPECT_EQ(form.tail_with(crc), layout.trailer({crc})) << dtype_name(dtype) << ' ' << crc;
      }
    }
  }
}

TEST(KnownItemsTest, FindsWhatParsingFinds) {
  for (const DType dtype : dtypes_that_are_written()) {
    for (const ItemSizes& sizes : {ItemSizes{}, ItemSizes{1}, ItemSizes{3, 5}, ItemSizes{2, 1, 4},
                                   ItemSizes{1, 2, 1, 3, 1}, ItemSizes{257, 65}}) {
      const Bytes item = item_of(dtype, sizes);
      const torch_archive::Archive archive = torch_archive::open(MemorySource(item, "item"), 0, item.size());
      const auto tensor = torch_archive::as_tensor(archive.tree.root());
      ASSERT_TRUE(tensor);
      const zip::Entry& storage = archive.storage_entry(tensor->storage);
      KnownItems items;
      EXPECT_FALSE(items.find(item, dtype, sizes));  // a form that occurs once is not worth making
      for (int again = 0; again < 2; ++again) {
        const auto found = items.find(item, dtype, sizes);
        ASSERT_TRUE(found) << dtype_name(dtype);
        EXPECT_EQ(found->offset_bytes, storage.data_offset_bytes);
        EXPECT_EQ(found->length_bytes, storage.size_bytes);
        EXPECT_EQ(found->crc32, storage.crc32);
        Bytes file(7 + item.size() + 9);
        std::ranges::copy(item, file.begin() + 7);
        const auto in_file = items.find(MemorySource(file, "file"), 7, item.size(), dtype, sizes);
        ASSERT_TRUE(in_file) << dtype_name(dtype);
        EXPECT_EQ(in_file->offset_bytes, found->offset_bytes);
        EXPECT_EQ(in_file->length_bytes, found->length_bytes);
        EXPECT_EQ(in_file->crc32, found->crc32);
      }
    }
  }
}

TEST(KnownItemsTest, AnItemWithAnyOtherByteIsNotKnown) {
  const ItemSizes sizes = {4, 3};
  Bytes item = item_of(DType::float32, sizes);
  KnownItems items;
  items.find(item, DType::float32, sizes);
  const auto found = items.find(item, DType::float32, sizes);
  ASSERT_TRUE(found);
  for (std::size_t at = 0; at < item.size(); ++at) {
    const bool is_data = at >= found->offset_bytes && at < found->offset_bytes + found->length_bytes;
    for (const int flip : {1, 128}) {
      item[at] = static_cast<std::uint8_t>(item[at] ^ flip);
      EXPECT_EQ(items.find(item, DType::float32, sizes).has_value(), is_data) << at;
      item[at] = static_cast<std::uint8_t>(item[at] ^ flip);
    }
  }
  item.push_back(0);
  EXPECT_FALSE(items.find(item, DType::float32, sizes));
  EXPECT_FALSE(items.find({}, DType::float32, sizes));
}

TEST(KnownItemsTest, SizesThatCannotBeMeant) {
  const Bytes item = item_of(DType::float32, {4});
  KnownItems items;
  const std::int64_t most = INT64_MAX;
  for (const ItemSizes& sizes : {ItemSizes{most, most, most}, ItemSizes{-1}, ItemSizes{0}, ItemSizes{1 << 20}}) {
    for (int again = 0; again < 3; ++again) EXPECT_FALSE(items.find(item, DType::float32, sizes));
  }
  for (int again = 0; again < 3; ++again) EXPECT_FALSE(items.find(item, DType::qint8, ItemSizes{4}));
  for (int again = 0; again < 3; ++again) EXPECT_FALSE(items.find({}, DType::qint8, ItemSizes{}));
}

}  // namespace
}  // namespace tessera::checkpoint

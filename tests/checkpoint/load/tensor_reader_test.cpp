#include "tessera/checkpoint/tensor_reader.h"

#include <gtest/gtest.h>

#include <cstring>

#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "support/torch_file.h"
#include "tessera/layout/byte_ranges.h"

namespace tessera::checkpoint {
namespace {

using testing::TemporaryDirectory;
using testing::TorchFile;

// A storage of int32 elements that count from 0.
Bytes counting(std::int64_t count) {
  Bytes bytes(static_cast<std::size_t>(count) * 4);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<std::int32_t>(i);
    std::memcpy(bytes.data() + i * 4, &value, 4);
  }
  return bytes;
}

std::vector<std::int32_t> read_box(const std::shared_ptr<const Checkpoint>& checkpoint, const std::string& name,
                                   const Box& box) {
  const TensorReader reader(checkpoint, *checkpoint->find_tensor(name));
  std::vector<std::int32_t> values(static_cast<std::size_t>(volume(box)));
  reader.read(box, {reinterpret_cast<std::uint8_t*>(values.data()), values.size() * 4});
  reader.verify_checksums();
  return values;
}

// Returns the expected elements of `box` of a view: their positions in the counting storage.
std::vector<std::int32_t> expected_box(const Box& box, std::int64_t offset, const std::vector<std::int64_t>& strides) {
  std::vector<std::int32_t> values;
  std::vector<std::int64_t> index = box.offsets;
  for (std::int64_t n = volume(box); n > 0; --n) {
    std::int64_t at = offset;
    for (std::size_t d = 0; d < index.size(); ++d) at += index[d] * strides[d];
    values.push_back(static_cast<std::int32_t>(at));
    for (std::size_t d = index.size(); d-- > 0;) {
      if (++index[d] < box.offsets[d] + box.sizes[d]) break;
      index[d] = box.offsets[d];
    }
  }
  return values;
}

struct View {
  const char* name;
  std::int64_t offset;
  std::vector<std::int64_t> sizes, strides;
  std::vector<Box> boxes;
};

TEST(TensorReaderTest, BoxesOfViewsWithAnyStridesAreTheirElements) {
  const std::vector<View> views = {
      {"contiguous", 0, {30, 40, 5}, {200, 5, 1}, {Box({0, 0, 0}, {30, 40, 5}), Box({3, 7, 1}, {4, 20, 3})}},
      {"transposed", 3, {50, 60}, {1, 50}, {Box({0, 0}, {50, 60}), Box({49, 0}, {1, 60}), Box({0, 59}, {50, 1})}},
      {"permuted", 0, {5, 30, 40}, {1, 200, 5}, {Box({0, 0, 0}, {5, 30, 40}), Box({1, 2, 3}, {3, 4, 5})}},
      {"every third", 1, {1000}, {3}, {Box({0}, {1000}), Box({999}, {1})}},
      {"expanded", 7, {100, 3, 4}, {0, 0, 1}, {Box({0, 0, 0}, {100, 3, 4}), Box({98, 1, 2}, {2, 2, 2})}},
      {"columns far apart", 0, {2, 3}, {1, 2500}, {Box({0, 0}, {2, 3})}},
      {"scalar", 17, {}, {}, {Box({}, {})}},
      {"empty", 0, {0, 5}, {5, 1}, {Box({0, 0}, {0, 5})}},
  };
  TorchFile file;
  file.storages.push_back(counting(6000));
  for (const View& view : views) file.add(view.name, DType::int32, 0, view.offset, view.sizes, view.strides);
  const TemporaryDirectory directory;
  write_new_file(directory / "views.pt", file.bytes());
  const auto checkpoint = Checkpoint::open(directory / "views.pt");
  for (const View& view : views) {
    for (const Box& box : view.boxes) {
      EXPECT_EQ(read_box(checkpoint, view.name, box), expected_box(box, view.offset, view.strides))
          << view.name << " " << box;
    }
  }
}

TEST(TensorReaderTest, ALargeTransposedTensorIsReadWithoutReadingItsStorageForEachPiece) {
  // 2048 x 4096 elements, stored by columns: blocks of rows are spread over the entire storage.
  constexpr std::int64_t kRows = 2048, kColumns = 4096;
  TorchFile file;
  file.storages.push_back(counting(kRows * kColumns));
  file.add("t", DType::int32, 0, 0, {kRows, kColumns}, {1, kRows});
  const TemporaryDirectory directory;
  write_new_file(directory / "t.pt", file.bytes());
  const auto checkpoint = Checkpoint::open(directory / "t.pt");
  for (const Box& box : {Box({1000, 0}, {16, kColumns}), Box({0, 0}, {kRows, kColumns}), Box({5, 7}, {1, 1})}) {
    EXPECT_EQ(read_box(checkpoint, "t", box), expected_box(box, 0, {1, kRows})) << box;
  }
}

TEST(TensorReaderTest, AFlippedBitIsFoundHoweverTheBytesWereRead) {
  for (const bool transposed : {false, true}) {
    TorchFile file;
    file.storages.push_back(counting(300 * 400));
    const std::vector<std::int64_t> strides =
        transposed ? std::vector<std::int64_t>{1, 300} : std::vector<std::int64_t>{400, 1};
    file.add("t", DType::int32, 0, 0, {300, 400}, strides);
    Bytes bytes = file.bytes();
    const TemporaryDirectory directory;
    write_new_file(directory / "good.pt", bytes);
    const Extent extent = Checkpoint::open(directory / "good.pt")->locate(0, 0);
    bytes[extent.offset_bytes + 12345] ^= 4;
    write_new_file(directory / "bad.pt", bytes);
    const auto checkpoint = Checkpoint::open(directory / "bad.pt");
    const TensorReader reader(checkpoint, 0);
    for (std::int64_t row = 0; row < 300; row += 50) {
      Bytes rows(50 * 400 * 4);
      reader.read(Box({row, 0}, {50, 400}), rows);
    }
    EXPECT_ERROR(reader.verify_checksums(), ErrorCode::corrupt, "bad.pt at byte", "tensor 't'", "CRC-32");
  }
}

TEST(TensorReaderTest, AStorageOfWhichOnlyAPartIsATensorIsCheckedAsAWhole) {
  TorchFile file;
  file.storages.push_back(counting(1000));
  file.add("part", DType::int32, 0, 10, {20}, {1});
  Bytes bytes = file.bytes();
  const TemporaryDirectory directory;
  write_new_file(directory / "good.pt", bytes);
  const Extent extent = Checkpoint::open(directory / "good.pt")->locate(0, 0);
  EXPECT_EQ(extent.length_bytes, 80u);
  bytes[extent.checksum->offset_bytes + 3999] ^= 1;  // after the tensor's last element
  write_new_file(directory / "bad.pt", bytes);
  EXPECT_ERROR(read_box(Checkpoint::open(directory / "bad.pt"), "part", Box({0}, {20})), ErrorCode::corrupt, "CRC-32");
}

}  // namespace
}  // namespace tessera::checkpoint

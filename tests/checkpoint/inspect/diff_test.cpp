#include "tessera/checkpoint/diff.h"

#include <gtest/gtest.h>

#include "support/golden.h"
#include "support/temporary_directory.h"
#include "tessera/format/pickle_writer.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::TemporaryDirectory;

class DiffTest : public ::testing::Test {
 protected:
  const std::shared_ptr<const Checkpoint> source_ =
      Checkpoint::open(testing::read_golden("2.14-replicated").checkpoint);
  const TemporaryDirectory directory_;

  std::shared_ptr<const Checkpoint> without(const std::string& glob) {
    ConvertOptions options;
    options.selection.exclude = {glob};
    const fs::path to = directory_ / ("without" + std::to_string(count_++));
    convert(source_, to, options);
    return Checkpoint::open(to);
  }

  int count_ = 0;
};

TEST_F(DiffTest, ACheckpointIsTheSameAsItself) {
  const DiffReport report = diff(source_, source_);
  EXPECT_TRUE(report.same());
  EXPECT_EQ(report.tensors, source_->tensors().size());
  EXPECT_EQ(report.objects, source_->objects().size());
}

TEST_F(DiffTest, NamesOfOneSideAreReported) {
  const std::string tensor = source_->tensors()[0].name;
  const auto other = without(tensor);
  const DiffReport report = diff(source_, other);
  ASSERT_EQ(report.differences.size(), 1u);
  EXPECT_EQ(report.differences[0].kind, Difference::Kind::only_in_a);
  EXPECT_EQ(report.differences[0].name, tensor);
  const DiffReport reverse = diff(other, source_);
  ASSERT_EQ(reverse.differences.size(), 1u);
  EXPECT_EQ(reverse.differences[0].kind, Difference::Kind::only_in_b);
}

TEST_F(DiffTest, ASelectionLimitsWhatIsCompared) {
  const auto other = without("model.*");
  EXPECT_FALSE(diff(source_, other).same());
  DiffOptions options;
  options.selection.exclude = {"model.*"};
  EXPECT_TRUE(diff(source_, other, options).same());
}

TEST_F(DiffTest, TheFirstElementThatDiffersIsNamedWithBothValues) {
  // A safetensors file has no checksum of its own, so that a changed byte is a difference and no damage.
  ConvertOptions options;
  options.to = SourceKind::safetensors;
  convert(source_, directory_ / "a.safetensors", options);
  fs::copy(directory_ / "a.safetensors", directory_ / "b.safetensors");
  const auto a = Checkpoint::open(directory_ / "a.safetensors");
  const std::size_t index = a->find_tensor("model.layers.1.scale").value();  // int8, 16 x 2
  const TensorInfo& tensor = a->tensors()[index];
  const std::int64_t columns = tensor.shape[1];
  const Extent extent = a->locate(index, 0);
  Bytes bytes = read_file(directory_ / "b.safetensors");
  const std::uint8_t before = bytes[extent.offset_bytes + static_cast<std::uint64_t>(columns) + 1];
  bytes[extent.offset_bytes + static_cast<std::uint64_t>(columns) + 1] ^= 0xff;
  bytes[extent.offset_bytes + tensor.size_bytes() - 1] ^= 1;
  testing::overwrite_file(directory_ / "b.safetensors", bytes);
  const DiffReport report = diff(a, Checkpoint::open(directory_ / "b.safetensors"));
  ASSERT_EQ(report.differences.size(), 1u) << to_string(report.differences.back());
  const Difference& difference = report.differences[0];
  EXPECT_EQ(difference.kind, Difference::Kind::elements);
  EXPECT_EQ(difference.name, tensor.name);
  EXPECT_EQ(difference.index, (std::vector<std::int64_t>{1, 1}));
  EXPECT_EQ(difference.a, std::to_string(static_cast<std::int8_t>(before)));
  EXPECT_EQ(difference.b, std::to_string(static_cast<std::int8_t>(before ^ 0xff)));
  EXPECT_EQ(difference.differing_elements, 2u);
}

TEST_F(DiffTest, AnotherDTypeIsADifference) {
  ConvertOptions options;
  options.dtype = DType::float64;
  convert(source_, directory_ / "out", options);
  const DiffReport report = diff(source_, Checkpoint::open(directory_ / "out"));
  ASSERT_FALSE(report.same());
  for (const Difference& difference : report.differences) EXPECT_EQ(difference.kind, Difference::Kind::dtype);
}

TEST(ElementToStringTest, NumbersPrintAsTheirType) {
  const float number = -1.5f;
  EXPECT_EQ(element_to_string(DType::float32, reinterpret_cast<const std::uint8_t*>(&number)), "-1.5");
  const std::uint8_t half[] = {0x00, 0x3c};
  EXPECT_EQ(element_to_string(DType::float16, half), "1");
  const double pair[] = {1, -2};
  EXPECT_EQ(element_to_string(DType::complex128, reinterpret_cast<const std::uint8_t*>(pair)), "(1-2j)");
  const std::uint8_t raw[] = {0x12, 0x34};
  EXPECT_EQ(element_to_string(DType::bits16, raw), "0x3412");
  const std::uint8_t yes[] = {1};
  EXPECT_EQ(element_to_string(DType::bool_, yes), "True");
}

}  // namespace
}  // namespace tessera::checkpoint

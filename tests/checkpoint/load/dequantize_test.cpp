// Tensors that are quantized in blocks are dequantized while they are loaded, in every layout.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/save/saved_states.h"
#include "support/error_matchers.h"
#include "support/golden.h"
#include "support/thread_ranks.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/tensor_reader.h"

namespace tessera::checkpoint {
namespace {

using namespace saved;
using ::tessera::testing::golden_directory;
using ::tessera::testing::run_thread_ranks;
using ::tessera::testing::ThreadLink;
using ::testing::Each;

constexpr std::int64_t kBlock = 4;  // of the golden checkpoint

ReadOptions dequantizing(std::int64_t block_size = kBlock) {
  ReadOptions options;
  options.rules.allow_cast = true;  // for the tensor that is not quantized
  options.rules.dequantize_block_size = block_size;
  return options;
}

std::shared_ptr<const Checkpoint> quantized() { return Checkpoint::open(golden_directory() / "quantized" / "model"); }

// The bytes of a box of a target, row-major.
struct Part {
  Box box;
  Bytes bytes;
};

Bytes elements_of(const TensorReader& reader, const Box& box) {
  Bytes bytes(static_cast<std::size_t>(volume(box) * dtype_size(reader.info().dtype)));
  reader.read(box, bytes);
  return bytes;
}

const std::vector<std::string>& names() {
  static const std::vector<std::string> all = {"uneven.weight", "even.weight", "small.weight", "plain.weight"};
  return all;
}

// Loads what a rank has in a layout into tensors of `dtype`, and compares it with what PyTorch loaded.
void expect_is_pytorchs(const Layout& layout, DType dtype, RankLink& link, const ReadOptions& options) {
  const auto checkpoint = quantized();
  const auto expected = Checkpoint::open(golden_directory() / "quantized" / "expected.safetensors");
  std::vector<std::unique_ptr<TensorReader>> readers;
  Targets targets;
  std::vector<std::vector<Part>> parts(names().size());
  for (std::size_t i = 0; i < names().size(); ++i) {
    const std::string of_dtype = names()[i] + " " + std::string(dtype_name(dtype));
    readers.push_back(std::make_unique<TensorReader>(expected, *expected->find_tensor(of_dtype)));
    TargetTensor target;
    target.dtype = dtype;
    target.shape = readers.back()->info().shape;
    for (const Box& box : layout(target.shape, link.rank(), link.size())) {
      parts[i].push_back({box, Bytes(static_cast<std::size_t>(volume(box) * dtype_size(dtype)))});
    }
    for (Part& part : parts[i]) target.chunks.push_back({part.box, {part.bytes.data(), {}}});
    targets.push_back({names()[i], std::move(target)});
  }
  read_state(targets, checkpoint, link, options);
  for (std::size_t i = 0; i < names().size(); ++i) {
    for (const Part& part : parts[i]) {
      EXPECT_EQ(part.bytes, elements_of(*readers[i], part.box)) << names()[i] << " " << to_string(part.box);
    }
  }
}

class DequantizeTest : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, DequantizeTest, ::testing::Values(DType::float32, DType::bfloat16, DType::float64),
                         [](const auto& instance) { return std::string(dtype_name(instance.param)); });

TEST_P(DequantizeTest, EveryLayoutOfEveryNumberOfRanksGetsWhatPyTorchComputes) {
  for (const NamedLayout& layout : layouts()) {
    for (const int ranks : {1, 2, 3, 5}) {
      SCOPED_TRACE(fmt::format("{} on {} ranks", layout.name, ranks));
      for (const bool shares : {false, true}) {
        EXPECT_THAT(run_thread_ranks(ranks,
                                     [&](ThreadLink& link) {
                                       ReadOptions options = dequantizing();
                                       if (shares) options.share_reads_among = &link;
                                       expect_is_pytorchs(layout.boxes, GetParam(), link, options);
                                     }),
                    Each(""));
      }
    }
  }
}

TEST(DequantizeRulesTest, WithoutTheRuleTheStoredElementsAreLoaded) {
  const auto checkpoint = quantized();
  const TensorReader reader(checkpoint, *checkpoint->find_tensor("even.weight"));
  Bytes elements(32);
  const Targets targets = {
      {"even.weight", TargetTensor{DType::float8_e5m2, {8, 4}, {{Box({0, 0}, {8, 4}), {elements.data(), {}}}}}}};
  read_state(targets, checkpoint);
  EXPECT_EQ(elements, elements_of(reader, Box({0, 0}, {8, 4})));
  // Scales that are requested are loaded as they are.
  std::vector<float> scales(2);
  read_state(
      {{"even.weight_scale_inv",
        TargetTensor{
            DType::float32, {2, 1}, {{Box({0, 0}, {2, 1}), {reinterpret_cast<std::uint8_t*>(scales.data()), {}}}}}}},
      checkpoint, alone(), dequantizing());
  for (const float scale : scales) EXPECT_TRUE(scale > 0 && scale < 4);
}

TEST(DequantizeRulesTest, ShardsOfOtherShardsAndAnyStridesAreDequantized) {
  // Elements 1 in rows of two ranks, and scales that are the number of the block.
  const auto storage = memory_storage();
  const std::vector<float> ones(7 * 5, 1.0F), numbers = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  const auto entry = [](const std::string& name, Shape shape, const Box& box, const std::vector<float>& values) {
    StateTensor tensor;
    tensor.shape = std::move(shape);
    tensor.chunks.push_back({box, [&values] {
                               return HostMemory{reinterpret_cast<const std::uint8_t*>(values.data()), {}, {}};
                             }});
    return StateEntry{name, {name}, std::move(tensor)};
  };
  EXPECT_THAT(run_thread_ranks(2,
                               [&](ThreadLink& link) {
                                 const bool is_first = link.rank() == 0;
                                 const Box rows = is_first ? Box({0, 0}, {3, 5}) : Box({3, 0}, {4, 5});
                                 write_state({entry("w", {7, 5}, rows, ones),
                                              entry("w_scale_inv", {4, 3}, Box({0, 0}, {4, 3}), numbers)},
                                             storage, link);
                               }),
              Each(""));
  std::vector<float> columns(7 * 5);
  const Targets targets = {
      {"w", TargetTensor{DType::float32,
                         {7, 5},
                         {{Box({0, 0}, {7, 5}), {reinterpret_cast<std::uint8_t*>(columns.data()), {1, 7}}}}}}};
  read_state(targets, Checkpoint::open(storage), alone(), dequantizing(2));
  for (std::size_t row = 0; row < 7; ++row) {
    for (std::size_t column = 0; column < 5; ++column) {
      EXPECT_EQ(columns[column * 7 + row], numbers[row / 2 * 3 + column / 2]) << row << ", " << column;
    }
  }
  EXPECT_ERROR(read_state(targets, Checkpoint::open(storage), alone(), dequantizing(4)), ErrorCode::invalid_argument,
               "tensor 'w' has shape [7, 5] and scales of shape [4, 3]", "a scale for each block of 4x4");
  EXPECT_ERROR(read_state(targets, Checkpoint::open(storage), alone(), dequantizing(0)), ErrorCode::invalid_argument,
               "dequantize_block_size is 0, expected at least 1");
}

TEST(DequantizeRulesTest, ADtypeThatIsNotFloatingPointIsRefused) {
  std::vector<std::int32_t> elements(32);
  const Targets targets = {
      {"even.weight",
       TargetTensor{
           DType::int32, {8, 4}, {{Box({0, 0}, {8, 4}), {reinterpret_cast<std::uint8_t*>(elements.data()), {}}}}}}};
  EXPECT_ERROR(read_state(targets, quantized(), alone(), dequantizing()), ErrorCode::invalid_argument,
               "tensor 'even.weight' has dtype float8_e5m2 and scales of float32, expected floating-point ones for a "
               "target of int32");
}

}  // namespace
}  // namespace tessera::checkpoint

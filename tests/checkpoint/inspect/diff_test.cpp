#include "tessera/checkpoint/diff.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/box_generators.h"
#include "support/error_matchers.h"
#include "support/golden.h"
#include "support/safetensors_file.h"
#include "support/temporary_directory.h"
#include "tessera/format/pickle_writer.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::SafetensorsFile;
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

// Two safetensors files with a tensor `t` each.
class ToleranceTest : public ::testing::Test {
 protected:
  const TemporaryDirectory directory_;

  template <typename A, typename B>
  DiffReport compared(DType dtype_a, const std::vector<A>& a, DType dtype_b, const std::vector<B>& b,
                      const std::optional<Tolerance>& tolerance, std::size_t jobs = 0) {
    const auto open = [&](const std::string& name, DType dtype, const auto& values) {
      SafetensorsFile file;
      const std::int64_t bytes = static_cast<std::int64_t>(values.size() * sizeof(values[0]));
      file.add("t", dtype, {bytes / dtype_size(dtype)}, values);
      file.write(directory_ / name);
      return Checkpoint::open(directory_ / name);
    };
    DiffOptions options;
    options.tolerance = tolerance;
    options.jobs = jobs;
    return diff(open("a.safetensors", dtype_a, a), open("b.safetensors", dtype_b, b), options);
  }
  DiffReport compared(const std::vector<float>& a, const std::vector<float>& b,
                      const std::optional<Tolerance>& tolerance) {
    return compared(DType::float32, a, DType::float32, b, tolerance);
  }
};

constexpr float kDiffInf = std::numeric_limits<float>::infinity();
constexpr float kDiffNan = std::numeric_limits<float>::quiet_NaN();

TEST_F(ToleranceTest, TheToleranceIsThatOfAllclose) {
  EXPECT_TRUE(compared({1.0f, 100.0f}, {1.5f, 100.5f}, Tolerance{0.5, 0}).same());
  EXPECT_FALSE(compared({1.0f, 100.0f}, {1.5f, 100.625f}, Tolerance{0.5, 0}).same());
  // Relative to the second side alone.
  EXPECT_TRUE(compared({75.0f}, {100.0f}, Tolerance{0, 0.25}).same());
  EXPECT_FALSE(compared({100.0f}, {75.0f}, Tolerance{0, 0.25}).same());
  EXPECT_TRUE(compared({100.0f}, {75.0f}, Tolerance{6.25, 0.25}).same());
  EXPECT_TRUE(compared({0.0f}, {-0.0f}, Tolerance{}).same());
  EXPECT_FALSE(compared({0.0f}, {-0.0f}, std::nullopt).same());
}

TEST_F(ToleranceTest, InfinitiesEqualThemselvesAndNanIfAsked) {
  EXPECT_TRUE(compared({kDiffInf, -kDiffInf}, {kDiffInf, -kDiffInf}, Tolerance{}).same());
  for (const Tolerance& tolerance : {Tolerance{1e30, 1}, Tolerance{0, 1}, Tolerance{}}) {
    EXPECT_EQ(
        compared({1, kDiffInf, kDiffInf}, {kDiffInf, 1, -kDiffInf}, tolerance).differences.at(0).differing_elements,
        3u);
  }
  EXPECT_FALSE(compared({kDiffNan}, {kDiffNan}, Tolerance{1, 1}).same());
  EXPECT_TRUE(compared({kDiffNan}, {kDiffNan}, Tolerance{0, 0, true}).same());
  EXPECT_TRUE(compared({kDiffNan}, {-kDiffNan}, Tolerance{0, 0, true}).same());
  EXPECT_FALSE(compared({kDiffNan}, {1}, Tolerance{1, 1, true}).same());
  EXPECT_TRUE(compared({kDiffNan}, {kDiffNan}, std::nullopt).same()) << "the same bits";
}

TEST_F(ToleranceTest, TheWorstElementsAreFound) {
  const DiffReport report = compared({1, 2, 30, 40, 5}, {1, 3, 30, 50, 5.5}, Tolerance{0.5, 0});
  ASSERT_EQ(report.differences.size(), 1u);
  const Difference& difference = report.differences[0];
  EXPECT_EQ(difference.differing_elements, 2u);
  EXPECT_EQ(difference.elements, 5u);
  EXPECT_EQ(difference.index, (std::vector<std::int64_t>{1}));
  EXPECT_EQ(difference.worst_absolute->value, 10);
  EXPECT_EQ(difference.worst_absolute->index, (std::vector<std::int64_t>{3}));
  EXPECT_EQ(difference.worst_absolute->a, "40");
  EXPECT_EQ(difference.worst_absolute->b, "50");
  EXPECT_DOUBLE_EQ(difference.worst_relative->value, 1.0 / 3);
  EXPECT_EQ(difference.worst_relative->index, (std::vector<std::int64_t>{1}));
  EXPECT_EQ(
      to_string(difference),
      "'t': 2 of 5 elements differ, first at [1]: 2 and 3; by at most 10 at [3] (40 and 50), relatively 0.333333 at "
      "[1] (2 and 3)");
}

TEST_F(ToleranceTest, BitsThatDifferHaveWorstElementsToo) {
  const DiffReport report = compared({1, 0, 4}, {1, -0.0f, 2}, std::nullopt);
  ASSERT_EQ(report.differences.size(), 1u);
  EXPECT_EQ(report.differences[0].differing_elements, 2u);
  EXPECT_EQ(report.differences[0].index, (std::vector<std::int64_t>{1}));
  EXPECT_EQ(report.differences[0].worst_absolute->value, 2);
  EXPECT_EQ(report.differences[0].worst_absolute->index, (std::vector<std::int64_t>{2}));
  const DiffReport with_nan = compared({1, 5}, {kDiffNan, 2}, std::nullopt);
  EXPECT_EQ(with_nan.differences[0].worst_absolute->value, static_cast<double>(kDiffInf));
  EXPECT_EQ(with_nan.differences[0].worst_absolute->index, (std::vector<std::int64_t>{0}));
}

TEST_F(ToleranceTest, DtypesAreWidened) {
  const std::vector<std::uint16_t> bfloats = {0x3f80, 0x4049};  // 1, 3.140625
  const std::vector<float> floats = {1, 3.14159f};
  EXPECT_TRUE(compared(DType::float32, floats, DType::bfloat16, bfloats, Tolerance{0, 1e-3}).same());
  EXPECT_FALSE(compared(DType::float32, floats, DType::bfloat16, bfloats, Tolerance{0, 1e-5}).same());
  EXPECT_EQ(compared(DType::float32, floats, DType::bfloat16, bfloats, std::nullopt).differences.at(0).kind,
            Difference::Kind::dtype);
  const std::vector<std::int32_t> integers = {1, 3};
  EXPECT_EQ(compared(DType::int32, integers, DType::float32, floats, Tolerance{}).differences[0].differing_elements,
            1u);
  EXPECT_TRUE(compared(DType::int32, integers, DType::float32, floats, Tolerance{0.2, 0}).same());
  const std::vector<std::uint8_t> bools = {1, 0};
  EXPECT_TRUE(compared(DType::bool_, bools, DType::int32, std::vector<std::int32_t>{1, 0}, Tolerance{}).same());
  const std::vector<float> complex = {1, 2, 3, 4};
  EXPECT_EQ(compared(DType::complex64, complex, DType::float32, floats, Tolerance{}).differences.at(0).kind,
            Difference::Kind::dtype);
}

TEST_F(ToleranceTest, IntegersOf64BitsAreExact) {
  const std::vector<std::int64_t> a = {INT64_MAX, INT64_MIN, -1}, b = {INT64_MAX - 1, INT64_MIN, -1};
  const DiffReport report = compared(DType::int64, a, DType::int64, b, Tolerance{});
  ASSERT_EQ(report.differences.size(), 1u);
  EXPECT_EQ(report.differences[0].differing_elements, 1u);
  EXPECT_EQ(report.differences[0].worst_absolute->value, 1);
  EXPECT_TRUE(compared(DType::int64, a, DType::int64, b, Tolerance{1, 0}).same());
  const std::vector<std::uint64_t> large = {UINT64_MAX};
  const DiffReport mixed =
      compared(DType::int64, std::vector<std::int64_t>{-1}, DType::uint64, large, Tolerance{1e18, 0});
  EXPECT_EQ(mixed.differences.at(0).worst_absolute->value, 0x1p64);
  EXPECT_TRUE(compared(DType::uint64, large, DType::uint64, large, Tolerance{}).same());
}

TEST_F(ToleranceTest, ComplexNumbersDifferByAMagnitude) {
  const std::vector<float> a = {3, 4, 1, 1}, b = {0, 0, 1, 1};
  const DiffReport report = compared(DType::complex64, a, DType::complex64, b, Tolerance{4.9, 0});
  ASSERT_EQ(report.differences.size(), 1u);
  EXPECT_EQ(report.differences[0].worst_absolute->value, 5);
  EXPECT_TRUE(compared(DType::complex64, a, DType::complex64, b, Tolerance{5, 0}).same());
}

TEST_F(ToleranceTest, ElementsWithoutNumbersCompareBitByBit) {
  const std::vector<std::uint8_t> a = {0x12}, b = {0x13};
  const DiffReport report = compared(DType::float4_e2m1fn_x2, a, DType::float4_e2m1fn_x2, b, Tolerance{100, 1});
  ASSERT_EQ(report.differences.size(), 1u);
  EXPECT_FALSE(report.differences[0].worst_absolute);
}

TEST_F(ToleranceTest, ThreadsDoNotChangeTheReport) {
  std::vector<float> a, b;
  for (int i = 0; i < 1000000; ++i) {
    a.push_back(static_cast<float>(i % 1000));
    b.push_back(i % 7 == 0 ? a.back() + 0.25f * static_cast<float>(i % 5) : a.back());
  }
  const auto text = [&](std::size_t jobs, const std::optional<Tolerance>& tolerance) {
    return to_string(compared(DType::float32, a, DType::float32, b, tolerance, jobs).differences.at(0));
  };
  for (const auto& tolerance : {std::optional<Tolerance>(), std::optional(Tolerance{0.3, 1e-4})}) {
    const std::string expected = text(1, tolerance);
    for (const std::size_t jobs : {2, 5}) EXPECT_EQ(text(jobs, tolerance), expected);
  }
}

RC_GTEST_PROP(ToleranceProperty, ElementsDifferAsInTheFormula, ()) {
  const std::vector<double> special = {0, -0.0, 1, -1, 1e300, kDiffInf, -kDiffInf, kDiffNan};
  const auto any_number = [&] {
    const std::int64_t n = testing::any_between(-20, 20);
    return n > 12 ? special[static_cast<std::size_t>(n - 13)] : static_cast<double>(n) / 8;
  };
  const Tolerance tolerance{static_cast<double>(testing::any_between(0, 4)) / 8,
                            static_cast<double>(testing::any_between(0, 4)) / 8, *rc::gen::arbitrary<bool>()};
  std::vector<double> a(static_cast<std::size_t>(testing::any_between(1, 40))), b(a.size());
  std::uint64_t expected = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = any_number();
    b[i] = any_number();
    bool equal = a[i] == b[i] || (tolerance.equal_nan && std::isnan(a[i]) && std::isnan(b[i]));
    if (std::isfinite(a[i]) && std::isfinite(b[i])) {
      equal = equal || std::fabs(a[i] - b[i]) <= tolerance.atol + tolerance.rtol * std::fabs(b[i]);
    }
    expected += equal ? 0 : 1;
  }
  const TemporaryDirectory directory;
  std::vector<std::shared_ptr<const Checkpoint>> opened;
  for (const auto* values : {&a, &b}) {
    SafetensorsFile file;
    file.add("t", DType::float64, {static_cast<std::int64_t>(values->size())}, *values);
    file.write(directory / std::to_string(opened.size()));
    opened.push_back(Checkpoint::open(directory / std::to_string(opened.size())));
  }
  DiffOptions options;
  options.tolerance = tolerance;
  const DiffReport report = diff(opened[0], opened[1], options);
  RC_ASSERT((report.same() ? 0 : report.differences[0].differing_elements) == expected);
}

TEST_F(ToleranceTest, AToleranceIsFiniteAndNotNegative) {
  for (const double value : {-1.0, static_cast<double>(kDiffInf), static_cast<double>(kDiffNan)}) {
    EXPECT_ERROR(compared({1}, {1}, Tolerance{value, 0}), ErrorCode::invalid_argument, "a tolerance is");
    EXPECT_ERROR(compared({1}, {1}, Tolerance{0, value}), ErrorCode::invalid_argument, "a tolerance is");
  }
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

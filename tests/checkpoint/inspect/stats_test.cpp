#include "tessera/checkpoint/inspect/stats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "support/box_generators.h"
#include "support/error_matchers.h"
#include "support/safetensors_file.h"
#include "support/torch_file.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using testing::SafetensorsFile;
using testing::TemporaryDirectory;
using testing::TorchFile;

constexpr double kStatsInf = std::numeric_limits<double>::infinity();
constexpr double kStatsNan = std::numeric_limits<double>::quiet_NaN();

// The value of a small floating-point type by the definition of its bits. `top` is how the largest exponent is used.
enum class Top { ieee, nan_if_all_ones, nan_is_negative_zero };
double decoded(std::uint32_t bits, int exponent_bits, int mantissa_bits, int bias, Top top) {
  const std::uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const std::uint32_t exponent = (bits >> mantissa_bits) & ((1u << exponent_bits) - 1);
  const double sign = (bits >> (mantissa_bits + exponent_bits)) & 1 ? -1 : 1;
  const std::uint32_t largest = (1u << exponent_bits) - 1;
  if (top == Top::ieee && exponent == largest) return mantissa == 0 ? sign * kStatsInf : kStatsNan;
  if (top == Top::nan_if_all_ones && exponent == largest && mantissa == (1u << mantissa_bits) - 1) return kStatsNan;
  if (top == Top::nan_is_negative_zero && sign < 0 && exponent == 0 && mantissa == 0) return kStatsNan;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1u << mantissa_bits) + mantissa, static_cast<int>(exponent) - bias - mantissa_bits);
}

struct Expected {
  std::uint64_t nans = 0, infs = 0, zeros = 0;
  double min = kStatsNan, max = kStatsNan, mean = kStatsNan, stddev = kStatsNan, norm = 0;  // NaN if there is none
};

// By the definitions, with long double and two passes.
Expected naive(const std::vector<double>& all) {
  Expected expected;
  long double sum = 0, squares = 0, distances = 0, count = 0;
  for (const double value : all) {
    if (std::isnan(value)) {
      ++expected.nans;
      continue;
    }
    expected.infs += std::isinf(value) ? 1 : 0;
    expected.zeros += value == 0 ? 1 : 0;
    expected.min = count == 0 ? value : std::min(expected.min, value);
    expected.max = count == 0 ? value : std::max(expected.max, value);
    sum += value;
    squares += static_cast<long double>(value) * value;
    ++count;
  }
  expected.norm = static_cast<double>(std::sqrt(squares));
  if (count == 0) return expected;
  const long double mean = sum / count;
  expected.mean = static_cast<double>(mean);
  for (const double value : all) {
    if (!std::isnan(value)) distances += (value - mean) * (value - mean);
  }
  if (count > 1) expected.stddev = static_cast<double>(std::sqrt(distances / (count - 1)));
  return expected;
}

double as_double(const std::optional<Number>& number) {
  if (!number) return kStatsNan;
  if (const auto* integer = std::get_if<std::int64_t>(&*number)) return static_cast<double>(*integer);
  if (const auto* integer = std::get_if<std::uint64_t>(&*number)) return static_cast<double>(*integer);
  return std::get<double>(*number);
}

void expect_near(double found, double expected, double scale, const std::string& what) {
  if (std::isnan(expected) || std::isinf(expected)) {
    EXPECT_TRUE(std::isnan(expected) ? std::isnan(found) : found == expected) << what << " " << found;
  } else {
    EXPECT_NEAR(found, expected, 1e-12 * scale) << what;
  }
}

void expect_is(const TensorStats& found, const std::vector<double>& values) {
  const Expected expected = naive(values);
  const std::string name = found.name;
  EXPECT_TRUE(found.is_numeric) << name;
  EXPECT_EQ(found.elements, values.size()) << name;
  EXPECT_EQ(found.nans, expected.nans) << name;
  EXPECT_EQ(found.infs, expected.infs) << name;
  EXPECT_EQ(found.zeros, expected.zeros) << name;
  expect_near(as_double(found.min), expected.min, 0, name + " min");
  expect_near(as_double(found.max), expected.max, 0, name + " max");
  const double scale = std::max(std::fabs(expected.min), std::fabs(expected.max));
  expect_near(as_double(found.mean), expected.mean, scale, name + " mean");
  expect_near(found.stddev.value_or(kStatsNan), expected.stddev, scale, name + " std");
  expect_near(found.norm.value(), expected.norm, expected.norm, name + " norm");
}

std::vector<TensorStats> stats_of(const fs::path& path, std::size_t jobs = 0) {
  StatsOptions options;
  options.jobs = jobs;
  return stats(Checkpoint::open(path), options).tensors;
}

class StatsTest : public ::testing::Test {
 protected:
  const TemporaryDirectory directory_;

  // Writes `file` and returns the statistics of its first tensor.
  TensorStats first_of(const SafetensorsFile& file) {
    file.write(directory_ / "a.safetensors");
    return stats_of(directory_ / "a.safetensors").at(0);
  }
};

TEST_F(StatsTest, EveryValueOfTheSmallFloatingPointTypesCounts) {
  struct Type {
    DType dtype;
    std::uint32_t values;
    std::function<double(std::uint32_t)> decode;
  };
  const std::vector<Type> types = {
      {DType::float16, 1 << 16, [](std::uint32_t b) { return decoded(b, 5, 10, 15, Top::ieee); }},
      {DType::bfloat16, 1 << 16, [](std::uint32_t b) { return decoded(b, 8, 7, 127, Top::ieee); }},
      {DType::float8_e4m3fn, 256, [](std::uint32_t b) { return decoded(b, 4, 3, 7, Top::nan_if_all_ones); }},
      {DType::float8_e5m2, 256, [](std::uint32_t b) { return decoded(b, 5, 2, 15, Top::ieee); }},
      {DType::float8_e4m3fnuz, 256, [](std::uint32_t b) { return decoded(b, 4, 3, 8, Top::nan_is_negative_zero); }},
      {DType::float8_e5m2fnuz, 256, [](std::uint32_t b) { return decoded(b, 5, 2, 16, Top::nan_is_negative_zero); }},
      {DType::float8_e8m0fnu, 256, [](std::uint32_t b) { return b == 255 ? kStatsNan : std::ldexp(1, int(b) - 127); }},
  };
  for (const Type& type : types) {
    for (const bool finite_only : {false, true}) {
      std::vector<std::uint8_t> bytes;
      std::vector<double> values;
      for (std::uint32_t bits = 0; bits < type.values; ++bits) {
        const double value = type.decode(bits);
        if (finite_only && !std::isfinite(value)) continue;
        values.push_back(value);
        bytes.push_back(static_cast<std::uint8_t>(bits));
        if (dtype_size(type.dtype) == 2) bytes.push_back(static_cast<std::uint8_t>(bits >> 8));
      }
      SCOPED_TRACE(std::string(dtype_name(type.dtype)));
      TorchFile file;
      file.storages.push_back(bytes);
      file.add("t", type.dtype, 0, 0, {static_cast<std::int64_t>(values.size())}, {1});
      const fs::path path = directory_ / (std::string(dtype_name(type.dtype)) + (finite_only ? "-finite" : "") + ".pt");
      write_new_file(path, file.bytes());
      expect_is(stats_of(path).at(0), values);
    }
  }
}

template <typename T>
void add_counting(TorchFile& file, std::vector<std::vector<double>>& expected, DType dtype, std::vector<T> values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  file.storages.push_back(bytes);
  file.add(std::string(dtype_name(dtype)), dtype, file.storages.size() - 1, 0,
           {static_cast<std::int64_t>(values.size())}, {1});
  expected.emplace_back(values.begin(), values.end());
}

TEST_F(StatsTest, IntegersBoolsAndWideFloatsAreTheirValues) {
  TorchFile file;
  std::vector<std::vector<double>> expected;
  add_counting<std::int8_t>(file, expected, DType::int8, {-128, 0, 127, 5});
  add_counting<std::uint8_t>(file, expected, DType::uint8, {0, 255, 0, 7});
  add_counting<std::int16_t>(file, expected, DType::int16, {-32768, 32767, 0});
  add_counting<std::uint16_t>(file, expected, DType::uint16, {65535, 1, 0});
  add_counting<std::int32_t>(file, expected, DType::int32, {INT32_MIN, INT32_MAX, 0, 3});
  add_counting<std::uint32_t>(file, expected, DType::uint32, {UINT32_MAX, 2});
  add_counting<std::int64_t>(file, expected, DType::int64, {-5, 10, 0});
  add_counting<std::uint64_t>(file, expected, DType::uint64, {5, 10, 0});
  add_counting<std::uint8_t>(file, expected, DType::bool_, {1, 0, 1, 1});
  add_counting<float>(file, expected, DType::float32, {-0.0f, 1.5f, -3e38f, 1e-45f});
  add_counting<double>(file, expected, DType::float64, {0.1, -0.0, 1e-300, 2});
  write_new_file(directory_ / "a.pt", file.bytes());
  const std::vector<TensorStats> found = stats_of(directory_ / "a.pt");
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) expect_is(found[i], expected[i]);
}

TEST_F(StatsTest, TheRangeOfIntegersIsExact) {
  SafetensorsFile file;
  file.add<std::int64_t>("signed", DType::int64, {3}, {INT64_MIN + 1, INT64_MAX - 1, 0});
  file.add<std::uint64_t>("unsigned", DType::uint64, {2}, {UINT64_MAX - 1, (1ull << 53) + 1});
  file.write(directory_ / "a.safetensors");
  const std::vector<TensorStats> found = stats_of(directory_ / "a.safetensors");
  EXPECT_EQ(found[0].min, Number(INT64_MIN + 1));
  EXPECT_EQ(found[0].max, Number(INT64_MAX - 1));
  EXPECT_EQ(found[1].min, Number(std::uint64_t{(1ull << 53) + 1}));
  EXPECT_EQ(found[1].max, Number(std::uint64_t{UINT64_MAX - 1}));
  EXPECT_EQ(to_string(*found[1].max), "18446744073709551614");
}

TEST_F(StatsTest, NanIsLeftOutAndInfinitiesCount) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> cases = {
      {nan, 1, 2, nan}, {inf, 1}, {-inf, 5}, {inf, -inf, 3}, {nan, nan}, {inf}, {-inf, nan}, {}, {0, -0.0f}, {7}};
  for (const std::vector<float>& values : cases) {
    SafetensorsFile file;
    file.add("t", DType::float32, {static_cast<std::int64_t>(values.size())}, values);
    expect_is(first_of(file), {values.begin(), values.end()});
  }
}

TEST_F(StatsTest, OneElementHasNoDeviationAndNoElementNothingButANorm) {
  SafetensorsFile file;
  file.add<float>("one", DType::float32, {}, {-3});
  file.add<float>("none", DType::float32, {0, 4}, {});
  file.write(directory_ / "a.safetensors");
  const std::vector<TensorStats> found = stats_of(directory_ / "a.safetensors");
  const TensorStats& one = found[0].name == "one" ? found[0] : found[1];
  const TensorStats& none = found[0].name == "one" ? found[1] : found[0];
  EXPECT_EQ(one.mean, Number(-3.0));
  EXPECT_FALSE(one.stddev);
  EXPECT_EQ(one.norm, 3.0);
  EXPECT_FALSE(none.min || none.max || none.mean || none.stddev);
  EXPECT_EQ(none.norm, 0.0);
}

TEST_F(StatsTest, ASmallDeviationFromALargeMeanIsNotLost) {
  std::vector<double> values;
  for (int i = 0; i < 100000; ++i) values.push_back(1e9 + (i % 2 == 0 ? 1e-3 : -1e-3));
  SafetensorsFile file;
  file.add("t", DType::float64, {static_cast<std::int64_t>(values.size())}, values);
  const TensorStats found = first_of(file);
  EXPECT_NEAR(*found.stddev, 1e-3, 1e-7);
  EXPECT_NEAR(std::get<double>(*found.mean), 1e9, 1e-6);
}

TEST_F(StatsTest, SquaresNeitherOverflowNorUnderflow) {
  for (const double scale : {1e300, 1e200, 1e-200, 1e-305}) {
    // Zeros fill blocks of their own, before and after.
    std::vector<double> values(5000, 0.0);
    for (int i = 0; i < 3000; ++i) values.push_back(scale * (i % 3 + 1));
    values.resize(values.size() + 5000, 0.0);
    std::vector<double> unscaled;
    for (const double value : values) unscaled.push_back(value / scale);
    SafetensorsFile file;
    file.add("t", DType::float64, {static_cast<std::int64_t>(values.size())}, values);
    const TensorStats found = first_of(file);
    const Expected expected = naive(unscaled);
    EXPECT_NEAR(*found.norm / scale, expected.norm, 1e-11 * expected.norm) << scale;
    EXPECT_NEAR(*found.stddev / scale, expected.stddev, 1e-11) << scale;
    EXPECT_NEAR(std::get<double>(*found.mean) / scale, expected.mean, 1e-11) << scale;
  }
}

TEST_F(StatsTest, ComplexNumbersAreMeasuredByTheirMagnitude) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  SafetensorsFile file;
  file.add<float>("t", DType::complex64, {4}, {3, 4, 0, 0, -1, 2, nan, 5});
  const TensorStats found = first_of(file);
  EXPECT_EQ(found.elements, 4u);
  EXPECT_EQ(found.nans, 1u);
  EXPECT_EQ(found.zeros, 1u);
  EXPECT_FALSE(found.min || found.max);
  EXPECT_DOUBLE_EQ(*found.norm, std::sqrt(25.0 + 5.0));
  const auto mean = std::get<std::complex<double>>(*found.mean);
  EXPECT_DOUBLE_EQ(mean.real(), 2.0 / 3);
  EXPECT_DOUBLE_EQ(mean.imag(), 2.0);
  double distances = 0;
  for (const std::complex<double> value : {std::complex<double>(3, 4), {0, 0}, {-1, 2}}) {
    distances += std::norm(value - mean);
  }
  EXPECT_DOUBLE_EQ(*found.stddev, std::sqrt(distances / 2));
  SafetensorsFile infinite;
  infinite.add<float>("t", DType::complex64, {2}, {1, -inf, 1, 2});
  const TensorStats other = first_of(infinite);
  EXPECT_EQ(other.infs, 1u);
  EXPECT_EQ(*other.norm, kStatsInf);
  EXPECT_EQ(to_string(*other.mean), "(1-infj)");
}

TEST_F(StatsTest, AByteOfFloat4IsTwoNumbers) {
  TorchFile file;
  file.storages.push_back({0x72, 0xf0});  // 1 and 6, 0 and -6
  file.add("t", DType::float4_e2m1fn_x2, 0, 0, {2}, {1});
  write_new_file(directory_ / "a.pt", file.bytes());
  expect_is(stats_of(directory_ / "a.pt").at(0), {1, 6, 0, -6});
}

TEST_F(StatsTest, ElementsWithoutNumbersHaveOnlyASize) {
  TorchFile file;
  file.storages.push_back({1, 2, 3});
  file.add("t", DType::bits8, 0, 0, {3}, {1});
  write_new_file(directory_ / "a.pt", file.bytes());
  const TensorStats found = stats_of(directory_ / "a.pt").at(0);
  EXPECT_FALSE(found.is_numeric);
  EXPECT_EQ(found.size_bytes, 3u);
  EXPECT_EQ(found.elements, 0u);
  EXPECT_FALSE(found.norm || found.min || found.mean);
}

void expect_same_bits(const TensorStats& a, const TensorStats& b, const std::string& what) {
  const auto bits = [](double value) { return std::bit_cast<std::uint64_t>(value); };
  EXPECT_EQ(a.name, b.name) << what;
  EXPECT_EQ(bits(as_double(a.mean)), bits(as_double(b.mean))) << what << " " << a.name;
  EXPECT_EQ(bits(*a.stddev), bits(*b.stddev)) << what << " " << a.name;
  EXPECT_EQ(bits(*a.norm), bits(*b.norm)) << what << " " << a.name;
  EXPECT_EQ(a.min, b.min) << what;
  EXPECT_EQ(a.max, b.max) << what;
}

TEST_F(StatsTest, ThreadsAndChunksDoNotChangeABit) {
  // Several pieces of 1 MiB, of numbers whose sums are all rounded.
  constexpr std::int64_t kRows = 4400, kColumns = 700;
  std::vector<float> values;
  std::uint32_t state = 1;
  for (std::int64_t i = 0; i < kRows * kColumns; ++i) {
    state = state * 1664525 + 1013904223;
    values.push_back(static_cast<float>(state) * 1e-7f - 50);
  }
  SafetensorsFile file;
  file.add("matrix", DType::float32, {kRows, kColumns}, values);
  file.write(directory_ / "a.safetensors");
  const TensorStats expected = stats_of(directory_ / "a.safetensors", 1).at(0);
  expect_is(expected, {values.begin(), values.end()});
  // Pieces end in any order.
  for (const std::size_t jobs : {2, 3, 7, 7, 7, 7}) {
    expect_same_bits(stats_of(directory_ / "a.safetensors", jobs).at(0), expected, std::to_string(jobs) + " threads");
  }
  for (const auto& [ranks, dim] : std::vector<std::pair<int, int>>{{2, 0}, {5, 0}, {3, 1}}) {
    ReshardOptions options;
    options.ranks = ranks;
    options.dim = dim;
    const std::string name = std::to_string(ranks) + " ranks along " + std::to_string(dim);
    reshard(Checkpoint::open(directory_ / "a.safetensors"), directory_ / name, options);
    expect_same_bits(stats_of(directory_ / name, 3).at(0), expected, name);
  }
  TorchFile by_columns;
  by_columns.storages.emplace_back(values.size() * 4);
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (std::int64_t column = 0; column < kColumns; ++column) {
      std::memcpy(by_columns.storages[0].data() + (column * kRows + row) * 4, &values[row * kColumns + column], 4);
    }
  }
  by_columns.add("matrix", DType::float32, 0, 0, {kRows, kColumns}, {1, kRows});
  write_new_file(directory_ / "columns.pt", by_columns.bytes());
  expect_same_bits(stats_of(directory_ / "columns.pt", 2).at(0), expected, "columns");
}

RC_GTEST_PROP(StatsProperty, RandomNumbersHaveTheStatisticsOfTheDefinitions, ()) {
  const std::vector<double> special = {0, -0.0, 1, -1, 1e-40, 3e38, kStatsInf, -kStatsInf, kStatsNan};
  const bool has_special = *rc::gen::arbitrary<bool>();
  const double offset = static_cast<double>(testing::any_between(-3, 3)) * 1000;
  std::vector<float> values(static_cast<std::size_t>(testing::any_between(0, 5000)));
  std::uint64_t state = static_cast<std::uint64_t>(testing::any_between(1, 1 << 30));
  for (float& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const std::uint64_t random = state >> 33;
    value = static_cast<float>(has_special && random % 100 == 0 ? special[random / 100 % special.size()]
                                                                : static_cast<double>(random) * 1e-6 + offset);
  }
  const TemporaryDirectory directory;
  SafetensorsFile file;
  file.add("t", DType::float32, {static_cast<std::int64_t>(values.size())}, values);
  file.write(directory / "a.safetensors");
  const auto jobs = static_cast<std::size_t>(testing::any_between(1, 4));
  expect_is(stats_of(directory / "a.safetensors", jobs).at(0), {values.begin(), values.end()});
  RC_ASSERT(!::testing::Test::HasFailure());
}

TEST_F(StatsTest, TheTotalIsOfAllTensorsAndASelectionLimitsIt) {
  SafetensorsFile file;
  file.add<float>("a.x", DType::float32, {2}, {3, 0});
  file.add<std::int32_t>("a.y", DType::int32, {1}, {4});
  file.add<float>("b", DType::float32, {1}, {std::numeric_limits<float>::infinity()});
  file.write(directory_ / "a.safetensors");
  const auto checkpoint = Checkpoint::open(directory_ / "a.safetensors");
  const StatsReport all = stats(checkpoint);
  EXPECT_EQ(all.tensors.size(), 3u);
  EXPECT_EQ(all.bytes, 16u);
  EXPECT_EQ(all.elements, 4u);
  EXPECT_EQ(all.zeros, 1u);
  EXPECT_EQ(all.infs, 1u);
  EXPECT_EQ(all.norm, kStatsInf);
  StatsOptions options;
  options.selection.select = {"a.*"};
  const StatsReport some = stats(checkpoint, options);
  EXPECT_EQ(some.tensors.size(), 2u);
  EXPECT_DOUBLE_EQ(some.norm, 5.0);
  options.tensors = {*checkpoint->find_tensor("a.y"), *checkpoint->find_tensor("b")};
  EXPECT_EQ(stats(checkpoint, options).tensors.size(), 1u);
}

TEST_F(StatsTest, SortedByAnyKey) {
  SafetensorsFile file;
  file.add<float>("b", DType::float32, {2}, {1, 5});
  file.add<float>("a", DType::float32, {2}, {-1, 9});
  file.add<float>("c", DType::float32, {1}, {2});
  file.write(directory_ / "a.safetensors");
  std::vector<TensorStats> tensors = stats_of(directory_ / "a.safetensors");
  const auto sorted = [&](std::string_view key) {
    sort_stats(tensors, find_stats_key(key).value());
    std::string names;
    for (const TensorStats& tensor : tensors) names += tensor.name;
    return names;
  };
  EXPECT_EQ(sorted("name"), "abc");
  EXPECT_EQ(sorted("min"), "abc");
  EXPECT_EQ(sorted("max"), "abc");
  EXPECT_EQ(sorted("mean"), "abc");
  EXPECT_EQ(sorted("std"), "abc");  // c has none
  EXPECT_EQ(sorted("size"), "abc");
  EXPECT_EQ(sorted("norm"), "abc");
  tensors[0].nans = 0;
  tensors[1].nans = 2;
  tensors[2].nans = 1;
  EXPECT_EQ(sorted("nan"), "bca");
  EXPECT_FALSE(find_stats_key("median"));
}

TEST_F(StatsTest, DamageIsAnError) {
  TorchFile file;
  file.storages.push_back(Bytes(4000, 1));
  file.add("t", DType::float32, 0, 0, {10, 100}, {100, 1});
  Bytes bytes = file.bytes();
  write_new_file(directory_ / "good.pt", bytes);
  const Extent extent = Checkpoint::open(directory_ / "good.pt")->locate(0, 0);
  bytes[extent.offset_bytes + 1234] ^= 1;
  write_new_file(directory_ / "bad.pt", bytes);
  EXPECT_ERROR(stats_of(directory_ / "bad.pt"), ErrorCode::corrupt, "bad.pt at byte", "tensor 't'", "CRC-32");
  SafetensorsFile plain;
  plain.add("t", DType::float32, {1000}, std::vector<float>(1000, 1.0f));
  plain.write(directory_ / "a.safetensors");
  const auto opened = Checkpoint::open(directory_ / "a.safetensors");
  fs::resize_file(directory_ / "a.safetensors", 2000);
  EXPECT_ERROR(stats(opened), ErrorCode::corrupt, "a.safetensors", "tensor 't'");
}

TEST_F(StatsTest, ElementsThatAreRepeatedTooOftenAreRefused) {
  TorchFile file;
  file.storages.push_back(Bytes(4, 1));
  file.add("t", DType::float32, 0, 0, {1 << 20, 1 << 10}, {0, 0});
  write_new_file(directory_ / "a.pt", file.bytes());
  EXPECT_ERROR(stats_of(directory_ / "a.pt"), ErrorCode::unsupported, "tensor 't'", "--expand allows it");
}

TEST_F(StatsTest, ACancellationEndsIt) {
  SafetensorsFile file;
  file.add("t", DType::float32, {1000}, std::vector<float>(1000, 1.0f));
  file.write(directory_ / "a.safetensors");
  Cancellation cancellation;
  cancellation.request();
  StatsOptions options;
  options.cancellation = &cancellation;
  EXPECT_ERROR(stats(Checkpoint::open(directory_ / "a.safetensors"), options), ErrorCode::cancelled, "");
}

}  // namespace
}  // namespace tessera::checkpoint

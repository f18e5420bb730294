#include "tensor/dtensor/random_numbers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "tessera/base/error.h"
#include "tessera/tensor/internal/box_view.h"

namespace tessera {

namespace {

using Sizes = std::vector<std::int64_t>;

// Two pairs of 32 random bits: the numbers of two neighboring elements.
using Words = std::array<std::uint32_t, 4>;

// Philox 4x32, 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
Words philox(std::uint64_t seed, std::uint64_t counter) {
  Words x = {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32), 0, 0};
  auto key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * x[0], b = std::uint64_t{0xCD9E8D57} * x[2];
    x = {static_cast<std::uint32_t>(b >> 32) ^ x[1] ^ key0, static_cast<std::uint32_t>(b),
         static_cast<std::uint32_t>(a >> 32) ^ x[3] ^ key1, static_cast<std::uint32_t>(a)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return x;
}

// Returns a number of [0, 1), of 53 random bits for a double, else of 24, so that it is below 1 in its type.
template <typename T>
T unit(std::uint32_t high, std::uint32_t low) {
  if constexpr (std::is_same_v<T, double>) {
    return static_cast<double>((std::uint64_t{high} << 32 | low) >> 11) * 0x1p-53;
  } else {
    return static_cast<float>(high >> 8) * 0x1p-24F;
  }
}

// Returns -log of a number between 0 and 1, excluding both.
double exponential(std::uint32_t high, std::uint32_t low) {
  return -std::log((static_cast<double>((std::uint64_t{high} << 32 | low) >> 12) + 0.5) * 0x1p-52);
}

// Returns the numbers of the elements 2 * counter and 2 * counter + 1; normal ones by Box and Muller's method.
template <typename T>
std::array<T, 2> numbers_of(std::uint64_t seed, std::uint64_t counter, Distribution distribution) {
  const Words words = philox(seed, counter);
  if (distribution == Distribution::uniform) return {unit<T>(words[0], words[1]), unit<T>(words[2], words[3])};
  if (distribution == Distribution::exponential) {
    return {static_cast<T>(exponential(words[0], words[1])), static_cast<T>(exponential(words[2], words[3]))};
  }
  const double radius = std::sqrt(-2 * std::log(unit<double>(words[0], words[1]) + 0x1p-53));
  const double angle = 2 * std::numbers::pi * unit<double>(words[2], words[3]);
  return {static_cast<T>(radius * std::cos(angle)), static_cast<T>(radius * std::sin(angle))};
}

// Writes the numbers of `count` elements of the full tensor from element `first` on.
template <typename T>
void fill_run(T* out, std::int64_t count, std::uint64_t first, const PhiloxGenerator& from, Distribution distribution) {
  std::array<T, 2> numbers = {};
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t element = first + static_cast<std::uint64_t>(i);
    if (i == 0 || element % 2 == 0) numbers = numbers_of<T>(from.seed, from.offset + element / 2, distribution);
    out[i] = numbers[element % 2];
  }
}

// Calls run(i, first) for each run of elements of a box that are neighbors in the full tensor: the i-th has the
// elements from `first` on. All are as long as the last dimension of the box.
template <typename F>
void each_run(const Box& box, const Sizes& size, const F& run) {
  const std::size_t outer = size.empty() ? 0 : size.size() - 1;
  std::int64_t runs = 1;
  for (std::size_t d = 0; d < outer; ++d) runs *= box.sizes[d];
  for (std::int64_t i = 0; i < runs; ++i) {
    std::int64_t rest = i, first = size.empty() ? 0 : box.offsets[outer], stride = size.empty() ? 1 : size[outer];
    for (std::size_t d = outer; d-- > 0; stride *= size[d]) {
      first += (box.offsets[d] + rest % box.sizes[d]) * stride;
      rest /= box.sizes[d];
    }
    run(i, static_cast<std::uint64_t>(first));
  }
}

template <typename T>
at::Tensor random_box(const Box& box, const Sizes& size, const PhiloxGenerator& from, Distribution distribution) {
  at::Tensor elements = at::empty(box.sizes, at::CppTypeToScalarType<T>::value);
  const std::int64_t length = box.sizes.empty() ? 1 : box.sizes.back();
  T* out = elements.template data_ptr<T>();
  each_run(box, size,
           [&](std::int64_t i, std::uint64_t first) { fill_run(out + i * length, length, first, from, distribution); });
  return elements;
}

}  // namespace

int digits_of(at::ScalarType dtype) {
  if (at::isFloatingType(dtype) && c10::elementSize(dtype) == 1) {
    // Of 8 bits there are several kinds, whose greatest number below 1 differs.
    int digits = 1;
    const auto below_1 = [&](int n) { return at::full({}, 1 - std::ldexp(1.0, -n), at::kDouble).to(dtype); };
    while (below_1(digits + 1).to(at::kDouble).item<double>() < 1) ++digits;
    return digits;
  }
  if (dtype == at::kHalf) return 11;
  if (dtype == at::kBFloat16) return 8;
  if (dtype == at::kFloat) return std::numeric_limits<float>::digits;
  return dtype == at::kDouble ? std::numeric_limits<double>::digits : 64;
}

at::Tensor random_local(const MeshLayout& layout, const Sizes& coordinate, const at::TensorOptions& options,
                        const PhiloxGenerator& from, Distribution distribution) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  if (!at::isFloatingType(dtype)) {
    fail(ErrorCode::invalid_argument, "random tensor of size {} of {}: expected a floating-point dtype",
         shape_to_string(layout.size()), c10::toString(dtype));
  }
  at::Tensor local = at::empty(layout.local_shape(coordinate).sizes, options);
  if (local.is_meta()) return local;
  const int digits = digits_of(dtype);
  for (const LocalBox& box : layout.local_boxes(coordinate)) {
    const at::Tensor elements = dtype == at::kDouble ? random_box<double>(box.box, layout.size(), from, distribution)
                                                     : random_box<float>(box.box, layout.size(), from, distribution);
    if (distribution == Distribution::uniform && digits < std::numeric_limits<float>::digits) {
      elements.mul_(std::ldexp(1.0, digits)).floor_().mul_(std::ldexp(1.0, -digits));  // the dtype might round up to 1
    }
    box_view(local, {box.local_offsets, box.box.sizes}).copy_(elements);
  }
  return local;
}

void advance(PhiloxGenerator& generator, std::int64_t elements) {
  generator.offset += (static_cast<std::uint64_t>(elements) + 1) / 2;
}

}  // namespace tessera

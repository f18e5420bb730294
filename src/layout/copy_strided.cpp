#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/layout/byte_ranges.h"

namespace tessera {
namespace {

struct Dimension {
  std::int64_t size;
  std::int64_t source_bytes;  // from one index to the next
  std::int64_t destination_bytes;
};

// Returns the same copy in as few dimensions as possible, ordered by descending step in the destination.
std::vector<Dimension> coalesced(std::span<const std::int64_t> sizes, std::int64_t element_bytes,
                                 std::span<const std::int64_t> source_strides,
                                 std::span<const std::int64_t> destination_strides) {
  std::vector<Dimension> dimensions;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1) continue;
    dimensions.push_back({sizes[d], source_strides[d] * element_bytes, destination_strides[d] * element_bytes});
  }
  std::stable_sort(dimensions.begin(), dimensions.end(),
                   [](const Dimension& a, const Dimension& b) { return a.destination_bytes > b.destination_bytes; });
  std::size_t kept = 0;
  for (std::size_t d = 1; d < dimensions.size(); ++d) {
    Dimension& outer = dimensions[kept];
    const Dimension inner = dimensions[d];
    if (outer.source_bytes == inner.source_bytes * inner.size &&
        outer.destination_bytes == inner.destination_bytes * inner.size) {
      outer = {outer.size * inner.size, inner.source_bytes, inner.destination_bytes};
    } else {
      dimensions[++kept] = inner;
    }
  }
  if (!dimensions.empty()) dimensions.resize(kept + 1);
  return dimensions;
}

// Calls copy(source, destination) for every index of `outer`.
template <typename Copy>
void for_each_index(std::span<const Dimension> outer, const std::uint8_t* source, std::uint8_t* destination,
                    const Copy& copy) {
  std::vector<std::int64_t> index(outer.size(), 0);
  for (;;) {
    copy(source, destination);
    std::size_t d = outer.size();
    for (; d > 0; --d) {
      const Dimension& dimension = outer[d - 1];
      source += dimension.source_bytes;
      destination += dimension.destination_bytes;
      if (++index[d - 1] < dimension.size) break;
      source -= dimension.source_bytes * dimension.size;
      destination -= dimension.destination_bytes * dimension.size;
      index[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

// Copies units of `kBytes` bytes; the constant size makes each memcpy a single move.
template <std::size_t kBytes>
void copy_line(const Dimension& line, const std::uint8_t* source, std::uint8_t* destination) {
  for (std::int64_t i = 0; i < line.size; ++i) {
    std::memcpy(destination + i * line.destination_bytes, source + i * line.source_bytes, kBytes);
  }
}

// As many units of `kBytes` bytes as a vector register has.
template <std::size_t kBytes>
struct Vectors {
  using Unit = std::conditional_t<
      kBytes == 1, std::uint8_t,
      std::conditional_t<kBytes == 2, std::uint16_t, std::conditional_t<kBytes == 4, std::uint32_t, std::uint64_t>>>;
  typedef Unit Vector __attribute__((vector_size(16)));  // NOLINT(modernize-use-using): an alias drops the attribute
  static constexpr std::size_t kCount = 16 / sizeof(Unit);
  struct Row {
    Vector lanes;
  };
  using Block = std::array<Row, kCount>;

  // Transposes a square of units. Each round moves the highest bit of the row to the lowest of the lane, and the
  // highest of the lane to the lowest of the row.
  static void transpose(Block& rows) { transpose(rows, std::make_index_sequence<kCount>()); }

 private:
  template <std::size_t... kLane>
  static void transpose(Block& rows, std::index_sequence<kLane...> /*lanes*/) {
    for (std::size_t round = 1; round < kCount; round *= 2) {
      Block next;
      for (std::size_t i = 0; i < kCount / 2; ++i) {
        const Vector a = rows[i].lanes, b = rows[i + kCount / 2].lanes;
        next[2 * i].lanes = __builtin_shufflevector(a, b, (kLane / 2 + kLane % 2 * kCount)...);
        next[2 * i + 1].lanes = __builtin_shufflevector(a, b, (kCount / 2 + kLane / 2 + kLane % 2 * kCount)...);
      }
      rows = next;
    }
  }
};

// Transposes: `across` is contiguous in the source, `along` in the destination. Copies through a small square tile, so
// that both sides are accessed in full cache lines, each only once, whatever the strides.
template <std::size_t kBytes>
void copy_transposed(const Dimension& across, const Dimension& along, const std::uint8_t* source,
                     std::uint8_t* destination) {
  constexpr std::int64_t kUnit = kBytes, kSide = kBytes <= 4 ? 64 : 32;
  alignas(64) std::array<std::uint8_t, kSide * kSide * kBytes> square;
  for (std::int64_t j = 0; j < along.size; j += kSide) {
    const std::int64_t columns = std::min(kSide, along.size - j);
    for (std::int64_t i = 0; i < across.size; i += kSide) {
      const std::int64_t rows = std::min(kSide, across.size - i);
      const std::uint8_t* const from = source + j * along.source_bytes + i * kUnit;
      std::int64_t moved_rows = 0, moved_columns = 0;
      if constexpr (kBytes < 16) {
        using Square = Vectors<kBytes>;
        constexpr auto kCount = static_cast<std::int64_t>(Square::kCount);
        moved_rows = rows / kCount * kCount;
        moved_columns = columns / kCount * kCount;
        for (std::int64_t column = 0; column < moved_columns; column += kCount) {
          for (std::int64_t row = 0; row < moved_rows; row += kCount) {
            typename Square::Block block;
            for (std::int64_t k = 0; k < kCount; ++k) {
              std::memcpy(&block[static_cast<std::size_t>(k)], from + (column + k) * along.source_bytes + row * kUnit,
                          16);
            }
            Square::transpose(block);
            for (std::int64_t k = 0; k < kCount; ++k) {
              std::memcpy(square.data() + ((row + k) * kSide + column) * kUnit, &block[static_cast<std::size_t>(k)],
                          16);
            }
          }
        }
      }
      for (std::int64_t column = 0; column < columns; ++column) {
        for (std::int64_t row = column < moved_columns ? moved_rows : 0; row < rows; ++row) {
          std::memcpy(square.data() + (row * kSide + column) * kUnit, from + column * along.source_bytes + row * kUnit,
                      kBytes);
        }
      }
      for (std::int64_t row = 0; row < rows; ++row) {
        std::memcpy(destination + (i + row) * across.destination_bytes + j * along.destination_bytes,
                    square.data() + row * kSide * kUnit, static_cast<std::size_t>(columns * kUnit));
      }
    }
  }
}

template <std::size_t kBytes>
void copy_units(std::vector<Dimension>& dimensions, const std::uint8_t* source, std::uint8_t* destination) {
  const Dimension along = dimensions.back();
  dimensions.pop_back();
  const auto across = std::ranges::find(dimensions, static_cast<std::int64_t>(kBytes), &Dimension::source_bytes);
  if (along.destination_bytes == static_cast<std::int64_t>(kBytes) && across != dimensions.end()) {
    const Dimension row = *across;
    dimensions.erase(across);
    for_each_index(dimensions, source, destination,
                   [&](const std::uint8_t* from, std::uint8_t* to) { copy_transposed<kBytes>(row, along, from, to); });
  } else {
    for_each_index(dimensions, source, destination,
                   [&](const std::uint8_t* from, std::uint8_t* to) { copy_line<kBytes>(along, from, to); });
  }
}

}  // namespace

void copy_strided(std::span<const std::int64_t> sizes, std::int64_t element_bytes, const std::uint8_t* source,
                  std::span<const std::int64_t> source_strides, std::uint8_t* destination,
                  std::span<const std::int64_t> destination_strides) {
  if (std::ranges::find(sizes, 0) != sizes.end()) return;
  std::vector<Dimension> dimensions = coalesced(sizes, element_bytes, source_strides, destination_strides);
  std::int64_t run_bytes = element_bytes;
  if (!dimensions.empty() && dimensions.back().source_bytes == element_bytes &&
      dimensions.back().destination_bytes == element_bytes) {
    run_bytes *= dimensions.back().size;
    dimensions.pop_back();
  }
  if (dimensions.empty()) {
    std::memcpy(destination, source, static_cast<std::size_t>(run_bytes));
    return;
  }
  switch (run_bytes) {
    case 1:
      return copy_units<1>(dimensions, source, destination);
    case 2:
      return copy_units<2>(dimensions, source, destination);
    case 4:
      return copy_units<4>(dimensions, source, destination);
    case 8:
      return copy_units<8>(dimensions, source, destination);
    case 16:
      return copy_units<16>(dimensions, source, destination);
    default:
      for_each_index(dimensions, source, destination, [&](const std::uint8_t* from, std::uint8_t* to) {
        std::memcpy(to, from, static_cast<std::size_t>(run_bytes));
      });
  }
}

}  // namespace tessera

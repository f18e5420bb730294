/// \file
/// Times the checks of a sharded tensor's metadata: `validate_shards COUNT REPEATS`. Prints one line of JSON:
/// {"chunks", "grid"}, medians in seconds of validate_non_overlapping, check_tensor and infer_sharding_spec together,
/// for COUNT shards in one dimension and for a square grid of about as many shards, both in row-major order.

#include <chrono>
#include <cmath>
#include <iostream>
#include <string>
#include <vector>

#include "measure.h"
#include "tessera/layout/sharding_spec.h"

namespace {

using namespace tessera;
using Size = std::vector<std::int64_t>;

constexpr std::int64_t kRows = 4;  // of a shard, in each sharded dimension
constexpr int kRanks = 1024;

// Shards of a grid of `rows` times `columns` cells, in row-major order.
std::vector<ShardMetadata> make_shards(std::int64_t rows, std::int64_t columns) {
  std::vector<ShardMetadata> shards;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      const auto rank = static_cast<std::int64_t>(shards.size()) % kRanks;
      shards.emplace_back(Size{row * kRows, column * kRows}, Size{kRows, kRows}, RemoteDevice(rank, Device{}));
    }
  }

  return shards;
}

double median_seconds(std::int64_t rows, std::int64_t columns, int repeats) {
  const std::vector<ShardMetadata> shards = make_shards(rows, columns);
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    validate_non_overlapping(shards);
    check_tensor(shards, Size{rows * kRows, columns * kRows});
    infer_sharding_spec(shards);
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return bench::median(times);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: validate_shards COUNT REPEATS\n";
    return 2;
  }
  try {
    const std::int64_t count = std::stoll(argv[1]);
    const auto side = static_cast<std::int64_t>(std::sqrt(static_cast<double>(count)));
    const int repeats = std::stoi(argv[2]);
    std::cout << "{\"chunks\": " << median_seconds(count, 1, repeats)
              << ", \"grid\": " << median_seconds(side, side, repeats) << "}\n";
  } catch (const std::exception& error) {
    std::cerr << "validate_shards: " << error.what() << '\n';
    return 3;
  }
}

#pragma once
/// \file
/// A counter-based generator of random numbers for DTensors: each element's number depends only on the seed, on the
/// elements drawn before, and on the element's place in the full tensor. So a tensor is the same on any mesh.
///
/// The numbers are those of Philox 4x32 with 10 rounds; they are not PyTorch's. A value: all ranks must hold generators
/// in the same state. Save `seed` and `offset` to resume a sequence.

#include <cstdint>

namespace tessera {

struct PhiloxGenerator {
  std::uint64_t seed = 0;
  /// The number of pairs of elements drawn so far. A tensor of n elements advances it by (n + 1) / 2.
  std::uint64_t offset = 0;

  explicit PhiloxGenerator(std::uint64_t seed_in, std::uint64_t offset_in = 0) : seed(seed_in), offset(offset_in) {}
  bool operator==(const PhiloxGenerator&) const = default;
};

}  // namespace tessera

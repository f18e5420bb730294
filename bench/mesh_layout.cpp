/// \file
/// Times compute_local_shape_and_global_offset: `mesh_layout TENSORS`. For two-dimensional tensors on a mesh of
/// 16 x 16 x 16 ranks, with the placements [R, S(0), S(1)], [S(0), S(0), S(1)], [_S(0, 16), S(0), R] and
/// [S(0), S(0), S(0)] in turn and uneven sizes, it computes the local shape of one rank. pytorch/mesh_layout.py does
/// the same with PyTorch. Prints one line of JSON: {"seconds"}, the median of 5, and {"elements"}, the sum over all
/// local shapes, which both sides must agree on.

#include <chrono>
#include <iostream>
#include <string>
#include <vector>

#include "measure.h"
#include "tessera/layout/mesh_layout.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: mesh_layout TENSORS\n";
    return 2;
  }
  using namespace tessera;
  const Placement R = Placement::replicate(), S0 = Placement::shard(0), S1 = Placement::shard(1);
  const std::vector<Placements> placements = {
      {R, S0, S1}, {S0, S0, S1}, {Placement::strided_shard(0, 16), S0, R}, {S0, S0, S0}};
  const std::vector<std::int64_t> coordinate = {3, 5, 7};
  const std::int64_t tensors = std::stoll(argv[1]);
  std::vector<double> times;
  std::int64_t elements = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    elements = 0;
    for (std::int64_t i = 0; i < tensors; ++i) {
      const LocalShape local = compute_local_shape_and_global_offset(
          {1000 + i % 4096, 500 + i % 1024}, {16, 16, 16}, coordinate, placements[static_cast<std::size_t>(i % 4)]);
      elements += local.sizes[0] * local.sizes[1];
    }
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::cout << "{\"seconds\": " << bench::median(times) << ", \"elements\": " << elements << "}\n";
}

/// \file
/// Times the plans of redistributions of a tensor of 8192 x 8192 on 1,024 ranks: `redistribution_plan`. Each is planned
/// for one rank, first and again, when it is known. pytorch/redistribution_plan.py does the same with PyTorch's
/// planner. Prints one line of JSON: {CASE: {"first", "again", "moves"}}, medians in seconds.

#include <chrono>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "measure.h"
#include "tensor/dtensor/rank_redistribution.h"

namespace {

using namespace tessera;

struct Case {
  std::string name;
  std::vector<std::int64_t> mesh;
  Placements from, to;
};

template <typename F>
double seconds_of(const F& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

int main() {
  const Placement R = Placement::replicate(), S0 = Placement::shard(0), S1 = Placement::shard(1);
  const std::vector<Case> cases = {{"gather_1d", {1024}, {S0}, {R}},
                                   {"all_to_all_1d", {1024}, {S0}, {S1}},
                                   {"gather_2d", {32, 32}, {S0, S1}, {R, R}},
                                   {"all_to_all_2d", {32, 32}, {S0, R}, {S1, R}},
                                   {"gather_3d", {16, 8, 8}, {S0, S0, S1}, {R, R, R}}};
  constexpr int kRepeats = 21;
  std::string separator = "{";
  for (const Case& each : cases) {
    std::vector<double> first, again;
    std::size_t moves = 0;
    for (int i = 0; i < kRepeats; ++i) {
      const std::vector<std::int64_t> size = {8192, 8192 + i};  // a size that was not planned before
      const MeshLayout from(size, each.mesh, each.from), to(size, each.mesh, each.to);
      const auto plan = [&] {
        moves = redistribution_of(from, to, mesh_coordinate(each.mesh, 5))->exchange.moves.size();
      };
      first.push_back(seconds_of(plan));
      again.push_back(seconds_of(plan));
    }
    std::cout << separator << '"' << each.name << "\": {\"first\": " << bench::median(first)
              << ", \"again\": " << bench::median(again) << ", \"moves\": " << moves << '}';
    separator = ", ";
  }
  std::cout << "}\n";
}

/// \file
/// Times DTensor::redistribute, and in turn with it the bare collective that moves the same bytes on the same group:
/// `dtensor_bench gather|all_to_all|all_reduce|reduce_scatter BYTES REPEATS`, as each rank of a world.
/// pytorch/dtensor.py does the same with PyTorch's DTensor. Rank 0 prints one line of JSON: {"ours", "bare"}, medians
/// in seconds, and {"side"}, see side.h.
///   gather          S(0) to R           all_to_all      S(0) to S(1)
///   all_reduce      P to R              reduce_scatter  P to S(0)
/// The full tensors are square, of float, and have BYTES bytes. The bare collective writes to memory that is mapped;
/// redistribute allocates its result.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "measure_ranks.h"
#include "side.h"
#include "tessera/comm/init.h"
#include "tessera/tensor/dtensor.h"

namespace {

using namespace tessera;
using bench::median;
using bench::seconds;

const Placement R = Placement::replicate(), S0 = Placement::shard(0), S1 = Placement::shard(1),
                P = Placement::partial();
const std::map<std::string, std::pair<Placement, Placement>> kWorks = {
    {"gather", {S0, R}}, {"all_to_all", {S0, S1}}, {"all_reduce", {P, R}}, {"reduce_scatter", {P, S0}}};

int run(const std::string& work, std::int64_t bytes, int repeats) {
  const ProcessGroup group = init_process_group();
  const std::int64_t ranks = group.size();
  const DeviceMesh mesh(group, {ranks});
  // Even in both dimensions.
  const auto width = static_cast<std::int64_t>(std::sqrt(static_cast<double>(bytes) / 4)) / (8 * ranks) * (8 * ranks);
  const std::int64_t part = width * width / ranks;
  const Placement from = kWorks.at(work).first, to = kWorks.at(work).second;
  const DTensor tensor = DTensor::from_local(at::ones({from.is_shard() ? width / ranks : width, width}), mesh, {from});
  const at::Tensor in = tensor.to_local().clone().view({-1});
  const at::Tensor out = at::ones({to.is_replicate() ? width * width : part});
  std::vector<std::int64_t> splits(static_cast<std::size_t>(ranks), part / ranks);
  splits[static_cast<std::size_t>(group.rank())] = 0;
  const std::int64_t sent = part / ranks * (ranks - 1);
  const std::map<std::string, std::function<void()>> bares = {
      {"gather", [&] { group.all_gather_into(out, in); }},
      {"all_to_all", [&] { group.all_to_all(out.narrow(0, 0, sent), in.narrow(0, 0, sent), splits, splits); }},
      {"all_reduce", [&] { group.all_reduce(in); }},
      {"reduce_scatter", [&] { group.reduce_scatter_into(out, in); }}};
  std::vector<double> ours, bare;
  for (int i = 0; i < repeats; ++i) {
    bare.push_back(seconds(group, bares.at(work)));
    ours.push_back(seconds(group, [&] { tensor.redistribute({to}); }));
  }
  if (group.rank() == 0) {
    std::cout << "{\"ours\": " << median(ours) << ", \"bare\": " << median(bare)
              << ", \"side\": " << bench::describe_side() << "}\n";
  }
  group.barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 || kWorks.count(argv[1]) == 0) {
    std::cerr << "usage: dtensor_bench gather|all_to_all|all_reduce|reduce_scatter BYTES REPEATS\n";
    return 2;
  }
  try {
    at::set_num_threads(1);
    return run(argv[1], std::stoll(argv[2]), std::stoi(argv[3]));
  } catch (const std::exception& error) {
    std::cerr << "dtensor_bench: " << error.what() << '\n';
    return 3;
  }
}

/// \file
/// Times ShardedTensor, and in turn with it the bare collective that moves the same bytes on the same group:
/// `sharded_tensor_bench gather|reshard BYTES REPEATS`, as each rank of a world. Rank 0 prints one line of JSON:
/// {"ours", "bare"}, medians in seconds, and {"side"}, see side.h.
///   gather    a tensor in row chunks to rank 0; bare: ProcessGroup::gather of flat buffers
///   reshard   row chunks to column chunks and back, alternating; bare: ProcessGroup::all_to_all of flat buffers, which
///             are mapped, with exactly the bytes that change their rank.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <iostream>
#include <string>
#include <vector>

#include "measure_ranks.h"
#include "side.h"
#include "tessera/comm/init.h"
#include "tessera/tensor/sharded_tensor.h"

namespace {

using namespace tessera;
using bench::chunks;
using bench::median;
using bench::seconds;

int run(const std::string& work, std::int64_t bytes, int repeats) {
  const ProcessGroup group = init_process_group();
  const int ranks = group.size();
  // Square, and even in both dimensions.
  const auto width = static_cast<std::int64_t>(std::sqrt(static_cast<double>(bytes) / 4)) / (8 * ranks) * (8 * ranks);
  ShardedTensor tensor = ShardedTensor::ones(chunks(0, ranks), {width, width}, group);
  const at::Tensor local = tensor.local_tensor().clone().view({-1});
  std::vector<double> ours, bare;
  if (work == "gather") {
    const at::Tensor out = group.rank() == 0 ? at::ones({width, width}) : at::Tensor();
    const at::Tensor flat = group.rank() == 0 ? at::ones({width * width}) : at::Tensor();
    for (int i = 0; i < repeats; ++i) {
      bare.push_back(seconds(group, [&] { group.gather(flat, local, 0); }));
      ours.push_back(seconds(group, [&] { tensor.gather(0, out); }));
    }
  } else {
    const std::int64_t part = local.numel() / ranks;
    std::vector<std::int64_t> splits(static_cast<std::size_t>(ranks), part);
    splits[static_cast<std::size_t>(group.rank())] = 0;
    const at::Tensor in = local.narrow(0, 0, part * (ranks - 1)), out = at::ones({part * (ranks - 1)});
    for (int i = 0; i < repeats; ++i) {
      bare.push_back(seconds(group, [&] { group.all_to_all(out, in, splits, splits); }));
      ours.push_back(seconds(group, [&] { tensor.reshard(chunks(i % 2 == 0 ? 1 : 0, ranks)); }));
    }
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
  const std::string work = argc == 4 ? argv[1] : "";
  if (work != "gather" && work != "reshard") {
    std::cerr << "usage: sharded_tensor_bench gather|reshard BYTES REPEATS\n";
    return 2;
  }
  try {
    at::set_num_threads(1);
    return run(work, std::stoll(argv[2]), std::stoi(argv[3]));
  } catch (const std::exception& error) {
    std::cerr << "sharded_tensor_bench: " << error.what() << '\n';
    return 3;
  }
}

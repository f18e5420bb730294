// Counts the bytes that reach a host in a collective on several hosts with as many ranks each, and compares the results
// with those of one level, which have the same bits as all numbers are integers. Rank 0 prints a table.

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <limits>
#include <string>
#include <utility>

#include "tessera/base/function_ref.h"
#include "tessera/comm/init.h"

namespace {

using namespace tessera;

constexpr std::int64_t kNumel = 3 << 20;  // of float, in all: 12 MiB
constexpr double kMiB = 1 << 20;

// Returns how many bytes eth0 of this host has received.
double received_bytes() {
  std::ifstream devices("/proc/self/net/dev");
  for (std::string name; devices >> name;) {
    double bytes = 0;
    if (name == "eth0:" && devices >> bytes) return bytes;
    devices.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  throw Error(ErrorCode::not_found, "/proc/self/net/dev has no eth0");
}

at::Tensor numbers_of(int rank, std::int64_t numel) {
  return at::arange(numel).remainder(1009).add(1000 * rank).to(at::kFloat);
}

// Runs each collective on `group`, and returns what reached this host meanwhile, in MiB.
double count(const ProcessGroup& group, FunctionRef<void()> collective) {
  group.barrier();
  const double before = received_bytes();
  collective();
  group.barrier();
  return (received_bytes() - before) / kMiB;
}

struct Row {
  const char* name;
  double expected;  // MiB that a host needs and does not have
  std::function<at::Tensor(const ProcessGroup&)> run;
};

}  // namespace

int main(int argc, char** argv) {
  const ProcessGroup world = init_process_group();
  const double hosts = argc > 1 ? std::stod(argv[1]) : 2, mib = kNumel * sizeof(float) / kMiB;
  std::vector<int> ranks;
  for (int r = 0; r < world.size(); ++r) ranks.push_back(r);
  const auto size = static_cast<std::int64_t>(world.size());
  const Row rows[] = {{"all-reduce", 2 * (hosts - 1) / hosts * mib,
                       [&](const ProcessGroup& group) {
                         at::Tensor x = numbers_of(group.rank(), kNumel);
                         group.start_all_reduce(x).wait();
                         return x;
                       }},
                      {"reduce-scatter", (hosts - 1) / hosts * mib,
                       [&](const ProcessGroup& group) {
                         at::Tensor out = at::empty({kNumel / size});
                         group.start_reduce_scatter_into(out, numbers_of(group.rank(), kNumel)).wait();
                         return out;
                       }},
                      {"all-gather", (hosts - 1) / hosts * mib,
                       [&](const ProcessGroup& group) {
                         at::Tensor out = at::empty({kNumel});
                         group.start_all_gather_into(out, numbers_of(group.rank(), kNumel / size)).wait();
                         return out;
                       }},
                      {"all-to-all", (hosts - 1) / hosts * mib,
                       [&](const ProcessGroup& group) {
                         at::Tensor out = at::empty({kNumel / (size / static_cast<std::int64_t>(hosts))});
                         const std::vector<std::int64_t> splits(static_cast<std::size_t>(size), out.numel() / size);
                         group.start_all_to_all(out, numbers_of(group.rank(), out.numel()), splits, splits).wait();
                         return out;
                       }},
                      {"broadcast", mib, [&](const ProcessGroup& group) {
                         at::Tensor x = numbers_of(group.rank(), kNumel);
                         group.broadcast(x, world.size() - 1);
                         return x;
                       }}};
  const ProcessGroup levels = *world.subgroup(ranks);
  ::setenv("TESSERA_HOST_MEMORY", "0", 1);
  const ProcessGroup flat = *world.subgroup(ranks);
  bool is_good = true;
  for (const Row& row : rows) {
    at::Tensor result, expected;
    // TCP sends again what it takes for lost, so the least of three counts.
    double of_levels = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 3; ++i) of_levels = std::min(of_levels, count(levels, [&] { result = row.run(levels); }));
    const double of_flat = count(flat, [&] { expected = row.run(flat); });
    if (world.rank() == 0)
      fmt::print("{:16} {:6.2f} MiB needed, {:6.2f} received, {:6.2f} on one level\n", row.name, row.expected,
                 of_levels, of_flat);
    is_good = is_good && at::equal(result, expected);
    if (!at::equal(result, expected))
      fmt::print("{}: rank {} has another result than on one level\n", row.name, world.rank());
    // Headers of packets, and a barrier.
    if (of_levels > 1.06 * row.expected + 0.1) {
      is_good = false;
      fmt::print("{}: {:.2f} MiB reached the host of rank {}, expected {:.2f}\n", row.name, of_levels, world.rank(),
                 row.expected);
    }
  }
  return is_good ? 0 : 1;
}

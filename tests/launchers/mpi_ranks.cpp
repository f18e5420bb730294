// What a group on MPI does, compared with what this process computes alone. Started by mpirun.
//
//   mpi_ranks collectives       every collective and dtype, payloads, subgroups, errors; prints "good" on rank 0
//   mpi_ranks die LIVENESS_MS   the last rank is killed while the others wait; they print the error, its seconds and
//   exit mpi_ranks exit              the last rank calls std::exit(5) while the others wait mpi_ranks throw the last
//   rank leaves with an exception while the others wait

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <numeric>

#include "tessera/comm/init.h"
#include "tessera/comm/objects.h"

namespace {

using namespace tessera;
using Clock = std::chrono::steady_clock;
using Splits = std::vector<std::int64_t>;

template <typename... Args>
void check(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) throw std::runtime_error(fmt::format(format, std::forward<Args>(args)...));
}

// The elements that a rank contributes, of any dtype, small enough for sums in each.
at::Tensor part_of(int rank, std::int64_t count, at::ScalarType dtype) {
  return at::arange(count, at::kInt).add(3 * rank + 1).remainder(5).to(dtype);
}

void check_equal(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  check(at::equal(found, expected), "{} of {}: found {}, expected {}", what, c10::toString(expected.scalar_type()),
        found.sum().toString(), expected.sum().toString());
}

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble,       at::kHalf,         at::kBFloat16,
                                      at::kByte,  at::kChar,         at::kShort,        at::kInt,
                                      at::kLong,  at::kComplexFloat, at::kComplexDouble};

void check_moves(const ProcessGroup& group, at::ScalarType dtype) {
  const int ranks = group.size(), rank = group.rank();
  constexpr std::int64_t kCount = 7;
  std::vector<at::Tensor> parts;
  parts.reserve(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) parts.push_back(part_of(r, kCount, dtype));
  const at::Tensor all = at::cat(parts), mine = parts[static_cast<std::size_t>(rank)];

  const at::Tensor sent = mine.clone();
  group.broadcast(sent, 1);
  check_equal(sent, parts[1], "broadcast");

  const at::Tensor gathered = at::zeros({ranks * kCount}, dtype);
  group.all_gather_into(gathered, mine);
  check_equal(gathered, all, "all_gather_into");

  const at::Tensor on_root = rank == 2 ? at::zeros({ranks * kCount}, dtype) : at::Tensor();
  group.gather(on_root, mine, 2);
  if (rank == 2) check_equal(on_root, all, "gather");

  const at::Tensor scattered = at::zeros({kCount}, dtype);
  group.scatter(scattered, rank == 1 ? all : at::Tensor(), 1);
  check_equal(scattered, mine, "scatter");

  // Rank r sends r + s elements to rank s.
  Splits in_splits, out_splits;
  std::vector<at::Tensor> expected;
  for (int r = 0; r < ranks; ++r) {
    in_splits.push_back(rank + r);
    out_splits.push_back(rank + r);
    expected.push_back(at::full({rank + r}, r, dtype));
  }
  const at::Tensor in = at::full({std::accumulate(in_splits.begin(), in_splits.end(), std::int64_t{0})}, rank, dtype);
  const at::Tensor out = at::zeros_like(in);
  group.all_to_all(out, in, out_splits, in_splits);
  check_equal(out, at::cat(expected), "all_to_all");
}

void check_reductions(const ProcessGroup& group, at::ScalarType dtype) {
  const int ranks = group.size();
  constexpr std::int64_t kCount = 6;
  at::Tensor sum = at::zeros({kCount * ranks}, dtype), product = at::ones({kCount * ranks}, dtype);
  for (int r = 0; r < ranks; ++r) {
    sum = sum + part_of(r, kCount * ranks, dtype);
    product = product * part_of(r, kCount * ranks, dtype);
  }
  const at::Tensor mine = part_of(group.rank(), kCount * ranks, dtype);
  const auto reduced = [&](ReduceOp op) {
    at::Tensor tensor = mine.clone();
    group.all_reduce(tensor, op);
    return tensor;
  };
  check_equal(reduced(ReduceOp::sum), sum, "all_reduce");
  check_equal(reduced(ReduceOp::product), product, "all_reduce (product)");
  if (sum.is_floating_point()) {
    check(at::allclose(reduced(ReduceOp::average), sum / ranks, 1e-2), "average of {}", c10::toString(dtype));
  }
  const at::Tensor out = at::zeros({kCount}, dtype);
  group.reduce_scatter_into(out, mine);
  check_equal(out, sum.narrow(0, group.rank() * kCount, kCount), "reduce_scatter_into");
  if (sum.is_complex()) return;
  at::Tensor least = part_of(0, kCount * ranks, dtype), most = least.clone();
  for (int r = 1; r < ranks; ++r) {
    least = at::minimum(least, part_of(r, kCount * ranks, dtype));
    most = at::maximum(most, part_of(r, kCount * ranks, dtype));
  }
  check_equal(reduced(ReduceOp::min), least, "all_reduce (min)");
  check_equal(reduced(ReduceOp::max), most, "all_reduce (max)");
}

void check_asynchronous(const ProcessGroup& group) {
  std::vector<at::Tensor> tensors;
  std::vector<PendingCollective> pending;
  for (int i = 0; i < 20; ++i) {
    tensors.push_back(at::full({1000}, i + group.rank(), at::kLong));
    pending.push_back(group.start_all_reduce(tensors.back()));
  }
  for (auto each = pending.rbegin(); each != pending.rend(); ++each) each->wait();
  for (int i = 0; i < 20; ++i) {
    const int expected = group.size() * i + group.size() * (group.size() - 1) / 2;
    check_equal(tensors[static_cast<std::size_t>(i)], at::full({1000}, expected, at::kLong), "start_all_reduce");
  }
}

void check_payloads(const ProcessGroup& group) {
  const std::vector<c10::IValue> all = all_gather_object(group, fmt::format("rank {}", group.rank()));
  for (int r = 0; r < group.size(); ++r) {
    check(all[static_cast<std::size_t>(r)].toStringRef() == fmt::format("rank {}", r), "object of rank {}", r);
  }
  const at::Tensor bools = at::arange(3).eq(group.rank());
  group.broadcast(bools, 1);
  check_equal(bools, at::arange(3).eq(1), "broadcast");
  group.barrier();
  group.barrier(std::chrono::seconds(20));
}

void check_subgroups(const ProcessGroup& group) {
  const std::vector<int> ranks = {2, 0};
  const auto sub = group.subgroup(ranks);
  check(sub.has_value() == (group.rank() != 1), "membership of the subgroup");
  if (sub) {
    check(sub->backend() == "gloo", "the subgroup is on {}, expected gloo", sub->backend());
    const at::Tensor tensor = at::full({4}, group.rank() + 1, at::kFloat);
    sub->all_reduce(tensor);
    check_equal(tensor, at::full({4}, 4, at::kFloat), "all_reduce in a subgroup");
  }
}

void check_errors(const ProcessGroup& group) {
  const auto message_of = [&](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  const std::string differs = message_of([&] { group.all_reduce(at::ones({group.rank() == 1 ? 2 : 3})); });
  check(differs.find("rank 1 has elements 2") != std::string::npos, "{}", differs);
  const at::Tensor tensor = at::ones({2});
  group.all_reduce(tensor);  // the group is still usable
  check_equal(tensor, at::full({2}, group.size(), at::kFloat), "all_reduce after an error");

  // More than MPI counts. Memory that nothing writes to costs nothing.
  const std::int64_t most = std::numeric_limits<int>::max();
  const at::Tensor large = at::empty({most + 1}, at::kByte);
  const Splits splits = {most + 1, 0, 0};
  const std::string refused = message_of([&] { group.all_to_all(large, large, splits, splits); });
  check(refused.find("out has 2147483648 bytes, expected at most 2147483647 with mpi") != std::string::npos, "{}",
        refused);
}

void run_collectives(const InitOptions& options) {
  const ProcessGroup group = init_process_group(options);
  check(group.backend() == "mpi" && group.size() == 3, "found {} ranks on {}, expected 3 on mpi", group.size(),
        group.backend());
  for (const at::ScalarType dtype : kDtypes) {
    check_moves(group, dtype);
    check_reductions(group, dtype);
  }
  check_asynchronous(group);
  check_payloads(group);
  check_subgroups(group);
  check_errors(group);
  if (group.rank() == 0) std::cout << "good" << std::endl;
}

// Waits in MPI: an asynchronous collective does not compare calls first.
void wait_for_last(const ProcessGroup& group) {
  const Clock::time_point begin = Clock::now();
  const at::Tensor tensor = at::ones({1 << 20});
  try {
    group.start_all_reduce(tensor).wait();
  } catch (const Error& error) {
    std::cerr << fmt::format("after {:.1f} s: {}\n", std::chrono::duration<double>(Clock::now() - begin).count(),
                             error.what());
    throw;
  }
}

void run_end(InitOptions options, const std::string& how) {
  const ProcessGroup group = init_process_group(options);
  group.all_reduce(at::ones({3}));
  if (group.rank() < group.size() - 1) return wait_for_last(group);
  if (how == "die") std::raise(SIGKILL);
  if (how == "exit") std::exit(5);
  throw std::runtime_error("rank 2 has had enough");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  try {
    InitOptions options = options_from_environment();
    options.backend = "mpi";
    options.timeout = std::chrono::seconds(60);
    if (argc > 2) options.liveness = std::chrono::milliseconds(std::atoi(argv[2]));
    if (mode == "collectives") {
      run_collectives(options);
    } else {
      run_end(options, mode);
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << fmt::format("mpi_ranks: {}\n", error.what());
    return 3;
  }
}

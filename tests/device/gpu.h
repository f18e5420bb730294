#pragma once
// The GPUs of this machine, for tests: how many there are, and ranks that use them. Each rank is a process, as in a
// training: threads of one process that share a GPU also share the thread in which autograd runs backward on it, where
// one rank would wait for another forever.
//
// TESSERA_TEST_DEVICE=cpu runs the same tests on the CPU in place of a GPU, to test the tests.

#include <c10/core/DeviceGuard.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/cuda.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "comm/backend/backend.h"
#include "comm/rendezvous/store.h"
#include "comm/rendezvous/world.h"
#include "support/rank_processes.h"
#include "tessera/base/function_ref.h"

namespace tessera::testing {

inline bool cpu_takes_the_place() {
  const char* device = std::getenv("TESSERA_TEST_DEVICE");
  return device != nullptr && std::string_view(device) == "cpu";
}

// A process that has used CUDA cannot fork others that use it, so a process of its own counts.
inline int count_gpus() {
  static const int count = [] {
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(static_cast<int>(std::min<std::size_t>(torch::cuda::device_count(), 64)));
    int status = 0;
    return pid > 0 && ::waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : 0;
  }();
  return count;
}

// The device of a rank: ranks share GPUs if there are fewer.
inline at::Device gpu_of(int rank) {
  if (cpu_takes_the_place()) return at::kCPU;
  return {at::kCUDA, static_cast<c10::DeviceIndex>(rank % count_gpus())};
}

// Returns why a test cannot run, if it cannot.
inline std::optional<std::string> missing_gpu() {
  if (cpu_takes_the_place() || count_gpus() > 0) return std::nullopt;
  return "there is no CUDA device";
}

// How the ranks of a test communicate.
struct Ranks {
  enum class Kind {
    alone,     // one rank, which communicates with no other
    gloo,      // ranks that share GPUs if there are fewer
    nccl_one,  // one rank, whose collectives NCCL carries all the same
    nccl,      // ranks with a GPU each
  } kind;

  bool is_one() const { return kind == Kind::alone || kind == Kind::nccl_one; }
  std::string backend() const { return kind == Kind::alone || kind == Kind::gloo ? "gloo" : "nccl"; }
  std::string name() const {
    constexpr const char* kNames[] = {"Alone", "Gloo", "NcclOfOneRank", "Nccl"};
    return kNames[static_cast<int>(kind)];
  }
  // Why `count` ranks cannot run, if they cannot.
  std::optional<std::string> missing(int count) const {
    if (const auto reason = missing_gpu()) return reason;
    if (backend() == "gloo") return std::nullopt;
    if (cpu_takes_the_place()) {
      if (kind == Kind::nccl_one) return std::nullopt;  // over Gloo
      return "NCCL carries no tensors on CPU";
    }
    const std::vector<std::string> available = available_backends();
    if (std::find(available.begin(), available.end(), "nccl") == available.end()) return "LibTorch has no NCCL";
    if (kind == Kind::nccl && count_gpus() < count) {
      return "NCCL needs a GPU for each of " + std::to_string(count) + " ranks, there are " +
             std::to_string(count_gpus());
    }
    return std::nullopt;
  }
};

inline const Ranks kAllRanks[] = {
    {Ranks::Kind::alone}, {Ranks::Kind::gloo}, {Ranks::Kind::nccl_one}, {Ranks::Kind::nccl}};

inline std::string ranks_name(const ::testing::TestParamInfo<Ranks>& info) { return info.param.name(); }

// A group of one rank that communicates, with itself.
inline ProcessGroup group_of_one(const std::string& backend) {
  const comm::StorePtr store = comm::make_local_store();
  const auto liveness = std::make_shared<comm::Liveness>(comm::with_prefix("live", store), false, 0, 1, std::nullopt);
  return comm::make_world({backend, 0, 1, std::chrono::minutes(2), comm::with_prefix("world", store), liveness});
}

// Runs `f` in `count` processes, or in one if the kind of ranks has one. `device` is the current one.
inline void run_on_gpus(const Ranks& ranks, int count,
                        FunctionRef<void(const ProcessGroup& group, at::Device device)> f) {
  InitOptions options = quick();
  options.timeout = std::chrono::minutes(3);
  options.liveness = std::chrono::seconds(60);  // CUDA initializes slowly on a busy machine
  if (ranks.kind == Ranks::Kind::nccl) options.backend = "nccl";
  expect_good_processes(ranks.is_one() ? 1 : count, options, [&](const ProcessGroup& world) {
    const bool is_nccl_of_one = ranks.kind == Ranks::Kind::nccl_one;
    const at::Device device = gpu_of(world.rank());
    const c10::DeviceGuard guard(device);
    f(is_nccl_of_one ? group_of_one(cpu_takes_the_place() ? "gloo" : "nccl") : world, device);
  });
}

// |found - expected| / |expected|.
inline double relative_error(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor difference = found.to(at::kDouble) - expected.to(at::kDouble);
  return difference.norm().item<double>() / (expected.to(at::kDouble).norm().item<double>() + 1e-30);
}

inline void expect_close(const at::Tensor& found, const at::Tensor& expected, double tolerance,
                         const std::string& what) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  const double error = relative_error(found.cpu(), expected.cpu());
  EXPECT_LE(error, tolerance) << what << ": the relative error is " << error;
}

}  // namespace tessera::testing

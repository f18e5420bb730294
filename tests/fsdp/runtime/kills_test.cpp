// Death of a random rank at instants spread evenly over a training step, on ranks that share a host's memory. `make
// chaos` runs 500 of them and prints where they were.

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "support/chaos.h"
#include "support/rank_processes.h"
#include "tessera/comm/internal/shared_memory.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"

namespace tessera::fsdp {
namespace {

using KillClock = std::chrono::steady_clock;
using testing::RankOutcome;

constexpr int kRanks = 3;
constexpr std::array<const char*, 5> kPhases = {"zero_grad", "forward", "loss", "backward", "optimizer"};
constexpr std::chrono::seconds kDeadAfter(1);

struct LinearStackImpl : torch::nn::Module {
  LinearStackImpl() {
    for (int i = 0; i < 4; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), Wrap<torch::nn::Linear>(96, 96)));
  }
  at::Tensor forward(at::Tensor x) {
    for (Wrap<torch::nn::Linear>& layer : layers) x = at::tanh(layer(x));
    return x;
  }
  std::vector<Wrap<torch::nn::Linear>> layers;
};
TORCH_MODULE(LinearStack);

// What processes tell the test, whatever becomes of them.
struct Board {
  std::atomic<int> phase, phase_of_death;
  std::atomic<KillClock::rep> death;
  std::array<std::atomic<KillClock::rep>, kRanks> ends;
};

Board& new_board() {
  void* const memory =
      ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, /*fd=*/-1, /*offset=*/0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return *new (memory) Board();
}

KillClock::rep ticks() { return KillClock::now().time_since_epoch().count(); }

// Trains until the world ends. Rank `victim` dies in its fourth step, after this part of the time that the third took.
std::string train_and_die(const ProcessGroup& group, int victim, double part, Board& board) {
  EXPECT_TRUE(comm::SharedMemory::is_available(group));
  LinearStack plain;
  FullyShardedDataParallel<LinearStack> model(plain, group);
  torch::optim::AdamW optimizer(model.parameters());
  const at::Tensor rows = at::ones({64, 96});
  const auto enter = [&](int phase) {
    if (group.rank() == victim) board.phase = phase;
  };
  KillClock::duration last{};
  for (int step = 0;; ++step) {
    const KillClock::time_point begin = KillClock::now();
    if (step == 3 && group.rank() == victim) {
      const auto wait = std::chrono::duration_cast<KillClock::duration>(last * part);
      std::thread([&board, end = begin + wait] {
        while (KillClock::now() < end) std::this_thread::yield();
        board.phase_of_death = board.phase.load();
        board.death = ticks();
        ::kill(::getpid(), SIGKILL);
      }).detach();
    }
    enter(0);
    optimizer.zero_grad();
    enter(1);
    const at::Tensor result = model(rows);
    enter(2);
    const at::Tensor loss = result.square().mean();
    enter(3);
    loss.backward();
    enter(4);
    optimizer.step();
    last = KillClock::now() - begin;
  }
}

std::set<std::string> files_in_shared_memory() {
  std::set<std::string> names;
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm")) names.insert(file.path().filename());
  return names;
}

std::int64_t shared_memory_of_machine() {
  std::ifstream file("/proc/meminfo");
  std::int64_t kibibytes = 0;
  for (std::string name; file >> name; file.ignore(1000, '\n')) {
    if (name == "Shmem:") file >> kibibytes;
  }
  return kibibytes * 1024;
}

TEST(KillsTest, ARankThatDiesAnywhereInAStepIsNamedAndLeavesNothing) {
  const bool is_campaign = testing::chaos_factor() != 1;
  const int kills = is_campaign ? 25 * testing::chaos_factor() : 5;
  const std::chrono::seconds limit = is_campaign ? std::chrono::seconds(4) : testing::kSoon;
  Board& board = new_board();
  std::mt19937 random(20);
  std::array<int, kPhases.size()> of_phases{};
  std::array<int, 10> of_tenths{};
  KillClock::duration longest{};
  const std::set<std::string> files = files_in_shared_memory();
  const std::int64_t memory = shared_memory_of_machine();
  for (int i = 0; i < kills; ++i) {
    const int victim = static_cast<int>(random() % kRanks);
    const double part = (i + 0.5) / kills;
    InitOptions options = testing::quick();
    options.liveness = kDeadAfter;
    const std::vector<RankOutcome> outcomes =
        testing::run_processes(kRanks, options, [&](const ProcessGroup& group) -> std::string {
          try {
            return train_and_die(group, victim, part, board);
          } catch (...) {
            board.ends[static_cast<std::size_t>(group.rank())] = ticks();
            throw;
          }
        });
    const int phase = board.phase_of_death;
    ++of_phases[static_cast<std::size_t>(phase)];
    ++of_tenths[static_cast<std::size_t>(part * 10)];
    for (int rank = 0; rank < kRanks; ++rank) {
      const RankOutcome& outcome = outcomes[static_cast<std::size_t>(rank)];
      const std::string where = fmt::format("kill {} of rank {} in {}, on rank {}", i, victim,
                                            kPhases[static_cast<std::size_t>(phase)], rank);
      if (rank == victim) {
        EXPECT_EQ(outcome.signal, SIGKILL) << where;
        continue;
      }
      EXPECT_THAT(outcome.report, ::testing::StartsWith("rank_failure: ")) << where;
      EXPECT_THAT(outcome.report, ::testing::HasSubstr(fmt::format("rank {}", victim))) << where;
      EXPECT_THAT(outcome.report, ::testing::AnyOf(::testing::HasSubstr("died"), ::testing::HasSubstr("is gone")))
          << where;
      const KillClock::duration took(board.ends[static_cast<std::size_t>(rank)] - board.death);
      longest = std::max(longest, took);
      EXPECT_LT(took, limit) << where;
    }
  }
  EXPECT_EQ(files_in_shared_memory(), files);
  // Each run shares some 10 MiB. Other programs may share memory meanwhile.
  EXPECT_LT(shared_memory_of_machine() - memory, std::int64_t{5 << 20} * kills + (256 << 20));
  std::string phases;
  for (std::size_t i = 0; i < kPhases.size(); ++i) phases += fmt::format(" {} {}", kPhases[i], of_phases[i]);
  fmt::print("{} kills:{}; {} in each tenth of a step; the others ended {:.1f} s after, at most\n", kills, phases,
             fmt::join(of_tenths, " "), std::chrono::duration<double>(longest).count());
}

}  // namespace
}  // namespace tessera::fsdp

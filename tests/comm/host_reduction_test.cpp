// Reductions of many ranks that share a host's memory. One thread runs all ranks.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "comm/host/host.h"
#include "comm/host/ops.h"
#include "comm/host_cases.h"
#include "support/chaos.h"
#include "tessera/base/function_ref.h"

namespace tessera {
namespace {

using comm::EngineOpPtr;
using comm::Host;
using comm::HostMapping;

class RanksOfAThread {
 public:
  explicit RanksOfAThread(int ranks)
      : mapping_(std::make_shared<HostMapping>(comm::make_shared_memory(HostMapping::size_bytes(ranks)), ranks)) {
    for (int r = 0; r < ranks; ++r)
      hosts_.push_back(std::make_unique<Host>(mapping_, r, ranks, std::vector<comm::Descriptor>(), false));
  }
  const Host& first() const { return *hosts_[0]; }

  // Runs a collective. Returns whether all ranks have ended it when none can advance.
  bool run(FunctionRef<EngineOpPtr(const Host&)> make) {
    struct Running {
      EngineOpPtr op;
      bool has_sent = false, has_received = false;
    };
    std::vector<Running> all;
    ++number_;
    for (const auto& host : hosts_) all.push_back({make(*host)});
    for (const Running& one : all) one.op->take_number(number_);
    for (std::uint64_t before = places() + 1; before != places();) {
      before = places();
      for (std::size_t r = 0; r < all.size(); ++r) {
        if (!all[r].has_sent) all[r].has_sent = all[r].op->send(*hosts_[r]);
        if (!all[r].has_received) all[r].has_received = all[r].op->receive(*hosts_[r]);
      }
    }
    return std::all_of(all.begin(), all.end(), [](const Running& one) { return one.has_sent && one.has_received; });
  }

 private:
  // The sum of the places up to which ranks have written and read.
  std::uint64_t places() const {
    const auto ranks = static_cast<int>(hosts_.size());
    std::uint64_t sum = 0;
    for (int r = 0; r < ranks; ++r) {
      sum += mapping_->rank(r).head;
      for (int writer = 0; writer < ranks; ++writer) sum += mapping_->tail(r, writer);
    }
    return sum;
  }

  std::shared_ptr<HostMapping> mapping_;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::uint64_t number_ = 0;
};

TEST(HostReductionTest, ABlockHasOnlyEntireElementsAndFitsIntoARing) {
  for (int ranks = 2; ranks <= HostMapping::kMostRanks; ++ranks) {
    const std::size_t ring_bytes = HostMapping::ring_bytes(ranks);
    for (const std::size_t parts : {std::size_t{1}, static_cast<std::size_t>(ranks) - 1}) {
      const std::size_t block_bytes = comm::reduction_block_bytes(ring_bytes, parts);
      EXPECT_GT(block_bytes, 0u) << ranks;
      EXPECT_EQ(block_bytes % 64, 0u) << ranks;
      EXPECT_LE(block_bytes + sizeof(comm::OpHeader), ring_bytes) << ranks;
    }
  }
}

// Each rank has two rows of blocks.
TEST(HostReductionTest, SumsOfElementsOfEverySize) {
  testing::SampleIfSanitized sample(4);
  for (const int ranks : {2, 12, 18, 22, 32, 48}) {
    RanksOfAThread all(ranks);
    const std::size_t block_bytes =
        comm::reduction_block_bytes(all.first().ring_bytes(), static_cast<std::size_t>(ranks) - 1);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble, at::kComplexDouble}) {
      if (!sample.takes_next()) continue;
      const auto part = static_cast<std::int64_t>(block_bytes / c10::elementSize(dtype)) + 100;
      std::vector<at::Tensor> tensors;
      for (int r = 0; r < ranks; ++r) tensors.push_back(testing::values_of(r, ranks * part, dtype));
      at::Tensor expected = tensors[0].clone();
      for (int r = 1; r < ranks; ++r) expected.add_(tensors[static_cast<std::size_t>(r)]);
      const bool has_ended = all.run([&](const Host& host) {
        const at::Tensor& own = tensors[static_cast<std::size_t>(host.rank())];
        const std::vector<at::Tensor> parts = comm::parts_of(own, ranks);
        return comm::reduce_scatter_op(host, parts[static_cast<std::size_t>(host.rank())], comm::each_piece(parts),
                                       {own}, ReduceOp::sum);
      });
      EXPECT_TRUE(has_ended);
      for (int r = 0; r < ranks; ++r) {
        const at::Tensor sum = tensors[static_cast<std::size_t>(r)].narrow(0, r * part, part);
        EXPECT_TRUE(at::equal(sum, expected.narrow(0, r * part, part))) << dtype << " on rank " << r << " of " << ranks;
      }
    }
  }
}

TEST(HostReductionTest, ARowMayBeLargerThanARing) {
  constexpr int kRanks = 130;
  RanksOfAThread all(kRanks);
  constexpr std::int64_t kPart = 1024;
  ASSERT_GT(kPart * sizeof(float) * (kRanks - 1), all.first().ring_bytes());
  const at::Tensor ones = at::ones({kRanks * kPart}), sums = at::zeros({kRanks, kPart});
  EXPECT_TRUE(all.run([&](const Host& host) {
    return comm::reduce_scatter_op(host, sums[host.rank()], comm::each_piece(comm::parts_of(ones, kRanks)), {ones},
                                   ReduceOp::sum);
  }));
  EXPECT_TRUE(at::equal(sums, at::full_like(sums, kRanks)));
}

}  // namespace
}  // namespace tessera

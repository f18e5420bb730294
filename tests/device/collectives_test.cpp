// Collectives on tensors of a GPU.

#include <ATen/ATen.h>

#include "device/gpu.h"
#include "tessera/comm/internal/streams.h"

namespace tessera {
namespace {

using testing::Ranks;
using testing::run_on_gpus;

class GpuCollectivesTest : public ::testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(, GpuCollectivesTest, ::testing::ValuesIn(testing::kAllRanks), testing::ranks_name);

// What rank `rank` contributes: small integers, whose sums and products are exact.
at::Tensor part_of_rank(int rank, std::int64_t count, at::ScalarType dtype) {
  return at::arange(count).remainder(7).add(rank + 1).to(dtype);
}

void expect_all(const ProcessGroup& group, at::Device device, at::ScalarType dtype) {
  const int ranks = group.size(), rank = group.rank();
  const std::int64_t count = 1 << 16;
  std::vector<at::Tensor> parts;
  for (int r = 0; r < ranks; ++r) parts.push_back(part_of_rank(r, count, dtype));
  at::Tensor sum = parts[0].clone();
  for (int r = 1; r < ranks; ++r) sum = sum + parts[static_cast<std::size_t>(r)];
  const at::Tensor mine = parts[static_cast<std::size_t>(rank)].to(device);
  const auto expect_same = [&](const at::Tensor& found, const at::Tensor& expected, const char* what) {
    EXPECT_TRUE(at::equal(found.cpu(), expected)) << what << " of " << c10::toString(dtype);
  };

  at::Tensor reduced = mine.clone();
  group.all_reduce(reduced);
  expect_same(reduced, sum, "all_reduce");

  const at::Tensor gathered = at::empty({count * ranks}, mine.options());
  group.all_gather_into(gathered, mine);
  expect_same(gathered, at::cat(parts), "all_gather_into");

  const at::Tensor scattered = at::empty({count}, mine.options());
  group.reduce_scatter_into(scattered, mine.repeat({ranks}));
  expect_same(scattered, sum, "reduce_scatter_into");

  const at::Tensor copy = mine.clone();
  group.broadcast(copy, ranks - 1);
  expect_same(copy, parts.back(), "broadcast");

  const std::vector<std::int64_t> splits(static_cast<std::size_t>(ranks), count / ranks);
  const at::Tensor exchanged = at::empty({count / ranks * ranks}, mine.options());
  group.all_to_all(exchanged, mine.narrow(0, 0, exchanged.numel()), splits, splits);
  std::vector<at::Tensor> received;
  for (const at::Tensor& part : parts) received.push_back(part.narrow(0, rank * (count / ranks), count / ranks));
  expect_same(exchanged, at::cat(received), "all_to_all");
}

TEST_P(GpuCollectivesTest, MoveAndReduceElementsOfEachDtype) {
  if (const auto reason = GetParam().missing(2)) GTEST_SKIP() << *reason;
  run_on_gpus(GetParam(), 2, [](const ProcessGroup& group, at::Device device) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt, at::kLong}) {
      expect_all(group, device, dtype);
    }
  });
}

TEST_P(GpuCollectivesTest, AreOrderedBetweenTheWorkOnTheCurrentStream) {
  if (const auto reason = GetParam().missing(2)) GTEST_SKIP() << *reason;
  run_on_gpus(GetParam(), 2, [](const ProcessGroup& group, at::Device device) {
    const comm::SideStream side(device);
    const comm::OnStream guard(side);
    const at::Tensor weight = at::eye(512, at::TensorOptions(device).dtype(at::kDouble));
    for (int i = 0; i < 20; ++i) {
      at::Tensor tensor = at::full({512, 512}, group.rank() + 1.0, weight.options());
      for (int k = 0; k < 10; ++k) tensor = tensor.matmul(weight);  // still runs when the collective starts
      PendingCollective pending = group.start_all_reduce(tensor);
      pending.wait();
      const at::Tensor after = tensor * 2;
      const double expected = group.size() * (group.size() + 1.0);
      EXPECT_TRUE(at::equal(after.cpu(), at::full({512, 512}, expected, at::kDouble))) << i;
    }
  });
}

TEST_P(GpuCollectivesTest, AGroupHasTheNamedBackend) {
  if (const auto reason = GetParam().missing(2)) GTEST_SKIP() << *reason;
  run_on_gpus(GetParam(), 2, [](const ProcessGroup& group, at::Device device) {
    const std::string expected =
        GetParam().kind == Ranks::Kind::alone || device.is_cpu() ? group.backend() : GetParam().backend();
    EXPECT_EQ(group.backend(), expected);
    PendingCollective pending = group.start_all_reduce(at::ones({8}, at::TensorOptions(device)));
    if (expected == "nccl") {
      EXPECT_TRUE(pending.completes_on_stream());
    }
    pending.wait();
  });
}

}  // namespace
}  // namespace tessera

#pragma once
// What tests of ranks that share a host's memory reduce.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/base/function_ref.h"
#include "tessera/comm/process_group.h"

namespace tessera::testing {

// Values whose sums depend on the order of the additions.
inline at::Tensor values_of(int rank, std::int64_t numel, at::ScalarType dtype = at::kFloat) {
  constexpr std::int64_t kPeriod = 4093;  // a prime: no part of a message begins like another
  const at::Tensor period =
      at::arange(kPeriod, at::kDouble).mul(0.37).add(1.7 * rank).sin().mul(1 + 1e3 * rank).to(dtype);
  return period.repeat({numel / kPeriod + 1}).narrow(0, 0, numel);
}

// Reduces `part` elements for each rank, at the same time to all ranks and to each rank its part, then one element
// less, which makes parts of different sizes. Expects the bits of `sum` of as many elements.
inline void expect_sums(const ProcessGroup& group, std::int64_t part, at::ScalarType dtype,
                        FunctionRef<at::Tensor(std::int64_t numel)> sum) {
  const std::int64_t numel = part * group.size();
  const at::Tensor expected = sum(numel), own = values_of(group.rank(), numel, dtype);
  const at::Tensor reduced = own.clone(), scattered = at::empty({part}, own.options());
  PendingCollective reducing = group.start_all_reduce(reduced);
  group.start_reduce_scatter_into(scattered, own).wait();
  reducing.wait();
  EXPECT_TRUE(at::equal(reduced, expected)) << dtype << ' ' << numel;
  EXPECT_TRUE(at::equal(scattered, expected.narrow(0, group.rank() * part, part))) << dtype << ' ' << numel;
  const at::Tensor odd = values_of(group.rank(), numel - 1, dtype);
  group.start_all_reduce(odd).wait();
  EXPECT_TRUE(at::equal(odd, sum(numel - 1))) << dtype << ' ' << numel - 1;
}

}  // namespace tessera::testing

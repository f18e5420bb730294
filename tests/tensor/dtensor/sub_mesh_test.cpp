// Ranks outside of a mesh call the same functions and do nothing in them.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tensor/mesh_support.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/dtensor_factories.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/dtensor_ops/fft.h"

namespace tessera {
namespace {

using testing::indexed;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

TEST(SubMeshTest, RanksOutsideOfTheMeshTakePartInNothing) {
  for (const Sizes& shape : {Sizes{2}, Sizes{1, 2}}) {
    run_local(3, [&](const ProcessGroup& group) {
      const DeviceMesh mesh = DeviceMesh::of_ranks(group, shape, {2, 0});
      const bool is_in = mesh.has_this_rank();
      Placements rows(shape.size(), R), columns(shape.size(), R);
      rows.back() = S0;
      columns.back() = S1;
      const at::Tensor full = indexed({4, 6});
      const CommDebugMode mode(group);
      const DTensor x = distribute_tensor(full.clone().requires_grad_(), mesh, rows),
                    y = x.redistribute(columns).detach();
      const auto expect_full = [&](const DTensor& found, const at::Tensor& expected) {
        EXPECT_EQ(found.size(), expected.sizes().vec());
        const at::Tensor unsharded = found.full_tensor();
        if (is_in) {
          EXPECT_TRUE(at::equal(unsharded, expected));
        } else if (expected.dim() == 0) {
          EXPECT_TRUE(unsharded.dim() == 0 && unsharded.item<double>() == 0);
        } else {
          EXPECT_EQ(unsharded.numel(), 0);
        }
      };
      // Ops of each kind.
      expect_full(x + y, full * 2);
      expect_full(dtensor::relu(x), full);
      expect_full(dtensor::sum(x), full.sum());
      expect_full(dtensor::sum(x, {0}), full.sum(0));
      expect_full(dtensor::expand(dtensor::sum(x), {2}), full.sum().expand({2}));
      expect_full(dtensor::max(dtensor::view(x, {24}), 0).values, full.max());
      for (const DTensor& part : dtensor::split(x, 3, 1)) {
        EXPECT_EQ(part.to_local().sizes(), is_in ? Sizes({2, 3}) : Sizes({0}));
      }
      expect_full(dtensor::linear(x, y), at::linear(full, full));
      expect_full(dtensor::view(x, {24}), full.view({24}));
      expect_full(dtensor::cat({x, y}, 1), at::cat({full, full}, 1));
      expect_full(dtensor::max(x, 0).indices, full.argmax(0));
      // In place.
      const DTensor z = dtensor::clone(y);
      expect_full(dtensor::add_(z, x.detach()), full * 2);
      expect_full(dtensor::mul_(z, 3), full * 6);
      expect_full(dtensor::fill_(z, 2), at::full({4, 6}, 2.0, at::kDouble));
      // The result of a comparison is true where there is nothing to compare.
      EXPECT_TRUE(dtensor::equal(x, y));
      EXPECT_EQ(dtensor::equal(x, z), !is_in);
      // Factories.
      PhiloxGenerator generator(3);
      expect_full(dtensor::zeros({4, 6}, mesh, rows, at::kDouble), at::zeros({4, 6}, at::kDouble));
      expect_full(dtensor::ones_like(x), at::ones({4, 6}, at::kDouble));
      EXPECT_EQ(dtensor::rand({4, 6}, mesh, generator, rows).to_local().numel(), is_in ? 12 : 0);
      EXPECT_EQ(generator.offset, 12u);  // the same on all ranks
      EXPECT_EQ(dtensor::dropout(x, 0.5, generator).to_local().numel(), is_in ? 12 : 0);
      dtensor::sum(x * y).redistribute().to_local().backward();  // on every rank
      if (is_in) {
        EXPECT_TRUE(at::equal(x.grad()->full_tensor(), full));
      } else {
        EXPECT_EQ(mode.total(), 0);
        EXPECT_EQ(mode.comparisons(), 0);
      }
    });
  }
}

TEST(SubMeshTest, ResultsHaveTheSameDtypeOnAllRanks) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::of_ranks(group, {2}, {2, 0});
    const bool is_in = mesh.has_this_rank();
    const DTensor x = distribute_tensor(indexed({4, 4}) + 10 * at::eye(4, at::kDouble), mesh, {S0}),
                  numbers = dtensor::to(x, at::kInt), is_large = dtensor::gt(x, 0),
                  z = dtensor::view_as_complex(dtensor::view(x, {8, 2}));
    const std::vector<std::pair<DTensor, at::ScalarType>> results = {
        {numbers, at::kInt},
        {is_large, at::kBool},
        {dtensor::any(x), at::kBool},
        {dtensor::isfinite(x), at::kBool},
        {dtensor::where(is_large, numbers, 2), at::kInt},
        {numbers + x, at::kDouble},
        {dtensor::cat({numbers, x}), at::kDouble},
        {dtensor::max(x, 0).values, at::kDouble},
        {dtensor::max(x, 0).indices, at::kLong},
        {dtensor::argmax(x), at::kLong},
        {dtensor::sum(is_large), at::kLong},
        {dtensor::prod(numbers, {0}), at::kLong},
        {dtensor::cumsum(numbers, 0), at::kLong},
        {dtensor::bucketize(x, dtensor::select(x, 0, 0), true), at::kInt},
        {dtensor::frexp(x).exponent, at::kInt},
        {z, at::kComplexDouble},
        {dtensor::abs(z), at::kDouble},
        {dtensor::imag(z), at::kDouble},
        {dtensor::fft_rfft(x), at::kComplexDouble},
        {dtensor::fft_irfft(z), at::kDouble},
        {dtensor::linalg_eig(x).first, at::kComplexDouble},
        {dtensor::linalg_lu_factor(x).second, at::kInt},
    };
    for (std::size_t i = 0; i < results.size(); ++i) EXPECT_EQ(results[i].first.scalar_type(), results[i].second) << i;
    // Ops that need these dtypes.
    EXPECT_EQ(dtensor::mean(dtensor::to(dtensor::eq(x, x), at::kFloat)).scalar_type(), at::kFloat);
    EXPECT_EQ(dtensor::view_as_real(z).scalar_type(), at::kDouble);
    const DTensor labels = dtensor::argmax(x, 1);
    EXPECT_EQ(dtensor::cross_entropy(x, labels).scalar_type(), at::kDouble);
    EXPECT_EQ(dtensor::one_hot(labels).size(), (Sizes{4, is_in ? 4 : 0}));
    EXPECT_EQ(dtensor::index(x, {is_large}).size(), Sizes{is_in ? 16 : 0});
  });
}

}  // namespace
}  // namespace tessera

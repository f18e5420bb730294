// Ranks outside of a mesh call the same functions and do nothing in them.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/dtensor/local_map.h"
#include "tessera/tensor/dtensor_factories.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/dtensor_ops/fft.h"

namespace tessera {
namespace {

using testing::indexed;
using testing::P;
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

TEST(SubMeshTest, LocalShardsAreRedistributedInTheMesh) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::of_ranks(group, {2}, {2, 0});
    const bool is_in = mesh.has_this_rank();
    const at::Tensor full = indexed({2, 6});
    LocalShardsWrapper mine({}, {});
    if (is_in) mine = LocalShardsWrapper({full.narrow(0, mesh.local_rank(0), 1)}, {{mesh.local_rank(0), 0}});
    const DTensor x = DTensor::from_local(mine, mesh, {S0}, {2, 6}, at::kDouble);
    for (const Placement& target : {R, S1, P}) {
      const DTensor after = x.redistribute({target});
      EXPECT_EQ(after.size(), (Sizes{2, 6}));
      EXPECT_EQ(after.scalar_type(), at::kDouble);
      const at::Tensor found = after.full_tensor();
      EXPECT_TRUE(is_in ? at::equal(found, full) : found.numel() == 0) << target;
    }
    const at::Tensor found = x.full_tensor();
    EXPECT_TRUE(is_in ? at::equal(found, full) : found.numel() == 0);
  });
}

TEST(SubMeshTest, RanksOutsideOfTheMeshMayHaveNoTensor) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::of_ranks(group, {2}, {2, 0});
    const bool is_in = mesh.has_this_rank();
    for (const Placement& placement : {S0, S1, Placement::shard(-2), R}) {
      const DTensor x = distribute_tensor(is_in ? indexed({4, 6}) : at::Tensor(), mesh, {placement});
      EXPECT_EQ(x.full_tensor().numel(), is_in ? 24 : 0) << placement;
    }
    EXPECT_EQ(DTensor::from_local(is_in ? at::ones({4, 3}) : at::Tensor(), mesh, {S1}).to_local().numel(),
              is_in ? 12 : 0);
  });
}

TEST(SubMeshTest, EveryRankCallsBackwardWhicheverInputRequiresGrad) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::of_ranks(group, {2}, {2, 0});
    const at::Tensor full = indexed({4, 6}), plain = indexed({6}).requires_grad_();
    const DTensor data = distribute_tensor(full, mesh, {S0}),
                  row = distribute_tensor(indexed({6}).requires_grad_(), mesh), sum = dtensor::clone(data);
    dtensor::add_(sum, row);
    const LocalMapOptions by_rank{.out_placements = {{S0}}, .out_sizes = {{4, 6}}};
    const auto product = [](const std::vector<at::Tensor>& locals) {
      return std::vector<at::Tensor>{locals[0] * locals[1]};
    };
    const std::vector<DTensor> results = {
        dtensor::linear(data, dtensor::unsqueeze(row, 0)),
        data * row,
        dtensor::where(dtensor::gt(data, 9), data, row),
        dtensor::cat({data, dtensor::unsqueeze(row, 0)}),
        dtensor::sort(data * row).values,
        dtensor::abs(dtensor::to(data, at::kComplexDouble) * row),
        sum,
        local_map(product, std::vector<DTensor>{data, row}, by_rank)[0],
        data * plain,
    };
    for (std::size_t i = 0; i < results.size(); ++i) {
      ASSERT_TRUE(results[i].requires_grad()) << i;
      row.local_tensor().mutable_grad() = at::Tensor();
      dtensor::sum(results[i]).redistribute().to_local().backward();
      EXPECT_TRUE(row.grad().has_value() || i + 1 == results.size()) << i;  // the last one is of `plain`
    }
    EXPECT_TRUE(plain.grad().defined());
    // In half precision and of 0 dimensions, too; without gradients where the result has none.
    const DTensor half = dtensor::to(data, at::kHalf) * dtensor::to(dtensor::sum(row), at::kHalf);
    EXPECT_TRUE(half.requires_grad());
    EXPECT_EQ(half.scalar_type(), at::kHalf);
    EXPECT_FALSE(dtensor::gt(data, row).requires_grad());
    const at::NoGradGuard no_grad;
    EXPECT_FALSE((data * row).requires_grad());
  });
}

TEST(SubMeshTest, WhereAMaskIsTrueNeedNotBeKnownOutsideOfTheMesh) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh = DeviceMesh::of_ranks(group, {2}, {2, 0});
    const bool is_in = mesh.has_this_rank();
    const at::Tensor full = indexed({6, 4}), rows = indexed({6}).gt(1), ids = at::tensor({0, 3, 1, 1, 2}, at::kLong);
    const DTensor x = distribute_tensor(full, mesh, {S0}), mask = distribute_tensor(rows, mesh, {S0}),
                  columns = distribute_tensor(ids, mesh), values = distribute_tensor(indexed({5, 4}), mesh),
                  numbers = distribute_tensor(indexed({5}), mesh);
    for (const bool accumulate : {false, true}) {
      const DTensor by_row = dtensor::index_put(x, {mask}, values, accumulate),
                    by_place = dtensor::index_put_(dtensor::clone(x), {mask, columns}, numbers, accumulate);
      EXPECT_EQ(by_row.size(), x.size());
      const at::Tensor found_by_row = by_row.full_tensor(), found_by_place = by_place.full_tensor();
      if (!is_in) continue;
      EXPECT_TRUE(at::equal(found_by_row, full.index_put({rows}, indexed({5, 4}), accumulate)));
      EXPECT_TRUE(at::equal(found_by_place, full.index_put({rows, ids}, indexed({5}), accumulate)));
    }
    EXPECT_EQ(dtensor::index(x, {mask, columns}).size(), Sizes{is_in ? 5 : 0});
    // What is known is checked on every rank.
    EXPECT_ERROR(dtensor::index_put(x, {columns}, dtensor::slice(values, 0, 0, 3)), ErrorCode::invalid_argument,
                 "index_put of values of size [3, 4]");
  });
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
        {dtensor::cat({dtensor::zeros({0}, mesh, {}, at::kDouble), numbers}), at::kDouble},
        {dtensor::full({4}, 7, mesh), at::kLong},
        {dtensor::full({4}, true, mesh), at::kBool},
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

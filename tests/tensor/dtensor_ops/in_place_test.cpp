// Ops on DTensors in place, and what a DTensor states of itself.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/chaos.h"
#include "support/error_matchers.h"
#include "tensor/case_function.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera {
namespace {

using testing::CaseFunction;
using testing::cross;
using testing::indexed;
using testing::local_of;
using testing::P;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

struct InPlaceCase {
  std::string name;
  CaseFunction<DTensor(const DTensor& x, const DTensor& row)> ours;
  CaseFunction<at::Tensor(const at::Tensor& x, const at::Tensor& row)> aten;
  bool takes_partial;
};

std::vector<InPlaceCase> cases() {
  using D = const DTensor&;
  using T = const at::Tensor&;
  return {
      {"add_", [](D x, D row) { return dtensor::add_(x, row); }, [](T x, T row) { return x + row; }, true},
      {"sub_", [](D x, D row) { return dtensor::sub_(x, row); }, [](T x, T row) { return x - row; }, true},
      {"mul_", [](D x, D row) { return dtensor::mul_(x, row); }, [](T x, T row) { return x * row; }, true},
      {"div_", [](D x, D row) { return dtensor::div_(x, row); }, [](T x, T row) { return x / row; }, true},
      {"copy_", [](D x, D row) { return dtensor::copy_(x, row); }, [](T x, T row) { return row.expand_as(x); }, true},
      {"add_number", [](D x, D) { return dtensor::add_(x, 2); }, [](T x, T) { return x + 2; }, false},
      {"sub_number", [](D x, D) { return dtensor::sub_(x, 2); }, [](T x, T) { return x - 2; }, false},
      {"mul_number", [](D x, D) { return dtensor::mul_(x, 2); }, [](T x, T) { return x * 2; }, true},
      {"div_number", [](D x, D) { return dtensor::div_(x, 2); }, [](T x, T) { return x / 2; }, true},
      {"fill_", [](D x, D) { return dtensor::fill_(x, 2); }, [](T x, T) { return at::full_like(x, 2); }, true},
      {"masked_fill_", [](D x, D row) { return dtensor::masked_fill_(x, dtensor::gt(row, 22), 5); },
       [](T x, T row) { return x.masked_fill(row.gt(22), 5); }, false},
      {"zero_", [](D x, D) { return dtensor::zero_(x); }, [](T x, T) { return at::zeros_like(x); }, true},
  };
}

TEST(DTensorInPlaceTest, GivesWhatItGivesOnTheFullTensorsWhereItIs) {
  const at::Tensor full = indexed({5, 4}), row = indexed({4}) + 20;
  for (const Sizes& shape : {Sizes{1}, Sizes{3}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      testing::SampleIfSanitized sample(5);
      const auto on_mesh = [&](const at::Tensor& tensor, const Placements& placements) {
        const MeshLayout layout(tensor.sizes().vec(), shape, placements);
        return DTensor::from_local(local_of(tensor, layout, *mesh.coordinate()), mesh, placements,
                                   {tensor.sizes().vec()});
      };
      for (const InPlaceCase& op : cases()) {
        std::vector<Placements> choices = cross({R, S0, S1, P}, shape.size());
        if (shape.size() == 2) choices.push_back({Placement::strided_shard(0, 2), S0});
        for (const Placements& placements : choices) {
          for (const Placements& of_row : cross({R, S0, P}, shape.size())) {
            if (!sample.takes_next()) continue;
            const DTensor x = on_mesh(full, placements), alias = x, other = on_mesh(row, of_row);
            const at::Tensor local = x.local_tensor();
            const bool is_partial = std::count(placements.begin(), placements.end(), P) != 0;
            if (is_partial && !op.takes_partial) {
              EXPECT_ERROR(op.ours(x, other), ErrorCode::unsupported,
                           "in place, this would change the placements of the first tensor, expected the same; "
                           "redistribute it before");
              EXPECT_TRUE(at::equal(x.full_tensor(), full));
              continue;
            }
            const DTensor result = op.ours(x, other);
            EXPECT_EQ(result.placements(), placements);
            EXPECT_TRUE(result.local_tensor().is_same(local));
            EXPECT_TRUE(at::allclose(alias.full_tensor(), op.aten(full, row)))
                << op.name << to_string(placements) << to_string(of_row);
          }
        }
      }
    });
  }
}

TEST(DTensorInPlaceTest, GradientsPassThrough) {
  const at::Tensor full = indexed({5, 4}).set_requires_grad(true);
  (full * 3).mul_(indexed({4})).sum().backward();
  run_local(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor leaf = distribute_tensor(full, mesh, {S0});
    const DTensor x = leaf * 3;
    dtensor::mul_(x, distribute_tensor(indexed({4}), mesh, {S0}));
    dtensor::sum(x).full_tensor().backward();
    EXPECT_TRUE(at::equal(leaf.grad()->full_tensor(), full.grad()));
    EXPECT_ERROR(dtensor::add_(leaf, 1), ErrorCode::invalid_argument, "in-place operation");
    const at::NoGradGuard no_grad;
    dtensor::add_(leaf, 1);
    EXPECT_TRUE(at::equal(leaf.full_tensor(), full + 1));
  });
}

TEST(DTensorInPlaceTest, AResultOfAnotherSizeIsRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor row = distribute_tensor(indexed({4}), mesh, {R});
    EXPECT_ERROR(dtensor::add_(row, distribute_tensor(indexed({5, 4}), mesh, {R})), ErrorCode::invalid_argument,
                 "in place, the result would have size [5, 4], expected [4] as the first tensor");
  });
}

TEST(DTensorTest, StridesAreThoseOfTheFullTensor) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor x = distribute_tensor(indexed({5, 4, 6}), mesh, {S1});
    EXPECT_EQ(x.stride(), (Sizes{24, 6, 1}));
    EXPECT_EQ(dtensor::transpose(x, 0, 2).stride(), (Sizes{1, 6, 24}));
    EXPECT_EQ(distribute_tensor(indexed({1, 3}), mesh, {S0}).stride(), (Sizes{3, 1}));
    EXPECT_EQ(x.device(), at::Device(at::kCPU));
    const DTensor shards = DTensor::from_local(LocalShardsWrapper({}, {}), mesh, {S0}, {4, 6});
    EXPECT_EQ(shards.device(), at::Device(at::kCPU));
    EXPECT_ERROR(shards.stride(), ErrorCode::unsupported, "LocalShardsWrapper");
  });
}

}  // namespace
}  // namespace tessera

// Factories of DTensors, random numbers by place, and dropout.

#include <ATen/ATen.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/chaos.h"
#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor_factories.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {
namespace {

using testing::cross;
using testing::indexed;
using testing::local_of;
using testing::P;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

const Placements kChoices = {
    R, S0, S1, Placement::strided_shard(0, 2), Placement::strided_shard(1, 2), P, Placement::partial(ReduceOp::max)};
const std::vector<Sizes> kMeshes = {{1}, {3}, {2, 2}, {2, 3}};

// Returns the tensor that `create` creates in one process, after comparing those on all meshes with it.
template <typename Create>
at::Tensor same_on_all_meshes(const Create& create) {
  at::Tensor expected;
  run_local(1,
            [&](const ProcessGroup& group) { expected = create(DeviceMesh(group, {1}), Placements()).full_tensor(); });
  std::size_t mesh_number = 0;
  for (const Sizes& shape : kMeshes) {
    ++mesh_number;
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      testing::SampleIfSanitized sample(3, mesh_number);  // not the same placements on every mesh
      for (const Placements& placements : cross(kChoices, shape.size())) {
        if (!sample.takes_next()) continue;
        const DTensor tensor = create(mesh, placements);
        EXPECT_EQ(tensor.placements(), placements);
        const at::Tensor full = tensor.full_tensor();
        EXPECT_EQ(full.scalar_type(), expected.scalar_type());
        const bool is_partial = std::any_of(placements.begin(), placements.end(),
                                            [](const Placement& placement) { return placement.is_partial(); });
        // Ranks divide a partial tensor among them, which rounds.
        EXPECT_TRUE(is_partial ? at::allclose(full, expected, 1e-2, 1e-6) : at::equal(full, expected))
            << to_string(placements) << full << expected;
      }
    });
  }
  return expected;
}

TEST(DTensorFactoryTest, ConstantsAreTheSameOnAnyMesh) {
  EXPECT_TRUE(at::equal(same_on_all_meshes([](const DeviceMesh& mesh, const Placements& placements) {
                          return dtensor::zeros({5, 4}, mesh, placements, at::kDouble);
                        }),
                        at::zeros({5, 4}, at::kDouble)));
  EXPECT_TRUE(at::equal(same_on_all_meshes([](const DeviceMesh& mesh, const Placements& placements) {
                          return dtensor::ones({5, 4}, mesh, placements);
                        }),
                        at::ones({5, 4})));
  EXPECT_TRUE(at::equal(same_on_all_meshes([](const DeviceMesh& mesh, const Placements& placements) {
                          return dtensor::full_like(dtensor::empty({5, 4}, mesh, placements, at::kHalf), 2.5);
                        }),
                        at::full({5, 4}, 2.5, at::kHalf)));
  EXPECT_TRUE(at::equal(same_on_all_meshes([](const DeviceMesh& mesh, const Placements& placements) {
                          return dtensor::full({5, 4}, 7, mesh, placements);
                        }),
                        at::full({5, 4}, 7)));
}

TEST(DTensorFactoryTest, RandomNumbersAreTheSameOnAnyMesh) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const bool is_normal : {false, true}) {
      const at::Tensor first = same_on_all_meshes([&](const DeviceMesh& mesh, const Placements& placements) {
        PhiloxGenerator generator(17);
        const auto draw = is_normal ? dtensor::randn : dtensor::rand;
        draw({7}, mesh, generator, {}, at::kDouble);  // an odd number before
        EXPECT_EQ(generator, PhiloxGenerator(17, 4));
        DTensor tensor = draw({7, 6}, mesh, generator, placements, dtype);
        EXPECT_EQ(generator, PhiloxGenerator(17, 25));
        return tensor;
      });
      EXPECT_EQ(first.scalar_type(), dtype);
    }
  }
}

// The numbers are Philox's, as in LibTorch's generator on CUDA: words 0 and 1 for even elements, 2 and 3 for odd ones.
TEST(DTensorFactoryTest, TheNumbersArePhiloxs) {
  run_local(1, [](const ProcessGroup& group) {
    for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{17}, std::uint64_t{0xFEDCBA9876543210}}) {
      for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{5}, std::uint64_t{0x1FFFFFFFE}}) {
        PhiloxGenerator generator(seed, offset);
        const at::Tensor ours = dtensor::rand({8}, DeviceMesh(group, {1}), generator, {}, at::kDouble).full_tensor();
        at::Philox4_32 theirs(seed, 0, offset);
        for (std::int64_t i = 0; i < 8; ++i) {
          const std::uint64_t high = theirs(), low = theirs();
          EXPECT_EQ(ours[i].item<double>(), static_cast<double>((high << 32 | low) >> 11) / 9007199254740992.0);
        }
      }
    }
  });
}

TEST(DTensorFactoryTest, TheDistributionsAreAsNamed) {
  run_local(1, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {1});
    PhiloxGenerator generator(1);
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const at::Tensor uniform = dtensor::rand({1000, 1000}, mesh, generator, {}, dtype).full_tensor();
      EXPECT_TRUE(uniform.ge(0).logical_and(uniform.lt(1)).all().item<bool>());
      EXPECT_NEAR(uniform.mean().item<double>(), 0.5, 0.002);
      EXPECT_NEAR(uniform.var().item<double>(), 1.0 / 12, 0.001);
      const at::Tensor normal = dtensor::randn({1000, 1000}, mesh, generator, {}, dtype).full_tensor();
      EXPECT_TRUE(normal.isfinite().all().item<bool>());
      EXPECT_NEAR(normal.mean().item<double>(), 0, 0.005);
      EXPECT_NEAR(normal.var().item<double>(), 1, 0.01);
      EXPECT_NEAR(normal.lt(-1).to(at::kDouble).mean().item<double>(), 0.15866, 0.002);
      EXPECT_NEAR(normal.gt(2).to(at::kDouble).mean().item<double>(), 0.02275, 0.001);
      // Neighbors are independent.
      EXPECT_NEAR((normal.slice(1, 1) * normal.slice(1, 0, -1)).mean().item<double>(), 0, 0.005);
    }
    std::vector<at::ScalarType> narrow = {at::kHalf, at::kBFloat16};
    for (const DType dtype : {DType::float8_e4m3fn, DType::float8_e5m2}) {
      try {
        narrow.push_back(to_scalar_type(dtype));
      } catch (const Error& error) {  // LibTorch 1.13 has no such numbers
        EXPECT_EQ(error.code(), ErrorCode::unsupported);
      }
    }
    for (const at::ScalarType dtype : narrow) {
      const at::Tensor uniform = dtensor::rand({1000, 100}, mesh, generator, {}, dtype).full_tensor().to(at::kFloat);
      EXPECT_TRUE(uniform.ge(0).logical_and(uniform.lt(1)).all().item<bool>());
    }
  });
}

TEST(DTensorFactoryTest, OptionsGiveDeviceAndRequiresGrad) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor leaf = dtensor::ones({3, 2}, mesh, {Placement::shard(-2)}, at::TensorOptions().requires_grad(true));
    EXPECT_TRUE(leaf.requires_grad() && leaf.local_tensor().is_leaf());
    EXPECT_EQ(leaf.placements(), Placements{S0});
    EXPECT_EQ(leaf.device(), at::Device(at::kCPU));
    PhiloxGenerator generator(3);
    const DTensor meta = dtensor::rand({3, 2}, mesh, generator, {S0}, at::TensorOptions().device(at::kMeta));
    EXPECT_TRUE(meta.local_tensor().is_meta());
    EXPECT_EQ(dtensor::zeros_like(meta).device(), at::Device(at::kMeta));
    EXPECT_EQ(meta.full_tensor().sizes(), (Sizes{3, 2}));
    EXPECT_TRUE(at::equal(dtensor::ones_like(leaf).full_tensor(), at::ones({3, 2})));
    EXPECT_ERROR(dtensor::rand({2}, mesh, generator, {}, at::kLong), ErrorCode::invalid_argument,
                 "random tensor of size [2] of Long: expected a floating-point dtype");
    EXPECT_ERROR(dtensor::zeros({-1}, mesh), ErrorCode::invalid_argument, "expected no negative size");
    EXPECT_ERROR(dtensor::zeros({2}, mesh, {}, at::TensorOptions().dtype(at::kLong).requires_grad(true)),
                 ErrorCode::invalid_argument, "DTensor of size [2]");
    EXPECT_ERROR(dtensor::zeros({2}, mesh, {S1}), ErrorCode::invalid_argument, "dimension");
  });
}

TEST(DTensorInitTest, AParameterIsTheSameOnAnyMesh) {
  at::Tensor expected;
  for (const Sizes& shape : kMeshes) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      for (const Placements& placements : cross({R, S0, S1, Placement::strided_shard(0, 2)}, shape.size())) {
        PhiloxGenerator generator(9);
        const DTensor x =
            dtensor::zeros({40, 6}, mesh, placements, at::TensorOptions().dtype(at::kDouble).requires_grad(true));
        std::vector<at::Tensor> found = {dtensor::uniform_(x, generator, -3, 5).full_tensor().detach().clone()};
        found.push_back(dtensor::normal_(x, generator, 2, 0.5).full_tensor().detach().clone());
        found.push_back(dtensor::kaiming_uniform_(x, generator, 2).full_tensor().detach().clone());
        EXPECT_TRUE(x.requires_grad() && x.local_tensor().is_leaf());
        EXPECT_EQ(generator, PhiloxGenerator(9, 360));
        const at::Tensor all = at::stack(found);
        if (shape == Sizes{1}) expected = all;
        EXPECT_TRUE(at::equal(all, expected)) << to_string(placements);
        EXPECT_TRUE(at::equal(dtensor::eye_(x).full_tensor(), at::eye(40, 6, at::kDouble))) << to_string(placements);
        const DTensor wide = dtensor::ones({5, 9}, mesh, placements);
        EXPECT_TRUE(at::equal(dtensor::eye_(wide).full_tensor(), at::eye(5, 9))) << to_string(placements);
      }
    });
  }
  const double bound = std::sqrt(6.0 / (5 * 6));
  EXPECT_TRUE(expected[0].ge(-3).logical_and(expected[0].lt(5)).all().item<bool>());
  EXPECT_NEAR(expected[0].mean().item<double>(), 1, 0.5);
  EXPECT_NEAR(expected[1].mean().item<double>(), 2, 0.15);
  EXPECT_NEAR(expected[1].std().item<double>(), 0.5, 0.1);
  EXPECT_NEAR(expected[2].abs().max().item<double>(), bound, 0.05 * bound);
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    PhiloxGenerator generator(9);
    EXPECT_ERROR(dtensor::uniform_(dtensor::zeros({3}, mesh, {P}), generator), ErrorCode::unsupported,
                 "would change the placements");
    EXPECT_ERROR(dtensor::eye_(dtensor::zeros({3, 3}, mesh, {P})), ErrorCode::unsupported,
                 "would change the placements");
    EXPECT_ERROR(dtensor::eye_(dtensor::zeros({3}, mesh)), ErrorCode::invalid_argument, "expected two dimensions");
    EXPECT_EQ(generator, PhiloxGenerator(9)) << "a call that failed advanced it";
    EXPECT_ERROR(dtensor::kaiming_uniform_(dtensor::zeros({3}, mesh), generator), ErrorCode::invalid_argument,
                 "expected two dimensions or more");
  });
}

TEST(DTensorInitTest, BernoulliAndTheIdentityAreTheSameOnAnyMesh) {
  at::Tensor expected;
  const at::Tensor odds = at::sin(indexed({40, 6})).abs();
  for (const Sizes& shape : kMeshes) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      for (const Placements& placements : cross({R, S0, S1, Placement::strided_shard(0, 2), P}, shape.size())) {
        const MeshLayout layout({40, 6}, shape, placements);
        const DTensor odds_here =
            DTensor::from_local(local_of(odds, layout, *mesh.coordinate()), mesh, placements, {layout.size()});
        PhiloxGenerator generator = dtensor::manual_seed(9, mesh);
        std::vector<at::Tensor> found = {dtensor::bernoulli(odds_here, generator).full_tensor()};
        EXPECT_EQ(generator, PhiloxGenerator(9, 120));
        if (std::count(placements.begin(), placements.end(), P) == 0) {
          found.push_back(dtensor::bernoulli_(odds_here, generator, 0.25).full_tensor().clone());
          EXPECT_EQ(generator, PhiloxGenerator(9, 240));
          EXPECT_TRUE(at::equal(dtensor::eye_(odds_here).full_tensor(), at::eye(40, 6, at::kDouble)))
              << to_string(placements);
        } else {
          EXPECT_ERROR(dtensor::bernoulli_(odds_here, generator), ErrorCode::unsupported,
                       "would change the placements");
          EXPECT_EQ(generator, PhiloxGenerator(9, 120)) << "a call that failed advanced it";
        }
        if (shape == Sizes{1} && found.size() == 2 && !expected.defined()) expected = at::stack(found);
        EXPECT_TRUE(at::equal(at::stack(found), expected.slice(0, 0, static_cast<std::int64_t>(found.size()))))
            << to_string(placements);
      }
    });
  }
  EXPECT_TRUE(expected.eq(0).logical_or(expected.eq(1)).all().item<bool>());
  EXPECT_NEAR(expected[0].mean().item<double>(), odds.mean().item<double>(), 0.1);
  EXPECT_NEAR(expected[0].mul(odds).sum().div(expected[0].sum()).item<double>(),
              odds.square().sum().div(odds.sum()).item<double>(), 0.1);
  EXPECT_NEAR(expected[1].mean().item<double>(), 0.25, 0.1);
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2}), alone = DeviceMesh::of_ranks(group, {1}, {0});
    PhiloxGenerator generator(1);
    const DTensor x = dtensor::zeros({3}, mesh);
    EXPECT_ERROR(dtensor::bernoulli_(x, generator, 1.5), ErrorCode::invalid_argument, "expected 0 to 1");
    EXPECT_ERROR(dtensor::eye_(x), ErrorCode::invalid_argument, "eye_ of size [3]: expected two dimensions");
    const auto mine = static_cast<std::uint64_t>(group.rank());
    EXPECT_ERROR(dtensor::manual_seed(mine, mesh), ErrorCode::invalid_argument, "seed 0", "seed 1");
    EXPECT_EQ(dtensor::manual_seed(mine, alone), PhiloxGenerator(mine)) << "ranks of other meshes may differ";
  });
}

TEST(DTensorInitTest, TheSeedMayBeThatOfTheFirstRank) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2}), others = DeviceMesh::of_ranks(group, {2}, {3, 1});
    const auto own = static_cast<std::uint64_t>(group.rank()) + (std::uint64_t{5} << 40);
    PhiloxGenerator generator = dtensor::generator_of_first_rank(own, mesh), expected(std::uint64_t{5} << 40);
    EXPECT_EQ(generator, expected);
    const std::uint64_t first_of_others = group.rank() % 2 == 1 ? 3 : static_cast<std::uint64_t>(group.rank());
    EXPECT_EQ(dtensor::generator_of_first_rank(static_cast<std::uint64_t>(group.rank()), others),
              PhiloxGenerator(first_of_others));
    // Replicas have the same numbers, and shards different ones.
    const DTensor x = dtensor::rand({4, 6}, mesh, generator, {R, S0});
    const std::vector<Bytes> all = group.all_gather_bytes(
        {static_cast<const std::uint8_t*>(x.local_tensor().data_ptr()), x.local_tensor().nbytes()});
    EXPECT_EQ(all[0], all[2]);
    EXPECT_EQ(all[1], all[3]);
    EXPECT_NE(all[0], all[1]);
  });
}

TEST(DTensorFactoryTest, ATensorOnMetaGetsMemoryAndKeepsItsPlacements) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor full = at::empty({6, 4}, at::TensorOptions().device(at::kMeta));
    const std::vector<DTensor> tensors = {
        distribute_tensor(full, mesh, {S0}), distribute_tensor(full, mesh, {R}), DTensor::from_local(full, mesh, {S0}),
        DTensor::from_local(full, mesh, {P}),
        DTensor::from_local(at::empty({}, at::TensorOptions().device(at::kMeta)), mesh, {P})};
    for (const DTensor& on_meta : tensors) {
      EXPECT_TRUE(on_meta.device().is_meta());
      const DTensor x = dtensor::empty_like(on_meta, at::TensorOptions().device(at::kCPU));
      EXPECT_TRUE(x.device().is_cpu());
      EXPECT_EQ(x.placements(), on_meta.placements());
      EXPECT_EQ(x.size(), on_meta.size());
      dtensor::fill_(x, 1.5);
      EXPECT_TRUE(at::equal(x.full_tensor(), at::full(x.size(), 1.5F))) << x;
      if (x.placements()[0].is_partial()) continue;
      EXPECT_TRUE(at::equal(x.to_local(), at::full(on_meta.to_local().sizes(), 1.5F)));
    }
  });
}

TEST(DropoutTest, TheSameElementsAreZeroOnAnyMesh) {
  at::Tensor expected;
  const at::Tensor full = indexed({7, 6});
  for (const Sizes& shape : kMeshes) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      for (const Placements& placements : cross({R, S0, S1, P}, shape.size())) {
        const MeshLayout layout({7, 6}, shape, placements);
        const at::Tensor leaf = local_of(full, layout, *mesh.coordinate()).set_requires_grad(true);
        const DTensor x = DTensor::from_local(leaf, mesh, placements, {Sizes{7, 6}});
        PhiloxGenerator generator(5);
        const DTensor result = dtensor::dropout(x, 0.25, generator);
        EXPECT_EQ(generator, PhiloxGenerator(5, 21));
        EXPECT_TRUE(mesh.size() == 1 || result.placements() == placements) << "something is sent";
        const at::Tensor found = result.full_tensor();
        found.sum().backward();
        if (shape == Sizes{1}) expected = found.detach();
        EXPECT_TRUE(at::allclose(found, expected)) << to_string(placements);
        EXPECT_TRUE(at::allclose(x.grad()->full_tensor() * full, expected)) << to_string(placements);
      }
    });
  }
  const at::Tensor kept = expected / full;
  EXPECT_TRUE(kept.eq(0).logical_or((kept - 1 / 0.75).abs().lt(1e-12)).all().item<bool>());
  const auto zeros = kept.eq(0).sum().item<std::int64_t>();
  EXPECT_THAT(zeros, ::testing::AllOf(::testing::Gt(3), ::testing::Lt(19)));
}

TEST(DropoutTest, ProbabilitiesAtTheEnds) {
  run_local(1, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {1});
    const DTensor x = DTensor::from_local(indexed({4}), mesh);
    PhiloxGenerator generator(5);
    EXPECT_TRUE(at::equal(dtensor::dropout(x, 0, generator).full_tensor(), indexed({4})));
    EXPECT_TRUE(at::equal(dtensor::dropout(x, 1, generator).full_tensor(), at::zeros({4}, at::kDouble)));
    EXPECT_ERROR(dtensor::dropout(x, -0.1, generator), ErrorCode::invalid_argument,
                 "dropout with probability -0.1: expected 0 to 1");
  });
}

}  // namespace
}  // namespace tessera

// Views, padding, Fourier transforms and convolutions of DTensors, and shards that stay where they are through them.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/case_function.h"
#include "tensor/dtensor_ops/op_cases.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor_factories.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/dtensor_ops/convolution.h"
#include "tessera/tensor/dtensor_ops/fft.h"

namespace tessera {
namespace {

using testing::CaseFunction;
using testing::cross;
using testing::indexed;
using testing::on_mesh;
using testing::P;
using testing::part_of;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

const Placement kPlanes = Placement::shard(2);

Placement strided(std::int64_t dim, std::int64_t factor) { return Placement::strided_shard(dim, factor); }

class DTensorRearrangingTest : public ::testing::TestWithParam<Sizes> {};

TEST_P(DTensorRearrangingTest, GivesWhatItGivesOnTheFullTensors) {
  testing::expect_as_on_full_tensors(testing::rearranging_cases(), GetParam());
}

TEST_P(DTensorRearrangingTest, ConvolutionsGiveWhatTheyGiveOnTheFullTensors) {
  testing::expect_as_on_full_tensors(testing::spatial_cases(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Meshes, DTensorRearrangingTest, ::testing::Values(Sizes{1}, Sizes{4}, Sizes{2, 2}),
                         [](const ::testing::TestParamInfo<Sizes>& test) { return testing::mesh_name(test.param); });

TEST(DTensorViewTest, StridedShardsAndAveragesGiveTheSame) {
  testing::expect_as_on_full_tensors_if_strided(testing::rearranging_cases());
  testing::expect_as_on_full_tensors_if_strided(testing::spatial_cases());
}

struct ViewCase {
  Sizes from, to;
  Placements placements, expected;
};

// A view that needs no communication has the elements of its input, in the same order, on each rank.
void expect_view(const ViewCase& test, const DeviceMesh& mesh) {
  const at::Tensor full = indexed(test.from);
  const DTensor x = on_mesh(full, mesh, test.placements), y = dtensor::view(x, test.to);
  const std::string shown =
      to_string(test.placements) + " of " + shape_to_string(test.from) + " to " + shape_to_string(test.to);
  ASSERT_EQ(y.placements(), test.expected) << shown;
  ASSERT_TRUE(at::equal(y.local_tensor().flatten(), x.local_tensor().flatten())) << shown;
  ASSERT_TRUE(at::equal(y.local_tensor(), part_of(full.view(test.to), y.layout(), *mesh.coordinate()))) << shown;
  const DTensor back = dtensor::view(y, test.from);
  ASSERT_EQ(back.placements(), test.placements) << shown;
  ASSERT_TRUE(at::equal(back.local_tensor(), x.local_tensor())) << shown;
}

TEST(DTensorViewTest, MergingAndSplittingKeepShards) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    for (const ViewCase& test : std::vector<ViewCase>{
             {{3, 4}, {12}, {S1}, {strided(0, 3)}},
             {{3, 5}, {15}, {S1}, {strided(0, 3)}},  // uneven, last of its group
             {{2, 4, 3}, {24}, {S1}, {strided(0, 2)}},
             {{2, 4, 3}, {8, 3}, {S1}, {strided(0, 2)}},
             {{2, 4, 3}, {2, 12}, {kPlanes}, {strided(1, 4)}},
             {{2, 3, 4, 5}, {2, 12, 5}, {kPlanes}, {strided(1, 3)}},
             {{2, 3, 4, 5}, {2, 12, 5}, {Placement::shard(3)}, {kPlanes}},
             {{2, 8}, {2, 2, 2, 2}, {S1}, {S1}},
             {{6, 8}, {3, 2, 8}, {strided(0, 3)}, {S1}},
             {{12, 8}, {3, 4, 8}, {strided(0, 6)}, {strided(1, 2)}},
             {{6, 4}, {3, 8}, {strided(0, 3)}, {S1}},
             {{4, 3}, {12}, {strided(0, 2)}, {strided(0, 2)}},
         }) {
      expect_view(test, mesh);
    }
    // These cannot stay where they are.
    const auto on = [&](const Sizes& size, const Placement& placement) {
      return on_mesh(indexed(size), mesh, {placement});
    };
    EXPECT_EQ(dtensor::view(on({2, 3, 2}, S1), {12}).placements(), Placements{R});
    EXPECT_EQ(dtensor::view(on({12}, strided(0, 3)), {2, 6}).placements(), Placements{R});
    EXPECT_EQ(dtensor::view(on({4, 6}, S1), {6, 4}).placements(), Placements{R});
  });
}

TEST(DTensorViewTest, MergingAndSplittingKeepShardsOfSeveralMeshDimensions) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2});
    for (const ViewCase& test : std::vector<ViewCase>{
             {{4, 6}, {24}, {S0, S1}, {S0, strided(0, 2)}},
             {{4, 6}, {24}, {S1, S0}, {strided(0, 4), S0}},
             {{3, 8}, {24}, {S1, S1}, {strided(0, 3), strided(0, 3)}},
             {{3, 8, 2}, {48}, {R, S1}, {R, strided(0, 3)}},
             {{3, 2, 4}, {3, 8}, {S1, kPlanes}, {S1, strided(1, 1)}},
             {{2, 4, 4}, {32}, {S1, kPlanes}, {strided(0, 2), strided(0, 4)}},
             {{8, 6}, {2, 4, 6}, {S0, S0}, {S0, S1}},
             {{4, 6, 2}, {24, 2}, {strided(0, 2), S0}, {strided(0, 2), S0}},
             {{2, 6, 4}, {2, 24}, {kPlanes, S0}, {strided(1, 6), S0}},
         }) {
      expect_view(test, mesh);
    }
    // An uneven shard ends what can be kept of its group.
    EXPECT_EQ(dtensor::view(on_mesh(indexed({3, 5}), mesh, {S1, S0}), {15}).placements(),
              (Placements{strided(0, 3), R}));
    const at::Tensor full = indexed({5, 6});
    for (const Placements& placements : cross({R, S0, S1, strided(0, 2), P}, 2)) {
      for (const Sizes& to : {Sizes{30}, Sizes{10, 3}, Sizes{5, 2, 3}, Sizes{5, 3, 2}, Sizes{2, 15}, Sizes{1, 30, 1}}) {
        EXPECT_TRUE(at::equal(dtensor::view(on_mesh(full, mesh, placements), to).full_tensor(), full.view(to)))
            << to_string(placements) << shape_to_string(to);
      }
    }
  });
}

// What follows a flatten keeps its strided shards. Values and gradients are compared with the full tensors.
TEST(DTensorViewTest, OpsKeepTheStridedShardsOfAFlatten) {
  const Sizes size = {3, 4, 6};
  const at::Tensor target = at::arange(12, at::kLong).remainder(6), matrix = indexed({6, 2}) / 10;
  struct Op {
    const char* name;
    CaseFunction<DTensor(const DTensor& rows)> ours;
    CaseFunction<at::Tensor(const at::Tensor& rows)> aten;
    Placement expected;
  };
  const Placement rows = strided(0, 3);
  using D = const DTensor&;
  using T = const at::Tensor&;
  const std::vector<Op> ops = {
      {"sum", [](D x) { return dtensor::sum(x, {1}); }, [](T x) { return x.sum(1); }, rows},
      {"sum of rows", [](D x) { return dtensor::sum(x, {0}); }, [](T x) { return x.sum(0); }, P},
      {"softmax", [](D x) { return dtensor::softmax(x, 1); }, [](T x) { return x.softmax(1); }, rows},
      {"layer_norm", [](D x) { return dtensor::layer_norm(x, {6}); }, [](T x) { return at::layer_norm(x, {6}); }, rows},
      {"transpose", [](D x) { return dtensor::transpose(x, 0, 1); }, [](T x) { return x.t(); }, strided(1, 3)},
      {"select", [](D x) { return dtensor::select(x, 1, 2); }, [](T x) { return x.select(1, 2); }, rows},
      {"unbind", [](D x) { return dtensor::unbind(x, 1)[3]; }, [](T x) { return x.unbind(1)[3]; }, rows},
      {"stack",
       [](D x) {
         return dtensor::stack({x, x}, 1);
       },
       [](T x) {
         return at::stack({x, x}, 1);
       },
       rows},
      {"stack in front",
       [](D x) {
         return dtensor::stack({x, x});
       },
       [](T x) {
         return at::stack({x, x});
       },
       strided(1, 3)},
      {"slice", [](D x) { return dtensor::slice(x, 1, 1, 5, 2); }, [](T x) { return x.slice(1, 1, 5, 2); }, rows},
      {"slice_scatter", [](D x) { return dtensor::slice_scatter(x, dtensor::slice(x, 1, 3, 6) * 2, 1, 0, 3); },
       [](T x) { return at::slice_scatter(x, x.slice(1, 3, 6) * 2, 1, 0, 3); }, rows},
      {"add", [](D x) { return x + x; }, [](T x) { return x + x; }, rows},
      {"chain", [](D x) { return dtensor::relu(dtensor::tanh(x) * 2 + x); },
       [](T x) { return (x.tanh() * 2 + x).relu(); }, rows},
      {"matmul", [&](D x) { return dtensor::matmul(x, distribute_tensor(matrix, x.device_mesh())); },
       [&](T x) { return x.matmul(matrix); }, rows},
      {"nll_loss",
       [&](D x) {
         const DTensor pixels = distribute_tensor(target.view({3, 4}), x.device_mesh(), {S1});
         dtensor::LossOptions options;
         options.reduction = dtensor::Reduction::none;
         return dtensor::nll_loss(x, dtensor::flatten(pixels), options);
       },
       [&](T x) { return at::nll_loss(x, target, {}, at::Reduction::None); }, rows},
      {"cat of rows",
       [](D x) {
         return dtensor::cat({x, x});
       },
       [](T x) {
         return at::cat({x, x});
       },
       R},
      {"split of rows", [](D x) { return dtensor::split(x, 5)[1]; }, [](T x) { return x.split(5)[1]; }, R},
      {"unbind of rows", [](D x) { return dtensor::unbind(x)[7]; }, [](T x) { return x.unbind()[7]; }, R},
      {"sum of partial", [](D x) { return dtensor::sum(x.redistribute({P}), {0}); }, [](T x) { return x.sum(0); }, P},
  };
  run_local(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    for (const Op& op : ops) {
      const at::Tensor full = (indexed(size) / 50).requires_grad_();
      const at::Tensor expected = op.aten(full.view({12, 6})), weights = at::cos(indexed(expected.sizes().vec()));
      (expected * weights).sum().backward();
      const DTensor x = distribute_tensor(full.detach(), mesh, {S1}).requires_grad_();
      const DTensor flat = dtensor::flatten(x, 0, 1);
      ASSERT_EQ(flat.placements(), Placements{rows});
      const DTensor found = op.ours(flat);
      EXPECT_EQ(found.placements(), Placements{op.expected}) << op.name;
      const at::Tensor all = found.full_tensor();
      EXPECT_TRUE(at::allclose(all, expected)) << op.name;
      (all * weights).sum().backward();
      EXPECT_TRUE(at::allclose(x.grad()->full_tensor(), full.grad())) << op.name;
    }
  });
}

TEST(DTensorViewTest, OpsKeepTheStridedShardsOfAFlattenOnTwoMeshDimensions) {
  const at::Tensor full = (indexed({4, 6, 8}) / 100).requires_grad_(), matrix = indexed({8, 2}) / 10;
  const auto chain = [](const auto& x, const auto& tanh, const auto& relu) { return relu(tanh(x) * 2 + x); };
  const at::Tensor expected = chain(
                                  full.view({24, 8}), [](const at::Tensor& t) { return t.tanh(); },
                                  [](const at::Tensor& t) { return t.relu(); })
                                  .matmul(matrix);
  expected.square().sum().backward();
  run_local(4, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2});
    const DTensor x = distribute_tensor(full.detach(), mesh, {S1, kPlanes}).requires_grad_();
    const DTensor flat = dtensor::flatten(x, 0, 1);
    ASSERT_EQ(flat.placements(), (Placements{strided(0, 4), S1}));
    const DTensor chained = chain(
        flat, [](const DTensor& t) { return dtensor::tanh(t); }, [](const DTensor& t) { return dtensor::relu(t); });
    EXPECT_EQ(chained.placements(), flat.placements());
    EXPECT_EQ(dtensor::sum(chained, {1}).placements(), (Placements{strided(0, 4), P}));
    const DTensor product = dtensor::matmul(chained, distribute_tensor(matrix, mesh, {R, S0}));
    EXPECT_EQ(product.placements(), (Placements{strided(0, 4), P}));
    EXPECT_TRUE(at::allclose(product.full_tensor(), expected));
    dtensor::sum(dtensor::square(product)).full_tensor().backward();
    EXPECT_TRUE(at::allclose(x.grad()->full_tensor(), full.grad()));
  });
}

TEST(DTensorViewTest, AFlattenThatBecomesPartialPassesGradients) {
  const at::Tensor weights = at::cos(indexed({12, 5}));
  run_local(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor x = distribute_tensor(indexed({3, 4, 5}), mesh, {S1}).requires_grad_();
    const DTensor partial = dtensor::flatten(x, 0, 1).redistribute({P});
    (partial.full_tensor() * weights).sum().backward();
    EXPECT_TRUE(at::equal(x.grad()->full_tensor(), weights.view({3, 4, 5})));
  });
}

TEST(DTensorViewTest, NoGradientFlowsThroughDetach) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor x = distribute_tensor(indexed({4, 6}), mesh, {S0}).requires_grad_();
    const DTensor detached = x.detach();
    EXPECT_FALSE(detached.requires_grad());
    EXPECT_TRUE(detached.local_tensor().is_alias_of(x.local_tensor()));
    EXPECT_EQ(detached.placements(), x.placements());
    dtensor::sum(x * detached).full_tensor().backward();
    EXPECT_TRUE(at::equal(x.grad()->full_tensor(), indexed({4, 6})));
  });
}

TEST(DTensorViewTest, OpsThatAreNotLinearReducePartialInputs) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor full = indexed({4, 6}) - 10.5;
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::average, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
      const DTensor x = on_mesh(full, mesh, {Placement::partial(op)});
      EXPECT_TRUE(at::allclose(dtensor::abs(x).full_tensor(), full.abs())) << to_string(op);
      EXPECT_TRUE(at::equal(dtensor::argmin(dtensor::abs(x), 1).full_tensor(), full.abs().argmin(1))) << to_string(op);
      EXPECT_TRUE(at::equal(dtensor::argmin(x, 0).full_tensor(), full.argmin(0))) << to_string(op);
      EXPECT_TRUE(at::equal(dtensor::argmax(x, 0).full_tensor(), full.argmax(0))) << to_string(op);
    }
  });
}

TEST(DTensorViewTest, EveryKindOfPartialStaysAsItIs) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor full = indexed({4, 6}), real = indexed({3, 2});
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::average, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
      const Placements partial = {Placement::partial(op)};
      const DTensor x = on_mesh(full, mesh, partial);
      const auto expect_kept = [&](const DTensor& found, const at::Tensor& expected) {
        EXPECT_EQ(found.placements(), partial) << to_string(op);
        EXPECT_TRUE(at::allclose(found.full_tensor(), expected)) << to_string(op);
      };
      for (const std::int64_t dim : {0, 1}) {
        for (const std::int64_t part : {2, 3, 4}) {
          const std::vector<DTensor> parts = dtensor::split(x, part, dim);
          const std::vector<at::Tensor> expected = full.split(part, dim);
          ASSERT_EQ(parts.size(), expected.size());
          for (std::size_t i = 0; i < parts.size(); ++i) expect_kept(parts[i], expected[i]);
        }
      }
      expect_kept(dtensor::roll(x, {1}, {0}), full.roll({1}, {0}));
      expect_kept(dtensor::flip(x, {1}), full.flip({1}));
      expect_kept(dtensor::pad(x, {1, 1}), at::constant_pad_nd(full, {1, 1}));
      expect_kept(dtensor::flatten(x), full.flatten());
      expect_kept(dtensor::clone(x), full);
      expect_kept(dtensor::copy_(dtensor::clone(x), dtensor::relu(x)), full);
      expect_kept(dtensor::copy_(dtensor::clone(x), on_mesh(full * 2, mesh, partial)), full * 2);
      expect_kept(dtensor::fill_(dtensor::clone(x), 8), at::full_like(full, 8));
      expect_kept(dtensor::zero_(dtensor::clone(x)), at::zeros_like(full));
      // Complex numbers have no order.
      const bool is_linear = op == ReduceOp::sum || op == ReduceOp::average;
      const DTensor complex = dtensor::view_as_complex(on_mesh(real, mesh, partial));
      EXPECT_EQ(complex.placements(), is_linear ? partial : Placements{R}) << to_string(op);
      EXPECT_TRUE(at::allclose(dtensor::view_as_real(complex).full_tensor(), real)) << to_string(op);
      EXPECT_TRUE(at::allclose(complex.full_tensor(), at::view_as_complex(real))) << to_string(op);
      const DTensor padded = dtensor::pad(x, {1, 1}, dtensor::PadMode::constant, 3);
      const bool keeps = op != ReduceOp::sum && op != ReduceOp::product;
      EXPECT_EQ(padded.placements()[0].is_partial(), keeps) << to_string(op);
      EXPECT_TRUE(at::allclose(padded.full_tensor(), at::constant_pad_nd(full, {1, 1}, 3))) << to_string(op);
    }
  });
}

TEST(DTensorViewTest, ShardsOfOtherDimensionsStay) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const auto on = [&](const Sizes& size, const Placement& placement) {
      return distribute_tensor(indexed(size), mesh, {placement});
    };
    EXPECT_EQ(dtensor::pad(on({4, 6}, S0), {1, 1}).placements(), Placements{S0});
    EXPECT_EQ(dtensor::pad(on({4, 6}, S1), {1, 1}).placements(), Placements{R});
    EXPECT_EQ(dtensor::roll(on({4, 6}, S1), {1}, {0}).placements(), Placements{S1});
    EXPECT_EQ(dtensor::flip(on({4, 6}, S1), {0}).placements(), Placements{S1});
    EXPECT_EQ(dtensor::fft_rfft(on({4, 6}, S0)).placements(), Placements{S0});
    EXPECT_EQ(dtensor::fft_fft(on({4, 6}, S1)).placements(), Placements{R});
    EXPECT_EQ(dtensor::repeat(on({4, 6}, S1), {2, 1}).placements(), Placements{S1});
    EXPECT_EQ(dtensor::movedim(on({4, 6}, S1), {1}, {0}).placements(), Placements{S0});
    EXPECT_EQ(dtensor::squeeze(on({1, 6}, S1)).placements(), Placements{S0});
    EXPECT_EQ(dtensor::view_as_complex(on({4, 2}, S0)).placements(), Placements{S0});
    const DTensor full = on({4, 6}, S1);
    for (const std::int64_t end : {6, 9}) {
      EXPECT_EQ(dtensor::slice(full, 1, 0, end).placements(), Placements{S1});
      EXPECT_TRUE(at::equal(dtensor::slice(full, 1, 0, end).full_tensor(), indexed({4, 6})));
    }
    const DTensor bounds = distribute_tensor(at::arange(4).to(at::kDouble) * 5, mesh, {S0});
    EXPECT_EQ(dtensor::bucketize(full, bounds).placements(), Placements{S1});
    const DTensor sum = dtensor::sum(on({2, 4, 6}, S0), {0});
    EXPECT_EQ(dtensor::bucketize(sum, bounds).placements(), Placements{R});
    const at::Tensor counted = dtensor::where(dtensor::gt(full, 3), 1, 0).full_tensor();
    EXPECT_EQ(counted.scalar_type(), at::kLong);
    EXPECT_TRUE(at::equal(counted, at::where(indexed({4, 6}).gt(3), 1, 0)));
    // Convolutions.
    const DTensor image = on({4, 4, 6, 8}, S0), weight = on({2, 4, 3, 3}, R);
    const auto moved = [&](std::int64_t dim) { return image.redistribute({Placement::shard(dim)}); };
    EXPECT_EQ(dtensor::convolution(image, weight).placements(), Placements{S0});
    EXPECT_EQ(dtensor::convolution(moved(2), weight).placements(), Placements{kPlanes});
    EXPECT_EQ(dtensor::convolution(moved(3), weight).placements(), Placements{Placement::shard(3)});
    EXPECT_EQ(dtensor::convolution(moved(1), weight.redistribute({S1})).placements(), Placements{P});
    EXPECT_EQ(dtensor::convolution(image.redistribute({R}), weight.redistribute({S0})).placements(), Placements{S1});
    EXPECT_EQ(dtensor::max_pool(moved(1), {.kernel = {2}}).placements(), Placements{S1});
  });
}

// Every shard of the spatial dimensions, of kernels that reach over several ranks and past the ends.
TEST(DTensorConvolutionTest, RanksExchangeTheEdgesOfTheirShards) {
  struct Case {
    std::int64_t stride, padding, dilation, groups;
  };
  const at::Tensor x = at::sin(indexed({2, 2, 9, 7})), bias = indexed({4});
  for (const Sizes& shape : {Sizes{3}, Sizes{2, 2}, Sizes{6}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      for (const Case& test :
           {Case{1, 1, 1, 1}, Case{3, 0, 1, 1}, Case{3, 4, 1, 1}, Case{1, 2, 2, 2}, Case{2, 3, 3, 1}}) {
        const at::Tensor weight = at::cos(indexed({4, 2 / test.groups, 3, 3}));
        dtensor::ConvolutionOptions options;
        options.stride = {test.stride};
        options.padding = {test.padding};
        options.dilation = {test.dilation};
        options.groups = test.groups;
        const at::Tensor leaf = x.clone().requires_grad_(), kernel = weight.clone().requires_grad_(),
                         added = bias.clone().requires_grad_();
        const at::Tensor expected =
            at::conv2d(leaf, kernel, added, test.stride, test.padding, test.dilation, test.groups);
        const at::Tensor weights = at::cos(indexed(expected.sizes().vec()));
        (expected * weights).sum().backward();
        for (const Placements& placements : cross({R, kPlanes, Placement::shard(3)}, shape.size())) {
          const std::string shown = to_string(placements) + " with stride " + std::to_string(test.stride);
          const DTensor image = distribute_tensor(x, mesh, placements).requires_grad_();
          const DTensor shared = distribute_tensor(weight, mesh).requires_grad_(),
                        constant = distribute_tensor(bias, mesh).requires_grad_();
          const DTensor found = dtensor::convolution(image, shared, constant, options);
          if (shape.size() == 1) {
            EXPECT_EQ(found.placements(), placements);
          }
          const at::Tensor all = found.full_tensor();
          ASSERT_TRUE(at::allclose(all, expected)) << shown;
          (all * weights).sum().backward();
          ASSERT_TRUE(at::allclose(image.grad()->full_tensor(), leaf.grad())) << shown;
          ASSERT_TRUE(at::allclose(shared.grad()->full_tensor(), kernel.grad())) << shown;
          ASSERT_TRUE(at::allclose(constant.grad()->full_tensor(), added.grad())) << shown;
        }
      }
    });
  }
}

TEST(DTensorConvolutionTest, AnInputWithoutGradientGetsNone) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor x = distribute_tensor(indexed({2, 3, 5, 6}), mesh, {Placement::shard(3)});
    const DTensor weight = distribute_tensor(indexed({4, 3, 3, 3}).requires_grad_(), mesh),
                  bias = distribute_tensor(indexed({4}).requires_grad_(), mesh);
    dtensor::sum(dtensor::convolution(x, weight, bias)).full_tensor().backward();
    EXPECT_FALSE(x.grad());
    EXPECT_TRUE(weight.grad() && bias.grad());
  });
}

TEST(DTensorViewTest, StorageIsThatOfTheFullTensor) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor full = indexed({10, 12});
    for (const Placement& placement : {R, S0, S1}) {
      const DTensor x = distribute_tensor(full, mesh, {placement});
      EXPECT_TRUE(x.is_contiguous());
      EXPECT_EQ(x.storage_offset(), 0);
      EXPECT_FALSE(x.is_pinned());
      for (const std::int64_t dim : {0, 1}) {
        if (placement == Placement::shard(dim)) continue;  // which the slice unshards
        const DTensor part = dtensor::slice(x, dim, 2, 9);
        const at::Tensor expected = full.slice(dim, 2, 9);
        EXPECT_EQ(part.stride(), expected.strides().vec()) << to_string(placement) << dim;
        EXPECT_EQ(part.storage_offset(), expected.storage_offset()) << to_string(placement) << dim;
        EXPECT_EQ(part.is_contiguous(), expected.is_contiguous());
      }
      const DTensor turned = dtensor::transpose(x, 0, 1);
      EXPECT_EQ(turned.stride(), (Sizes{1, 12}));
      EXPECT_FALSE(turned.is_contiguous());
      const DTensor copied = dtensor::contiguous(turned);
      EXPECT_TRUE(copied.is_contiguous() && copied.local_tensor().is_contiguous());
      EXPECT_TRUE(at::equal(copied.full_tensor(), full.t()));
    }
    const DTensor leaf = distribute_tensor(full, mesh, {S0}).requires_grad_();
    dtensor::contiguous(dtensor::transpose(leaf, 0, 1)).to_local().sum().backward();
    EXPECT_TRUE(at::equal(leaf.grad()->full_tensor(), at::ones_like(full)));
  });
}

// The gradient of a leaf is stored as the leaf is.
TEST(DTensorViewTest, GradientsKeepTheMemoryFormat) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor local = indexed({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
    for (const Placement& target : {R, S0, S1}) {
      local.mutable_grad() = at::Tensor();
      const DTensor x = DTensor::from_local(local, mesh, {S0});
      EXPECT_EQ(x.stride(), (Sizes{60, 1, 15, 3}));
      dtensor::sum(dtensor::square(x.redistribute({target}))).full_tensor().backward();
      EXPECT_TRUE(x.grad()->local_tensor().is_contiguous(at::MemoryFormat::ChannelsLast)) << to_string(target);
      EXPECT_TRUE(at::equal(local.grad(), local.detach() * 2)) << to_string(target);
    }
  });
}

TEST(DTensorFactoryTest, NewTensorsAreAsAnother) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    for (const Placement& placement : {R, S0, S1, P}) {
      const DTensor x = dtensor::ones({6, 4}, mesh, {placement}, at::kDouble);
      const DTensor same = dtensor::new_full(x, {6, 4}, 42), other = dtensor::new_full(x, {4, 8}, 42, at::kLong);
      EXPECT_EQ(same.placements(), Placements{placement});
      EXPECT_EQ(other.placements(), Placements{R});
      EXPECT_TRUE(at::equal(same.full_tensor(), at::full({6, 4}, 42, at::kDouble)));
      EXPECT_TRUE(at::equal(other.full_tensor(), at::full({4, 8}, 42, at::kLong)));
      EXPECT_TRUE(at::equal(dtensor::new_zeros(x, {2}).full_tensor(), at::zeros({2}, at::kDouble)));
      EXPECT_TRUE(at::equal(dtensor::new_ones(x, {2}).full_tensor(), at::ones({2}, at::kDouble)));
      EXPECT_EQ(dtensor::new_empty(x, {6, 4}, at::kHalf).scalar_type(), at::kHalf);
      for (const DTensor& like : {dtensor::zeros_like(x, at::kBFloat16), dtensor::ones_like(x, at::kBFloat16),
                                  dtensor::full_like(x, 0, at::kBFloat16), dtensor::empty_like(x, at::kBFloat16)}) {
        EXPECT_EQ(like.scalar_type(), at::kBFloat16);
        EXPECT_EQ(like.placements(), Placements{placement});
      }
      EXPECT_EQ(x.scalar_type(), at::kDouble);
    }
    const DTensor x = dtensor::ones({6, 4}, mesh, {S1});
    const auto expect = [](const DTensor& found, const Placement& placement, const Sizes& size, const Sizes& strides) {
      EXPECT_EQ(found.placements(), Placements{placement});
      EXPECT_EQ(found.local_tensor().sizes(), size);
      EXPECT_EQ(found.local_tensor().strides(), strides);
    };
    expect(dtensor::new_empty_strided(x, {6, 4}, {4, 1}), S1, {6, 2}, {2, 1});
    expect(dtensor::new_empty_strided(x, {6, 4}, {1, 6}), S1, {6, 2}, {1, 6});
    expect(dtensor::new_empty_strided(x, {6, 4}, {8, 2}), R, {6, 4}, {8, 2});
    expect(dtensor::new_empty_strided(x, {6, 2}, {2, 1}), R, {6, 2}, {2, 1});
    const DTensor uneven = dtensor::ones({6, 5}, mesh, {S1});
    expect(dtensor::new_empty_strided(uneven, {6, 5}, {5, 1}), R, {6, 5}, {5, 1});
    EXPECT_ERROR(dtensor::new_empty_strided(x, {6, 4}, {4}), ErrorCode::invalid_argument,
                 "expected a stride for each dimension");
  });
}

TEST(DTensorViewTest, WhatDoesNotFitIsRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor x = distribute_tensor(indexed({4, 6}), mesh, {S0});
    EXPECT_ERROR(dtensor::movedim(x, {0}, {0, 1}), ErrorCode::invalid_argument, "expected as many, at least one");
    EXPECT_ERROR(dtensor::movedim(x, {0, -2}, {0, 1}), ErrorCode::invalid_argument, "one of them twice");
    EXPECT_ERROR(dtensor::repeat(x, {2}), ErrorCode::invalid_argument, "expected a number >= 0 for each dimension");
    EXPECT_ERROR(dtensor::unflatten(x, 1, {4, -1}), ErrorCode::invalid_argument, "expected sizes whose product it is");
    EXPECT_ERROR(dtensor::roll(x, {1, 2}, {0}), ErrorCode::invalid_argument, "expected a number for each dimension");
    EXPECT_ERROR(dtensor::pad(x, {1}), ErrorCode::invalid_argument, "expected two numbers for each of the last");
    EXPECT_ERROR(dtensor::pad(x, {-4, -3}), ErrorCode::invalid_argument, "expected to remove at most what there is");
    EXPECT_ERROR(dtensor::pad(x, {9, 9}, dtensor::PadMode::reflect), ErrorCode::invalid_argument, "pad(DTensor of");
    EXPECT_ERROR(dtensor::one_hot(x), ErrorCode::invalid_argument, "one_hot(");
    EXPECT_ERROR(dtensor::view_as_complex(x), ErrorCode::invalid_argument, "expected a last dimension of size 2");
    EXPECT_ERROR(dtensor::view_as_real(x), ErrorCode::invalid_argument, "expected a complex dtype");
    EXPECT_ERROR(dtensor::imag(x), ErrorCode::invalid_argument, "imag(");
    EXPECT_ERROR(dtensor::fft_fft(x, 0), ErrorCode::invalid_argument, "expected a size >= 1 for each");
    EXPECT_ERROR(dtensor::fft_fftn(x, {{}, {1, -1}}), ErrorCode::invalid_argument, "one of them twice");
    EXPECT_ERROR(dtensor::convolution(x, x), ErrorCode::invalid_argument,
                 "convolution of size [4, 6]: expected [n, channels, ...] with one to three more dimensions");
    const DTensor image = distribute_tensor(indexed({2, 4, 6}), mesh, {S0});
    EXPECT_ERROR(dtensor::convolution(image, distribute_tensor(indexed({2, 3, 3}), mesh)), ErrorCode::invalid_argument,
                 "convolution of size [2, 4, 6] by weights of size [2, 3, 3] and bias of none in 1 groups: expected "
                 "[n, in, ...], weights [out, in / groups, ...] of as many dimensions");
    dtensor::ConvolutionOptions options;
    options.stride = {0};
    EXPECT_ERROR(dtensor::convolution(image, distribute_tensor(indexed({2, 4, 3}), mesh), std::nullopt, options),
                 ErrorCode::invalid_argument, "convolution with stride [0]: expected one number >= 1");
    EXPECT_ERROR(dtensor::max_pool(image, {.kernel = {7}}), ErrorCode::invalid_argument, "expected a kernel that fits");
  });
}

}  // namespace
}  // namespace tessera

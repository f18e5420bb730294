#include "tessera/tensor/dtensor_ops.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor_op.h"

namespace tessera {
namespace {

using testing::cross;
using testing::indexed;
using testing::local_of;
using testing::part_of;
using testing::Sizes;

const Placement R = Placement::replicate(), S0 = Placement::shard(0), S1 = Placement::shard(1),
                S2 = Placement::shard(2), P = Placement::partial();

struct Case {
  std::string name;
  std::vector<Sizes> sizes;  // of the inputs
  std::function<DTensor(const std::vector<DTensor>&)> ours;
  std::function<at::Tensor(const std::vector<at::Tensor>&)> aten;
  bool has_gradient = true;
};

using V = const std::vector<DTensor>&;
using A = const std::vector<at::Tensor>&;

std::vector<Case> cases() {
  return {
      {"relu", {{5, 4}}, [](V v) { return dtensor::relu(v[0]); }, [](A a) { return at::relu(a[0]); }},
      {"gelu", {{5, 4}}, [](V v) { return dtensor::gelu(v[0]); }, [](A a) { return at::gelu(a[0]); }},
      {"neg", {{5, 4}}, [](V v) { return dtensor::neg(v[0]); }, [](A a) { return at::neg(a[0]); }},
      {"add", {{5, 4}, {5, 4}}, [](V v) { return v[0] + v[1]; }, [](A a) { return a[0] + a[1]; }},
      {"add_row", {{5, 4}, {4}}, [](V v) { return v[0] + v[1]; }, [](A a) { return a[0] + a[1]; }},
      {"sub_column", {{5, 4}, {5, 1}}, [](V v) { return v[0] - v[1]; }, [](A a) { return a[0] - a[1]; }},
      {"mul", {{5, 4}, {5, 4}}, [](V v) { return v[0] * v[1]; }, [](A a) { return a[0] * a[1]; }},
      {"div_outer", {{5, 1}, {1, 4}}, [](V v) { return v[0] / v[1]; }, [](A a) { return a[0] / a[1]; }},
      {"mul_scalar", {{5, 4}}, [](V v) { return dtensor::mul(v[0], 3); }, [](A a) { return a[0] * 3; }},
      {"pow", {{5, 4}}, [](V v) { return dtensor::pow(v[0], 3); }, [](A a) { return a[0].pow(3); }},
      {"matmul",
       {{5, 4}, {4, 3}},
       [](V v) { return dtensor::matmul(v[0], v[1]); },
       [](A a) { return at::matmul(a[0], a[1]); }},
      {"linear",
       {{5, 4}, {6, 4}, {6}},
       [](V v) { return dtensor::linear(v[0], v[1], v[2]); },
       [](A a) { return at::linear(a[0], a[1], a[2]); }},
      {"layer_norm",
       {{5, 4}, {4}, {4}},
       [](V v) { return dtensor::layer_norm(v[0], {4}, v[1], v[2]); },
       [](A a) { return at::layer_norm(a[0], {4}, a[1], a[2]); }},
      {"softmax", {{5, 4}}, [](V v) { return dtensor::softmax(v[0], -1); }, [](A a) { return at::softmax(a[0], -1); }},
      {"log_softmax",
       {{5, 4}},
       [](V v) { return dtensor::log_softmax(v[0], 0); },
       [](A a) { return at::log_softmax(a[0], 0); }},
      {"sum", {{5, 4}}, [](V v) { return dtensor::sum(v[0]); }, [](A a) { return at::sum(a[0]); }},
      {"sum_rows",
       {{5, 4}},
       [](V v) { return dtensor::sum(v[0], {0}, true); },
       [](A a) { return at::sum(a[0], {0}, true); }},
      {"mean", {{5, 4}}, [](V v) { return dtensor::mean(v[0], {-1}); }, [](A a) { return at::mean(a[0], {-1}); }},
      {"amax", {{5, 4}}, [](V v) { return dtensor::amax(v[0], {0}); }, [](A a) { return at::amax(a[0], {0}); }},
      {"amin", {{6, 4}}, [](V v) { return dtensor::amin(v[0]); }, [](A a) { return at::amin(a[0]); }, false},
      {"transpose", {{5, 4}}, [](V v) { return dtensor::transpose(v[0], 0, 1); }, [](A a) { return a[0].t(); }},
  };
}

// Returns a replicated DTensor on the mesh of `on`.
DTensor replicated(const DTensor& on, const at::Tensor& full) { return DTensor::from_local(full, on.device_mesh()); }

std::vector<Case> pointwise_cases() {
  return {
      {"scalars",
       {{5, 4}},
       [](V v) { return 2.5 - (-v[0] + 1) * 3 / 4 + 1 / v[0] - 7; },
       [](A a) { return 2.5 - (-a[0] + 1) * 3 / 4 + 1 / a[0] - 7; }},
      {"trigonometry",
       {{5, 4}},
       [](V v) { return dtensor::sin(v[0]) * dtensor::cos(v[0]) + dtensor::erf(v[0]); },
       [](A a) { return at::sin(a[0]) * at::cos(a[0]) + at::erf(a[0]); }},
      {"clamp",
       {{5, 4}},
       [](V v) { return dtensor::clamp(v[0], 0.8, 2.1); },
       [](A a) { return at::clamp(a[0], 0.8, 2.1); }},
      {"where",
       {{5, 4}, {4}},
       [](V v) { return dtensor::where(dtensor::gt(v[0], v[1]), v[0], v[1]); },
       [](A a) { return at::where(a[0].gt(a[1]), a[0], a[1]); }},
      {"masked_fill",
       {{5, 4}},
       [](V v) { return dtensor::masked_fill(v[0], dtensor::lt(v[0], 1.5), -3); },
       [](A a) { return a[0].masked_fill(a[0].lt(1.5), -3); }},
      {"comparisons",
       {{5, 4}, {5, 1}},
       [](V v) {
         const auto number = [](const DTensor& x) { return dtensor::to(x, at::kDouble); };
         return number(dtensor::le(v[0], v[1] + 0.003)) + number(dtensor::ge(v[0], 1.7)) * 2 +
                number(dtensor::logical_not(dtensor::ne(v[0], v[1] + 0.003))) * 4 + number(dtensor::eq(v[0], v[0])) * 8;
       },
       [](A a) {
         return a[0].le(a[1] + 0.003).to(at::kDouble) + a[0].ge(1.7).to(at::kDouble) * 2 +
                a[0].eq(a[1] + 0.003).to(at::kDouble) * 4 + 8;
       },
       false},
      {"atan2",
       {{5, 4}, {5, 4}},
       [](V v) {
         return dtensor::pointwise("atan2", v, [](std::span<const DTensor> x) {
           return at::atan2(x[0].local_tensor(), x[1].local_tensor());
         });
       },
       [](A a) { return at::atan2(a[0], a[1]); }},
  };
}

std::vector<Case> product_cases() {
  return {
      {"matmul_batches",
       {{2, 1, 3, 4}, {3, 4, 2}},
       [](V v) { return dtensor::matmul(v[0], v[1]); },
       [](A a) { return at::matmul(a[0], a[1]); }},
      {"matmul_vector",
       {{5, 4}, {4}},
       [](V v) { return dtensor::matmul(v[0], v[1]); },
       [](A a) { return at::matmul(a[0], a[1]); }},
      {"matmul_row",
       {{4}, {2, 4, 3}},
       [](V v) { return dtensor::matmul(v[0], v[1]); },
       [](A a) { return at::matmul(a[0], a[1]); }},
      {"dot", {{4}, {4}}, [](V v) { return dtensor::matmul(v[0], v[1]); }, [](A a) { return at::matmul(a[0], a[1]); }},
      {"addmm",
       {{3}, {5, 4}, {4, 3}},
       [](V v) { return dtensor::addmm(v[0], v[1], v[2], 0.5, 2); },
       [](A a) { return at::addmm(a[0], a[1], a[2], 0.5, 2); }},
      {"attention",
       {{4, 3, 5}, {4, 6, 5}, {4, 6, 2}},
       [](V v) { return dtensor::scaled_dot_product_attention(v[0], v[1], v[2]); },
       [](A a) { return at::matmul(at::softmax(at::matmul(a[0], a[1].transpose(1, 2)) / std::sqrt(5.0), -1), a[2]); }},
      {"causal_attention",
       {{4, 3, 5}, {4, 3, 5}, {4, 3, 2}},
       [](V v) { return dtensor::scaled_dot_product_attention(v[0], v[1], v[2], true); },
       [](A a) {
         const at::Tensor mask = at::full({3, 3}, -INFINITY, at::kDouble).triu(1);
         return at::matmul(at::softmax(at::matmul(a[0], a[1].transpose(1, 2)) / std::sqrt(5.0) + mask, -1), a[2]);
       }},
  };
}

std::vector<Case> reduction_cases() {
  return {
      {"softmax_rows", {{5, 4}}, [](V v) { return dtensor::softmax(v[0], 0); }, [](A a) { return a[0].softmax(0); }},
      {"log_softmax_last",
       {{5, 4}},
       [](V v) { return dtensor::log_softmax(v[0], -1); },
       [](A a) { return a[0].log_softmax(-1); }},
      {"var",
       {{5, 4}},
       [](V v) { return dtensor::var(v[0], {0}, 1, true); },
       [](A a) { return a[0].var(at::IntArrayRef{0}, true, true); }},
      {"norm",
       {{5, 4}},
       [](V v) { return dtensor::vector_norm(v[0]); },
       [](A a) { return at::linalg_vector_norm(a[0]); }},
      {"norm3",
       {{5, 4}},
       [](V v) { return dtensor::vector_norm(v[0] - 1.5, 3, {1}, true); },
       [](A a) { return at::linalg_vector_norm(a[0] - 1.5, 3, at::IntArrayRef{1}, true); }},
      {"norm1_and_max",
       {{5, 4}},
       [](V v) { return dtensor::vector_norm(v[0], 1, {0}) + dtensor::vector_norm(v[0], INFINITY, {0}); },
       [](A a) {
         return at::linalg_vector_norm(a[0], 1, at::IntArrayRef{0}) +
                at::linalg_vector_norm(a[0], INFINITY, at::IntArrayRef{0});
       }},
      {"norm_of_zero",
       {{5, 4}},
       [](V v) { return dtensor::vector_norm(v[0] * 0, 2, {1}); },
       [](A a) { return at::linalg_vector_norm(a[0] * 0, 2, at::IntArrayRef{1}); }},
      {"cumsum", {{5, 4}}, [](V v) { return dtensor::cumsum(v[0], 0); }, [](A a) { return a[0].cumsum(0); }},
      {"argmax",
       {{5, 4}},
       [](V v) { return dtensor::to(dtensor::argmax(v[0], 1, true), at::kDouble); },
       [](A a) { return a[0].argmax(1, true).to(at::kDouble); },
       false},
      {"topk",
       {{5, 4}},
       [](V v) { return dtensor::topk(v[0], 2, 0).values; },
       [](A a) { return std::get<0>(a[0].topk(2, 0)); }},
      {"topk_smallest",
       {{5, 4}},
       [](V v) { return dtensor::to(dtensor::topk(v[0], 3, -1, false).indices, at::kDouble); },
       [](A a) { return std::get<1>(a[0].topk(3, -1, false)).to(at::kDouble); },
       false},
  };
}

std::vector<Case> view_cases() {
  return {
      {"flatten", {{6, 4}}, [](V v) { return dtensor::flatten(v[0]); }, [](A a) { return a[0].flatten(); }},
      {"flatten_uneven", {{5, 4}}, [](V v) { return dtensor::flatten(v[0]); }, [](A a) { return a[0].flatten(); }},
      {"split_dim",
       {{4, 12}},
       [](V v) {
         return dtensor::view(v[0], {4, 6, -1});
       },
       [](A a) {
         return a[0].view({4, 6, 2});
       }},
      {"merge_and_split",
       {{2, 6, 4}},
       [](V v) {
         return dtensor::reshape(v[0], {1, 12, 2, 2});
       },
       [](A a) {
         return a[0].reshape({1, 12, 2, 2});
       }},
      {"permute",
       {{5, 4, 3}},
       [](V v) {
         return dtensor::permute(v[0], {2, 0, 1});
       },
       [](A a) {
         return a[0].permute({2, 0, 1});
       }},
      {"unsqueeze", {{5, 4}}, [](V v) { return dtensor::unsqueeze(v[0], 1); }, [](A a) { return a[0].unsqueeze(1); }},
      {"squeeze", {{5, 1, 4}}, [](V v) { return dtensor::squeeze(v[0], 1); }, [](A a) { return a[0].squeeze(1); }},
      {"expand",
       {{5, 1}},
       [](V v) {
         return dtensor::expand(v[0], {2, -1, 3}) * v[0];
       },
       [](A a) {
         return a[0].expand({2, -1, 3}) * a[0];
       }},
  };
}

std::vector<Case> selection_cases() {
  using at::indexing::Ellipsis;
  using at::indexing::None;
  using at::indexing::Slice;
  const at::Tensor places = at::tensor({4, 0, 0, 3, 1, 2}, at::kLong);
  const at::Tensor along_rows = places.view({3, 2}), along_columns = places.clamp_max(3).view({2, 3});
  return {
      {"cat",
       {{5, 4}, {2, 4}},
       [](V v) {
         return dtensor::cat({v[0], v[1], v[0]});
       },
       [](A a) {
         return at::cat({a[0], a[1], a[0]});
       }},
      {"stack",
       {{5, 4}, {5, 4}},
       [](V v) {
         return dtensor::stack({v[0], v[1]}, -1);
       },
       [](A a) {
         return at::stack({a[0], a[1]}, -1);
       }},
      {"split",
       {{5, 4}},
       [](V v) {
         const std::vector<DTensor> parts = dtensor::split(v[0], Sizes{2, 3});
         return dtensor::sum(parts[0], {0}) * dtensor::sum(parts[1], {0});
       },
       [](A a) { return a[0].narrow(0, 0, 2).sum(0) * a[0].narrow(0, 2, 3).sum(0); }},
      {"chunk", {{5, 4}}, [](V v) { return dtensor::chunk(v[0], 3)[2]; }, [](A a) { return a[0].chunk(3)[2]; }},
      {"split_even",
       {{5, 4}},
       [](V v) { return dtensor::split(v[0], 3, 1)[1]; },
       [](A a) { return a[0].split(3, 1)[1]; }},
      {"slice",
       {{5, 4}},
       [](V v) { return dtensor::slice(v[0], 0, 1, -1, 2); },
       [](A a) { return a[0].slice(0, 1, -1, 2); }},
      {"select", {{5, 4}}, [](V v) { return dtensor::select(v[0], 0, -2); }, [](A a) { return a[0].select(0, -2); }},
      {"index",
       {{5, 4, 3}},
       [](V v) {
         return dtensor::index(v[0], {Slice(1, None, 3), None, Ellipsis, 0});
       },
       [](A a) {
         return a[0].index({Slice(1, None, 3), None, Ellipsis, 0});
       }},
      {"index_select",
       {{5, 4}},
       [=](V v) { return dtensor::index_select(v[0], 0, replicated(v[0], places)); },
       [=](A a) { return a[0].index_select(0, places); }},
      {"gather_rows",
       {{5, 4}},
       [=](V v) { return dtensor::gather(v[0], 0, replicated(v[0], along_rows)); },
       [=](A a) { return a[0].gather(0, along_rows); }},
      {"gather_columns",
       {{5, 4}},
       [=](V v) { return dtensor::gather(v[0], 1, replicated(v[0], along_columns)); },
       [=](A a) { return a[0].gather(1, along_columns); }},
  };
}

std::vector<Case> loss_cases() {
  const at::Tensor target = at::tensor({3, 0, -100, 3, 2}, at::kLong);
  const at::Tensor of_pixels = at::tensor({3, 0, 1, -100, 2, 1}, at::kLong).view({2, 3});
  using dtensor::Reduction;
  const auto options = [](const DTensor& weight, Reduction reduction, double smoothing) {
    dtensor::LossOptions o;
    o.weight = weight;
    o.reduction = reduction;
    o.label_smoothing = smoothing;
    return o;
  };
  return {
      {"cross_entropy",
       {{5, 4}},
       [=](V v) { return dtensor::cross_entropy(v[0] * 3, replicated(v[0], target)); },
       [=](A a) { return at::cross_entropy_loss(a[0] * 3, target); }},
      {"cross_entropy_weighted",
       {{5, 4}, {4}},
       [=](V v) {
         return dtensor::cross_entropy(v[0], replicated(v[0], target), options(v[1].detach(), Reduction::mean, 0.2)) +
                dtensor::sum(v[1]) * 0;
       },
       [=](A a) {
         return at::cross_entropy_loss(a[0], target, a[1].detach(), at::Reduction::Mean, -100, 0.2) + a[1].sum() * 0;
       }},
      {"nll_loss_of_pixels",
       {{2, 4, 3}, {4}},
       [=](V v) {
         return dtensor::nll_loss(v[0], replicated(v[0], of_pixels), options(v[1].detach(), Reduction::none, 0)) +
                dtensor::sum(v[1]) * 0;
       },
       [=](A a) {
         return at::nll_loss2d(a[0].unsqueeze(3), of_pixels.unsqueeze(2), a[1].detach(), at::Reduction::None)
                    .squeeze(2) +
                a[1].sum() * 0;
       }},
      {"mse_loss",
       {{5, 4}, {5, 4}},
       [](V v) { return dtensor::mse_loss(v[0], v[1]); },
       [](A a) { return at::mse_loss(a[0], a[1]); }},
  };
}

std::vector<Case> more_cases() {
  std::vector<Case> all;
  for (const auto& more :
       {pointwise_cases(), product_cases(), reduction_cases(), view_cases(), selection_cases(), loss_cases()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

class DTensorOpTest : public ::testing::TestWithParam<std::tuple<Case, Sizes>> {};

TEST_P(DTensorOpTest, GivesWhatItGivesOnTheWhole) {
  const auto& [op, shape] = GetParam();
  std::vector<at::Tensor> wholes;
  for (const Sizes& size : op.sizes) {
    wholes.push_back(
        at::sin(indexed(size).add(static_cast<double>(wholes.size()) * 7)).add(1.5).set_requires_grad(op.has_gradient));
  }
  const at::Tensor expected = op.aten(wholes);
  const at::Tensor weights = at::cos(indexed(expected.sizes().vec()));
  if (op.has_gradient) (expected * weights).sum().backward();
  run_local(static_cast<int>(mesh_size(shape)), [&, &op = op, &shape = shape](const ProcessGroup& group) {
    const DeviceMesh mesh(group, shape);
    std::vector<std::vector<Placements>> choices;
    for (const Sizes& size : op.sizes) {
      choices.push_back(cross(size.size() > 1 ? Placements{R, S0, S1, P} : Placements{R, S0, P}, shape.size()));
    }
    std::vector<std::size_t> at(choices.size(), 0);
    for (;;) {
      std::vector<at::Tensor> leaves;
      std::vector<DTensor> inputs;
      std::string shown;
      for (std::size_t i = 0; i < choices.size(); ++i) {
        const MeshLayout layout(op.sizes[i], shape, choices[i][at[i]]);
        leaves.push_back(local_of(wholes[i], layout, *mesh.coordinate()).set_requires_grad(op.has_gradient));
        inputs.push_back(DTensor::from_local(leaves[i], mesh, layout.placements(), {op.sizes[i]}));
        shown += to_string(layout.placements()) + " ";
      }
      const at::Tensor found = op.ours(inputs).full_tensor();
      ASSERT_TRUE(at::allclose(found, expected.detach(), 1e-10, 1e-12)) << op.name << " of " << shown << found;
      if (op.has_gradient) {
        (found * weights).sum().backward();
        for (std::size_t i = 0; i < leaves.size(); ++i) {
          const at::Tensor gradient = part_of(wholes[i].grad(), inputs[i].layout(), *mesh.coordinate());
          ASSERT_TRUE(leaves[i].grad().defined()) << op.name << " of " << shown;
          ASSERT_TRUE(at::allclose(leaves[i].grad(), gradient, 1e-9, 1e-11))
              << op.name << " of " << shown << ", gradient of " << i << leaves[i].grad() << gradient;
        }
      }
      // Skip ahead: a sample of many combinations.
      std::size_t i = 0;
      for (std::size_t skip = shape.size() > 1 && choices.size() > 1 ? 37 : 1; skip > 0; --skip) {
        for (i = 0; i < at.size() && ++at[i] == choices[i].size(); ++i) at[i] = 0;
        if (i == at.size()) break;
      }
      if (i == at.size()) break;
    }
  });
}

std::vector<std::tuple<Case, Sizes>> parameters() {
  std::vector<std::tuple<Case, Sizes>> all;
  for (const Case& op : cases()) {
    for (const Sizes& mesh : {Sizes{1}, Sizes{2}, Sizes{3}, Sizes{2, 2}}) all.emplace_back(op, mesh);
  }
  for (const Case& op : more_cases()) {
    for (const Sizes& mesh : {Sizes{3}, Sizes{2, 2}}) all.emplace_back(op, mesh);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Ops, DTensorOpTest, ::testing::ValuesIn(parameters()),
                         [](const ::testing::TestParamInfo<std::tuple<Case, Sizes>>& test) {
                           std::string name = std::get<0>(test.param).name + "Mesh";
                           for (const std::int64_t length : std::get<1>(test.param)) name += std::to_string(length);
                           return name;
                         });

TEST(DTensorOpsTest, TheCheapestPlacementIsTaken) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const auto on = [&](const Sizes& size, const Placement& placement) {
      return distribute_tensor(indexed(size), mesh, {placement});
    };
    const DTensor x = on({6, 4}, R);
    EXPECT_EQ(dtensor::linear(x, on({8, 4}, S0), on({8}, S0)).placements(), Placements{S1});
    EXPECT_EQ(dtensor::linear(on({6, 8}, S1), on({4, 8}, S1), on({4}, R)).placements(), Placements{P});
    EXPECT_EQ(dtensor::linear(on({6, 4}, S0), on({8, 4}, R), on({8}, R)).placements(), Placements{S0});
    EXPECT_EQ(dtensor::matmul(on({3, 5, 4}, S0), on({3, 4, 2}, S0)).placements(), Placements{S0});
    EXPECT_EQ(dtensor::matmul(on({3, 5, 4}, S1), on({3, 4, 2}, R)).placements(), Placements{S1});
    EXPECT_EQ(dtensor::matmul(on({3, 5, 4}, R), on({3, 4, 2}, S2)).placements(), Placements{S2});
    EXPECT_EQ(dtensor::add(x, on({6, 4}, S1)).placements(), Placements{S1});
    EXPECT_EQ(dtensor::sum(on({6, 4}, S1), {0}).placements(), Placements{S0});
    EXPECT_EQ(dtensor::sum(on({6, 4}, S1), {1}).placements(), Placements{P});
    EXPECT_EQ(dtensor::amax(on({6, 4}, S1), {1}).placements(), Placements{Placement::partial(ReduceOp::max)});
    EXPECT_EQ(dtensor::transpose(on({6, 4}, S1), 0, 1).placements(), Placements{S0});
    EXPECT_EQ(dtensor::relu(x).placements(), Placements{R});
    // Heads stay sharded through views, products and softmax.
    EXPECT_EQ(dtensor::view(on({3, 8}, S1), {3, 4, 2}).placements(), Placements{S1});
    EXPECT_EQ(dtensor::view(on({3, 4, 2}, S1), {3, 8}).placements(), Placements{S1});
    EXPECT_EQ(dtensor::view(on({3, 6}, S1), {3, 3, 2}).placements(), Placements{R});
    EXPECT_EQ(dtensor::view(on({1, 6, 2}, S1), {6, 2}).placements(), Placements{S0});
    EXPECT_EQ(dtensor::permute(on({2, 3, 4}, S2), {2, 0, 1}).placements(), Placements{S0});
    EXPECT_EQ(dtensor::matmul(on({2, 4, 3, 5}, S1), on({2, 4, 5, 3}, S1)).placements(), Placements{S1});
    EXPECT_EQ(
        dtensor::scaled_dot_product_attention(on({4, 3, 5}, S0), on({4, 3, 5}, S0), on({4, 3, 5}, S0)).placements(),
        Placements{S0});
    EXPECT_EQ(dtensor::log_softmax(on({6, 4}, S1), 1).placements(), Placements{S1});
    EXPECT_EQ(dtensor::cat({on({6, 4}, S1), on({2, 4}, S1)}).placements(), Placements{S1});
    EXPECT_EQ(dtensor::slice(on({6, 4}, S1), 0, 2, 5).placements(), Placements{S1});
    EXPECT_EQ(dtensor::select(on({6, 4}, S1), 0, 2).placements(), Placements{S0});
    const DTensor ids = distribute_tensor(at::zeros({6, 1}, at::kLong), mesh, {R});
    EXPECT_EQ(dtensor::gather(on({6, 40}, S1), 1, ids).placements(), Placements{P});
    const DTensor sum = dtensor::sum(on({6, 4}, S0), {0});
    EXPECT_EQ(dtensor::add(sum, sum).placements(), Placements{P});
    EXPECT_EQ(dtensor::relu(sum).placements(), Placements{R});
  });
}

TEST(DTensorOpsTest, RowsOfAnEmbeddingAreThoseOfTheRankThatHasThem) {
  for (const Sizes& shape : {Sizes{2}, Sizes{3}, Sizes{2, 2}}) {
    run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, shape);
      const at::Tensor ids = at::tensor({0, 6, 3, 3, 1, 5, 2, 4}, at::kLong).view({2, 4});
      at::Tensor full = indexed({7, 6}).set_requires_grad(true);
      const at::Tensor expected = at::embedding(full, ids), weights = indexed({2, 4, 6});
      (expected * weights).sum().backward();
      for (const Placements& of_weight : cross({R, S0, S1, Placement::strided_shard(0, 2)}, shape.size())) {
        for (const Placements& of_ids : cross({R, S0, S1}, shape.size())) {
          const DTensor weight = distribute_tensor(full, mesh, of_weight);
          const at::Tensor found = dtensor::embedding(weight, distribute_tensor(ids, mesh, of_ids)).full_tensor();
          ASSERT_TRUE(at::equal(found, expected)) << to_string(of_weight) << to_string(of_ids);
          (found * weights).sum().backward();
          ASSERT_TRUE(
              at::allclose(weight.grad()->to_local(), part_of(full.grad(), weight.layout(), *mesh.coordinate())))
              << to_string(of_weight) << to_string(of_ids);
        }
      }
      // More ranks than rows, and an id out of range on one rank only.
      const DTensor one = distribute_tensor(indexed({1, 2}), mesh, Placements(shape.size(), S0));
      const DTensor zero = distribute_tensor(at::zeros({3}, at::kLong), mesh, {});
      EXPECT_TRUE(at::equal(dtensor::embedding(one, zero).full_tensor(), indexed({1, 2}).expand({3, 2})));
      const DTensor weight = distribute_tensor(full, mesh, Placements(shape.size(), S0));
      const at::Tensor wrong = at::full({2}, group.rank() == 1 ? 7 : 0, at::kLong);
      EXPECT_ERROR(dtensor::embedding(weight, DTensor::from_local(wrong, mesh)), ErrorCode::invalid_argument,
                   "an id is out of range, expected 0 to 6");
    });
  }
}

TEST(DTensorOpsTest, EqualIsTheSameOnAllRanks) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {3});
    const at::Tensor full = indexed({4, 6});
    for (const Placement& a : {R, S0, S1, P}) {
      for (const Placement& b : {R, S0, S1, P}) {
        const auto of = [&](const at::Tensor& tensor, const Placement& placement) {
          const MeshLayout layout({4, 6}, {3}, {placement});
          return DTensor::from_local(local_of(tensor, layout, *mesh.coordinate()), mesh, {placement}, {Sizes{4, 6}});
        };
        EXPECT_TRUE(dtensor::equal(of(full, a), of(full, b)));
        at::Tensor other = full.clone();
        other[3][5] = 0;
        EXPECT_FALSE(dtensor::equal(of(full, a), of(other, b)));
      }
    }
    EXPECT_FALSE(dtensor::equal(distribute_tensor(full, mesh), distribute_tensor(full.t().contiguous(), mesh)));
  });
}

TEST(DTensorOpsTest, OnesOwnOpHasARuleOfItsOwn) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const DTensor x = distribute_tensor(indexed({4, 6}), mesh, {S0});
    const auto sorted = [&](const DTensor& tensor) {
      return call("sort_rows", {&tensor, 1}, [](std::span<const DTensor> inputs) {
        return std::get<0>(at::sort(inputs[0].local_tensor(), -1, true));
      });
    };
    EXPECT_ERROR(sorted(x), ErrorCode::unsupported,
                 "sort_rows(DTensor of size [4, 6] as [S(0)] on DeviceMesh(2)) has no placement rule");
    group.barrier();
    if (group.rank() == 0) {
      register_placement_rule("sort_rows", [](std::span<const DTensor> inputs) {
        return OpRule{inputs[0].size(), {{{R}, R}, {{S0}, S0}}, /*may_shard=*/true};
      });
    }
    group.barrier();
    EXPECT_EQ(sorted(x).placements(), Placements{S0});
    EXPECT_EQ(sorted(x.redistribute({S1})).placements(), Placements{S0});
    EXPECT_TRUE(at::equal(sorted(x).full_tensor(), indexed({4, 6}).flip({1})));
    group.barrier();
    if (group.rank() == 0) register_placement_rule("sort_rows", nullptr);
    group.barrier();
    EXPECT_ERROR(sorted(x), ErrorCode::unsupported, "has no placement rule");
  });
}

TEST(DTensorOpsTest, WhatDoesntFitIsRefused) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2}, {"dp"}), other(group, {2}, {"tp"});
    const DTensor x = distribute_tensor(indexed({4, 6}), mesh, {S0});
    EXPECT_ERROR(x + distribute_tensor(indexed({4, 6}), other, {S0}), ErrorCode::invalid_argument,
                 "add(DTensor of size [4, 6] as [S(0)] on DeviceMesh(dp=2), DTensor of size [4, 6] as [S(0)] on "
                 "DeviceMesh(tp=2)): the tensors are on different meshes, expected one mesh");
    EXPECT_ERROR(x + distribute_tensor(indexed({4, 5}), mesh, {S0}), ErrorCode::invalid_argument,
                 "add of tensors of sizes [4, 6] and [4, 5]");
    EXPECT_ERROR(dtensor::matmul(x, x), ErrorCode::invalid_argument, "matmul of tensors of sizes [4, 6] and [4, 6]");
    EXPECT_ERROR(dtensor::linear(x, distribute_tensor(indexed({3, 5}), mesh)), ErrorCode::invalid_argument,
                 "linear of");
    EXPECT_ERROR(dtensor::softmax(x, 2), ErrorCode::invalid_argument, "softmax over dimension 2 of a tensor of 2");
    EXPECT_ERROR(dtensor::sum(x, {0, -2}), ErrorCode::invalid_argument, "one of them twice");
    EXPECT_ERROR(dtensor::layer_norm(x, {4}), ErrorCode::invalid_argument, "layer_norm of size [4, 6] over [4]");
    EXPECT_ERROR(dtensor::view(x, {5, -1}), ErrorCode::invalid_argument, "view of size [4, 6] as [5, -1]");
    EXPECT_ERROR(dtensor::view(x, {-1, -1}), ErrorCode::invalid_argument, "expected at most one -1");
    EXPECT_ERROR(dtensor::permute(x, {0}), ErrorCode::invalid_argument, "expected each of them once");
    EXPECT_ERROR(dtensor::expand(x, {4, 7}), ErrorCode::invalid_argument,
                 "expected to repeat only dimensions of size 1");
    EXPECT_ERROR(dtensor::cat({}), ErrorCode::invalid_argument, "cat: no tensors");
    EXPECT_ERROR(dtensor::cat({x, dtensor::transpose(x, 0, 1)}), ErrorCode::invalid_argument,
                 "cat of tensors of sizes [4, 6] and [6, 4]");
    EXPECT_ERROR(dtensor::split(x, Sizes{1, 2}), ErrorCode::invalid_argument, "expected sizes that add up to it");
    EXPECT_ERROR(dtensor::narrow(x, 1, 4, 3), ErrorCode::invalid_argument, "expected them within it");
    EXPECT_ERROR(dtensor::select(x, 0, 4), ErrorCode::invalid_argument, "expected -4 to 3");
    EXPECT_ERROR(dtensor::slice(x, 0, 0, 4, 0), ErrorCode::invalid_argument, "expected a step of at least 1");
    EXPECT_ERROR(dtensor::index(x, {0, 0, 0}), ErrorCode::invalid_argument, "3 indices, expected at most 2");
    EXPECT_ERROR(dtensor::index(x, {at::zeros({1}, at::kLong)}), ErrorCode::unsupported, "see index_select and gather");
    EXPECT_ERROR(dtensor::topk(x, 5, 0), ErrorCode::invalid_argument, "topk(DTensor of size [4, 6]");
    EXPECT_ERROR(dtensor::vector_norm(x, 0), ErrorCode::invalid_argument, "expected an order greater than 0");
    const DTensor wrong = distribute_tensor(at::full({4}, 6, at::kLong), mesh);
    EXPECT_ERROR(dtensor::cross_entropy(x, wrong), ErrorCode::invalid_argument, "gather(");
    EXPECT_ERROR(dtensor::cross_entropy(x.redistribute({S1}), wrong), ErrorCode::invalid_argument,
                 "an index is out of range, expected 0 to 5");
    EXPECT_ERROR(dtensor::cross_entropy(x, x), ErrorCode::invalid_argument, "expected targets of size [4] of Long");
    EXPECT_ERROR(x + dtensor::to(x, at::kLong).redistribute({R}) / distribute_tensor(at::ones({5}), mesh),
                 ErrorCode::invalid_argument, "div of tensors of sizes");
    const DTensor shards =
        DTensor::from_local(LocalShardsWrapper({indexed({2, 6})}, {{2 * group.rank(), 0}}), mesh, {S0}, {4, 6});
    EXPECT_ERROR(dtensor::relu(shards), ErrorCode::unsupported, "relu is not supported for LocalShardsWrapper");
  });
}

}  // namespace
}  // namespace tessera

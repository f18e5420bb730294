// Ops on a device give what they give on the CPU, bit for bit.

#include <vector>

#include "accelerator/sim.h"
#include "tessera/base/function_ref.h"

namespace tessera::sim {
namespace {

using at::Tensor;

using OpsTest = OnDevice;
using OrderedOpsTest = InOrder;
INSTANTIATE_TEST_SUITE_P(Orders, OrderedOpsTest, ::testing::Values(Order::late, Order::early), order_name);

// Expects that `f` gives the same tensors on the CPU and on a device.
void expect_same(const std::vector<Tensor>& inputs, FunctionRef<std::vector<Tensor>(const std::vector<Tensor>&)> f) {
  std::vector<Tensor> on_device, on_cpu;
  for (const Tensor& input : inputs) {
    on_device.push_back(input.to(device(0)));
    on_cpu.push_back(input.clone());
  }
  const std::vector<Tensor> results = f(on_device), expected = f(on_cpu);
  ASSERT_EQ(results.size(), expected.size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i].device(), device(0));
    EXPECT_EQ(results[i].sizes(), expected[i].sizes());
    EXPECT_EQ(results[i].strides(), expected[i].strides());
    EXPECT_TRUE(same(results[i], expected[i])) << i << ": " << results[i].cpu() << "\nexpected\n" << expected[i];
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(same(on_device[i], on_cpu[i])) << "input " << i;
}

Tensor some(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) { return at::randn(sizes).to(dtype); }

TEST_P(OrderedOpsTest, Elementwise) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    expect_same({some({3, 5}, dtype), some({5}, dtype)}, [](const std::vector<Tensor>& in) {
      return std::vector<Tensor>{in[0] + in[1],
                                 in[0] * 2.5,
                                 1 - in[0],
                                 in[0].exp(),
                                 at::gelu(in[0]),
                                 in[0] > 0,
                                 at::where(in[0] > 0, in[0], in[1]),
                                 in[0].to(at::kInt),
                                 in[0].clamp(-0.5, 0.5),
                                 in[0].pow(2)};
    });
  }
}

TEST_P(OrderedOpsTest, InPlaceAndOut) {
  expect_same({some({3, 5}), some({3, 5})}, [](std::vector<Tensor> in) {
    in[0].add_(in[1]).mul_(3).clamp_(-1);
    in[0].t().div_(2);
    in[0][1].zero_();
    Tensor out = at::empty({0}, in[0].options());
    at::mul_out(out, in[0], in[1]);
    Tensor sum = at::empty({0}, in[0].options());
    at::sum_out(sum, in[0], 1);
    in[1].masked_fill_(in[1] > 0, 7);
    return std::vector<Tensor>{out, sum};
  });
}

TEST_P(OrderedOpsTest, Reductions) {
  expect_same({some({4, 6})}, [](const std::vector<Tensor>& in) {
    const auto [values, indices] = in[0].max(1);
    const auto [sorted, order] = in[0].sort(0);
    const auto [top, places] = in[0].topk(2);
    return std::vector<Tensor>{in[0].sum(),
                               in[0].mean(0),
                               in[0].norm(),
                               in[0].std(1),
                               values,
                               indices,
                               sorted,
                               order,
                               top,
                               places,
                               in[0].argmax(),
                               in[0].cumsum(1),
                               in[0].softmax(1),
                               in[0].logsumexp(0),
                               at::isfinite(in[0]).all()};
  });
}

TEST_P(OrderedOpsTest, Matrices) {
  expect_same(
      {some({4, 6}), some({6, 3}), some({3}), some({2, 4, 6}), some({2, 6, 5})}, [](const std::vector<Tensor>& in) {
        return std::vector<Tensor>{
            at::mm(in[0], in[1]),     at::addmm(in[2], in[0], in[1]),      at::bmm(in[3], in[4]),
            at::matmul(in[3], in[1]), at::linear(in[3], in[1].t(), in[2]), at::einsum("bij,jk->bki", {in[3], in[1]})};
      });
}

TEST_P(OrderedOpsTest, Views) {
  expect_same({some({4, 6})}, [](const std::vector<Tensor>& in) {
    return std::vector<Tensor>{in[0].view({2, 12}),     in[0].t(),
                               in[0].select(0, 1),      in[0].slice(1, 1, 5, 2),
                               in[0].expand({3, 4, 6}), in[0].unfold(1, 2, 2),
                               in[0].reshape({3, 8}),   in[0].t().reshape({-1}),
                               in[0].unsqueeze(0),      in[0].flatten(),
                               in[0].chunk(2, 1)[1],    in[0].diagonal(),
                               in[0].detach(),          in[0].permute({1, 0})};
  });
}

TEST_P(OrderedOpsTest, ListsOfTensors) {
  expect_same({some({4, 6}), some({4, 6})}, [](const std::vector<Tensor>& in) {
    const std::vector<Tensor> parts = at::split_copy(in[0], 2);
    std::vector<Tensor> results = at::_foreach_add(in, 2);
    at::_foreach_mul_(in, 3);
    const std::vector<Tensor> norms = at::_foreach_norm(in);
    results.insert(results.end(),
                   {at::cat({in[0], in[1]}, 1), at::stack({in[0], in[1]}), parts[0], parts[1], norms[0], norms[1]});
    return results;
  });
}

TEST_P(OrderedOpsTest, Indices) {
  const Tensor indices = at::tensor({2, 0, 1, 2}).to(at::kLong);
  expect_same({some({3, 4}), indices, some({4, 4}), some({3, 4}).abs()}, [](std::vector<Tensor> in) {
    in[0].index_put_({in[1]}, in[2], /*accumulate=*/true);
    in[0].index_add_(0, in[1], in[2]);
    return std::vector<Tensor>{at::index_select(in[0], 0, in[1]),
                               at::embedding(in[0], in[1]),
                               in[0].index({in[1]}),
                               in[0].gather(1, in[1].unsqueeze(0)),
                               at::one_hot(in[1], 5),
                               in[0].index({in[0] > 0}),
                               at::nonzero(in[0] > 0),
                               at::masked_select(in[0], in[0] > 0)};
  });
}

TEST_P(OrderedOpsTest, IndicesOfTheHost) {
  const Tensor table = at::arange(12, at::kFloat).view({3, 4});
  EXPECT_TRUE(same(table.to(device(0)).index({at::tensor({2, 0})}), table.index({at::tensor({2, 0})})));
}

TEST_P(OrderedOpsTest, Factories) {
  const Tensor like = at::zeros({2}, on(0));
  EXPECT_TRUE(same(at::arange(5, on(0)), at::arange(5, at::kFloat)));
  EXPECT_TRUE(same(at::full({2, 2}, 3, on(0)), at::full({2, 2}, 3, at::kFloat)));
  EXPECT_TRUE(same(at::eye(3, on(0)), at::eye(3)));
  EXPECT_TRUE(same(at::linspace(0, 1, 5, on(0)), at::linspace(0, 1, 5)));
  EXPECT_TRUE(same(at::tril_indices(3, 3, 0, on(0, at::kLong)), at::tril_indices(3, 3)));
  EXPECT_TRUE(same(at::ones_like(like), at::ones({2})));
  EXPECT_EQ(at::ones({2}, at::TensorOptions().device("sim")).device(), device(0));
}

TEST_P(OrderedOpsTest, ComplexNumbers) {
  expect_same({at::randn({3, 4}, at::kComplexFloat)}, [](const std::vector<Tensor>& in) {
    return std::vector<Tensor>{at::real(in[0]).contiguous(), in[0].conj().resolve_conj(), in[0] * in[0].conj(),
                               at::view_as_real(in[0]), at::imag(in[0].conj()).clone()};
  });
}

TEST_P(OrderedOpsTest, Normalizations) {
  expect_same({some({2, 3, 8}), some({8}), some({8}), some({2, 4, 5, 5}), some({4})},
              [](const std::vector<Tensor>& in) {
                const auto [normalized, mean, inverse] = at::native_layer_norm(in[0], {8}, in[1], in[2], 1e-5);
                const Tensor running = at::zeros_like(in[4]), variance = at::ones_like(in[4]);
                const Tensor batch = at::batch_norm(in[3], in[4], in[4], running, variance, true, 0.1, 1e-5, false);
                return std::vector<Tensor>{normalized, mean,    inverse, at::group_norm(in[3], 2, in[4], in[4]),
                                           batch,      running, variance};
              });
}

TEST_P(OrderedOpsTest, ConvolutionsAndPools) {
  expect_same({some({2, 3, 8, 8}), some({4, 3, 3, 3}), some({4})}, [](const std::vector<Tensor>& in) {
    return std::vector<Tensor>{at::conv2d(in[0], in[1], in[2]), at::max_pool2d(in[0], 2), at::avg_pool2d(in[0], 2),
                               at::adaptive_avg_pool2d(in[0], {1, 1})};
  });
}

TEST_P(OrderedOpsTest, Attention) {
  expect_same({some({2, 2, 5, 4}), some({2, 2, 5, 4}), some({2, 2, 5, 4})}, [](const std::vector<Tensor>& in) {
    const Tensor weights = (in[0].matmul(in[1].transpose(-2, -1)) / 2).softmax(-1);
    return std::vector<Tensor>{weights.matmul(in[2]),
                               std::get<0>(at::_scaled_dot_product_attention_math(in[0], in[1], in[2], {}, 0.0, true))};
  });
  // The CPU has a kernel of its own for this, so results are close only.
  const Tensor query = some({2, 2, 5, 4});
  const Tensor moved = query.to(device(0));
  EXPECT_TRUE(at::allclose(at::scaled_dot_product_attention(moved, moved, moved).cpu(),
                           at::scaled_dot_product_attention(query, query, query), 1e-5, 1e-6));
}

TEST_P(OrderedOpsTest, RandomNumbersAreTheCPUs) {
  at::manual_seed(7);
  manual_seed(7);
  const auto draw = [](const at::TensorOptions& options) {
    std::vector<Tensor> drawn = {at::randn({17}, options),
                                 at::rand({5}, options),
                                 at::randint(100, {7}, options.dtype(at::kLong)),
                                 at::randperm(9, options.dtype(at::kLong)),
                                 at::empty({4}, options).normal_(1, 2),
                                 at::empty({64}, options).bernoulli_(0.3),
                                 at::rand({3}, options).bernoulli()};
    drawn.push_back(at::multinomial(at::ones({6}, options), 3));
    drawn.push_back(at::dropout(at::ones({100}, options), 0.5, true));
    drawn.push_back(at::randn({3}, options));
    return drawn;
  };
  const std::vector<Tensor> on_device = draw(on(0)), on_cpu = draw(at::TensorOptions().dtype(at::kFloat));
  for (std::size_t i = 0; i < on_cpu.size(); ++i) EXPECT_TRUE(same(on_device[i], on_cpu[i])) << i;
}

TEST_P(OrderedOpsTest, AGeneratorDrawsInTheOrderOfTheCalls) {
  const c10::Stream side = stream_from_pool();
  manual_seed(3);
  Tensor first, second;
  {
    const c10::StreamGuard guard(side);
    first = at::randn({8}, on(0));
  }
  second = at::randn({8}, on(0));
  (void)second.cpu();  // runs before the first in the order late
  manual_seed(3);
  const Tensor first_again = at::randn({8}, on(0)), second_again = at::randn({8}, on(0));
  EXPECT_TRUE(same(second, second_again.cpu()));
  wait_for(current(), side);
  EXPECT_TRUE(same(first, first_again.cpu()));
}

TEST_F(OpsTest, ScalarsOfTheHostAreReadAtTheCall) {
  set_order(Order::late);
  const Tensor scalar = at::ones({}, at::kFloat), tensor = at::ones({3}, on(0));
  const Tensor sum = tensor + scalar;
  scalar.fill_(10);
  EXPECT_TRUE(same(sum, at::full({3}, 2, at::kFloat)));
}

TEST_F(OpsTest, TensorsOfOtherDevicesAreRefused) {
  const Tensor tensor = at::ones({3}, on(0));
  for (const Tensor& other : {at::ones({3}), at::ones({3}, on(1))}) {
    try {
      (void)(tensor + other);
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("Expected all tensors to be on the same device"), std::string::npos)
          << error.what();
    }
  }
}

TEST_F(OpsTest, WrongShapesAreRefusedAtTheCall) {
  EXPECT_THROW((void)at::mm(at::ones({2, 3}, on(0)), at::ones({2, 3}, on(0))), c10::Error);
}

TEST_F(OpsTest, OpsRunOnTheDeviceOfTheirTensors) {
  const Tensor tensor = at::ones({3}, on(5));
  start_trace();
  const Tensor sum = tensor + tensor;
  (void)sum.cpu();
  for (const TraceEntry& entry : take_trace()) EXPECT_EQ(entry.device, 5) << entry.name;
  EXPECT_EQ(sum.device(), device(5));
}

}  // namespace
}  // namespace tessera::sim

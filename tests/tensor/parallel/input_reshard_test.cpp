#include "tessera/tensor/parallel/input_reshard.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "support/one_sided.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/tensor_parallel.h"

namespace tessera {
namespace {

using testing::indexed;
using testing::on_mesh;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

// A function that counts its calls.
struct Counted {
  at::Tensor weight = at::sin(indexed({4, 4})).set_requires_grad(true);
  int calls = 0;
  at::Tensor operator()(const at::Tensor& x) {
    ++calls;
    return at::tanh(at::matmul(x, weight)) * x;
  }
};

TEST(InputReshardTest, ResultsAndGradientsAreThoseOfAPlainCall) {
  for (const Sizes& shape : {Sizes{3}, Sizes{2, 2}}) {
    for (const std::int64_t dim : {0, 1, -1}) {
      run_local(static_cast<int>(mesh_size(shape)), [&](const ProcessGroup& group) {
        const DeviceMesh mesh(group, shape);
        Counted plain, resharded;
        const at::Tensor a = at::cos(indexed({5, 4})).set_requires_grad(true),
                         b = a.detach().clone().set_requires_grad(true);
        const at::Tensor expected = plain(a * 2);
        expected.square().sum().backward();
        const CommDebugMode mode(group);
        const at::Tensor found = input_reshard(std::ref(resharded), b * 2, mesh, dim);
        EXPECT_EQ(mode.total(), 0) << "forward sends nothing";
        EXPECT_TRUE(at::equal(found, expected));
        found.square().sum().backward();
        EXPECT_EQ(resharded.calls, 2);
        EXPECT_GE(mode.total(), 1);
        EXPECT_TRUE(at::allclose(b.grad(), a.grad()));
        EXPECT_TRUE(at::allclose(resharded.weight.grad(), plain.weight.grad()));
      });
    }
  }
}

TEST(InputReshardTest, OnlyAShardIsKept) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    Counted f;
    at::Tensor x = at::cos(indexed({6, 4}));
    const c10::weak_intrusive_ptr<c10::TensorImpl> alive(x.getIntrusivePtr());
    const at::Tensor y = input_reshard(std::ref(f), x, mesh, 0);
    EXPECT_TRUE(y.requires_grad()) << "for the weight";
    x.reset();
    EXPECT_TRUE(alive.expired());
    y.sum().backward();
    EXPECT_TRUE(f.weight.grad().defined());
    // Nothing is kept without gradients, or computed again.
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(input_reshard(std::ref(f), at::cos(indexed({6, 4})), mesh, 0).requires_grad());
    EXPECT_EQ(f.calls, 3);
    const at::AutoGradMode records(true);
    EXPECT_ERROR(input_reshard(std::ref(f), indexed({6, 4}), mesh, 2), ErrorCode::invalid_argument, "dimension");
  });
}

TEST(InputReshardTest, ARankThatLeavesBackwardIsNamedToAll) {
  run_local(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {3});
    int calls = 0;
    const auto f = [&](const at::Tensor& x) {
      if (++calls == 2 && group.rank() == 1) fail(ErrorCode::io, "no memory");
      return at::tanh(x);
    };
    const at::Tensor y = input_reshard(f, at::cos(indexed({6, 4})).set_requires_grad(true), mesh, 0);
    if (group.rank() == 1) {
      EXPECT_ERROR(y.sum().backward(), ErrorCode::io, "no memory");
    } else {
      y.sum().backward();
    }
    testing::expect_error_soon([&] { group.barrier(); }, {"rank 1 left backward of input_reshard: ", "no memory"});
  });
}

TEST(InputReshardTest, TensorParallelLayersTrainTheSame) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor x = at::cos(indexed({2, 6, 4})).to(at::kFloat);
    std::vector<at::Tensor> gradients;
    for (const bool reshards : {false, true}) {
      ParallelLinear up(4, 8), down(8, 4);
      PhiloxGenerator generator(3);
      for (ParallelLinear layer : {up, down}) initialize_parameters(*layer, generator);
      parallelize_module(*up, mesh, {{"", ColwiseParallel{}}});
      parallelize_module(*down, mesh, {{"", RowwiseParallel{}}});
      const at::Tensor input = x.clone().set_requires_grad(true);
      const auto mlp = [&](const at::Tensor& h) { return down(at::relu(up(h))); };
      const at::Tensor y = reshards ? input_reshard(mlp, input, mesh, 1) : mlp(input);
      y.square().sum().backward();
      gradients.push_back(
          at::cat({input.grad().flatten(), up->weight.grad().flatten(), down->weight.grad().flatten()}));
    }
    EXPECT_TRUE(at::allclose(gradients[0], gradients[1]));
  });
}

// A flattened tensor has strided shards, which are kept and come back as they are.
TEST(InputReshardTest, ADTensorComesBackAsItWasPlaced) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const at::Tensor full = at::cos(indexed({3, 4, 4}));
    for (const Placement& placement : {R, S0, S1}) {
      std::vector<at::Tensor> gradients;
      Placements placements;
      for (const bool reshards : {false, true}) {
        const DTensor leaf = distribute_tensor(full.clone().set_requires_grad(true), mesh, {placement});
        const DTensor weight = distribute_tensor(at::sin(indexed({4, 4})).set_requires_grad(true), mesh, {R});
        const auto f = [&](const DTensor& x) {
          placements = x.placements();
          return dtensor::tanh(dtensor::matmul(x, weight));
        };
        const DTensor flat = dtensor::flatten(leaf, 0, 1);
        const DTensor y = reshards ? input_reshard(f, flat, 0) : f(flat);
        EXPECT_EQ(placements, flat.placements());
        dtensor::sum(dtensor::square(y)).full_tensor().backward();
        EXPECT_EQ(placements, flat.placements());
        gradients.push_back(leaf.grad()->full_tensor());
        gradients.push_back(weight.grad()->full_tensor());
      }
      EXPECT_EQ(placements[0].is_strided(), placement == S1);
      EXPECT_TRUE(at::allclose(gradients[0], gradients[2])) << placement;
      EXPECT_TRUE(at::allclose(gradients[1], gradients[3])) << placement;
    }
  });
}

}  // namespace
}  // namespace tessera

// DTensors, tensor parallel layers and sharded tensors on the simulated accelerator are what they are on CPU, bit for
// bit.

#include <functional>
#include <mutex>

#include "accelerator/fsdp_training.h"
#include "tensor/mesh_support.h"
#include "tensor/sharding_support.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/ops.h"
#include "tessera/tensor/sharded_tensor.h"
#include "tessera/tensor/tensor_parallel.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {
namespace {

using fsdp::run_on_devices;
using fsdp::Wrap;
using testing::indexed;
using testing::local_of;

using Results = std::vector<at::Tensor>;
using Compute = std::function<Results(const ProcessGroup& group, at::Device device)>;

class TensorOnDeviceTest : public sim::InOrder {
 protected:
  // Compares the results of `compute` on devices with those on CPU, rank by rank.
  static void compare(int ranks, const Compute& compute) {
    std::vector<Results> on_cpu(static_cast<std::size_t>(ranks)), on_devices(on_cpu.size());
    const auto keep = [&](std::vector<Results>& all, const ProcessGroup& group, at::Device device) {
      Results& results = all[static_cast<std::size_t>(group.rank())] = compute(group, device);
      for (at::Tensor& result : results) result = result.detach().cpu();
    };
    run_local(ranks, [&](const ProcessGroup& group) { keep(on_cpu, group, at::kCPU); });
    run_on_devices(ranks, [&](const ProcessGroup& group, at::Device device) { keep(on_devices, group, device); });
    for (std::size_t rank = 0; rank < on_cpu.size(); ++rank) {
      ASSERT_EQ(on_devices[rank].size(), on_cpu[rank].size());
      for (std::size_t i = 0; i < on_cpu[rank].size(); ++i) {
        EXPECT_TRUE(at::equal(on_devices[rank][i], on_cpu[rank][i]))
            << "rank " << rank << ", result " << i << ": " << on_devices[rank][i] << ", on CPU " << on_cpu[rank][i];
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(, TensorOnDeviceTest, ::testing::Values(sim::Order::late, sim::Order::early), sim::order_name);

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::tanh(up(norm(x)))); }
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({6})};
  ParallelLinear up{6, 11}, down{11, 6};
};
TORCH_MODULE(Mlp);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("ids", ids);
    register_module("first", first);
    register_module("second", second);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) { return head(second(first(ids(x)))); }
  ParallelEmbedding ids{9, 6};
  Wrap<Mlp> first, second;
  Wrap<ParallelLinear> head{6, 5};
};
TORCH_MODULE(Net);

Net parallel_net(const DeviceMesh& mesh, at::Device device) {
  Net net;
  fsdp::fill(*net, at::kFloat);
  net->to(device);
  parallelize_module(*net, mesh,
                     {{"ids", RowwiseParallel{}},
                      {"*.up", ColwiseParallel{}},
                      {"*.down", RowwiseParallel{}},
                      {"head", ColwiseParallel{Placement::replicate(), Placement::replicate()}}});
  return net;
}

at::Tensor words(int step, int rank) { return at::arange(8).mul(3 + rank).add(step).remainder(9).view({2, 4}); }

TEST_P(TensorOnDeviceTest, ParallelLayersTrain) {
  compare(2, [](const ProcessGroup& group, at::Device device) {
    Net net = parallel_net(DeviceMesh(group, {2}, {"tp"}, device.type()), device);
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
    Results results;
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = fsdp::loss_of(net->forward(words(step, 0).to(device)));
      loss.backward();
      optimizer.step();
      results.push_back(loss);
    }
    for (const at::Tensor& param : net->parameters()) results.push_back(param);
    return results;
  });
}

TEST_P(TensorOnDeviceTest, ShardedParallelLayersTrain) {
  compare(4, [](const ProcessGroup& group, at::Device device) {
    const DeviceMesh mesh(group, {2, 2}, {"dp", "tp"}, device.type());
    fsdp::FullyShardedDataParallel<Net> model(parallel_net(mesh["tp"], device), mesh.group("dp"));
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.05));
    Results results;
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = fsdp::loss_of(model(words(step, mesh.group("dp").rank()).to(device)));
      loss.backward();
      results.push_back(loss);
      results.push_back(model.clip_grad_norm_(0.5));
      optimizer.step();
    }
    for (const at::Tensor& param : model.parameters()) results.push_back(param);
    return results;
  });
}

TEST_P(TensorOnDeviceTest, EveryRedistribution) {
  const Placement R = Placement::replicate(), S0 = Placement::shard(0), S1 = Placement::shard(1),
                  P = Placement::partial();
  compare(4, [&](const ProcessGroup& group, at::Device device) {
    const DeviceMesh mesh(group, {2, 2}, {"a", "b"}, device.type());
    const at::Tensor full = indexed({5, 6});
    Results results;
    for (const Placement& from0 : {R, S0, S1, P}) {
      for (const Placement& from1 : {R, S0, S1, P}) {
        const Placements from{from0, from1};
        const MeshLayout layout({5, 6}, mesh.shape(), from);
        const at::Tensor local = local_of(full, layout, *mesh.coordinate()).to(device);
        const DTensor x = DTensor::from_local(local, mesh, from, {layout.size()});
        for (const Placement& to0 : {R, S0, S1}) {
          for (const Placement& to1 : {R, S0, S1}) {
            const DTensor y = x.redistribute({to0, to1});
            results.push_back(y.local_tensor());
            local.add_(1);  // after what was sent
            local.sub_(1);
          }
        }
        results.push_back(x.redistribute({S0, S1}, /*async_op=*/true).full_tensor());
      }
    }
    return results;
  });
}

TEST_P(TensorOnDeviceTest, OpsAndTheirGradients) {
  compare(4, [](const ProcessGroup& group, at::Device device) {
    const DeviceMesh mesh(group, {2, 2}, {"a", "b"}, device.type());
    const auto on_mesh = [&](const at::Tensor& full, const Placements& placements) {
      DTensor x = distribute_tensor(full.to(at::kFloat).to(device), mesh, placements);
      return x.requires_grad_();
    };
    const DTensor x = on_mesh(indexed({4, 6}).mul(0.3).sin(), {Placement::shard(0), Placement::replicate()});
    const DTensor w = on_mesh(indexed({6, 8}).mul(0.7).cos(), {Placement::replicate(), Placement::shard(1)});
    const DTensor y = dtensor::softmax(dtensor::tanh(dtensor::matmul(x, w)), 1);
    const DTensor loss = dtensor::sum(dtensor::mul(y, y));
    const at::Tensor result = loss.full_tensor();
    result.backward();
    return Results{result, y.full_tensor(), x.grad()->full_tensor(), w.grad()->full_tensor()};
  });
}

TEST_P(TensorOnDeviceTest, ShardedTensorsMoveAndAreGatheredAndResharded) {
  compare(4, [](const ProcessGroup& group, at::Device device) {
    ShardedTensor tensor =
        ShardedTensor::zeros(testing::chunk_spec(0, testing::ranks_of(4)), {10, 6}, group).to({.device = device});
    tensor.local_tensor().add_(indexed({3, 6}).to(at::kFloat).to(device).narrow(0, 0, tensor.local_tensor().size(0)));
    Results results{tensor.local_tensor()};
    const at::Tensor out = at::zeros({10, 6}, at::TensorOptions().device(device));
    tensor.gather(0, group.rank() == 0 ? out : at::Tensor());
    results.push_back(out);
    tensor.reshard(testing::chunk_spec(1, testing::ranks_of(4)));
    results.push_back(tensor.local_tensor());
    const ShardedTensor on_cpu = tensor.cpu();
    EXPECT_TRUE(on_cpu.local_tensor().is_cpu());
    results.push_back(on_cpu.local_tensor());
    return results;
  });
}

TEST_P(TensorOnDeviceTest, ADetachedShardedTensorKeepsItsPinnedMemory) {
  run_local(2, [](const ProcessGroup& group) {
    ShardedTensorOptions options;
    options.pin_memory = true;
    options.requires_grad = true;
    const ShardedTensor tensor = ShardedTensor::ones(testing::chunk_spec(0, {0}), {4, 2}, group, options);
    const ShardedTensor detached = ops::detach(tensor);
    EXPECT_TRUE(detached.is_pinned());  // on the rank without a shard, too
    EXPECT_FALSE(detached.requires_grad());
    EXPECT_TRUE(group.rank() != 0 || detached.local_tensor().is_alias_of(tensor.local_tensor()));
  });
}

// After `to`, each rank has noted its own device for all shards.
TEST_P(TensorOnDeviceTest, ShardedTensorsThatMovedAreComparedAndUsedByOps) {
  compare(2, [](const ProcessGroup& group, at::Device device) {
    const at::Tensor full = indexed({6, 4}).to(at::kFloat);
    const auto sharded_on = [&](const std::vector<int>& ranks) {
      return testing::shard(full, testing::chunk_spec(0, ranks), group);
    };
    const auto created_on = [&](const std::vector<int>& ranks) {  // the devices to which `to` moves
      std::vector<RemoteDevice> placements;
      for (const int rank : ranks)
        placements.emplace_back(rank, device.is_cpu() ? Device{} : to_device(sim::device(rank)));
      return testing::shard(full, std::make_shared<ChunkShardingSpec>(0, placements), group);
    };
    const ShardedTensor moved = sharded_on({0, 1}).to({.device = device}), created = created_on({0, 1});
    EXPECT_TRUE(ops::equal(moved, moved.cpu().to({.device = device})));
    EXPECT_TRUE(ops::equal(moved, created));
    EXPECT_TRUE(ops::equal(ShardedTensor::from_state(moved.state(), group), created));
    EXPECT_TRUE(ops::equal(sharded_on({0}).to({.device = device}), created_on({0})));
    EXPECT_FALSE(ops::equal(ops::add(moved, created), created));
    const at::Tensor ids = at::arange(6).to(device);
    return Results{std::get<ShardedTensor>(ops::linear(full.to(device), moved, {})).local_tensor(),
                   ops::embedding(ids, moved, {}), ops::add(created, moved).local_tensor(),
                   ops::copy_(ops::zeros_like(created), moved, false).local_tensor()};
  });
}

}  // namespace
}  // namespace tessera

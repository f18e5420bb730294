#include "tessera/tensor/parallel/comm_debug_table.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>

#include <sstream>

#include "tensor/mesh_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/tensor_parallel.h"

namespace tessera {
namespace {

using testing::indexed;
using testing::R;
using testing::S0;
using testing::S1;
using Counts = CommDebugTable::Counts;

// Two layers; each call is a row.
struct TabledMlpImpl : torch::nn::Module {
  explicit TabledMlpImpl(const CommDebugTable& table_in) : table(table_in) {
    register_module("net1", net1);
    register_module("net2", net2);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = table.call("net1", *net1, x, [&](const at::Tensor& y) { return at::relu(net1(y)); });
    return table.call("net2", *net2, h, [&](const at::Tensor& y) { return net2(y); });
  }
  CommDebugTable table;
  ParallelLinear net1{4, 8}, net2{8, 4};
};
TORCH_MODULE(TabledMlp);

TEST(CommDebugTableTest, RowsHaveTheCollectivesAndShardingsOfEachModule) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const CommDebugTable table(group);
    TabledMlp mlp(table);
    EXPECT_TRUE(sharding_info(*mlp).empty());
    parallelize_module(*mlp, mesh, {{"net1", ColwiseParallel{}}, {"net2", RowwiseParallel{}}});
    const std::map<std::string, Placements> shardings = {
        {"net1.weight", {S0}}, {"net1.bias", {S0}}, {"net2.weight", {S1}}, {"net2.bias", {R}}};
    EXPECT_EQ(sharding_info(*mlp), shardings);

    const at::Tensor x = indexed({3, 4}).to(at::kFloat).requires_grad_();
    const auto forward = [&](const at::Tensor& y) { return mlp(y); };
    table.call("MLP", *mlp, x, forward).sum().backward();
    const Counts none, one = {{"all_reduce", 1}}, two = {{"all_reduce", 2}};
    const auto expect_row = [&](std::size_t i, const char* path, std::int64_t calls, const Counts& in_forward,
                                const Counts& in_backward) {
      ASSERT_LT(i, table.rows().size());
      const CommDebugTable::Row row = table.rows()[i];
      EXPECT_EQ(row.path, path);
      EXPECT_EQ(row.calls, calls) << path;
      EXPECT_EQ(row.forward, in_forward) << path;
      EXPECT_EQ(row.backward, in_backward) << path;
    };
    EXPECT_EQ(table.rows().size(), 3u);
    expect_row(0, "MLP", 1, one, one);
    expect_row(1, "MLP.net1", 1, none, one);
    expect_row(2, "MLP.net2", 1, one, none);
    std::ostringstream shown;
    shown << table;
    EXPECT_EQ(shown.str(),
              "MLP; forward all_reduce 1; backward all_reduce 1\n"
              "  net1: weight [S(0)], bias [S(0)]; backward all_reduce 1\n"
              "  net2: weight [S(1)], bias [R]; forward all_reduce 1\n");
    // Further calls add to the rows; without gradients there is no backward.
    {
      const at::NoGradGuard no_grad;
      table.call("MLP", *mlp, x, forward);
    }
    expect_row(0, "MLP", 2, two, one);
    expect_row(2, "MLP.net2", 2, two, none);
  });
}

// Modules of one name in several places are rows of their own, and a call that throws ends.
TEST(CommDebugTableTest, CallsMayBeNestedToAnyDepth) {
  run_local(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    const CommDebugTable table(group);
    torch::nn::Sequential stacked(TabledMlp{table}, TabledMlp{table});
    parallelize_module(*stacked, mesh, {{"*.net1", ColwiseParallel{}}, {"*.net2", RowwiseParallel{}}});
    const at::Tensor x = indexed({3, 4}).to(at::kFloat).requires_grad_();
    const auto layers = [&](const at::Tensor& y) {
      at::Tensor h = y;
      for (std::size_t i = 0; i < 2; ++i) {
        const auto layer = stacked->ptr<TabledMlpImpl>(i);
        h = table.call("layers." + std::to_string(i), *layer, h,
                       [&](const at::Tensor& z) { return layer->forward(z); });
      }
      return h;
    };
    table.call("Stacked", *stacked, x, layers).sum().backward();
    std::vector<std::string> paths;
    Counts forward, backward;
    for (const CommDebugTable::Row& row : table.rows()) {
      paths.push_back(row.path);
      if (row.depth != 2) continue;
      for (const auto& [name, count] : row.forward) forward[name] += count;
      for (const auto& [name, count] : row.backward) backward[name] += count;
    }
    EXPECT_THAT(paths,
                ::testing::ElementsAre("Stacked", "Stacked.layers.0", "Stacked.layers.0.net1", "Stacked.layers.0.net2",
                                       "Stacked.layers.1", "Stacked.layers.1.net1", "Stacked.layers.1.net2"));
    EXPECT_EQ(forward, (Counts{{"all_reduce", 2}}));
    EXPECT_EQ(forward, table.rows()[0].forward);
    EXPECT_EQ(backward, table.rows()[0].backward);
    EXPECT_EQ(sharding_info(*stacked).at("1.net2.weight"), Placements{S1});

    const auto fails = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no result"); };
    EXPECT_THROW(table.call("fails", *stacked, x, fails), std::runtime_error);
    const auto as_it_is = [](const at::Tensor& y) { return y; };
    EXPECT_TRUE(at::equal(table.call("after", *stacked, x, as_it_is), x));
    EXPECT_EQ(table.rows().back().path, "after");
    EXPECT_EQ(table.rows().back().depth, 0u);
  });
}

}  // namespace
}  // namespace tessera

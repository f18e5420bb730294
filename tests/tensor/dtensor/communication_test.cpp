// What ops and redistributions on DTensors send, and which copies they make.

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/case_function.h"
#include "tensor/mesh_support.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera {
namespace {

using testing::CaseFunction;
using testing::indexed;
using testing::on_mesh;
using testing::P;
using testing::R;
using testing::S0;
using testing::S1;
using testing::Sizes;

// Losses of sharded rows know their total weight after forward, so that backward sends nothing.
TEST(DTensorCommunicationTest, BackwardOfALossOfShardedRowsSendsNothing) {
  using dtensor::Reduction;
  const at::Tensor x = at::sin(indexed({8, 16})), target = at::arange(8, at::kLong).mul(5).remainder(16);
  for (const auto& [ours, aten] :
       std::vector<std::pair<Reduction, std::int64_t>>{{Reduction::none, at::Reduction::None},
                                                       {Reduction::sum, at::Reduction::Sum},
                                                       {Reduction::mean, at::Reduction::Mean}}) {
    const at::Tensor leaf = x.clone().set_requires_grad(true);
    at::cross_entropy_loss(leaf, target, {}, aten).sum().backward();
    run_local(4, [&, reduction = ours](const ProcessGroup& group) {
      const DeviceMesh mesh(group, {4});
      const DTensor rows = distribute_tensor(x.clone().set_requires_grad(true), mesh, {S0});
      dtensor::LossOptions options;
      options.reduction = reduction;
      const at::Tensor loss =
          dtensor::sum(dtensor::cross_entropy(rows, distribute_tensor(target, mesh, {S0}), options)).full_tensor();
      const CommDebugMode backward(group);
      loss.backward();
      EXPECT_EQ(backward.total(), 0) << static_cast<int>(reduction);
      EXPECT_TRUE(at::allclose(rows.grad()->full_tensor(), leaf.grad()));
    });
  }
}

TEST(DTensorCommunicationTest, BackwardOfOpsThatKeepShardsGathersNothing) {
  const at::Tensor full = at::sin(indexed({8, 4}));
  struct Op {
    std::string name;
    CaseFunction<DTensor(const DTensor&)> ours;
    CaseFunction<at::Tensor(const at::Tensor&)> aten;
  };
  const std::vector<Op> ops = {
      {"relu", [](const DTensor& x) { return dtensor::relu(x); }, [](const at::Tensor& x) { return at::relu(x); }},
      {"sum", [](const DTensor& x) { return dtensor::sum(x, {0}); }, [](const at::Tensor& x) { return x.sum(0); }},
      {"mean", [](const DTensor& x) { return dtensor::mean(x); }, [](const at::Tensor& x) { return x.mean(); }},
      {"slice", [](const DTensor& x) { return dtensor::slice(x, 1, 1, 3); },
       [](const at::Tensor& x) { return x.slice(1, 1, 3); }},
      {"select", [](const DTensor& x) { return dtensor::select(x, 1, 2); },
       [](const at::Tensor& x) { return x.select(1, 2); }},
      {"transpose", [](const DTensor& x) { return dtensor::transpose(x, 0, 1); },
       [](const at::Tensor& x) { return x.transpose(0, 1); }},
      {"split", [](const DTensor& x) { return dtensor::split(x, 2, 1)[1]; },
       [](const at::Tensor& x) { return x.split(2, 1)[1]; }},
      {"view",
       [](const DTensor& x) {
         return dtensor::view(x, {8, 2, 2});
       },
       [](const at::Tensor& x) {
         return x.view({8, 2, 2});
       }},
      {"product",
       [](const DTensor& x) {
         return dtensor::matmul(x, at::cos(indexed({4, 3})));
       },
       [](const at::Tensor& x) {
         return at::matmul(x, at::cos(indexed({4, 3})));
       }},
      {"pad",
       [](const DTensor& x) {
         return dtensor::constant_pad_nd(x, {1, 1});
       },
       [](const at::Tensor& x) {
         return at::constant_pad_nd(x, {1, 1});
       }},
  };
  for (const Op& op : ops) {
    const at::Tensor leaf = full.clone().set_requires_grad(true);
    op.aten(leaf).square().sum().backward();
    run_local(2, [&](const ProcessGroup& group) {
      const DeviceMesh mesh(group, {2});
      const DTensor x = distribute_tensor(full.clone().set_requires_grad(true), mesh, {S0});
      const at::Tensor loss = dtensor::sum(dtensor::square(op.ours(x))).full_tensor();
      const CommDebugMode backward(group);
      loss.backward();
      EXPECT_EQ(backward.total(), 0) << op.name;
      EXPECT_TRUE(at::allclose(x.grad()->full_tensor(), leaf.grad())) << op.name;
    });
  }
}

TEST(DTensorCommunicationTest, ARedistributionAlongAMeshDimensionIsOneCollective) {
  struct Change {
    Placement from, to;
    std::string collective;  // empty if nothing is sent
  };
  const Placement max = Placement::partial(ReduceOp::max);
  const std::vector<Change> changes = {{P, R, "all_reduce"},
                                       {max, R, "all_reduce"},
                                       {P, S0, "reduce_scatter_into"},
                                       {S0, R, "all_to_all"},
                                       {S0, S1, "all_to_all"},
                                       {R, S0, ""},
                                       {R, P, ""},
                                       {R, R, ""}};
  run_local(2, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2});
    for (const Change& change : changes) {
      const DTensor before = DTensor::from_local(indexed({4, 8}), mesh, {change.from});
      const CommDebugMode mode(group);
      before.redistribute({change.to});
      std::map<std::string, std::int64_t> expected;
      if (!change.collective.empty()) expected[change.collective] = 1;
      EXPECT_EQ(mode.counts(), expected) << to_string(change.from) << " to " << to_string(change.to);
    }
  });
}

// Counts the calls of an op of ATen on this thread.
class OpCount {
 public:
  explicit OpCount(std::string_view name) {
    counted = name;
    calls = 0;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&begin).scopes({at::RecordScope::FUNCTION}));
  }
  OpCount(const OpCount&) = delete;
  OpCount& operator=(const OpCount&) = delete;
  ~OpCount() { at::removeCallback(handle_); }
  int operator()() const { return calls; }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    if (counted == function.name()) ++calls;
    return nullptr;
  }
  static thread_local std::string_view counted;
  static thread_local int calls;
  at::CallbackHandle handle_;
};
thread_local std::string_view OpCount::counted;
thread_local int OpCount::calls = 0;

// Elements are received into the result, whatever dimension is gathered. Only parts of a strided shard that are not
// contiguous there are received into buffers, from which they are copied.
TEST(DTensorCommunicationTest, OnlyStridedShardsAreReceivedIntoBuffers) {
  run_local(4, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {2, 2});
    const auto buffers_of = [&](const Sizes& size, const Placement& from, const Placement& to) {
      const at::Tensor full = indexed(size);
      const DTensor x = on_mesh(full, mesh, {from, from});
      const OpCount copies("aten::clone");
      const DTensor result = x.redistribute({to, R}, false);
      const int found = copies();
      EXPECT_TRUE(at::equal(result.local_tensor(), on_mesh(full, mesh, {to, R}).local_tensor()));
      return found;
    };
    const Placement columns = Placement::shard(2), of_two = Placement::strided_shard(1, 2);
    EXPECT_EQ(buffers_of({8, 3, 6}, S0, S0), 0);
    EXPECT_EQ(buffers_of({1, 8, 6}, S1, S1), 0) << "one row";
    EXPECT_EQ(buffers_of({1, 3, 8}, columns, columns), 0) << "a later dimension";
    EXPECT_EQ(buffers_of({2, 8, 6}, S1, S1), 0) << "several rows";
    EXPECT_EQ(buffers_of({1, 8, 6}, S1, of_two), 0) << "two parts of one row";
    EXPECT_EQ(buffers_of({2, 8, 6}, S1, of_two), 2) << "two parts of several rows";
  });
}

}  // namespace
}  // namespace tessera

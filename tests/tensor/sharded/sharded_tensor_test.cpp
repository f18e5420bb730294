#include "tessera/tensor/sharded_tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/chaos.h"
#include "support/error_matchers.h"
#include "tensor/sharding_support.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {
namespace {

using testing::chunk_spec;
using testing::fill_with_indices;
using testing::grid_spec;
using testing::holds_indices;
using testing::indices;
using testing::on_rank;
using testing::Sizes;
using testing::SpecPtr;
using testing::specs_of_every_kind;

class ShardedTensorTest : public ::testing::TestWithParam<int> {
 protected:
  int world() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Worlds, ShardedTensorTest, ::testing::Values(1, 2, 3, 4, 8));

const std::vector<Sizes>& sizes() {
  static const std::vector<Sizes> all = {{7}, {1}, {8, 4}, {5, 3}, {3, 2, 5}, {2, 3, 2, 3}};
  return all;
}

TEST_P(ShardedTensorTest, EachRankHasTheShardsThatAreItsOwn) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const Sizes& size : sizes()) {
      for (const SpecPtr& spec : specs_of_every_kind(size, world())) {
        const ShardedTensor tensor = ShardedTensor::ones(spec, size, group);
        EXPECT_EQ(tensor.metadata(), spec->build_metadata(size, {}));
        EXPECT_EQ(tensor.size(), size);
        std::vector<ShardMetadata> own;
        for (const ShardMetadata& shard : tensor.metadata().shards_metadata) {
          if (shard.placement->rank() == group.rank()) own.push_back(shard);
        }
        ASSERT_EQ(tensor.local_shards().size(), own.size());
        for (std::size_t i = 0; i < own.size(); ++i) {
          EXPECT_EQ(tensor.local_shards()[i].metadata, own[i]);
          EXPECT_TRUE(at::equal(tensor.local_shards()[i].tensor, at::ones(own[i].shard_sizes)));
        }
      }
    }
  });
}

TEST_P(ShardedTensorTest, GatherOfEverySpecToEveryRank) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const Sizes& size : sizes()) {
      for (const SpecPtr& spec : specs_of_every_kind(size, world())) {
        ShardedTensorOptions options;
        options.dtype = at::kLong;
        const ShardedTensor tensor = ShardedTensor::empty(spec, size, group, options);
        fill_with_indices(tensor);
        for (const int dst : {0, world() - 1}) {
          const at::Tensor out = group.rank() == dst ? at::full(size, -1, at::kLong) : at::Tensor();
          tensor.gather(dst, out);
          if (out.defined()) {
            EXPECT_TRUE(at::equal(out, indices(size))) << spec->to_string();
          }
        }
      }
    }
  });
}

TEST_P(ShardedTensorTest, ReshardFromEverySpecToEverySpec) {
  run_local(world(), [&](const ProcessGroup& group) {
    testing::SampleIfSanitized sample(5);
    for (const Sizes& size : sizes()) {
      const std::vector<SpecPtr> specs = specs_of_every_kind(size, world());
      for (const SpecPtr& from : specs) {
        for (const SpecPtr& to : specs) {
          if (!sample.takes_next()) continue;
          ShardedTensorOptions options;
          options.dtype = at::kLong;
          ShardedTensor tensor = ShardedTensor::empty(from, size, group, options);
          fill_with_indices(tensor);
          tensor.reshard(to);
          ASSERT_TRUE(holds_indices(tensor)) << from->to_string() << "\nto " << to->to_string();
          EXPECT_TRUE(tensor.sharding_spec() == *to);
          EXPECT_EQ(tensor.metadata(), ShardedTensor::empty(to, size, group, options).metadata());
        }
      }
    }
  });
}

TEST_P(ShardedTensorTest, FromTheTensorOfOneRank) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const Sizes& size : sizes()) {
      for (const SpecPtr& spec : specs_of_every_kind(size, world())) {
        for (const int src : {0, world() - 1}) {
          const at::Tensor full = group.rank() == src ? indices(size) : at::Tensor();
          const ShardedTensor tensor = ShardedTensor::from_tensor(full, spec, group, src);
          EXPECT_TRUE(holds_indices(tensor)) << spec->to_string();
          EXPECT_EQ(tensor.scalar_type(), at::kLong);
          EXPECT_TRUE(tensor.sharding_spec() == *spec);
          if (full.defined()) {
            full.fill_(-1);
            EXPECT_TRUE(holds_indices(tensor)) << "it shares memory with its source";
          }
        }
      }
    }
  });
}

TEST_P(ShardedTensorTest, FromATensorThatIsNotContiguousAndRequiresGrad) {
  run_local(world(), [&](const ProcessGroup& group) {
    const at::Tensor full = indices({4, 6}, at::kDouble);
    const at::Tensor turned = full.t().contiguous().t().set_requires_grad(true);
    const ShardedTensor tensor = ShardedTensor::from_tensor(turned, chunk_spec(0, testing::ranks_of(world())), group);
    EXPECT_TRUE(holds_indices(tensor));
    EXPECT_TRUE(tensor.requires_grad());
    EXPECT_TRUE(tensor.local_tensor().is_leaf() && tensor.local_tensor().requires_grad());
  });
}

TEST(FromTensorTest, Refusals) {
  run_local(2, [&](const ProcessGroup& group) {
    const SpecPtr spec = chunk_spec(0, {0, 1});
    const auto from = [&](const at::Tensor& tensor, int src) {
      return ShardedTensor::from_tensor(group.rank() == src ? tensor : at::Tensor(), spec, group, src);
    };
    EXPECT_ERROR(from({}, 1), ErrorCode::invalid_argument, "rank 1: the tensor of rank 1 is undefined");
    EXPECT_ERROR(from(at::ones({2}).to_sparse(), 0), ErrorCode::unsupported,
                 "the tensor of rank 0 has layout Sparse, expected torch.strided");
    EXPECT_ERROR(from(at::ones({2}), 2), ErrorCode::invalid_argument,
                 "the tensor of rank 2: expected a rank of 0 to 1");
    EXPECT_ERROR(from(at::ones({}), 0), ErrorCode::invalid_argument, "dimension 0");
  });
}

TEST_P(ShardedTensorTest, FromLocalShardsOfEverySpec) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const Sizes& size : sizes()) {
      for (const SpecPtr& spec : specs_of_every_kind(size, world())) {
        const ShardedTensor made = ShardedTensor::randn(spec, size, group);
        // Chunks that begin past the end are refused, as in PyTorch.
        bool is_within = true;
        for (const ShardMetadata& shard : made.metadata().shards_metadata) {
          for (std::size_t d = 0; d < size.size(); ++d) {
            is_within = is_within && shard.shard_offsets[d] + shard.shard_sizes[d] <= size[d];
          }
        }
        if (!is_within) {
          EXPECT_ERROR(ShardedTensor::from_local_shards(made.local_shards(), size, group), ErrorCode::invalid_argument,
                       "ends at");
          continue;
        }
        const ShardedTensor tensor = ShardedTensor::from_local_shards(made.local_shards(), size, group);
        EXPECT_EQ(tensor.metadata().shards_metadata.size(), made.metadata().shards_metadata.size());
        EXPECT_EQ(tensor.metadata().tensor_properties, made.metadata().tensor_properties);
        ASSERT_EQ(tensor.local_shards().size(), made.local_shards().size());
        for (std::size_t i = 0; i < made.local_shards().size(); ++i) {
          EXPECT_TRUE(tensor.local_shards()[i].tensor.is_same(made.local_shards()[i].tensor));
        }
      }
    }
  });
}

TEST(ShardedTensorDTypeTest, EveryDtypeIsGatheredAndResharded) {
  const std::vector<at::ScalarType> dtypes = {at::kFloat, at::kDouble, at::kHalf,         at::kBFloat16,
                                              at::kByte,  at::kChar,   at::kShort,        at::kInt,
                                              at::kLong,  at::kBool,   at::kComplexFloat, at::kComplexDouble};
  run_local(3, [&](const ProcessGroup& group) {
    for (const at::ScalarType dtype : dtypes) {
      ShardedTensorOptions options;
      options.dtype = dtype;
      ShardedTensor tensor = ShardedTensor::empty(chunk_spec(0, {2, 0, 1}), {5, 4}, group, options);
      fill_with_indices(tensor);
      tensor.reshard(grid_spec({5, 4}, {2, 2}, {0, 1, 2}));
      EXPECT_TRUE(holds_indices(tensor)) << dtype;
      const at::Tensor out = group.rank() == 1 ? at::zeros({5, 4}, dtype) : at::Tensor();
      tensor.gather(1, out);
      if (out.defined()) {
        EXPECT_TRUE(at::equal(out, indices({5, 4}, dtype))) << dtype;
      }
    }
  });
}

TEST(ShardedTensorMakeTest, FillsAndProperties) {
  const SpecPtr spec = chunk_spec(0, {0});
  ShardedTensorOptions options;
  options.dtype = at::kDouble;
  options.requires_grad = true;
  const ShardedTensor zeros = ShardedTensor::zeros(spec, {3, 2}, {}, options);
  EXPECT_TRUE(zeros.requires_grad());
  EXPECT_TRUE(zeros.local_tensor().requires_grad());
  EXPECT_TRUE(zeros.local_tensor().is_leaf());
  EXPECT_EQ(zeros.scalar_type(), at::kDouble);
  EXPECT_FALSE(zeros.is_pinned());
  EXPECT_TRUE(at::equal(ShardedTensor::full(spec, {3}, 2.5).local_tensor(), at::full({3}, 2.5)));
  const at::Tensor uniform = ShardedTensor::rand(spec, {1000}).local_tensor();
  EXPECT_TRUE(uniform.ge(0).all().item<bool>() && uniform.lt(1).all().item<bool>());
  EXPECT_NEAR(ShardedTensor::randn(spec, {1000}).local_tensor().std().item<double>(), 1, 0.2);
  EXPECT_EQ(to_string(zeros),
            "ShardedTensor [3, 2] of float64, torch.strided, requires_grad\n  [0, 3)x[0, 2) on rank:0/cpu");
  const ShardedTensor same = zeros;
  EXPECT_TRUE(same.is_same(zeros));
  EXPECT_FALSE(ShardedTensor::zeros(spec, {3, 2}).is_same(zeros));
}

TEST(ShardedTensorSizeTest, DimensionsCountFromBothEnds) {
  const ShardedTensor tensor = ShardedTensor::ones(chunk_spec(1, {0}), {4, 5, 6});
  EXPECT_EQ(tensor.dim(), 3);
  EXPECT_EQ(tensor.numel(), 120);
  for (const std::int64_t dim : {0, 1, 2}) {
    EXPECT_EQ(tensor.size(dim), 4 + dim);
    EXPECT_EQ(tensor.size(dim - 3), 4 + dim);
  }
  EXPECT_ERROR(tensor.size(3), ErrorCode::invalid_argument,
               "size of dimension 3 of a sharded tensor of size [4, 5, 6]: expected a dimension of -3 to 2");
  EXPECT_ERROR(tensor.size(-4), ErrorCode::invalid_argument, "size of dimension -4");
  const ShardedTensor scalar =
      ShardedTensor::from_local_shards({{at::ones({}), {{}, {}, RemoteDevice(0, Device{})}}}, {});
  EXPECT_EQ(scalar.dim(), 0);
  EXPECT_EQ(scalar.numel(), 1);
  EXPECT_ERROR(scalar.size(0), ErrorCode::invalid_argument, "it has no dimensions");
  EXPECT_EQ(ShardedTensor::ones(chunk_spec(0, {0}), {0, 3}).numel(), 0);
}

TEST(ShardedTensorSizeTest, TheFullTensorCountsOnEveryRank) {
  run_local(3, [](const ProcessGroup& group) {
    const ShardedTensor tensor = ShardedTensor::ones(chunk_spec(0, {2, 1}), {5, 2}, group);
    EXPECT_EQ(tensor.numel(), 10);
    EXPECT_EQ(tensor.size(0), 5);
    EXPECT_EQ(tensor.device(), at::Device(at::kCPU));  // rank 0 has no shard
  });
}

TEST(ShardedTensorSizeTest, TheDeviceIsThatOfTheLocalShard) {
  const SpecPtr spec = std::make_shared<ChunkShardingSpec>(0, std::vector<RemoteDevice>{RemoteDevice("rank:0/meta")});
  EXPECT_EQ(ShardedTensor::empty(spec, {4}).device(), at::Device(at::kMeta));
}

TEST(ShardedTensorMakeTest, Refusals) {
  ShardedTensorOptions sparse, channels_last;
  sparse.layout = at::kSparse;
  channels_last.memory_format = at::MemoryFormat::ChannelsLast;
  EXPECT_ERROR(ShardedTensor::empty(chunk_spec(0, {0}), {2}, {}, sparse), ErrorCode::unsupported,
               "sharded tensor of size [2]: layout Sparse, expected torch.strided");
  EXPECT_ERROR(ShardedTensor::empty(chunk_spec(0, {0}), {2}, {}, channels_last), ErrorCode::unsupported,
               "sharded tensor of size [2]: memory format ChannelsLast, expected torch.contiguous_format");
  EXPECT_ERROR(ShardedTensor::empty(chunk_spec(1, {0}), {2}), ErrorCode::invalid_argument,
               "ChunkShardingSpec of dimension 1");
  EXPECT_ERROR(ShardedTensor::empty(chunk_spec(0, {0, 1}), {2}), ErrorCode::invalid_argument,
               "rank 1 is not in the process group");
  const auto with = [](const std::string& device) {
    return std::make_shared<ChunkShardingSpec>(0, std::vector<RemoteDevice>{RemoteDevice(device)});
  };
  EXPECT_ERROR(ShardedTensor::empty(with("cpu"), {2}), ErrorCode::invalid_argument, "its placement has no rank");
  EXPECT_ERROR(ShardedTensor::empty(with("worker0/cpu"), {2}), ErrorCode::invalid_argument, "RPC is not initialized");
  EXPECT_ERROR(ShardedTensor::empty(grid_spec({4}, {2}, {0}), {4}).local_tensor(), ErrorCode::unsupported,
               "rank 0 has 2 shards, expected one");
}

// --- gather as another dtype

TEST_P(ShardedTensorTest, GatherConvertsToTheDtypeAndThenToThatOfOut) {
  run_local(world(), [&](const ProcessGroup& group) {
    for (const Sizes& size : sizes()) {
      for (const SpecPtr& spec : specs_of_every_kind(size, world())) {
        ShardedTensorOptions options;
        options.dtype = at::kDouble;
        const ShardedTensor tensor = ShardedTensor::empty(spec, size, group, options);
        fill_with_indices(tensor);
        for (const Shard& shard : tensor.local_shards()) shard.tensor.add_(0.75);
        const at::Tensor full = indices(size, at::kDouble) + 0.75;
        for (const at::ScalarType out_dtype : {at::kInt, at::kDouble, at::kFloat}) {
          const at::Tensor out = group.rank() == 0 ? at::full(size, -1, out_dtype) : at::Tensor();
          tensor.gather(0, out, at::kInt);
          if (out.defined()) {
            EXPECT_TRUE(at::equal(out, full.to(at::kInt).to(out_dtype))) << spec->to_string() << out_dtype;
          }
        }
      }
    }
  });
}

TEST(GatherTest, ElementsAreRoundedToTheDtypeBeforeOutRoundsThem) {
  const ShardedTensor tensor = ShardedTensor::full(chunk_spec(0, {0}), {3}, 1.0009765625);  // 1 + 2^-10
  const at::Tensor exact = at::zeros({3}), rounded = at::zeros({3});
  tensor.gather(0, exact, at::kHalf);
  EXPECT_TRUE(at::equal(exact, at::full({3}, 1.0009765625)));
  tensor.gather(0, rounded, at::kBFloat16);
  EXPECT_TRUE(at::equal(rounded, at::ones({3})));
}

TEST(GatherTest, ConjugatedShardsAndOut) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor real = at::arange(4, at::kFloat).view({2, 2}) + static_cast<float>(4 * group.rank());
    const at::Tensor conjugated = at::complex(real, real).conj();
    const ShardedTensor tensor = ShardedTensor::from_local_tensor(conjugated, chunk_spec(0, {0, 1}), {4, 2}, group);
    const at::Tensor expected_real = at::arange(8, at::kFloat).view({4, 2});
    const at::Tensor expected = at::complex(expected_real, -expected_real);
    for (const bool conjugates : {false, true}) {
      at::Tensor out = group.rank() == 0 ? at::zeros({4, 2}, at::kComplexFloat) : at::Tensor();
      if (conjugates && out.defined()) out = out.conj();
      tensor.gather(0, out);
      if (out.defined()) {
        EXPECT_TRUE(at::equal(out.resolve_conj(), expected)) << conjugates;
      }
    }
  });
}

TEST(GatherTest, Refusals) {
  run_local(2, [&](const ProcessGroup& group) {
    const ShardedTensor tensor = ShardedTensor::ones(chunk_spec(0, {0, 1}), {4, 2}, group);
    const bool is_first = group.rank() == 0;
    const auto refuse = [&](int dst, const at::Tensor& out, const std::string& what) {
      EXPECT_ERROR(tensor.gather(dst, out), ErrorCode::invalid_argument, "gather of a sharded tensor of size [4, 2]",
                   what);
    };
    refuse(2, {}, "dst is 2, expected 0 to 1");
    // What one rank refuses, all refuse.
    const auto refuse_on = [&](int rank, const at::Tensor& wrong, const std::string& what) {
      refuse(0, group.rank() == rank ? wrong : is_first ? at::ones({4, 2}) : at::Tensor(), what);
    };
    refuse_on(0, {}, "on rank 0, out is undefined");
    refuse_on(0, at::ones({2, 4}), "out has size [2, 4], expected [4, 2]");
    refuse_on(0, at::ones({4, 2}, at::kInt), "out is of int32, expected float32");
    refuse_on(0, at::ones({2, 4}).t(), "out is not contiguous");
    refuse_on(1, at::ones({4, 2}), "on rank 1, out is defined");
    EXPECT_ERROR(tensor.gather(group.rank()), ErrorCode::invalid_argument, "rank 0");
    const at::Tensor real = is_first ? at::ones({4, 2}) : at::Tensor();
    EXPECT_ERROR(tensor.gather(0, real, is_first ? at::kFloat : at::kDouble), ErrorCode::invalid_argument,
                 "rank 0 has gathered dtype float32 and rank 1 has gathered dtype float64");
    EXPECT_ERROR(tensor.gather(0, real, at::kComplexFloat), ErrorCode::invalid_argument,
                 "on rank 0, the dtype of out is float32, expected a complex dtype as complex64");
    EXPECT_ERROR(tensor.gather(0, real, at::kQInt8), ErrorCode::invalid_argument,
                 "on rank 1, dtype is qint8, expected a dtype to which LibTorch converts float32");
    // Then the group is as before.
    const at::Tensor out = is_first ? at::zeros({4, 2}) : at::Tensor();
    tensor.gather(0, out);
    EXPECT_TRUE(!is_first || out.equal(at::ones({4, 2})));
  });
}

TEST(OneSidedTest, RanksThatWantDifferentTensorsAllThrow) {
  run_local(2, [&](const ProcessGroup& group) {
    const bool is_first = group.rank() == 0;
    const at::Tensor full = at::arange(8).view({4, 2});
    const auto rows = chunk_spec(0, {0, 1}), columns = chunk_spec(1, {0, 1});
    EXPECT_ERROR(ShardedTensor::from_tensor(full, is_first ? rows : columns, group), ErrorCode::invalid_argument,
                 "rank 0 has spec ", "rank 1 has spec ");
    EXPECT_ERROR(ShardedTensor::from_tensor(full, is_first ? rows : nullptr, group), ErrorCode::invalid_argument,
                 "rank 1: sharded tensor: the spec is null");
    EXPECT_ERROR(ShardedTensor::from_tensor(full, rows, group, is_first ? 0 : 1), ErrorCode::invalid_argument,
                 "rank 0 has src 0 and rank 1 has src 1");
    EXPECT_ERROR(ShardedTensor::from_tensor(full, rows, group, is_first ? 0 : 2), ErrorCode::invalid_argument,
                 "expected a rank of 0 to 1");
    ShardedTensor tensor = ShardedTensor::from_tensor(full, rows, group);
    EXPECT_ERROR(tensor.reshard(is_first ? rows : columns), ErrorCode::invalid_argument, "rank 0 has to ",
                 "rank 1 has to ");
    EXPECT_ERROR(tensor.reshard(is_first ? nullptr : columns), ErrorCode::invalid_argument,
                 "rank 0: sharded tensor: the spec is null");
    tensor.reshard(columns);
    const at::Tensor out = is_first ? at::zeros({4, 2}, at::kLong) : at::Tensor();
    tensor.gather(0, out);
    EXPECT_TRUE(!is_first || out.equal(full));
  });
}

Shard shard_at(std::int64_t row, const at::Tensor& tensor, int rank) {
  return Shard::from_tensor_and_offsets(tensor, {row, 0}, rank);
}

TEST(FromLocalShardsTest, InfersTheSpec) {
  run_local(2, [&](const ProcessGroup& group) {
    // Rank 1 has the first rows.
    const ShardedTensor tensor = ShardedTensor::from_local_shards(
        {shard_at(group.rank() == 1 ? 0 : 2, at::ones({2, 3}), group.rank())}, {4, 3}, group);
    EXPECT_TRUE(tensor.sharding_spec() == *chunk_spec(0, {1, 0}));
  });
}

TEST(FromLocalShardsTest, RanksMayHaveNone) {
  run_local(3, [&](const ProcessGroup& group) {
    std::vector<Shard> shards;
    if (group.rank() == 1) shards = {shard_at(0, at::ones({1, 2}), 1), shard_at(1, at::ones({2, 2}), 1)};
    const ShardedTensor tensor = ShardedTensor::from_local_shards(shards, {3, 2}, group);
    EXPECT_EQ(tensor.local_shards().size(), group.rank() == 1 ? 2u : 0u);
    EXPECT_ERROR(ShardedTensor::from_local_shards({}, {3, 2}, group), ErrorCode::invalid_argument, "no rank has any");
  });
}

// If one rank's arguments are invalid, both ranks throw an error naming it.
TEST(FromLocalShardsTest, EveryMismatchIsAnErrorOnAllRanks) {
  run_local(2, [&](const ProcessGroup& group) {
    const int rank = group.rank();
    const auto good = [&] { return shard_at(2 * rank, at::ones({2, 3}), rank); };
    const auto refuse = [&](FunctionRef<void(std::vector<Shard> & shards, Sizes & size)> spoil,
                            const std::vector<std::string>& whats) {
      std::vector<Shard> shards = {good()};
      Sizes size = {4, 3};
      if (rank == 1) spoil(shards, size);
      for (const std::string& what : whats) {
        EXPECT_ERROR(ShardedTensor::from_local_shards(shards, size, group), ErrorCode::invalid_argument, what);
      }
    };
    const auto with = [&](const at::Tensor& tensor) {
      return [=](std::vector<Shard>& shards, Sizes&) { shards[0].tensor = tensor; };
    };
    refuse(with(at::ones({3, 2}).t()),
           {"rank 1: shard [2, 4)x[0, 3) on rank:1/cpu on rank 1: the tensor is not contiguous"});
    refuse(with(at::ones({2, 3}).to_sparse()), {"layout Sparse, expected torch.strided"});
    refuse(with(at::ones({2, 2})),
           {"rank 1: shard [2, 4)x[0, 3) on rank:1/cpu on rank 1: size [2, 2], expected [2, 3]"});
    refuse(with(at::ones({2, 3}, at::kInt)), {R"(dtype is "float32" on rank 0 and "int32" on rank 1)"});
    refuse(with(at::ones({2, 3}).requires_grad_()), {"requires_grad is false on rank 0 and true on rank 1"});
    refuse([](std::vector<Shard>&, Sizes& size) { size = {5, 3}; }, {"size is [4,3] on rank 0 and [5,3] on rank 1"});
    refuse([](std::vector<Shard>& shards, Sizes&) { shards[0].metadata.placement = on_rank(0); },
           {"its placement is on rank 0"});
    refuse([](std::vector<Shard>& shards, Sizes&) { shards[0].metadata.placement.reset(); }, {"it has no placement"});
    refuse([](std::vector<Shard>& shards, Sizes&) { shards[0].metadata.placement = RemoteDevice("rank:1/meta"); },
           {"device cpu, expected meta"});
    refuse(
        [](std::vector<Shard>& shards, Sizes&) {
          shards[0].metadata.shard_offsets = {1, 0};
        },
        {"[0, 2)x[0, 3) on rank:0/cpu and [1, 3)x[0, 3) on rank:1/cpu overlap"});
    refuse([](std::vector<Shard>& shards, Sizes&) { shards.clear(); },
           {"6 elements, expected 12; no shard has [2, 4)"});
    refuse(
        [&](std::vector<Shard>& shards, Sizes&) {
          shards.push_back(shard_at(2, at::ones({2, 3}, at::kInt), 1));
        },
        {"dtype int32, expected float32"});
  });
}

TEST(FromLocalTensorTest, IsCheckedAgainstTheSpec) {
  run_local(2, [&](const ProcessGroup& group) {
    const SpecPtr spec = chunk_spec(0, {1, 0});
    const at::Tensor local = at::full({2, 3}, group.rank());
    const ShardedTensor tensor = ShardedTensor::from_local_tensor(local, spec, {4, 3}, group);
    EXPECT_TRUE(tensor.local_tensor().is_same(local));
    EXPECT_EQ(tensor.local_shards()[0].metadata.shard_offsets, (Sizes{group.rank() == 1 ? 0 : 2, 0}));
    EXPECT_ERROR(ShardedTensor::from_local_tensor(at::ones({3, 2}).t(), spec, {4, 3}, group),
                 ErrorCode::invalid_argument, "it is not contiguous");
    EXPECT_ERROR(ShardedTensor::from_local_tensor(at::ones({3, 3}), spec, {4, 3}, group), ErrorCode::invalid_argument,
                 "size [3, 3], expected [2, 3]");
    EXPECT_ERROR(ShardedTensor::from_local_tensor(local, grid_spec({4, 3}, {1, 3}, {0, 1}), {4, 3}, group),
                 ErrorCode::invalid_argument, "the spec places 2 shards on this rank, expected one");
  });
}

TEST(FromGlobalMetadataTest, LocalShardsMustBeThoseOfTheMetadata) {
  const SpecPtr spec = chunk_spec(0, {0});
  const ShardedTensorMetadata metadata = spec->build_metadata(Sizes{2, 3}, {});
  const Shard shard = {at::ones({2, 3}), metadata.shards_metadata[0]};
  const auto make = [](std::vector<Shard> shards, ShardedTensorMetadata of) {
    return ShardedTensor::from_local_shards_and_global_metadata(std::move(shards), std::move(of));
  };
  EXPECT_EQ(make({shard}, metadata).metadata(), metadata);
  EXPECT_ERROR(make({}, metadata), ErrorCode::invalid_argument,
               "rank 0 has 0 local shards, expected 1 as in the metadata");
  const Shard other = {at::ones({2, 3}), {{1, 0}, {2, 3}, shard.metadata.placement}};
  EXPECT_ERROR(make({other}, metadata), ErrorCode::invalid_argument,
               "sharded tensor of size [2, 3]: local shard 0 of rank 0 is [1, 3)x[0, 3) on rank:0/cpu, "
               "expected [0, 2)x[0, 3) on rank:0/cpu as in the metadata");
  EXPECT_ERROR(make({{at::ones({1, 3}), shard.metadata}}, metadata), ErrorCode::invalid_argument,
               "size [1, 3], expected [2, 3]");
  ShardedTensorMetadata none = metadata, sparse = metadata, larger = metadata;
  none.shards_metadata.clear();
  sparse.tensor_properties.layout = "torch.sparse_coo";
  larger.size = {3, 3};
  EXPECT_ERROR(make({shard}, none), ErrorCode::invalid_argument, "its metadata has no shards");
  EXPECT_ERROR(make({shard}, sparse), ErrorCode::invalid_argument, "layout torch.sparse_coo");
  EXPECT_ERROR(make({shard}, larger), ErrorCode::invalid_argument, "no shard has [2, 3)x[0, 3)");
}

TEST(ReshardTest, TheSameSpecChangesNothing) {
  ShardedTensor tensor = ShardedTensor::ones(chunk_spec(0, {0}), {4});
  const at::Tensor before = tensor.local_tensor();
  tensor.reshard(chunk_spec(0, {0}));
  EXPECT_TRUE(tensor.local_tensor().is_same(before));
}

TEST(ReshardTest, KeepsProperties) {
  run_local(2, [&](const ProcessGroup& group) {
    ShardedTensorOptions options;
    options.requires_grad = true;
    ShardedTensor tensor = ShardedTensor::ones(chunk_spec(0, {0, 1}), {4, 2}, group, options);
    tensor.reshard(chunk_spec(1, {0, 1}));
    EXPECT_TRUE(tensor.local_tensor().requires_grad());
    EXPECT_TRUE(tensor.local_tensor().is_leaf());
    EXPECT_TRUE(tensor.requires_grad());
  });
}

// A custom spec with invalid metadata.
class Wrong final : public ShardingSpec {
 public:
  explicit Wrong(std::vector<ShardMetadata> shards) : shards_(std::move(shards)) {}
  std::string_view kind() const override { return "Wrong"; }
  ShardedTensorMetadata build_metadata(std::span<const std::int64_t> size,
                                       const TensorProperties& properties) const override {
    return {shards_, {size.begin(), size.end()}, properties};
  }
  bool equals(const ShardingSpec&) const override { return false; }
  std::string to_string() const override { return "Wrong()"; }

 private:
  std::vector<ShardMetadata> shards_;
};

TEST(ReshardTest, ASpecThatIsNoPartitionIsRefusedAndNothingChanges) {
  ShardedTensor tensor = ShardedTensor::ones(chunk_spec(0, {0}), {4});
  const auto refuse = [&](std::vector<ShardMetadata> shards, const std::string& what) {
    EXPECT_ERROR(tensor.reshard(std::make_shared<Wrong>(shards)), ErrorCode::invalid_argument, what);
  };
  refuse({{{0}, {3}, on_rank(0)}}, "no shard has [3, 4)");
  refuse({{{0}, {3}, on_rank(0)}, {{2}, {2}, on_rank(0)}}, "overlap");
  refuse({{{0}, {5}, on_rank(0)}}, "expected one within the tensor");
  EXPECT_EQ(tensor.local_tensor().numel(), 4);
}

TEST(ToTest, TheSameObjectComesBackWhereNothingChanges) {
  const ShardedTensor tensor = ShardedTensor::ones(chunk_spec(0, {0}), {4});
  EXPECT_TRUE(tensor.cpu().is_same(tensor));
  EXPECT_TRUE(tensor.to({}).is_same(tensor));
  EXPECT_TRUE(tensor.to({.device = at::Device(at::kCPU), .dtype = at::kFloat}).is_same(tensor));
  const ShardedTensor copy = tensor.to({.copy = true});
  EXPECT_FALSE(copy.is_same(tensor));
  EXPECT_NE(copy.local_tensor().data_ptr(), tensor.local_tensor().data_ptr());
  EXPECT_EQ(copy.metadata(), tensor.metadata());
}

TEST(ToTest, AnotherDType) {
  run_local(3, [&](const ProcessGroup& group) {
    ShardedTensorOptions options;
    options.dtype = at::kLong;
    const ShardedTensor tensor = ShardedTensor::empty(grid_spec({4, 4}, {2, 2}, {0, 1}), {4, 4}, group, options);
    fill_with_indices(tensor);
    const ShardedTensor moved = tensor.to({.dtype = at::kDouble});
    EXPECT_EQ(moved.scalar_type(), at::kDouble);
    EXPECT_EQ(moved.metadata().tensor_properties.dtype, DType::float64);
    EXPECT_TRUE(moved.sharding_spec() == tensor.sharding_spec());
    EXPECT_TRUE(holds_indices(moved));
    EXPECT_EQ(tensor.scalar_type(), at::kLong);
  });
}

TEST(ToTest, AnotherDeviceChangesEveryPlacement) {
  const ShardedTensor tensor = ShardedTensor::ones(chunk_spec(0, {0}), {4});
  const ShardedTensor moved = tensor.to({.device = at::Device(at::kMeta)});
  EXPECT_EQ(to_string(moved), "ShardedTensor [4] of float32, torch.strided\n  [0, 4) on rank:0/meta");
  EXPECT_TRUE(moved.local_tensor().is_meta());
}

TEST(ToTest, IsDifferentiable) {
  ShardedTensorOptions options;
  options.requires_grad = true;
  const ShardedTensor tensor = ShardedTensor::ones(chunk_spec(0, {0}), {4}, {}, options);
  const ShardedTensor moved = tensor.to({.dtype = at::kDouble});
  EXPECT_TRUE(moved.requires_grad());
  moved.local_tensor().mul(3).sum().backward();
  EXPECT_TRUE(at::equal(tensor.local_tensor().grad(), at::full({4}, 3.0F)));
  EXPECT_ERROR(tensor.to({.dtype = at::kInt}), ErrorCode::invalid_argument,
               "requires grad to int32: expected a floating-point or complex dtype");
  EXPECT_ERROR(tensor.cpu(at::MemoryFormat::ChannelsLast), ErrorCode::unsupported,
               "memory format ChannelsLast, expected torch.contiguous_format or");
}

TEST(TorchTypesTest, BothWays) {
  for (std::size_t i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    try {
      EXPECT_EQ(to_dtype(to_scalar_type(dtype)), dtype);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::unsupported);
    }
  }
  EXPECT_EQ(to_device(Device::parse("cuda:3")), at::Device("cuda:3"));
  EXPECT_EQ(to_device(at::Device("meta")), Device::parse("meta"));
}

}  // namespace
}  // namespace tessera

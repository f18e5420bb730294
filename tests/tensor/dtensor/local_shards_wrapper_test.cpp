#include "tessera/tensor/local_shards_wrapper.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "support/error_matchers.h"
#include "support/paths.h"
#include "tessera/comm/local_ranks.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using Sizes = std::vector<std::int64_t>;

// PyTorch's results: see tests/golden/dtensor/generate.py.
const nlohmann::json& golden() {
  static const nlohmann::json cases = [] {
    std::ifstream in(std::filesystem::path(tessera::testing::source_dir()) / "tests" / "golden" / "dtensor" /
                     "cases.json");
    return nlohmann::json::parse(in);
  }();
  return cases.at("wrappers");
}

// Elements are 0, 1, 2 ... in the order of the shards.
LocalShardsWrapper wrapper_of(const nlohmann::json& sizes, const nlohmann::json& offsets) {
  std::vector<at::Tensor> shards;
  std::int64_t begin = 0;
  for (const nlohmann::json& json : sizes) {
    const auto size = json.get<Sizes>();
    const std::int64_t count = std::accumulate(size.begin(), size.end(), std::int64_t{1}, std::multiplies<>());
    shards.push_back(at::arange(begin, begin + count).view(size));
    begin += count;
  }
  return {shards, offsets.get<std::vector<Sizes>>()};
}

nlohmann::json chunks_of(const LocalShardsWrapper& wrapper) {
  nlohmann::json chunks = nlohmann::json::array();
  for (const Box& chunk : wrapper.local_chunks()) chunks.push_back({chunk.offsets, chunk.sizes});
  return chunks;
}

template <typename F>
nlohmann::json refused(const F& f) {
  try {
    return f();
  } catch (const std::exception&) {
    return nullptr;
  }
}

TEST(LocalShardsWrapperTest, SaysWhatPyTorchSays) {
  for (const nlohmann::json& item : golden()) {
    const LocalShardsWrapper wrapper = wrapper_of(item[0], item[1]);
    const nlohmann::json& expected = item[2];
    EXPECT_EQ(nlohmann::json(wrapper.size()), expected["size"]) << item.dump();
    EXPECT_EQ(chunks_of(wrapper), expected["chunks"]) << item.dump();
    if (!expected["is_empty_shard"].is_null()) {
      EXPECT_EQ(wrapper.is_empty_shard(), expected["is_empty_shard"].get<bool>()) << item.dump();
    }
    EXPECT_EQ(wrapper.bytes(), expected["bytes"].get<std::int64_t>());
    for (const nlohmann::json& view : expected["views"]) {
      const auto size = view[0].get<Sizes>();
      // PyTorch accepts shards and offsets of different numbers of dimensions.
      if (wrapper.local_shards().size() == 1 && size.size() != wrapper.size().size()) continue;
      EXPECT_EQ(refused([&] { return chunks_of(wrapper.view(size)); }), view[1]) << item.dump();
    }
    const auto gathered = refused([&]() -> nlohmann::json {
      const at::Tensor all = wrapper.all_gather_into_tensor(ProcessGroup()).wait();
      const auto* data = all.data_ptr<std::int64_t>();
      nlohmann::json rows = nlohmann::json::array();
      for (std::int64_t r = 0; r < all.size(0); ++r) {
        rows.push_back(Sizes(data + r * all.size(1), data + (r + 1) * all.size(1)));
      }
      return rows;
    });
    EXPECT_EQ(gathered, expected["gathered"]) << item.dump();
    nlohmann::json items = nlohmann::json::array();
    for (const ShardWriteItem& write : wrapper.create_write_items("w", wrapper.size())) {
      EXPECT_EQ(write.index.fqn, "w");
      EXPECT_EQ(write.size, wrapper.size());
      items.push_back(*write.index.offset);
    }
    EXPECT_EQ(items, expected["items"]) << item.dump();
  }
}

TEST(LocalShardsWrapperTest, OpsGoToEachShard) {
  const LocalShardsWrapper wrapper({at::ones({2, 3}), at::full({2, 1}, 2.0)}, {{0, 0}, {0, 5}});
  EXPECT_TRUE(wrapper.equal(wrapper.clone()));
  EXPECT_FALSE(wrapper.clone().local_shards()[0].is_alias_of(wrapper.local_shards()[0]));
  EXPECT_TRUE(wrapper.view({2, 4}).local_shards()[0].is_alias_of(wrapper.local_shards()[0]));
  EXPECT_EQ(wrapper.to(at::kDouble).local_shards()[1].scalar_type(), at::kDouble);
  EXPECT_EQ(wrapper.to(at::kDouble).storage_metadata().properties.dtype, DType::float64);
  EXPECT_THAT(wrapper.new_empty().local_sizes(), ElementsAre(Sizes{2, 3}, Sizes{2, 1}));
  // The same elements at other offsets, in another order, and fewer of them.
  EXPECT_FALSE(wrapper.equal({wrapper.local_shards(), {{0, 0}, {0, 4}}}));
  EXPECT_FALSE(wrapper.equal({{wrapper.local_shards()[1], wrapper.local_shards()[0]}, {{0, 5}, {0, 0}}}));
  EXPECT_FALSE(wrapper.equal({{wrapper.local_shards()[0]}, {{0, 0}}}));
  EXPECT_EQ(wrapper.device(), at::Device(at::kCPU));
  EXPECT_FALSE(wrapper.is_pinned());
  EXPECT_THAT(wrapper.to_string(), ::testing::StartsWith("LocalShardsWrapper of size [2, 4]\n[0, 2)x[0, 3):\n"));
}

TEST(LocalShardsWrapperTest, GradientsAreOfTheWrapperItself) {
  LocalShardsWrapper wrapper({at::ones({2, 3}), at::ones({2, 1})}, {{0, 0}, {0, 5}});
  const LocalShardsWrapper same = wrapper;
  wrapper.requires_grad_();
  EXPECT_TRUE(same.requires_grad());
  EXPECT_TRUE(same.local_shards()[1].requires_grad());
  EXPECT_FALSE(wrapper.equal({{at::ones({2, 3}), at::ones({2, 1})}, {{0, 0}, {0, 5}}}));
  wrapper.detach();
  EXPECT_FALSE(same.requires_grad());
  EXPECT_FALSE(same.local_shards()[0].requires_grad());
}

TEST(LocalShardsWrapperTest, AnEmptyOneIsOnMeta) {
  const LocalShardsWrapper empty({}, {});
  EXPECT_TRUE(empty.is_meta());
  EXPECT_TRUE(empty.is_empty_shard());
  EXPECT_TRUE(empty.equal(empty.clone()));
  EXPECT_THAT(empty.create_chunk_list(), ElementsAre(Box({0, 0}, {0, 0})));
  EXPECT_TRUE(empty.create_write_items("w", {0, 0}).empty());
  EXPECT_EQ(empty.get_tensor_shard({"w", Sizes{3, 3}, std::nullopt}).numel(), 0);
}

TEST(LocalShardsWrapperTest, AShardIsFoundByItsOffset) {
  const LocalShardsWrapper wrapper({at::ones({2, 3}), at::full({2, 1}, 2.0)}, {{0, 0}, {0, 5}});
  const auto shard_of = [&](std::optional<Sizes> offset, std::optional<std::size_t> index) {
    return wrapper.get_tensor_shard({"w", std::move(offset), index});
  };
  EXPECT_TRUE(shard_of(Sizes{0, 5}, 1).is_same(wrapper.local_shards()[1]));
  EXPECT_TRUE(shard_of(Sizes{0, 5}, 0).is_same(wrapper.local_shards()[1]));  // a hint that is wrong
  EXPECT_TRUE(shard_of(Sizes{0, 5}, 9).is_same(wrapper.local_shards()[1]));
  EXPECT_TRUE(shard_of(Sizes{0, 0}, std::nullopt).is_same(wrapper.local_shards()[0]));
  EXPECT_ERROR(shard_of(Sizes{0, 1}, std::nullopt), ErrorCode::not_found, "no local shard of 'w' at [0, 1]");
  EXPECT_ERROR(shard_of(std::nullopt, 0), ErrorCode::not_found, "no local shard of 'w' at no offset");
}

TEST(LocalShardsWrapperTest, AllRanksShardsAreGathered) {
  for (int world = 1; world <= 4; ++world) {
    run_local(world, [&](const ProcessGroup& group) {
      const double r = group.rank();
      const LocalShardsWrapper wrapper({at::full({1, 2}, r), at::full({2, 2}, r + 0.5)}, {{0, 0}, {1, 0}});
      const at::Tensor all = wrapper.all_gather_into_tensor(group).wait();
      ASSERT_EQ(all.sizes(), (Sizes{3 * world, 2}));
      for (int rank = 0; rank < world; ++rank) {
        EXPECT_TRUE(at::equal(all.narrow(0, 3 * rank, 1), at::full({1, 2}, rank)));
        EXPECT_TRUE(at::equal(all.narrow(0, 3 * rank + 1, 2), at::full({2, 2}, rank + 0.5)));
      }
    });
  }
}

// Law: the concatenation of the padded shards is the padded concatenation.
TEST(LocalShardsWrapperTest, PaddingIsThatOfTheConcatenatedShards) {
  const at::Tensor rows = at::arange(10, at::kDouble).view({2, 5}), line = at::arange(5, at::kDouble);
  const LocalShardsWrapper columns({rows.narrow(1, 0, 2), rows.narrow(1, 2, 2), rows.narrow(1, 4, 1)},
                                   {{0, 0}, {0, 2}, {0, 4}});
  for (const Sizes& pad : {Sizes{0, 0, 2, 0}, Sizes{0, 0, 0, 1}, Sizes{3, 0, 0, 0}, Sizes{0, 2, 0, 0},
                           Sizes{1, 2, 1, 1}, Sizes{0, 2}, Sizes{}}) {
    const LocalShardsWrapper padded = columns.constant_pad_nd(pad, 7.5);
    EXPECT_TRUE(at::equal(at::cat(padded.local_shards(), 1), at::constant_pad_nd(rows, pad, 7.5)))
        << shape_to_string(pad);
    const std::int64_t left = pad.empty() ? 0 : pad[0];
    EXPECT_EQ(padded.local_offsets(), (std::vector<Sizes>{{0, 0}, {0, 2 + left}, {0, 4 + left}}))
        << shape_to_string(pad);
    EXPECT_EQ(padded.size(), at::constant_pad_nd(rows, pad).sizes().vec());
  }
  const LocalShardsWrapper two({line.narrow(0, 0, 2), line.narrow(0, 2, 3)}, {{0}, {2}});
  for (const Sizes& pad : {Sizes{2, 0}, Sizes{0, 1}, Sizes{1, 2}}) {
    const LocalShardsWrapper padded = two.constant_pad_nd(pad, -1);
    EXPECT_TRUE(at::equal(at::cat(padded.local_shards()), at::constant_pad_nd(line, pad, -1))) << shape_to_string(pad);
    EXPECT_EQ(padded.local_offsets(), (std::vector<Sizes>{{0}, {2 + pad[0]}}));
    EXPECT_EQ(padded.storage_metadata().size, (Sizes{5 + pad[0] + pad[1]}));
    EXPECT_EQ(padded.storage_metadata().chunks[0], Box({0}, {2 + pad[0]}));
    EXPECT_EQ(padded.storage_metadata().chunks[1], Box({2 + pad[0]}, {3 + pad[1]}));
  }
  EXPECT_TRUE(at::equal(LocalShardsWrapper({rows}, {{0, 0}}).constant_pad_nd({1, 2, 3, 4}).local_shards()[0],
                        at::constant_pad_nd(rows, {1, 2, 3, 4})));
  EXPECT_TRUE(at::equal(LocalShardsWrapper({line}, {{0}}).constant_pad_nd({2, 1}, -1).local_shards()[0],
                        at::constant_pad_nd(line, {2, 1}, -1)));

  EXPECT_ERROR(LocalShardsWrapper({}, {}).constant_pad_nd({1, 2}), ErrorCode::invalid_argument,
               "pad local shards of size [0, 0] by [1, 2]: expected at least one shard");
  for (const Sizes& pad : {Sizes{1}, Sizes{1, 2, 3}, Sizes{0, 0, 0, 0, 1, 1}, Sizes{0, -1}}) {
    EXPECT_ERROR(columns.constant_pad_nd(pad), ErrorCode::invalid_argument, "expected two counts for each");
  }
  EXPECT_ERROR(two.constant_pad_nd({1}), ErrorCode::invalid_argument, "expected two counts for each");
  const at::Tensor cube = at::ones({1, 2, 3});
  EXPECT_ERROR(LocalShardsWrapper({cube, cube}, {{0, 0, 0}, {1, 0, 0}}).constant_pad_nd({1, 1, 1, 1, 1, 1}),
               ErrorCode::unsupported, "expected one or two dimensions");
}

TEST(LocalShardsWrapperTest, WhatItCantDoIsRefused) {
  const at::Tensor rows = at::ones({2, 3});
  EXPECT_ERROR(LocalShardsWrapper({rows}, {}), ErrorCode::invalid_argument, "1 shards with 0 offsets");
  EXPECT_ERROR(LocalShardsWrapper({rows, rows.to(at::kMeta)}, {{0, 0}, {2, 0}}), ErrorCode::invalid_argument,
               "shard 1 is on meta, expected cpu as the first shard");
  EXPECT_ERROR(LocalShardsWrapper({rows, rows[0]}, {{0, 0}, {2}}), ErrorCode::invalid_argument,
               "shard 1 is of shape [3]");
  EXPECT_ERROR(LocalShardsWrapper({rows}, {{0}}), ErrorCode::invalid_argument, "expected 2 dimensions");
  EXPECT_ERROR(LocalShardsWrapper({rows, at::Tensor()}, {{0, 0}, {2, 0}}), ErrorCode::invalid_argument,
               "local shards: shard 1 is undefined at [2, 0], expected a tensor and no negative offset");
  EXPECT_ERROR(LocalShardsWrapper({rows}, {{-1, 0}}), ErrorCode::invalid_argument, "shard 0 is a tensor at [-1, 0]");
  const LocalShardsWrapper two({rows, rows}, {{0, 0}, {0, 3}});
  EXPECT_ERROR(two.view({12}), ErrorCode::invalid_argument, "as [12]: expected their size [2, 6]");
  const at::Tensor cube = at::ones({1, 2, 3});
  EXPECT_ERROR(LocalShardsWrapper({cube, cube}, {{0, 0, 0}, {1, 0, 0}}).view({1, 2, 3}), ErrorCode::unsupported,
               "view of several local shards of 3 dimensions");
  EXPECT_ERROR(two.clone(at::MemoryFormat::ChannelsLast), ErrorCode::unsupported,
               "memory format ChannelsLast is not supported for LocalShardsWrapper");
  EXPECT_ERROR(LocalShardsWrapper::refuse("aten::add"), ErrorCode::unsupported,
               "aten::add is not supported for LocalShardsWrapper, expected one local tensor on each rank");
}

}  // namespace
}  // namespace tessera

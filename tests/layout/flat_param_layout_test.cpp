// Flat parameters: all numbers and the place of every element equal PyTorch's.

#include "tessera/layout/flat_param_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "support/element_oracle.h"
#include "support/error_matchers.h"
#include "support/paths.h"

namespace tessera {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using Numbers = std::vector<std::int64_t>;

// tests/golden/fsdp/generate.py describes the file; another file of this kind may be used.
json golden_cases() {
  const char* const other = std::getenv("TESSERA_FLAT_PARAM_CASES");
  std::ifstream in(other != nullptr
                       ? std::filesystem::path(other)
                       : std::filesystem::path(tessera::testing::source_dir()) / "tests/golden/fsdp/cases.json");
  return json::parse(in);
}

FlatParamLayout layout_of(const json& golden) {
  std::vector<FlatParamInput> params;
  for (const json& param : golden.at("params")) {
    params.push_back(
        {param[0].get<std::string>(), param[1].get<Numbers>(), param[2].get<Numbers>(), param[3].get<std::uint64_t>()});
  }
  return {std::move(params), {golden.at("world_size"), golden.at("aligned_numel")}};
}

// Returns the elements of a rank's shard as numbered by generate.py, -1 for padding.
Numbers elements_of_shard(const FlatParamLayout& layout, std::int64_t rank, const Numbers& identities) {
  Numbers shard(static_cast<std::size_t>(layout.sharded_numel()), -1);
  for (std::size_t i = 0; i < layout.params().size(); ++i) {
    for (const FlatParamPiece& piece : layout.pieces(rank, i)) {
      for (const auto& element : testing::elements(piece.box)) {
        std::int64_t at = piece.offset_in_shard;
        for (std::size_t d = 0; d < element.size(); ++d) {
          at += (element[d] - piece.box.offsets[d]) * piece.strides[d];
        }
        std::int64_t& place = shard.at(static_cast<std::size_t>(at));
        EXPECT_EQ(place, -1) << "two elements at " << at;
        place = 1000 * identities[i] + 100 + testing::flat_index(element, Box::full(layout.params()[i].shape));
      }
    }
  }
  return shard;
}

TEST(FlatParamLayoutTest, EqualsPyTorch) {
  std::size_t shards = 0;
  for (const json& golden : golden_cases()) {
    SCOPED_TRACE(golden.at("params").dump());
    const FlatParamLayout layout = layout_of(golden);
    EXPECT_EQ(layout.numels_with_padding(), golden.at("numels_with_padding").get<Numbers>());
    EXPECT_EQ(layout.is_padding(), golden.at("is_padding").get<std::vector<bool>>());
    EXPECT_EQ(layout.unpadded_unsharded_numel(), golden.at("unpadded"));
    EXPECT_EQ(layout.sharded_numel(), golden.at("sharded"));
    std::vector<std::string> fqns;
    Numbers identities;
    for (const ParamInfo& param : layout.params()) {
      fqns.push_back(param.fqn);
      for (const json& one : golden.at("params")) {
        if (one[0] == param.fqn) identities.push_back(one[3]);
      }
    }
    EXPECT_EQ(json(fqns), golden.at("fqns"));
    json shared = json::array();
    for (const SharedParamInfo& one : layout.shared_params()) {
      shared.push_back({one.fqn, layout.params()[one.primary].fqn});
    }
    EXPECT_EQ(shared, golden.at("shared"));
    for (std::int64_t rank = 0; rank < layout.world_size(); ++rank) {
      SCOPED_TRACE(rank);
      ++shards;
      const json& expected = golden.at("ranks").at(static_cast<std::size_t>(rank));
      EXPECT_EQ(layout.shard_numel_padded(rank), expected.at("padded"));
      json infos = json::array();
      for (std::size_t i = 0; i < layout.params().size(); ++i) {
        const auto info = layout.shard_param_info(rank, i);
        infos.push_back(info ? json{info->offset_in_shard, info->numel_in_shard, info->intra_param_start_idx,
                                    info->intra_param_end_idx}
                             : json());
      }
      EXPECT_EQ(infos, expected.at("infos"));
      const FlatParamShardMetadata metadata = layout.shard_metadata(rank);
      EXPECT_EQ((json{metadata.param_names, metadata.param_shapes, metadata.param_strides, metadata.param_contiguities,
                      metadata.param_numels, metadata.param_offsets}),
                expected.at("metadata"));
      Numbers shard = expected.at("shard");
      std::replace_if(
          shard.begin(), shard.end(), [](std::int64_t e) { return e < 100; }, -1);
      EXPECT_EQ(elements_of_shard(layout, rank, identities), shard);
    }
  }
  EXPECT_GT(shards, 100u);
}

RC_GTEST_PROP(FlatParamLayoutTest, RanksPartitionEveryParameter, ()) {
  const auto count = *rc::gen::inRange<std::size_t>(1, 6);
  std::vector<FlatParamInput> params;
  for (std::size_t i = 0; i < count; ++i) {
    params.push_back(
        {std::to_string(i), *rc::gen::container<Numbers>(3, rc::gen::inRange<std::int64_t>(0, 6)), {}, {}});
  }
  const FlatParamLayout layout(params, {*rc::gen::inRange<std::int64_t>(1, 10), *rc::gen::element(0, 1, 2, 4, 8)});
  RC_ASSERT(std::accumulate(layout.numels_with_padding().begin(), layout.numels_with_padding().end(),
                            std::int64_t{0}) == layout.unpadded_unsharded_numel());
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<int> seen(static_cast<std::size_t>(layout.params()[i].numel), 0);
    for (std::int64_t rank = 0; rank < layout.world_size(); ++rank) {
      for (const FlatParamPiece& piece : layout.pieces(rank, i)) {
        for (const auto& element : testing::elements(piece.box)) {
          ++seen[static_cast<std::size_t>(testing::flat_index(element, Box::full(layout.params()[i].shape)))];
        }
      }
    }
    RC_ASSERT(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
  }
}

TEST(FlatParamLayoutTest, MoreRanksThanElements) {
  const FlatParamLayout layout({{"a", {2}, {}, {}}}, {5, 0});
  EXPECT_EQ(layout.sharded_numel(), 1);
  EXPECT_EQ(layout.padded_unsharded_numel(), 5);
  EXPECT_EQ(layout.shard_numel_padded(1), 0);
  EXPECT_EQ(layout.shard_numel_padded(4), 1);
  EXPECT_EQ(layout.shard_param_info(4, 0), std::nullopt);
  EXPECT_EQ(layout.pieces(1, 0).at(0).box, Box({1}, {1}));
}

TEST(FlatParamLayoutTest, AScalarIsOneElement) {
  const FlatParamLayout layout({{"a", {}, {}, {}}, {"b", {3}, {}, {}}}, {2, 0});
  EXPECT_EQ(layout.pieces(0, 0).at(0).box, Box());
  EXPECT_THAT(layout.numels_with_padding(), ElementsAre(1, 3));
}

TEST(FlatParamLayoutTest, Refusals) {
  const auto make = [](std::vector<FlatParamInput> params, FlatParamLayout::Options options = {}) {
    return FlatParamLayout(std::move(params), options);
  };
  EXPECT_ERROR(make({}), ErrorCode::invalid_argument, "flat parameter: no parameters");
  EXPECT_ERROR(make({{"a", {2}, {}, {}}}, {0, 0}), ErrorCode::invalid_argument, "0 ranks, expected at least 1");
  EXPECT_ERROR(make({{"a", {2}, {}, {}}}, {1, -1}), ErrorCode::invalid_argument, "alignment of -1 elements");
  EXPECT_ERROR(make({{"a", {2}, {}, {}}, {"a", {2}, {}, {}}}), ErrorCode::invalid_argument,
               "duplicate name 'a', expected different names");
  EXPECT_ERROR(make({{"a", {2, 3}, {6, 1}, {}}}), ErrorCode::invalid_argument,
               "'a' of shape [2, 3] has strides [6, 1]");
  EXPECT_ERROR(make({{"a", {2, 3}, {0, 1}, {}}}), ErrorCode::invalid_argument, "strides [0, 1]");
  EXPECT_ERROR(make({{"a", {2, 3}, {1}, {}}}), ErrorCode::invalid_argument, "strides [1]");
  EXPECT_ERROR(make({{"a", {2}, {}, 1}, {"b", {3}, {}, 1}}), ErrorCode::invalid_argument,
               "'a' and 'b' are one parameter, but have shapes [2] and [3]");
  EXPECT_ERROR(make({{"a", {-1}, {}, {}}}), ErrorCode::corrupt, "a");
  EXPECT_ERROR(make({{"a", {INT64_MAX}, {}, {}}, {"b", {2}, {}, {}}}), ErrorCode::corrupt, "overflows");
  EXPECT_ERROR(make({{"a", {2}, {}, {}}}).shard_param_info(1, 0), ErrorCode::invalid_argument,
               "rank 1, expected 0 to 0");
}

}  // namespace
}  // namespace tessera

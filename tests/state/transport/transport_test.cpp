// A state dict that is sent from rank to rank.

#include "tessera/state/transport.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/error_matchers.h"
#include "support/one_sided.h"
#include "support/rank_processes.h"
#include "tensor/sharding_support.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/gather_state_dict.h"
#include "tessera/state/stateful.h"
#include "tessera/tensor/dtensor.h"

namespace tessera {
namespace {

using testing::expect_error_soon;
using ::testing::HasSubstr;
using testing::quick;
using testing::run_processes;

// Each rank sends to the next one and receives from the one before.
StateDict around(const ProcessGroup& group, const StateDict& state) {
  const int ranks = group.size(), next = (group.rank() + 1) % ranks, before = (group.rank() + ranks - 1) % ranks;
  if (group.rank() == 0) send_state_dict(state, {next}, group);
  StateDict received = receive_state_dict(before, group);
  if (group.rank() != 0) send_state_dict(state, {next}, group);
  return received;
}

// Sends the state of rank 0 to all others and returns it there.
StateDict sent(const ProcessGroup& group, const StateDict& state) {
  std::vector<int> others;
  for (int r = 1; r < group.size(); ++r) others.push_back(r);
  if (group.rank() != 0) return receive_state_dict(0, group);
  send_state_dict(state, others, group);
  return state;
}

StateDict model_of(int rank) {
  const at::Tensor base = at::arange(60, at::kFloat).add(rank).view({3, 4, 5});
  return {{"net1.weight", at::full({10, 10}, rank, at::kDouble)},
          {"net1.bias", at::full({10}, rank, at::kBFloat16)},
          {"transposed", base.permute({2, 0, 1})},
          {"rows", base.slice(0, 1)},
          {"column", base.select(2, 3)},
          {"complex", at::complex(at::ones({3}), at::full({3}, rank, at::kFloat)).conj()},
          {"empty", at::empty({0, 3}, at::kInt)},
          {"scalar", at::scalar_tensor(rank)},
          {"flags", at::arange(5).remainder(2).to(at::kBool)},
          {"non-tensor", "some string"},
          {"bytes", Bytes{0, 1, 255}},
          {"nothing", nullptr},
          {"nested", Dict{{"tensor", at::ones({1, 2})}, {"value", 42}, {"none", nullptr}, {"empty", Dict()}}},
          {"list", List{1, 2.5, List{at::full({2}, rank), true}, Tuple{at::ones({1}), "x"}, List()}},
          {"state", Dict{{0, Dict{{"step", rank}}}, {"0", -1}}}};
}

class TransportTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, TransportTest, ::testing::Values(2, 3, 8));

// PyTorch: test_pg_transport, test_pg_transport_with_mixed_content.
TEST_P(TransportTest, ValuesArriveAsTheyWereAroundARing) {
  run_local(GetParam(), [](const ProcessGroup& group) {
    const int before = (group.rank() + group.size() - 1) % group.size();
    const StateDict received = around(group, model_of(group.rank()));
    EXPECT_EQ(received, model_of(before));
    EXPECT_EQ(around(group, {}), StateDict());
    EXPECT_EQ(around(group, {{"lr", 0.01}}), (StateDict{{"lr", 0.01}}));
  });
}

TEST(StateTransportTest, OneRankSendsToSeveral) {
  run_local(4, [](const ProcessGroup& group) { EXPECT_EQ(sent(group, model_of(0)), model_of(0)); });
}

TEST(StateTransportTest, StridesAreKeptAndStoragesStayShared) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor base = at::arange(100, at::kFloat).view({10, 10});
    const StateDict received =
        sent(group, {{"base", base}, {"t", base.t()}, {"slice", base.slice(1, 0, 5)}, {"far", base.select(1, 3)}});
    const auto tensor = [&](const char* name) { return received.at(name).get<at::Tensor>(); };
    EXPECT_EQ(tensor("t").strides(), base.t().strides());
    EXPECT_EQ(tensor("slice").strides(), base.slice(1, 0, 5).strides());
    for (const char* name : {"t", "slice", "far"}) {
      EXPECT_EQ(tensor(name).storage().data_ptr(), tensor("base").storage().data_ptr()) << name;
    }
    EXPECT_EQ(tensor("base").storage().nbytes(), 400u);
  });
}

// --- tensors that several ranks hold

const at::Tensor& matrix() {
  static const at::Tensor full = at::arange(64, at::kDouble).view({8, 8});
  return full;
}

StateDict shared_tensors(const ProcessGroup& group, double plus) {
  const DeviceMesh mesh(group, {group.size()});
  const at::Tensor full = matrix() + plus;
  return {
      {"sharded", testing::shard(full, testing::chunk_spec(0, {0, 1}), group)},
      {"dtensor", distribute_tensor(full, mesh, {Placement::shard(1)}, std::nullopt)},
      {"replicated", distribute_tensor(full, mesh, {Placement::replicate()}, std::nullopt)},
      {"wrapped", DTensor::from_local(LocalShardsWrapper({full.slice(0, 4 * group.rank(), 4 * group.rank() + 1),
                                                          full.slice(0, 4 * group.rank() + 1, 4 * group.rank() + 4)},
                                                         {{4 * group.rank(), 0}, {4 * group.rank() + 1, 0}}),
                                      mesh, {Placement::shard(0)}, {8, 8})},
      {"rank", at::scalar_tensor(group.rank())},
      {"step", static_cast<int>(plus)}};
}

std::shared_ptr<Checkpointable> boxes_in(const StateDict& state, const char* name) {
  return state.at(name).get<std::shared_ptr<Checkpointable>>();
}

// Checkpointables are equal only if they are the same object.
void expect_same_parts(const StateDict& found, const StateDict& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, value] : expected) {
    const auto* part = value.get_if<std::shared_ptr<Checkpointable>>();
    if (part == nullptr) {
      EXPECT_EQ(found.at(name), value);
      continue;
    }
    const auto& other = found.at(name).get<std::shared_ptr<Checkpointable>>();
    ASSERT_EQ(other->local_chunks(), (*part)->local_chunks()) << to_string(name);
    for (std::size_t i = 0; i < other->local_chunks().size(); ++i) {
      EXPECT_TRUE(at::equal(other->local_tensor(i), (*part)->local_tensor(i))) << to_string(name);
    }
  }
}

// PyTorch: test_pg_transport_with_sharded_tensor.
TEST(StateTransportTest, WhatARankHasOfATensorArrivesAsItsBoxes) {
  run_local(2, [](const ProcessGroup& group) {
    const StateDict received = around(group, shared_tensors(group, 0));
    const int before = 1 - group.rank();
    const std::map<std::string, std::vector<Box>> expected = {
        {"sharded", {{{4 * before, 0}, {4, 8}}}},
        {"dtensor", {{{0, 4 * before}, {8, 4}}}},
        {"replicated", {{{0, 0}, {8, 8}}}},
        {"wrapped", {{{4 * before, 0}, {1, 8}}, {{4 * before + 1, 0}, {3, 8}}}}};
    for (const auto& [name, boxes] : expected) {
      const std::shared_ptr<Checkpointable> part = boxes_in(received, name.c_str());
      EXPECT_EQ(part->size(), (std::vector<std::int64_t>{8, 8})) << name;
      EXPECT_EQ(part->properties()->dtype, DType::float64) << name;
      ASSERT_EQ(part->local_chunks(), boxes) << name;
      for (std::size_t i = 0; i < boxes.size(); ++i) {
        const Box& box = boxes[i];
        const at::Tensor of_full = matrix()
                                       .slice(0, box.offsets[0], box.offsets[0] + box.sizes[0])
                                       .slice(1, box.offsets[1], box.offsets[1] + box.sizes[1]);
        EXPECT_TRUE(at::equal(part->local_tensor(i), of_full)) << name;
      }
    }
    EXPECT_EQ(received.at("rank").get<at::Tensor>().item<int>(), before);
    for (const auto& [name, value] : gather_state_dict(received, group)) {
      if (name == Key("rank") || name == Key("step")) continue;
      EXPECT_TRUE(at::equal(value.get<at::Tensor>(), matrix())) << to_string(name);
    }
  });
}

// --- into tensors that exist

TEST(TransportIntoTest, ElementsGoToTheMemoryOfTheTensors) {
  run_local(2, [](const ProcessGroup& group) {
    if (group.rank() == 0) return send_state_dict(model_of(0), {1}, group);
    StateDict state = model_of(5);
    const at::Tensor weight = state.at("net1.weight").get<at::Tensor>(), rows = state.at("rows").get<at::Tensor>(),
                     inner = state.at("list").get<List>()[2].get<List>()[0].get<at::Tensor>();
    state["step"] = 7;  // not sent
    receive_state_dict_into(state, 0, group);
    EXPECT_EQ(state, model_of(0));
    EXPECT_TRUE(state.at("net1.weight").get<at::Tensor>().is_same(weight));
    EXPECT_TRUE(at::equal(weight, at::zeros({10, 10}, at::kDouble)));
    EXPECT_TRUE(same_bits(rows, model_of(0).at("rows").get<at::Tensor>()));
    EXPECT_TRUE(at::equal(inner, at::full({2}, 0)));
  });
}

TEST(TransportIntoTest, AnyStridesAndTiedTensors) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor full = at::arange(12, at::kFloat).view({3, 4});
    if (group.rank() == 0)
      return send_state_dict({{"a", full}, {"b", full.t()}, {"c", full.slice(1, 0, 2)}}, {1}, group);
    const at::Tensor tied = at::zeros({4, 3});
    StateDict state{{"a", tied.t()}, {"b", tied}, {"c", at::zeros({3, 4}).slice(1, 1, 3)}};
    receive_state_dict_into(state, 0, group);
    EXPECT_TRUE(at::equal(tied, full.t()));
    EXPECT_TRUE(at::equal(state.at("c").get<at::Tensor>(), full.slice(1, 0, 2)));
  });
}

// A rank's part comes back from the rank that it was sent to.
TEST(TransportIntoTest, BoxesBecomeTheTensorsThatTheyWere) {
  run_local(2, [](const ProcessGroup& group) {
    const StateDict kept = around(group, shared_tensors(group, 3));
    StateDict state = shared_tensors(group, 0);
    const StateDict before = state;
    if (group.rank() == 0) send_state_dict(kept, {1}, group);
    receive_state_dict_into(state, 1 - group.rank(), group);
    if (group.rank() == 1) send_state_dict(kept, {0}, group);
    expect_same_parts(state, shared_tensors(group, 3));
    EXPECT_TRUE(state.at("sharded").get<ShardedTensor>().is_same(before.at("sharded").get<ShardedTensor>()));
    EXPECT_EQ(boxes_in(state, "dtensor"), boxes_in(before, "dtensor"));
    const DTensor dtensor = *DTensor::from_checkpointable(boxes_in(state, "dtensor"));
    EXPECT_EQ(dtensor.placements(), Placements{Placement::shard(1)});
    EXPECT_TRUE(at::equal(dtensor.full_tensor(), matrix() + 3));
  });
}

TEST(TransportIntoTest, AStatefulIsSentAsItsStateAndLoadsIt) {
  run_local(2, [](const ProcessGroup& group) {
    const at::Tensor weight = at::full({3}, group.rank());
    int loaded = 0;
    StateDict state{{"model", Dict{{"inner", stateful(
                                                 [&] {
                                                   return StateDict{{"w", weight}, {"count", group.rank() + 10}};
                                                 },
                                                 [&](const StateDict& values) {
                                                   loaded = static_cast<int>(values.at("count").get<std::int64_t>());
                                                 })}}}};
    if (group.rank() == 0) return send_state_dict(state, {1}, group);
    receive_state_dict_into(state, 0, group);
    EXPECT_EQ(loaded, 10);
    EXPECT_TRUE(at::equal(weight, at::zeros({3})));
    EXPECT_TRUE(state.at("model").get<Dict>().at("inner").is<std::shared_ptr<Stateful>>());
  });
}

// --- errors

TEST(TransportErrorTest, WhatTheSenderCannotSendIsAnErrorOnAllReceivers) {
  run_local(3, [](const ProcessGroup& group) {
    const std::map<std::string, Value> bad = {{"sparse", at::ones({2}).to_sparse()},
                                              {"meta", at::ones({2}, at::kMeta)},
                                              {"nested", NestedShardedTensor()},
                                              {"text", std::string("\xff")}};
    for (const auto& one : bad) {
      SCOPED_TRACE(one.first);
      expect_error_soon(
          [&] {
            sent(group, {{"a", 1}, {"bad", one.second}});
          },
          {"send a state dict", "1 of 2 ranks failed; rank 0"});
      EXPECT_EQ(sent(group, {{"a", 1}}), (StateDict{{"a", 1}}));
    }
  });
}

TEST(TransportErrorTest, AStateThatDiffersIsAnErrorOnBothAndDoesNotChange) {
  run_local(2, [](const ProcessGroup& group) {
    const StateDict good{{"a", Dict{{"w", at::ones({2, 3})}}}, {"step", 4}};
    const std::map<std::string, StateDict> wrong = {
        {"'a.w': a tensor is sent", {{"a", Dict()}}},
        {"'more': no tensor is sent", {{"a", Dict{{"w", at::ones({2, 3})}}}, {"more", at::ones({1})}}},
        {"'a.w': found boxes [[0, 3)x[0, 2)] of shape [3, 2]", {{"a", Dict{{"w", at::ones({3, 2})}}}}},
        {"'a.w': found dtype float64, expected float32", {{"a", Dict{{"w", at::ones({2, 3}, at::kDouble)}}}}},
        {"'a.w': found a tensor on meta", {{"a", Dict{{"w", at::ones({2, 3}, at::kMeta)}}}}},
        {"overlaps itself", {{"a", Dict{{"w", at::ones({1}).expand({2, 3})}}}}}};
    for (const auto& [reason, state] : wrong) {
      SCOPED_TRACE(reason);
      StateDict into = state;
      const auto call = [&] {
        group.rank() == 0 ? send_state_dict(good, {1}, group) : receive_state_dict_into(into, 0, group);
      };
      EXPECT_ERROR(call(), ErrorCode::invalid_argument, "receive a state dict: 1 of 2 ranks failed; rank 1: ", reason);
      EXPECT_EQ(into.size(), state.size());
    }
    StateDict into{{"a", Dict{{"w", at::zeros({2, 3})}}}};
    if (group.rank() == 0) return send_state_dict(good, {1}, group);
    receive_state_dict_into(into, 0, group);
    EXPECT_EQ(into, good);
  });
}

TEST(TransportErrorTest, TheOtherReceiversGetWhatOneRefuses) {
  run_local(3, [](const ProcessGroup& group) {
    const StateDict state{{"w", at::ones({2})}};
    StateDict into{{"w", at::zeros({group.rank() == 1 ? 3 : 2})}};
    if (group.rank() == 0) {
      EXPECT_ERROR(send_state_dict(state, {1, 2}, group), ErrorCode::invalid_argument, "rank 1: 'w'");
    } else if (group.rank() == 1) {
      EXPECT_ERROR(receive_state_dict_into(into, 0, group), ErrorCode::invalid_argument, "rank 1: 'w'");
    } else {
      receive_state_dict_into(into, 0, group);
      EXPECT_EQ(into, state);
    }
  });
}

TEST(TransportErrorTest, ASenderThatDiesIsNamed) {
  const auto outcomes = run_processes(2, quick(), [](const ProcessGroup& group) {
    group.barrier();
    if (group.rank() == 0) ::kill(::getpid(), SIGKILL);
    receive_state_dict(0, group);
    return std::string("nothing happened");
  });
  EXPECT_THAT(outcomes[1].report, HasSubstr("rank_failure: "));
  EXPECT_THAT(outcomes[1].report, HasSubstr("rank 0, which keeps the store, is gone"));
}

}  // namespace
}  // namespace tessera

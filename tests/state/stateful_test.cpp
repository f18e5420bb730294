#include "tessera/state/stateful.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "state/parallel_mlp.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/async_save.h"
#include "tessera/state/checkpoint_manager.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/state/state_dict.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using testing::parallel_mlp;
using testing::ParallelMlp;
using testing::TemporaryDirectory;

// Notes its calls, under its name, in a common list.
class Recorder final : public Stateful {
 public:
  Recorder(std::string name, std::vector<std::string>& calls, std::int64_t count_in = 0)
      : count(count_in), name_(std::move(name)), calls_(calls) {}
  StateDict state_dict() override {
    calls_.push_back(name_ + ".state_dict");
    return {{"count", count}, {"sum", sum}};
  }
  void load_state_dict(const StateDict& state_dict) override {
    calls_.push_back(name_ + ".load_state_dict");
    count = state_dict.at("count").get<std::int64_t>();
  }

  std::int64_t count;
  at::Tensor sum = at::full({2}, static_cast<double>(count));

 private:
  std::string name_;
  std::vector<std::string>& calls_;
};

TEST(StatefulTest, ItsStateIsSavedInItsPlace) {
  const TemporaryDirectory directory;
  std::vector<std::string> calls;
  const StateDict state{{"a", std::make_shared<Recorder>("a", calls, 3)},
                        {"in", Dict{{"b", std::make_shared<Recorder>("b", calls, 4)}}}};
  save(state, directory.path() / "1");
  EXPECT_THAT(calls, ElementsAre("a.state_dict", "b.state_dict"));
  const auto state_of = [](std::int64_t count) {
    return Dict{{"count", count}, {"sum", at::full({2}, static_cast<double>(count))}};
  };
  EXPECT_EQ(Value(load_full(directory.path() / "1")),
            Value(Dict{{"a", state_of(3)}, {"in", Dict{{"b", state_of(4)}}}}));
}

TEST(StatefulTest, LoadingSetsItAndItStays) {
  const TemporaryDirectory directory;
  std::vector<std::string> calls;
  save({{"a", Dict{{"count", 3}, {"sum", at::full({2}, 3.0)}}},
        {"in", Dict{{"b", Dict{{"count", 4}, {"sum", at::full({2}, 4.0)}}}, {"step", 7}}}},
       directory.path() / "1");
  const auto a = std::make_shared<Recorder>("a", calls), b = std::make_shared<Recorder>("b", calls);
  StateDict state{{"a", a}, {"in", Dict{{"b", b}, {"step", 0}}}};
  load(state, directory.path() / "1");
  EXPECT_THAT(calls, ElementsAre("a.state_dict", "b.state_dict", "a.load_state_dict", "b.load_state_dict"));
  EXPECT_EQ(a->count, 3);
  EXPECT_EQ(b->count, 4);
  EXPECT_EQ(Value(b->sum), Value(at::full({2}, 4.0)));  // in place
  EXPECT_EQ(Value(state), Value(Dict{{"a", a}, {"in", Dict{{"b", b}, {"step", 7}}}}));
}

TEST(StatefulTest, UnderIntKeysItIsSetToo) {
  const TemporaryDirectory directory;
  std::vector<std::string> calls;
  save({{"optims", Dict{{0, Dict{{"count", 3}, {"sum", at::full({2}, 3.0)}}},
                        {1, Dict{{"count", 4}, {"sum", at::full({2}, 4.0)}}}}}},
       directory.path() / "1");
  const auto a = std::make_shared<Recorder>("a", calls), b = std::make_shared<Recorder>("b", calls);
  StateDict state{{"optims", Dict{{0, a}, {1, b}}}};
  load(state, directory.path() / "1");
  EXPECT_EQ(a->count, 3);
  EXPECT_EQ(b->count, 4);
  EXPECT_EQ(Value(state), Value(Dict{{"optims", Dict{{0, a}, {1, b}}}}));
}

TEST(StatefulTest, ModelsAndOptimizersAreTrainedOn) {
  const TemporaryDirectory directory;
  const auto train = [](ParallelMlp& model, torch::optim::Adam& optimizer) {
    testing::step(optimizer);
    return get_state_dict(*model, {&optimizer});
  };
  ParallelMlp expected;
  torch::optim::Adam adam(expected->parameters());
  train(expected, adam);
  for (const bool is_full : {false, true}) {
    run_local(2, [&](const ProcessGroup& group) {
      StateDictOptions options;
      options.group = group;
      options.full_state_dict = is_full;  // state_dict is a collective then
      const DeviceMesh mesh(group, {2});
      const auto state_of = [&](ParallelMlp& model, torch::optim::Adam& optimizer) {
        return StateDict{{"model", stateful_model(model.ptr(), options)},
                         {"optim", stateful_optimizer(model.ptr(), {&optimizer}, options)},
                         {"step", 1}};
      };
      ParallelMlp model = parallel_mlp(mesh), other = parallel_mlp(mesh);
      torch::optim::Adam optimizer(model->parameters()), other_optimizer(other->parameters());
      train(model, optimizer);
      save(state_of(model, optimizer), directory.path() / "1", group);
      StateDict loaded = state_of(other, other_optimizer);
      load(loaded, directory.path() / "1", group);
      options.full_state_dict = true;
      const StateDicts states = get_state_dict(*other, {&other_optimizer}, options);
      EXPECT_EQ(Value(states.model), Value(get_model_state_dict(*expected)));
      EXPECT_EQ(Value(states.optimizer), Value(get_optimizer_state_dict(*expected, adam)));
    });
  }
}

TEST(StatefulTest, SaversInTheBackgroundAndManagersTakeIt) {
  const TemporaryDirectory directory;
  std::vector<std::string> calls;
  run_local(1, [&](const ProcessGroup& group) {
    const auto object = std::make_shared<Recorder>("a", calls, 3);
    StateDict state{{"a", object}};
    AsyncSaver saver(group);
    saver.save(state, directory.path() / "1");
    object->count = 4;
    object->sum.fill_(4);
    saver.wait();
    EXPECT_EQ(load_full(directory.path() / "1").at("a"), Value(Dict{{"count", 3}, {"sum", at::full({2}, 3.0)}}));
    CheckpointManager manager(directory.path() / "managed", group);
    manager.save(5, state);
    manager.wait();
    object->count = 0;
    EXPECT_EQ(manager.restore_latest(state), 5);
    EXPECT_EQ(object->count, 4);
  });
}

TEST(StatefulTest, InAListOrATupleItIsAnError) {
  const TemporaryDirectory directory;
  std::vector<std::string> calls;
  const auto object = std::make_shared<Recorder>("a", calls);
  StateDict list{{"x", List{1, object}}}, tuple{{"x", Dict{{"y", Tuple{Dict{{"z", object}}}}}}};
  EXPECT_ERROR(save(list, directory.path() / "1"), ErrorCode::invalid_argument, "'x.1' is a stateful in a list");
  EXPECT_ERROR(load(tuple, directory.path() / "1"), ErrorCode::invalid_argument, "'x.y.0.z' is a stateful in a list");
  EXPECT_TRUE(calls.empty());
}

TEST(StatefulTest, IsAValueOfAKindOfItsOwn) {
  std::vector<std::string> calls;
  const auto object = std::make_shared<Recorder>("a", calls);
  const Value value(object), copy = value;
  EXPECT_EQ(value.kind(), ValueKind::stateful);
  EXPECT_EQ(value.get<std::shared_ptr<Stateful>>(), object);
  EXPECT_EQ(value, copy);
  EXPECT_NE(value, Value(std::make_shared<Recorder>("a", calls)));
  EXPECT_EQ(to_string(value), "<stateful>");
  EXPECT_ERROR(value.get<double>(), ErrorCode::invalid_argument, "found stateful (<stateful>), expected float");
}

TEST(StatefulTest, NullIsAnError) {
  EXPECT_ERROR(Value(std::shared_ptr<Recorder>()), ErrorCode::invalid_argument, "null pointer, expected a stateful");
  EXPECT_ERROR(stateful([] { return StateDict(); }, nullptr), ErrorCode::invalid_argument, "stateful: found a null");
}

}  // namespace
}  // namespace tessera

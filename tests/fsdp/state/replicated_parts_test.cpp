// A model of which only parts are sharded: others are replicated, and the program averages their gradients.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "fsdp/small_model.h"
#include "support/temporary_directory.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/state/load.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/state/save.h"
#include "tessera/state/state_dict.h"

namespace tessera::fsdp {
namespace {

using testing::TemporaryDirectory;

// "first" is replicated.
struct PartlyReplicated {
  PartlyReplicated(const ProcessGroup& group, ShardingStrategy strategy, const SmallModel& plain = make_model())
      : model(plain, group, options_for(plain, strategy)),
        optimizer(model.parameters(), torch::optim::AdamWOptions(0.02)) {}

  // Returns the loss over the batches of all ranks.
  double step(int step) {
    const double loss =
        backward_of_batches(model, kBatches, [&](int batch) { return loss_of(model(batch_of(step, batch))); });
    for (const at::Tensor& param : model->first->parameters()) {
      const at::Tensor gradient = param.grad();
      model.group().all_reduce(gradient);
      gradient.div_(model.group().size());
    }
    optimizer.step();
    return loss;
  }
  StateDict state() { return {{"model", model.state_dict()}, {"optim", model.optim_state_dict(optimizer)}}; }

  FullyShardedDataParallel<SmallModel> model;
  torch::optim::AdamW optimizer;

 private:
  static Options options_for(const SmallModel& plain, ShardingStrategy strategy) {
    Options options = options_of(strategy, true);
    options.ignored_modules = {plain->first.ptr()};
    return options;
  }
};

TEST(ReplicatedPartsTest, TheyAreSavedAsTheyAreAndTrainingContinuesOnOtherRanks) {
  std::vector<double> losses;
  Dict full;
  run_local(1, [&](const ProcessGroup& group) {
    FullyShardedDataParallel<SmallModel> model(make_model(), group);
    torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.02));
    for (int step = 0; step < 6; ++step) {
      losses.push_back(
          backward_of_batches(model, kBatches, [&](int batch) { return loss_of(model(batch_of(step, batch))); }));
      optimizer.step();
      if (step == 2) full = model.state_dict(StateDictType::full);
    }
  });
  for (const int savers : {1, 2, 4}) {
    const TemporaryDirectory directory;
    run_local(savers, [&](const ProcessGroup& group) {
      PartlyReplicated one(group, ShardingStrategy::full_shard);
      for (int step = 0; step < 3; ++step) {
        EXPECT_NEAR(one.step(step), losses[static_cast<std::size_t>(step)], 1e-10);
      }
      const StateDict sharded = one.model.state_dict();
      EXPECT_TRUE(sharded.at("first.up.weight").is<at::Tensor>());
      EXPECT_EQ(sharded.at("twice.up.weight").is<std::shared_ptr<Checkpointable>>(), savers > 1);  // one shards nothing
      const StateDict gathered =
          one.model.state_dict(StateDictType::full, {.rank0_only = false, .offload_to_cpu = true});
      for (const auto& [name, value] : full) {
        EXPECT_TRUE(at::allclose(gathered.at(name).get<at::Tensor>(), value.get<at::Tensor>())) << to_string(name);
      }
      save(one.state(), directory.path(), group);
    });
    for (const int loaders : {1, 3}) {
      for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
        run_local(loaders, [&](const ProcessGroup& group) {
          PartlyReplicated one(group, strategy);
          StateDict state = one.state();
          load(state, directory.path(), group);
          one.model.load_state_dict(state.at("model").get<Dict>());
          one.model.load_optim_state_dict(one.optimizer, state.at("optim").get<Dict>());
          for (int step = 3; step < 6; ++step) {
            EXPECT_NEAR(one.step(step), losses[static_cast<std::size_t>(step)], 1e-10)
                << savers << " to " << loaders << " ranks";
          }
        });
      }
    }
    // A model that is not sharded at all.
    SmallModel plain = make_model();
    StateDict state{{"model", get_model_state_dict(*plain)}};
    load(state, directory.path());
    for (const auto& [name, value] : full) {
      EXPECT_TRUE(at::allclose(state.at("model").get<Dict>().at(name).get<at::Tensor>(), value.get<at::Tensor>()));
    }
  }
}

}  // namespace
}  // namespace tessera::fsdp

// Saves a sharded state and loads it with another sharding.
//
//   tessera run -n 4 -- build/bin/save_load checkpoint
//   tessera run -n 2 -- build/bin/save_load checkpoint      loads what the four saved

#include <ATen/ATen.h>

#include <filesystem>
#include <iostream>

#include "tessera/comm/init.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"

int main(int argc, char** argv) {
  using namespace tessera;
  const std::filesystem::path path = argc > 1 ? argv[1] : "checkpoint";
  const ProcessGroup group = init_process_group();
  std::vector<RemoteDevice> placements;
  for (int rank = 0; rank < group.size(); ++rank) placements.emplace_back(rank, Device{"cpu"});
  const auto by_rows = std::make_shared<ChunkShardingSpec>(0, placements);
  const auto by_columns = std::make_shared<ChunkShardingSpec>(1, placements);

  if (group.agree_on("look for the checkpoint", [&] { return !std::filesystem::exists(path / ".metadata"); })) {
    const ShardedTensor weight = ShardedTensor::full(by_rows, {8, 4}, 0.5, group);
    save({{"model", Dict{{"weight", weight}}}, {"step", 100}}, path, group);
    if (group.rank() == 0) std::cout << group.size() << " ranks saved\n";
  }

  StateDict state{{"model", Dict{{"weight", ShardedTensor::zeros(by_columns, {8, 4}, group)}}}, {"step", 0}};
  const LoadReport report = load(state, path, group);
  const at::Tensor& mine = state.at("model").get<Dict>().at("weight").get<ShardedTensor>().local_tensor();
  if (group.rank() == 0) {
    std::cout << group.size() << " ranks loaded step " << state.at("step") << ": rank 0 has " << mine.sizes() << " of "
              << mine.flatten()[0].item<float>() << ", " << report.read_bytes << " bytes read\n";
  }
}

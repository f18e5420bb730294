// Loads a checkpoint with ranks as threads, every tensor sharded in one dimension, and saves it again: through the
// library, as the command does.
//
//   resave SOURCE [DESTINATION RANKS DIM dcp|zstd|safetensors]...
//
// For each destination it prints a line of JSON: "why" it failed, or nothing. Exits with 3 if one did.

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/transform.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/format/dcp_metadata.h"
#include "tessera/layout/sharding_spec.h"
#include "tessera/state/load.h"
#include "tessera/state/save.h"
#include "tessera/state/traverse.h"
#include "tessera/tensor/torch_types.h"

namespace {

using namespace tessera;

Value empty_tensor(const checkpoint::TensorInfo& info, std::int64_t dim, const ProcessGroup& group) {
  const at::ScalarType dtype = to_scalar_type(info.dtype);
  if (info.shape.empty()) return at::zeros({}, at::TensorOptions().dtype(dtype));
  std::vector<RemoteDevice> placements;
  for (int rank = 0; rank < group.size(); ++rank) placements.emplace_back(rank, Device{});
  const auto last = static_cast<std::int64_t>(info.shape.size()) - 1;
  ShardedTensorOptions options;
  options.dtype = dtype;
  return ShardedTensor::empty(std::make_shared<ChunkShardingSpec>(std::min(dim, last), placements), info.shape, group,
                              options);
}

void resave(const std::filesystem::path& source, const std::filesystem::path& destination, std::int64_t dim,
            SaveOptions save_options, const ProcessGroup& group) {
  StateDict state;
  LoadOptions load_options;
  {
    const auto opened = checkpoint::Checkpoint::open(source);
    load_options.flatten_state_dict = save_options.flatten_state_dict = opened->dcp_metadata()->paths.has_value();
    struct Named {
      std::size_t position;
      Path path;
      Value value;
    };
    std::vector<Named> all;
    for (const checkpoint::TensorInfo& info : opened->tensors()) {
      all.push_back({info.position, info.path.empty() ? Path{info.name} : info.path, empty_tensor(info, dim, group)});
    }
    for (const checkpoint::ObjectInfo& info : opened->objects()) {
      all.push_back({info.position, info.path.empty() ? Path{info.name} : info.path, Value()});
    }
    std::sort(all.begin(), all.end(), [](const Named& a, const Named& b) { return a.position < b.position; });
    for (Named& one : all) set_element(state, one.path, std::move(one.value));
  }
  load(state, source, group, load_options);
  save(state, destination, group, save_options);
}

// Why it failed, or nothing.
std::string attempt(const char* source, char** words) {
  const std::string format = words[3];
  SaveOptions options;
  if (format == "safetensors") options.format = checkpoint::SaveFormat::safetensors_shards;
  if (format == "zstd") options.transforms = {checkpoint::zstd_transform()};
  try {
    run_local(std::atoi(words[1]),
              [&](const ProcessGroup& group) { resave(source, words[0], std::atoll(words[2]), options, group); });
  } catch (const Error& error) {
    return fmt::format("{}: {}", error_code_name(error.code()), error.what());
  }
  return "";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6 || argc % 4 != 2) {
    fmt::print(stderr, "usage: resave SOURCE [DESTINATION RANKS DIM dcp|zstd|safetensors]...\n");
    return 2;
  }
  int status = 0;
  for (int i = 2; i < argc; i += 4) {
    const std::string why = attempt(argv[1], argv + i);
    if (!why.empty()) status = 3;
    fmt::print("{}\n", nlohmann::json{{"why", why}}.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  }
  return status;
}

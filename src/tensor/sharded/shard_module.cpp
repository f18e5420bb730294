#include "tessera/tensor/shard_module.h"

#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "tensor/dtensor/placement.h"
#include "tessera/base/error.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

// A module and its submodules, by name.
using Modules = std::vector<std::pair<std::string, torch::nn::Module*>>;

void collect(torch::nn::Module& module, const std::string& name, Modules& modules) {
  modules.emplace_back(name, &module);
  for (const auto& child : module.named_children()) {
    collect(*child.value(), name.empty() ? child.key() : name + "." + child.key(), modules);
  }
}

std::string quoted(const std::string& name) { return fmt::format("'{}'", printable(name)); }

}  // namespace

// The planned changes to a module, complete before anything changes.
class ModuleSharder {
 public:
  // Throws as shard_module.
  ModuleSharder(torch::nn::Module& module, const ShardingPlan& plan, const ProcessGroup& group, int src)
      : group_(group), src_(src) {
    if (src < 0 || src >= group.size())
      fail(ErrorCode::invalid_argument, "src is {}, expected 0 to {}", src, group.size() - 1);
    Modules modules;
    collect(module, "", modules);
    for (const auto& [name, spec] : plan) {
      const auto [of_module, parameter] = split(name);
      const auto found = std::find_if(modules.begin(), modules.end(),
                                      [&, at = of_module](const auto& each) { return each.first == at; });
      if (found == modules.end()) {
        fail(ErrorCode::invalid_argument, "the plan names {}, expected a parameter of a submodule", quoted(name));
      }
      add(name, *found->second, parameter, spec);
    }
    check_shared_parameters(modules);
  }

  // Adds what must be equal on all ranks.
  void describe(CallArguments& arguments) const {
    arguments.add("src", src_);
    for (const Planned& each : planned_) {
      arguments.add("parameter",
                    fmt::format("{} {} {}{} sharded by {}", quoted(each.name), c10::toString(each.tensor.scalar_type()),
                                shape_to_string(each.tensor.sizes().vec()),
                                each.tensor.requires_grad() ? " that requires grad" : "", comparable_text(*each.spec)));
    }
  }

  // A collective.
  void apply() {
    std::map<const void*, at::Tensor> locals;
    for (Planned& each : planned_) {
      at::Tensor& local = locals[each.tensor.unsafeGetTensorImpl()];
      if (!local.defined()) {
        local = ShardedTensor::from_tensor(each.tensor, each.spec, group_, src_).local_tensor().detach();
      }
      each.sharded.emplace(ShardedParameters::Sharded{each.spec, group_, dtensor_spec(each)});
    }
    for (Planned& each : planned_) {
      each.tensor.mutable_grad().reset();
      each.tensor.set_data(locals.at(each.tensor.unsafeGetTensorImpl()));
      each.module->sharded_.emplace(each.parameter, *std::move(each.sharded));
    }
  }

 private:
  struct Planned {
    std::string name, parameter;  // in the root and in its module
    ShardedParameters* module;
    at::Tensor tensor;
    std::shared_ptr<const ChunkShardingSpec> spec;
    ShardedTensorMetadata metadata;
    std::optional<ShardedParameters::Sharded> sharded = std::nullopt;
  };

  // Returns the names of the module and of its parameter.
  static std::pair<std::string, std::string> split(const std::string& name) {
    const std::size_t dot = name.rfind('.');
    if (dot == std::string::npos) return {"", name};
    return {name.substr(0, dot), name.substr(dot + 1)};
  }

  void add(const std::string& name, torch::nn::Module& module, const std::string& parameter,
           const ShardedTensor::SpecPtr& spec) {
    const auto parameters = module.named_parameters(/*recurse=*/false);
    const at::Tensor* tensor = parameters.find(parameter);
    if (tensor == nullptr || !tensor->defined()) {
      fail(ErrorCode::invalid_argument,
           "the plan names {}, but {} has no parameter '{}', expected one of its parameters [{}]", quoted(name),
           module.name(), printable(parameter), printable(fmt::format("{}", fmt::join(parameters.keys(), ", "))));
    }
    auto* sharded = dynamic_cast<ShardedParameters*>(&module);
    if (sharded == nullptr) {
      fail(ErrorCode::invalid_argument,
           "{} belongs to {}, expected a ShardedLinear, ShardedEmbedding, ShardedEmbeddingBag or another module of "
           "ShardedParameters",
           quoted(name), module.name());
    }
    if (sharded->is_sharded(parameter))
      fail(ErrorCode::invalid_argument, "{} is already sharded, expected a full parameter", quoted(name));
    if (tensor->is_meta())
      fail(ErrorCode::invalid_argument, "{} is on meta, expected a parameter with elements", quoted(name));
    sharded->check_shardable(parameter);
    auto chunks = checked_spec(name, spec);
    ShardedTensorMetadata metadata = chunks->build_metadata(tensor->sizes().vec(), properties_of(*tensor));
    check_one_shard_each(name, *chunks, metadata);
    planned_.push_back({name, parameter, sharded, *tensor, std::move(chunks), std::move(metadata)});
  }

  static std::shared_ptr<const ChunkShardingSpec> checked_spec(const std::string& name,
                                                               const ShardedTensor::SpecPtr& spec) {
    if (spec == nullptr)
      fail(ErrorCode::invalid_argument, "the spec of {} is null, expected a sharding spec", quoted(name));
    auto chunks = std::dynamic_pointer_cast<const ChunkShardingSpec>(spec);
    if (chunks == nullptr) {
      fail(ErrorCode::unsupported, "the spec of {} is {}, expected ChunkShardingSpec", quoted(name), spec->kind());
    }
    return chunks;
  }

  void check_one_shard_each(const std::string& name, const ChunkShardingSpec& spec,
                            const ShardedTensorMetadata& metadata) const {
    const auto of_ranks = shards_by_rank(metadata.shards_metadata, group_);
    for (std::size_t r = 0; r < of_ranks.size(); ++r) {
      if (of_ranks[r].size() == 1) continue;
      fail(ErrorCode::unsupported, "{} by {}: rank {} gets {} shards, expected one on each rank", quoted(name),
           spec.to_string(), r, of_ranks[r].size());
    }
  }

  bool is_planned(const torch::nn::Module& module, const std::string& parameter) const {
    const auto* sharded = dynamic_cast<const ShardedParameters*>(&module);
    return std::any_of(planned_.begin(), planned_.end(),
                       [&](const Planned& each) { return each.module == sharded && each.parameter == parameter; });
  }

  // A parameter with several names must be sharded alike in all modules.
  void check_shared_parameters(const Modules& modules) const {
    std::map<const void*, const Planned*> first_uses;
    const auto refuse_unlike = [](const Planned& first, const std::string& name) {
      fail(ErrorCode::invalid_argument, "{} and {} are one parameter, expected a plan that shards it alike in both",
           quoted(first.name), quoted(name));
    };
    for (const Planned& each : planned_) {
      const Planned& first = *first_uses.emplace(each.tensor.unsafeGetTensorImpl(), &each).first->second;
      if (!(*each.spec == *first.spec)) refuse_unlike(first, each.name);
    }
    for (const auto& [name, module] : modules) {
      for (const auto& parameter : module->named_parameters(/*recurse=*/false)) {
        const auto first = first_uses.find(parameter.value().unsafeGetTensorImpl());
        if (first == first_uses.end() || is_planned(*module, parameter.key())) continue;
        refuse_unlike(*first->second, name.empty() ? parameter.key() : name + "." + parameter.key());
      }
    }
  }

  // A collective.
  DTensorSpec dtensor_spec(const Planned& planned) {
    std::vector<int> ranks;
    for (const ShardMetadata& shard : planned.metadata.shards_metadata) ranks.push_back(rank_of(shard, group_));
    const std::int64_t size = group_.size(), dims = planned.tensor.dim(), dim = planned.spec->dim();
    auto mesh = meshes_.find(ranks);
    if (mesh == meshes_.end()) {
      const at::Device device = staging_device(planned.metadata.shards_metadata);
      mesh = meshes_.emplace(ranks, DeviceMesh::of_ranks(group_, {size}, ranks, {}, device.type())).first;
    }
    const Placement placement = Placement::shard(dim < 0 ? dim + dims : dim);
    return {mesh->second, MeshLayout(planned.tensor.sizes().vec(), {size}, {placement})};
  }

  ProcessGroup group_;
  int src_;
  std::vector<Planned> planned_;                   // by name, the same on all ranks
  std::map<std::vector<int>, DeviceMesh> meshes_;  // by the ranks of the shards
};

void shard_parameter(torch::nn::Module& module, const std::string& name, ShardedTensor::SpecPtr spec,
                     const ProcessGroup& group, int src) {
  const c10::NoGradGuard no_grad;
  std::optional<ModuleSharder> sharder;
  group.check_call("shard a parameter", [&](CallArguments& arguments) {
    if (name.find('.') != std::string::npos) {
      fail(ErrorCode::invalid_argument, "{} has no parameter {}, expected one of the module itself", module.name(),
           quoted(name));
    }
    sharder.emplace(module, ShardingPlan{{name, std::move(spec)}}, group, src);
    sharder->describe(arguments);
  });
  sharder->apply();
}

void shard_module(torch::nn::Module& module, const ShardingPlan& plan, const ProcessGroup& group, int src) {
  const c10::NoGradGuard no_grad;
  std::optional<ModuleSharder> sharder;
  group.check_call("shard a module", [&](CallArguments& arguments) {
    sharder.emplace(module, plan, group, src);
    sharder->describe(arguments);
  });
  sharder->apply();
}

std::vector<std::pair<std::string, ShardedTensor>> named_sharded_parameters(torch::nn::Module& module) {
  Modules modules;
  collect(module, "", modules);
  std::vector<std::pair<std::string, ShardedTensor>> found;
  std::set<const void*> known;
  for (const auto& [name, each] : modules) {
    const auto* sharded = dynamic_cast<const ShardedParameters*>(each);
    if (sharded == nullptr) continue;
    for (const auto& parameter : each->named_parameters(/*recurse=*/false)) {
      if (!sharded->is_sharded(parameter.key())) continue;
      if (!known.insert(parameter.value().unsafeGetTensorImpl()).second) continue;
      found.emplace_back(name.empty() ? parameter.key() : name + "." + parameter.key(),
                         sharded->sharded_parameter(parameter.key(), parameter.value()));
    }
  }
  return found;
}

}  // namespace tessera

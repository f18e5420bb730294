/// \file
/// Does what make_sharded_values.py had PyTorch's ShardedTensor do: `sharded_values FILE...` reads its cases, runs each
/// on as many ranks as it had, and compares. Prints a line of JSON for each case: {"row", "what", "ok", "why"}.

#include <ATen/ATen.h>

#include <mutex>

#include "interop/programs/cases.h"
#include "tensor/sharding_support.h"
#include "tessera/tensor/internal/box_view.h"
#include "tessera/tensor/ops.h"

namespace tessera {
namespace {

using testing::full_of;
using testing::shard;
using testing::Sizes;
using testing::SpecPtr;

using interop::Case;
using interop::json;
using interop::require;
using interop::require_close;
using interop::require_equal;

std::vector<ShardMetadata> to_shards(const json& value) {
  std::vector<ShardMetadata> list;
  for (const json& row : value) {
    list.emplace_back(row[0].get<Sizes>(), row[1].get<Sizes>(), RemoteDevice(row[2].get<std::string>()));
  }
  return list;
}

std::vector<ShardMetadata> shards_of(const Case& test, const std::string& key) {
  return to_shards(test.content().at(key));
}

SpecPtr spec_of(const Case& test, const std::string& key) {
  const json& described = test.content().at(key);
  if (!described.contains("dim")) return std::make_shared<EnumerableShardingSpec>(to_shards(described.at("shards")));
  std::vector<RemoteDevice> placements;
  for (const json& placement : described.at("placements")) placements.emplace_back(placement.get<std::string>());
  return std::make_shared<ChunkShardingSpec>(described.at("dim").get<std::int64_t>(), placements);
}

std::string text_of(const std::vector<ShardMetadata>& shards) {
  std::string text;
  for (const ShardMetadata& one : shards) text += to_string(one) + "; ";
  return text;
}

using Check = std::function<void(const Case& test, const ProcessGroup& group)>;

SpecPtr chunks_in(std::int64_t dim, const ProcessGroup& group) {
  return testing::chunk_spec(dim, testing::permuted_ranks(group.size()));
}

void build(const Case& test, const ProcessGroup& /*group*/) {
  const ShardedTensorMetadata built = spec_of(test, "spec")->build_metadata(test.get<Sizes>("size"), {});
  require(built.shards_metadata == shards_of(test, "shards"), "shards {}", text_of(built.shards_metadata));
}

void infer(const Case& test, const ProcessGroup& /*group*/) {
  const SpecPtr inferred = infer_sharding_spec(shards_of(test, "shards"));
  require(*inferred == *spec_of(test, "spec"), "inferred {}, PyTorch infers {}", inferred->to_string(),
          spec_of(test, "spec")->to_string());
}

std::vector<Shard> local_shards_of(const at::Tensor& full, const std::vector<ShardMetadata>& shards, int rank) {
  std::vector<Shard> local;
  for (const ShardMetadata& one : shards) {
    if (one.placement->rank() == rank) local.push_back({box_view(full, one.box()).contiguous(), one});
  }
  return local;
}

void gather(const Case& test, const ProcessGroup& group) {
  const at::Tensor full = test.tensor("full"), expected = test.tensor("expected");
  const ShardedTensor tensor = ShardedTensor::from_local_shards(
      local_shards_of(full, shards_of(test, "shards"), group.rank()), full.sizes().vec(), group);
  require(tensor.sharding_spec() == *spec_of(test, "spec"), "spec {}", tensor.sharding_spec().to_string());
  const int dst = static_cast<int>(test.get<std::int64_t>("dst"));
  const at::Tensor out = group.rank() == dst ? at::zeros_like(full) : at::Tensor();
  tensor.gather(dst, out);
  if (out.defined()) require_equal(out, expected, "gathered");
}

// PyTorch lists shards by rank after it resharded, and by what they hold before.
std::vector<ShardMetadata> in_order(std::vector<ShardMetadata> shards) {
  std::sort(shards.begin(), shards.end(),
            [](const ShardMetadata& a, const ShardMetadata& b) { return a.shard_offsets < b.shard_offsets; });
  return shards;
}

void reshard(const Case& test, const ProcessGroup& group) {
  ShardedTensor tensor = shard(test.tensor("full"), spec_of(test, "before"), group);
  tensor.reshard(spec_of(test, "spec"));
  require(in_order(tensor.metadata().shards_metadata) == in_order(shards_of(test, "metadata")), "metadata {}",
          text_of(tensor.metadata().shards_metadata));
  require_equal(tensor.local_tensor(), test.tensors("expected")[static_cast<std::size_t>(group.rank())], "local shard");
}

void tensor_op(const Case& test, const ProcessGroup& group) {
  const ShardedTensor input = shard(test.tensor("full").set_requires_grad(true), spec_of(test, "spec"), group);
  const std::string name = test.get<std::string>("name");
  const ShardedTensor result = name == "clone"    ? ops::clone(input)
                               : name == "detach" ? ops::detach(input)
                                                  : ops::to(input, {.dtype = at::kFloat});
  require(result.requires_grad() == test.get<bool>("requires_grad"), "requires_grad {}", result.requires_grad());
  require_equal(result.local_tensor().detach(), test.tensors("expected")[static_cast<std::size_t>(group.rank())], name);
}

void require_layer(const Case& test, const ProcessGroup& group, const at::Tensor& result, const ShardedTensor& weight) {
  const auto rank = static_cast<std::size_t>(group.rank());
  require_close(result.detach(), test.tensors("expected")[rank], "result", 1e-6);
  (result * test.tensor("factors")[group.rank()]).sum().backward();
  if (!test.tensors("gradients").empty()) {
    require_close(weight.local_tensor().grad(), test.tensors("gradients")[rank], "gradient", 1e-6);
  }
}

ShardedTensor weight_of(const Case& test, const ProcessGroup& group) {
  return shard(test.tensor("weight").detach().clone().set_requires_grad(true), spec_of(test, "spec"), group);
}

void embedding(const Case& test, const ProcessGroup& group) {
  const ShardedTensor weight = weight_of(test, group);
  ops::EmbeddingOptions options;
  if (test.get<std::int64_t>("padding_idx") >= 0) options.padding_idx = test.get<std::int64_t>("padding_idx");
  if (test.get<double>("max_norm") > 0) options.max_norm = test.get<double>("max_norm");
  options.norm_type = test.get<double>("norm_type");
  require_layer(test, group, ops::embedding(test.tensor("inputs")[group.rank()], weight, options), weight);
}

void embedding_bag(const Case& test, const ProcessGroup& group) {
  const ShardedTensor weight = weight_of(test, group);
  ops::EmbeddingBagOptions options;
  if (test.get<std::int64_t>("padding_idx") >= 0) options.padding_idx = test.get<std::int64_t>("padding_idx");
  options.mode = test.get<std::string>("mode");
  if (test.tensor("offsets").numel() != 0) options.offsets = test.tensor("offsets");
  require_layer(test, group, ops::embedding_bag(test.tensor("inputs")[group.rank()], weight, options), weight);
}

void unary(const Case& test, const ProcessGroup& group) {
  using Function = ShardedTensor (*)(const ShardedTensor&);
  static const std::map<std::string, Function> known = [] {
    std::map<std::string, Function> by_name;
    for (const Function op :
         {ops::abs,  ops::ceil,     ops::cos,   ops::erf,    ops::exp,  ops::expm1,      ops::floor,
          ops::gelu, ops::isfinite, ops::isinf, ops::isnan,  ops::log,  ops::log1p,      ops::nan_to_num,
          ops::neg,  ops::relu,     ops::round, ops::rsqrt,  ops::sign, ops::reciprocal, ops::sigmoid,
          ops::silu, ops::sin,      ops::sqrt,  ops::square, ops::tanh}) {
      by_name[op_of(op).name()] = op;
    }
    return by_name;
  }();
  const ShardedTensor input = shard(test.tensor("input"), chunks_in(0, group), group);
  require_close(full_of(known.at(test.get<std::string>("name"))(input)), test.tensor("expected"),
                test.get<std::string>("name"));
}

void binary(const Case& test, const ProcessGroup& group) {
  const ShardedTensor a = shard(test.tensor("input"), chunks_in(1, group), group);
  const ShardedTensor b = shard(test.tensor("other"), chunks_in(1, group), group);
  const std::string name = test.get<std::string>("name");
  const auto op = name == "add" ? ops::add : name == "sub" ? ops::sub : name == "mul" ? ops::mul : ops::div;
  require_close(full_of(op(a, b)), test.tensor("expected"), name);
  require_close(full_of(op(a, at::Scalar(2.5))), test.tensor("with_number"), name);
}

void softmax(const Case& test, const ProcessGroup& group) {
  for (const std::int64_t dim : {0, 1, 2}) {
    const ShardedTensor input = shard(test.tensor("input"), chunks_in(dim, group), group);
    require_close(full_of(ops::softmax(input, test.get<std::int64_t>("dim"))), test.tensor("expected"), "softmax");
  }
}

void layer_norm(const Case& test, const ProcessGroup& group) {
  for (const std::int64_t dim : {0, 1, 2}) {
    const ShardedTensor input = shard(test.tensor("input"), chunks_in(dim, group), group);
    const ShardedTensor result =
        ops::layer_norm(input, test.get<Sizes>("shape"), {test.tensor("weight"), test.tensor("bias"), 1e-5});
    require_close(full_of(result), test.tensor("expected"), "layer_norm");
  }
}

void bmm(const Case& test, const ProcessGroup& group) {
  const ShardedTensor a = shard(test.tensor("input"), chunks_in(0, group), group);
  const ShardedTensor b = shard(test.tensor("other"), chunks_in(0, group), group);
  require_close(full_of(ops::bmm(a, b)), test.tensor("expected"), "bmm");
}

void linear(const Case& test, const ProcessGroup& group) {
  const at::Tensor own = test.tensor("input").narrow(0, 2 * group.rank(), 2);
  for (const std::int64_t dim : {0, 1}) {
    const ShardedTensor weight = shard(test.tensor("weight"), chunks_in(dim, group), group);
    const ops::LinearResult result = ops::linear(own, weight, test.tensor("bias"));
    const at::Tensor full =
        dim == 0 ? full_of(std::get<ShardedTensor>(result)) : std::get<PartialTensor>(result).all_reduce();
    require_close(full, test.tensor("expected"), "linear");
  }
}

int ranks_of(const Case& test) { return test.get<int>("world"); }

std::function<void(const Case& test)> checker(const ProcessGroup& group) {
  static const std::map<std::string, Check> checks = {{"build", build},
                                                      {"infer", infer},
                                                      {"gather", gather},
                                                      {"reshard", reshard},
                                                      {"tensor_op", tensor_op},
                                                      {"embedding", embedding},
                                                      {"unary", unary},
                                                      {"binary", binary},
                                                      {"embedding_bag", embedding_bag},
                                                      {"softmax", softmax},
                                                      {"bmm", bmm},
                                                      {"layer_norm", layer_norm},
                                                      {"linear", linear}};
  return [group](const Case& test) {
    const auto found = checks.find(test.get<std::string>("op"));
    require(found != checks.end(), "no such op");
    found->second(test, group);
  };
}

std::string row_of(const Case& test) { return "sharded " + test.get<std::string>("op"); }

std::string name_of(const Case& test) {
  const std::string name = test.has("name") ? " " + test.get<std::string>("name") : "";
  return fmt::format("of {} ranks{}", test.get<int>("world"), name);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::interop::answer_all(argc, argv,
                                      {tessera::ranks_of, tessera::checker, tessera::row_of, tessera::name_of});
}

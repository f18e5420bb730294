#include "tessera/tensor/parallel/context_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "tensor/dtensor/local_outside.h"
#include "tensor/torch_errors.h"
#include "tessera/base/error.h"
#include "tessera/comm/internal/step.h"

namespace tessera {

namespace {

using Sizes = std::vector<std::int64_t>;

std::int64_t token_count(const std::vector<Interval>& intervals) {
  std::int64_t count = 0;
  for (const Interval& interval : intervals) count += interval.size();
  return count;
}

// --- one rank's queries and another rank's keys

// An interval of the sequence, and where it begins among the tokens of a rank.
struct Part {
  Interval tokens;
  std::int64_t begin;
  at::Tensor of(const at::Tensor& rows) const { return rows.narrow(-2, begin, tokens.size()); }
};

std::vector<Part> parts_of(const std::vector<Interval>& intervals) {
  std::vector<Part> parts;
  parts.reserve(intervals.size());
  std::int64_t begin = 0;
  for (const Interval& interval : intervals) {
    parts.push_back({interval, begin});
    begin += interval.size();
  }
  return parts;
}

// Returns scores [..., queries, keys]; -infinity where a key comes after the query, if `is_causal`.
at::Tensor scores_of(const at::Tensor& query, const at::Tensor& key, const Part& q, const Part& k, double scale,
                     bool is_causal) {
  at::Tensor scores = at::matmul(q.of(query), k.of(key).transpose(-2, -1)).mul_(scale);
  if (is_causal && k.tokens.end - 1 > q.tokens.begin) {
    const auto on = at::TensorOptions().dtype(at::kLong).device(query.device());
    const at::Tensor later =
        at::arange(k.tokens.begin, k.tokens.end, on) > at::arange(q.tokens.begin, q.tokens.end, on).unsqueeze(-1);
    scores.masked_fill_(later, -std::numeric_limits<double>::infinity());
  }
  return scores;
}

bool attends(const Part& q, const Part& k, bool is_causal) { return !is_causal || k.tokens.begin < q.tokens.end; }

// The result of attention to some of the keys, and the logarithm of the sum of the exponentials of each row's scores.
struct RunningAttention {
  at::Tensor result, log_sum;  // [..., tokens, v], [..., tokens, 1]

  void add(const Part& q, const at::Tensor& scores, const at::Tensor& values) {
    const at::Tensor log_sum_here = scores.logsumexp(-1, /*keepdim=*/true);
    const at::Tensor before = q.of(log_sum), after = at::logaddexp(before, log_sum_here);
    // A row without any key so far has -infinity, and the difference of two is not a number.
    const at::Tensor base = after.masked_fill(after.eq(-std::numeric_limits<double>::infinity()), 0);
    const at::Tensor weights = (scores - base).exp_();
    q.of(result).mul_((before - base).exp_()).add_(at::matmul(weights, values));
    before.copy_(after);
  }
};

// --- the ring

// Tensors of all ranks' tokens, which pass from each rank to the next.
class Ring {
 public:
  Ring(const ProcessGroup& group, std::int64_t length, TokenOrder order)
      : group_(group), length_(length), order_(order) {}

  int size() const { return group_.size(); }
  // Returns the tokens of the rank whose tensors arrive here after `steps`.
  std::vector<Interval> tokens_after(int steps) const {
    return tokens_of_rank(length_, size(), (group_.rank() - steps % size() + size()) % size(), order_);
  }

  // Tensors on their way to the next rank.
  struct Passing {
    std::vector<at::Tensor> received;
    at::Tensor in, out;
    PendingCollective pending;

    std::vector<at::Tensor> wait() {
      pending.wait();
      std::int64_t begin = 0;
      for (at::Tensor& tensor : received) {
        tensor = out.narrow(0, begin, tensor.numel()).view(tensor.sizes());
        begin += tensor.numel();
      }
      return received;
    }
  };

  // Passes tensors [..., tokens, x], which have arrived here after `steps`, to the next rank.
  Passing pass(const std::vector<at::Tensor>& tensors, int steps) const {
    Passing passing;
    std::vector<at::Tensor> flat;
    std::int64_t elements = 0;
    const std::int64_t tokens = token_count(tokens_after(steps + 1));
    for (const at::Tensor& tensor : tensors) {
      flat.push_back(tensor.reshape({-1}));
      Sizes size = tensor.sizes().vec();
      size[size.size() - 2] = tokens;
      passing.received.push_back(at::empty({0}, tensor.options()).new_empty(size));
      elements += passing.received.back().numel();
    }
    passing.in = at::cat(flat);
    passing.out = at::empty({elements}, passing.in.options());
    Sizes out_splits(static_cast<std::size_t>(size()), 0), in_splits(static_cast<std::size_t>(size()), 0);
    in_splits[static_cast<std::size_t>((group_.rank() + 1) % size())] = passing.in.numel();
    out_splits[static_cast<std::size_t>((group_.rank() + size() - 1) % size())] = elements;
    passing.pending = group_.start_all_to_all(passing.out, passing.in, out_splits, in_splits);
    return passing;
  }

 private:
  ProcessGroup group_;
  std::int64_t length_;
  TokenOrder order_;
};

struct RingCall : torch::CustomClassHolder {
  RingCall(ProcessGroup group_in, std::int64_t length, bool is_causal_in, double scale_in, TokenOrder order)
      : group(std::move(group_in)), ring(group, length, order), is_causal(is_causal_in), scale(scale_in) {}
  ProcessGroup group;
  Ring ring;
  bool is_causal;
  double scale;
};

RunningAttention forward_around(const RingCall& call, const at::Tensor& query, at::Tensor key, at::Tensor value) {
  const std::vector<Part> queries = parts_of(call.ring.tokens_after(0));
  Sizes size = query.sizes().vec();
  size.back() = 1;
  RunningAttention running;
  running.log_sum = at::full(size, -std::numeric_limits<double>::infinity(), query.options());
  size.back() = value.size(-1);
  running.result = at::zeros(size, query.options());
  for (int step = 0; step < call.ring.size(); ++step) {
    std::optional<Ring::Passing> passing;
    if (step + 1 < call.ring.size()) passing = call.ring.pass({key, value}, step);
    for (const Part& k : parts_of(call.ring.tokens_after(step))) {
      for (const Part& q : queries) {
        if (!attends(q, k, call.is_causal)) continue;
        running.add(q, scores_of(query, key, q, k, call.scale, call.is_causal), k.of(value));
      }
    }
    if (!passing) break;
    const std::vector<at::Tensor> next = passing->wait();
    key = next[0];
    value = next[1];
  }
  return running;
}

struct RingGradients {
  at::Tensor query, key, value;
};

RingGradients backward_around(const RingCall& call, const at::Tensor& query, at::Tensor key, at::Tensor value,
                              const at::Tensor& result, const at::Tensor& log_sum, const at::Tensor& gradient) {
  const std::vector<Part> queries = parts_of(call.ring.tokens_after(0));
  const at::Tensor of_query = at::zeros_like(query), dot = (gradient * result).sum(-1, /*keepdim=*/true);
  at::Tensor of_key = at::zeros_like(key), of_value = at::zeros_like(value);
  // The gradients travel with their keys and values, one step more: home.
  std::optional<Ring::Passing> gradients;
  for (int step = 0; step < call.ring.size(); ++step) {
    std::optional<Ring::Passing> passing;
    if (step + 1 < call.ring.size()) passing = call.ring.pass({key, value}, step);
    const at::Tensor add_to_key = at::zeros_like(key), add_to_value = at::zeros_like(value);
    for (const Part& k : parts_of(call.ring.tokens_after(step))) {
      for (const Part& q : queries) {
        if (!attends(q, k, call.is_causal)) continue;
        const at::Tensor weights = (scores_of(query, key, q, k, call.scale, call.is_causal) - q.of(log_sum)).exp_();
        k.of(add_to_value).add_(at::matmul(weights.transpose(-2, -1), q.of(gradient)));
        const at::Tensor of_scores =
            at::matmul(q.of(gradient), k.of(value).transpose(-2, -1)).sub_(q.of(dot)).mul_(weights).mul_(call.scale);
        q.of(of_query).add_(at::matmul(of_scores, k.of(key)));
        k.of(add_to_key).add_(at::matmul(of_scores.transpose(-2, -1), q.of(query)));
      }
    }
    if (gradients) {
      const std::vector<at::Tensor> arrived = gradients->wait();
      of_key = arrived[0];
      of_value = arrived[1];
    }
    of_key = of_key + add_to_key;
    of_value = of_value + add_to_value;
    if (call.ring.size() > 1) gradients = call.ring.pass({of_key, of_value}, step);
    if (!passing) break;
    const std::vector<at::Tensor> next = passing->wait();
    key = next[0];
    value = next[1];
  }
  if (gradients) {
    const std::vector<at::Tensor> arrived = gradients->wait();
    of_key = arrived[0];
    of_value = arrived[1];
  }
  return {of_query, of_key, of_value};
}

struct RingAttention : torch::autograd::Function<RingAttention> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, const c10::intrusive_ptr<RingCall>& call) {
    const at::ScalarType dtype = query.scalar_type(), computes_in = dtype == at::kDouble ? at::kDouble : at::kFloat;
    const RunningAttention done =
        forward_around(*call, query.to(computes_in), key.to(computes_in), value.to(computes_in));
    at::Tensor result = done.result.to(dtype);
    context->save_for_backward({query, key, value, done.result, done.log_sum});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return result;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    if (c10::GradMode::is_enabled())
      fail(ErrorCode::unsupported, "second derivatives of ring attention, expected backward without create_graph");
    const auto call = c10::static_intrusive_pointer_cast<RingCall>(context->saved_data["call"].toCapsule());
    const torch::autograd::variable_list saved = context->get_saved_variables();
    const at::ScalarType dtype = saved[0].scalar_type(), computes_in = saved[3].scalar_type();
    const RingGradients done = comm::in_step(std::span(&call->group, 1), "backward of ring attention", [&] {
      return backward_around(*call, saved[0].to(computes_in), saved[1].to(computes_in), saved[2].to(computes_in),
                             saved[3], saved[4], gradients[0].to(computes_in));
    });
    return {done.query.to(dtype), done.key.to(dtype), done.value.to(dtype), at::Tensor()};
  }
};

// Returns the sequence dimension of each tensor, counted from the front.
Sizes check_dims(const std::vector<at::Tensor>& tensors, const Sizes& seq_dims) {
  if (tensors.size() != seq_dims.size()) {
    fail(ErrorCode::invalid_argument, "context parallel: {} tensors with {} sequence dimensions, expected one for each",
         tensors.size(), seq_dims.size());
  }
  Sizes dims;
  dims.reserve(seq_dims.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::int64_t count = tensors[i].defined() ? tensors[i].dim() : 0;
    if (seq_dims[i] < -count || seq_dims[i] >= count) {
      fail(ErrorCode::invalid_argument, "context parallel: dimension {} of a tensor of {}, expected {} to {}",
           seq_dims[i], count, -count, count - 1);
    }
    dims.push_back(seq_dims[i] < 0 ? seq_dims[i] + count : seq_dims[i]);
  }
  return dims;
}

}  // namespace

std::vector<Interval> tokens_of_rank(std::int64_t length, int ranks, int rank, TokenOrder order) {
  const std::int64_t chunks = order == TokenOrder::head_tail ? 2 * std::int64_t{ranks} : ranks;
  const std::int64_t chunk = (length + chunks - 1) / chunks;
  std::vector<Interval> intervals;
  for (const std::int64_t i : {std::int64_t{rank}, chunks - 1 - rank}) {
    const Interval tokens{std::min(length, i * chunk), std::min(length, (i + 1) * chunk)};
    if (tokens.size() > 0) intervals.push_back(tokens);
    if (order == TokenOrder::contiguous) break;
  }
  return intervals;
}

std::vector<at::Tensor> context_parallel_shard(const ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                                               const Sizes& seq_dims, TokenOrder order) {
  const Sizes dims = check_dims(tensors, seq_dims);
  std::vector<at::Tensor> shards;
  shards.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::vector<at::Tensor> parts = {tensors[i].narrow(dims[i], 0, 0)};
    for (const Interval& tokens : tokens_of_rank(tensors[i].size(dims[i]), group.size(), group.rank(), order)) {
      parts.push_back(tensors[i].narrow(dims[i], tokens.begin, tokens.size()));
    }
    shards.push_back(at::cat(parts, dims[i]));
  }
  return shards;
}

std::vector<at::Tensor> context_parallel_unshard(const ProcessGroup& group, const std::vector<at::Tensor>& shards,
                                                 const Sizes& seq_dims, std::int64_t length, TokenOrder order) {
  const c10::NoGradGuard no_grad;
  Sizes dims;
  group.check_call("context_parallel_unshard", [&](CallArguments& arguments) {
    dims = check_dims(shards, seq_dims);
    const std::int64_t expected = token_count(tokens_of_rank(length, group.size(), group.rank(), order));
    arguments.add("length", length).add("order", static_cast<int>(order));
    for (std::size_t i = 0; i < shards.size(); ++i) {
      Sizes size = shards[i].sizes().vec();
      std::int64_t& tokens = size[static_cast<std::size_t>(dims[i])];
      if (tokens != expected) {
        fail(ErrorCode::invalid_argument, "context parallel: a tensor of {} tokens, expected {} of {}", tokens,
             expected, length);
      }
      tokens = length;
      arguments.add("dtype", c10::toString(shards[i].scalar_type())).add("size", shape_to_string(size));
    }
  });
  std::int64_t most = 0;  // tokens of a rank
  for (int r = 0; r < group.size(); ++r)
    most = std::max(most, token_count(tokens_of_rank(length, group.size(), r, order)));
  std::vector<at::Tensor> full;
  full.reserve(shards.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const at::Tensor rows = shards[i].transpose(0, dims[i]);  // the tokens first
    Sizes size = rows.sizes().vec();
    size[0] = most;
    const at::Tensor mine = at::zeros(size, rows.options());
    mine.narrow(0, 0, rows.size(0)).copy_(rows);
    size[0] = most * group.size();
    const at::Tensor all = at::empty(size, rows.options());
    group.start_all_gather_into(all, mine).wait();
    size[0] = length;
    const at::Tensor sequence = at::empty(size, rows.options());
    for (int r = 0; r < group.size(); ++r) {
      for (const Part& part : parts_of(tokens_of_rank(length, group.size(), r, order))) {
        sequence.narrow(0, part.tokens.begin, part.tokens.size())
            .copy_(all.narrow(0, most * r + part.begin, part.tokens.size()));
      }
    }
    full.push_back(sequence.transpose(0, dims[i]).contiguous());
  }
  return full;
}

at::Tensor ring_attention(const ProcessGroup& group, const at::Tensor& query, const at::Tensor& key,
                          const at::Tensor& value, std::int64_t length, const RingAttentionOptions& options) {
  group.check_call("ring attention", [&](CallArguments& arguments) {
    const std::pair<const char*, const at::Tensor&> tensors[] = {{"query", query}, {"key", key}, {"value", value}};
    for (const auto& [name, tensor] : tensors) {
      if (!tensor.defined() || tensor.dim() < 2 || !tensor.is_floating_point()) {
        const std::string found = tensor.defined()
                                      ? fmt::format("of size {} of {}", shape_to_string(tensor.sizes().vec()),
                                                    c10::toString(tensor.scalar_type()))
                                      : "undefined";
        fail(ErrorCode::invalid_argument,
             "ring attention: the {} is {}, expected two or more dimensions of a floating-point dtype", name, found);
      }
      if (tensor.scalar_type() != query.scalar_type() || tensor.device() != query.device()) {
        fail(ErrorCode::invalid_argument, "ring attention: tensors of {} on {} and of {} on {}, expected the same",
             c10::toString(query.scalar_type()), query.device().str(), c10::toString(tensor.scalar_type()),
             tensor.device().str());
      }
    }
    const std::int64_t tokens = token_count(tokens_of_rank(length, group.size(), group.rank(), options.order));
    Sizes of_key = query.sizes().vec(), of_value = of_key;
    of_key[of_key.size() - 2] = of_value[of_value.size() - 2] = tokens;
    of_value.back() = value.size(-1);
    if (query.sizes() != at::IntArrayRef(of_key) || key.sizes() != at::IntArrayRef(of_key) ||
        value.sizes() != at::IntArrayRef(of_value)) {
      fail(ErrorCode::invalid_argument,
           "ring attention over {} tokens: a query {}, a key {} and a value {}, expected {}, {} and {}", length,
           shape_to_string(query.sizes().vec()), shape_to_string(key.sizes().vec()),
           shape_to_string(value.sizes().vec()), shape_to_string(of_key), shape_to_string(of_key),
           shape_to_string(of_value));
    }
    of_key[of_key.size() - 2] = length;
    arguments.add("size", shape_to_string(of_key))
        .add("size of a value", value.size(-1))
        .add("dtype", c10::toString(query.scalar_type()))
        .add("requires_grad", query.requires_grad() || key.requires_grad() || value.requires_grad())
        .add("is_causal", options.is_causal)
        .add("scale", options.scale ? fmt::format("{}", *options.scale) : "by size")
        .add("order", static_cast<int>(options.order));
  });
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
  try {
    return comm::in_step(std::span(&group, 1), "ring attention", [&] {
      return RingAttention::apply(
          query, key, value, c10::make_intrusive<RingCall>(group, length, options.is_causal, scale, options.order));
    });
  } catch (...) {
    rethrow_as_error("ring attention");
  }
}

DTensor ring_attention(const DTensor& query, const DTensor& key, const DTensor& value,
                       const RingAttentionOptions& options) {
  const auto refuse_expecting = [&](const char* expected) {
    fail(ErrorCode::invalid_argument, "ring attention of {}, {} and {}: expected {}", query.to_string(),
         key.to_string(), value.to_string(), expected);
  };
  const DeviceMesh& mesh = query.device_mesh();
  if (!(key.device_mesh() == mesh && value.device_mesh() == mesh)) refuse_expecting("one mesh");
  if (query.placements() != key.placements() || query.placements() != value.placements() || query.dim() < 2 ||
      key.size() != query.size() || value.dim() != query.dim()) {
    refuse_expecting("tensors of the same sizes and placements, except for the last size of the value");
  }
  if (options.order != TokenOrder::contiguous) refuse_expecting("tokens in contiguous order");
  std::optional<std::int64_t> along;
  for (std::int64_t m = 0; m < mesh.ndim(); ++m) {
    const Placement& placement = query.placements()[static_cast<std::size_t>(m)];
    if (placement.is_shard(query.dim() - 2) && !placement.is_strided() && !along) {
      along = m;
    } else if (!placement.is_replicate() && !(placement.is_shard() && placement.dim() < query.dim() - 2)) {
      refuse_expecting(
          "one mesh dimension that shards the second to last dimension, others that shard those before it");
    }
  }
  if (!along) refuse_expecting("one mesh dimension that shards the second to last dimension");
  const MeshLayout layout(value.size(), mesh.shape(), query.placements());
  if (!mesh.has_this_rank()) {
    const std::vector<at::Tensor> locals = {query.local_tensor(), key.local_tensor(), value.local_tensor()};
    return DTensor(mesh, layout, local_outside(layout.size(), value.local_tensor().options(), locals));
  }
  return DTensor(mesh, layout,
                 ring_attention(mesh.group(*along), query.local_tensor(), key.local_tensor(), value.local_tensor(),
                                query.size(-2), options));
}

}  // namespace tessera

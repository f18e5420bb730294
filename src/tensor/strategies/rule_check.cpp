#include "tessera/tensor/dtensor/rule_check.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "tensor/strategies/local_values.h"
#include "tensor/strategies/observer.h"
#include "tensor/torch_errors.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/comm_debug_mode.h"
#include "tessera/comm/local_ranks.h"
#include "tessera/tensor/dtensor/op_calls.h"

namespace tessera {

namespace {

using Tensors = std::vector<at::Tensor>;

// What a rank computed.
struct RankResult {
  Tensors locals;
  std::string error;  // if it threw
};

// What the threads share. Each waits for all others in `meet`, unless one of them failed.
class SharedCheck {
 public:
  explicit SharedCheck(std::size_t ranks) : results_{std::vector<RankResult>(ranks), std::vector<RankResult>(ranks)} {}

  void meet() {
    std::unique_lock lock(mutex_);
    const std::size_t round = round_;
    if (++arrived_ == results_[0].size()) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round || failed_; });
    if (failed_ && round_ == round) fail(ErrorCode::rank_failure, "check of placement rules: another rank failed");
  }
  void fail_all() {
    const std::lock_guard lock(mutex_);
    failed_ = true;
    changed_.notify_all();
  }
  // Returns the results of all ranks. They stay until the call after the next one.
  const std::vector<RankResult>& exchange(std::size_t rank, std::size_t call, RankResult result) {
    std::vector<RankResult>& results = results_[call % 2];
    results[rank] = std::move(result);
    meet();
    return results;
  }

  RuleCheck check;  // of rank 0

 private:
  std::vector<RankResult> results_[2];
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t arrived_ = 0, round_ = 0;
  bool failed_ = false;
};

std::string first_line_of_exception() {
  try {
    rethrow_as_error("compute");
  } catch (const Error& error) {
    const std::string text = error.what();
    return text.substr(0, text.find('\n'));
  }
}

bool replicates_all(const Placements& placements) {
  return std::all_of(placements.begin(), placements.end(), [](const Placement& each) { return each.is_replicate(); });
}

bool contains(const std::vector<OpStrategy>& strategies, const Placements& inputs, const Placements& outputs) {
  return std::any_of(strategies.begin(), strategies.end(), [&](const OpStrategy& strategy) {
    if (strategy.inputs != inputs) return false;
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      if (!(output_of(strategy, k) == outputs[k])) return false;
    }
    return true;
  });
}

// Checks the calls of one rank. All ranks do the same; the first one judges.
class RuleChecker : public OpObserver {
 public:
  RuleChecker(const RuleCheckOptions& options, SharedCheck& shared, const ProcessGroup& group)
      : options_(options), shared_(shared), group_(group), rank_(static_cast<std::size_t>(group.rank())) {}

  void observe(const ObservedCall& call) override {
    const ObserverScope unobserved(nullptr);
    const at::NoGradGuard no_gradients;
    Samples samples;
    if (std::optional<std::string> reason = find_samples(call, samples)) {
      skip(call, *reason);
      return;
    }
    std::vector<OpStrategy> right;
    const CommDebugMode mode(group_);
    for (const OpStrategy& strategy : strategies_of(call, samples[0].inputs)) check(call, samples, strategy, right);
    const bool sent = mode.total() + mode.comparisons() > 0;
    const std::vector<RankResult>& all = shared_.exchange(rank_, calls_++, {{}, sent ? "communicates" : ""});
    const bool communicates = std::any_of(all.begin(), all.end(), [](const RankResult& r) { return !r.error.empty(); });
    if (!options_.finds_missing) return;
    if (communicates) return skip(call, "missing strategies are not looked for, since it communicates");
    find_missing(call, samples, std::move(right));
  }

 private:
  // Full inputs and the results of the op on them.
  struct Sample {
    Tensors inputs, results;
  };
  using Samples = std::vector<Sample>;

  Tolerance tolerance() const { return {options_.relative_tolerance, options_.absolute_tolerance}; }

  std::vector<DTensor> placed(const ObservedCall& call, const Tensors& inputs, const Placements& placements) const {
    const DeviceMesh& mesh = call.inputs[0].device_mesh();
    std::vector<DTensor> result;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      result.emplace_back(mesh, MeshLayout(inputs[i].sizes().vec(), mesh.shape(), {placements[i]}),
                          local_value(inputs[i], placements[i], group_.size(), group_.rank(), i));
    }
    return result;
  }

  // Returns what all ranks computed from inputs with these placements.
  const std::vector<RankResult>& compute(const ObservedCall& call, const Tensors& inputs,
                                         const Placements& placements) {
    RankResult mine;
    try {
      for (const at::Tensor& local : call.compute(placed(call, inputs, placements)))
        mine.locals.push_back(local.detach());
    } catch (...) {
      mine.error = first_line_of_exception();
    }
    return shared_.exchange(rank_, calls_++, std::move(mine));
  }

  // Returns why the call cannot be judged.
  std::optional<std::string> find_samples(const ObservedCall& call, Samples& samples) {
    Tensors inputs, negative;
    bool changes = false;
    for (const DTensor& input : call.inputs) {
      inputs.push_back(input.redistribute({}, false).local_tensor().detach());
      const bool is_number = at::isFloatingType(inputs.back().scalar_type());
      negative.push_back(is_number ? -inputs.back() : inputs.back());
      changes = changes || is_number;
    }
    const Placements replicated(inputs.size());
    std::string reason = "its result has no elements or only zeros, as under every placement";
    for (const Tensors& sample : {inputs, negative}) {
      if (!samples.empty() && !changes) break;
      const std::vector<RankResult> once = compute(call, sample, replicated);
      const std::vector<RankResult>& again = compute(call, sample, replicated);
      const auto failed = [](const RankResult& result) { return !result.error.empty(); };
      if (std::any_of(once.begin(), once.end(), failed) || std::any_of(again.begin(), again.end(), failed)) {
        // Replicated inputs of the other sign may be refused; those of the user are not, or the call itself will throw.
        reason = once[0].error.empty() ? "it fails on some ranks" : once[0].error;
        continue;
      }
      bool is_informative = !once[0].locals.empty(), is_same = true;
      for (std::size_t k = 0; k < once[0].locals.size(); ++k) {
        const at::Tensor& result = once[0].locals[k];
        is_informative = is_informative && result.numel() > 0 && result.ne(0).any().item<bool>();
        for (const RankResult& other : again)
          is_same = is_same && !difference(result, Placement::replicate(), {other.locals[k]}, tolerance());
      }
      if (!is_same) return "it does not give the same result in every call";
      if (is_informative) samples.push_back({sample, once[0].locals});
    }
    return samples.empty() ? std::optional(reason) : std::nullopt;
  }

  // Returns whether the inputs have a dtype of which there are partial values where a strategy wants them.
  static bool has_values(const Tensors& inputs, const Placements& placements) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (!placements[i].is_partial()) continue;
      const Placements choices = placements_to_try(inputs[i]);
      if (std::find(choices.begin(), choices.end(), placements[i]) == choices.end()) return false;
    }
    return true;
  }

  // Returns the strategies that the rule lists for inputs with any placements.
  static std::vector<OpStrategy> strategies_of(const ObservedCall& call, const Tensors& inputs) {
    std::vector<Placements> given = {Placements(inputs.size())};
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::average, ReduceOp::min, ReduceOp::max, ReduceOp::product})
      given.emplace_back(inputs.size(), Placement::partial(op));
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Placements choices = placements_to_try(inputs[i]);
      for (std::int64_t d = 0; d < inputs[i].dim(); ++d) choices.push_back(Placement::strided_shard(d, 2));
      for (const Placement& choice : choices) {
        given.emplace_back(inputs.size());
        given.back()[i] = choice;
      }
    }
    const DeviceMesh& mesh = call.inputs[0].device_mesh();
    std::vector<OpStrategy> all;
    for (const Placements& placements : given) {
      std::vector<DTensor> described;
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        const MeshLayout layout(inputs[i].sizes().vec(), mesh.shape(), {placements[i]});
        described.emplace_back(mesh, layout,
                               at::empty(layout.local_shape(*mesh.coordinate()).sizes, inputs[i].options()));
      }
      OpRule rule;
      try {
        rule = call.rule_of(described);
      } catch (const std::exception&) {
        continue;  // for these placements there is no strategy
      }
      for (OpStrategy& strategy : rule.strategies) {
        if (strategy.mesh_dim && *strategy.mesh_dim != 0) continue;
        if (call.is_in_place && !(strategy.inputs[0] == strategy.output)) continue;
        Placements outputs;
        for (std::size_t k = 0; k < call.choice.outputs.size(); ++k) outputs.push_back(output_of(strategy, k));
        if (replicates_all(strategy.inputs) && replicates_all(outputs)) continue;
        if (!has_values(inputs, strategy.inputs)) continue;
        strategy.mesh_dim.reset();
        if (!contains(all, strategy.inputs, outputs)) all.push_back(std::move(strategy));
      }
    }
    return all;
  }

  // Returns what is wrong with a result of a sample; nullopt if nothing is.
  std::optional<std::string> problem_of(const std::vector<RankResult>& results, const Sample& sample,
                                        std::size_t result, const Placement& placement) const {
    Tensors locals;
    for (const RankResult& each : results) {
      if (!each.error.empty()) return "it cannot be computed: " + each.error;
      locals.push_back(each.locals[result]);
    }
    return difference(sample.results[result], placement, locals, tolerance());
  }

  void check(const ObservedCall& call, const Samples& samples, const OpStrategy& strategy,
             std::vector<OpStrategy>& right) {
    std::optional<std::string> problem;
    for (const Sample& sample : samples) {
      const std::vector<RankResult>& results = compute(call, sample.inputs, strategy.inputs);
      for (std::size_t k = 0; k < sample.results.size() && !problem; ++k) {
        problem = problem_of(results, sample, k, output_of(strategy, k));
        if (problem && k > 0) *problem = "result " + std::to_string(k) + ": " + *problem;
      }
    }
    if (!problem) right.push_back(strategy);
    if (rank_ == 0) add(problem ? shared_.check.wrong : shared_.check.right, call, strategy, problem.value_or(""));
  }

  void find_missing(const ObservedCall& call, const Samples& samples, std::vector<OpStrategy> right) {
    const std::size_t known = right.size();
    std::vector<Placements> choices;
    std::size_t combinations = 1;
    for (const at::Tensor& input : samples[0].inputs) {
      choices.push_back(placements_to_try(input));
      combinations *= choices.back().size();
      if (combinations > options_.most_combinations)
        return skip(call, "missing strategies are not looked for, since there are too many combinations");
    }
    std::vector<std::size_t> at(choices.size(), 0);
    for (;;) {
      std::size_t i = 0;
      while (i < at.size() && ++at[i] == choices[i].size()) at[i++] = 0;
      if (i == at.size()) return;
      OpStrategy strategy;
      for (std::size_t input = 0; input < at.size(); ++input) strategy.inputs.push_back(choices[input][at[input]]);
      find_outputs(call, samples, strategy, right, known);
    }
  }

  // Adds the strategies with these inputs that are right. The first `known` of `right` are those of the rule.
  void find_outputs(const ObservedCall& call, const Samples& samples, OpStrategy strategy,
                    std::vector<OpStrategy>& right, std::size_t known) {
    std::vector<Placements> outputs;  // that are right, of each result
    for (const at::Tensor& result : samples[0].results) outputs.push_back(placements_to_try(result));
    for (const Sample& sample : samples) {
      const std::vector<RankResult>& results = compute(call, sample.inputs, strategy.inputs);
      for (std::size_t k = 0; k < outputs.size() && rank_ == 0; ++k) {
        std::erase_if(outputs[k],
                      [&](const Placement& output) { return problem_of(results, sample, k, output).has_value(); });
      }
    }
    if (rank_ != 0) return;
    for (std::size_t k = 0; k < outputs.size(); ++k) {
      if (outputs[k].empty()) return;
      if (outputs[k][0].is_replicate()) outputs[k].resize(1);  // equal on all ranks, and so also partial
      if (k > 0) strategy.more_outputs.push_back(outputs[k][0]);
    }
    for (const Placement& output : outputs[0]) {
      if (call.is_in_place && !(output == strategy.inputs[0])) continue;
      strategy.output = output;
      Placements all = {output};
      all.insert(all.end(), strategy.more_outputs.begin(), strategy.more_outputs.end());
      if (contains(right, strategy.inputs, all)) continue;
      add(shared_.check.right, call, strategy, "");
      const bool is_covered = std::any_of(right.begin(), right.begin() + static_cast<std::ptrdiff_t>(known),
                                          [&](const OpStrategy& of_rule) { return covers(of_rule, strategy.inputs); });
      right.push_back(strategy);
      if (is_covered) continue;
      add(shared_.check.missing, call, strategy, "");
      right.insert(right.begin() + static_cast<std::ptrdiff_t>(known++), strategy);  // one for these inputs is enough
    }
  }

  // Returns whether inputs with these placements are placed as the strategy wants them without communication.
  static bool covers(const OpStrategy& strategy, const Placements& inputs) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (!(strategy.inputs[i] == inputs[i]) && !inputs[i].is_replicate()) return false;
    }
    return true;
  }

  static void add(std::vector<RuleCheck::Finding>& findings, const ObservedCall& call, const OpStrategy& strategy,
                  std::string problem) {
    const std::string text = to_string(strategy);
    const bool is_known = std::any_of(findings.begin(), findings.end(), [&](const RuleCheck::Finding& finding) {
      return finding.op == call.op && to_string(finding.strategy) == text;
    });
    if (!is_known) findings.push_back({call.op, strategy, std::move(problem)});
  }

  void skip(const ObservedCall& call, const std::string& reason) {
    if (rank_ == 0) shared_.check.skipped.push_back(call.op + ": " + reason);
  }

  const RuleCheckOptions& options_;
  SharedCheck& shared_;
  const ProcessGroup& group_;
  std::size_t rank_, calls_ = 0;
};

}  // namespace

RuleCheck check_placement_rules(const std::vector<at::Tensor>& inputs,
                                FunctionRef<void(const std::vector<DTensor>& inputs)> f,
                                const RuleCheckOptions& options) {
  if (inputs.empty() || options.ranks < 2) {
    fail(ErrorCode::invalid_argument,
         "check of placement rules: {} inputs and {} ranks, expected at least 1 input and at least 2 ranks",
         inputs.size(), options.ranks);
  }
  SharedCheck shared(static_cast<std::size_t>(options.ranks));
  run_local(options.ranks, [&](const ProcessGroup& group) {
    try {
      const DeviceMesh mesh(group, {options.ranks});
      std::vector<DTensor> replicated;
      replicated.reserve(inputs.size());
      for (const at::Tensor& input : inputs) replicated.push_back(DTensor::from_local(input.detach().clone(), mesh));
      RuleChecker checker(options, shared, group);
      const ObserverScope scope(&checker);
      f(replicated);
    } catch (...) {
      shared.fail_all();
      throw;
    }
  });
  return std::move(shared.check);
}

std::string to_string(const RuleCheck& check) {
  std::string text;
  for (const RuleCheck::Finding& finding : check.wrong)
    text += fmt::format("{}: {} is wrong: {}\n", finding.op, to_string(finding.strategy), finding.problem);
  for (const RuleCheck::Finding& finding : check.missing)
    text += fmt::format("{}: {} is missing\n", finding.op, to_string(finding.strategy));
  for (const std::string& skipped : check.skipped) text += fmt::format("skipped {}\n", skipped);
  return text;
}

}  // namespace tessera

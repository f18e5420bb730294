#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "state/optimizer/fields_read.h"
#include "state/optimizer/flatten.h"
#include "state/parameter_names.h"
#include "tessera/state/internal/local_state_dict.h"
#include "tessera/state/traverse.h"

namespace tessera {

namespace {

// A saved state, by the names or numbers of its parameters.
class SavedState {
 public:
  explicit SavedState(const StateDict& state_dict) {
    states_ = &require_element<Dict>(state_dict, {"state"});
    const List& groups = require_element<List>(state_dict, {"param_groups"});
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const auto index = static_cast<std::int64_t>(g);
      groups_.push_back(&require_element<Dict>(state_dict, {"param_groups", index}));
      const List& parameters = require_element<List>(state_dict, {"param_groups", index, "params"});
      for (const Value& parameter : parameters) add(parameter, g);
      sizes_.push_back(parameters.size());
    }
  }

  bool by_number() const { return !numbers_.empty(); }
  std::size_t groups() const { return groups_.size(); }
  const Dict& group(std::size_t g) const { return *groups_[g]; }
  std::size_t size_of(std::size_t g) const { return sizes_[g]; }
  // Returns the number of parameter i, counted over all groups.
  Key number(std::size_t i) const { return numbers_[i]; }
  // Returns the group of a named parameter.
  std::optional<std::size_t> group_of(const std::string& name) const {
    const auto found = group_of_.find(name);
    return found == group_of_.end() ? std::nullopt : std::optional(found->second);
  }
  // Returns null if there is none. The number of a parameter may be a text, as in a checkpoint, which has only texts.
  const Value* state_of(const Key& parameter) const {
    const Value* found = states_->find(parameter);
    return found == nullptr && by_number() ? states_->find(Key(number_text(parameter))) : found;
  }
  // Returns a parameter that has state and is in no group.
  std::optional<std::string> state_of_no_group() const {
    std::set<std::string> numbers;
    for (const Key& number : numbers_) numbers.insert(number_text(number));
    for (const auto& [parameter, state] : *states_) {
      const auto* name = std::get_if<std::string>(&parameter);
      const std::string text = name != nullptr ? *name : number_text(parameter);
      const bool is_listed = by_number() ? numbers.contains(text) : name != nullptr && group_of_.contains(text);
      if (!is_listed) return text;
    }
    return std::nullopt;
  }

 private:
  static std::string number_text(const Key& key) { return fmt::to_string(std::get<std::int64_t>(key)); }

  void add(const Value& parameter, std::size_t g) {
    if (const auto* name = parameter.get_if<std::string>()) {
      group_of_.emplace(*name, g);
    } else if (const auto* number = parameter.get_if<std::int64_t>()) {
      numbers_.emplace_back(*number);
    } else {
      fail(ErrorCode::invalid_argument,
           "load optimizer state dict: 'param_groups.{}.params' has {}, expected names or numbers", g,
           to_string(parameter, 60));
    }
    if (!group_of_.empty() && !numbers_.empty()) {
      fail(ErrorCode::invalid_argument,
           "load optimizer state dict: found both names and numbers of parameters, expected one of them");
    }
  }

  const Dict* states_ = nullptr;
  std::vector<const Dict*> groups_;
  std::vector<std::size_t> sizes_;
  std::map<std::string, std::size_t, std::less<>> group_of_;
  std::vector<Key> numbers_;
};

template <typename Fields>
class Setter {
 public:
  Setter(const ParameterNames& names, torch::optim::Optimizer& optimizer, const SavedState& saved, bool is_flat,
         const StateDictOptions& asked, const ParameterParts& parts)
      : names_(names),
        optimizer_(optimizer),
        saved_(saved),
        parts_(parts),
        is_flat_(is_flat),
        strict_(asked.strict),
        take_(asked.take_tensors) {
    check_parts<Fields>(parts);
  }

  // Checks everything and returns the function that makes the change.
  std::function<void()> plan() {
    check_numbers();
    for (std::size_t g = 0; g < optimizer_.param_groups().size(); ++g) plan_group(g);
    check_missing_states();
    problems_.raise(fmt::format("load optimizer state dict ({})", Fields::kName));
    return [&optimizer = optimizer_, options = std::move(options_),
            states = std::make_shared<States>(std::move(states_))] {
      for (std::size_t g = 0; g < options.size(); ++g) {
        static_cast<typename Fields::Options&>(optimizer.param_groups()[g].options()) = options[g];
      }
      for (auto& [key, state] : *states) {
        if (state) {
          optimizer.state()[key] = std::move(state);
        } else {
          optimizer.state().erase(key);
        }
      }
    };
  }

 private:
  using States = std::vector<std::pair<OptimizerStateMap::key_type, std::unique_ptr<typename Fields::State>>>;

  // Without state for any parameter of the optimizer, the state dict describes it before its first step. Then other
  // states must be of other optimizers: one of no group may be that of a parameter under another name.
  void check_missing_states() {
    if (without_state_.empty()) return;
    const std::optional<std::string> unknown = has_state_ ? std::nullopt : saved_.state_of_no_group();
    if (!has_state_ && !unknown) return;
    for (const std::string& text : without_state_) {
      problems_.add("missing", fmt::format("the state of parameter '{}'", printable(text)));
    }
    if (unknown) problems_.add("wrong", fmt::format("'{}' has state and is in no group", printable(*unknown)));
  }

  void check_numbers() const {
    if (!saved_.by_number()) return;
    const auto& groups = optimizer_.param_groups();
    bool fits = groups.size() == saved_.groups();
    for (std::size_t g = 0; fits && g < groups.size(); ++g) fits = groups[g].params().size() == saved_.size_of(g);
    if (!fits) {
      fail(ErrorCode::invalid_argument,
           "load optimizer state dict ({}): its parameters have numbers, and its groups differ in number or size from "
           "those of the optimizer, expected equal ones",
           Fields::kName);
    }
  }

  void plan_group(std::size_t g) {
    torch::optim::OptimizerParamGroup& group = optimizer_.param_groups()[g];
    std::optional<std::size_t> from = saved_.by_number() ? std::optional(g) : std::nullopt;
    std::vector<Key> called;
    for (std::size_t i = 0; i < group.params().size(); ++i) called.push_back(find(group.params()[i], g, i, from));
    if (group.params().empty() && !from && !is_flat_) from = empty_group();
    auto& options = options_.emplace_back(static_cast<const typename Fields::Options&>(group.options()));
    if (!from) return;  // reported as missing, or left out of a flattened state
    OptionsReader reader(saved_.group(*from), fmt::format("group {}", *from), problems_);
    Fields::options(options, reader);
    if (strict_) reader.refuse_others();
    for (std::size_t i = 0; i < called.size(); ++i) plan_state(group.params()[i], called[i], options, g == 0 && i == 0);
  }

  // Returns the saved name or number of a parameter. Sets `from` to the parameter's group in the state.
  Key find(const at::Tensor& parameter, std::size_t g, std::size_t i, std::optional<std::size_t>& from) {
    const std::size_t number = next_++;
    const std::vector<std::string>& names = names_.of(parameter, g, i);
    if (saved_.by_number()) return saved_.number(number);
    for (const std::string& name : names) {
      const std::optional<std::size_t> in = saved_.group_of(name);
      if (!in) continue;
      if (from && *from != *in) {
        problems_.add(
            "wrong",
            fmt::format(
                "parameters of group {} are in groups {} and {} of the state, '{}' in the latter, expected one group",
                g, *from, *in, printable(name)));
      }
      if (!from) from = in;
      return name;
    }
    problems_.add("missing", fmt::format("parameter '{}' in param_groups", printable(names.front())));
    return names.front();
  }

  std::optional<std::size_t> empty_group() {
    std::optional<std::size_t> found;
    std::size_t count = 0;
    for (std::size_t g = 0; g < saved_.groups(); ++g) {
      if (saved_.size_of(g) != 0) continue;
      found = g;
      ++count;
    }
    if (count == 1) return found;
    problems_.add("wrong", fmt::format("the state has {} groups without parameters, expected 1", count));
    return std::nullopt;
  }

  void plan_state(const at::Tensor& parameter, const Key& called, const typename Fields::Options& options,
                  bool is_first) {
    auto& planned = states_.emplace_back(optimizer_key(parameter), nullptr).second;
    if constexpr (requires { Fields::first_state(options, parameter); }) {
      planned = Fields::first_state(options, parameter);
    }
    const Value* found = saved_.state_of(called);
    const auto* name = std::get_if<std::string>(&called);
    const std::string text = name ? *name : to_string(called);
    if (!found) {
      const bool may_be_missing =
          !parameter.requires_grad() || !Fields::needs_state(options) || (Fields::kOneState && !is_first);
      if (strict_ && !may_be_missing) without_state_.push_back(text);
      return;
    }
    has_state_ = true;
    const Dict* dict = found->get_if<Dict>();
    if (!dict) {
      return problems_.add("wrong", fmt::format("the state of parameter '{}' is {}, expected a dict", printable(text),
                                                to_string(*found, 60)));
    }
    if (dict->empty()) return;
    auto state = std::make_unique<typename Fields::State>();
    StateReader reader(*dict, text, parameter, parts_, take_, problems_);
    Fields::state(*state, options, reader);
    if (strict_) reader.refuse_others();
    if (!reader.is_empty()) planned = std::move(state);
  }

  const ParameterNames& names_;
  torch::optim::Optimizer& optimizer_;
  const SavedState& saved_;
  const ParameterParts& parts_;
  bool is_flat_;  // without the options of groups that have no parameters
  bool strict_, take_;
  std::size_t next_ = 0;
  bool has_state_ = false;                  // of any of the optimizer's parameters
  std::vector<std::string> without_state_;  // parameters that need one if others have one
  Problems problems_;
  std::vector<typename Fields::Options> options_;
  States states_;
};

}  // namespace

std::function<void()> plan_optimizer_state(const torch::nn::Module& module, torch::optim::Optimizer& optimizer,
                                           const StateDict& state_dict, const ParameterParts& parts,
                                           const StateDictOptions& options) {
  const ParameterNames names(module);
  const bool is_flat = is_flattened(state_dict, optimizer);
  const StateDict nested = is_flat ? unflatten_optimizer_state(state_dict, names, optimizer) : state_dict;
  const SavedState saved(nested);
  return with_fields(optimizer, [&]<typename Fields>(Fields) {
    return Setter<Fields>(names, optimizer, saved, is_flat, options, parts).plan();
  });
}

}  // namespace tessera

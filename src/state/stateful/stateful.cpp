#include "tessera/state/stateful.h"

#include <utility>

#include "state/stateful/values.h"
#include "tessera/base/error.h"
#include "tessera/state/module_state.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/state/traverse.h"

namespace tessera {

namespace {

class Functions final : public Stateful {
 public:
  Functions(std::function<StateDict()> get, std::function<void(const StateDict&)> set)
      : get_(std::move(get)), set_(std::move(set)) {
    if (!get_ || !set_) fail(ErrorCode::invalid_argument, "stateful: found a null function, expected two functions");
  }
  StateDict state_dict() override { return get_(); }
  void load_state_dict(const StateDict& state_dict) override { set_(state_dict); }

 private:
  std::function<StateDict()> get_;
  std::function<void(const StateDict&)> set_;
};

// Visits values, and the paths to them, in the order of the state dict.
class Describer {
 public:
  explicit Describer(CallArguments& arguments) : arguments_(arguments) {}

  bool has_found() const { return has_found_; }
  void visit(const Dict& dict, bool is_in_sequence) {
    for (const auto& [key, value] : dict) visit(key, value, is_in_sequence);
  }

 private:
  void visit(const Key& key, const Value& value, bool is_in_sequence) {
    path_.push_back(key);
    if (value.is<std::shared_ptr<Stateful>>()) {
      const std::string name = printable(flat_name(path_));
      if (is_in_sequence) {
        fail(ErrorCode::invalid_argument, "'{}' is a stateful in a list or a tuple, expected it in a dict", name);
      }
      has_found_ = true;
      arguments_.add("stateful", name);
    } else if (const auto* dict = value.get_if<Dict>()) {
      visit(*dict, is_in_sequence);
    } else if (const auto* list = value.get_if<List>()) {
      visit_items(*list);
    } else if (const auto* tuple = value.get_if<Tuple>()) {
      visit_items(*tuple);
    }
    path_.pop_back();
  }

  void visit_items(const ValueSequence& items) {
    for (std::size_t i = 0; i < items.size(); ++i) visit(static_cast<std::int64_t>(i), items[i], true);
  }

  CallArguments& arguments_;
  Path path_;
  bool has_found_ = false;
};

}  // namespace

std::shared_ptr<Stateful> stateful(std::function<StateDict()> get, std::function<void(const StateDict&)> set) {
  return std::make_shared<Functions>(std::move(get), std::move(set));
}

std::shared_ptr<Stateful> stateful_model(std::shared_ptr<torch::nn::Module> module, StateDictOptions options) {
  return stateful([module, options] { return get_model_state_dict(*module, options); },
                  [module, options](const StateDict& state) { set_model_state_dict(*module, state, options); });
}

std::shared_ptr<Stateful> stateful_optimizer(std::shared_ptr<torch::nn::Module> module,
                                             std::vector<torch::optim::Optimizer*> optimizers,
                                             StateDictOptions options) {
  return stateful([module, optimizers, options] { return get_optimizer_state_dict(*module, optimizers, options); },
                  [module, optimizers, options](const StateDict& state) {
                    set_optimizer_state_dict(*module, optimizers, state, options);
                  });
}

bool describe_stateful(const StateDict& state, CallArguments& arguments) {
  Describer describer(arguments);
  describer.visit(state, /*is_in_sequence=*/false);
  return describer.has_found();
}

StateDict with_states(const StateDict& state, const ProcessGroup& group, std::string_view operation) {
  StateDict result;
  for (const auto& [key, value] : state) {
    const auto* object = value.get_if<std::shared_ptr<Stateful>>();
    const auto* dict = value.get_if<Dict>();
    if (object != nullptr) {
      const std::string step = fmt::format("{}: state_dict of {}", operation, printable(to_string(key)));
      result.insert_or_assign(key, group.agree_on(step, [&] { return (*object)->state_dict(); }));
    } else {
      result.insert_or_assign(key, dict != nullptr ? Value(with_states(*dict, group, operation)) : value);
    }
  }
  return result;
}

void load_states(const StateDict& state, StateDict& loaded, const ProcessGroup& group) {
  for (const auto& [key, value] : state) {
    if (const auto* object = value.get_if<std::shared_ptr<Stateful>>()) {
      const std::string step = fmt::format("load: load_state_dict of {}", printable(to_string(key)));
      const Dict& own = loaded.at(key).get<Dict>();
      group.agree_on(step, [&] { (*object)->load_state_dict(own); });
      loaded.insert_or_assign(key, value);
    } else if (const auto* dict = value.get_if<Dict>()) {
      load_states(*dict, loaded.at(key).get<Dict>(), group);
    }
  }
}

}  // namespace tessera

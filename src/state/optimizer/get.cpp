#include <ATen/ATen.h>

#include "state/optimizer/fields.h"
#include "state/parameter_names.h"
#include "tessera/state/internal/local_state_dict.h"

namespace tessera {

namespace {

// Returns a step as Python keeps it, a float32 scalar tensor, or float64 if float32 would round it.
at::Tensor step_tensor(std::int64_t step) {
  const auto rounded = static_cast<float>(step);
  const bool fits = static_cast<std::int64_t>(rounded) == step;
  return at::scalar_tensor(static_cast<double>(step), fits ? at::kFloat : at::kDouble);
}

class OptionsWriter {
 public:
  explicit OptionsWriter(Dict& group) : group_(group) {}

  void operator()(const char* name, double value) { group_[name] = value; }
  void operator()(const char* name, bool value) { group_[name] = value; }
  void operator()(const char* name, std::int64_t value) { group_[name] = value; }
  void operator()(const char* name, const std::tuple<double, double>& value) {
    group_[name] = Tuple{std::get<0>(value), std::get<1>(value)};
  }
  void operator()(const char* name, const OptionalInt& value) { group_[name] = value ? Value(*value) : Value(); }
  void operator()(const char* name, const OptionalString& value) { group_[name] = value ? Value(*value) : Value(); }
  void fixed(const char* name, bool value) { group_[name] = value; }
  void ignored(const char* name, Value value) { group_[name] = std::move(value); }

 private:
  Dict& group_;
};

class StateWriter {
 public:
  StateWriter(Dict& state, const at::Tensor& parameter, bool is_new, const ParameterParts& parts)
      : state_(state), parameter_(parameter), is_new_(is_new), parts_(parts) {}

  void counter(const char* name, std::int64_t value) { state_[name] = step_tensor(value); }
  void tensor(const char* name, const at::Tensor& tensor, bool is_used, double first = 0) {
    if (tensor.defined()) {
      state_[name] = parts_.to_state(parameter_, tensor.detach());
    } else if (is_new_ && is_used) {
      state_[name] = parts_.to_state(
          parameter_, at::full_like(parameter_.detach(), first, at::TensorOptions(), at::MemoryFormat::Preserve));
    }
  }
  void optional_tensor(const char* name, const at::Tensor& value, bool is_used) { tensor(name, value, is_used); }
  void integer(const char* name, std::int64_t value) { state_[name] = value; }
  void real(const char* name, double value) { state_[name] = value; }
  bool has(const char*, const at::Tensor& tensor) const { return tensor.defined(); }
  void flat(const char* name, const at::Tensor& value) {
    if (value.defined()) state_[name] = value.detach();
  }
  template <typename Tensors>
  void tensors(const char* name, const Tensors& tensors) {
    List list;
    for (const at::Tensor& each : tensors) list.push_back(each.detach());
    state_[name] = std::move(list);
  }

 private:
  Dict& state_;
  const at::Tensor& parameter_;
  bool is_new_;
  const ParameterParts& parts_;
};

template <typename Fields>
StateDict get(const ParameterNames& names, const torch::optim::Optimizer& optimizer, const ParameterParts& parts) {
  check_parts<Fields>(parts);
  Dict states;
  List groups;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const torch::optim::OptimizerParamGroup& group = optimizer.param_groups()[g];
    const auto& options = static_cast<const typename Fields::Options&>(group.options());
    List parameters;
    for (std::size_t i = 0; i < group.params().size(); ++i) {
      const at::Tensor& parameter = group.params()[i];
      const std::string& name = names.of(parameter, g, i).front();
      parameters.push_back(name);
      const auto found = optimizer.state().find(optimizer_key(parameter));
      const bool is_new = found == optimizer.state().end();
      if (is_new && (Fields::kOneState || !parameter.requires_grad())) continue;
      Dict state;
      StateWriter writer(state, parameter, is_new, parts);
      const typename Fields::State first{};
      Fields::state(is_new ? first : static_cast<const typename Fields::State&>(*found->second), options, writer);
      if (!state.empty()) states[name] = std::move(state);
    }
    Dict described;
    OptionsWriter writer(described);
    Fields::options(options, writer);
    described["params"] = std::move(parameters);
    groups.push_back(std::move(described));
  }
  return {{"state", std::move(states)}, {"param_groups", std::move(groups)}};
}

}  // namespace

StateDict local_optimizer_state(const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                                const ParameterParts& parts) {
  const ParameterNames names(module);
  return with_fields(optimizer, [&]<typename Fields>(Fields) { return get<Fields>(names, optimizer, parts); });
}

}  // namespace tessera

#pragma once
// The options and the state of LibTorch's optimizers, with Python's names and in Python's order. Each class has one
// list of fields, which drives both reading and writing.
//
// The list of options calls these members of `field`:
//   field(name, member)            a double, bool, int, pair of betas, optional int or optional text
//   field.fixed(name, value)       only in Python; another value would change the result
//   field.ignored(name, value)     only in Python, without effect on the result; `value` is the default
// `needs_state` returns whether a step keeps state for a parameter. The list of that state calls:
//   field.counter(name, int)       a step; a scalar tensor in Python
//   field.tensor(name, tensor, is_used, first)   of the parameter's shape, initially filled with `first`
//   field.optional_tensor(...)     as tensor; Python omits it before the first step
//   field.integer(name, int), field.real(name, double), field.flat(name, tensor), field.tensors(name, tensors)

#include <ATen/ATen.h>

#include <memory>
#include <string_view>
#include <typeinfo>

#include "state/optimizer/libtorch_optim.h"
#include "tessera/base/error.h"
#include "tessera/state/value.h"

namespace tessera {

struct SgdFields {
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  static constexpr std::string_view kName = "SGD";
  static constexpr bool kOneState = false;
  template <typename O, typename F>
  static void options(O& o, F& field) {
    field("lr", o.lr());
    field("momentum", o.momentum());
    field("dampening", o.dampening());
    field("weight_decay", o.weight_decay());
    field("nesterov", o.nesterov());
    field.fixed("maximize", false);
    field.ignored("foreach", Value());
    field.ignored("differentiable", false);
    field.ignored("fused", Value());
  }
  static bool needs_state(const Options& o) { return o.momentum() != 0; }
  template <typename S, typename F>
  static void state(S& s, const Options& o, F& field) {
    field.optional_tensor("momentum_buffer", s.momentum_buffer(), o.momentum() != 0);
  }
};

template <typename OptionsType, typename StateType, bool decoupled>
struct AdamFieldsOf {
  using Options = OptionsType;
  using State = StateType;
  static constexpr std::string_view kName = decoupled ? "AdamW" : "Adam";
  static constexpr bool kOneState = false;
  template <typename O, typename F>
  static void options(O& o, F& field) {
    field("lr", o.lr());
    field("betas", o.betas());
    field("eps", o.eps());
    field("weight_decay", o.weight_decay());
    field("amsgrad", o.amsgrad());
    field.fixed("maximize", false);
    field.ignored("foreach", Value());
    field.ignored("capturable", false);
    field.ignored("differentiable", false);
    field.ignored("fused", Value());
    field.fixed("decoupled_weight_decay", decoupled);
  }
  static bool needs_state(const Options&) { return true; }
  template <typename S, typename F>
  static void state(S& s, const Options& o, F& field) {
    field.counter("step", s.step());
    field.tensor("exp_avg", s.exp_avg(), true);
    field.tensor("exp_avg_sq", s.exp_avg_sq(), true);
    field.tensor("max_exp_avg_sq", s.max_exp_avg_sq(), o.amsgrad());
  }
};
using AdamFields = AdamFieldsOf<torch::optim::AdamOptions, torch::optim::AdamParamState, false>;
using AdamWFields = AdamFieldsOf<torch::optim::AdamWOptions, torch::optim::AdamWParamState, true>;

struct AdagradFields {
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;
  static constexpr std::string_view kName = "Adagrad";
  static constexpr bool kOneState = false;
  template <typename O, typename F>
  static void options(O& o, F& field) {
    field("lr", o.lr());
    field("lr_decay", o.lr_decay());
    field("eps", o.eps());
    field("weight_decay", o.weight_decay());
    field("initial_accumulator_value", o.initial_accumulator_value());
    field.ignored("foreach", Value());
    field.fixed("maximize", false);
    field.ignored("differentiable", false);
    field.ignored("fused", Value());
  }
  // LibTorch creates the state in the optimizer's constructor, and its step requires it.
  static std::unique_ptr<State> first_state(const Options& o, const at::Tensor& parameter) {
    auto state = std::make_unique<State>();
    state->sum(at::full_like(parameter.detach(), o.initial_accumulator_value(), at::TensorOptions(),
                             at::MemoryFormat::Preserve));
    return state;
  }
  static bool needs_state(const Options&) { return true; }
  template <typename S, typename F>
  static void state(S& s, const Options& o, F& field) {
    field.counter("step", s.step());
    field.tensor("sum", s.sum(), true, o.initial_accumulator_value());
  }
};

struct RmsPropFields {
  using Options = torch::optim::RMSpropOptions;
  using State = torch::optim::RMSpropParamState;
  static constexpr std::string_view kName = "RMSprop";
  static constexpr bool kOneState = false;
  template <typename O, typename F>
  static void options(O& o, F& field) {
    field("lr", o.lr());
    field("momentum", o.momentum());
    field("alpha", o.alpha());
    field("eps", o.eps());
    field("centered", o.centered());
    field("weight_decay", o.weight_decay());
    field.ignored("capturable", false);
    field.ignored("foreach", Value());
    field.fixed("maximize", false);
    field.ignored("differentiable", false);
  }
  static bool needs_state(const Options&) { return true; }
  template <typename S, typename F>
  static void state(S& s, const Options& o, F& field) {
    field.counter("step", s.step());
    field.tensor("square_avg", s.square_avg(), true);
    field.tensor("momentum_buffer", s.momentum_buffer(), o.momentum() > 0);
    field.tensor("grad_avg", s.grad_avg(), o.centered());
  }
};

struct LbfgsFields {
  using Options = torch::optim::LBFGSOptions;
  using State = torch::optim::LBFGSParamState;
  static constexpr std::string_view kName = "LBFGS";
  static constexpr bool kOneState = true;
  template <typename O, typename F>
  static void options(O& o, F& field) {
    field("lr", o.lr());
    field("max_iter", o.max_iter());
    field("max_eval", o.max_eval());
    field("tolerance_grad", o.tolerance_grad());
    field("tolerance_change", o.tolerance_change());
    field("history_size", o.history_size());
    field("line_search_fn", o.line_search_fn());
    field.fixed("maximize", false);
  }
  static bool needs_state(const Options&) { return true; }
  // Python's `al` is omitted: both implementations write it before they read it.
  template <typename S, typename F>
  static void state(S& s, const Options&, F& field) {
    field.integer("func_evals", s.func_evals());
    field.integer("n_iter", s.n_iter());
    if (!field.has("d", s.d())) return;  // no direction computed yet
    field.flat("d", s.d());
    field.real("t", s.t());
    field.tensors("old_dirs", s.old_dirs());
    field.tensors("old_stps", s.old_stps());
    field.tensors("ro", s.ro());
    field.flat("H_diag", s.H_diag());
    field.flat("prev_flat_grad", s.prev_flat_grad());
    field.real("prev_loss", s.prev_loss());
  }
};

// Returns `f(fields)` for the fields of the optimizer's class.
template <typename F>
auto with_fields(const torch::optim::Optimizer& optimizer, F&& f) {
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer)) return f(SgdFields());
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer)) return f(AdamFields());
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer)) return f(AdamWFields());
  if (dynamic_cast<const torch::optim::Adagrad*>(&optimizer)) return f(AdagradFields());
  if (dynamic_cast<const torch::optim::RMSprop*>(&optimizer)) return f(RmsPropFields());
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer)) return f(LbfgsFields());
  fail(ErrorCode::unsupported,
       "optimizer state dict: the optimizer has class {}, expected SGD, Adam, AdamW, Adagrad, RMSprop or LBFGS",
       typeid(optimizer).name());
}

}  // namespace tessera

#include "tessera/fsdp/activation_checkpoint.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <mutex>
#include <set>

#include "fsdp/autocast.h"
#include "fsdp/autograd.h"
#include "fsdp/runtime/checkpointed_run.h"
#include "fsdp/runtime/op_observer.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/fsdp/wrap.h"
#include "tessera/layout/box.h"

namespace tessera::fsdp {

void apply_activation_checkpointing(torch::nn::Module& model,
                                    FunctionRef<bool(const torch::nn::Module& module)> selects) {
  std::vector<Wrappable*> selected;
  model.apply([&](const std::string& name, torch::nn::Module& module) {
    if (selects && !selects(module)) return;
    auto* wrapped = dynamic_cast<Wrappable*>(&module);
    if (wrapped != nullptr) {
      selected.push_back(wrapped);
    } else if (selects) {
      fail(
          ErrorCode::invalid_argument,
          "apply_activation_checkpointing: module '{}', a {}, is not held in a Wrap, expected a Wrap or a Checkpointed",
          printable(name), module.name());
    }
  });
  for (Wrappable* module : selected) module->checkpoint_activations(true);
}

}  // namespace tessera::fsdp

namespace tessera::fsdp::detail {

namespace {

using torch::autograd::variable_list;

// The states of the random generators of the CPU, of the devices of a function's inputs, and of all CUDA devices in
// use.
class RandomState {
 public:
  static RandomState now(const std::vector<at::Tensor>& inputs) {
    RandomState now;
    now.keep(at::detail::getDefaultCPUGenerator());
    for (std::size_t i = 0; i < at::getNumGPUs(); ++i) {
      const auto device = static_cast<c10::DeviceIndex>(i);
      if (!at::detail::getCUDAHooks().hasPrimaryContext(device)) continue;  // not in use: do not initialize it
      now.keep(at::globalContext().defaultGenerator(at::Device(at::kCUDA, device)));
    }
    std::set<c10::DeviceIndex> kept;
    for (const at::Tensor& input : inputs) {
      if (!input.defined() || input.is_cpu() || input.is_cuda() || input.is_meta()) continue;
      if (kept.insert(input.device().index()).second) now.keep(at::globalContext().defaultGenerator(input.device()));
    }
    return now;
  }
  void restore() const {
    for (auto [generator, state] : states_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  void keep(at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    states_.emplace_back(generator, generator.get_state());
  }

  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

// The state, other than its arguments, that determines the results of a function.
struct Surroundings {
  static Surroundings now(const std::vector<at::Tensor>& inputs) { return {RandomState::now(inputs), Autocast::now()}; }
  void restore() const {
    random.restore();
    autocast.restore();
  }
  RandomState random;
  Autocast autocast;
};

// The listeners of a call's ops. They listen again when the call is repeated, unless they have ended since.
class Listeners {
 public:
  Listeners() {
    for (const auto& listener : OpObserver::listeners()) listeners_.emplace_back(listener);
  }

  // Calls `f` and tells the listeners of its ops.
  template <typename F>
  auto tell_of(const F& f) const {
    std::vector<std::shared_ptr<OpListener>> listeners;
    std::deque<OpObserver> observers;
    for (const auto& weak : listeners_) {
      if (auto listener = weak.lock()) observers.emplace_back(listeners.emplace_back(std::move(listener)));
    }
    try {
      auto result = f();
      for (const auto& listener : listeners) listener->finish();
      return result;
    } catch (...) {
      std::exception_ptr why = std::current_exception();
      for (const auto& listener : listeners) {
        if (std::exception_ptr first = listener->abandon()) why = std::move(first);
      }
      std::rethrow_exception(why);
    }
  }

 private:
  std::vector<std::weak_ptr<OpListener>> listeners_;
};

// What the graph saves of a call, except for its inputs.
struct Call : torch::CustomClassHolder {
  Call(TensorFunction again_in, Surroundings surroundings_in)
      : again(std::move(again_in)), surroundings(std::move(surroundings_in)) {}

  std::vector<at::Tensor> repeat(const std::vector<at::Tensor>& inputs) const {
    const Surroundings before = Surroundings::now(inputs);
    const auto run = [&] {
      const c10::AutoGradMode graph(true);
      surroundings.restore();
      return listeners.tell_of([&] { return again(inputs); });
    };
    try {
      std::vector<at::Tensor> outputs = run();
      before.restore();
      return outputs;
    } catch (...) {
      before.restore();
      throw;
    }
  }

  TensorFunction again;
  Surroundings surroundings;
  Listeners listeners;
  std::uint64_t position = CheckpointedRun::position();  // before the first run
};

using Run = FunctionRef<std::vector<at::Tensor>()>;

struct Recomputed : torch::autograd::Function<Recomputed> {
  static variable_list forward(torch::autograd::AutogradContext* context, at::TensorList inputs, const Run& run,
                               const c10::intrusive_ptr<Call>& call) {
    const NoAutocastCache no_cache;
    variable_list outputs = run();
    // Autograd attaches the graph to the outputs, so they must not be tensors that others hold.
    for (at::Tensor& output : outputs) output = output.detach();
    context->save_for_backward(inputs.vec());
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    context->set_materialize_grads(false);
    return outputs;
  }

  static variable_list backward(torch::autograd::AutogradContext* context, const variable_list& gradients) {
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
      fail(ErrorCode::unsupported,
           "backward of a checkpointed call: only some gradients were requested, expected backward() without inputs");
    }
    if (c10::GradMode::is_enabled()) {
      fail(ErrorCode::unsupported, "backward of a checkpointed call: create_graph is true, expected false");
    }
    variable_list inputs;
    for (const at::Tensor& saved : context->get_saved_variables()) {
      inputs.push_back(saved.detach().set_requires_grad(saved.requires_grad()));
    }
    const auto call = c10::static_intrusive_pointer_cast<Call>(context->saved_data["call"].toCapsule());
    const CheckpointedRun repetition(CheckpointedRun::Kind::repetition, call->position);
    const variable_list outputs = call->repeat(inputs);
    run_backward(outputs, gradients);
    variable_list input_gradients;
    for (const at::Tensor& input : inputs) input_gradients.push_back(input.grad());
    input_gradients.resize(inputs.size() + 2);  // `run` and `call` have none
    return input_gradients;
  }

  // Returns the tensor with a node of its own, which runs before the others and notes that the backward has begun.
  static at::Tensor as_root(const at::Tensor& output) {
    if (output.layout() != at::kStrided) return output;
    const c10::AutoGradMode graph(true);
    at::Tensor root = at::alias(output);
    before_node(node_of(root), nullptr, [] { CheckpointedRun::note_backward(); });
    return root;
  }

  static void run_backward(const variable_list& outputs, const variable_list& gradients) {
    variable_list roots, root_gradients;
    const bool is_same = outputs.size() == gradients.size();
    for (std::size_t i = 0; is_same && i < outputs.size(); ++i) {
      if (!gradients[i].defined()) continue;
      if (outputs[i].sizes() != gradients[i].sizes()) {
        fail(ErrorCode::invalid_argument,
             "backward of a checkpointed call: recomputed tensor {} of the result has shape {}, expected {} as in "
             "forward",
             i, shape_to_string(outputs[i].sizes()), shape_to_string(gradients[i].sizes()));
      }
      if (!outputs[i].requires_grad()) continue;
      roots.push_back(as_root(outputs[i]));
      root_gradients.push_back(gradients[i]);
    }
    if (!is_same) {
      fail(ErrorCode::invalid_argument,
           "backward of a checkpointed call: the recomputed result has {} tensors, expected {} as in forward",
           outputs.size(), gradients.size());
    }
    torch::autograd::backward(roots, root_gradients);
  }
};

bool needs_gradient(const at::Tensor& tensor) { return tensor.requires_grad(); }

// The inputs without repetition, and for each input its index among these.
struct Distinct {
  explicit Distinct(const std::vector<at::Tensor>& inputs) {
    for (const at::Tensor& input : inputs) {
      const auto is_it = [&](const at::Tensor& other) { return other.is_same(input); };
      const auto found = std::find_if(tensors.begin(), tensors.end(), is_it);
      indices.push_back(static_cast<std::size_t>(found - tensors.begin()));
      if (found == tensors.end()) tensors.push_back(input);
    }
  }
  std::vector<at::Tensor> tensors;
  std::vector<std::size_t> indices;
};

std::vector<std::int64_t> versions_of(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> versions;
  versions.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) versions.push_back(tensor.is_inference() ? 0 : tensor._version());
  return versions;
}

}  // namespace

at::Tensor placeholder() { return at::empty({0}); }

std::vector<at::Tensor> run_checkpointed(const std::vector<at::Tensor>& inputs, const torch::nn::Module* module,
                                         Run run, TensorFunction again) {
  Distinct distinct(inputs);
  std::vector<at::Tensor>& tensors = distinct.tensors;
  if (std::none_of(tensors.begin(), tensors.end(), needs_gradient)) {
    if (module != nullptr) {
      const std::vector<at::Tensor> params = module->parameters();
      if (std::none_of(params.begin(), params.end(), needs_gradient)) return run();
    }
    tensors.push_back(at::empty({0}).set_requires_grad(true));  // makes autograd record the call
  }
  const auto repeat = [again = std::move(again), indices = distinct.indices](const std::vector<at::Tensor>& kept) {
    std::vector<at::Tensor> items;
    items.reserve(indices.size());
    for (const std::size_t index : indices) items.push_back(kept[index]);
    return again(items);
  };
  const std::vector<std::int64_t> versions = versions_of(tensors);
  const auto first_run = [&] {
    const CheckpointedRun first(CheckpointedRun::Kind::first);
    return run();
  };
  std::vector<at::Tensor> outputs = Recomputed::apply(at::TensorList(tensors), Run(first_run),
                                                      c10::make_intrusive<Call>(repeat, Surroundings::now(inputs)));
  const std::vector<std::int64_t> now = versions_of(tensors);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (now[distinct.indices[i]] == versions[distinct.indices[i]]) continue;
    fail(ErrorCode::invalid_argument,
         "activation_checkpoint: the function changed tensor {} of its arguments in place, expected it unchanged", i);
  }
  return outputs;
}

}  // namespace tessera::fsdp::detail

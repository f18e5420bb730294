#pragma once
// Hooks into autograd, for all supported versions of LibTorch.

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace tessera::fsdp {

// A node of a graph: a shared_ptr up to LibTorch 2.6, an intrusive_ptr in 2.14.
using GraphNode = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

template <typename Node>
std::weak_ptr<Node> weak_reference(const std::shared_ptr<Node>& node) {
  return node;
}
template <typename Node>
c10::weak_intrusive_ptr<Node> weak_reference(const c10::intrusive_ptr<Node>& node) {
  return c10::weak_intrusive_ptr<Node>(node);
}
// A reference that does not keep the node; see lock().
using WeakGraphNode = decltype(weak_reference(std::declval<GraphNode>()));

// Returns the node that runs when the gradient of the tensor, which requires one, has been computed.
inline GraphNode node_of(const at::Tensor& tensor) { return torch::autograd::impl::gradient_edge(tensor).function; }

// Returns the number of the node that this thread makes next.
inline std::uint64_t next_node_number() { return at::sequence_number::peek(); }
// Returns whether this thread has made the node before that with this number.
inline bool is_older(const GraphNode& node, std::uint64_t number) {
  return node->thread_id() == at::RecordFunction::currentThreadId() && node->sequence_nr() < number;
}

// Makes `node` the one that accumulates the gradient of `leaf` in graphs recorded from now on. A node remembers the
// shape that its leaf had when it was made. A null node stands for one that is made when it is needed.
template <typename Node>
void set_accumulator(const at::Tensor& leaf, const std::shared_ptr<Node>& node) {
  torch::autograd::impl::set_grad_accumulator(leaf, node);
}
template <typename Node>
void set_accumulator(const at::Tensor& leaf, const c10::intrusive_ptr<Node>& node) {
  torch::autograd::impl::set_grad_accumulator(leaf, c10::weak_intrusive_ptr<Node>(node));
}

// Calls `f` each time after the node has run.
template <typename F>
void after_node(const GraphNode& node, F f) {
  struct Hook : torch::autograd::FunctionPostHook {
    explicit Hook(F f_in) : f(std::move(f_in)) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list& /*inputs*/) override {
      f();
      return outputs;
    }
    F f;
  };
  node->add_post_hook(std::make_unique<Hook>(std::move(f)));
}

// A hook on a node, which has at most one for each key. It keeps the key.
struct KeyedHook : torch::autograd::FunctionPreHook {
  explicit KeyedHook(std::shared_ptr<const void> key_in) : key(std::move(key_in)) {}
  std::shared_ptr<const void> key;
};

using PreHooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;

// Adds a hook that calls `f`. Returns false and does nothing if there is one for the key.
template <typename F>
bool add_hook(PreHooks& hooks, std::shared_ptr<const void> key, F f) {
  struct Hook : KeyedHook {
    Hook(std::shared_ptr<const void> key_in, F f_in) : KeyedHook(std::move(key_in)), f(std::move(f_in)) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
      f();
      return gradients;
    }
    F f;
  };
  const auto is_it = [&](const auto& hook) {
    const auto* const keyed = dynamic_cast<const KeyedHook*>(hook.get());
    return keyed != nullptr && keyed->key == key;
  };
  if (std::any_of(hooks.begin(), hooks.end(), is_it)) return false;
  hooks.push_back(std::make_unique<Hook>(std::move(key), std::move(f)));
  return true;
}

// Returns the hooks of a node that Tensor::register_hook adds to. LibTorch 1.13 has one list for all hooks.
template <typename Node>
PreHooks& hooks_of_tensors(Node& node) {
  if constexpr (requires { node.tensor_pre_hooks(); }) {
    return node.tensor_pre_hooks();
  } else {
    return node.pre_hooks();
  }
}

// Calls `f` each time before the node runs, unless it has a hook for the key.
template <typename F>
void before_node(const GraphNode& node, std::shared_ptr<const void> key, F f) {
  add_hook(node->pre_hooks(), std::move(key), std::move(f));
}

// The same before hooks that a program registers later on the tensor whose node this is. The hook stays on the node if
// the tensor gets another one, because it is changed in place. Returns whether it was added.
template <typename F>
bool before_node_and_later_hooks(const GraphNode& node, std::shared_ptr<const void> key, F f) {
  return add_hook(hooks_of_tensors(*node), std::move(key), std::move(f));
}

// Identifies the backward that this thread computes, the innermost one if one is computed in another. Null if it
// computes none.
inline const void* current_backward() { return torch::autograd::get_current_graph_task_nodes_in_graph(); }

// Returns whether the current backward runs the node, sooner or later, given the node that it runs now.
inline bool is_run_by_current_backward(const torch::autograd::Node* node, const torch::autograd::Node* now) {
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (node == now || nodes == nullptr) return node == now;     // the first node is not among `nodes`
  auto* const key = const_cast<torch::autograd::Node*>(node);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  if (nodes->find(key) == nodes->end()) return false;
  const auto& needed = *torch::autograd::get_current_graph_task_exec_info();  // empty if all are
  const auto found = needed.find(key);
  return needed.empty() || (found != needed.end() && found->second.should_execute());
}

// Calls `f` at the end of the current backward. May be called only during backward.
inline void at_end_of_backward(std::function<void()> f) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(f));
}

}  // namespace tessera::fsdp

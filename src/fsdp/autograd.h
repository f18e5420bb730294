#pragma once
// Hooks into autograd, for all supported versions of LibTorch.

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <utility>

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

// Calls `f` each time before the node runs.
template <typename F>
void before_node(const GraphNode& node, F f) {
  struct Hook : torch::autograd::FunctionPreHook {
    explicit Hook(F f_in) : f(std::move(f_in)) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
      f();
      return gradients;
    }
    F f;
  };
  node->add_pre_hook(std::make_unique<Hook>(std::move(f)));
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

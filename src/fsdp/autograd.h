#pragma once
// Hooks into autograd, for all supported versions of LibTorch.

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <utility>

namespace tessera::fsdp {

// The node of a leaf that accumulates its gradient: a shared_ptr up to LibTorch 2.6, an intrusive_ptr in 2.14.
using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

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
void after_node(const Accumulator& node, F f) {
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
void before_node(const Accumulator& node, F f) {
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

// Calls `f` at the end of the current backward. May be called only during backward.
inline void at_end_of_backward(std::function<void()> f) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(f));
}

}  // namespace tessera::fsdp

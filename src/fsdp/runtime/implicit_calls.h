#pragma once
// Calls of units that are not made through a Wrap: `blocks[i]->as<Block>()->forward(x)`, plain modules that a policy
// selected, and functions that use a parameter of a unit, such as a tied weight.
//
// Such a call is found by its ops. It begins before the first op that takes a parameter of a sharded unit, or a view of
// one, and ends before the first op that takes parameters of other units only, before a call through a Wrap, and at the
// end of forward. The results of its ops are the results of the call, so backward unshards the unit before it reaches
// any of them.
//
// A function of torch::autograd::Function computes without a graph and then adds itself to the graph, which is no op.
// Results of ops without a graph are therefore remembered until the next op with one.
//
// Ops are not seen if another thread calls them, or outside of forward. The parameters are sharded there, and their
// gradients are refused (Unit::use_accumulators).

#include <c10/core/TensorImpl.h>

#include <exception>
#include <memory>
#include <unordered_map>
#include <vector>

#include "fsdp/runtime/op_observer.h"
#include "fsdp/runtime/unit.h"

namespace tessera::fsdp {

class ImplicitCalls : public OpListener {
 public:
  // The units of the runtime must not change.
  explicit ImplicitCalls(Runtime& runtime);

  void before_op(c10::ArrayRef<const c10::IValue> inputs) noexcept override;
  void after_op(const std::vector<c10::IValue>& outputs) noexcept override;

  void finish() override;
  std::exception_ptr abandon() noexcept override;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct WithoutGraph {
    WeakTensor result;
    std::vector<std::shared_ptr<Call>> calls;
  };

  Unit* unit_of(const at::Tensor& tensor) const;
  void find_units(c10::ArrayRef<const c10::IValue> inputs);
  void begin(Unit& unit);
  void end_others();
  void hook_results_without_graph();

  Runtime& runtime_;
  std::unordered_map<const void*, Unit*> units_;  // by the tensors of parameters, and by the storages of unsharded ones
  std::vector<std::shared_ptr<Call>> open_;
  std::vector<Unit*>
      of_op_;  // the units whose parameters the current op takes, except for units that are called by a Wrap
  std::vector<WithoutGraph> without_graph_;
  std::exception_ptr failure_;
};

}  // namespace tessera::fsdp

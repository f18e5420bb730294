#pragma once
// A part of a model that is sharded separately, and the state of its calls.

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/autograd.h"
#include "tessera/fsdp/flat_param_handle.h"
#include "tessera/fsdp/wrap.h"

namespace tessera::fsdp {

class Runtime;

// One call of forward. Positions are those of CheckpointedRun.
struct Call {
  Unit& unit;
  std::uint64_t first;  // the position at which the unit was first called in the same forward
  std::uint64_t begin, end = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t first_node;                 // the number of the first node that it made
  bool in_full_precision = false;           // whether parameters had their own dtype
  bool is_repeated = false;                 // made in backward
  bool awaits_backward = false;             // is repeated, and its backward follows
  std::vector<WeakGraphNode> results = {};  // the nodes that run when backward reaches its results
  // While it is open: the number of the outermost traversal that has reached it, or kHasEnded after that traversal.
  std::uint64_t reached_by = 0;
  static constexpr std::uint64_t kHasEnded = std::numeric_limits<std::uint64_t>::max();
};

class Unit {
 public:
  // `handle` is null if all parameters of the model are in units inside it.
  Unit(Runtime& runtime, std::string name, std::unique_ptr<FlatParamHandle> handle, torch::nn::Module& module);
  ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  Runtime& runtime() const { return *runtime_; }
  const std::string& name() const { return name_; }
  // Returns the name for messages.
  std::string quoted_name() const;
  torch::nn::Module& module() const { return module_; }
  FlatParamHandle* handle() const { return handle_.get(); }
  // Makes this a unit of a model that contains the previous one, where its name is `name` and the names of its
  // parameters begin with `prefix`. Both models must be idle.
  void move_to(Runtime& runtime, std::string name, const std::string& prefix);

  // Makes the handle take the gradients that graphs accumulate which are recorded from now on. The parameters must be
  // unsharded.
  void hook_accumulators();
  // Makes other accumulators, for another dtype of the unsharded parameters. May be called only while they are sharded.
  void renew_accumulators();
  // Selects what graphs that are recorded from now on do with gradients of the parameters. If `on`, as during forward
  // and while backward has the unit open, they accumulate those of the unsharded parameters, also in parts that are
  // recorded before the unit is unsharded. If not, they refuse gradients: the parameters are shards then. Includes
  // parameters that were unfrozen since.
  void use_accumulators(bool on);

  // Whether what is gathered outlives the beginning of the next forward: after `unshard`, and after a backward under
  // no_sync with a strategy that does not reshard after forward.
  bool is_kept = false;
  bool is_summoned = false;          // unsharded by summon_full_params; of the model itself: all units are
  std::vector<Call*> running_calls;  // those through a Wrap that have not ended
  // Returns whether what this thread computes is in a call of the unit, which is unsharded then.
  bool is_in_use() const;

  // --- in a backward

  std::vector<std::weak_ptr<Call>> calls;         // those whose results have gradients, until their graphs end
  std::vector<std::shared_ptr<Call>> open_calls;  // reached by backward, and not known to have ended
  std::uint64_t first_call = 0;                   // the position of the unit's first call in the latest forward
  std::uint64_t prepared_in = 0;                  // the number of the backward that the gradient was prepared for
  bool was_shown = false;         // whether the gradient was made visible to a hook since it was prepared
  bool awaits_reduction = false;  // whether gradients were accumulated whose reduction has not been started
  bool awaits_hook = false;       // whether the gradient was reduced since the hook was called
  bool may_be_repeated = false;   // whether backward may make calls, such as those that checkpointed calls contain

 private:
  // Shared with the hooks, which may outlive the unit.
  struct Link {
    Unit* unit;
  };
  void on_gradient(std::size_t param);
  [[noreturn]] void refuse_gradient(std::size_t param) const;

  Runtime* runtime_;
  std::string name_;
  std::unique_ptr<FlatParamHandle> handle_;
  torch::nn::Module& module_;
  Wrappable* wrappable_;  // the module, or null if it is not held in a Wrap
  std::shared_ptr<Link> link_ = std::make_shared<Link>(Link{this});
  // By parameter: the node of the latest graphs that accumulates its gradient, which on_gradient follows, and the one
  // that refuses it. Each is made when it is first needed, and is the same in each forward.
  std::vector<GraphNode> hooked_, refusing_;
};

}  // namespace tessera::fsdp

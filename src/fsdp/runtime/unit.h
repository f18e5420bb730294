#pragma once
// A part of a model that is sharded separately, and the state of its calls.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/autograd.h"
#include "tessera/fsdp/flat_param_handle.h"
#include "tessera/fsdp/wrap.h"

namespace tessera::fsdp {

class Runtime;

// The graph nodes that accumulate the gradients of a unit's parameters. They are the same in each forward, unless the
// dtype of the parameters changes when they are unsharded.
struct Accumulators {
  std::vector<std::size_t> params;  // indices in the handle
  std::vector<Accumulator> nodes;   // one per element of `params`
  std::size_t waiting = 0;          // the number of gradients that have not arrived in this backward
  bool tells_end = true;            // whether the unit is no longer needed once all gradients have arrived
  std::uint64_t backward = 0;       // the number of the backward that `waiting` refers to
};

// One call of forward whose result has a gradient.
struct Call {
  Unit& unit;
  std::uint64_t first;  // when the unit was first called in the same forward, by the runtime's clock
  std::uint64_t begin, end = 0;
  std::shared_ptr<Accumulators> accumulators = nullptr;
  std::uint64_t backward = 0;                   // the number of the backward that reached the call last
  std::shared_ptr<const void> ahead = nullptr;  // counts it in the unit's calls_ahead(), until backward reaches it
  // Whether its gradients arrive from a graph of its own, which activation checkpointing records in backward. Other
  // calls of a unit share a graph, in which each gradient arrives once.
  bool has_own_graph = false;
  bool tells_end = true;  // whether backward no longer needs the unit once all gradients of the call have arrived
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

  // Returns the accumulators of the parameters, which must be unsharded; null if none requires a gradient.
  std::shared_ptr<Accumulators> accumulators();
  // Makes other accumulators, for another dtype of the unsharded parameters. May be called only while they are sharded.
  void renew_accumulators();
  // Selects what graphs that are recorded from now on do with gradients of the parameters. If `on`, as during forward
  // and while backward has the unit open, they accumulate those of the unsharded parameters, also in parts that are
  // recorded before the unit is unsharded. If not, they refuse gradients: the parameters are shards then. Includes
  // parameters that were unfrozen since.
  void use_accumulators(bool on);
  // Returns whether all gradients of the open calls have arrived.
  bool is_done() const;

  // Whether what is gathered outlives the beginning of the next forward: after `unshard`, and after a backward under
  // no_sync with a strategy that does not reshard after forward.
  bool is_kept = false;
  bool is_summoned = false;          // unsharded by summon_full_params; of the model itself: all units are
  std::vector<Call*> running_calls;  // those through a Wrap that have not ended
  // Returns whether a call is running, or backward has reached one: the unit is unsharded then.
  bool is_in_use() const { return !running_calls.empty() || !open_calls.empty(); }

  // --- in a backward

  std::vector<std::shared_ptr<Call>> open_calls;  // reached by backward, and not known to have ended
  std::shared_ptr<const void> ahead;              // see calls_ahead(); calls that it counts have a copy
  // Returns the number of calls that backward may reach and has not reached. Calls end with their graph.
  std::int64_t calls_ahead() const { return ahead.use_count() - 1; }
  std::uint64_t first_call = 0;   // the clock at the unit's first call in the latest forward
  std::uint64_t prepared_in = 0;  // the number of the backward that the gradient was prepared for
  bool awaits_reduction = false;  // whether a backward under no_sync left it to the next one
  bool awaits_hook = false;       // whether the gradient was reduced since the hook was called
  bool may_be_repeated = false;   // whether checkpointed calls contain calls, which calls_ahead() does not count

 private:
  // Shared with the hooks, which may outlive the unit.
  struct Link {
    Unit* unit;
  };
  void on_gradient(const void* node, std::size_t param);
  [[noreturn]] void refuse_gradient(std::size_t param) const;

  Runtime* runtime_;
  std::string name_;
  std::unique_ptr<FlatParamHandle> handle_;
  torch::nn::Module& module_;
  Wrappable* wrappable_;  // the module, or null if it is not held in a Wrap
  std::shared_ptr<Link> link_ = std::make_shared<Link>(Link{this});
  std::shared_ptr<Accumulators> accumulators_;          // the latest
  std::vector<std::weak_ptr<Accumulators>> in_graphs_;  // these, and those of graphs that were recorded before
  std::vector<Accumulator> hooked_;                     // by parameter: the node that on_gradient follows
  std::vector<Accumulator> refusing_;                   // by parameter; made when first needed
};

}  // namespace tessera::fsdp

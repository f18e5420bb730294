#pragma once
// Schedules when a model's units are unsharded and resharded, and when their gradients are reduced.
//
// backward.cpp states when the backward of a unit is over.

#include <torch/nn/module.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/runtime/implicit_calls.h"
#include "fsdp/runtime/unit.h"
#include "fsdp/streams.h"
#include "tessera/base/function_ref.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"

namespace tessera::fsdp {

struct FoundUnit;

class Runtime {
 public:
  Runtime(std::shared_ptr<torch::nn::Module> module, const ProcessGroup& group, Options options);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Returns the runtime of the model that is this module, null if there is none.
  static Runtime* of(const torch::nn::Module& module);
  // Throws Error(invalid_argument) if the model is a part of another one that was sharded since.
  void check_not_released() const;

  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  const ProcessGroup& group() const { return group_; }
  const Options& options() const { return options_; }
  Unit& root() const { return *root_; }
  // The units with parameters; the root first if it has any.
  const std::vector<Unit*>& units() const { return units_; }
  bool is_idle() const { return !in_forward_ && !in_backward_; }
  double communication_seconds() const { return std::chrono::duration<double>(waited_).count(); }
  // Throws Error(invalid_argument) unless idle. `function` is the name of the caller.
  void check_idle(std::string_view function);
  // Cleans up after a backward that threw, if that has not been done.
  void recover();

  // Returns all groups whose ranks have a part of the model: those of units, the model's own, the replicas, and the
  // groups along the dimensions of a tensor parallel model's mesh.
  const std::vector<ProcessGroup>& groups() const { return groups_; }
  // Returns whether a unit of any rank has a group of its own.
  bool has_own_groups() const { return has_own_groups_; }
  // Returns whether this is a parameter of a unit of this rank.
  bool has_param(const std::string& fqn) const { return params_.contains(fqn); }
  // Returns whether this is a parameter of a unit that only other ranks have.
  bool is_of_other_ranks(const std::string& fqn) const { return of_other_ranks_.contains(fqn); }
  // Throws Error(unsupported) if a rank lacks parameters of units that have groups of their own.
  void check_has_all_params(std::string_view function) const;
  // Returns the group that shards the unit; that of the model for null and for a unit without parameters.
  const ProcessGroup& group_of(const Unit* unit) const;
  // As ProcessGroup::check_call and agree, for all ranks of all groups. `describe` adds arguments that must be equal on
  // the ranks that shard a unit.
  void check_call(std::string_view operation, FunctionRef<void(CallArguments&)> check,
                  FunctionRef<void(const Unit& unit, CallArguments&)> describe = nullptr) const;
  void agree(std::string_view step, std::exception_ptr failure) const;

  // Casts the buffers to buffer_dtype of their units, or back to their own dtypes.
  void cast_buffers(bool own_dtype);

  bool syncs_gradients = true;
  std::function<void(std::size_t unit)> post_reduce_hook;  // may be null
  bool has_comm_hook = false;                              // of any unit
  bool is_summoned = false;  // units are unsharded, and their calls are plain calls of the modules
  // Throws Error(invalid_argument) unless the unit is unsharded by summon_full_params.
  void check_summoned(const Unit& unit) const;
  // Returns the units that have parameters of `module`; without `recurse` the unit that it belongs to. Throws
  // Error(invalid_argument) if it is not in the model.
  std::vector<Unit*> units_of(const torch::nn::Module& module, bool recurse) const;
  // Returns the unit that the module's own parameters belong to, null if there is none.
  Unit* unit_of(const torch::nn::Module& module) const;

  // --- forward

  // Starts to gather the units of units_of() before they are called. A collective, which compares the ranks' calls
  // outside of forward only.
  UnshardHandle unshard(const torch::nn::Module& module, bool recurse);
  UnshardHandle unshard(Unit& unit);
  // Frees what is gathered of these units. A collective.
  void reshard(const torch::nn::Module& module, bool recurse);

  // With `may_have_gradient` backward may reach the call. `is_implicit`: it is not made through a Wrap.
  std::shared_ptr<Call> begin_call(Unit& unit, bool may_have_gradient, bool is_implicit = false);
  void cast_input(const Unit& unit, at::Tensor& tensor) const;
  // `tensor` is an argument of the call.
  void hook_input(const std::shared_ptr<Call>& call, const at::Tensor& tensor);
  // `tensor` is a result of the call.
  void hook_output(const std::shared_ptr<Call>& call, const at::Tensor& tensor);
  // `node` is that of a result of the call.
  void hook_node(const std::shared_ptr<Call>& call, const GraphNode& node);
  void end_call(const std::shared_ptr<Call>& call);
  // Called instead of end_call if forward threw.
  void abandon_call(const std::shared_ptr<Call>& call);
  // Lets the other ranks know that the unit's forward threw `why`.
  void report_failure(const Unit& unit, const std::exception_ptr& why) noexcept;

  const std::shared_ptr<ImplicitCalls>& implicit_calls() const { return implicit_calls_; }
  // Throws Error(unsupported) if calls of the unit must be made through a Wrap.
  void check_implicit_call(const Unit& unit) const;
  // Returns whether backward may reach calls that are made now, even where gradients are disabled.
  bool records_graph() const { return in_backward_ || forward_records_graph_; }

  // --- backward

  const std::shared_ptr<Streams>& streams() const { return streams_; }

 private:
  // Returns whether what must be equal on the ranks of `unit_group` is compared in `group`. The units of the model's
  // group are compared in all groups but those of other units.
  bool is_compared_in(const ProcessGroup& group, const ProcessGroup& unit_group) const;
  void find_and_compare(std::vector<FoundUnit>& found);
  std::unique_ptr<Unit> make_unit(const FoundUnit& found, std::exception_ptr& failure);
  void take_units(const std::vector<FoundUnit>& found);
  std::unique_ptr<Unit> release(Unit& unit);
  std::shared_ptr<Call> try_to_begin_call(Unit& unit, bool may_have_gradient, bool is_implicit);
  void begin_forward();
  void begin_repeated_forward();
  void end_repeated_call(Call& call);
  void end_forward(bool has_gradient);
  void leave_forward();
  void meet();
  void abandon();
  void check_parameters() const;
  void prepare_for_forward(Unit& unit);
  bool use_full_precision(bool on);
  UnshardHandle unshard(FunctionRef<std::vector<Unit*>()> units);
  struct Event {
    const Unit* unit;  // null: the end of forward
    bool is_call;      // or unshard()
    bool operator==(const Event& other) const { return unit == other.unit && is_call == other.is_call; }
  };
  void check_order(const Event& next);
  void check_order_with_before(const Event& next);
  void unshard_for_call(Unit& unit);
  void check_kept(Unit& unit) const;
  void begin_step();
  void end_step();
  void make_room(bool is_prefetched);
  void prefetch(Unit& unit);
  void prefetch_forward();
  void prefetch_backward(const Unit& unit);
  bool is_last_call() const;
  void pre_backward(const std::shared_ptr<Call>& call, const torch::autograd::Node* node);
  void begin_backward(const torch::autograd::Node* node, bool in_full_precision);
  // A backward of autograd that reaches calls of the model, with the backwards of the calls that it repeats. A backward
  // that a hook computes is another traversal, inside of it.
  struct Traversal {
    const void* of;                 // CheckpointedRun::outermost_backward()
    std::weak_ptr<const void> end;  // expires with that backward
    std::uint64_t number;           // larger than those of the traversals that began before it
    // The calls that are in its graphs, and whether they are ahead: not reached yet.
    std::map<std::weak_ptr<Call>, bool, std::owner_less<std::weak_ptr<Call>>> calls;
  };
  Traversal& traversal(const torch::autograd::Node* node);
  void begin_traversal(const std::weak_ptr<const void>& end, const torch::autograd::Node* node);
  void end_traversal(std::uint64_t number);
  void find_calls_ahead(Traversal& in, const torch::autograd::Node* node) const;
  bool has_call_ahead(const Unit& unit) const;
  void write_back_before_backward();
  void check_precision(const Call& call) const;
  class Backward;
  class BackwardEnd;
  // Runs `f`, a part of backward, and keeps the reason if it throws.
  template <typename F>
  void in_backward(const F& f);
  void note_failure(const std::exception_ptr& why) noexcept;
  void open(const std::shared_ptr<Call>& call);
  void complete_after(std::uint64_t position, std::uint64_t number);
  void complete(Unit& unit);
  void finish_reductions_of(const Unit& unit);
  void start_reduction(Unit& unit);
  void reshard_after_backward(Unit& unit);
  void finish_oldest_reduction();
  void call_post_reduce_hook(Unit& unit);
  void complete_all();
  void end_backward();

  std::shared_ptr<torch::nn::Module> module_;
  ProcessGroup group_;
  std::vector<ProcessGroup> groups_;
  std::vector<ProcessGroup> own_groups_;  // of units, on this rank; the first of groups_
  bool has_own_groups_ = false;           // on any rank
  bool has_all_params_ = true;            // every rank of the group
  bool is_released_ = false;              // the units are those of a model that contains this one
  std::set<std::string> of_other_ranks_;
  Options options_;
  std::vector<std::unique_ptr<Unit>> owned_;
  Unit* root_ = nullptr;
  std::vector<Unit*> units_;
  std::shared_ptr<Streams> streams_;
  bool has_offloaded_params_ = false;
  std::map<const torch::nn::Module*, Unit*> unit_of_;  // the unit that a module's own parameters belong to
  std::map<std::string, at::Tensor> params_;           // of all units, by each of their names
  std::shared_ptr<ImplicitCalls> implicit_calls_;
  struct Buffer {
    at::Tensor tensor;
    at::ScalarType dtype, compute_dtype;  // the original one, and that of forward and backward
  };
  std::vector<Buffer> buffers_;  // those whose unit has a buffer_dtype

  bool in_forward_ = false, in_backward_ = false, is_order_checked_ = false;
  bool forward_records_graph_ = false;  // whether gradients were enabled at the beginning of the latest forward
  const bool full_precision_in_eval_;   // FSDP_USE_FULL_PREC_IN_EVAL, read by the constructor
  bool in_full_precision_ = false;
  std::vector<Unit*> calls_, before_;  // the calls of this forward, and of the previous one
  std::vector<Event> events_;          // what ranks have in common: those of units that are not on this rank alone
  std::vector<Event> events_before_;   // of the previous forward
  std::size_t expected_ = 0;           // the index in events_before_ of the event that is expected next
  std::vector<Unit*> ended_;           // units in the order in which their first calls ended that backward may reach

  std::uint64_t backward_ = 0;               // the number of backwards that have begun
  std::shared_ptr<Backward> last_backward_;  // the latest one
  std::uint64_t traversal_count_ = 0;        // the number of traversals that have begun
  std::vector<Traversal> traversals_;        // those of this backward, each inside of the previous one
  std::vector<Unit*> open_;                  // reached by backward and not completed, in the order of their calls
  std::deque<Unit*> reducing_;
  std::chrono::steady_clock::duration waited_{};
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // for hooks, which may outlive the runtime
};

}  // namespace tessera::fsdp

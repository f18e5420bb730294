#pragma once
// When the units of a model are put together and taken apart, and their gradients reduced.
//
// In which order. The engine runs a backward's nodes from the latest made to the first, as far as they are ready, and
// the nodes that add up a gradient at once. So when it reaches a result of a call, whatever was called after that call
// had ended is over, be it that all its gradients have come or that some never will. Units are completed (taken apart,
// and their reduction begun) from the last called to the first, each when its gradients have come or the engine has
// gone past it. That order is the same on all ranks, also where a parameter has a gradient on some of them only.

#include <torch/nn/module.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "fsdp/runtime/unit.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"

namespace tessera::fsdp {

class Runtime {
 public:
  Runtime(std::shared_ptr<torch::nn::Module> module, const ProcessGroup& group, Options options);
  ~Runtime();

  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  const ProcessGroup& group() const { return group_; }
  const Options& options() const { return options_; }
  Unit& root() const { return *root_; }
  /// Those with parameters; the root first if it has any.
  const std::vector<Unit*>& units() const { return units_; }
  bool is_idle() const { return !in_forward_ && !in_backward_; }
  double communication_seconds() const { return std::chrono::duration<double>(waited_).count(); }
  // Throws Error(invalid_argument) unless it is idle.
  void check_idle(std::string_view what) const;

  // To what options say, or back to what they were.
  void cast_buffers(bool own_dtype);

  bool syncs_gradients = true;
  bool is_summoned = false;  // all is whole, and calls are those of the modules

  // --- forward

  std::shared_ptr<Call> begin_call(Unit& unit);
  void cast_input(const Unit& unit, at::Tensor& tensor) const;
  void hook_output(const std::shared_ptr<Call>& call, const at::Tensor& tensor);
  void end_call(const std::shared_ptr<Call>& call, bool has_gradient);
  // After a forward that threw.
  void abandon_call(const std::shared_ptr<Call>& call);

  // --- backward

  // Which one; it counts those that have begun.
  std::uint64_t backward() const { return backward_; }
  void complete_what_is_done();

 private:
  void begin_forward();
  void end_forward(bool has_gradient);
  void abandon();
  void check_order(const Unit* unit);
  void unshard(Unit& unit);
  void prefetch_forward();
  void prefetch_backward(const Unit& unit);
  bool is_last_call() const;
  void pre_backward(const std::shared_ptr<Call>& call);
  void begin_backward();
  void open(const std::shared_ptr<Call>& call);
  void complete_after(std::uint64_t end);
  void complete(Unit& unit);
  void finish_oldest_reduction();
  void end_backward();

  std::shared_ptr<torch::nn::Module> module_;
  ProcessGroup group_;
  Options options_;
  std::vector<std::unique_ptr<Unit>> owned_;
  Unit* root_ = nullptr;
  std::vector<Unit*> units_;
  struct Buffer {
    at::Tensor tensor;
    at::ScalarType dtype;  // its own
  };
  std::vector<Buffer> buffers_;  // of floating point

  bool in_forward_ = false, in_backward_ = false, is_order_checked_ = false;
  const bool full_precision_in_eval_;  // as the environment said
  bool in_full_precision_ = false;
  std::uint64_t clock_ = 0;            // of beginnings and ends of calls
  std::vector<Unit*> calls_, before_;  // of this forward, of the one before
  std::vector<Unit*> ended_;           // each unit once, in the order in which its calls ended first

  std::uint64_t backward_ = 0;
  std::vector<Unit*> open_;  // reached in backward, in the order of their calls
  std::deque<Unit*> reducing_;
  std::chrono::steady_clock::duration waited_{};
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // for the hooks, which outlive this
};

}  // namespace tessera::fsdp

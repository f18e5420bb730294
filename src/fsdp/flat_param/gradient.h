#pragma once
// The gradient of a flat parameter: accumulated unsharded, reduced over the ranks, stored sharded.
//
// A gradient passes through these states:
//
//   none          no tensor is defined
//   accumulating  take() has moved gradients of parameters into unsharded_, or into pieces_ where ranks reduce these
//                 through memory that they share
//   reducing      start_reduce() has replaced unsharded_ by a pending reduction
//   sharded       finish_reduce() has added the result to sharded_, this rank's shard of the average. If a backend
//                 completes on streams, start_reduce() has enqueued that as well.
//
// They may overlap: backward passes under no_sync accumulate while the result of an earlier one is sharded, and a unit
// that is called again accumulates while its last reduction is pending. Hence each state is a tensor of its own.
//
// Invariants between calls:
//   - unsharded_, or pieces_[i], is defined if and only if has_[i].unsharded for some i, or this one. Elements of other
//     parameters, and padding, are uninitialized until start_reduce() sets them to 0.
//   - inputs_ is not empty if and only if a reduction is pending. The caller finishes it before it starts another.
//   - Memory belongs to the stream of the computation. On a device, the reduction and the sum into sharded_ run on the
//   reduce stream, with replicas the last part on the
//     replicas stream. finish_reduce() makes the current stream wait for it, and frees what was reduced after that.
//   - With parameters on CPU, landing_ is what was copied there and not added to sharded_. The host waits for the copy
//     when it needs sharded_.
//   - has_[i].sharded implies that sharded_ is defined. A parameter that is frozen keeps its gradient.
//   - `grad` of the parameters is undefined after prepare_for_backward(). After prepare_for_optim() it is visible(i),
//     or, without use_orig_params, that of the flat parameter is unsharded_ or else sharded_. These share memory with
//     this object, so changes that the user makes in place are kept. Only gradients that unshard() sets are not read
//     back before write_back_unsharded().

#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/streams.h"
#include "tessera/fsdp/flat_param_handle.h"

namespace tessera::fsdp {

// Each function implements the one of FlatParamHandle that is documented there.
class FlatParamGradient {
 public:
  // The handle outlives this object. Its layout, parameters and shard must have been set.
  explicit FlatParamGradient(const FlatParamHandle& handle);

  void prepare_for_backward();
  void drop_reset();
  void adopt_visible();
  void take(std::size_t param);
  bool has_unsharded() const;
  void set_comm_hook(CommHook hook);
  void start_reduce();
  void continue_reduce();
  void finish_reduce();
  void prepare_for_optim();
  const at::Tensor& sharded() const { return sharded_; }
  void unshard();
  void write_back_unsharded();

 private:
  void expect_no_reduction(std::string_view function) const;
  at::Tensor visible(std::size_t param) const;
  void drop();
  void free_unused();
  void free_sharded();
  void take_user_gradient(std::size_t param, const at::Tensor& grad);
  void take_piece(std::size_t param, const at::Tensor& grad);
  bool can_reduce_pieces() const;
  void start_reduce_pieces();
  void flatten_pieces();
  void zero_missing_params();
  int averaged_ranks() const;
  void prepare_sharded(const at::Tensor& reduced);
  void complete();
  void accumulate(const at::Tensor& reduced);
  void land();

  const FlatParamHandle& handle_;
  const bool fakes_reduce_;  // FSDP_USE_FAKE_REDUCE, read by the constructor
  at::ScalarType reduce_dtype_;

  const bool keeps_pieces_;         // whether pieces_ is used
  at::Tensor unsharded_;            // of the handle's compute_dtype_
  std::vector<at::Tensor> pieces_;  // the same by parameter, in its shape and strides; as backward has allocated them
  std::vector<at::Tensor> inputs_;  // of the pending reduction: unsharded_, and a copy in reduce_dtype_
  at::Tensor reduced_;              // its result, until that is added to sharded_
  PendingCollective reduction_;
  Mark completed_;                       // on the stream that adds to sharded_
  bool is_over_replicas_ = false;        // whether reduction_ is the second one, over the replicas
  bool is_averaged_ = false;             // whether reduced_ needs no division
  CommHook comm_hook_;                   // null: the average over the ranks
  std::function<void()> finish_reduce_;  // of the hook, if it reduces
  at::Tensor fresh_;                     // becomes sharded_
  at::Tensor sharded_, landing_;
  at::Tensor spare_;  // memory of a sharded gradient that was freed
  struct HasGradient {
    bool unsharded = false, sharded = false;  // in unsharded_, in sharded_
    bool awaited = false;  // of the next reduction; the same on all ranks, unless this rank's gradient was reset since
  };
  std::vector<HasGradient> has_;  // by parameter
};

}  // namespace tessera::fsdp

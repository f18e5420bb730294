#include "tessera/fsdp/flat_param_handle.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "fsdp/environment.h"
#include "fsdp/flat_param/gradient.h"
#include "fsdp/flat_param/storage.h"
#include "fsdp/streams.h"
#include "fsdp/warn.h"
#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/comm/internal/shared_memory.h"

namespace tessera::fsdp {

namespace {

constexpr char kMake[] = "make a flat parameter";

std::string_view name_of(at::ScalarType dtype) { return c10::toString(dtype); }

void check(const std::vector<NamedParameter>& params, const FlatParamOptions& options) {
  if (options.replicas.has_value() != is_hybrid(options.strategy)) {
    fail(ErrorCode::invalid_argument, "replicas are {}, expected {}", options.replicas ? "given" : "missing",
         options.replicas ? "none without a hybrid strategy" : "a group with a hybrid strategy");
  }
  for (const NamedParameter& named : params) {
    const at::Tensor& param = named.parameter;
    const auto refuse = [&](std::string_view why) {
      fail(ErrorCode::invalid_argument, "parameter '{}' {}", printable(named.fqn), why);
    };
    if (!param.defined()) refuse("is undefined, expected a tensor");
    if (FlatParamHandle::has(param)) refuse("belongs to a flat parameter already, expected a parameter of no handle");
    if (FlatParamHandle::is_left_over(param)) {
      refuse("is a shard of a flat parameter that was destroyed, expected full parameters: assign them with set_data");
    }
    if (param.layout() != at::kStrided) refuse("is not strided, expected a strided tensor");
    if (!param.is_floating_point()) {
      refuse(fmt::format("has dtype {}, expected a floating-point dtype", name_of(param.scalar_type())));
    }
    if (!param.is_leaf()) refuse("is the result of an operation, expected a leaf");
    const at::Tensor& first = params.front().parameter;
    const auto refuse_unlike = [&](std::string_view found, const auto& value, const auto& expected) {
      refuse(fmt::format("{} {}, expected {} as '{}'", found, value, expected, printable(params.front().fqn)));
    };
    if (param.scalar_type() != first.scalar_type()) {
      refuse_unlike("has dtype", name_of(param.scalar_type()), name_of(first.scalar_type()));
    }
    if (param.device() != first.device()) refuse_unlike("is on", param.device().str(), first.device().str());
    if (!options.use_orig_params && param.requires_grad() != first.requires_grad()) {
      refuse_unlike("has requires_grad", param.requires_grad(), first.requires_grad());
    }
  }
}

// Returns the tensor to flatten for a parameter.
at::Tensor flattened(const std::string& fqn, const at::Tensor& param, const FlatParamOptions& options) {
  return options.extensions ? options.extensions->pre_flatten_transform(fqn, param.detach()) : param.detach();
}

FlatParamLayout make_layout(const std::vector<NamedParameter>& params, const ProcessGroup& group,
                            const FlatParamOptions& options) {
  std::vector<FlatParamInput> inputs;
  for (const NamedParameter& named : params) {
    const at::Tensor flat = flattened(named.fqn, named.parameter, options);
    inputs.push_back({named.fqn, flat.sizes().vec(), flat.strides().vec(),
                      reinterpret_cast<std::uintptr_t>(named.parameter.unsafeGetTensorImpl())});
  }
  FlatParamLayout::Options layout;
  if (is_sharded(options.strategy)) layout.world_size = group.size();
  if (options.use_orig_params && !params.empty()) {
    const at::ScalarType dtype = options.mixed_precision.param_dtype.value_or(params[0].parameter.scalar_type());
    layout.aligned_numel = FlatParamLayout::aligned_numel_of(static_cast<std::int64_t>(c10::elementSize(dtype)));
  }
  return {std::move(inputs), layout};
}

// Adds all that must be equal on all ranks.
void describe(const FlatParamLayout& layout, const std::vector<NamedParameter>& params, const FlatParamOptions& options,
              CallArguments& arguments) {
  const auto dtype_of = [](const std::optional<at::ScalarType>& dtype) { return dtype ? name_of(*dtype) : "its own"; };
  arguments.add("strategy", static_cast<int>(options.strategy))
      .add("param_dtype", dtype_of(options.mixed_precision.param_dtype))
      .add("reduce_dtype", dtype_of(options.mixed_precision.reduce_dtype))
      .add("use_orig_params", options.use_orig_params)
      .add("dtype", name_of(params.front().parameter.scalar_type()));
  for (const ParamInfo& param : layout.params()) {
    const auto found = std::find_if(params.begin(), params.end(), [&](const auto& p) { return p.fqn == param.fqn; });
    arguments.add("parameter", fmt::format("'{}' {} {}{}", printable(param.fqn), shape_to_string(param.shape),
                                           shape_to_string(param.strides),
                                           found->parameter.requires_grad() ? " that requires grad" : ""));
  }
  for (const SharedParamInfo& shared : layout.shared_params()) {
    arguments.add("parameter", fmt::format("'{}' = parameter {}", printable(shared.fqn), shared.primary));
  }
}

FlatParamLayout agreed_layout(const std::vector<NamedParameter>& params, const ProcessGroup& group,
                              const FlatParamOptions& options) {
  std::optional<FlatParamLayout> layout;
  group.check_call(kMake, [&](CallArguments& arguments) {
    check(params, options);
    layout = make_layout(params, group, options);
    describe(*layout, params, options, arguments);
  });
  return *std::move(layout);
}

// The tensors of all handles of this process, and the shards that destroyed handles have left. They look like any
// tensor.
class HandledTensors {
 public:
  static HandledTensors& all() {
    static auto& tensors = *new HandledTensors;  // handles may be destroyed after static objects
    return tensors;
  }
  void add(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    handled_.insert(tensor.unsafeGetTensorImpl());
    std::erase_if(left_, [](const auto& entry) { return entry.second.tensor.expired(); });
  }
  // With `is_shard` the tensor is left without the elements of other ranks.
  void remove(const at::Tensor& tensor, bool is_shard) {
    const std::lock_guard lock(mutex_);
    handled_.erase(tensor.unsafeGetTensorImpl());
    if (is_shard) left_.insert_or_assign(tensor.unsafeGetTensorImpl(), Left(tensor));
  }
  bool contains(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    return handled_.count(tensor.unsafeGetTensorImpl()) != 0;
  }
  bool was_left(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    const auto found = left_.find(tensor.unsafeGetTensorImpl());
    return found != left_.end() && found->second.storage == tensor.storage().getWeakStorageImpl();
  }

 private:
  struct Left {
    explicit Left(const at::Tensor& left)
        : tensor(left.getIntrusivePtr()), storage(left.storage().getWeakStorageImpl()) {}
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;  // so that its address is not used again
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;                          // another one after set_data
  };

  std::mutex mutex_;
  std::unordered_set<const void*> handled_;
  std::unordered_map<const void*, Left> left_;
};

// Reports the elements of the flat parameter that no parameter has, if the environment asks for it.
void explain_padding(const FlatParamLayout& layout, const ProcessGroup& group) {
  if (!explains_itself() || group.rank() != 0) return;
  std::int64_t numel = 0;
  for (const ParamInfo& param : layout.params()) numel += param.numel;
  const std::int64_t padded = layout.padded_unsharded_numel();
  if (padded == numel) return;
  warn_once(
      fmt::format("{}: the parameters from '{}' on have {} elements and the flat parameter {}: {} are padding, "
                  "which aligns parameters and makes the shards of {} ranks equal",
                  kMake, printable(layout.params()[0].fqn), numel, padded, padded - numel, layout.world_size()));
}

// Returns whether tensors of one dtype are equal, NaN to itself.
bool have_same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.view(at::kByte), b.view(at::kByte));
}

// Returns the elements of a dense tensor in memory order.
at::Tensor in_memory_order(const at::Tensor& tensor) { return tensor.detach().as_strided({tensor.numel()}, {1}); }

}  // namespace

FlatParamHandle::Switches FlatParamHandle::Switches::now() {
  const Switches now{is_set("FSDP_SKIP_WRITEBACK_CHECK"), is_set("FSDP_USE_FAKE_ALL_GATHER")};
  if (now.skips_writeback) {
    warn_once("FSDP_SKIP_WRITEBACK_CHECK=1: data that is assigned to sharded parameters is not used");
  }
  if (now.fakes_all_gather) {
    warn_once("FSDP_USE_FAKE_ALL_GATHER=1: nothing is gathered, and training results are meaningless");
  }
  return now;
}

at::Tensor FlatParamExtensions::pre_flatten_transform(const std::string& /*fqn*/, const at::Tensor& parameter) {
  return parameter;
}
at::Tensor FlatParamExtensions::post_unflatten_transform(const std::string& /*fqn*/, const at::Tensor& view) {
  return view;
}

FlatParamHandle::FlatParamHandle(const std::vector<NamedParameter>& params, const ProcessGroup& group,
                                 const FlatParamOptions& options)
    : options_(options),
      group_(group),
      layout_(agreed_layout(params, group, options)),
      streams_(std::make_shared<Streams>(options.device)) {
  const c10::NoGradGuard no_grad;
  const at::ScalarType dtype = params.front().parameter.scalar_type();
  compute_dtype_ = options_.mixed_precision.param_dtype.value_or(dtype);
  for (const ParamInfo& info : layout_.params()) {
    const auto found = std::find_if(params.begin(), params.end(), [&](const auto& p) { return p.fqn == info.fqn; });
    params_.push_back(found->parameter);
  }
  const std::shared_ptr<comm::SharedMemory> host = make_host_memory();
  flat_param_ = make_shard(dtype, host);
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const std::optional<ShardParamInfo> info = layout_.shard_param_info(shard_rank(), i);
    if (!info) continue;
    piece_of(flat_param_, i)
        .copy_(in_memory_order(flattened(layout_.params()[i].fqn, params_[i], options_))
                   .narrow(0, info->intra_param_start_idx, info->numel_in_shard));
  }
  computing_ = make_unsharded(compute_dtype_, host);
  if (compute_dtype_ != dtype) full_precision_ = make_unsharded(dtype);
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const bool has_view = options_.use_orig_params || !is_sharded(options_.strategy);
    sharded_views_.push_back(has_view ? sharded_view_of(flat_param_, i) : flat_param_.detach().narrow(0, 0, 0));
    flat_param_.set_requires_grad(flat_param_.requires_grad() || params_[i].requires_grad());
  }
  gradient_ = std::make_unique<FlatParamGradient>(*this);
  set_params(sharded_views_);
  explain_padding(layout_, group_);
  for (const at::Tensor& param : params_) HandledTensors::all().add(param);
  HandledTensors::all().add(flat_param_);
}

FlatParamHandle::~FlatParamHandle() {
  const bool leaves_shards = is_sharded(options_.strategy);
  for (const at::Tensor& param : params_) HandledTensors::all().remove(param, leaves_shards);
  HandledTensors::all().remove(flat_param_, leaves_shards);
}

bool FlatParamHandle::has(const at::Tensor& parameter) { return HandledTensors::all().contains(parameter); }
bool FlatParamHandle::is_left_over(const at::Tensor& parameter) { return HandledTensors::all().was_left(parameter); }

at::Device FlatParamHandle::shard_device() const {
  return options_.offload_params ? at::Device(at::kCPU) : options_.device;
}

at::Tensor FlatParamHandle::make_shard(at::ScalarType dtype, const std::shared_ptr<comm::SharedMemory>& host) const {
  if (host != nullptr && dtype == compute_dtype_) return part_of(*host).zero_();
  const at::TensorOptions options = at::TensorOptions().dtype(dtype).device(shard_device());
  if (shard_device() == options_.device) return empty_flat(layout_.sharded_numel(), options).zero_();
  return at::zeros({layout_.sharded_numel()}, options.pinned_memory(true));  // copies do not block the host
}

// Returns an unsharded flat parameter, without memory unless it shares the shard's.
FlatParamHandle::Unsharded FlatParamHandle::make_unsharded(at::ScalarType dtype,
                                                           std::shared_ptr<comm::SharedMemory> host) const {
  Unsharded unsharded;
  if (host != nullptr) {
    unsharded.flat = at::from_blob(
        host->view()->data(), {layout_.padded_unsharded_numel()}, [view = host->view()](void*) {},
        at::TensorOptions().dtype(dtype));
  } else if (is_sharded(options_.strategy) || dtype != flat_param_.scalar_type() || shard_device() != options_.device) {
    unsharded.flat =
        empty_flat(layout_.padded_unsharded_numel(), at::TensorOptions().dtype(dtype).device(options_.device));
  } else {
    unsharded.flat = flat_param_.detach();
  }
  unsharded.host = std::move(host);
  unsharded.views = unflatten_as(unsharded.flat);  // extensions may read it, so its memory is freed after this
  if (!unsharded.flat.is_alias_of(flat_param_)) free_storage(unsharded.flat);
  return unsharded;
}

std::vector<at::Tensor> FlatParamHandle::unsharded_flat_params() const {
  std::vector<at::Tensor> flats{computing_.flat};
  if (full_precision_.flat.defined()) flats.push_back(full_precision_.flat);
  return flats;
}

void FlatParamHandle::with_unsharded_shapes(FunctionRef<void()> f) {
  set_params(unsharded_->views);
  f();
  set_params(sharded_views_);
}

bool FlatParamHandle::requires_grad() const {
  if (!options_.use_orig_params) return flat_param_.requires_grad();
  return std::any_of(params_.begin(), params_.end(), [](const at::Tensor& param) { return param.requires_grad(); });
}

// Returns parameter `i` in the shape that was flattened, in a tensor of the size of the unsharded flat parameter.
at::Tensor FlatParamHandle::flat_view_of(const at::Tensor& unsharded, std::size_t i) const {
  const ParamInfo& info = layout_.params()[i];
  return unsharded.detach().as_strided(info.shape, info.strides, info.offset);
}

// Returns parameter `i` as the model uses it.
at::Tensor FlatParamHandle::view_of(const at::Tensor& unsharded, std::size_t i) const {
  const at::Tensor view = flat_view_of(unsharded, i);
  return options_.extensions ? options_.extensions->post_unflatten_transform(layout_.params()[i].fqn, view) : view;
}

std::vector<at::Tensor> FlatParamHandle::unflatten_as(const at::Tensor& flat) const {
  std::vector<at::Tensor> views;
  for (std::size_t i = 0; i < params_.size(); ++i) views.push_back(view_of(flat, i));
  return views;
}

at::Tensor FlatParamHandle::piece_of(const at::Tensor& shard, std::size_t i) const {
  const ShardParamInfo info = layout_.shard_param_info(shard_rank(), i).value_or(ShardParamInfo());
  return shard.detach().narrow(0, info.offset_in_shard, info.numel_in_shard);
}

// Returns parameter `i` as it looks while sharded, in a tensor of the size of a shard.
at::Tensor FlatParamHandle::sharded_view_of(const at::Tensor& shard, std::size_t i) const {
  return is_sharded(options_.strategy) ? piece_of(shard, i) : view_of(shard, i);
}

at::Tensor FlatParamHandle::flattened_form(const at::Tensor& full, std::size_t i) const {
  return flattened(layout_.params()[i].fqn, full, options_);
}

at::Tensor FlatParamHandle::piece_of_full(const at::Tensor& full, std::size_t i) const {
  const ParamInfo& info = layout_.params()[i];
  const ShardParamInfo part = layout_.shard_param_info(shard_rank(), i).value_or(ShardParamInfo());
  at::Tensor ordered = full.detach();
  if (ordered.strides() != at::IntArrayRef(info.strides)) {
    ordered = at::empty_strided(info.shape, info.strides, ordered.options()).copy_(ordered);
  }
  return in_memory_order(ordered).narrow(0, part.intra_param_start_idx, part.numel_in_shard);
}

void FlatParamHandle::set_params(const std::vector<at::Tensor>& views) {
  for (std::size_t i = 0; i < params_.size(); ++i) params_[i].set_data(views[i]);
}

// --- parameters

void FlatParamHandle::use_streams(std::shared_ptr<Streams> streams) { streams_ = std::move(streams); }

void FlatParamHandle::start_unshard() {
  if (unsharded_->is_gathered || unsharded_->flat.is_alias_of(flat_param_)) return;
  const c10::NoGradGuard no_grad;
  if (unsharded_->host != nullptr) return start_unshard_in_host_memory();
  if (!streams_->is_in_step) streams_->wait_for_current();
  const at::Tensor &flat = unsharded_->flat, shard = flat_param_.detach();
  at::Tensor input = shard;
  if (input.device() != flat.device() || input.scalar_type() != flat.scalar_type()) {
    const OnStream on(streams_->cast);
    input = shard.to(flat.device(), /*non_blocking=*/true).to(flat.scalar_type());
    Mark cast;
    cast.set(streams_->device());
    streams_->unshard.wait_for(cast);
  }
  const OnStream on(streams_->unshard);
  allocate_storage(flat);
  if (!is_sharded(options_.strategy)) {
    flat.copy_(input);
  } else if (switches_.fakes_all_gather) {
    flat.zero_();
    shard_of(flat).copy_(input);
  } else {
    unsharded_->gathering = group_.start_all_gather_into(flat, input);
  }
  unsharded_->is_gathered = true;
  if (!flat.is_cpu()) unsharded_->versions = versions();
  if (!input.is_same(shard)) unsharded_->input = std::move(input);
  if (unsharded_->gathering.completes_on_stream()) finish_gathering();
}

// Makes the current stream wait for what was started: the unshard stream if that completes on a stream, otherwise,
// after the host, the one that needs the parameters.
void FlatParamHandle::finish_gathering() {
  unsharded_->gathering.wait();
  unsharded_->gathered = std::make_shared<Mark>();
  unsharded_->gathered->set(streams_->device());
}

void FlatParamHandle::wait_unshard() {
  if (!unsharded_->is_gathered) return;
  if (unsharded_->gathered == nullptr) finish_gathering();
  unsharded_->gathered->block_current();
  if (!unsharded_->input.defined()) return;
  streams_->cast.wait_for(*unsharded_->gathered);  // owns the input's memory
  unsharded_->input.reset();
}

void FlatParamHandle::unshard() {
  if (is_unsharded_) return;
  start_unshard();
  wait_unshard();
  set_params(unsharded_->views);
  is_unsharded_ = true;
}

void FlatParamHandle::reshard(bool frees_unsharded) {
  if (is_unsharded_) set_params(sharded_views_);
  is_unsharded_ = false;
  if (frees_unsharded) return free_unsharded();
  if (unsharded_->host != nullptr && has_shard_in_host_memory()) unsharded_->checksum = shard_checksum();
}

void FlatParamHandle::free_unsharded() {
  if (!is_unsharded_) free_gathered();
}

void FlatParamHandle::free_gathered() {
  if (!unsharded_->is_gathered) return;
  wait_unshard();
  if (unsharded_->host != nullptr) {
    free_storage(unsharded_->flat);
    // Not between forward and backward, which reads what forward has read.
    const bool is_before_backward = training_state_ == TrainingState::forward && c10::GradMode::is_enabled();
    if (!is_before_backward) unsharded_->host->view()->drop_writes();
    if (!streams_->meets_after_backward) meet_after_reshard();
  } else {
    streams_->free(unsharded_->flat);
    // In a step, all copies are waited for at its end.
    if (!streams_->is_in_step && options_.offload_params) streams_->finish_copies();
  }
  unsharded_->gathered.reset();
  unsharded_->checksum.reset();
  unsharded_->is_gathered = unsharded_->is_stale = false;
}

std::vector<std::uint32_t> FlatParamHandle::versions() const {
  std::vector<std::uint32_t> versions{static_cast<std::uint32_t>(flat_param_._version())};
  for (const at::Tensor& param : params_) versions.push_back(static_cast<std::uint32_t>(param._version()));
  return versions;
}

bool FlatParamHandle::is_gathered_current() {
  if (!is_gathered()) return true;
  wait_unshard();
  const at::Tensor& flat = unsharded_->flat;
  const bool is_the_shard = unsharded_->host != nullptr && has_shard_in_host_memory();
  if (!flat.is_cpu() || is_the_shard) {
    return unsharded_->versions == versions() || (is_the_shard && unsharded_->checksum == shard_checksum());
  }
  const at::Tensor found = is_sharded(options_.strategy) ? shard_of(flat) : flat.detach();
  const at::Tensor expected = flat_param_.detach().to(flat.device(), flat.scalar_type());
  return have_same_bits(found, expected);
}

void FlatParamHandle::use_full_precision(bool on) {
  in_full_precision_ = on;
  Unsharded* wanted = on && compute_dtype_ != flat_param_.scalar_type() ? &full_precision_ : &computing_;
  if (unsharded_ == wanted) return;
  free_unsharded();
  use(*wanted);
}

void FlatParamHandle::use(Unsharded& unsharded) {
  if (is_unsharded_) {
    fail(ErrorCode::internal, "the flat parameter of '{}' is unsharded, expected it sharded",
         printable(layout_.params()[0].fqn));
  }
  unsharded_ = &unsharded;
}

void FlatParamHandle::summon() {
  before_summon_ = unsharded_;
  // This rank's view of memory that the ranks share needs no copy, unless forward and backward have it in use.
  const bool needs_no_copy = has_shard_in_host_memory() && !computing_.is_gathered;
  if (!needs_no_copy) summoned_ = make_unsharded(flat_param_.scalar_type());
  use(needs_no_copy ? computing_ : summoned_);
  unshard();
}

void FlatParamHandle::end_summon() {
  if (before_summon_ == nullptr) return;
  reshard();
  use(*std::exchange(before_summon_, nullptr));
  summoned_ = {};
}

void FlatParamHandle::to_cpu() {
  const c10::NoGradGuard no_grad;
  if (!is_unsharded_ || unsharded_->flat.is_cpu()) return;
  set_params(unflatten_as(unsharded_->flat.cpu()));
  free_gathered();
}

// Returns this rank's shard in a tensor of the size of the unsharded flat parameter.
at::Tensor FlatParamHandle::shard_of(const at::Tensor& unsharded) const {
  return unsharded.detach().narrow(0, shard_rank() * layout_.sharded_numel(), layout_.sharded_numel());
}

at::Tensor FlatParamHandle::flatten_tensors(const std::vector<at::Tensor>& tensors) const {
  const c10::NoGradGuard no_grad;
  if (tensors.size() != params_.size()) {
    fail(ErrorCode::invalid_argument,
         "flatten tensors: {} tensors given, expected {}, one for each parameter from '{}' on", tensors.size(),
         params_.size(), printable(layout_.params()[0].fqn));
  }
  at::Tensor flat = at::zeros({layout_.padded_unsharded_numel()}, tensors[0].options().requires_grad(false));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor view = view_of(flat, i);
    if (tensors[i].sizes() != view.sizes()) {
      fail(ErrorCode::invalid_argument, "flatten tensors: '{}' has shape {}, expected {}",
           printable(layout_.params()[i].fqn), shape_to_string(tensors[i].sizes().vec()),
           shape_to_string(view.sizes().vec()));
    }
    view.copy_(tensors[i].detach());
  }
  return flat;
}

void FlatParamHandle::check_unsharded(bool with_grads) const {
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const auto check = [&](const char* what, const at::Tensor& tensor) {
      const at::IntArrayRef expected = unsharded_->views[i].sizes();
      if (tensor.sizes() == expected) return;
      fail(ErrorCode::invalid_argument, "write back parameters: {} '{}' has shape {}, expected {}", what,
           printable(layout_.params()[i].fqn), shape_to_string(tensor.sizes().vec()), shape_to_string(expected.vec()));
    };
    check("unsharded parameter", params_[i]);
    if (with_grads && params_[i].grad().defined()) check("the gradient of unsharded parameter", params_[i].grad());
  }
}

void FlatParamHandle::write_back_unsharded() {
  const c10::NoGradGuard no_grad;
  expect_unsharded("write_back_unsharded");
  check_unsharded(/*with_grads=*/false);
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor piece = piece_of(flat_param_, i), changed = piece_of_full(flattened_form(params_[i], i), i);
    // What is gathered stays current if nothing changes. To compare on a device, the host would wait for it.
    const bool can_compare = piece.is_cpu() && changed.is_cpu() && piece.scalar_type() == changed.scalar_type();
    if (!can_compare || !have_same_bits(piece, changed)) piece.copy_(changed);
  }
}

bool FlatParamHandle::write_back_params() {
  if (is_unsharded_ || switches_.skips_writeback) return false;
  const c10::NoGradGuard no_grad;
  bool wrote = false;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor &param = params_[i], &view = sharded_views_[i];
    if (param.scalar_type() != view.scalar_type() || param.device() != view.device()) {
      fail(ErrorCode::invalid_argument,
           "write back parameters: sharded parameter '{}' was converted to {} on {}, expected {} on {}: convert the "
           "model before it is sharded",
           printable(layout_.params()[i].fqn), name_of(param.scalar_type()), param.device().str(),
           name_of(view.scalar_type()), view.device().str());
    }
    if (!options_.use_orig_params || view.numel() == 0 || param.is_alias_of(flat_param_)) continue;
    if (param.numel() != view.numel()) {
      fail(
          ErrorCode::invalid_argument,
          "write back parameters: the data assigned to sharded parameter '{}' has {} elements, expected this rank's {}",
          printable(layout_.params()[i].fqn), param.numel(), view.numel());
    }
    if (explains_itself()) {
      warn_once(
          fmt::format("write back parameters: data was assigned to sharded parameter '{}'; it is copied into the "
                      "shard",
                      printable(layout_.params()[i].fqn)));
    }
    view.copy_(param.detach().reshape(view.sizes()));
    params_[i].set_data(view);
    wrote = true;
  }
  unsharded_->is_stale = unsharded_->is_stale || (wrote && is_gathered());
  return wrote;
}

void FlatParamHandle::expect_unsharded(std::string_view function) const {
  if (is_unsharded_) return;
  fail(ErrorCode::invalid_argument, "{}: the parameters from '{}' on are sharded, expected a call of unshard before",
       function, printable(layout_.params()[0].fqn));
}

// --- gradients

void FlatParamHandle::prepare_gradient_for_backward() { gradient_->prepare_for_backward(); }
void FlatParamHandle::adopt_visible_gradients() { gradient_->adopt_visible(); }
void FlatParamHandle::drop_reset_gradients() { gradient_->drop_reset(); }
void FlatParamHandle::take_gradient(std::size_t i) {
  expect_unsharded("take_gradient");
  gradient_->take(i);
}
bool FlatParamHandle::has_unsharded_gradient() const { return gradient_->has_unsharded(); }
void FlatParamHandle::set_comm_hook(CommHook hook) { gradient_->set_comm_hook(std::move(hook)); }
void FlatParamHandle::start_reduce_gradient() { gradient_->start_reduce(); }
void FlatParamHandle::continue_reduce_gradient() { gradient_->continue_reduce(); }
void FlatParamHandle::finish_reduce_gradient() { gradient_->finish_reduce(); }
void FlatParamHandle::prepare_gradient_for_optim() { gradient_->prepare_for_optim(); }
const at::Tensor& FlatParamHandle::sharded_gradient() const { return gradient_->sharded(); }
void FlatParamHandle::unshard_grad() { gradient_->unshard(); }
void FlatParamHandle::write_back_unsharded_grad() {
  expect_unsharded("write_back_unsharded_grad");
  gradient_->write_back_unsharded();
}

}  // namespace tessera::fsdp

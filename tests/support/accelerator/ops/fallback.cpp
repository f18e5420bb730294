// All ops that compute. A call finds the shapes of its results by the CPU's kernel on zeros, once for each shape of its
// arguments, allocates the results and enqueues a task that runs the kernel on the memory of the arguments.
//
// - An op that writes arguments writes them in place. If it resizes them, the call does.
// - An op whose result depends on data in its shape, or is no tensor, waits for the current stream and runs at once.
// - An op that draws random numbers runs on zeros in each call, to find the state of the generator after it.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "support/accelerator/device.h"
#include "support/accelerator/generator.h"
#include "support/accelerator/ops/call.h"
#include "support/accelerator/ops/raw_tensor.h"

namespace tessera::sim {

namespace {

using at::Tensor;
using torch::jit::Stack;

struct Result {
  enum class Kind { undefined, argument, view, fresh, value } kind = Kind::undefined;
  std::size_t argument = 0;  // the argument that is returned or viewed
  Geometry geometry;
  c10::IValue value;  // that does not depend on data
};

// A tensor or a list of tensors.
struct ResultList {
  bool is_list = false;
  std::vector<Result> elements;
};

struct Outcome {
  std::vector<ResultList> results;
  std::vector<std::pair<std::size_t, Geometry>> resized;  // arguments
};
using OutcomePtr = std::shared_ptr<const Outcome>;

// `before`: the tensors of the device among the arguments, on the CPU.
Result result_of(const c10::IValue& returned, const std::vector<Tensor>& before) {
  Result result;
  if (!returned.isTensor()) {
    result.kind = Result::Kind::value;
    result.value = returned;
    return result;
  }
  const Tensor& tensor = returned.toTensor();
  if (!tensor.defined()) return result;
  TORCH_CHECK(tensor.layout() == at::kStrided, "sim: a result has the layout ", tensor.layout(), ", expected strided");
  result.geometry = Geometry(tensor);
  result.kind = Result::Kind::fresh;
  for (std::size_t i = 0; i < before.size() && result.kind == Result::Kind::fresh; ++i) {
    result.argument = i;
    if (before[i].is_same(tensor)) {
      result.kind = Result::Kind::argument;
    } else if (before[i].storage().is_alias_of(tensor.storage()) && tensor.scalar_type() == before[i].scalar_type()) {
      result.kind = Result::Kind::view;
    }
  }
  return result;
}

Outcome outcome_of(const Stack& stack, const std::vector<Tensor>& after, const std::vector<Geometry>& before) {
  Outcome outcome;
  for (const c10::IValue& returned : stack) {
    ResultList list;
    if (returned.isTensorList()) {
      list.is_list = true;
      for (const Tensor& tensor : returned.toTensorVector()) list.elements.push_back(result_of(tensor, after));
    } else {
      list.elements.push_back(result_of(returned, after));
    }
    outcome.results.push_back(std::move(list));
  }
  for (std::size_t i = 0; i < after.size(); ++i) {
    Geometry geometry(after[i]);
    if (geometry != before[i]) outcome.resized.emplace_back(i, std::move(geometry));
  }
  return outcome;
}

Outcome run_on_zeros(const c10::OperatorHandle& op, const Call& call, const at::Generator& generator, bool with_ones) {
  const Call::Zeros memory(call);
  const std::vector<Tensor> tensors = call.over(memory);
  std::vector<Geometry> before;
  for (const Tensor& tensor : tensors) {
    before.emplace_back(tensor);
    if (with_ones) tensor.fill_(1);
  }
  Stack stack = call.stack(tensors, generator);
  op.callBoxed(stack);
  return outcome_of(stack, tensors, before);
}

// Some ops refuse zeros, for example a multinomial distribution. They take ones.
Outcome find_outcome(const c10::OperatorHandle& op, const Call& call, const at::Generator& generator) {
  const PlainDispatch plain;
  try {
    return run_on_zeros(op, call, generator, false);
  } catch (const c10::Error&) {
    if (call.tensors().empty()) throw;
    try {
      return run_on_zeros(op, call, generator, true);
    } catch (const c10::Error&) {  // the first error is the one to report
    }
    throw;
  }
}

class Outcomes {
 public:
  static Outcomes& get() {
    static Outcomes& outcomes = *new Outcomes;
    return outcomes;
  }
  OutcomePtr find(const c10::OperatorHandle& op, const Call& call) {
    if (!call.key()) return std::make_shared<Outcome>(find_outcome(op, call, {}));
    std::string key = c10::toString(op.operator_name()) + '\0' + *call.key();
    {
      const std::lock_guard lock(mutex_);
      const auto found = known_.find(key);
      if (found != known_.end()) return found->second;
    }
    OutcomePtr outcome = std::make_shared<Outcome>(find_outcome(op, call, {}));
    const std::lock_guard lock(mutex_);
    return known_.emplace(std::move(key), std::move(outcome)).first->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, OutcomePtr> known_;
};

// Finds the outcome of an op that draws, and moves the generator on. `drawn_from` becomes the state to draw from.
OutcomePtr draw(const c10::OperatorHandle& op, const Call& call, int index, at::Generator& drawn_from) {
  at::Generator generator = call.generator().defined() ? call.generator() : default_generator(index);
  const std::lock_guard lock(generator.mutex());
  auto* state = dynamic_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(state != nullptr, "sim: found a generator of another kind, expected one of sim:", index);
  drawn_from = state->on_cpu();
  const at::Generator scratch = state->on_cpu();
  OutcomePtr outcome = std::make_shared<Outcome>(find_outcome(op, call, scratch));
  state->advance_to(scratch);
  return outcome;
}

// Returns what an op returns, and the fresh tensors in it with their places.
struct Returned {
  Stack values;
  struct Fresh {
    std::size_t value, element;
    RawTensor memory;
  };
  std::vector<Fresh> fresh;
};

Tensor make_result(const Result& result, const Call& call, c10::Device where) {
  const Geometry& geometry = result.geometry;
  switch (result.kind) {
    case Result::Kind::argument:
      return call.tensors()[result.argument];
    case Result::Kind::view:
      return call.tensors()[result.argument].as_strided(geometry.sizes, geometry.strides, geometry.offset);
    case Result::Kind::fresh: {
      const auto options = at::TensorOptions().dtype(geometry.dtype).device(where);
      Tensor made = at::empty_strided(geometry.sizes, geometry.strides, options);
      // A result that was expanded cannot be copied to.
      return made.is_non_overlapping_and_dense() ? made : at::empty(geometry.sizes, options);
    }
    default:
      return {};
  }
}

Returned make_results(const Outcome& outcome, const Call& call, c10::Device where) {
  Returned returned;
  for (std::size_t i = 0; i < outcome.results.size(); ++i) {
    const ResultList& list = outcome.results[i];
    c10::List<Tensor> tensors;
    for (std::size_t k = 0; k < list.elements.size(); ++k) {
      const Result& result = list.elements[k];
      if (result.kind == Result::Kind::value) {
        returned.values.push_back(result.value);
        continue;
      }
      const Tensor tensor = make_result(result, call, where);
      if (result.kind == Result::Kind::fresh && tensor.numel() > 0) returned.fresh.push_back({i, k, RawTensor(tensor)});
      if (list.is_list) {
        tensors.push_back(tensor);
      } else {
        returned.values.emplace_back(tensor);
      }
    }
    if (list.is_list) returned.values.emplace_back(std::move(tensors));
  }
  return returned;
}

void copy_results(const Stack& from, const std::vector<Returned::Fresh>& to) {
  for (const Returned::Fresh& fresh : to) {
    const c10::IValue& value = from[fresh.value];
    fresh.memory.on_cpu().copy_(value.isTensor() ? value.toTensor() : value.toTensorVector()[fresh.element]);
  }
}

bool is_generator(const c10::Argument& argument) {
  const c10::TypePtr type = argument.type();
  const auto optional = type->cast<c10::OptionalType>();
  return (optional ? optional->getElementType() : type)->kind() == c10::TypeKind::GeneratorType;
}

Call read_call(const c10::OperatorHandle& op, const Stack& stack) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  Call call;
  const std::size_t first = stack.size() - arguments.size();
  bool takes_indices = false;
  for (std::size_t i = 0; i < arguments.size(); ++i)
    takes_indices = takes_indices || stack[first + i].isOptionalTensorList();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (is_generator(arguments[i])) {
      call.add_generator(stack[first + i]);
      continue;
    }
    const c10::AliasInfo* alias = arguments[i].alias_info();
    call.add(stack[first + i], stack[first + i].isOptionalTensorList(), alias != nullptr && alias->isWrite());
  }
  return call;
}

// Of the tensors among the arguments and of the fresh results. A product of matrices has arguments "mat2" or "batch2",
// "mat1" or "batch1", or "self" for the latter (aten's native_functions.yaml).
Cost cost_of(const c10::OperatorHandle& op, const Stack& stack, const std::vector<Returned::Fresh>& fresh) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  Cost cost;
  Tensor left, right;
  const auto add = [&](const Tensor& tensor) {
    if (tensor.defined()) cost.bytes += tensor.numel() * static_cast<std::int64_t>(tensor.itemsize());
  };
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& argument = stack[stack.size() - arguments.size() + i];
    const std::string& name = arguments[i].name();
    if (argument.isTensorList()) {
      for (const Tensor& tensor : argument.toTensorVector()) add(tensor);
    } else if (argument.isTensor()) {
      add(argument.toTensor());
      if (name == "mat2" || name == "batch2") right = argument.toTensor();
      if (name == "mat1" || name == "batch1" || (name == "self" && !left.defined())) left = argument.toTensor();
    }
  }
  for (const Returned::Fresh& result : fresh) cost.bytes += result.memory.bytes();
  if (right.defined()) cost.flops = 2 * left.numel() * right.size(-1);
  return cost;
}

bool depends_on_data(const c10::OperatorHandle& op, const Call& call) {
  if (call.has_masks() || op.hasTag(at::Tag::data_dependent_output)) return true;
  const bool indexes = op.operator_name().name.rfind("aten::index", 0) == 0;
  return op.hasTag(at::Tag::dynamic_output_shape) && !indexes;
}

// Waits for the stream and runs the op at once.
Stack run_now(const c10::OperatorHandle& op, Call& call, StreamKey stream) {
  Engine::get().synchronize_stream(stream, Engine::Kind::item);
  Stack results;
  Outcome outcome;
  {
    const PlainDispatch plain;
    const std::vector<Tensor> tensors = call.over_memory();
    std::vector<Geometry> before;
    for (const Tensor& tensor : tensors) before.emplace_back(tensor);
    results = call.stack(tensors, {});
    op.callBoxed(results);
    outcome = outcome_of(results, tensors, before);
    TORCH_CHECK(outcome.resized.empty(), "sim: ", op.operator_name(),
                " with an output of another shape is not supported");
  }
  Returned returned = make_results(outcome, call, device(stream.device));
  if (!returned.fresh.empty()) {
    Engine::get().enqueue(stream, "copy",
                          [from = std::move(results), to = std::move(returned.fresh)] { copy_results(from, to); });
  }
  return std::move(returned.values);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  Call call = read_call(op, *stack);
  const c10::Device where = call.device() && call.device()->has_index() ? *call.device() : device(current_device());
  const c10::DeviceGuard guard(where);
  const StreamKey stream = current_stream(where.index());

  Stack values;
  if (depends_on_data(op, call)) {
    values = run_now(op, call, stream);
  } else {
    at::Generator generator;
    const bool draws = call.takes_generator();
    TORCH_CHECK(draws || !op.hasTag(at::Tag::nondeterministic_seeded), "sim: ", op.operator_name(),
                " draws random numbers without a generator, which is not supported");
    OutcomePtr outcome = draws ? draw(op, call, where.index(), generator) : Outcomes::get().find(op, call);
    if (!outcome->resized.empty()) {
      for (const auto& [i, geometry] : outcome->resized) {
        call.tensors()[i].resize_(geometry.sizes);
        call.tensors()[i].as_strided_(geometry.sizes, geometry.strides, geometry.offset);
      }
      call = read_call(op, *stack);
    }
    Returned returned = make_results(*outcome, call, where);
    const Cost cost = cost_of(op, *stack, returned.fresh);
    values = std::move(returned.values);
    call.forget_tensors();
    Engine::get().enqueue(
        stream, c10::toString(op.operator_name()),
        [op, call = std::move(call), to = std::move(returned.fresh), generator] {
          Stack task = call.stack(call.over_memory(), generator);
          op.callBoxed(task);
          copy_results(task, to);
        },
        cost);
  }
  torch::jit::drop(*stack, count);
  for (c10::IValue& value : values) stack->push_back(std::move(value));
}

}  // namespace

void register_fallback() {
  static torch::Library& all =
      *new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // Ops with a kernel of the CPU and one made of other ops: the former, so that results equal the CPU's. A convolution
  // chooses its kernel by the device.
  static torch::Library& aten =
      *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    const bool is_convolution =
        name.overload_name.empty() && (name.name == "aten::convolution" || name.name == "aten::convolution_backward");
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) && !is_convolution) continue;
    aten.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace tessera::sim

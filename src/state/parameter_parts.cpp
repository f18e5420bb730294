#include "tessera/state/internal/parameter_parts.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "tessera/base/function_ref.h"
#include "tessera/tensor/dtensor.h"
#include "tessera/tensor/internal/box_view.h"

namespace tessera {

ParameterParts::ParameterParts(const torch::nn::Module& module) { collect(module); }

void ParameterParts::collect(const torch::nn::Module& module) {
  if (const auto* parts = dynamic_cast<const DTensorParameters*>(&module)) {
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      const DTensorSpec* spec = parts->dtensor_spec(parameter.key());
      if (spec != nullptr) specs_.emplace(parameter.value().unsafeGetTensorImpl(), spec);
    }
  }
  for (const auto& child : module.named_children()) collect(*child.value());
}

const DTensorSpec* ParameterParts::find(const at::Tensor& parameter) const {
  const auto found = specs_.find(parameter.unsafeGetTensorImpl());
  return found != specs_.end() ? found->second : nullptr;
}

Value ParameterParts::to_state(const at::Tensor& parameter, const at::Tensor& local) const {
  const DTensorSpec* spec = find(parameter);
  return spec != nullptr ? Value(DTensor(spec->mesh, spec->layout, local)) : Value(local);
}

std::vector<std::int64_t> ParameterParts::size_of(const at::Tensor& parameter) const {
  const DTensorSpec* spec = find(parameter);
  return spec != nullptr ? spec->layout.size() : parameter.sizes().vec();
}

namespace {

// Returns the local tensor of `boxes`, whose elements are `part(i)`; a view if there is one box.
at::Tensor local_of(const DTensorSpec& spec, const std::vector<LocalBox>& boxes, const at::TensorOptions& if_empty,
                    FunctionRef<at::Tensor(std::size_t i)> part) {
  if (boxes.size() == 1) return part(0);
  const at::TensorOptions options = boxes.empty() ? if_empty : part(0).options();
  at::Tensor local = at::empty(spec.layout.local_shape(*spec.mesh.coordinate()).sizes, options.requires_grad(false));
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    box_view(local, {boxes[i].local_offsets, boxes[i].box.sizes}).copy_(part(i));
  }
  return local;
}

}  // namespace

at::Tensor local_of_full(const DTensorSpec& spec, const at::Tensor& full) {
  const std::vector<LocalBox> boxes = spec.layout.local_boxes(*spec.mesh.coordinate());
  return local_of(spec, boxes, full.options(), [&](std::size_t i) { return box_view(full.detach(), boxes[i].box); });
}

std::optional<at::Tensor> ParameterParts::from_state(const at::Tensor& parameter, const Value& value) const {
  const DTensorSpec* spec = find(parameter);
  if (const auto* tensor = value.get_if<at::Tensor>()) {
    if (tensor->sizes() != at::IntArrayRef(size_of(parameter))) return std::nullopt;
    return spec != nullptr ? local_of_full(*spec, *tensor) : *tensor;
  }
  const auto* given = value.get_if<std::shared_ptr<Checkpointable>>();
  if (spec == nullptr || given == nullptr || (*given)->size() != spec->layout.size()) return std::nullopt;
  const Checkpointable& parts = **given;
  const std::vector<LocalBox> boxes = spec->layout.local_boxes(*spec->mesh.coordinate());
  const auto is_box = [](const LocalBox& box, const Box& chunk) { return box.box == chunk; };
  if (!std::equal(boxes.begin(), boxes.end(), parts.local_chunks().begin(), parts.local_chunks().end(), is_box)) {
    return std::nullopt;
  }
  return local_of(*spec, boxes, parameter.options(), [&](std::size_t i) { return parts.local_tensor(i); });
}

}  // namespace tessera

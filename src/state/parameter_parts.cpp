#include "state/parameter_parts.h"

#include <ATen/ops/empty.h>

#include "tensor/box_view.h"
#include "tessera/tensor/dtensor.h"

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

std::optional<at::Tensor> ParameterParts::from_state(const at::Tensor& parameter, const Value& value) const {
  const DTensorSpec* spec = find(parameter);
  const auto* whole = value.get_if<at::Tensor>();
  if (spec == nullptr) {
    return whole != nullptr && whole->sizes() == parameter.sizes() ? std::optional(*whole) : std::nullopt;
  }
  const auto* given = value.get_if<std::shared_ptr<Checkpointable>>();
  const Checkpointable* parts = given != nullptr ? given->get() : nullptr;
  const std::vector<std::int64_t>& coordinate = *spec->mesh.coordinate();
  const std::vector<LocalBox> boxes = spec->layout.local_boxes(coordinate);
  if (whole != nullptr
          ? whole->sizes() != at::IntArrayRef(spec->layout.size())
          : parts == nullptr || parts->size() != spec->layout.size() || parts->local_chunks().size() != boxes.size()) {
    return std::nullopt;
  }
  const auto part = [&](std::size_t i) {
    return whole != nullptr ? box_view(whole->detach(), boxes[i].box) : parts->local_tensor(i);
  };
  for (std::size_t i = 0; i < boxes.size() && whole == nullptr; ++i) {
    if (parts->local_chunks()[i] != boxes[i].box) return std::nullopt;
  }
  if (boxes.size() == 1) return part(0);
  const at::TensorOptions like = boxes.empty() ? parameter.options() : part(0).options();
  at::Tensor local = at::empty(spec->layout.local_shape(coordinate).sizes, like.requires_grad(false));
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    box_view(local, {boxes[i].local_offsets, boxes[i].box.sizes}).copy_(part(i));
  }
  return local;
}

}  // namespace tessera

#include "support/accelerator/ops/call.h"

#include <ATen/core/List.h>
#include <ATen/ops/clone.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "support/accelerator/memory.h"
#include "support/accelerator/ops/raw_tensor.h"

namespace tessera::sim {

Geometry::Geometry(const at::Tensor& tensor)
    : sizes(tensor.sizes().vec()),
      strides(tensor.strides().vec()),
      offset(tensor.storage_offset()),
      dtype(tensor.scalar_type()) {}

void Call::add_to_key(char kind, const void* bytes, std::size_t size) {
  if (!key_) return;
  key_->push_back(kind);
  key_->append(static_cast<const char*>(bytes), size);
}

void Call::add_value_to_key(const c10::IValue& value) {
  const auto add_scalar = [&](char kind, auto scalar) { add_to_key(kind, &scalar, sizeof(scalar)); };
  if (value.isNone()) {
    add_to_key('n', nullptr, 0);
  } else if (value.isInt()) {
    add_scalar('i', value.toInt());
  } else if (value.isBool()) {
    add_scalar('b', value.toBool());
  } else if (value.isDouble()) {
    add_scalar('d', value.toDouble());
  } else if (value.isString()) {
    add_scalar('s', value.toStringRef().size());
    *key_ += value.toStringRef();
  } else if (value.isDevice()) {
    add_scalar('D', value.toDevice().index());
  } else if (value.isList()) {
    const c10::ArrayRef<c10::IValue> list = value.toListRef();
    add_scalar('l', list.size());
    for (const c10::IValue& element : list) {
      if (!key_) return;
      add_value_to_key(element);
    }
  } else {
    key_.reset();
  }
}

Call::Element Call::element_of(const at::Tensor& tensor, bool may_be_on_cpu, bool is_written) {
  if (!tensor.defined()) {
    add_to_key('u', nullptr, 0);
    return {};
  }
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (tensor.is_cpu()) {
    TORCH_CHECK((tensor.dim() == 0 || may_be_on_cpu) && !is_written,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                device_.value_or(c10::kPrivateUse1), " and cpu!");
    const PlainDispatch plain;
    const at::Tensor copy = at::clone(tensor);
    if (impl->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    const std::int64_t size = tensor.numel();
    add_to_key(impl->is_wrapped_number() ? 'w' : 'c', &size, sizeof(size));
    add_value_to_key(static_cast<std::int64_t>(tensor.scalar_type()));
    if (tensor.dim() > 0) key_.reset();
    return {std::nullopt, copy};
  }
  TORCH_CHECK(tensor.is_privateuseone(), "sim: found a tensor on ", tensor.device(), ", expected one on sim");
  TORCH_CHECK(!device_ || tensors_.empty() || *device_ == tensor.device(),
              "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
              tensor.device(), "!");
  device_ = tensor.device();
  for (std::size_t i = 0; i < device_tensors_.size(); ++i) {
    if (device_tensors_[i].impl == impl) {
      add_to_key('=', &i, sizeof(i));
      return {i, {}};
    }
  }
  const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  std::size_t at = 0;
  while (at < storages_.size() && storages_[at].impl != storage) ++at;
  if (at == storages_.size()) {
    const void* data = storage->data();
    storages_.push_back({storage, storage->nbytes() == 0 ? nullptr : Memory::get().readable(data), storage->nbytes()});
  }
  DeviceTensor entry{impl, at, Geometry(tensor), impl->is_wrapped_number(), tensor.is_conj(), tensor.is_neg()};
  add_to_key('t', &at, sizeof(at));
  const auto dimensions = static_cast<std::int64_t>(entry.geometry.sizes.size());
  const std::int64_t others[] = {dimensions, entry.geometry.offset, static_cast<std::int64_t>(entry.geometry.dtype),
                                 entry.is_wrapped_number + 2 * entry.is_conj + 4 * entry.is_neg};
  add_to_key('g', others, sizeof(others));
  add_to_key('s', entry.geometry.sizes.data(), entry.geometry.sizes.size() * sizeof(std::int64_t));
  add_to_key('r', entry.geometry.strides.data(), entry.geometry.strides.size() * sizeof(std::int64_t));
  device_tensors_.push_back(std::move(entry));
  tensors_.push_back(tensor);
  return {device_tensors_.size() - 1, {}};
}

void Call::add(const c10::IValue& argument, bool may_be_on_cpu, bool is_written) {
  Argument added;
  if (argument.isTensor()) {
    added.kind = Argument::Kind::tensor;
    added.elements.push_back(element_of(argument.toTensor(), may_be_on_cpu, is_written));
  } else if (argument.isTensorList()) {
    added.kind = Argument::Kind::tensors;
    const std::size_t size = argument.toTensorList().size();
    add_to_key('L', &size, sizeof(size));
    for (const at::Tensor& tensor : argument.toTensorVector())
      added.elements.push_back(element_of(tensor, may_be_on_cpu, is_written));
  } else if (argument.isOptionalTensorList()) {
    added.kind = Argument::Kind::optional_tensors;
    const c10::List<std::optional<at::Tensor>> list = argument.toOptionalTensorList();
    const std::size_t size = list.size();
    add_to_key('O', &size, sizeof(size));
    for (const std::optional<at::Tensor>& tensor : list.vec()) {
      if (tensor && tensor->defined() && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte))
        has_masks_ = true;
      added.elements.push_back(element_of(tensor.value_or(at::Tensor()), may_be_on_cpu, is_written));
    }
  } else if (argument.isDevice()) {
    if (!device_) device_ = argument.toDevice();
    added.value = c10::Device(c10::kCPU);
    add_value_to_key(argument);
  } else {
    added.value = argument;
    add_value_to_key(argument);
  }
  arguments_.push_back(std::move(added));
}

void Call::add_generator(const c10::IValue& argument) {
  takes_generator_ = true;
  if (!argument.isNone()) {
    generator_ = argument.toGenerator();
    TORCH_CHECK(generator_.device().is_privateuseone(), "Expected a 'sim' device type for generator but found '",
                generator_.device(), "'");
  }
  arguments_.emplace_back();
  arguments_.back().kind = Argument::Kind::generator;
}

void Call::forget_tensors() { tensors_.clear(); }

std::vector<at::Tensor> Call::over_addresses(const std::vector<void*>& addresses) const {
  std::vector<c10::Storage> storages;
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    storages.emplace_back(c10::Storage::use_byte_size_t(), storages_[i].bytes, c10::DataPtr(addresses[i], c10::kCPU),
                          c10::GetCPUAllocator(), /*resizable=*/true);
  }
  std::vector<at::Tensor> tensors;
  for (const DeviceTensor& entry : device_tensors_) {
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storages[entry.storage]),
                                                                 c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                                 c10::scalarTypeToTypeMeta(entry.geometry.dtype));
    c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    impl.set_sizes_and_strides(entry.geometry.sizes, entry.geometry.strides, entry.geometry.offset);
    if (entry.is_wrapped_number) impl.set_wrapped_number(true);
    if (entry.is_conj) tensor._set_conj(true);
    if (entry.is_neg) tensor._set_neg(true);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::vector<at::Tensor> Call::over_memory() const {
  std::vector<void*> addresses;
  for (const Storage& storage : storages_) addresses.push_back(storage.address);
  return over_addresses(addresses);
}

std::vector<at::Tensor> Call::over(const Zeros& memory) const { return over_addresses(memory.addresses_); }

torch::jit::Stack Call::stack(const std::vector<at::Tensor>& tensors, const at::Generator& generator) const {
  const auto tensor_of = [&](const Element& element) {
    return element.device_tensor ? tensors[*element.device_tensor] : element.other;
  };
  torch::jit::Stack stack;
  for (const Argument& argument : arguments_) {
    switch (argument.kind) {
      case Argument::Kind::value:
        stack.push_back(argument.value);
        break;
      case Argument::Kind::generator:
        stack.emplace_back(generator);
        break;
      case Argument::Kind::tensor:
        stack.emplace_back(tensor_of(argument.elements[0]));
        break;
      case Argument::Kind::tensors: {
        c10::List<at::Tensor> list;
        for (const Element& element : argument.elements) list.push_back(tensor_of(element));
        stack.emplace_back(std::move(list));
        break;
      }
      case Argument::Kind::optional_tensors: {
        c10::List<std::optional<at::Tensor>> list;
        for (const Element& element : argument.elements) {
          const at::Tensor tensor = tensor_of(element);
          list.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
        }
        stack.emplace_back(std::move(list));
        break;
      }
    }
  }
  return stack;
}

Call::Zeros::Zeros(const Call& call) {
  for (const Storage& storage : call.storages_) {
    void* address = nullptr;
    if (storage.bytes > 0) {
      address =
          ::mmap(nullptr, storage.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(address != MAP_FAILED, "sim: mapping zeros: ", std::strerror(errno));
    }
    addresses_.push_back(address);
    bytes_.push_back(storage.bytes);
  }
}

Call::Zeros::~Zeros() {
  for (std::size_t i = 0; i < addresses_.size(); ++i) {
    if (addresses_[i] != nullptr) ::munmap(addresses_[i], bytes_[i]);
  }
}

}  // namespace tessera::sim

#pragma once
// A call of an op as it is enqueued: the arguments, with the addresses of tensors in place of the tensors. From it the
// arguments for the op's CPU kernel are made, over the memory of the device or over zeros of the same shape.
//
// Tensors that share a storage share one there as well, and an argument that is passed twice is one tensor there.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::sim {

// Sizes and strides are those of a strided tensor; the offset counts elements, from the begin of the storage.
struct Geometry {
  std::vector<std::int64_t> sizes, strides;
  std::int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;

  Geometry() = default;
  explicit Geometry(const at::Tensor& tensor);
  friend bool operator==(const Geometry&, const Geometry&) = default;
};

class Call {
 public:
  Call() = default;

  // Adds the next argument. Tensors of the CPU are copied: they are scalars, or indices if `may_be_on_cpu`.
  // `is_written` tells whether the op writes the argument. Throws c10::Error for tensors of other devices.
  void add(const c10::IValue& argument, bool may_be_on_cpu, bool is_written);
  // Adds an argument for a generator, which is None for the default one.
  void add_generator(const c10::IValue& argument);

  // The device of the tensors; that of a Device argument if there are none, or nothing.
  std::optional<c10::Device> device() const { return device_; }
  bool takes_generator() const { return takes_generator_; }
  // The generator that was passed, or an undefined one.
  const at::Generator& generator() const { return generator_; }
  // Whether tensors of bool or uint8 select elements in a list of indices.
  bool has_masks() const { return has_masks_; }
  // The tensors of the device among the arguments, each one once. They are dropped by forget_tensors().
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  void forget_tensors();

  // Returns what tells apart calls of an op whose results have other shapes, or nothing if there is no such text.
  const std::optional<std::string>& key() const { return key_; }

  // CPU tensors for the arguments, in the order of tensors(). Zeros are valid while `memory` exists.
  class Zeros;
  std::vector<at::Tensor> over_memory() const;
  std::vector<at::Tensor> over(const Zeros& memory) const;
  // Returns the arguments with `tensors` for those of the device.
  torch::jit::Stack stack(const std::vector<at::Tensor>& tensors, const at::Generator& generator) const;

 private:
  struct Storage {
    const c10::StorageImpl* impl;  // an identity only
    void* address;                 // where the host may access it
    std::size_t bytes;
  };
  struct DeviceTensor {
    const c10::TensorImpl* impl;  // an identity only
    std::size_t storage;
    Geometry geometry;
    bool is_wrapped_number, is_conj, is_neg;
  };
  struct Element {
    std::optional<std::size_t> device_tensor;
    at::Tensor other;  // of the CPU, or undefined
  };
  struct Argument {
    enum class Kind { value, tensor, tensors, optional_tensors, generator } kind = Kind::value;
    c10::IValue value;
    std::vector<Element> elements;
  };

  Element element_of(const at::Tensor& tensor, bool may_be_on_cpu, bool is_written);
  void add_to_key(char kind, const void* bytes, std::size_t size);
  void add_value_to_key(const c10::IValue& value);
  std::vector<at::Tensor> over_addresses(const std::vector<void*>& addresses) const;

  std::optional<c10::Device> device_;
  bool takes_generator_ = false, has_masks_ = false;
  at::Generator generator_;
  std::vector<Storage> storages_;
  std::vector<DeviceTensor> device_tensors_;
  std::vector<at::Tensor> tensors_;
  std::vector<Argument> arguments_;
  std::optional<std::string> key_ = std::string();
};

// Memory for all storages of a call, filled with bytes 0. Pages that are only read take up no memory.
class Call::Zeros {
 public:
  explicit Zeros(const Call& call);
  Zeros(const Zeros&) = delete;
  Zeros& operator=(const Zeros&) = delete;
  ~Zeros();

 private:
  friend class Call;
  std::vector<void*> addresses_;
  std::vector<std::size_t> bytes_;
};

}  // namespace tessera::sim

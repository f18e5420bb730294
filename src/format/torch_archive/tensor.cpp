// Interprets the calls in a data.pkl that make tensors. Nothing is called. A description that PyTorch would refuse, or
// that reaches outside of its storage, is an error.

#include <algorithm>
#include <array>
#include <utility>

#include "tessera/base/checked.h"
#include "tessera/format/torch_archive.h"

namespace tessera::torch_archive {
namespace {

using pickle::GlobalName;
using pickle::Kind;
using pickle::NodeRef;
using Values = std::span<const NodeRef>;

constexpr std::size_t kMaxWrappers = 8;  // a parameter around a subclass around a tensor is 2
// A pickle can define a tuple once and refer to it often, so what is read for one tensor is limited. PyTorch's own
// functions take up to 64 dimensions.
constexpr std::size_t kMaxDimensions = 1000;
constexpr std::size_t kMaxStorageText = 1000;  // bytes of a storage's key, and of its location

// torch/storage.py, _dtype_to_storage_type_map. It is closed: dtypes added since use UntypedStorage.
constexpr std::array<std::pair<DType, std::string_view>, 17> kStorageClasses = {{
    {DType::float64, "DoubleStorage"},
    {DType::float32, "FloatStorage"},
    {DType::float16, "HalfStorage"},
    {DType::int64, "LongStorage"},
    {DType::int32, "IntStorage"},
    {DType::int16, "ShortStorage"},
    {DType::int8, "CharStorage"},
    {DType::uint8, "ByteStorage"},
    {DType::bool_, "BoolStorage"},
    {DType::bfloat16, "BFloat16Storage"},
    {DType::complex128, "ComplexDoubleStorage"},
    {DType::complex64, "ComplexFloatStorage"},
    {DType::qint8, "QInt8Storage"},
    {DType::qint32, "QInt32Storage"},
    {DType::quint8, "QUInt8Storage"},
    {DType::quint4x2, "QUInt4x2Storage"},
    {DType::quint2x4, "QUInt2x4Storage"},
}};

template <typename... Args>
[[noreturn]] void malformed(fmt::format_string<Args...> format, Args&&... args) {
  fail(ErrorCode::corrupt, "tensor in data.pkl: {}", fmt::format(format, std::forward<Args>(args)...));
}

std::int64_t integer(NodeRef value, std::string_view what) {
  if (!value.is(Kind::integer)) malformed("{} is a {}, expected an int", what, kind_name(value.kind()));
  return value.integer();
}

bool boolean(NodeRef value, std::string_view what) {
  if (!value.is(Kind::boolean)) malformed("{} is a {}, expected a bool", what, kind_name(value.kind()));
  return value.boolean();
}

// A tuple of ints of at least 0, or a torch.Size of one.
std::vector<std::int64_t> sizes(NodeRef value, std::string_view what) {
  if (value.is(Kind::object) && value.object().calls("torch", "Size")) {
    const NodeRef arguments = value.object().arguments;
    if (arguments.is(Kind::tuple) && arguments.items().size() == 1) value = arguments.items()[0];
  }
  if (!value.is(Kind::tuple)) malformed("{} is a {}, expected a tuple", what, kind_name(value.kind()));
  if (value.items().size() > kMaxDimensions)
    malformed("{} has {} dimensions, expected at most {}", what, value.items().size(), kMaxDimensions);
  std::vector<std::int64_t> result;
  result.reserve(value.items().size());
  for (const NodeRef item : value.items()) {
    const std::int64_t number = integer(item, what);
    if (number < 0) malformed("{} of dimension {} is {}, expected 0 or more", what, result.size(), number);
    result.push_back(number);
  }
  return result;
}

std::optional<DType> dtype(NodeRef value) {
  if (!value.is(Kind::global) || value.global().module != "torch") return std::nullopt;
  return find_dtype(value.global().name);
}

bool is_quantized(DType type) {
  return type == DType::qint8 || type == DType::qint32 || type == DType::quint8 || type == DType::quint4x2 ||
         type == DType::quint2x4;
}

// Checks that every element is inside of the storage and that no later arithmetic on sizes, strides and offset
// overflows.
void validate(TensorRef& tensor) {
  const std::size_t rank = tensor.sizes.size();
  if (tensor.strides.size() != rank)
    malformed("{} sizes and {} strides, expected a stride for each size", rank, tensor.strides.size());
  if (tensor.storage_offset < 0) malformed("storage offset {}, expected 0 or more", tensor.storage_offset);
  const std::int64_t itemsize = dtype_size(tensor.dtype);
  bool is_empty = false;
  std::int64_t padded_numel = 1, last = tensor.storage_offset;
  for (std::size_t d = 0; d < rank; ++d) {
    is_empty = is_empty || tensor.sizes[d] == 0;
    padded_numel = checked_multiply(padded_numel, std::max<std::int64_t>(tensor.sizes[d], 1),
                                    "tensor in data.pkl: number of elements");
  }
  checked_multiply(padded_numel, itemsize, "tensor in data.pkl: size in bytes");
  if (is_empty) {
    // An empty slice may begin past its storage, and its strides may lead anywhere; it is never read.
    if (tensor.storage_offset > tensor.storage.size_bytes / itemsize) tensor.storage_offset = 0;
    return;
  }
  constexpr std::string_view kExtent = "tensor in data.pkl: extent";
  for (std::size_t d = 0; d < rank; ++d) {
    last = checked_add(last, checked_multiply(tensor.sizes[d] - 1, tensor.strides[d], kExtent), kExtent);
  }
  const std::int64_t end = checked_multiply(checked_add<std::int64_t>(last, 1, kExtent), itemsize, kExtent);
  if (end > tensor.storage.size_bytes) {
    malformed("elements up to byte {} of storage '{}', expected them within its {} bytes", end,
              printable(tensor.storage.key), tensor.storage.size_bytes);
  }
}

std::optional<TensorRef> describe(GlobalName callable, Values arguments, std::size_t depth);

std::optional<TensorRef> describe(NodeRef value, std::size_t depth) {
  if (depth > kMaxWrappers || !value.is(Kind::object)) return std::nullopt;
  const pickle::Object& object = value.object();
  if (object.made != pickle::Object::Made::reduce || !object.callable.is(Kind::global)) return std::nullopt;
  if (!object.arguments.is(Kind::tuple)) return std::nullopt;
  return describe(object.callable.global(), object.arguments.items(), depth);
}

// _rebuild_tensor, _rebuild_tensor_v2, _rebuild_tensor_v3: each takes one more argument.
std::optional<TensorRef> describe_strided(int version, Values arguments) {
  const std::size_t required = version == 1 ? 4 : version == 2 ? 6 : 7;
  const std::size_t most = required + (version > 1 ? 1u : 0u);
  if (arguments.size() < required) malformed("{} arguments, expected at least {}", arguments.size(), required);
  // A conjugated or negated view: its bytes are not its values.
  const bool has_metadata = version > 1 && arguments.size() > required;
  if (has_metadata) {
    const NodeRef metadata = arguments[required];
    if (!metadata.is_none() && !(metadata.is(Kind::dict) && metadata.pairs().empty())) return std::nullopt;
  }
  if (arguments.size() > most) malformed("{} arguments, expected at most {}", arguments.size(), most);
  if (!arguments[0].is(Kind::persistent_id)) return std::nullopt;
  const std::optional<StorageRef> storage = as_storage(arguments[0].persistent_id());
  if (!storage) return std::nullopt;

  // Whether it is understood is decided before its sizes are copied.
  const std::optional<DType> type =
      version == 3 ? dtype(arguments[6])
                   : storage->dtype.value_or(DType::uint8);  // as PyTorch does for an untyped storage
  if (!type || is_quantized(*type)) return std::nullopt;
  TensorRef tensor;
  tensor.dtype = *type;
  tensor.storage = *storage;
  tensor.storage_offset = integer(arguments[1], "storage offset");
  tensor.sizes = sizes(arguments[2], "size");
  tensor.strides = sizes(arguments[3], "stride");
  if (version > 1) tensor.requires_grad = boolean(arguments[4], "requires_grad");
  validate(tensor);
  return tensor;
}

std::optional<TensorRef> describe_parameter(Values arguments, std::size_t depth) {
  if (arguments.size() < 2) malformed("a parameter of {} arguments, expected at least 2", arguments.size());
  std::optional<TensorRef> tensor = describe(arguments[0], depth + 1);
  if (!tensor) return std::nullopt;
  tensor->requires_grad = boolean(arguments[1], "requires_grad");
  tensor->is_parameter = true;
  return tensor;
}

// A tensor with attributes, or a buffer. Other classes may interpret their bytes differently.
std::optional<TensorRef> describe_from_type(Values arguments, std::size_t depth) {
  if (arguments.size() != 4) malformed("_rebuild_from_type_v2 with {} arguments, expected 4", arguments.size());
  const NodeRef type = arguments[1];
  const bool is_plain = type.is_global("torch", "Tensor") || type.is_global("torch._tensor", "Tensor") ||
                        type.is_global("torch.nn.parameter", "Buffer");
  if (!is_plain || !arguments[0].is(Kind::global) || !arguments[2].is(Kind::tuple)) return std::nullopt;
  return describe(arguments[0].global(), arguments[2].items(), depth + 1);
}

// A tensor of a device that PyTorch saves through the CPU.
std::optional<TensorRef> describe_from_cpu(Values arguments, std::size_t depth) {
  if (arguments.size() != 4) malformed("a device tensor of {} arguments, expected 4", arguments.size());
  std::optional<TensorRef> tensor = describe(arguments[0], depth + 1);
  if (!tensor || dtype(arguments[1]) != tensor->dtype) return std::nullopt;
  tensor->requires_grad = boolean(arguments[3], "requires_grad");
  return tensor;
}

std::optional<TensorRef> describe(GlobalName callable, Values arguments, std::size_t depth) {
  if (depth > kMaxWrappers) return std::nullopt;
  if (callable.module == "torch._utils") {
    if (callable.name == "_rebuild_tensor") return describe_strided(1, arguments);
    if (callable.name == "_rebuild_tensor_v2") return describe_strided(2, arguments);
    if (callable.name == "_rebuild_tensor_v3") return describe_strided(3, arguments);
    if (callable.name == "_rebuild_parameter" || callable.name == "_rebuild_parameter_with_state") {
      return describe_parameter(arguments, depth);
    }
    if (callable.name == "_rebuild_device_tensor_from_cpu_tensor") return describe_from_cpu(arguments, depth);
  }
  if (callable == GlobalName{"torch._tensor", "_rebuild_from_type_v2"}) return describe_from_type(arguments, depth);
  return std::nullopt;
}

}  // namespace

bool is_tensor_like(NodeRef value) {
  if (!value.is(Kind::object) || !value.object().callable.is(Kind::global)) return false;
  const GlobalName callable = value.object().callable.global();
  const auto is_class = [&](std::string_view module, std::string_view name) {
    return callable == GlobalName{module, name};
  };
  return (callable.module == "torch._utils" && callable.name.starts_with("_rebuild_")) ||
         (callable.module == "torch._tensor" && callable.name.starts_with("_rebuild_from_type")) ||
         is_class("torch.nested._internal.nested_tensor", "_rebuild_njt") ||
         is_class("torch.nn.parameter", "UninitializedParameter") ||
         is_class("torch.nn.parameter", "UninitializedBuffer") ||
         is_class("torch.distributed._shard.sharded_tensor.api", "ShardedTensor");
}

std::optional<TensorRef> as_tensor(NodeRef value) { return describe(value, 0); }

std::optional<StorageRef> as_storage(NodeRef persistent_id) {
  if (!persistent_id.is(Kind::tuple)) return std::nullopt;
  const Values items = persistent_id.items();
  if (items.size() != 5 || !items[0].is_string("storage") || !items[1].is(Kind::global)) return std::nullopt;
  const GlobalName type = items[1].global();
  if (type.module != "torch" && type.module != "torch.storage") return std::nullopt;
  StorageRef storage;
  storage.dtype = dtype_of_storage_class(type.name);
  if (!storage.dtype && type.name != "UntypedStorage") return std::nullopt;
  if (!items[2].is(Kind::string) || !items[3].is(Kind::string)) {
    malformed("a storage whose key is a {} and whose location is a {}, expected two strings",
              kind_name(items[2].kind()), kind_name(items[3].kind()));
  }
  const std::size_t longest = std::max(items[2].string().size(), items[3].string().size());
  if (longest > kMaxStorageText) {
    malformed("a storage whose key or location has {} bytes, expected at most {}", longest, kMaxStorageText);
  }
  storage.key = items[2].string();
  storage.location = items[3].string();
  const std::int64_t numel = integer(items[4], "size of a storage");
  if (numel < 0) malformed("storage '{}' of {} elements, expected 0 or more", printable(storage.key), numel);
  storage.size_bytes =
      checked_multiply(numel, storage.dtype ? dtype_size(*storage.dtype) : 1, "tensor in data.pkl: size of a storage");
  return storage;
}

std::optional<std::string_view> storage_class(DType type) {
  for (const auto& [known, name] : kStorageClasses) {
    if (known == type) return name;
  }
  return std::nullopt;
}

std::optional<DType> dtype_of_storage_class(std::string_view name) {
  for (const auto& [type, known] : kStorageClasses) {
    if (known == name) return type;
  }
  return std::nullopt;
}

}  // namespace tessera::torch_archive

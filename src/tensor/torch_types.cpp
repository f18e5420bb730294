#include "tessera/tensor/torch_types.h"

#include <sstream>

#include <torch/version.h>

#include "tessera/base/error.h"

namespace tessera {

namespace {

struct Both {
  DType dtype;
  at::ScalarType type;
};

// The dtypes of this version of LibTorch.
constexpr Both kTypes[] = {
    {DType::float32, at::kFloat},
    {DType::float64, at::kDouble},
    {DType::float16, at::kHalf},
    {DType::bfloat16, at::kBFloat16},
    {DType::complex32, at::kComplexHalf},
    {DType::complex64, at::kComplexFloat},
    {DType::complex128, at::kComplexDouble},
    {DType::uint8, at::kByte},
    {DType::int8, at::kChar},
    {DType::int16, at::kShort},
    {DType::int32, at::kInt},
    {DType::int64, at::kLong},
    {DType::bool_, at::kBool},
    {DType::qint8, at::kQInt8},
    {DType::quint8, at::kQUInt8},
    {DType::qint32, at::kQInt32},
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 3)
    {DType::uint16, at::ScalarType::UInt16},
    {DType::uint32, at::ScalarType::UInt32},
    {DType::uint64, at::ScalarType::UInt64},
    {DType::float8_e4m3fn, at::ScalarType::Float8_e4m3fn},
    {DType::float8_e4m3fnuz, at::ScalarType::Float8_e4m3fnuz},
    {DType::float8_e5m2, at::ScalarType::Float8_e5m2},
    {DType::float8_e5m2fnuz, at::ScalarType::Float8_e5m2fnuz},
#endif
};

}  // namespace

at::ScalarType to_scalar_type(DType dtype) {
  for (const Both& both : kTypes) {
    if (both.dtype == dtype) return both.type;
  }
  fail(ErrorCode::unsupported, "dtype {}: LibTorch {} has no such type", dtype_name(dtype), TORCH_VERSION);
}

DType to_dtype(at::ScalarType type) {
  for (const Both& both : kTypes) {
    if (both.type == type) return both.dtype;
  }
  fail(ErrorCode::unsupported, "LibTorch's type {}: no dtype for it", c10::toString(type));
}

at::Device to_device(const Device& device) { return at::Device(to_string(device)); }

Device to_device(const at::Device& device) {
  // str() has the name that an extension gave to its kind of device, which other processes may not know.
  if (device.type() != c10::DeviceType::PrivateUse1) return Device::parse(device.str());
  return Device::parse(device.has_index() ? fmt::format("privateuseone:{}", device.index()) : "privateuseone");
}

TensorProperties properties_of(const at::Tensor& tensor) {
  TensorProperties properties;
  properties.dtype = to_dtype(tensor.scalar_type());
  if (tensor.layout() != at::kStrided) {
    std::ostringstream layout;
    layout << tensor.layout();
    properties.layout = "torch." + layout.str();
    for (char& c : properties.layout) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  properties.requires_grad = tensor.requires_grad();
  properties.pin_memory = tensor.is_pinned();
  return properties;
}

}  // namespace tessera

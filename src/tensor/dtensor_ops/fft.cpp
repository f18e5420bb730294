#include "tessera/tensor/dtensor_ops/fft.h"

#include <ATen/ops/fft_fftn.h>
#include <ATen/ops/fft_ifftn.h>
#include <ATen/ops/fft_irfftn.h>
#include <ATen/ops/fft_rfftn.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/real.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <numeric>

#include "tensor/dtensor_ops/calls.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_ops.h"

namespace tessera::dtensor {

namespace {

// Returns the complex dtype of spectra of x.
at::ScalarType complex_type(const DTensor& x) {
  const at::ScalarType dtype = x.scalar_type();
  return c10::toComplexType(at::isIntegralType(dtype, /*includeBool=*/true) ? at::kFloat : dtype);
}

}  // namespace

DTensor view_as_complex(const DTensor& x) {
  if (x.dim() == 0 || x.size(-1) != 2) {
    fail(ErrorCode::invalid_argument, "view_as_complex of size {}: expected a last dimension of size 2",
         shape_to_string(x.size()));
  }
  Sizes size = x.size();
  size.pop_back();
  rules::DimMap map = same_dims(x);
  map.back() = std::nullopt;
  return mapped("view_as_complex", x, size, map,
                [](const at::Tensor& local, const Sizes&) { return at::view_as_complex(local.contiguous()); },
                rules::kNotLinear, {complex_type(x)});
}

DTensor view_as_real(const DTensor& x) {
  if (!at::isComplexType(x.scalar_type())) {
    fail(ErrorCode::invalid_argument, "view_as_real of {}: expected a complex dtype", c10::toString(x.scalar_type()));
  }
  Sizes size = x.size();
  size.push_back(2);
  return mapped("view_as_real", x, size, same_dims(x),
                [](const at::Tensor& local, const Sizes&) { return at::view_as_real(local.resolve_conj()); },
                rules::kNotLinear, {c10::toRealValueType(x.scalar_type())});
}

DTensor conj(const DTensor& x) {
  if (!at::isComplexType(x.scalar_type())) return x;
  return unary("conj", x, Linearity::linear, [](const at::Tensor& t) { return t.conj().resolve_conj(); });
}

DTensor real(const DTensor& x) {
  if (!at::isComplexType(x.scalar_type())) return x;
  return unary("real", x, Linearity::linear, [](const at::Tensor& t) { return at::real(t); });
}

DTensor imag(const DTensor& x) {
  return unary("imag", x, Linearity::linear, [](const at::Tensor& t) { return at::imag(t); });
}

namespace {

enum class Spectrum : std::uint8_t { full, half, from_half };

// `f` takes a local tensor, the sizes and the dimensions.
template <typename F>
DTensor transformed(const char* op, const DTensor& x, const FftOptions& options, Spectrum spectrum, const F& f) {
  Sizes dims = options.dims;
  if (dims.empty()) {
    dims.resize(options.sizes.empty() ? x.size().size() : options.sizes.size());
    std::iota(dims.begin(), dims.end(), -static_cast<std::int64_t>(dims.size()));
  }
  for (std::int64_t& dim : dims) dim = rules::dim_from_front(op, dim, x.dim());
  const Sizes unsharded = rules::dims_from_front(op, dims, x.dim());  // throws if one is there twice
  Sizes sizes = options.sizes, size = x.size();
  if (sizes.empty()) {
    for (const std::int64_t dim : dims) sizes.push_back(x.size(dim));
    if (spectrum == Spectrum::from_half && !sizes.empty()) sizes.back() = 2 * (sizes.back() - 1);
  }
  if (sizes.size() != dims.size() || sizes.empty() ||
      std::any_of(sizes.begin(), sizes.end(), [](std::int64_t n) { return n < 1; })) {
    fail(ErrorCode::invalid_argument, "{} of size {} to sizes {} of dimensions {}: expected a size >= 1 for each", op,
         shape_to_string(x.size()), shape_to_string(sizes), shape_to_string(dims));
  }
  for (std::size_t i = 0; i < dims.size(); ++i) size[static_cast<std::size_t>(dims[i])] = sizes[i];
  if (spectrum == Spectrum::half) size[static_cast<std::size_t>(dims.back())] = sizes.back() / 2 + 1;
  rules::DimMap map = same_dims(x);
  for (const std::int64_t dim : unsharded) map[static_cast<std::size_t>(dim)] = std::nullopt;
  return mapped(
      op, x, size, map,
      [&](const at::Tensor& local, const Sizes&) {
        return even_if_empty(local, kept_by(map), [&](const at::Tensor& t) { return f(t, sizes, dims, options.norm); });
      },
      rules::kNotLinear, {spectrum == Spectrum::from_half ? c10::toRealValueType(complex_type(x)) : complex_type(x)});
}

FftOptions of_one_dim(std::optional<std::int64_t> size, std::int64_t dim) {
  FftOptions options;
  if (size) options.sizes = {*size};
  options.dims = {dim};
  return options;
}

}  // namespace

DTensor fft_fftn(const DTensor& x, const FftOptions& options) {
  return transformed("fft_fftn", x, options, Spectrum::full,
                     [](const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef dims, const std::string& norm) {
                       return at::fft_fftn(t, sizes, dims, norm);
                     });
}
DTensor fft_ifftn(const DTensor& x, const FftOptions& options) {
  return transformed("fft_ifftn", x, options, Spectrum::full,
                     [](const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef dims, const std::string& norm) {
                       return at::fft_ifftn(t, sizes, dims, norm);
                     });
}
DTensor fft_rfftn(const DTensor& x, const FftOptions& options) {
  return transformed("fft_rfftn", x, options, Spectrum::half,
                     [](const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef dims, const std::string& norm) {
                       return at::fft_rfftn(t, sizes, dims, norm);
                     });
}
DTensor fft_irfftn(const DTensor& x, const FftOptions& options) {
  return transformed("fft_irfftn", x, options, Spectrum::from_half,
                     [](const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef dims, const std::string& norm) {
                       return at::fft_irfftn(t, sizes, dims, norm);
                     });
}

DTensor fft_fft(const DTensor& x, std::optional<std::int64_t> size, std::int64_t dim) {
  return fft_fftn(x, of_one_dim(size, dim));
}
DTensor fft_ifft(const DTensor& x, std::optional<std::int64_t> size, std::int64_t dim) {
  return fft_ifftn(x, of_one_dim(size, dim));
}
DTensor fft_rfft(const DTensor& x, std::optional<std::int64_t> size, std::int64_t dim) {
  return fft_rfftn(x, of_one_dim(size, dim));
}
DTensor fft_irfft(const DTensor& x, std::optional<std::int64_t> size, std::int64_t dim) {
  return fft_irfftn(x, of_one_dim(size, dim));
}

}  // namespace tessera::dtensor

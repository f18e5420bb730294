#pragma once
/// \file
/// Complex DTensors and Fourier transforms, with ATen's names and results.
///
/// All are linear: partial sums and averages need no reduction. They are collectives of the mesh's ranks and throw as
/// `call` does. PyTorch: torch.view_as_complex and so on, torch.fft.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/tensor/dtensor.h"

namespace tessera::dtensor {

// Convert between [..., 2] of a floating-point dtype and [...] of the complex one. `view_as_complex` unshards the last
// dimension.
DTensor view_as_complex(const DTensor& x);
DTensor view_as_real(const DTensor& x);
DTensor conj(const DTensor& x);  ///< x itself if it is real
DTensor real(const DTensor& x);
DTensor imag(const DTensor& x);

// Fourier transforms over `dims`, by default over as many last dimensions as there are `sizes`, or over all. Each is
// truncated or padded to its size first, by default its own; of `fft_irfftn`, the last size is that of the result. `r`
// stands for transforms between real tensors and the first half of their spectrum along the last of `dims`. `norm` is
// "forward", "backward" or "ortho": which direction divides by the number of elements, or by its root. They unshard
// `dims`.
struct FftOptions {
  std::vector<std::int64_t> sizes = {};
  std::vector<std::int64_t> dims = {};
  std::string norm = "backward";
};
DTensor fft_fftn(const DTensor& x, const FftOptions& options = {});
DTensor fft_ifftn(const DTensor& x, const FftOptions& options = {});
DTensor fft_rfftn(const DTensor& x, const FftOptions& options = {});
DTensor fft_irfftn(const DTensor& x, const FftOptions& options = {});
// Over one dimension.
DTensor fft_fft(const DTensor& x, std::optional<std::int64_t> size = std::nullopt, std::int64_t dim = -1);
DTensor fft_ifft(const DTensor& x, std::optional<std::int64_t> size = std::nullopt, std::int64_t dim = -1);
DTensor fft_rfft(const DTensor& x, std::optional<std::int64_t> size = std::nullopt, std::int64_t dim = -1);
DTensor fft_irfft(const DTensor& x, std::optional<std::int64_t> size = std::nullopt, std::int64_t dim = -1);

}  // namespace tessera::dtensor

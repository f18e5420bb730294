// Ops on DTensors that rearrange elements, Fourier transforms and convolutions, beside those of ATen.

#include <ATen/ATen.h>

#include "tensor/dtensor_ops/op_cases.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/dtensor_ops/convolution.h"
#include "tessera/tensor/dtensor_ops/fft.h"

namespace tessera::testing {

namespace {

using Values = const std::vector<DTensor>&;
using Tensors = const std::vector<at::Tensor>&;

std::vector<OpCase> further_view_cases() {
  return {
      {"movedim",
       {{5, 4, 3}},
       [](Values v) {
         return dtensor::movedim(v[0], {-1, 0}, {0, 1});
       },
       [](Tensors a) {
         return at::movedim(a[0], {-1, 0}, {0, 1});
       }},
      {"repeat",
       {{5, 4}},
       [](Values v) {
         return dtensor::repeat(v[0], {2, 1, 3});
       },
       [](Tensors a) {
         return a[0].repeat({2, 1, 3});
       }},
      {"tile",
       {{5, 4}},
       [](Values v) { return dtensor::tile(v[0], {2}); },
       [](Tensors a) { return at::tile(a[0], {2}); }},
      {"ravel", {{4, 6}}, [](Values v) { return dtensor::ravel(v[0]); }, [](Tensors a) { return a[0].ravel(); }},
      {"unflatten",
       {{8, 4}},
       [](Values v) {
         return dtensor::unflatten(v[0], 0, {2, -1});
       },
       [](Tensors a) {
         return a[0].view({2, 4, 4});
       }},
      {"atleast",
       {{5}, {}},
       [](Values v) { return dtensor::atleast_3d(v[0]) * dtensor::atleast_2d(v[0]) * dtensor::atleast_1d(v[1]); },
       [](Tensors a) { return at::atleast_3d(a[0]) * at::atleast_2d(a[0]) * at::atleast_1d(a[1]); }},
      {"squeeze_variants",
       {{1, 5, 1, 4, 1}},
       [](Values v) {
         return dtensor::squeeze(v[0]) * dtensor::squeeze(dtensor::squeeze(v[0], {0, -1}), {1, 0});
       },
       [](Tensors a) { return a[0].squeeze() * a[0].squeeze(); }},
      {"contiguous",
       {{5, 4}},
       [](Values v) { return dtensor::contiguous(dtensor::transpose(v[0], 0, 1)); },
       [](Tensors a) { return a[0].t(); }},
      {"flatten_middle",
       {{2, 4, 3}},
       [](Values v) { return dtensor::flatten(v[0], 0, 1); },
       [](Tensors a) { return a[0].flatten(0, 1); }},
      {"flatten_and_back",
       {{3, 8, 2}},
       [](Values v) {
         return dtensor::view(dtensor::relu(dtensor::flatten(v[0])), {3, 8, 2});
       },
       [](Tensors a) { return a[0].relu(); }},
      {"regroup",
       {{6, 4, 2}},
       [](Values v) {
         return dtensor::view(v[0], {2, 12, 2});
       },
       [](Tensors a) {
         return a[0].view({2, 12, 2});
       }},
  };
}

std::vector<OpCase> padding_cases() {
  using dtensor::PadMode;
  const auto classes = [](const at::Tensor& x) { return x.detach().mul(2).to(at::kLong); };
  return {
      {"pad_rows",
       {{5, 4}},
       [](Values v) {
         return dtensor::pad(v[0], {0, 0, 1, 2});
       },
       [](Tensors a) {
         return at::constant_pad_nd(a[0], {0, 0, 1, 2});
       }},
      {"pad_columns",
       {{5, 4}},
       [](Values v) {
         return dtensor::constant_pad_nd(v[0], {2, -1}, 7);
       },
       [](Tensors a) {
         return at::constant_pad_nd(a[0], {2, -1}, 7);
       }},
      {"pad_modes",
       {{2, 5, 4}},
       [](Values v) {
         return dtensor::pad(v[0], {2, 1}, PadMode::reflect) + dtensor::pad(v[0], {2, 1}, PadMode::replicate) * 2 +
                dtensor::pad(v[0], {2, 1}, PadMode::circular) * 3;
       },
       [](Tensors a) {
         return at::pad(a[0], {2, 1}, "reflect") + at::pad(a[0], {2, 1}, "replicate") * 2 +
                at::pad(a[0], {2, 1}, "circular") * 3;
       }},
      {"roll_columns",
       {{5, 4}},
       [](Values v) {
         return dtensor::roll(v[0], {-1}, {1}) * dtensor::roll(v[0], {2, 3}, {0, -1}) * dtensor::roll(v[0], {7});
       },
       [](Tensors a) {
         return a[0].roll({-1}, {1}) * a[0].roll({2, 3}, {0, -1}) * a[0].roll({7});
       }},
      {"flip_rows",
       {{5, 4}},
       [](Values v) { return dtensor::flip(v[0], {0}); },
       [](Tensors a) { return a[0].flip({0}); }},
      {"one_hot",
       {{5, 4}},
       [](Values v) {
         const DTensor x = dtensor::to(v[0].detach() * 2, at::kLong);
         return dtensor::to(dtensor::one_hot(x), at::kDouble) * 2 + dtensor::to(dtensor::one_hot(x, 5), at::kDouble);
       },
       [=](Tensors a) {
         return at::one_hot(classes(a[0])).to(at::kDouble) * 2 + at::one_hot(classes(a[0]), 5).to(at::kDouble);
       },
       false},
      {"bucketize",
       {{5, 4}, {3}},
       [](Values v) {
         const DTensor bounds = dtensor::cumsum(v[1] / 3, 0);
         return dtensor::to(dtensor::bucketize(v[0], bounds), at::kDouble) +
                dtensor::to(dtensor::bucketize(v[0], bounds, true, true), at::kDouble) * 10;
       },
       [](Tensors a) {
         const at::Tensor bounds = (a[1] / 3).cumsum(0);
         return at::bucketize(a[0], bounds).to(at::kDouble) +
                at::bucketize(a[0], bounds, true, true).to(at::kDouble) * 10;
       },
       false},
      {"where_of_numbers",
       {{5, 4}},
       [](Values v) {
         const DTensor is_large = dtensor::gt(v[0], 1.5);
         return dtensor::where(is_large, v[0], 2) * dtensor::where(is_large, 3.5, v[0]) +
                dtensor::where(is_large, 1, 0);
       },
       [](Tensors a) {
         const at::Tensor is_large = a[0].gt(1.5);
         return at::where(is_large, a[0], 2) * at::where(is_large, 3.5, a[0]) + at::where(is_large, 1, 0);
       }},
  };
}

std::vector<OpCase> complex_cases() {
  return {
      {"complex_views",
       {{5, 3, 2}},
       [](Values v) { return dtensor::view_as_real(dtensor::conj(dtensor::view_as_complex(v[0]))); },
       [](Tensors a) { return at::view_as_real(at::view_as_complex(a[0]).conj().resolve_conj()); }},
      {"real_and_imag",
       {{5, 3, 2}},
       [](Values v) {
         const DTensor x = dtensor::view_as_complex(v[0]);
         return dtensor::real(x) * dtensor::imag(x);
       },
       [](Tensors a) {
         const at::Tensor x = at::view_as_complex(a[0]);
         return at::real(x) * at::imag(x);
       }},
      {"fft",
       {{5, 4}},
       [](Values v) { return dtensor::view_as_real(dtensor::fft_ifft(dtensor::fft_fft(v[0], std::nullopt, 0), 6, 1)); },
       [](Tensors a) { return at::view_as_real(at::fft_ifft(at::fft_fft(a[0], 5, 0), 6, 1)); }},
      {"rfft",
       {{5, 4}},
       [](Values v) { return dtensor::fft_irfft(dtensor::fft_rfft(v[0], 6), 5); },
       [](Tensors a) { return at::fft_irfft(at::fft_rfft(a[0], 6), 5); }},
      {"fft_of_all",
       {{5, 4}},
       [](Values v) {
         return dtensor::view_as_real(dtensor::fft_ifftn(dtensor::fft_fftn(v[0], {{3, 5}, {}, "ortho"}), {{}, {0}}));
       },
       [](Tensors a) {
         const std::int64_t first = 0;
         return at::view_as_real(at::fft_ifftn(at::fft_fftn(a[0], at::IntArrayRef{3, 5}, {}, std::string("ortho")), {},
                                               at::IntArrayRef(first)));
       }},
      {"rfft_of_all",
       {{5, 4}},
       [](Values v) { return dtensor::fft_irfftn(dtensor::fft_rfftn(v[0])) + dtensor::sum(v[0]); },
       [](Tensors a) { return at::fft_irfftn(at::fft_rfftn(a[0])) + a[0].sum(); }},
  };
}

dtensor::ConvolutionOptions convolved(Sizes stride, Sizes padding, Sizes dilation = {1}, std::int64_t groups = 1) {
  dtensor::ConvolutionOptions options;
  options.stride = std::move(stride);
  options.padding = std::move(padding);
  options.dilation = std::move(dilation);
  options.groups = groups;
  return options;
}

std::vector<OpCase> convolution_cases() {
  const auto transposed = [] {
    dtensor::ConvolutionOptions options = convolved({2}, {1});
    options.transposed = true;
    options.output_padding = {1};
    return options;
  };
  return {
      {"conv1d",
       {{5, 4, 6}, {3, 4, 3}, {3}},
       [](Values v) { return dtensor::convolution(v[0], v[1], v[2], convolved({1}, {1})); },
       [](Tensors a) { return at::conv1d(a[0], a[1], a[2], 1, 1); }},
      {"conv2d_without_bias",
       {{2, 3, 6, 5}, {4, 3, 3, 2}},
       [](Values v) {
         return dtensor::convolution(v[0], v[1], std::nullopt, convolved({2, 1}, {1, 0}, {2, 1}));
       },
       [](Tensors a) {
         return at::conv2d(a[0], a[1], {}, {2, 1}, {1, 0}, {2, 1});
       }},
      {"conv2d_by_groups",
       {{3, 4, 5, 4}, {8, 1, 2, 2}, {8}},
       [](Values v) { return dtensor::convolution(v[0], v[1], v[2], convolved({1}, {1}, {1}, 4)); },
       [](Tensors a) { return at::conv2d(a[0], a[1], a[2], 1, 1, 1, 4); }},
      {"conv3d",
       {{2, 2, 3, 4, 3}, {3, 2, 2, 2, 2}, {3}},
       [](Values v) { return dtensor::convolution(v[0], v[1], v[2], convolved({1}, {1})); },
       [](Tensors a) { return at::conv3d(a[0], a[1], a[2], 1, 1); }},
      {"conv_transpose2d",
       {{3, 2, 3, 4}, {2, 3, 3, 3}, {3}},
       [=](Values v) { return dtensor::convolution(v[0], v[1], v[2], transposed()); },
       [](Tensors a) { return at::conv_transpose2d(a[0], a[1], a[2], 2, 1, 1); }},
      {"max_pool2d",
       {{5, 3, 6, 5}},
       [](Values v) {
         return dtensor::max_pool(v[0], {.kernel = {3, 2}, .stride = {2}, .padding = {1}, .ceil_mode = true});
       },
       [](Tensors a) {
         return at::max_pool2d(a[0], {3, 2}, 2, 1, 1, true);
       }},
      {"avg_pool",
       {{5, 3, 6}},
       [](Values v) {
         return dtensor::avg_pool(v[0], {.kernel = {2}}) +
                dtensor::avg_pool(v[0], {.kernel = {3}, .stride = {2}, .padding = {1}, .count_include_pad = false});
       },
       [](Tensors a) { return at::avg_pool1d(a[0], 2) + at::avg_pool1d(a[0], 3, 2, 1, false, false); }},
      {"adaptive_max_pool",
       {{4, 2, 7}, {3, 2, 6, 5}, {2, 2, 4, 3, 2}},
       [](Values v) {
         return dtensor::sum(dtensor::adaptive_max_pool(v[0], {3})) *
                    dtensor::sum(dtensor::adaptive_max_pool(v[2], {2, 2, 1})) +
                dtensor::adaptive_max_pool_with_indices(v[1], {2, 3}).values;
       },
       [](Tensors a) {
         return std::get<0>(at::adaptive_max_pool1d(a[0], {3})).sum() *
                    std::get<0>(at::adaptive_max_pool3d(a[2], {2, 2, 1})).sum() +
                std::get<0>(at::adaptive_max_pool2d(a[1], {2, 3}));
       }},
      {"places_of_maxima",
       {{5, 3, 6, 4}},
       [](Values v) {
         return dtensor::to(dtensor::adaptive_max_pool_with_indices(v[0], {3, 2}).indices, at::kDouble) * 100 +
                dtensor::to(dtensor::max_pool_with_indices(v[0], {.kernel = {2}}).indices, at::kDouble);
       },
       [](Tensors a) {
         return std::get<1>(at::adaptive_max_pool2d(a[0], {3, 2})).to(at::kDouble) * 100 +
                std::get<1>(at::max_pool2d_with_indices(a[0], {2})).to(at::kDouble);
       },
       false},
      {"maxima_with_places",
       {{5, 3, 6}, {3, 2, 4, 4}, {2, 2, 4, 3, 2}},
       [](Values v) {
         return dtensor::sum(dtensor::max_pool_with_indices(v[0], {.kernel = {2}, .padding = {1}}).values) *
                    dtensor::sum(dtensor::max_pool_with_indices(v[2], {.kernel = {2}}).values) +
                dtensor::max_pool_with_indices(v[1], {.kernel = {3, 2}, .stride = {1}}).values;
       },
       [](Tensors a) {
         return at::max_pool1d(a[0], 2, 2, 1).sum() * at::max_pool3d(a[2], 2).sum() + at::max_pool2d(a[1], {3, 2}, 1);
       }},
      {"adaptive_avg_pool2d",
       {{5, 3, 6, 5}},
       [](Values v) {
         return dtensor::adaptive_avg_pool(v[0], {2, 3});
       },
       [](Tensors a) {
         return at::adaptive_avg_pool2d(a[0], {2, 3});
       }},
  };
}

}  // namespace

std::vector<OpCase> rearranging_cases() {
  std::vector<OpCase> all;
  for (const auto& more : {further_view_cases(), padding_cases(), complex_cases()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

std::vector<OpCase> spatial_cases() { return convolution_cases(); }

}  // namespace tessera::testing

// Ops on DTensors that rearrange elements, and Fourier transforms, beside those of ATen.

#include <ATen/ATen.h>

#include "tensor/dtensor_ops/op_cases.h"
#include "tessera/tensor/dtensor_ops.h"
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
      {"norms_of_complex",
       {{5, 3, 2}},
       [](Values v) {
         const DTensor x = dtensor::view_as_complex(v[0]);
         return dtensor::vector_norm(x, 2, {0}) * dtensor::var(x, {0}) + dtensor::vector_norm(x, 0);
       },
       [](Tensors a) {
         const at::Tensor deviations = a[0] - a[0].sum(0, true) / 5;
         return a[0].square().sum(2).sum(0).sqrt() * deviations.square().sum(2).sum(0) / 4 + 15;
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

}  // namespace

std::vector<OpCase> rearranging_cases() {
  std::vector<OpCase> all;
  for (const auto& more : {further_view_cases(), padding_cases(), complex_cases()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

}  // namespace tessera::testing

// Convolution, pooling, sampling and normalization of DTensors beside those of ATen.

#include <ATen/ATen.h>

#include <limits>

#include "tensor/dtensor_ops/op_cases.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/dtensor_ops/convolution.h"
#include "tessera/tensor/dtensor_ops/normalization.h"

namespace tessera::testing {

namespace {

using Images = const std::vector<DTensor>&;
using AtenImages = const std::vector<at::Tensor>&;

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
       [](Images v) { return dtensor::convolution(v[0], v[1], v[2], convolved({1}, {1})); },
       [](AtenImages a) { return at::conv1d(a[0], a[1], a[2], 1, 1); }},
      {"conv2d_without_bias",
       {{2, 3, 6, 5}, {4, 3, 3, 2}},
       [](Images v) {
         return dtensor::convolution(v[0], v[1], std::nullopt, convolved({2, 1}, {1, 0}, {2, 1}));
       },
       [](AtenImages a) {
         return at::conv2d(a[0], a[1], {}, {2, 1}, {1, 0}, {2, 1});
       }},
      {"conv2d_by_groups",
       {{3, 4, 5, 4}, {8, 1, 2, 2}, {8}},
       [](Images v) { return dtensor::convolution(v[0], v[1], v[2], convolved({1}, {1}, {1}, 4)); },
       [](AtenImages a) { return at::conv2d(a[0], a[1], a[2], 1, 1, 1, 4); }},
      {"conv3d",
       {{2, 2, 3, 4, 3}, {3, 2, 2, 2, 2}, {3}},
       [](Images v) { return dtensor::convolution(v[0], v[1], v[2], convolved({1}, {1})); },
       [](AtenImages a) { return at::conv3d(a[0], a[1], a[2], 1, 1); }},
      {"conv_transpose2d",
       {{3, 2, 3, 4}, {2, 3, 3, 3}, {3}},
       [=](Images v) { return dtensor::convolution(v[0], v[1], v[2], transposed()); },
       [](AtenImages a) { return at::conv_transpose2d(a[0], a[1], a[2], 2, 1, 1); }},
      {"max_pool2d",
       {{5, 3, 6, 5}},
       [](Images v) {
         return dtensor::max_pool(v[0], {.kernel = {3, 2}, .stride = {2}, .padding = {1}, .ceil_mode = true});
       },
       [](AtenImages a) {
         return at::max_pool2d(a[0], {3, 2}, 2, 1, 1, true);
       }},
      {"avg_pool",
       {{5, 3, 6}},
       [](Images v) {
         return dtensor::avg_pool(v[0], {.kernel = {2}}) +
                dtensor::avg_pool(v[0], {.kernel = {3}, .stride = {2}, .padding = {1}, .count_include_pad = false});
       },
       [](AtenImages a) { return at::avg_pool1d(a[0], 2) + at::avg_pool1d(a[0], 3, 2, 1, false, false); }},
      {"adaptive_max_pool",
       {{4, 2, 7}, {3, 2, 6, 5}, {2, 2, 4, 3, 2}},
       [](Images v) {
         return dtensor::sum(dtensor::adaptive_max_pool(v[0], {3})) *
                    dtensor::sum(dtensor::adaptive_max_pool(v[2], {2, 2, 1})) +
                dtensor::adaptive_max_pool_with_indices(v[1], {2, 3}).values;
       },
       [](AtenImages a) {
         return std::get<0>(at::adaptive_max_pool1d(a[0], {3})).sum() *
                    std::get<0>(at::adaptive_max_pool3d(a[2], {2, 2, 1})).sum() +
                std::get<0>(at::adaptive_max_pool2d(a[1], {2, 3}));
       }},
      {"places_of_maxima",
       {{5, 3, 6, 4}},
       [](Images v) {
         return dtensor::to(dtensor::adaptive_max_pool_with_indices(v[0], {3, 2}).indices, at::kDouble) * 100 +
                dtensor::to(dtensor::max_pool_with_indices(v[0], {.kernel = {2}}).indices, at::kDouble);
       },
       [](AtenImages a) {
         return std::get<1>(at::adaptive_max_pool2d(a[0], {3, 2})).to(at::kDouble) * 100 +
                std::get<1>(at::max_pool2d_with_indices(a[0], {2})).to(at::kDouble);
       },
       false},
      {"maxima_with_places",
       {{5, 3, 6}, {3, 2, 4, 4}, {2, 2, 4, 3, 2}},
       [](Images v) {
         return dtensor::sum(dtensor::max_pool_with_indices(v[0], {.kernel = {2}, .padding = {1}}).values) *
                    dtensor::sum(dtensor::max_pool_with_indices(v[2], {.kernel = {2}}).values) +
                dtensor::max_pool_with_indices(v[1], {.kernel = {3, 2}, .stride = {1}}).values;
       },
       [](AtenImages a) {
         return at::max_pool1d(a[0], 2, 2, 1).sum() * at::max_pool3d(a[2], 2).sum() + at::max_pool2d(a[1], {3, 2}, 1);
       }},
      {"adaptive_avg_pool2d",
       {{5, 3, 6, 5}},
       [](Images v) {
         return dtensor::adaptive_avg_pool(v[0], {2, 3});
       },
       [](AtenImages a) {
         return at::adaptive_avg_pool2d(a[0], {2, 3});
       }},
  };
}

std::vector<OpCase> sampling_cases() {
  using dtensor::GridPadding;
  using dtensor::Interpolation;
  constexpr std::int64_t kLinear = 0, kNearest = 1, kCubic = 2, kZeros = 0, kBorder = 1, kReflection = 2;
  return {
      {"grid_sampler",
       {{4, 2, 5, 4}, {4, 3, 6, 2}},
       [](Images v) {
         const DTensor grid = v[1] - 1.5;
         return dtensor::grid_sampler(v[0], grid) +
                dtensor::grid_sampler(v[0], grid * 1.5, Interpolation::bicubic, GridPadding::reflection, true) * 2 +
                dtensor::grid_sampler(v[0], grid * 2, Interpolation::nearest, GridPadding::border) * 3;
       },
       [=](AtenImages a) {
         const at::Tensor grid = a[1] - 1.5;
         return at::grid_sampler(a[0], grid, kLinear, kZeros, false) +
                at::grid_sampler(a[0], grid * 1.5, kCubic, kReflection, true) * 2 +
                at::grid_sampler(a[0], grid * 2, kNearest, kBorder, false) * 3;
       }},
      {"grid_sampler_with_depth",
       {{3, 2, 3, 2, 4}, {3, 2, 2, 3, 3}},
       [](Images v) {
         return dtensor::grid_sampler(v[0], v[1] - 1.5, Interpolation::linear, GridPadding::border, true) +
                dtensor::grid_sampler(v[0], v[1] - 1.5, Interpolation::nearest);
       },
       [=](AtenImages a) {
         return at::grid_sampler(a[0], a[1] - 1.5, kLinear, kBorder, true) +
                at::grid_sampler(a[0], a[1] - 1.5, kNearest, kZeros, false);
       }},
      {"affine_grid",
       {{5, 2, 3}, {5, 3, 4}},
       [](Images v) {
         return dtensor::affine_grid_generator(v[0], {5, 2, 3, 4}, true) *
                dtensor::sum(dtensor::affine_grid_generator(v[1], {5, 1, 2, 3, 2}));
       },
       [](AtenImages a) {
         return at::affine_grid_generator(a[0], {5, 2, 3, 4}, true) *
                at::affine_grid_generator(a[1], {5, 1, 2, 3, 2}, false).sum();
       }},
      {"max_unpool",
       {{5, 3, 6, 4}, {2, 2, 4, 2, 2}},
       [](Images v) {
         const auto unpooled = [](const DTensor& x, const Sizes& size) {
           const auto [values, indices] = dtensor::max_pool_with_indices(x, {.kernel = {2}});
           return dtensor::max_unpool(values, indices, size);
         };
         const DTensor rows = dtensor::flatten(v[0], 2);
         return unpooled(v[0], {7, 4}) * dtensor::sum(unpooled(rows, {24}) * rows) +
                dtensor::sum(unpooled(v[1], {4, 3, 2}) * 0.1);
       },
       [](AtenImages a) {
         const at::Tensor rows = a[0].flatten(2);
         const auto [of_one, at_one] = at::max_pool1d_with_indices(rows, 2);
         const auto [of_two, at_two] = at::max_pool2d_with_indices(a[0], 2);
         const auto [of_three, at_three] = at::max_pool3d_with_indices(a[1], 2);
         const at::Tensor one = at::max_unpool2d(of_one.unsqueeze(3), at_one.unsqueeze(3), {24, 1}).squeeze(3);
         return at::max_unpool2d(of_two, at_two, {7, 4}) * (one * rows).sum() +
                (at::max_unpool3d(of_three, at_three, {4, 3, 2}, {1, 1, 1}, {0, 0, 0}) * 0.1).sum();
       }},
      {"fractional_max_pool2d",
       {{4, 3, 7, 6}, {4, 3, 2}},
       [](Images v) {
         const auto [values, indices] = dtensor::fractional_max_pool(v[0], {2}, {4, 3}, v[1] * 0.3);
         return values + dtensor::to(indices, at::kDouble) * 0.1 + dtensor::sum(v[1]);
       },
       [](AtenImages a) {
         const auto [values, indices] = at::fractional_max_pool2d(a[0], {2, 2}, {4, 3}, (a[1] * 0.3).detach());
         return values + indices.to(at::kDouble) * 0.1 + a[1].sum();
       }},
      {"fractional_max_pool3d",
       {{2, 2, 5, 4, 4}, {2, 2, 3}},
       [](Images v) {
         const auto [values, indices] = dtensor::fractional_max_pool(v[0], {2, 1, 2}, {3, 2, 2}, v[1] * 0.3);
         return values * dtensor::to(indices, at::kDouble) + dtensor::sum(v[1]);
       },
       [](AtenImages a) {
         const auto [values, indices] = at::fractional_max_pool3d(a[0], {2, 1, 2}, {3, 2, 2}, (a[1] * 0.3).detach());
         return values * indices.to(at::kDouble) + a[1].sum();
       }},
  };
}

std::vector<OpCase> normalization_cases() {
  constexpr double kMasked = -std::numeric_limits<double>::infinity();
  const at::Tensor rows = at::arange(5).remainder(3).eq(1).unsqueeze(1), places = at::arange(20).view({5, 4}).eq(10);
  const at::Tensor mean = at::tensor({1.0, 1.5, 2.0}, at::kDouble), var = at::tensor({0.5, 1.0, 2.0}, at::kDouble);
  return {
      {"safe_softmax",
       {{5, 4}},
       [=](Images v) {
         const DTensor x = v[0] + at::zeros({5, 4}, at::kDouble).masked_fill(rows.logical_or(places), kMasked);
         return dtensor::safe_softmax(x, -1) + dtensor::t(dtensor::safe_softmax(dtensor::t(x * 0.5), 0)) * 2;
       },
       [=](AtenImages a) {
         const at::Tensor x = a[0].masked_fill(places, kMasked);
         return (at::softmax(x, -1) + at::softmax(x * 0.5, -1) * 2).masked_fill(rows, 0);
       }},
      {"group_norm",
       {{4, 6, 3}, {6}, {6}},
       [](Images v) {
         return dtensor::group_norm(v[0], 2, v[1], v[2]) + dtensor::group_norm(v[0], 6) * 2 +
                dtensor::group_norm(v[0], 1, std::nullopt, v[2], 0.1);
       },
       [](AtenImages a) {
         return at::group_norm(a[0], 2, a[1], a[2]) + at::group_norm(a[0], 6) * 2 +
                at::group_norm(a[0], 1, {}, {}, 0.1) + a[2].reshape({6, 1});
       }},
      {"batch_norm",
       {{4, 3, 2, 2}, {3}, {3}},
       [=](Images v) {
         const auto on_every_rank = [&](const at::Tensor& t) {
           return DTensor::from_local(t.clone(), v[0].device_mesh());
         };
         const dtensor::BatchNormOptions training{on_every_rank(mean), on_every_rank(var), true, 0.3, 1e-3},
             none{.training = true}, evaluation{on_every_rank(mean), on_every_rank(var)};
         const DTensor result = dtensor::batch_norm(v[0], v[1], v[2], training);
         const DTensor running = *training.running_mean + *training.running_var * 2;
         return result + dtensor::batch_norm(v[0], std::nullopt, v[2], none) +
                dtensor::batch_norm(v[0], v[1], v[2], evaluation) * 2 + dtensor::reshape(running, {3, 1, 1});
       },
       [=](AtenImages a) {
         const at::Tensor running_mean = mean.clone(), running_var = var.clone();
         const at::Tensor result = at::batch_norm(a[0], a[1], a[2], running_mean, running_var, true, 0.3, 1e-3, false);
         return result + at::batch_norm(a[0], at::ones_like(mean), a[2], {}, {}, true, 0.1, 1e-5, false) +
                at::batch_norm(a[0], a[1], a[2], mean, var, false, 0.1, 1e-5, false) * 2 +
                (running_mean + running_var * 2).reshape({3, 1, 1});
       }},
  };
}

}  // namespace

std::vector<OpCase> spatial_cases() {
  std::vector<OpCase> all;
  for (const auto& more : {convolution_cases(), sampling_cases(), normalization_cases()})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace tessera::testing

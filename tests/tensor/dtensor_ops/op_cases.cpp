#include "tensor/dtensor_ops/op_cases.h"

#include <ATen/ATen.h>

#include "tessera/tensor/dtensor_ops.h"

namespace tessera::testing {

namespace {

using V = const std::vector<DTensor>&;
using A = const std::vector<at::Tensor>&;

}  // namespace

std::vector<OpCase> op_cases() {
  return {
      {"relu", {{5, 4}}, [](V v) { return dtensor::relu(v[0]); }, [](A a) { return at::relu(a[0]); }},
      {"gelu", {{5, 4}}, [](V v) { return dtensor::gelu(v[0]); }, [](A a) { return at::gelu(a[0]); }},
      {"neg", {{5, 4}}, [](V v) { return dtensor::neg(v[0]); }, [](A a) { return at::neg(a[0]); }},
      {"add", {{5, 4}, {5, 4}}, [](V v) { return v[0] + v[1]; }, [](A a) { return a[0] + a[1]; }},
      {"add_row", {{5, 4}, {4}}, [](V v) { return v[0] + v[1]; }, [](A a) { return a[0] + a[1]; }},
      {"sub_column", {{5, 4}, {5, 1}}, [](V v) { return v[0] - v[1]; }, [](A a) { return a[0] - a[1]; }},
      {"mul", {{5, 4}, {5, 4}}, [](V v) { return v[0] * v[1]; }, [](A a) { return a[0] * a[1]; }},
      {"div_outer", {{5, 1}, {1, 4}}, [](V v) { return v[0] / v[1]; }, [](A a) { return a[0] / a[1]; }},
      {"mul_scalar", {{5, 4}}, [](V v) { return dtensor::mul(v[0], 3); }, [](A a) { return a[0] * 3; }},
      {"pow", {{5, 4}}, [](V v) { return dtensor::pow(v[0], 3); }, [](A a) { return a[0].pow(3); }},
      {"matmul",
       {{5, 4}, {4, 3}},
       [](V v) { return dtensor::matmul(v[0], v[1]); },
       [](A a) { return at::matmul(a[0], a[1]); }},
      {"linear",
       {{5, 4}, {6, 4}, {6}},
       [](V v) { return dtensor::linear(v[0], v[1], v[2]); },
       [](A a) { return at::linear(a[0], a[1], a[2]); }},
      {"layer_norm",
       {{5, 4}, {4}, {4}},
       [](V v) { return dtensor::layer_norm(v[0], {4}, v[1], v[2]); },
       [](A a) { return at::layer_norm(a[0], {4}, a[1], a[2]); }},
      {"softmax", {{5, 4}}, [](V v) { return dtensor::softmax(v[0], -1); }, [](A a) { return at::softmax(a[0], -1); }},
      {"log_softmax",
       {{5, 4}},
       [](V v) { return dtensor::log_softmax(v[0], 0); },
       [](A a) { return at::log_softmax(a[0], 0); }},
      {"sum", {{5, 4}}, [](V v) { return dtensor::sum(v[0]); }, [](A a) { return at::sum(a[0]); }},
      {"sum_rows",
       {{5, 4}},
       [](V v) { return dtensor::sum(v[0], {0}, true); },
       [](A a) { return at::sum(a[0], {0}, true); }},
      {"mean", {{5, 4}}, [](V v) { return dtensor::mean(v[0], {-1}); }, [](A a) { return at::mean(a[0], {-1}); }},
      {"amax", {{5, 4}}, [](V v) { return dtensor::amax(v[0], {0}); }, [](A a) { return at::amax(a[0], {0}); }},
      {"amin", {{6, 4}}, [](V v) { return dtensor::amin(v[0]); }, [](A a) { return at::amin(a[0]); }, false},
      {"transpose", {{5, 4}}, [](V v) { return dtensor::transpose(v[0], 0, 1); }, [](A a) { return a[0].t(); }},
  };
}

namespace {

// Returns a replicated DTensor on the mesh of `on`.
DTensor replicated(const DTensor& on, const at::Tensor& full) { return DTensor::from_local(full, on.device_mesh()); }

std::vector<OpCase> pointwise_cases() {
  return {
      {"scalars",
       {{5, 4}},
       [](V v) { return 2.5 - (-v[0] + 1) * 3 / 4 + 1 / v[0] - 7; },
       [](A a) { return 2.5 - (-a[0] + 1) * 3 / 4 + 1 / a[0] - 7; }},
      {"extremes",
       {{5, 4}, {4}},
       [](V v) { return dtensor::maximum(v[0], v[1]) - dtensor::minimum(v[0], v[1]); },
       [](A a) { return at::maximum(a[0], a[1]) - at::minimum(a[0], a[1]); }},
      {"activations",
       {{5, 4}},
       [](V v) { return dtensor::sigmoid(v[0]) + dtensor::silu(v[0]) * dtensor::tanh(dtensor::clone(v[0])); },
       [](A a) { return a[0].sigmoid() + at::silu(a[0]) * a[0].tanh(); }},
      {"dtypes",
       {{5, 4}},
       [](V v) { return dtensor::to(dtensor::to(v[0], at::kFloat), at::kDouble); },
       [](A a) { return a[0].to(at::kFloat).to(at::kDouble); },
       false},
      {"trigonometry",
       {{5, 4}},
       [](V v) { return dtensor::sin(v[0]) * dtensor::cos(v[0]) + dtensor::erf(v[0]); },
       [](A a) { return at::sin(a[0]) * at::cos(a[0]) + at::erf(a[0]); }},
      {"clamp",
       {{5, 4}},
       [](V v) { return dtensor::clamp(v[0], 0.8, 2.1); },
       [](A a) { return at::clamp(a[0], 0.8, 2.1); }},
      {"where",
       {{5, 4}, {4}},
       [](V v) { return dtensor::where(dtensor::gt(v[0], v[1]), v[0], v[1]); },
       [](A a) { return at::where(a[0].gt(a[1]), a[0], a[1]); }},
      {"masked_fill",
       {{5, 4}},
       [](V v) { return dtensor::masked_fill(v[0], dtensor::lt(v[0], 1.5), -3); },
       [](A a) { return a[0].masked_fill(a[0].lt(1.5), -3); }},
      {"comparisons",
       {{5, 4}, {5, 1}},
       [](V v) {
         const auto number = [](const DTensor& x) { return dtensor::to(x, at::kDouble); };
         return number(dtensor::le(v[0], v[1] + 0.003)) + number(dtensor::ge(v[0], 1.7)) * 2 +
                number(dtensor::logical_not(dtensor::ne(v[0], v[1] + 0.003))) * 4 + number(dtensor::eq(v[0], v[0])) * 8;
       },
       [](A a) {
         return a[0].le(a[1] + 0.003).to(at::kDouble) + a[0].ge(1.7).to(at::kDouble) * 2 +
                a[0].eq(a[1] + 0.003).to(at::kDouble) * 4 + 8;
       },
       false},
      {"atan2",
       {{5, 4}, {5, 4}},
       [](V v) {
         return dtensor::pointwise("atan2", v, [](std::span<const DTensor> x) {
           return at::atan2(x[0].local_tensor(), x[1].local_tensor());
         });
       },
       [](A a) { return at::atan2(a[0], a[1]); }},
  };
}

std::vector<OpCase> product_cases() {
  return {
      {"matmul_batches",
       {{2, 1, 3, 4}, {3, 4, 2}},
       [](V v) { return dtensor::matmul(v[0], v[1]); },
       [](A a) { return at::matmul(a[0], a[1]); }},
      {"matmul_vector",
       {{5, 4}, {4}},
       [](V v) { return dtensor::matmul(v[0], v[1]); },
       [](A a) { return at::matmul(a[0], a[1]); }},
      {"matmul_row",
       {{4}, {2, 4, 3}},
       [](V v) { return dtensor::matmul(v[0], v[1]); },
       [](A a) { return at::matmul(a[0], a[1]); }},
      {"dot", {{4}, {4}}, [](V v) { return dtensor::matmul(v[0], v[1]); }, [](A a) { return at::matmul(a[0], a[1]); }},
      {"addmm",
       {{3}, {5, 4}, {4, 3}},
       [](V v) { return dtensor::addmm(v[0], v[1], v[2], 0.5, 2); },
       [](A a) { return at::addmm(a[0], a[1], a[2], 0.5, 2); }},
      {"attention",
       {{4, 3, 5}, {4, 6, 5}, {4, 6, 2}},
       [](V v) { return dtensor::scaled_dot_product_attention(v[0], v[1], v[2]); },
       [](A a) { return at::matmul(at::softmax(at::matmul(a[0], a[1].transpose(1, 2)) / std::sqrt(5.0), -1), a[2]); }},
      {"causal_attention",
       {{4, 3, 5}, {4, 3, 5}, {4, 3, 2}},
       [](V v) { return dtensor::scaled_dot_product_attention(v[0], v[1], v[2], true); },
       [](A a) {
         const at::Tensor mask = at::full({3, 3}, -INFINITY, at::kDouble).triu(1);
         return at::matmul(at::softmax(at::matmul(a[0], a[1].transpose(1, 2)) / std::sqrt(5.0) + mask, -1), a[2]);
       }},
  };
}

std::vector<OpCase> reduction_cases() {
  return {
      {"layer_norm_of_two",
       {{5, 3, 4}, {3, 4}},
       [](V v) {
         return dtensor::layer_norm(v[0], {3, 4}, v[1]);
       },
       [](A a) {
         return at::layer_norm(a[0], {3, 4}, a[1]);
       }},
      {"rms_norm",
       {{5, 4}, {4}},
       [](V v) { return dtensor::rms_norm(v[0], {4}, v[1], 1e-3); },
       [](A a) { return a[0] * at::rsqrt(a[0].square().mean(-1, true) + 1e-3) * a[1]; }},
      {"prod", {{5, 4}}, [](V v) { return dtensor::prod(v[0], {0}); }, [](A a) { return a[0].prod(0); }},
      {"prod_of_all", {{5, 4}}, [](V v) { return dtensor::prod(v[0]); }, [](A a) { return a[0].prod(); }, false},
      {"std_and_logsumexp",
       {{5, 4}},
       [](V v) { return dtensor::std(v[0], {1}) + dtensor::logsumexp(v[0] * 500, {1}); },
       [](A a) { return a[0].std(1) + at::logsumexp(a[0] * 500, {1}); }},
      {"all_and_any",
       {{5, 4}},
       [](V v) {
         const DTensor is_large = dtensor::gt(v[0], 1.7);
         return dtensor::to(dtensor::all(is_large, {0}), at::kDouble) +
                dtensor::to(dtensor::any(is_large, {0}), at::kDouble) * 2 +
                dtensor::to(dtensor::any(is_large), at::kDouble) * 4;
       },
       [](A a) {
         const at::Tensor is_large = a[0].gt(1.7);
         return is_large.all(0).to(at::kDouble) + is_large.any(0).to(at::kDouble) * 2 +
                is_large.any().to(at::kDouble) * 4;
       },
       false},
      {"max_and_min",
       {{5, 4}},
       [](V v) { return dtensor::max(v[0], 0).values * dtensor::min(v[0], 1, true).values; },
       [](A a) { return std::get<0>(a[0].max(0)) * std::get<0>(a[0].min(1, true)); }},
      {"places_of_extremes",
       {{5, 4}},
       [](V v) {
         return dtensor::to(dtensor::max(v[0], 0).indices, at::kDouble) * 10 +
                dtensor::to(dtensor::argmin(v[0], 0), at::kDouble);
       },
       [](A a) { return a[0].argmax(0).to(at::kDouble) * 10 + a[0].argmin(0).to(at::kDouble); },
       false},
      {"sort",
       {{5, 4}},
       [](V v) { return dtensor::sort(v[0], 0, true).values; },
       [](A a) { return std::get<0>(a[0].sort(0, true)); }},
      {"cumprod_and_flip",
       {{5, 4}},
       [](V v) {
         return dtensor::cumprod(dtensor::flip(v[0], {0, 1}), 1);
       },
       [](A a) {
         return a[0].flip({0, 1}).cumprod(1);
       }},
      {"roll",
       {{5, 4}},
       [](V v) {
         return dtensor::along_dims("roll", {v[0]}, {-2},
                                    [](std::span<const DTensor> x) { return at::roll(x[0].local_tensor(), {2}, {0}); });
       },
       [](A a) { return at::roll(a[0], {2}, {0}); }},
      {"norm0",
       {{5, 4}},
       [](V v) { return dtensor::vector_norm(dtensor::clamp(v[0] - 1.5, 0, 9), 0, {0}); },
       [](A a) { return at::linalg_vector_norm((a[0] - 1.5).clamp(0, 9), 0, at::IntArrayRef{0}); },
       false},
      {"norm_of_least",
       {{5, 4}},
       [](V v) { return dtensor::vector_norm(v[0], -INFINITY, {1}) + dtensor::vector_norm(v[0], -2, {1}); },
       [](A a) {
         return at::linalg_vector_norm(a[0], -INFINITY, at::IntArrayRef{1}) +
                at::linalg_vector_norm(a[0], -2, at::IntArrayRef{1});
       }},
      {"softmax_rows", {{5, 4}}, [](V v) { return dtensor::softmax(v[0], 0); }, [](A a) { return a[0].softmax(0); }},
      {"log_softmax_last",
       {{5, 4}},
       [](V v) { return dtensor::log_softmax(v[0], -1); },
       [](A a) { return a[0].log_softmax(-1); }},
      {"var",
       {{5, 4}},
       [](V v) { return dtensor::var(v[0], {0}, 1, true); },
       [](A a) { return a[0].var(at::IntArrayRef{0}, true, true); }},
      {"norm",
       {{5, 4}},
       [](V v) { return dtensor::vector_norm(v[0]); },
       [](A a) { return at::linalg_vector_norm(a[0]); }},
      {"norm3",
       {{5, 4}},
       [](V v) { return dtensor::vector_norm(v[0] - 1.5, 3, {1}, true); },
       [](A a) { return at::linalg_vector_norm(a[0] - 1.5, 3, at::IntArrayRef{1}, true); }},
      {"norm1_and_max",
       {{5, 4}},
       [](V v) { return dtensor::vector_norm(v[0], 1, {0}) + dtensor::vector_norm(v[0], INFINITY, {0}); },
       [](A a) {
         return at::linalg_vector_norm(a[0], 1, at::IntArrayRef{0}) +
                at::linalg_vector_norm(a[0], INFINITY, at::IntArrayRef{0});
       }},
      {"norm_of_zero",
       {{5, 4}},
       [](V v) { return dtensor::vector_norm(v[0] * 0, 2, {1}); },
       [](A a) { return at::linalg_vector_norm(a[0] * 0, 2, at::IntArrayRef{1}); }},
      {"norms_of_elements_of_zero",
       {{5, 4}},
       [](V v) {
         const DTensor x = v[0] * at::tensor({0.0, 1.0, 0.0, -2.0}, at::kDouble);
         return dtensor::vector_norm(x, 0.5, {1}) + dtensor::vector_norm(x, 1.5, {1}) +
                dtensor::vector_norm(x, -1, {1});
       },
       [](A a) {
         const at::Tensor x = a[0] * at::tensor({0.0, 1.0, 0.0, -2.0}, at::kDouble);
         return at::linalg_vector_norm(x, 0.5, at::IntArrayRef{1}) +
                at::linalg_vector_norm(x, 1.5, at::IntArrayRef{1}) + at::linalg_vector_norm(x, -1, at::IntArrayRef{1});
       }},
      {"std_of_equal_elements",
       {{5, 4}},
       [](V v) { return dtensor::std(v[0] * 0 + 1, {1}); },
       [](A a) { return (a[0] * 0 + 1).std(1); }},
      {"cumsum", {{5, 4}}, [](V v) { return dtensor::cumsum(v[0], 0); }, [](A a) { return a[0].cumsum(0); }},
      {"argmax",
       {{5, 4}},
       [](V v) { return dtensor::to(dtensor::argmax(v[0], 1, true), at::kDouble); },
       [](A a) { return a[0].argmax(1, true).to(at::kDouble); },
       false},
      {"topk",
       {{5, 4}},
       [](V v) { return dtensor::topk(v[0], 2, 0).values; },
       [](A a) { return std::get<0>(a[0].topk(2, 0)); }},
      {"topk_smallest",
       {{5, 4}},
       [](V v) { return dtensor::to(dtensor::topk(v[0], 3, -1, false).indices, at::kDouble); },
       [](A a) { return std::get<1>(a[0].topk(3, -1, false)).to(at::kDouble); },
       false},
  };
}

std::vector<OpCase> view_cases() {
  return {
      {"flatten", {{6, 4}}, [](V v) { return dtensor::flatten(v[0]); }, [](A a) { return a[0].flatten(); }},
      {"flatten_uneven", {{5, 4}}, [](V v) { return dtensor::flatten(v[0]); }, [](A a) { return a[0].flatten(); }},
      {"split_dim",
       {{4, 12}},
       [](V v) {
         return dtensor::view(v[0], {4, 6, -1});
       },
       [](A a) {
         return a[0].view({4, 6, 2});
       }},
      {"merge_and_split",
       {{2, 6, 4}},
       [](V v) {
         return dtensor::reshape(v[0], {1, 12, 2, 2});
       },
       [](A a) {
         return a[0].reshape({1, 12, 2, 2});
       }},
      {"permute",
       {{5, 4, 3}},
       [](V v) {
         return dtensor::permute(v[0], {2, 0, 1});
       },
       [](A a) {
         return a[0].permute({2, 0, 1});
       }},
      {"unsqueeze", {{5, 4}}, [](V v) { return dtensor::unsqueeze(v[0], 1); }, [](A a) { return a[0].unsqueeze(1); }},
      {"squeeze", {{5, 1, 4}}, [](V v) { return dtensor::squeeze(v[0], 1); }, [](A a) { return a[0].squeeze(1); }},
      {"expand",
       {{5, 1}},
       [](V v) {
         return dtensor::expand(v[0], {2, -1, 3}) * v[0];
       },
       [](A a) {
         return a[0].expand({2, -1, 3}) * a[0];
       }},
  };
}

std::vector<OpCase> selection_cases() {
  using at::indexing::Ellipsis;
  using at::indexing::None;
  using at::indexing::Slice;
  const at::Tensor places = at::tensor({4, 0, 0, 3, 1, 2}, at::kLong);
  const at::Tensor along_rows = places.view({3, 2}), along_columns = places.clamp_max(3).view({2, 3});
  return {
      {"cat",
       {{5, 4}, {2, 4}},
       [](V v) {
         return dtensor::cat({v[0], v[1], v[0]});
       },
       [](A a) {
         return at::cat({a[0], a[1], a[0]});
       }},
      {"cat_after_none",
       {{0}, {2, 3}, {2, 4}},
       [](V v) { return dtensor::cat(v, 1); },
       [](A a) { return at::cat(a, 1); }},
      {"cat_around_none", {{2, 3}, {0}, {4, 3}}, [](V v) { return dtensor::cat(v); }, [](A a) { return at::cat(a); }},
      {"cat_of_none", {{0}, {0}}, [](V v) { return dtensor::cat(v, 1); }, [](A a) { return at::cat(a, 1); }},
      {"stack",
       {{5, 4}, {5, 4}},
       [](V v) {
         return dtensor::stack({v[0], v[1]}, -1);
       },
       [](A a) {
         return at::stack({a[0], a[1]}, -1);
       }},
      {"split",
       {{5, 4}},
       [](V v) {
         const std::vector<DTensor> parts = dtensor::split(v[0], Sizes{2, 3});
         return dtensor::sum(parts[0], {0}) * dtensor::sum(parts[1], {0});
       },
       [](A a) { return a[0].narrow(0, 0, 2).sum(0) * a[0].narrow(0, 2, 3).sum(0); }},
      {"chunk", {{5, 4}}, [](V v) { return dtensor::chunk(v[0], 3)[2]; }, [](A a) { return a[0].chunk(3)[2]; }},
      {"split_even",
       {{5, 4}},
       [](V v) { return dtensor::split(v[0], 3, 1)[1]; },
       [](A a) { return a[0].split(3, 1)[1]; }},
      {"slice",
       {{5, 4}},
       [](V v) { return dtensor::slice(v[0], 0, 1, -1, 2); },
       [](A a) { return a[0].slice(0, 1, -1, 2); }},
      {"unbind",
       {{3, 4}},
       [](V v) {
         const std::vector<DTensor> rows = dtensor::unbind(v[0]);
         return rows[0] * rows[1] + rows[2];
       },
       [](A a) { return a[0][0] * a[0][1] + a[0][2]; }},
      {"select", {{5, 4}}, [](V v) { return dtensor::select(v[0], 0, -2); }, [](A a) { return a[0].select(0, -2); }},
      {"index",
       {{5, 4, 3}},
       [](V v) {
         return dtensor::index(v[0], {Slice(1, None, 3), None, Ellipsis, 0});
       },
       [](A a) {
         return a[0].index({Slice(1, None, 3), None, Ellipsis, 0});
       }},
      {"index_select",
       {{5, 4}},
       [=](V v) { return dtensor::index_select(v[0], 0, replicated(v[0], places)); },
       [=](A a) { return a[0].index_select(0, places); }},
      {"gather_rows",
       {{5, 4}},
       [=](V v) { return dtensor::gather(v[0], 0, replicated(v[0], along_rows)); },
       [=](A a) { return a[0].gather(0, along_rows); }},
      {"gather_columns",
       {{5, 4}},
       [=](V v) { return dtensor::gather(v[0], 1, replicated(v[0], along_columns)); },
       [=](A a) { return a[0].gather(1, along_columns); }},
  };
}

std::vector<OpCase> loss_cases() {
  const at::Tensor target = at::tensor({3, 0, -100, 3, 2}, at::kLong);
  const at::Tensor of_pixels = at::tensor({3, 0, 1, -100, 2, 1}, at::kLong).view({2, 3});
  using dtensor::Reduction;
  const auto options = [](const DTensor& weight, Reduction reduction, double smoothing) {
    dtensor::LossOptions o;
    o.weight = weight;
    o.reduction = reduction;
    o.label_smoothing = smoothing;
    return o;
  };
  return {
      {"cross_entropy",
       {{5, 4}},
       [=](V v) { return dtensor::cross_entropy(v[0] * 3, replicated(v[0], target)); },
       [=](A a) { return at::cross_entropy_loss(a[0] * 3, target); }},
      {"cross_entropy_weighted",
       {{5, 4}, {4}},
       [=](V v) {
         return dtensor::cross_entropy(v[0], replicated(v[0], target), options(v[1].detach(), Reduction::mean, 0.2)) +
                dtensor::sum(v[1]) * 0;
       },
       [=](A a) {
         return at::cross_entropy_loss(a[0], target, a[1].detach(), at::Reduction::Mean, -100, 0.2) + a[1].sum() * 0;
       }},
      {"nll_loss_of_pixels",
       {{2, 4, 3}, {4}},
       [=](V v) {
         return dtensor::nll_loss(v[0], replicated(v[0], of_pixels), options(v[1].detach(), Reduction::none, 0)) +
                dtensor::sum(v[1]) * 0;
       },
       [=](A a) {
         return at::nll_loss2d(a[0].unsqueeze(3), of_pixels.unsqueeze(2), a[1].detach(), at::Reduction::None)
                    .squeeze(2) +
                a[1].sum() * 0;
       }},
      {"mse_loss",
       {{5, 4}, {5, 4}},
       [](V v) { return dtensor::mse_loss(v[0], v[1]); },
       [](A a) { return at::mse_loss(a[0], a[1]); }},
  };
}

}  // namespace

std::vector<OpCase> more_op_cases() {
  std::vector<OpCase> all;
  for (const auto& more :
       {pointwise_cases(), product_cases(), reduction_cases(), view_cases(), selection_cases(), loss_cases()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

}  // namespace tessera::testing

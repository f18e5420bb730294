#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numbers>
#include <numeric>

#include "tensor/dtensor/local_outside.h"
#include "tensor/dtensor_ops/calls.h"
#include "tensor/torch_errors.h"
#include "tessera/base/error.h"
#include "tessera/tensor/dtensor_factories.h"
#include "tessera/tensor/dtensor_ops.h"
#include "tessera/tensor/internal/box_view.h"

namespace tessera::dtensor {

namespace {

// Two pairs of 32 random bits: the numbers of two neighboring elements.
using Words = std::array<std::uint32_t, 4>;

// Philox 4x32, 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
Words philox(std::uint64_t seed, std::uint64_t counter) {
  Words x = {static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32), 0, 0};
  auto key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * x[0], b = std::uint64_t{0xCD9E8D57} * x[2];
    x = {static_cast<std::uint32_t>(b >> 32) ^ x[1] ^ key0, static_cast<std::uint32_t>(b),
         static_cast<std::uint32_t>(a >> 32) ^ x[3] ^ key1, static_cast<std::uint32_t>(a)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return x;
}

enum class Distribution : std::uint8_t { uniform, normal };

// Returns a number of [0, 1), of 53 random bits for a double, else of 24, so that it is below 1 in its type.
template <typename T>
T unit(std::uint32_t high, std::uint32_t low) {
  if constexpr (std::is_same_v<T, double>) {
    return static_cast<double>((std::uint64_t{high} << 32 | low) >> 11) * 0x1p-53;
  } else {
    return static_cast<float>(high >> 8) * 0x1p-24F;
  }
}

// Returns the numbers of the elements 2 * counter and 2 * counter + 1; normal ones by Box and Muller's method.
template <typename T>
std::array<T, 2> numbers_of(std::uint64_t seed, std::uint64_t counter, Distribution distribution) {
  const Words words = philox(seed, counter);
  if (distribution == Distribution::uniform) return {unit<T>(words[0], words[1]), unit<T>(words[2], words[3])};
  const double radius = std::sqrt(-2 * std::log(unit<double>(words[0], words[1]) + 0x1p-53));
  const double angle = 2 * std::numbers::pi * unit<double>(words[2], words[3]);
  return {static_cast<T>(radius * std::cos(angle)), static_cast<T>(radius * std::sin(angle))};
}

// Writes the numbers of `count` elements of the full tensor from element `first` on.
template <typename T>
void fill_run(T* out, std::int64_t count, std::uint64_t first, const PhiloxGenerator& from, Distribution distribution) {
  std::array<T, 2> numbers = {};
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t element = first + static_cast<std::uint64_t>(i);
    if (i == 0 || element % 2 == 0) numbers = numbers_of<T>(from.seed, from.offset + element / 2, distribution);
    out[i] = numbers[element % 2];
  }
}

// Calls run(i, first) for each run of elements of a box that are neighbors in the full tensor: the i-th has the
// elements from `first` on. All are as long as the last dimension of the box.
template <typename F>
void each_run(const Box& box, const Sizes& size, const F& run) {
  const std::size_t outer = size.empty() ? 0 : size.size() - 1;
  std::int64_t runs = 1;
  for (std::size_t d = 0; d < outer; ++d) runs *= box.sizes[d];
  for (std::int64_t i = 0; i < runs; ++i) {
    std::int64_t rest = i, first = size.empty() ? 0 : box.offsets[outer], stride = size.empty() ? 1 : size[outer];
    for (std::size_t d = outer; d-- > 0; stride *= size[d]) {
      first += (box.offsets[d] + rest % box.sizes[d]) * stride;
      rest /= box.sizes[d];
    }
    run(i, static_cast<std::uint64_t>(first));
  }
}

template <typename T>
at::Tensor random_box(const Box& box, const Sizes& size, const PhiloxGenerator& from, Distribution distribution) {
  at::Tensor elements = at::empty(box.sizes, at::CppTypeToScalarType<T>::value);
  const std::int64_t length = box.sizes.empty() ? 1 : box.sizes.back();
  T* out = elements.template data_ptr<T>();
  each_run(box, size,
           [&](std::int64_t i, std::uint64_t first) { fill_run(out + i * length, length, first, from, distribution); });
  return elements;
}

// Returns this rank's local tensor under `layout`, which has no partial placement.
at::Tensor random_local(const MeshLayout& layout, const Sizes& coordinate, const at::TensorOptions& options,
                        const PhiloxGenerator& from, Distribution distribution) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  if (!at::isFloatingType(dtype)) {
    fail(ErrorCode::invalid_argument, "random tensor of size {} of {}: expected a floating-point dtype",
         shape_to_string(layout.size()), c10::toString(dtype));
  }
  at::Tensor local = at::empty(layout.local_shape(coordinate).sizes, options);
  if (local.is_meta()) return local;
  for (const LocalBox& box : layout.local_boxes(coordinate)) {
    const at::Tensor elements = dtype == at::kDouble ? random_box<double>(box.box, layout.size(), from, distribution)
                                                     : random_box<float>(box.box, layout.size(), from, distribution);
    box_view(local, {box.local_offsets, box.box.sizes}).copy_(elements);
  }
  return local;
}

void advance(PhiloxGenerator& generator, std::int64_t elements) {
  generator.offset += (static_cast<std::uint64_t>(elements) + 1) / 2;
}

using CreateLocal = std::function<at::Tensor(const MeshLayout& layout, const at::TensorOptions& options)>;

// `create` returns the local tensor under a layout without partial placements.
DTensor created(const Sizes& size, const DeviceMesh& mesh, Placements placements, const at::TensorOptions& options,
                const CreateLocal& create) {
  if (placements.empty()) placements.resize(static_cast<std::size_t>(mesh.ndim()));
  const MeshLayout wanted(size, mesh.shape(), normalized(placements, size.size()));
  Placements unreduced = wanted.placements();
  for (Placement& placement : unreduced) {
    if (placement.is_partial()) placement = Placement::replicate();
  }
  const MeshLayout layout(size, mesh.shape(), unreduced);
  at::TensorOptions plain = options.requires_grad(false);
  if (!options.has_device()) plain = plain.device(mesh.device_type());
  try {
    const at::Tensor local = mesh.has_this_rank() ? create(layout, plain) : local_outside(layout.size(), plain);
    const DTensor result = DTensor(mesh, layout, local).redistribute(wanted.placements(), false);
    return result.detach().requires_grad_(options.requires_grad());
  } catch (...) {
    rethrow_as_error(fmt::format("DTensor of size {}", shape_to_string(size)));
  }
}

}  // namespace

DTensor empty(const Sizes& size, const DeviceMesh& mesh, Placements placements, const at::TensorOptions& options) {
  return created(size, mesh, std::move(placements), options, [&](const MeshLayout& layout, const at::TensorOptions& o) {
    return at::empty(layout.local_shape(*mesh.coordinate()).sizes, o);
  });
}

DTensor full(const Sizes& size, const at::Scalar& value, const DeviceMesh& mesh, Placements placements,
             const at::TensorOptions& options) {
  return created(size, mesh, std::move(placements), options, [&](const MeshLayout& layout, const at::TensorOptions& o) {
    return at::full(layout.local_shape(*mesh.coordinate()).sizes, value, o);
  });
}

DTensor zeros(const Sizes& size, const DeviceMesh& mesh, Placements placements, const at::TensorOptions& options) {
  return full(size, 0, mesh, std::move(placements), options.dtype(options.dtype()));
}

DTensor ones(const Sizes& size, const DeviceMesh& mesh, Placements placements, const at::TensorOptions& options) {
  return full(size, 1, mesh, std::move(placements), options.dtype(options.dtype()));
}

namespace {

DTensor random(const Sizes& size, const DeviceMesh& mesh, PhiloxGenerator& generator, Placements placements,
               const at::TensorOptions& options, Distribution distribution) {
  DTensor result =
      created(size, mesh, std::move(placements), options, [&](const MeshLayout& layout, const at::TensorOptions& o) {
        return random_local(layout, *mesh.coordinate(), o, generator, distribution);
      });
  advance(generator, result.numel());
  return result;
}

at::TensorOptions options_of(const DTensor& like) {
  return at::TensorOptions().dtype(like.scalar_type()).device(like.device());
}

}  // namespace

DTensor rand(const Sizes& size, const DeviceMesh& mesh, PhiloxGenerator& generator, Placements placements,
             const at::TensorOptions& options) {
  return random(size, mesh, generator, std::move(placements), options, Distribution::uniform);
}

DTensor randn(const Sizes& size, const DeviceMesh& mesh, PhiloxGenerator& generator, Placements placements,
              const at::TensorOptions& options) {
  return random(size, mesh, generator, std::move(placements), options, Distribution::normal);
}

namespace {

// Fills x by f(numbers), in place.
template <typename F>
DTensor initialized(const char* op, const DTensor& x, PhiloxGenerator& generator, Distribution distribution,
                    const F& f) {
  const at::NoGradGuard no_grad;
  DTensor result = call_in_place(
      op, {&x, 1}, [&](Inputs inputs) { return rules::elementwise(op, inputs, Linearity::none); },
      [&](Inputs inputs) -> at::Tensor {
        const at::Tensor& local = inputs[0].local_tensor();
        local.copy_(f(random_local(x.layout(), *x.device_mesh().coordinate(), local.options().requires_grad(false),
                                   generator, distribution)));
        return local;
      });
  advance(generator, x.numel());
  return result;
}

}  // namespace

DTensor uniform_(const DTensor& x, PhiloxGenerator& generator, double low, double high) {
  return initialized("uniform_", x, generator, Distribution::uniform,
                     [&](const at::Tensor& numbers) { return numbers * (high - low) + low; });
}

DTensor normal_(const DTensor& x, PhiloxGenerator& generator, double mean, double std) {
  return initialized("normal_", x, generator, Distribution::normal,
                     [&](const at::Tensor& numbers) { return numbers * std + mean; });
}

DTensor kaiming_uniform_(const DTensor& x, PhiloxGenerator& generator, double a) {
  if (x.dim() < 2) {
    fail(ErrorCode::invalid_argument, "kaiming_uniform_ of size {}: expected two dimensions or more",
         shape_to_string(x.size()));
  }
  const double fan_in = static_cast<double>(x.numel()) / static_cast<double>(std::max<std::int64_t>(x.size(0), 1));
  const double bound = std::sqrt(6 / ((1 + a * a) * std::max(fan_in, 1.0)));
  return uniform_(x, generator, -bound, bound);
}

DTensor bernoulli_(const DTensor& x, PhiloxGenerator& generator, double p) {
  if (!(p >= 0 && p <= 1)) fail(ErrorCode::invalid_argument, "bernoulli_ with probability {}: expected 0 to 1", p);
  return initialized("bernoulli_", x, generator, Distribution::uniform,
                     [&](const at::Tensor& numbers) { return numbers.lt(p); });
}

DTensor bernoulli(const DTensor& x, PhiloxGenerator& generator) {
  DTensor result = unary("bernoulli", x.detach(), Linearity::none, [&](const at::Tensor& local) { return local; });
  const DeviceMesh& mesh = result.device_mesh();
  if (mesh.has_this_rank()) {
    const at::Tensor& local = result.local_tensor();
    const at::Tensor numbers =
        random_local(result.layout(), *mesh.coordinate(), local.options(), generator, Distribution::uniform);
    result = DTensor(mesh, result.layout(), numbers.lt(local).to(local.scalar_type()));
  }
  advance(generator, x.numel());
  return result;
}

DTensor eye_(const DTensor& x) {
  if (x.dim() != 2)
    fail(ErrorCode::invalid_argument, "eye_ of size {}: expected two dimensions", shape_to_string(x.size()));
  const at::NoGradGuard no_grad;
  return call_in_place(
      "eye_", {&x, 1}, [](Inputs inputs) { return rules::elementwise("eye_", inputs, rules::Linearity::none); },
      [&](Inputs inputs) -> at::Tensor {
        const at::Tensor& local = inputs[0].local_tensor();
        local.zero_();
        for (const LocalBox& box : x.layout().local_boxes(*x.device_mesh().coordinate())) {
          const at::Tensor elements = box_view(local, {box.local_offsets, box.box.sizes});
          const std::int64_t first_column = box.box.offsets[0] - box.box.offsets[1];  // of row 0, within the box
          if (first_column > -elements.size(0) && first_column < elements.size(1))
            elements.diagonal(first_column).fill_(1);
        }
        return local;
      });
}

PhiloxGenerator generator_of_first_rank(std::uint64_t seed, const DeviceMesh& mesh) {
  if (!mesh.has_this_rank()) return PhiloxGenerator(seed);
  Bytes bytes(sizeof(seed));
  std::memcpy(bytes.data(), &seed, sizeof(seed));
  bytes = mesh.group().broadcast_bytes(bytes, 0);
  std::memcpy(&seed, bytes.data(), sizeof(seed));
  return PhiloxGenerator(seed);
}

PhiloxGenerator manual_seed(std::uint64_t seed, const DeviceMesh& mesh) {
  if (mesh.has_this_rank())
    mesh.group().check_call("manual_seed", [&](CallArguments& arguments) { arguments.add("seed", seed); });
  return PhiloxGenerator(seed);
}

DTensor empty_like(const DTensor& like, const at::TensorOptions& options) {
  return empty(like.size(), like.device_mesh(), like.placements(), options_of(like).merge_in(options));
}
DTensor zeros_like(const DTensor& like, const at::TensorOptions& options) { return full_like(like, 0, options); }
DTensor ones_like(const DTensor& like, const at::TensorOptions& options) { return full_like(like, 1, options); }
DTensor full_like(const DTensor& like, const at::Scalar& value, const at::TensorOptions& options) {
  return full(like.size(), value, like.device_mesh(), like.placements(), options_of(like).merge_in(options));
}

namespace {

// Returns the placements of a new tensor of `size`.
Placements placements_for(const DTensor& like, const Sizes& size) {
  return size == like.size() ? like.placements() : Placements();
}

}  // namespace

DTensor new_empty(const DTensor& like, const Sizes& size, const at::TensorOptions& options) {
  return empty(size, like.device_mesh(), placements_for(like, size), options_of(like).merge_in(options));
}
DTensor new_zeros(const DTensor& like, const Sizes& size, const at::TensorOptions& options) {
  return new_full(like, size, 0, options);
}
DTensor new_ones(const DTensor& like, const Sizes& size, const at::TensorOptions& options) {
  return new_full(like, size, 1, options);
}
DTensor new_full(const DTensor& like, const Sizes& size, const at::Scalar& value, const at::TensorOptions& options) {
  return full(size, value, like.device_mesh(), placements_for(like, size), options_of(like).merge_in(options));
}

namespace {

// Returns the strides of a dense tensor with dimensions in the order of `strides`.
Sizes dense_strides(const Sizes& size, const Sizes& strides) {
  Sizes inner(size.size());  // dimensions from the outermost to the innermost
  std::iota(inner.begin(), inner.end(), std::int64_t{0});
  const auto stride = [&](std::int64_t dim) { return strides[static_cast<std::size_t>(dim)]; };
  std::stable_sort(inner.begin(), inner.end(), [&](std::int64_t a, std::int64_t b) { return stride(a) > stride(b); });
  Sizes dense(size.size());
  std::int64_t next = 1;
  for (auto dim = inner.rbegin(); dim != inner.rend(); ++dim) {
    dense[static_cast<std::size_t>(*dim)] = next;
    next *= std::max<std::int64_t>(size[static_cast<std::size_t>(*dim)], 1);
  }
  return dense;
}

// Returns whether the tensor is sharded or replicated, with local tensors of one size.
bool is_even(const DTensor& x) {
  const Placements& placements = x.placements();
  return std::none_of(placements.begin(), placements.end(), [](const Placement& each) { return each.is_partial(); }) &&
         is_tensor_evenly_shardable(x.size(), x.device_mesh().shape(), placements);
}

}  // namespace

DTensor new_empty_strided(const DTensor& like, const Sizes& size, const Sizes& strides,
                          const at::TensorOptions& options) {
  if (strides.size() != size.size()) {
    fail(ErrorCode::invalid_argument, "new tensor of size {} with strides {}: expected a stride for each dimension",
         shape_to_string(size), shape_to_string(strides));
  }
  const bool is_placed = size == like.size() && is_even(like) && dense_strides(size, strides) == strides;
  const auto create = [&](const MeshLayout& layout, const at::TensorOptions& o) {
    const Sizes local = layout.local_shape(*like.device_mesh().coordinate()).sizes;
    return at::empty_strided(local, is_placed ? dense_strides(local, strides) : strides, o);
  };
  return created(size, like.device_mesh(), is_placed ? like.placements() : Placements(),
                 options_of(like).merge_in(options), create);
}

DTensor dropout(const DTensor& x, double p, PhiloxGenerator& generator) {
  if (!(p >= 0 && p <= 1)) fail(ErrorCode::invalid_argument, "dropout with probability {}: expected 0 to 1", p);
  DTensor result = call(
      "dropout", {&x, 1}, [](Inputs inputs) { return rules::elementwise("dropout", inputs, Linearity::linear); },
      [&](Inputs inputs) -> at::Tensor {
        const at::Tensor& local = inputs[0].local_tensor();
        if (p == 1) return local * 0;
        // The same numbers for all ranks of a partial mesh dimension.
        const MeshLayout layout(x.size(), inputs[0].device_mesh().shape(), inputs[0].grad_placements());
        const at::Tensor numbers =
            random_local(layout, *inputs[0].device_mesh().coordinate(),
                         local.options().dtype(at::kFloat).requires_grad(false), generator, Distribution::uniform);
        return local * numbers.ge(p).to(local.scalar_type()) / (1 - p);
      });
  advance(generator, x.numel());
  return result;
}

}  // namespace tessera::dtensor

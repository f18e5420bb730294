// Ops that change the shape of a tensor.

#include <ATen/ops/chunk.h>

#include <algorithm>
#include <numeric>

#include "tensor/ops/built_in.h"
#include "tensor/ops/chunks.h"
#include "tessera/base/error.h"
#include "tessera/tensor/ops.h"

namespace tessera::ops {

namespace {

using Sizes = ShardedTensor::Sizes;

std::int64_t product(Sizes::const_iterator begin, Sizes::const_iterator end) {
  return std::accumulate(begin, end, std::int64_t{1}, std::multiplies<>());
}

// Returns the shape with -1 replaced by the inferred size.
Sizes inferred(const ShardedTensor& input, Sizes shape) {
  const std::int64_t numel = product(input.size().begin(), input.size().end());
  const auto refuse = [&](std::string_view why) {
    fail(ErrorCode::invalid_argument, "op 'view' of {} as {}: {}", describe(input), shape_to_string(shape), why);
  };
  std::int64_t known = 1;
  auto unknown = shape.end();
  for (auto size = shape.begin(); size != shape.end(); ++size) {
    if (*size == -1) {
      if (unknown != shape.end()) refuse("several sizes are -1, expected only one size to infer");
      unknown = size;
    } else if (*size < 0) {
      refuse("a size is negative, expected at least 0, or -1 to infer it");
    } else if (__builtin_mul_overflow(known, *size, &known)) {
      refuse(fmt::format("it has too many elements, expected {}", numel));
    }
  }
  if (unknown != shape.end()) {
    if (known == 0 || numel % known != 0) {
      refuse(
          fmt::format("no size for -1: the product of the others is {}, expected more than 0 and a divisor of {}, the "
                      "number of elements",
                      known, numel));
    }
    *unknown = numel / known;
    known = numel;
  }
  if (known != numel) refuse(fmt::format("it has {} elements, expected {}", known, numel));
  return shape;
}

}  // namespace

const BuiltIn transpose_op(transpose, "transpose", ChunkShardingSpec::kKind,
                           [](const ShardedTensor& input, std::int64_t dim0, std::int64_t dim1) {
                             const Chunks chunks = chunks_of("transpose", input);
                             const std::int64_t a = checked_dim("transpose", input, dim0),
                                                b = checked_dim("transpose", input, dim1);
                             if (a == b) return input;
                             Sizes size = input.size();
                             std::swap(size[static_cast<std::size_t>(a)], size[static_cast<std::size_t>(b)]);
                             const std::int64_t sharded = chunks.dim == a ? b : chunks.dim == b ? a : chunks.dim;
                             return with_chunks(input.local_tensor().transpose(a, b), chunks.along(sharded), size,
                                                input);
                           });

const BuiltIn view_op(
    view, "view", ChunkShardingSpec::kKind, [](const ShardedTensor& input, const std::vector<std::int64_t>& wanted) {
      const Chunks chunks = chunks_of("view", input);
      const Sizes shape = inferred(input, wanted);
      if (shape == input.size()) return input;
      // Shards keep their elements if the product of the sizes before `dim` stays the same and `dim` splits evenly in
      // both shapes.
      const auto parts = static_cast<std::int64_t>(chunks.placements.size());
      const auto dim = static_cast<std::ptrdiff_t>(chunks.dim);
      const bool stays =
          dim < static_cast<std::ptrdiff_t>(shape.size()) &&
          product(shape.begin(), shape.begin() + dim) == product(input.size().begin(), input.size().begin() + dim) &&
          input.size()[static_cast<std::size_t>(dim)] % parts == 0 && shape[static_cast<std::size_t>(dim)] % parts == 0;
      if (!stays) {
        fail(ErrorCode::unsupported,
             "op 'view' of {} as {}: expected dimension {} to split into {} equal parts of the same elements",
             describe(input), shape_to_string(shape), dim, parts);
      }
      Sizes local = shape;
      local[static_cast<std::size_t>(dim)] /= parts;
      return with_chunks(input.local_tensor().view(local), chunks.along(chunks.dim), shape, input);
    });

const BuiltIn chunk_op(chunk, "chunk", ChunkShardingSpec::kKind,
                       [](const ShardedTensor& input, std::int64_t count, std::int64_t along) {
                         const Chunks chunks = chunks_of("chunk", input);
                         const std::int64_t dim = checked_dim("chunk", input, along);
                         if (count < 1) {
                           fail(ErrorCode::invalid_argument, "op 'chunk' of {}: {} chunks, expected at least 1",
                                describe(input), count);
                         }
                         if (dim == chunks.dim) {
                           fail(ErrorCode::unsupported,
                                "op 'chunk' of {}: dimension {} is sharded, expected another one", describe(input),
                                dim);
                         }
                         std::vector<ShardedTensor> parts;
                         for (const at::Tensor& local : at::chunk(input.local_tensor(), count, dim)) {
                           Sizes size = input.size();
                           size[static_cast<std::size_t>(dim)] = local.size(dim);
                           parts.push_back(with_chunks(local, input.shared_spec(), size, input));
                         }
                         return parts;
                       });

ShardedTensor transpose(const ShardedTensor& input, std::int64_t dim0, std::int64_t dim1) {
  return transpose_op(input, dim0, dim1);
}
ShardedTensor view(const ShardedTensor& input, const std::vector<std::int64_t>& shape) { return view_op(input, shape); }
std::vector<ShardedTensor> chunk(const ShardedTensor& input, std::int64_t chunks, std::int64_t dim) {
  return chunk_op(input, chunks, dim);
}

}  // namespace tessera::ops

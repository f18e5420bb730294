#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "tensor/dtensor/placement.h"
#include "tensor/sharded/state.h"
#include "tessera/base/error.h"
#include "tessera/tensor/internal/box_view.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

namespace {

// Returns whether the shards, ordered by rank, are consecutive in the row-major tensor.
bool is_row_major(const std::vector<ShardMetadata>& shards, const std::vector<std::vector<std::size_t>>& by_rank,
                  const std::vector<std::int64_t>& size) {
  std::int64_t next_row = 0;
  for (const std::vector<std::size_t>& of_rank : by_rank) {
    for (const std::size_t i : of_rank) {
      const BoxView box = shards[i].box();
      if (is_empty(box)) continue;
      if (size.empty()) return true;
      if (box.offsets[0] != next_row || !std::equal(box.sizes.begin() + 1, box.sizes.end(), size.begin() + 1)) {
        return false;
      }
      next_row += box.sizes[0];
    }
  }
  return true;
}

}  // namespace

void ShardedTensor::gather(int dst, const at::Tensor& out) const {
  const ProcessGroup& group = process_group();
  const auto refuse = [&](std::string_view what) {
    fail(ErrorCode::invalid_argument, "gather of a sharded tensor of size {} to rank {}: on rank {}, {}",
         shape_to_string(size()), dst, group.rank(), what);
  };
  group.check_call("gather of a sharded tensor", [&](CallArguments& arguments) {
    if (dst < 0 || dst >= group.size()) refuse(fmt::format("dst is {}, expected 0 to {}", dst, group.size() - 1));
    if (group.rank() != dst) {
      if (out.defined()) refuse("out is defined, expected an undefined tensor");
    } else {
      if (!out.defined()) refuse("out is undefined, expected a tensor to gather into");
      if (out.sizes() != at::IntArrayRef(size())) {
        refuse(
            fmt::format("out has size {}, expected {}", shape_to_string(out.sizes().vec()), shape_to_string(size())));
      }
      if (out.scalar_type() != scalar_type()) {
        refuse(fmt::format("out is of {}, expected {}", dtype_name(to_dtype(out.scalar_type())),
                           dtype_name(metadata().tensor_properties.dtype)));
      }
      if (!out.is_contiguous()) refuse("out is not contiguous, expected a contiguous tensor");
    }
    arguments.add_list("size", size()).add("dtype", dtype_name(metadata().tensor_properties.dtype)).add("dst", dst);
  });

  const std::vector<ShardMetadata>& shards = metadata().shards_metadata;
  const auto by_rank = shards_by_rank(shards, group);
  std::vector<std::int64_t> in_splits(by_rank.size(), 0), out_splits(by_rank.size(), 0);
  std::vector<at::Tensor> parts;
  const at::TensorOptions options = at::TensorOptions().dtype(scalar_type()).device(staging_device(shards));
  for (const Shard& shard : local_shards()) {
    parts.push_back(shard.tensor.detach().to(options.device()).reshape({-1}));
  }
  const at::Tensor in = parts.empty() ? at::empty({0}, options) : parts.size() == 1 ? parts[0] : at::cat(parts);
  in_splits[static_cast<std::size_t>(dst)] = in.numel();
  if (group.rank() != dst) {
    group.start_all_to_all(at::empty({0}, options), in, out_splits, in_splits).wait();
    return;
  }

  for (std::size_t r = 0; r < by_rank.size(); ++r) {
    for (const std::size_t i : by_rank[r]) out_splits[r] += volume(shards[i].box());
  }
  const at::Tensor flat_out = out.detach().view({-1});
  const bool straight = is_row_major(shards, by_rank, size()) && out.device().type() == options.device().type();
  const at::Tensor received = straight ? flat_out : at::empty({flat_out.numel()}, options);
  group.start_all_to_all(received, in, out_splits, in_splits).wait();
  if (straight) return;
  std::int64_t begin = 0;
  for (const std::vector<std::size_t>& of_rank : by_rank) {
    for (const std::size_t i : of_rank) {
      const std::int64_t count = volume(shards[i].box());
      if (count == 0) continue;  // may begin past the end
      box_view(out.detach(), shards[i].box()).copy_(received.narrow(0, begin, count).view(shards[i].shard_sizes));
      begin += count;
    }
  }
}

}  // namespace tessera

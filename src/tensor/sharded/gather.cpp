#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/resolve_conj.h>
#include <ATen/ops/resolve_neg.h>
#include <ATen/ops/zeros.h>

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

std::string_view name_of(at::ScalarType dtype) { return dtype_name(to_dtype(dtype)); }

// `what` and `refuse` are for messages.
template <typename Refuse>
void check_converts(at::ScalarType from, at::ScalarType to, std::string_view what, const Refuse& refuse) {
  if (from == to) return;
  if (at::isComplexType(from) && !at::isComplexType(to)) {
    refuse(fmt::format("{} is {}, expected a complex dtype as {}", what, name_of(to), name_of(from)));
  }
  try {
    at::zeros({1}, from).to(to);
  } catch (const c10::Error&) {
    refuse(fmt::format("{} is {}, expected a dtype to which LibTorch converts {}", what, name_of(to), name_of(from)));
  }
}

// Checks this rank's arguments of a gather.
void check_gather(const ShardedTensor& tensor, int dst, const at::Tensor& out, std::optional<at::ScalarType> dtype) {
  const ProcessGroup& group = tensor.process_group();
  const auto refuse = [&](std::string_view what) {
    fail(ErrorCode::invalid_argument, "gather of a sharded tensor of size {} to rank {}: on rank {}, {}",
         shape_to_string(tensor.size()), dst, group.rank(), what);
  };
  if (dst < 0 || dst >= group.size()) refuse(fmt::format("dst is {}, expected 0 to {}", dst, group.size() - 1));
  if (dtype) check_converts(tensor.scalar_type(), *dtype, "dtype", refuse);
  if (group.rank() != dst) {
    if (out.defined()) refuse("out is defined, expected an undefined tensor");
    return;
  }
  if (!out.defined()) refuse("out is undefined, expected a tensor to gather into");
  if (out.sizes() != at::IntArrayRef(tensor.size())) {
    refuse(fmt::format("out has size {}, expected {}", shape_to_string(out.sizes().vec()),
                       shape_to_string(tensor.size())));
  }
  if (dtype) {
    check_converts(*dtype, out.scalar_type(), "the dtype of out", refuse);
  } else if (out.scalar_type() != tensor.scalar_type()) {
    refuse(fmt::format("out is of {}, expected {}", name_of(out.scalar_type()), name_of(tensor.scalar_type())));
  }
  if (!out.is_contiguous()) refuse("out is not contiguous, expected a contiguous tensor");
}

// Returns the elements of this rank's shards, one shard after the other.
at::Tensor pack(const std::vector<Shard>& shards, const at::TensorOptions& options) {
  std::vector<at::Tensor> parts;
  parts.reserve(shards.size());
  for (const Shard& shard : shards) {
    parts.push_back(shard.tensor.detach().resolve_conj().resolve_neg().to(options).reshape({-1}));
  }
  if (parts.empty()) return at::empty({0}, options);
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

// Copies the received elements, by rank and in the order of its shards, to their places in `out`.
void unpack(const at::Tensor& received, const std::vector<ShardMetadata>& shards,
            const std::vector<std::vector<std::size_t>>& by_rank, const at::Tensor& out) {
  std::int64_t begin = 0;
  for (const std::vector<std::size_t>& of_rank : by_rank) {
    for (const std::size_t i : of_rank) {
      const std::int64_t count = volume(shards[i].box());
      if (count == 0) continue;  // may begin past the end
      box_view(out, shards[i].box()).copy_(received.narrow(0, begin, count).view(shards[i].shard_sizes));
      begin += count;
    }
  }
}

}  // namespace

void ShardedTensor::gather(int dst, const at::Tensor& out, std::optional<at::ScalarType> dtype) const {
  const ProcessGroup& group = process_group();
  const at::ScalarType sent = dtype.value_or(scalar_type());
  group.check_call("gather of a sharded tensor", [&](CallArguments& arguments) {
    check_gather(*this, dst, out, dtype);
    arguments.add_list("size", size())
        .add("dtype", name_of(scalar_type()))
        .add("gathered dtype", name_of(sent))
        .add("dst", dst);
  });

  const std::vector<ShardMetadata>& shards = metadata().shards_metadata;
  const auto by_rank = shards_by_rank(shards, group);
  std::vector<std::int64_t> in_splits(by_rank.size(), 0), out_splits(by_rank.size(), 0);
  const at::TensorOptions options = at::TensorOptions().dtype(sent).device(staging_device(shards));
  const at::Tensor in = pack(local_shards(), options);
  in_splits[static_cast<std::size_t>(dst)] = in.numel();
  if (group.rank() != dst) {
    group.start_all_to_all(at::empty({0}, options), in, out_splits, in_splits).wait();
    return;
  }

  for (std::size_t r = 0; r < by_rank.size(); ++r) {
    for (const std::size_t i : by_rank[r]) out_splits[r] += volume(shards[i].box());
  }
  const at::Tensor target = out.detach();
  const bool is_plain = target.scalar_type() == sent && target.device().type() == options.device().type() &&
                        !target.is_conj() && !target.is_neg();
  const bool straight = is_plain && is_row_major(shards, by_rank, size());
  const at::Tensor received = straight ? target.view({-1}) : at::empty({target.numel()}, options);
  group.start_all_to_all(received, in, out_splits, in_splits).wait();
  if (!straight) unpack(received, shards, by_rank, target);
}

}  // namespace tessera

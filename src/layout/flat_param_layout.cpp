#include "tessera/layout/flat_param_layout.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "tessera/base/checked.h"
#include "tessera/base/error.h"
#include "tessera/layout/byte_ranges.h"
#include "tessera/layout/flat_interval.h"

namespace tessera {

namespace {

constexpr char kMake[] = "flat parameter";

// Returns the dimensions by descending stride, those of size 1 first.
std::vector<std::size_t> memory_order(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides) {
  std::vector<std::size_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if ((shape[a] == 1) != (shape[b] == 1)) return shape[a] == 1;
    return shape[a] != 1 && strides[a] > strides[b];
  });
  return order;
}

std::vector<std::int64_t> permuted(std::span<const std::int64_t> values, std::span<const std::size_t> order) {
  std::vector<std::int64_t> result;
  result.reserve(order.size());
  for (const std::size_t d : order) result.push_back(values[d]);
  return result;
}

std::vector<std::int64_t> unpermuted(std::span<const std::int64_t> values, std::span<const std::size_t> order) {
  std::vector<std::int64_t> result(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) result[order[i]] = values[i];
  return result;
}

// Returns whether the elements of a non-empty tensor neither overlap nor leave gaps in memory.
bool is_dense(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides) {
  std::int64_t expected = 1;
  const std::vector<std::size_t> order = memory_order(shape, strides);
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    if (shape[*d] == 1) continue;
    if (strides[*d] != expected) return false;
    expected *= shape[*d];
  }
  return true;
}

// As in PyTorch, dimensions of size 1 may have any stride, except that the last stride must be 1.
bool is_contiguous(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides) {
  if (!strides.empty() && strides.back() != 1) return false;
  std::int64_t expected = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    if (shape[d] == 1) continue;
    if (strides[d] != expected) return false;
    expected *= shape[d];
  }
  return true;
}

}  // namespace

FlatParamLayout::FlatParamLayout(std::vector<FlatParamInput> params, const Options& options)
    : world_size_(options.world_size) {
  if (params.empty()) fail(ErrorCode::invalid_argument, "{}: no parameters, expected at least one", kMake);
  if (world_size_ < 1) fail(ErrorCode::invalid_argument, "{}: {} ranks, expected at least 1", kMake, world_size_);
  if (options.aligned_numel < 0) {
    fail(ErrorCode::invalid_argument, "{}: alignment of {} elements, expected 0 or more", kMake, options.aligned_numel);
  }
  std::unordered_set<std::string> names;
  std::unordered_map<std::uint64_t, std::size_t> by_identity;
  for (FlatParamInput& param : params) {
    if (!names.insert(param.fqn).second) {
      fail(ErrorCode::invalid_argument, "{}: duplicate name '{}', expected different names", kMake,
           printable(param.fqn));
    }
    if (param.identity) {
      const auto [known, is_new] = by_identity.try_emplace(*param.identity, params_.size());
      if (!is_new) {
        const ParamInfo& primary = params_[known->second];
        if (primary.shape != param.shape) {
          fail(ErrorCode::invalid_argument,
               "{}: '{}' and '{}' are one parameter, but have shapes {} and {}, expected the same", kMake,
               printable(primary.fqn), printable(param.fqn), shape_to_string(primary.shape),
               shape_to_string(param.shape));
        }
        shared_params_.push_back({std::move(param.fqn), known->second});
        continue;
      }
    }
    if (options.aligned_numel > 0) pad_to_multiple_of(options.aligned_numel);
    add(std::move(param));
  }
  if (options.aligned_numel > 0) pad_to_multiple_of(world_size_);
  sharded_numel_ = unpadded_unsharded_numel_ / world_size_ + (unpadded_unsharded_numel_ % world_size_ != 0 ? 1 : 0);
  checked_multiply(sharded_numel_, world_size_, "the padded flat parameter");
}

void FlatParamLayout::add(FlatParamInput param) {
  ParamInfo info;
  info.numel = checked_numel(param.shape, param.fqn);
  info.offset = unpadded_unsharded_numel_;
  info.strides = param.strides.empty() ? row_major_strides(param.shape) : std::move(param.strides);
  if (info.strides.size() != param.shape.size() || (info.numel != 0 && !is_dense(param.shape, info.strides))) {
    fail(ErrorCode::invalid_argument, "{}: '{}' of shape {} has strides {}, expected elements without overlap or gaps",
         kMake, printable(param.fqn), shape_to_string(param.shape), shape_to_string(info.strides));
  }
  info.contiguous = info.numel == 0 || is_contiguous(param.shape, info.strides);
  info.fqn = std::move(param.fqn);
  info.shape = std::move(param.shape);
  unpadded_unsharded_numel_ = checked_add(unpadded_unsharded_numel_, info.numel, "the flat parameter");
  numels_with_padding_.push_back(info.numel);
  is_padding_.push_back(false);
  params_.push_back(std::move(info));
}

void FlatParamLayout::pad_to_multiple_of(std::int64_t numel) {
  const std::int64_t over = unpadded_unsharded_numel_ % numel;
  if (over == 0) return;
  unpadded_unsharded_numel_ = checked_add(unpadded_unsharded_numel_, numel - over, "the flat parameter");
  numels_with_padding_.push_back(numel - over);
  is_padding_.push_back(true);
}

void FlatParamLayout::add_prefix(const std::string& prefix) {
  for (ParamInfo& param : params_) param.fqn.insert(0, prefix);
  for (SharedParamInfo& shared : shared_params_) shared.fqn.insert(0, prefix);
}

void FlatParamLayout::check_rank(std::int64_t rank) const {
  if (rank < 0 || rank >= world_size_) {
    fail(ErrorCode::invalid_argument, "{}: rank {}, expected 0 to {}", kMake, rank, world_size_ - 1);
  }
}

std::int64_t FlatParamLayout::shard_numel_padded(std::int64_t rank) const {
  check_rank(rank);
  return std::clamp<std::int64_t>((rank + 1) * sharded_numel_ - unpadded_unsharded_numel_, 0, sharded_numel_);
}

std::optional<ShardParamInfo> FlatParamLayout::shard_param_info(std::int64_t rank, std::size_t i) const {
  check_rank(rank);
  const ParamInfo& param = params_.at(i);
  const std::int64_t begin = rank * sharded_numel_, last = begin + sharded_numel_ - 1;
  const std::int64_t param_last = param.offset + param.numel - 1;
  // As in PyTorch, an empty parameter is in the shard that has elements on both sides of it.
  if (begin > param_last || last < param.offset) return std::nullopt;
  ShardParamInfo info;
  info.offset_in_shard = std::max<std::int64_t>(param.offset - begin, 0);
  info.intra_param_start_idx = std::max<std::int64_t>(begin - param.offset, 0);
  info.intra_param_end_idx = std::min(param_last, last) - param.offset;
  info.numel_in_shard = info.intra_param_end_idx - info.intra_param_start_idx + 1;
  return info;
}

FlatParamShardMetadata FlatParamLayout::shard_metadata(std::int64_t rank) const {
  FlatParamShardMetadata metadata;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    const std::optional<ShardParamInfo> info = shard_param_info(rank, i);
    if (!info) continue;
    const ParamInfo& param = params_[i];
    metadata.param_names.push_back(param.fqn);
    metadata.param_shapes.push_back(param.shape);
    metadata.param_strides.push_back(param.strides);
    metadata.param_contiguities.push_back(param.contiguous);
    metadata.param_numels.push_back(param.numel);
    metadata.param_offsets.emplace_back(info->intra_param_start_idx, info->intra_param_end_idx);
  }
  return metadata;
}

std::vector<FlatParamPiece> FlatParamLayout::pieces(std::int64_t rank, std::size_t i) const {
  const std::optional<ShardParamInfo> info = shard_param_info(rank, i);
  if (!info || info->numel_in_shard == 0) return {};
  const ParamInfo& param = params_[i];
  const std::vector<std::size_t> order = memory_order(param.shape, param.strides);
  std::vector<FlatParamPiece> pieces;
  std::int64_t offset = info->offset_in_shard;
  for (const Box& box : boxes_of_flat_interval(permuted(param.shape, order), info->intra_param_start_idx,
                                               info->intra_param_end_idx + 1)) {
    pieces.push_back({Box(unpermuted(box.offsets, order), unpermuted(box.sizes, order)), offset,
                      unpermuted(row_major_strides(box.sizes), order)});
    offset += volume(box);
  }
  return pieces;
}

}  // namespace tessera

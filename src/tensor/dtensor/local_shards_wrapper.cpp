#include "tessera/tensor/local_shards_wrapper.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <ostream>
#include <sstream>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/function_ref.h"
#include "tessera/tensor/torch_types.h"

namespace tessera {

using Sizes = std::vector<std::int64_t>;

struct LocalShardsWrapper::State {
  std::vector<at::Tensor> shards;
  LocalTensorMetadata metadata;
};

namespace {

void check(const std::vector<at::Tensor>& shards, const std::vector<Sizes>& offsets) {
  if (shards.size() != offsets.size()) {
    fail(ErrorCode::invalid_argument, "local shards: {} shards with {} offsets, expected equally many", shards.size(),
         offsets.size());
  }
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (!shards[i].defined() || std::any_of(offsets[i].begin(), offsets[i].end(), [](auto n) { return n < 0; })) {
      fail(ErrorCode::invalid_argument, "local shards: shard {} is {} at {}, expected a tensor and no negative offset",
           i, shards[i].defined() ? "a tensor" : "undefined", shape_to_string(offsets[i]));
    }
    if (shards[i].device() != shards[0].device()) {
      fail(ErrorCode::invalid_argument, "local shards: shard {} is on {}, expected {} as the first shard", i,
           shards[i].device().str(), shards[0].device().str());
    }
    if (shards[i].dim() != shards[0].dim() || offsets[i].size() != static_cast<std::size_t>(shards[0].dim())) {
      fail(ErrorCode::invalid_argument, "local shards: shard {} is of shape {} at {}, expected {} dimensions", i,
           shape_to_string(shards[i].sizes().vec()), shape_to_string(offsets[i]), shards[0].dim());
    }
  }
}

// 1-D and 2-D shards are concatenated along the last dimension.
Sizes size_of(const std::vector<at::Tensor>& shards) {
  if (shards.empty()) return {0, 0};
  Sizes size = shards[0].sizes().vec();
  if (size.size() == 1 || size.size() == 2) {
    for (std::size_t i = 1; i < shards.size(); ++i) size.back() += shards[i].sizes().back();
  }
  return size;
}

}  // namespace

LocalShardsWrapper::LocalShardsWrapper(std::vector<at::Tensor> local_shards, std::vector<Sizes> local_offsets)
    : state_(std::make_shared<State>()) {
  check(local_shards, local_offsets);
  LocalTensorMetadata& metadata = state_->metadata;
  metadata.size = size_of(local_shards);
  if (local_shards.empty()) {
    metadata.chunks.push_back(Box({0, 0}, {0, 0}));
  } else {
    metadata.properties = properties_of(local_shards[0]);
  }
  for (std::size_t i = 0; i < local_shards.size(); ++i) {
    metadata.chunks.push_back(Box(std::move(local_offsets[i]), local_shards[i].sizes().vec()));
  }
  state_->shards = std::move(local_shards);
}

const Sizes& LocalShardsWrapper::size() const { return state_->metadata.size; }
const std::vector<at::Tensor>& LocalShardsWrapper::local_shards() const { return state_->shards; }
const std::vector<Box>& LocalShardsWrapper::local_chunks() const { return state_->metadata.chunks; }
const LocalTensorMetadata& LocalShardsWrapper::storage_metadata() const { return state_->metadata; }
bool LocalShardsWrapper::is_pinned() const { return state_->metadata.properties.pin_memory; }
bool LocalShardsWrapper::requires_grad() const { return state_->metadata.properties.requires_grad; }

std::vector<Sizes> LocalShardsWrapper::local_sizes() const {
  std::vector<Sizes> sizes;
  for (const Box& chunk : local_chunks()) sizes.push_back(chunk.sizes);
  return sizes;
}

std::vector<Sizes> LocalShardsWrapper::local_offsets() const {
  std::vector<Sizes> offsets;
  for (const Box& chunk : local_chunks()) offsets.push_back(chunk.offsets);
  return offsets;
}

bool LocalShardsWrapper::is_empty_shard() const { return size().size() >= 2 && size()[0] == 0 && size()[1] == 0; }

at::Device LocalShardsWrapper::device() const {
  return local_shards().empty() ? at::Device(at::kMeta) : local_shards()[0].device();
}

LocalShardsWrapper& LocalShardsWrapper::requires_grad_(bool requires_grad) {
  for (const at::Tensor& shard : local_shards()) shard.set_requires_grad(requires_grad);
  state_->metadata.properties.requires_grad = requires_grad;
  return *this;
}

std::int64_t LocalShardsWrapper::bytes() const {
  std::int64_t bytes = 0;
  for (const at::Tensor& shard : local_shards()) bytes += static_cast<std::int64_t>(shard.nbytes());
  return bytes;
}

std::string LocalShardsWrapper::to_string() const {
  std::ostringstream text;
  text << "LocalShardsWrapper of size " << shape_to_string(size());
  for (std::size_t i = 0; i < local_shards().size(); ++i) {
    text << "\n" << tessera::to_string(local_chunks()[i]) << ":\n" << local_shards()[i];
  }
  return text.str();
}

PendingTensor LocalShardsWrapper::all_gather_into_tensor(const ProcessGroup& group) const {
  at::Tensor mine;
  std::int64_t row = 0;
  group.check_call("all_gather_into_tensor of local shards", [&](CallArguments& arguments) {
    if (local_shards().empty() || local_shards()[0].dim() < 2) {
      fail(ErrorCode::invalid_argument,
           "all_gather_into_tensor of local shards of size {}: expected shards of two dimensions or more",
           shape_to_string(size()));
    }
    row = local_shards()[0].size(1);
    std::vector<at::Tensor> flat;
    for (const at::Tensor& shard : local_shards()) flat.push_back(shard.detach().reshape({-1}));
    mine = at::cat(flat);
    if (row == 0 || mine.numel() % row != 0) {
      fail(ErrorCode::invalid_argument, "all_gather_into_tensor of {} elements in rows of {}: expected complete rows",
           mine.numel(), row);
    }
    arguments.add("dtype", c10::toString(mine.scalar_type())).add("elements", mine.numel()).add("row", row);
  });
  const at::Tensor all = at::empty({group.size() * (mine.numel() / row), row}, mine.options());
  PendingCollective pending = group.start_all_gather_into(all, mine);
  return {all, std::move(pending)};
}

LocalShardsWrapper LocalShardsWrapper::each(FunctionRef<at::Tensor(const at::Tensor&)> f) const {
  std::vector<at::Tensor> shards;
  for (const at::Tensor& shard : local_shards()) shards.push_back(f(shard));
  return {std::move(shards), local_shards().empty() ? std::vector<Sizes>() : local_offsets()};
}

LocalShardsWrapper LocalShardsWrapper::to(const at::TensorOptions& options) const {
  return each([&](const at::Tensor& shard) { return shard.to(options); });
}

LocalShardsWrapper LocalShardsWrapper::view(const Sizes& size) const {
  if (local_shards().size() <= 1) return each([&](const at::Tensor& shard) { return shard.view(size); });
  const std::size_t dims = this->size().size();
  if (dims > 2) fail(ErrorCode::unsupported, "view of several local shards of {} dimensions: expected at most 2", dims);
  if (size != this->size()) {
    fail(ErrorCode::invalid_argument, "view of several local shards as {}: expected their size {}",
         shape_to_string(size), shape_to_string(this->size()));
  }
  return each([](const at::Tensor& shard) { return shard.view(shard.sizes()); });
}

bool LocalShardsWrapper::equal(const LocalShardsWrapper& other) const {
  return std::equal(
             local_shards().begin(), local_shards().end(), other.local_shards().begin(), other.local_shards().end(),
             [](const at::Tensor& a, const at::Tensor& b) { return a.sizes() == b.sizes() && at::equal(a, b); }) &&
         storage_metadata() == other.storage_metadata();
}

LocalShardsWrapper& LocalShardsWrapper::detach() {
  for (at::Tensor& shard : state_->shards) shard = shard.detach();
  state_->metadata.properties.requires_grad = false;
  return *this;
}

LocalShardsWrapper LocalShardsWrapper::clone(std::optional<at::MemoryFormat> memory_format) const {
  if (memory_format && *memory_format != at::MemoryFormat::Preserve) {
    std::ostringstream format;
    format << *memory_format;
    fail(ErrorCode::unsupported, "clone: memory format {} is not supported for LocalShardsWrapper, expected Preserve",
         format.str());
  }
  return each([](const at::Tensor& shard) { return shard.clone(); });
}

LocalShardsWrapper LocalShardsWrapper::new_empty(const Sizes& /*size*/) const {
  return each([](const at::Tensor& shard) { return at::empty_like(shard); });
}

LocalShardsWrapper LocalShardsWrapper::constant_pad_nd(const Sizes& pad, const at::Scalar& value) const {
  const auto refuse_pad = [&](ErrorCode code, const char* expected) {
    fail(code, "pad local shards of size {} by {}: expected {}", shape_to_string(size()), shape_to_string(pad),
         expected);
  };
  if (local_shards().empty()) refuse_pad(ErrorCode::invalid_argument, "at least one shard");
  const std::size_t dims = size().size(), last = local_shards().size() - 1;
  if (last > 0 && (dims == 0 || dims > 2)) refuse_pad(ErrorCode::unsupported, "one or two dimensions");
  const bool fits = pad.size() % 2 == 0 && pad.size() <= 2 * dims &&
                    std::all_of(pad.begin(), pad.end(), [](std::int64_t count) { return count >= 0; });
  if (!fits) refuse_pad(ErrorCode::invalid_argument, "two counts for each of the last dimensions");
  std::vector<at::Tensor> shards;
  shards.reserve(local_shards().size());
  std::vector<Sizes> offsets = local_offsets();
  for (std::size_t i = 0; i <= last; ++i) {
    Sizes of_shard = pad;  // shards are concatenated along the last dimension
    if (i > 0 && !pad.empty()) {
      offsets[i].back() += pad[0];
      of_shard[0] = 0;
    }
    if (i < last && !pad.empty()) of_shard[1] = 0;
    shards.push_back(at::constant_pad_nd(local_shards()[i], of_shard, value));
  }
  return {std::move(shards), std::move(offsets)};
}

void LocalShardsWrapper::refuse(std::string_view op) {
  fail(ErrorCode::unsupported, "{} is not supported for LocalShardsWrapper, expected one local tensor on each rank",
       op);
}

std::vector<ShardWriteItem> LocalShardsWrapper::create_write_items(const std::string& fqn, const Sizes& size) const {
  std::vector<ShardWriteItem> items;
  for (std::size_t i = 0; i < local_shards().size(); ++i) {
    ShardWriteItem& item = items.emplace_back();
    item.chunk = local_chunks()[i];
    item.index.fqn = fqn;
    item.index.offset = item.chunk.offsets;
    item.properties = storage_metadata().properties;
    item.size = size;
  }
  return items;
}

at::Tensor LocalShardsWrapper::get_tensor_shard(const ShardIndex& index) const {
  const auto is_at = [&](std::size_t i) { return index.offset && local_chunks()[i].offsets == *index.offset; };
  if (index.index && *index.index < local_shards().size() && is_at(*index.index)) return local_shards()[*index.index];
  for (std::size_t i = 0; i < local_shards().size(); ++i) {
    if (is_at(i)) return local_shards()[i];
  }
  if (local_shards().empty()) return at::empty({0});
  fail(ErrorCode::not_found, "get_tensor_shard: no local shard of '{}' at {}, expected the offset of a local shard",
       index.fqn, index.offset ? shape_to_string(*index.offset) : "no offset");
}

std::ostream& operator<<(std::ostream& out, const LocalShardsWrapper& wrapper) { return out << wrapper.to_string(); }

}  // namespace tessera

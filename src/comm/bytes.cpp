// Collectives on byte payloads, built on those on tensors after the ranks have exchanged their sizes; and agreement.

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "comm/exceptions.h"
#include "comm/group_impl.h"
#include "tessera/base/rank_errors.h"

namespace tessera {

namespace {

using Sizes = std::vector<std::int64_t>;

at::Tensor empty_bytes(std::int64_t size) { return at::empty({size}, at::kByte); }

at::Tensor to_tensor(ByteView bytes) {
  at::Tensor tensor = empty_bytes(static_cast<std::int64_t>(bytes.size()));
  if (!bytes.empty()) std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

Bytes to_bytes(const at::Tensor& tensor) {
  const auto* data = static_cast<const std::uint8_t*>(tensor.data_ptr());
  return {data, data + tensor.numel()};
}

std::int64_t sum(const Sizes& sizes) { return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}); }

// Splits the concatenated parts in `tensor`.
std::vector<Bytes> split(const at::Tensor& tensor, const Sizes& sizes) {
  std::vector<Bytes> parts;
  std::int64_t begin = 0;
  for (const std::int64_t size : sizes) {
    parts.push_back(to_bytes(tensor.narrow(0, begin, size)));
    begin += size;
  }
  return parts;
}

Sizes all_sizes(const ProcessGroup& group, std::size_t size) {
  const at::Tensor mine = at::empty({1}, at::kLong), all = at::empty({group.size()}, at::kLong);
  mine.data_ptr<std::int64_t>()[0] = static_cast<std::int64_t>(size);
  group.all_gather_into(all, mine);
  return {all.data_ptr<std::int64_t>(), all.data_ptr<std::int64_t>() + group.size()};
}

void check_parts(const ProcessGroup::Impl& group, std::string_view name, std::size_t parts) {
  if (parts == static_cast<std::size_t>(group.size())) return;
  fail(ErrorCode::invalid_argument, "{}: found {} parts, expected {}, one for each rank", group.where(name), parts,
       group.size());
}

}  // namespace

std::vector<Bytes> ProcessGroup::all_gather_bytes(ByteView bytes) const {
  const Sizes sizes = all_sizes(*this, bytes.size());
  const std::int64_t most = *std::max_element(sizes.begin(), sizes.end());
  std::vector<Bytes> parts;
  if (most * size() <= 2 * sum(sizes) + (1 << 16)) {
    const at::Tensor padded = empty_bytes(most), all = empty_bytes(most * size());
    if (!bytes.empty()) std::memcpy(padded.data_ptr(), bytes.data(), bytes.size());
    all_gather_into(all, padded);
    for (int r = 0; r < size(); ++r) {
      parts.push_back(to_bytes(all.narrow(0, r * most, sizes[static_cast<std::size_t>(r)])));
    }
    return parts;
  }
  // A few ranks have nearly all of the bytes.
  for (int r = 0; r < size(); ++r) {
    const at::Tensor part = r == rank() ? to_tensor(bytes) : empty_bytes(sizes[static_cast<std::size_t>(r)]);
    broadcast(part, r);
    parts.push_back(to_bytes(part));
  }
  return parts;
}

std::vector<Bytes> ProcessGroup::gather_bytes(ByteView bytes, int root) const {
  std::vector<Bytes> parts(static_cast<std::size_t>(size()));
  if (root < 0 || root >= size()) {
    fail(ErrorCode::invalid_argument, "{}: root {}, expected 0 to {}", impl_->where("gather_bytes"), root, size() - 1);
  }
  parts[static_cast<std::size_t>(root)].assign(bytes.begin(), bytes.end());
  std::vector<Bytes> gathered = all_to_all_bytes(parts);
  if (root != rank()) gathered.clear();
  return gathered;
}

Bytes ProcessGroup::broadcast_bytes(ByteView bytes, int root) const {
  const at::Tensor size = at::empty({1}, at::kLong);
  size.data_ptr<std::int64_t>()[0] = static_cast<std::int64_t>(bytes.size());
  broadcast(size, root);
  const at::Tensor tensor = root == rank() ? to_tensor(bytes) : empty_bytes(size.data_ptr<std::int64_t>()[0]);
  broadcast(tensor, root);
  return to_bytes(tensor);
}

Bytes ProcessGroup::scatter_bytes(std::span<const Bytes> parts, int root) const {
  const std::vector<Bytes> nothing(static_cast<std::size_t>(size()));
  if (root < 0 || root >= size()) {
    fail(ErrorCode::invalid_argument, "{}: root {}, expected 0 to {}", impl_->where("scatter_bytes"), root, size() - 1);
  }
  if (root == rank()) check_parts(*impl_, "scatter_bytes", parts.size());
  std::vector<Bytes> received = all_to_all_bytes(root == rank() ? parts : std::span<const Bytes>(nothing));
  return std::move(received[static_cast<std::size_t>(root)]);
}

std::vector<Bytes> ProcessGroup::all_to_all_bytes(std::span<const Bytes> parts) const {
  check_parts(*impl_, "all_to_all_bytes", parts.size());
  Sizes in_sizes;
  Bytes all;
  for (const Bytes& part : parts) {
    in_sizes.push_back(static_cast<std::int64_t>(part.size()));
    append(all, part);
  }
  const Sizes ones(parts.size(), 1);
  const at::Tensor in_counts = at::empty({size()}, at::kLong), out_counts = at::empty({size()}, at::kLong);
  std::copy(in_sizes.begin(), in_sizes.end(), in_counts.data_ptr<std::int64_t>());
  all_to_all(out_counts, in_counts, ones, ones);
  const Sizes out_sizes(out_counts.data_ptr<std::int64_t>(), out_counts.data_ptr<std::int64_t>() + size());
  const at::Tensor out = empty_bytes(sum(out_sizes));
  all_to_all(out, to_tensor(all), out_sizes, in_sizes);
  return split(out, out_sizes);
}

void ProcessGroup::agree(std::string_view step, const std::exception_ptr& failure) const {
  if (impl_->is_alone()) {
    if (failure) std::rethrow_exception(failure);
    return;
  }
  const at::Tensor failures = at::empty({1}, at::kLong);
  failures.data_ptr<std::int64_t>()[0] = failure ? 1 : 0;
  all_reduce(failures);
  if (failures.data_ptr<std::int64_t>()[0] == 0) return;

  Bytes mine;
  if (failure) {
    mine.push_back(static_cast<std::uint8_t>(comm::code_of(failure)));
    append(mine, comm::message_of(failure));
  }
  std::vector<RankFailure> failed;
  const std::vector<Bytes> all = all_gather_bytes(mine);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;
    failed.push_back(
        {static_cast<int>(r), static_cast<ErrorCode>(all[r][0]), std::string(as_text(ByteView(all[r]).subspan(1)))});
  }
  fail_for_ranks(step, failed, size());
}

}  // namespace tessera

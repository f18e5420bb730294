// Collectives on byte payloads, built on those on tensors after the ranks have exchanged their sizes.

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "comm/group_impl.h"

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

void check_parts(const ProcessGroup::Impl& group, std::string_view name, std::size_t parts) {
  if (parts == static_cast<std::size_t>(group.size())) return;
  fail(ErrorCode::invalid_argument, "{}: found {} parts, expected {}, one for each rank", group.where(name), parts,
       group.size());
}

}  // namespace

std::vector<Bytes> comm::all_gather_bytes(const GroupPtr& group, std::string_view name, ByteView bytes,
                                          const std::vector<std::int64_t>& sizes) {
  const int ranks = group->size();
  const std::int64_t most = *std::max_element(sizes.begin(), sizes.end());
  std::vector<Bytes> parts;
  if (most * ranks <= 2 * sum(sizes) + (1 << 16)) {
    const at::Tensor padded = empty_bytes(most), all = empty_bytes(most * ranks);
    if (!bytes.empty()) std::memcpy(padded.data_ptr(), bytes.data(), bytes.size());
    start_all_gather(group, group->transports.control, name, all, padded).wait();
    for (int r = 0; r < ranks; ++r) {
      parts.push_back(to_bytes(all.narrow(0, r * most, sizes[static_cast<std::size_t>(r)])));
    }
    return parts;
  }
  // A few ranks have nearly all of the bytes.
  for (int r = 0; r < ranks; ++r) {
    const at::Tensor part = r == group->rank ? to_tensor(bytes) : empty_bytes(sizes[static_cast<std::size_t>(r)]);
    broadcast(group, group->transports.control, name, part, r);
    parts.push_back(to_bytes(part));
  }
  return parts;
}

namespace {

void check_root(const ProcessGroup::Impl& group, std::string_view name, int root) {
  if (root >= 0 && root < group.size()) return;
  fail(ErrorCode::invalid_argument, "{}: root {}, expected 0 to {}", group.where(name), root, group.size() - 1);
}

// Sends parts[r] to rank r. `parts` has one for each rank.
std::vector<Bytes> exchange(const comm::GroupPtr& group, std::string_view name, std::span<const Bytes> parts) {
  Sizes in_sizes;
  Bytes all;
  for (const Bytes& part : parts) {
    in_sizes.push_back(static_cast<std::int64_t>(part.size()));
    append(all, part);
  }
  const Sizes ones(parts.size(), 1);
  const at::Tensor in_counts = at::empty({group->size()}, at::kLong),
                   out_counts = at::empty({group->size()}, at::kLong);
  std::copy(in_sizes.begin(), in_sizes.end(), in_counts.data_ptr<std::int64_t>());
  comm::start_all_to_all(group, group->transports.control, name, out_counts, in_counts, ones, ones).wait();
  const Sizes out_sizes(out_counts.data_ptr<std::int64_t>(), out_counts.data_ptr<std::int64_t>() + group->size());
  const at::Tensor out = empty_bytes(sum(out_sizes));
  comm::start_all_to_all(group, group->transports.control, name, out, to_tensor(all), out_sizes, in_sizes).wait();
  return split(out, out_sizes);
}

}  // namespace

std::vector<Bytes> ProcessGroup::all_gather_bytes(ByteView bytes) const {
  const std::vector<std::int64_t> sizes = impl_->compare_calls(
      impl_, "all_gather_bytes", [](CallArguments&) {}, static_cast<std::int64_t>(bytes.size()));
  return comm::all_gather_bytes(impl_, "all_gather_bytes", bytes, sizes);
}

std::vector<Bytes> ProcessGroup::gather_bytes(ByteView bytes, int root) const {
  check_call("gather_bytes", [&](CallArguments& arguments) {
    check_root(*impl_, "gather_bytes", root);
    arguments.add("root", root);
  });
  std::vector<Bytes> parts(static_cast<std::size_t>(size()));
  parts[static_cast<std::size_t>(root)].assign(bytes.begin(), bytes.end());
  std::vector<Bytes> gathered = exchange(impl_, "gather_bytes", parts);
  if (root != rank()) gathered.clear();
  return gathered;
}

Bytes ProcessGroup::broadcast_bytes(ByteView bytes, int root) const {
  const std::vector<std::int64_t> sizes = impl_->compare_calls(
      impl_, "broadcast_bytes",
      [&](CallArguments& arguments) {
        check_root(*impl_, "broadcast_bytes", root);
        arguments.add("root", root);
      },
      static_cast<std::int64_t>(bytes.size()));
  const at::Tensor tensor = root == rank() ? to_tensor(bytes) : empty_bytes(sizes[static_cast<std::size_t>(root)]);
  comm::broadcast(impl_, impl_->transports.control, "broadcast_bytes", tensor, root);
  return to_bytes(tensor);
}

Bytes ProcessGroup::scatter_bytes(std::span<const Bytes> parts, int root) const {
  check_call("scatter_bytes", [&](CallArguments& arguments) {
    check_root(*impl_, "scatter_bytes", root);
    if (root == rank()) check_parts(*impl_, "scatter_bytes", parts.size());
    arguments.add("root", root);
  });
  const std::vector<Bytes> nothing(static_cast<std::size_t>(size()));
  std::vector<Bytes> received =
      exchange(impl_, "scatter_bytes", root == rank() ? parts : std::span<const Bytes>(nothing));
  return std::move(received[static_cast<std::size_t>(root)]);
}

std::vector<Bytes> ProcessGroup::all_to_all_bytes(std::span<const Bytes> parts) const {
  check_call("all_to_all_bytes", [&](CallArguments&) { check_parts(*impl_, "all_to_all_bytes", parts.size()); });
  return exchange(impl_, "all_to_all_bytes", parts);
}

}  // namespace tessera

#include "state/transport/spans.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <tuple>
#include <utility>

#include "tessera/base/checked.h"
#include "tessera/base/error.h"

namespace tessera {

namespace {

// The bytes [begin, end) of its storage that a tensor's elements are within.
struct StorageRange {
  std::int64_t begin, end;
  std::size_t tensor;
};

// The least that a thread copies.
constexpr std::int64_t kCopyGrainBytes = std::int64_t{1} << 20;

std::int64_t item_size(const at::Tensor& tensor) { return static_cast<std::int64_t>(tensor.element_size()); }

StorageRange range_of(const at::Tensor& tensor, std::size_t i) {
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const std::int64_t begin = tensor.storage_offset() * item_size(tensor);
  return {begin, begin + (last + 1) * item_size(tensor), i};
}

std::vector<std::int64_t> row_major(const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<std::int64_t>(sizes[d], 1);
  return strides;
}

class SpanPlan {
 public:
  explicit SpanPlan(const std::vector<at::Tensor>& tensors) : tensors_(tensors) {
    spans_.views.resize(tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].numel() == 0 || tensors[i].is_meta() || !tensors[i].has_storage()) {
        pack(i);
        continue;
      }
      const auto [found, is_new] = storages_.emplace(tensors[i].storage().unsafeGetStorageImpl(), ranges_.size());
      if (is_new) ranges_.emplace_back();
      ranges_[found->second].push_back(range_of(tensors[i], i));
    }
    for (std::vector<StorageRange>& ranges : ranges_) {
      std::stable_sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
      for (std::size_t first = 0; first < ranges.size();) {
        std::int64_t end = ranges[first].end;
        std::size_t next = first + 1;
        while (next < ranges.size() && ranges[next].begin < end) end = std::max(end, ranges[next++].end);
        add(std::span(ranges).subspan(first, next - first), end);
        first = next;
      }
    }
  }

  Spans take() { return std::move(spans_); }

 private:
  using View =
      std::tuple<const void*, std::vector<std::int64_t>, std::vector<std::int64_t>, at::ScalarType, bool, bool>;

  // Adds tensors that overlap, directly or through others.
  void add(std::span<const StorageRange> ranges, std::int64_t end) {
    std::map<View, std::size_t> distinct;
    std::int64_t packed_bytes = 0, alignment = 1;
    for (const StorageRange& range : ranges) {
      const at::Tensor& tensor = tensors_[range.tensor];
      alignment = std::max(alignment, item_size(tensor));
      if (distinct.emplace(view_of(tensor), range.tensor).second) packed_bytes += tensor.numel() * item_size(tensor);
    }
    // Views of other dtypes must begin at one of their elements.
    const std::int64_t begin = ranges[0].begin - ranges[0].begin % alignment;
    if (packed_bytes < end - ranges[0].begin) {
      for (const StorageRange& range : ranges) {
        const std::size_t first = distinct.at(view_of(tensors_[range.tensor]));
        if (first == range.tensor) {
          pack(first);
        } else {
          spans_.views[range.tensor] = spans_.views[first];
        }
      }
      return;
    }
    const at::Tensor& any = tensors_[ranges[0].tensor];
    spans_.sources.push_back(at::empty({0}, at::TensorOptions().dtype(at::kByte).device(any.device()))
                                 .set_(any.storage(), begin, {end - begin}, {1}));
    for (const StorageRange& range : ranges) {
      const at::Tensor& tensor = tensors_[range.tensor];
      spans_.views[range.tensor] = {spans_.sources.size() - 1,
                                    tensor.scalar_type(),
                                    (range.begin - begin) / item_size(tensor),
                                    tensor.sizes().vec(),
                                    tensor.strides().vec(),
                                    tensor.is_conj(),
                                    tensor.is_neg()};
    }
  }

  void pack(std::size_t i) {
    const at::Tensor& tensor = tensors_[i];
    spans_.sources.push_back(tensor.detach());
    spans_.views[i] = {spans_.sources.size() - 1,
                       tensor.scalar_type(),
                       0,
                       tensor.sizes().vec(),
                       row_major(tensor.sizes().vec()),
                       false,
                       false};
  }

  static View view_of(const at::Tensor& tensor) {
    return {tensor.data_ptr(),    tensor.sizes().vec(), tensor.strides().vec(),
            tensor.scalar_type(), tensor.is_conj(),     tensor.is_neg()};
  }

  const std::vector<at::Tensor>& tensors_;
  std::map<const void*, std::size_t> storages_;    // positions in ranges_
  std::vector<std::vector<StorageRange>> ranges_;  // of the tensors of each storage
  Spans spans_;
};

}  // namespace

Spans spans_of(const std::vector<at::Tensor>& tensors) { return SpanPlan(tensors).take(); }

at::Tensor elements_in(const at::Tensor& memory, at::ScalarType dtype, at::IntArrayRef sizes,
                       std::int64_t begin_bytes) {
  const auto item_bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  return view_in(memory, {0, dtype, begin_bytes / item_bytes, sizes.vec(), row_major(sizes.vec()), false, false});
}

void copy_span(const at::Tensor& memory, const at::Tensor& source) {
  if (source.numel() == 0) return;  // may be on meta
  if (source.is_cpu() && source.is_contiguous() && !source.is_conj() && !source.is_neg()) {
    // memcpy writes large blocks without reading the destination into the cache first, as LibTorch's copy does.
    auto* const to = static_cast<std::uint8_t*>(memory.data_ptr());
    const auto* const from = static_cast<const std::uint8_t*>(source.data_ptr());
    at::parallel_for(0, static_cast<std::int64_t>(source.nbytes()), kCopyGrainBytes,
                     [&](std::int64_t begin, std::int64_t end) {
                       std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
                     });
    return;
  }
  elements_in(memory, source.scalar_type(), source.sizes()).copy_(source);
}

at::Tensor view_in(const at::Tensor& memory, const SpanView& view) {
  const auto refuse = [&] {
    fail(ErrorCode::corrupt, "view a tensor: an element is not in its span of {} bytes, expected all of them in it",
         memory.numel());
  };
  const at::Tensor empty = at::empty({0}, at::TensorOptions().dtype(view.dtype));
  const auto size_bytes = static_cast<std::int64_t>(empty.element_size());
  if (view.sizes.size() != view.strides.size() || view.offset < 0) refuse();
  std::uint64_t last = static_cast<std::uint64_t>(view.offset);
  bool is_empty = false;
  for (std::size_t d = 0; d < view.sizes.size(); ++d) {
    if (view.sizes[d] < 0 || view.strides[d] < 0) refuse();
    is_empty = is_empty || view.sizes[d] == 0;
  }
  if (is_empty) return at::empty(view.sizes, empty.options());
  for (std::size_t d = 0; d < view.sizes.size(); ++d) {
    last = checked_add(last,
                       checked_multiply(static_cast<std::uint64_t>(view.sizes[d] - 1),
                                        static_cast<std::uint64_t>(view.strides[d]), "the extent"),
                       "the extent");
  }
  if (last >= static_cast<std::uint64_t>(memory.numel() / size_bytes)) refuse();
  at::Tensor tensor = empty.set_(memory.storage(), view.offset, view.sizes, view.strides);
  if (view.is_conj) tensor = tensor.conj();
  return view.is_neg ? at::_neg_view(tensor) : tensor;
}

std::vector<HostCopy> HostCopies::copy(const std::vector<at::Tensor>& tensors) {
  const Spans spans = spans_of(tensors);
  std::multimap<std::pair<std::int64_t, bool>, at::Tensor> unused;  // by bytes and whether it is pinned
  for (Buffer& buffer : buffers_) {
    const std::pair key(buffer.memory.numel(), buffer.is_pinned);
    unused.emplace(key, std::move(buffer.memory));
  }
  buffers_.clear();
  std::vector<comm::Mark> copied(spans.sources.size());
  for (std::size_t i = 0; i < spans.sources.size(); ++i) {
    const at::Tensor& source = spans.sources[i];
    const auto bytes = static_cast<std::int64_t>(source.nbytes());
    const bool is_pinned = !source.is_cpu() && !source.is_meta();
    if (const auto found = unused.find({bytes, is_pinned}); found != unused.end()) {
      buffers_.push_back({std::move(found->second), is_pinned});
      unused.erase(found);
    } else {
      buffers_.push_back(
          {at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(is_pinned)), is_pinned});
    }
    const at::Tensor& memory = buffers_.back().memory;
    if (!is_pinned) {
      copy_span(memory, source);
      continue;
    }
    elements_in(memory, source.scalar_type(), source.sizes())
        .copy_(source.resolve_conj().resolve_neg(), /*non_blocking=*/true);
    copied[i].set(source.device());
  }
  std::vector<HostCopy> copies;
  for (const SpanView& view : spans.views)
    copies.push_back({view_in(buffers_[view.span].memory, view), copied[view.span]});
  return copies;
}

std::uint64_t HostCopies::size_bytes() const {
  std::uint64_t sum = 0;
  for (const Buffer& buffer : buffers_) sum += buffer.memory.nbytes();
  return sum;
}

}  // namespace tessera

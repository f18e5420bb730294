#pragma once
// The memory of tensors, each byte once: what staging copies, and what is sent to another rank.
//
// A span is the memory of one tensor, or of tensors that overlap in one storage. Law: the spans have at most as many
// bytes as the distinct tensors have elements, and no more than the ranges of memory that they cover. Views of a span
// share it as the tensors share their storage. A tensor whose elements are far apart in its storage, such as a column
// of a matrix, is packed: its span has its elements alone, in row-major order.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "tessera/comm/internal/streams.h"

namespace tessera {

// A tensor as a view of a span.
struct SpanView {
  std::size_t span = 0;
  at::ScalarType dtype = at::kFloat;
  std::int64_t offset = 0;  // of its first element from the beginning of the span, in elements
  std::vector<std::int64_t> sizes, strides;
  bool is_conj = false, is_neg = false;

  bool operator==(const SpanView&) const = default;
};

struct Spans {
  std::vector<at::Tensor> sources;  // the elements of each span, on any device, by reference
  std::vector<SpanView> views;      // of each tensor, in their order
};

// Returns the spans of strided tensors.
Spans spans_of(const std::vector<at::Tensor>& tensors);

// Returns elements in `memory`, a contiguous tensor of bytes, from one of its bytes on, as a row-major tensor.
at::Tensor elements_in(const at::Tensor& memory, at::ScalarType dtype, at::IntArrayRef sizes,
                       std::int64_t begin_bytes = 0);

// Copies the elements of a span to `memory`, a contiguous tensor of source.nbytes() bytes.
void copy_span(const at::Tensor& memory, const at::Tensor& source);

// Returns the view in `memory`, a contiguous tensor of the bytes of its span, which it keeps alive. Throws
// Error(corrupt) if an element is not in the span.
at::Tensor view_in(const at::Tensor& memory, const SpanView& view);

// A copy of a tensor on the CPU.
struct HostCopy {
  at::Tensor elements;
  comm::Mark copied;  // before which the elements are not there
};

// Copies of tensors in memory of the CPU, which is reused for the next copies. Elements on a device are copied to
// pinned memory on the current stream, so that what changes them later comes after, and the host does not wait.
class HostCopies {
 public:
  // Returns the copies, in order. Views of one storage that overlap share their copy. The next call invalidates them.
  std::vector<HostCopy> copy(const std::vector<at::Tensor>& tensors);
  std::uint64_t size_bytes() const;

 private:
  struct Buffer {
    at::Tensor memory;  // of a span
    bool is_pinned;
  };
  std::vector<Buffer> buffers_;
};

}  // namespace tessera

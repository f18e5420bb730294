#pragma once
// A tensor on its way through the rules of a map.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/base/function_ref.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/layout/box.h"
#include "tessera/layout/tensor_view.h"

namespace tessera::checkpoint {

// A view, and boxes that partition it as the chunks of its inputs do, so that a checkpoint of ranks stays one. If a box
// would need too many boxes, all of the tensor is one chunk.
class MappedTensor {
 public:
  // `input` is the number of the view's input.
  MappedTensor(const TensorInfo& info, std::size_t input);

  const TensorView& view() const { return view_; }
  const std::vector<std::int64_t>& shape() const { return view_.shape(); }
  const BoxList& chunks() const { return chunks_; }
  const std::vector<StoredRange>& stored() const { return stored_; }

  MappedTensor permuted(const std::vector<std::size_t>& dims) const;
  MappedTensor reshaped(const std::vector<std::int64_t>& shape) const;
  // Returns the slices of these sizes, which add up to the size of the dimension.
  std::vector<MappedTensor> split(std::size_t dim, const std::vector<std::int64_t>& sizes) const;
  static MappedTensor concat(const std::vector<MappedTensor>& parts, std::size_t dim);
  MappedTensor renumbered(FunctionRef<std::size_t(std::size_t)> number) const;

 private:
  explicit MappedTensor(TensorView view) : view_(std::move(view)), chunks_(view_.shape().size()) {}
  void add_chunk(BoxView box, const StoredRange& stored);

  TensorView view_;
  BoxList chunks_;
  std::vector<StoredRange> stored_;
};

}  // namespace tessera::checkpoint

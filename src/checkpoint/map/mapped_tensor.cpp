#include "checkpoint/map/mapped_tensor.h"

#include <optional>
#include <utility>

#include "tessera/base/function_ref.h"
#include "tessera/layout/redistribution.h"

namespace tessera::checkpoint {
namespace {

// A chunk of rows of a matrix becomes at most 3 chunks of any reshape. Others than these have one chunk.
constexpr std::size_t kMaxBoxesOfChunk = 9;

}  // namespace

MappedTensor::MappedTensor(const TensorInfo& info, std::size_t input)
    : view_(TensorView::input(input, info.shape)), chunks_(info.chunks), stored_(info.stored) {}

void MappedTensor::add_chunk(BoxView box, const StoredRange& stored) {
  chunks_.push_back(box);
  stored_.push_back(stored);
}

MappedTensor MappedTensor::permuted(const std::vector<std::size_t>& dims) const {
  MappedTensor result(view_.permute(dims));
  Box box = Box::full(result.shape());
  for (std::size_t c = 0; c < chunks_.size(); ++c) {
    for (std::size_t d = 0; d < dims.size(); ++d) {
      box.offsets[d] = chunks_[c].offsets[dims[d]];
      box.sizes[d] = chunks_[c].sizes[dims[d]];
    }
    result.add_chunk(box, stored_[c]);
  }
  return result;
}

MappedTensor MappedTensor::reshaped(const std::vector<std::int64_t>& to) const {
  MappedTensor result(view_.reshape(to));
  for (std::size_t c = 0; c < chunks_.size(); ++c) {
    const std::optional<std::vector<Box>> boxes = reshape_box(chunks_[c], shape(), to);
    if (!boxes || boxes->size() > kMaxBoxesOfChunk) {
      MappedTensor one_chunk(result.view_);
      one_chunk.add_chunk(Box::full(to), stored_.front());
      return one_chunk;
    }
    for (const Box& box : *boxes) result.add_chunk(box, stored_[c]);
  }
  return result;
}

std::vector<MappedTensor> MappedTensor::split(std::size_t dim, const std::vector<std::int64_t>& sizes) const {
  const BoxIndex index(chunks_);
  std::vector<MappedTensor> result;
  result.reserve(sizes.size());
  Box part = Box::full(shape());
  for (const std::int64_t size : sizes) {
    part.sizes[dim] = size;
    MappedTensor& one = result.emplace_back(MappedTensor(view_.slice(dim, part.offsets[dim], size)));
    for (const std::size_t c : index.overlapping(part)) {
      std::optional<Box> box = intersect(part, chunks_[c]);
      if (!box) continue;
      box->offsets[dim] -= part.offsets[dim];
      one.add_chunk(*box, stored_[c]);
    }
    // As of every tensor without elements.
    if (one.chunks_.empty() && !stored_.empty()) one.add_chunk(Box::full(one.shape()), stored_.front());
    part.offsets[dim] += size;
  }
  return result;
}

MappedTensor MappedTensor::concat(const std::vector<MappedTensor>& parts, std::size_t dim) {
  std::vector<TensorView> views;
  views.reserve(parts.size());
  for (const MappedTensor& part : parts) views.push_back(part.view_);
  MappedTensor result(TensorView::concat(views, dim));
  std::int64_t offset = 0;
  for (const MappedTensor& part : parts) {
    for (std::size_t c = 0; c < part.chunks_.size(); ++c) {
      Box box(part.chunks_[c]);
      box.offsets[dim] += offset;
      result.add_chunk(box, part.stored_[c]);
    }
    offset += part.shape()[dim];
  }
  return result;
}

MappedTensor MappedTensor::renumbered(FunctionRef<std::size_t(std::size_t)> number) const {
  MappedTensor result = *this;
  result.view_ = view_.renumbered(number);
  return result;
}

}  // namespace tessera::checkpoint

#pragma once
// The view of a checkpoint through a map: the backend of a Checkpoint whose tensors are computed from another's.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "checkpoint/source/source.h"
#include "tessera/checkpoint/tensor_reader.h"
#include "tessera/layout/tensor_view.h"

namespace tessera::checkpoint {

// The tensors of a view in terms of those that they are computed from.
class ComputedTensors {
 public:
  // A tensor of the other checkpoint, cast to each of these dtypes in turn. Inputs of views have their numbers.
  struct Input {
    std::size_t tensor = 0;
    std::vector<DType> casts;
  };

  ComputedTensors(std::shared_ptr<const Checkpoint> from, std::vector<Input> inputs, std::vector<TensorView> views)
      : from_(std::move(from)), inputs_(std::move(inputs)), views_(std::move(views)) {}

  const Checkpoint& from() const { return *from_; }
  const std::vector<Input>& inputs() const { return inputs_; }
  const TensorView& view(std::size_t tensor) const { return views_[tensor]; }
  // Returns the tensor of the other checkpoint that a tensor is, with all of its elements in their places, if it is
  // one.
  std::optional<std::size_t> same_tensor(std::size_t tensor) const;

  // Returns a reader of a tensor of the other checkpoint. Tensors that are computed from the same one share it, so that
  // a checksum of which each of them reads a part is verified without reading the elements again.
  std::shared_ptr<const TensorReader> reader(std::size_t input_tensor, bool sums_bytes) const;
  // Verifies what has been read completely with these readers, and keeps those with more to verify for verify_rest.
  // Returns whether there is none.
  using Readers = std::map<std::size_t, std::shared_ptr<const TensorReader>>;
  bool verify_complete(const Readers& readers) const;
  // Verifies all that was read with shared readers, reading what is missing.
  void verify_rest() const;

 private:
  std::shared_ptr<const Checkpoint> from_;
  std::vector<Input> inputs_;
  std::vector<TensorView> views_;
  mutable std::mutex mutex_;
  mutable Readers shared_;  // by tensor
  mutable std::set<std::shared_ptr<const TensorReader>> unfinished_;
};

// `tensors` and `objects` are those of the view; objects[i].source is the object of `from` that object i is.
struct MappedObject {
  ObjectInfo info;
  std::size_t source = 0;
};
std::unique_ptr<SourceBackend> open_mapped(const std::shared_ptr<const Checkpoint>& from,
                                           std::unique_ptr<const ComputedTensors> computed,
                                           std::vector<TensorInfo> tensors, std::vector<MappedObject> objects);

}  // namespace tessera::checkpoint

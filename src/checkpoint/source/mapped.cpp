#include "checkpoint/source/mapped.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/checkpoint/storage.h"

namespace tessera::checkpoint {

std::optional<std::size_t> ComputedTensors::same_tensor(std::size_t tensor) const {
  const TensorView& view = views_[tensor];
  if (!view.is_input()) return std::nullopt;
  std::vector<std::size_t> numbers;
  view.add_inputs(numbers);
  const Input& input = inputs_[numbers[0]];
  return input.casts.empty() ? std::optional(input.tensor) : std::nullopt;
}

std::shared_ptr<const TensorReader> ComputedTensors::reader(std::size_t input_tensor, bool sums_bytes) const {
  if (!sums_bytes) return std::make_shared<const TensorReader>(from_, input_tensor, false);
  const std::lock_guard lock(mutex_);
  std::shared_ptr<const TensorReader>& shared = shared_[input_tensor];
  if (!shared) shared = std::make_shared<const TensorReader>(from_, input_tensor);
  return shared;
}

bool ComputedTensors::verify_complete(const Readers& readers) const {
  bool all = true;
  for (const auto& used : readers) {
    const std::shared_ptr<const TensorReader>& reader = used.second;
    const bool is_finished = reader->verify_complete_chunks();
    const std::lock_guard lock(mutex_);
    if (is_finished) {
      unfinished_.erase(reader);
      std::erase_if(shared_, [&](const auto& known) { return known.second == reader; });
    } else {
      unfinished_.insert(reader);
    }
    all = all && is_finished;
  }
  return all;
}

void ComputedTensors::verify_rest() const {
  std::set<std::shared_ptr<const TensorReader>> rest;
  {
    const std::lock_guard lock(mutex_);
    rest.swap(unfinished_);
    for (const auto& [tensor, reader] : shared_) rest.insert(reader);
    shared_.clear();
  }
  for (const std::shared_ptr<const TensorReader>& reader : rest) reader->verify_checksums();
}

namespace {

class MappedSource final : public SourceBackend {
 public:
  MappedSource(const std::shared_ptr<const Checkpoint>& from, std::unique_ptr<const ComputedTensors> computed,
               std::vector<MappedObject> mapped_objects)
      : SourceBackend(from->path(), nullptr, std::nullopt), from_(from), computed_(std::move(computed)) {
    kind = from->kind();
    version = from->version();
    files = from->files();
    warnings = from->warnings();
    metadata = from->metadata();
    for (MappedObject& object : mapped_objects) {
      objects.push_back(std::move(object.info));
      object_sources_.push_back(object.source);
    }
  }

  const ComputedTensors* computed() const override { return computed_.get(); }
  const dcp::Metadata* dcp_metadata() const override { return from_->dcp_metadata(); }
  StoredRange without_transforms(const StoredRange& stored) const override { return from_->without_transforms(stored); }
  std::shared_ptr<const ByteSource> open_file(std::uint32_t file) const override { return from_->open_file(file); }
  ObjectValue load_object(std::size_t i) const override {
    return from_->load_object(object_sources_[i], ObjectUse::copy);
  }

  Extent locate(std::size_t tensor, std::size_t chunk) const override {
    if (const auto same = computed_->same_tensor(tensor)) return from_->locate(*same, chunk);
    fail(ErrorCode::unsupported,
         "{}: tensor '{}' is computed from others, and has no location of its own, expected a stored tensor",
         path.string(), printable(tensors[tensor].name));
  }

  bool has_sidecar() const override { return from_->has_sidecar(); }
  std::uint64_t largest_block_bytes() const override { return from_->largest_block_bytes(); }
  std::uint64_t bytes_not_compared() const override { return from_->bytes_not_compared(); }
  void compare_rest(const Cancellation* cancellation) const override {
    computed_->verify_rest();
    from_->compare_rest(cancellation);
  }

 private:
  std::shared_ptr<const Checkpoint> from_;
  std::unique_ptr<const ComputedTensors> computed_;
  std::vector<std::size_t> object_sources_;
};

}  // namespace

std::unique_ptr<SourceBackend> open_mapped(const std::shared_ptr<const Checkpoint>& from,
                                           std::unique_ptr<const ComputedTensors> computed,
                                           std::vector<TensorInfo> tensors, std::vector<MappedObject> objects) {
  auto source = std::make_unique<MappedSource>(from, std::move(computed), std::move(objects));
  source->tensors = std::move(tensors);
  source->finish();
  return source;
}

}  // namespace tessera::checkpoint

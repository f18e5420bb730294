#pragma once
// The plan of a conversion, complete before anything is written: names and sizes of files, and a function per stored
// unit that makes it.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/convert/stream_writer.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/tensor_reader.h"

namespace tessera::checkpoint {

struct PlannedUnit {
  std::uint64_t length_bytes = 0;
  std::function<Unit()> make;
};

struct PlannedFile {
  std::string name;
  std::uint64_t tensors = 0;
  std::vector<PlannedUnit> units;
  std::uint64_t size_bytes() const;
};

struct OutputPlan {
  std::vector<PlannedFile> files;
  // Small files, written last: `.metadata`, an index.
  std::vector<std::pair<std::string, Bytes>> small_files;
  // Files that are written with the others and are no part of the checkpoint: its sidecar does not list them.
  std::vector<PlannedFile> companions;
};

// A selected tensor.
struct OutputTensor {
  std::size_t source = 0;  // index in the source
  const TensorInfo* info = nullptr;
  DType dtype = DType::float32;  // at the destination
};

// The source of a conversion: the selected tensors and objects, and a reader per tensor. A reader exists from the first
// byte read to the last; then its checksums are verified.
class OutputSource {
 public:
  OutputSource(std::shared_ptr<const Checkpoint> checkpoint, const ConvertOptions& options);

  const std::shared_ptr<const Checkpoint>& checkpoint() const { return checkpoint_; }
  const std::vector<OutputTensor>& tensors() const { return tensors_; }
  const std::vector<std::size_t>& objects() const { return objects_; }
  const ConvertOptions& options() const { return *options_; }
  void warn(const std::string& message) const;
  // Warns of each tensor with elements that were beyond the range of the destination's dtype. Call it after writing.
  void warn_of_elements_beyond_range() const;
  // States, before anything is read, how many times every element of a tensor is; otherwise it is read once.
  void expect_reads(std::size_t tensor, std::uint64_t times) const;

  // Returns the elements of `box` of a tensor (an index into tensors()), row-major, in the destination's dtype.
  Data tensor_data(std::size_t tensor, const Box& box) const;
  // Returns the bytes of a zip entry in a source's file. The entry's CRC-32 is verified once all bytes were produced.
  Data raw_data(std::uint32_t file, const zip::Entry& entry) const;

 private:
  struct ReaderSlot;
  std::shared_ptr<const Checkpoint> checkpoint_;
  const ConvertOptions* options_;
  std::vector<OutputTensor> tensors_;
  std::vector<std::size_t> objects_;
  std::shared_ptr<std::vector<ReaderSlot>> readers_;
};

// Reads `entry` and throws Error(corrupt) if its bytes do not have its CRC-32.
void check_entry(const ByteSource& file, const zip::Entry& entry);

// A torch.save archive of one object: its pickle and the sources of its storages.
struct ObjectArchive {
  Bytes data_pkl;
  std::vector<ObjectValue::Storage> storages;  // storage k is written under the key k
};
ObjectArchive make_object_archive(const ObjectValue& value);

// Returns an archive as a unit, with the bytes of its storages from `storages`.
Unit archive_unit(const std::shared_ptr<const torch_archive::ArchiveLayout>& layout, std::vector<Data> storages);

// The assignment of tensors' boxes to ranks' files.
struct DcpLayout {
  struct Piece {
    std::size_t tensor;  // into OutputSource::tensors()
    Box box;
  };
  std::map<std::int64_t, std::vector<Piece>> ranks;
};
// The layout of the source.
DcpLayout layout_of_source(const OutputSource& source);
// The layout that reshard's options specify.
DcpLayout layout_for_ranks(const OutputSource& source, const ReshardOptions& options);

OutputPlan plan_dcp(const std::shared_ptr<const OutputSource>& source, const DcpLayout& layout);
// If `file_name` is not empty, plans one file of this name without an index; otherwise a directory.
OutputPlan plan_safetensors(const std::shared_ptr<const OutputSource>& source, const std::string& file_name);
OutputPlan plan_torch(const std::shared_ptr<const OutputSource>& source, const std::string& file_name);
OutputPlan plan_torch_checkpointing(const std::shared_ptr<const OutputSource>& source);

}  // namespace tessera::checkpoint

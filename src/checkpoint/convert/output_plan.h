#pragma once
// What a conversion will write, planned before anything is written: names and sizes of files, and how to make each
// stored unit.

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
  // Small files that go last: `.metadata`, an index.
  std::vector<std::pair<std::string, Bytes>> small_files;
};

// A tensor that takes part.
struct OutputTensor {
  std::size_t source = 0;  // index in the source
  const TensorInfo* info = nullptr;
  DType dtype = DType::float32;  // at the destination
};

// The source as the writers see it: what takes part, and a reader for each tensor, alive from the first byte of it that
// is read to the last, when its checksums are checked.
class OutputSource {
 public:
  OutputSource(std::shared_ptr<const Checkpoint> checkpoint, const ConvertOptions& options);

  const std::shared_ptr<const Checkpoint>& checkpoint() const { return checkpoint_; }
  const std::vector<OutputTensor>& tensors() const { return tensors_; }
  const std::vector<std::size_t>& objects() const { return objects_; }
  const ConvertOptions& options() const { return *options_; }
  void warn(const std::string& message) const;

  // The elements of `box` of a tensor (an index into tensors()), row-major, in the destination's dtype.
  Data tensor_data(std::size_t tensor, const Box& box) const;
  // A range of a source's file as it is. `expected_crc32` is compared when all of it was produced.
  Data raw_data(std::uint32_t file, const zip::Entry& entry) const;

 private:
  struct ReaderSlot;
  std::shared_ptr<const Checkpoint> checkpoint_;
  const ConvertOptions* options_;
  std::vector<OutputTensor> tensors_;
  std::vector<std::size_t> objects_;
  std::shared_ptr<std::vector<ReaderSlot>> readers_;
};

// Throws Error(corrupt) unless the bytes of `entry` have its CRC-32.
void check_entry(const ByteSource& file, const zip::Entry& entry);

// A torch.save archive with one object: its pickle and where its storages come from.
struct ObjectArchive {
  Bytes data_pkl;
  std::vector<ObjectValue::Storage> storages;  // storage k is written under the key k
};
ObjectArchive make_object_archive(const ObjectValue& value);

// An archive as a unit, its storages' bytes from `storages`.
Unit archive_unit(const std::shared_ptr<const torch_archive::ArchiveLayout>& layout, std::vector<Data> storages);

// Which boxes of which tensors go to which rank's files.
struct DcpLayout {
  struct Piece {
    std::size_t tensor;  // into OutputSource::tensors()
    Box box;
  };
  std::map<std::int64_t, std::vector<Piece>> ranks;
};
// As the source has them.
DcpLayout layout_of_source(const OutputSource& source);
// As reshard's options say.
DcpLayout layout_for_ranks(const OutputSource& source, const ReshardOptions& options);

OutputPlan plan_dcp(const std::shared_ptr<const OutputSource>& source, const DcpLayout& layout);
// `file_name`: all in one file of this name, without an index; empty: a directory.
OutputPlan plan_safetensors(const std::shared_ptr<const OutputSource>& source, const std::string& file_name);
OutputPlan plan_torch(const std::shared_ptr<const OutputSource>& source, const std::string& file_name);

}  // namespace tessera::checkpoint

#pragma once
// Reads `state_dict_metadata`: the list of tensors and objects.

#include <string>
#include <string_view>
#include <vector>

#include "format/dcp/fields.h"
#include "format/dcp/input.h"
#include "format/dcp/records.h"

namespace tessera::dcp {

class EntryReader {
 public:
  // Assigns each name its number in `names`, which must not outlive the tree.
  EntryReader(Input& input, Records& records, StringNumbers& names) : input_(input), records_(records), names_(names) {}

  std::vector<MetadataEntry> read(pickle::NodeRef state_dict_metadata);

  // Whether the first tensor's TensorProperties was at its old location under torch.distributed._shard.
  bool saw_old_properties() const { return saw_old_properties_; }

 private:
  void read_tensor(pickle::NodeRef value, MetadataEntry& entry);
  void read_chunks(pickle::NodeRef list, MetadataEntry& entry);
  TensorProperties read_properties(pickle::NodeRef value, std::string_view name);
  DType read_dtype(pickle::NodeRef value, std::string_view name) const;
  std::string read_layout(pickle::NodeRef value, std::string_view name) const;
  MemoryFormat read_memory_format(pickle::NodeRef value, std::string_view name);
  void check_bytes(BoxView box, const MetadataEntry& entry, std::string_view field) const;

  Input& input_;
  Records& records_;
  StringNumbers& names_;
  FieldReader<TensorFields> tensor_{input_};
  FieldReader<ObjectFields> object_{input_};
  ClassReader properties_{Class::properties}, memory_format_{Class::memory_format};
  bool saw_tensor_ = false, saw_old_properties_ = false;
};

}  // namespace tessera::dcp

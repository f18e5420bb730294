#pragma once
// Reads `storage_data`: the location of each chunk and object.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "format/dcp/input.h"
#include "format/dcp/offsets.h"
#include "format/dcp/records.h"

namespace tessera::dcp {

class StorageReader {
 public:
  // `names` maps the name of each of `metadata.entries` to its number. Fills in the items of the entries.
  StorageReader(Input& input, Records& records, StringNumbers& names, Metadata& metadata)
      : input_(input), records_(records), names_(names), metadata_(metadata) {}

  void read(pickle::NodeRef storage_data);

 private:
  void place(pickle::NodeRef key, pickle::NodeRef value);
  std::uint32_t number_of(pickle::NodeRef name);
  StoredItem* destination(MetadataEntry& entry, std::size_t number, const IndexRecord& index);
  StoredItem read_item(pickle::NodeRef value, std::string_view name);
  std::uint32_t read_transforms(pickle::NodeRef value, std::string_view name);
  void share_equal_offsets();
  void check_unclaimed() const;
  void number_by_use();

  Input& input_;
  Records& records_;
  StringNumbers& names_;
  Metadata& metadata_;
  StringNumbers files_;
  std::map<std::vector<std::string>, std::uint32_t> transforms_;
  std::uint32_t next_entry_ = 0;
  std::uint64_t transforms_identity_ = 0;
  std::uint32_t transforms_number_ = 0;
  std::vector<OffsetIndex> indices_;  // of the chunks of each entry
};

}  // namespace tessera::dcp

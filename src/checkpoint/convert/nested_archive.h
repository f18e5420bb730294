#pragma once
// Plans torch.save archives with a nested value of tensors and objects.

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/convert/nested.h"
#include "checkpoint/convert/output_plan.h"
#include "tessera/format/pickle_writer.h"

namespace tessera::checkpoint {

class NestedArchivePlanner {
 public:
  explicit NestedArchivePlanner(std::shared_ptr<const OutputSource> source) : source_(std::move(source)) {}

  struct Leaf {
    Path path;                // in the archive's value; empty if the leaf is the value
    const std::string* name;  // for messages
    bool is_tensor = false;
    std::size_t number = 0;  // into tensors() or objects() of the source
    Box box;                 // of the tensor
    PathKeys keys;           // on the path
  };

  // Returns the archive whose value has `leaves`; dicts keep their order. `stem` is the name of the archive's top
  // folder. Its tensors that share memory in a torch.save file (tied weights) share a storage.
  PlannedUnit plan(const std::vector<Leaf>& leaves, const std::string& stem);

 private:
  // The source of a storage's bytes: a box of a tensor, or a storage that an object refers to.
  struct StorageSource {
    std::size_t tensor = SIZE_MAX;
    Box box;
    ObjectValue::Storage raw;
  };
  // What belongs to one archive.
  struct Building {
    std::vector<torch_archive::ArchiveLayout::Storage> storages;
    std::vector<StorageSource> sources;
    using Place = std::pair<std::uint32_t, std::uint64_t>;  // file, offset
    std::map<std::tuple<Place, std::uint64_t, std::vector<std::int64_t>, std::vector<std::int64_t>, DType>, std::string>
        tied;
    std::map<Place, std::string> raw_keys;
  };

  void write(pickle::Writer& writer, const Nested& node, const std::vector<Leaf>& leaves, Building& building);
  void write_key(pickle::Writer& writer, const Nested::DictKey& key);
  void write_tensor(pickle::Writer& writer, const Leaf& leaf, Building& building) const;
  void write_object(pickle::Writer& writer, std::size_t i, Building& building);
  std::string storage_key(const Leaf& leaf, Building& building) const;

  std::shared_ptr<const OutputSource> source_;
  // Kept alive because a writer memoizes values by address.
  std::map<std::size_t, ObjectValue> objects_;
  pickle::Tree key_tree_;
  TextMap<pickle::NodeRef> keys_;  // by JSON
};

// Returns the leaves of the state of a source in its order, which a dict keeps. Boxes are the full tensors. Warns of
// keys that are no str and cannot stay what they are.
std::vector<NestedArchivePlanner::Leaf> leaves_of(const OutputSource& source);

}  // namespace tessera::checkpoint

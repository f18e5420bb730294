#include "format/dcp/read.h"

#include <set>
#include <unordered_set>

#include "format/dcp/entries.h"
#include "format/dcp/fields.h"
#include "format/dcp/input.h"
#include "format/dcp/storage.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/format/pickle_reader.h"

namespace tessera::dcp {

namespace {

using pickle::Kind;
using pickle::NodeRef;

class MetadataReader {
 public:
  explicit MetadataReader(const ByteSource& source)
      : source_(source), input_(source.name(), source.size_bytes()), records_(input_, source.size_bytes()) {}

  Records& records() { return records_; }

  Metadata read(const pickle::ReadResult& pickle) {
    if (pickle.length_bytes != source_.size_bytes()) {
      fail(ErrorCode::corrupt, "{}: {} bytes after the end of the pickle at byte {}, expected none", source_.name(),
           source_.size_bytes() - pickle.length_bytes, pickle.length_bytes);
    }
    const NodeRef root = pickle.tree.root();
    using Fields = MetadataFields;
    FieldReader<Fields> reader(input_);
    if (!reader.is_instance(root)) {
      input_.wrong_value({}, "a DCP checkpoint's metadata", root,
                         "an object of torch.distributed.checkpoint.metadata.Metadata");
    }
    const bool is_1_13 = root.object().callable.global() == class_name(Class::metadata, Dialect::torch_1_13);
    const FoundFields<Fields> found =
        reader.read(root, {}, [&](std::string_view name, NodeRef value) { keep(metadata_.extra, name, value); });
    reader.require(found, {Fields::state_dict_metadata}, {});

    StringNumbers names;
    EntryReader entries(input_, records_, names);
    metadata_.entries = entries.read(found[Fields::state_dict_metadata]);
    StorageReader(input_, records_, names, metadata_).read(found[Fields::storage_data]);
    read_planner_data(found[Fields::planner_data], names);
    read_storage_meta(found[Fields::storage_meta]);
    if (!take_string(found[Fields::version], metadata_.version) || (is_1_13 && found.has(Fields::version))) {
      metadata_.version.reset();
      keep(metadata_.extra, Fields::names[Fields::version], found[Fields::version]);
    }
    copy_extra();
    if (is_1_13) {
      metadata_.dialect = Dialect::torch_1_13;
    } else if (found.has(Fields::version)) {
      metadata_.dialect = Dialect::torch_2_14;
    } else {
      metadata_.dialect = entries.saw_old_properties() ? Dialect::torch_2_0 : Dialect::torch_2;
    }
    return std::move(metadata_);
  }

 private:
  // Keeps a field, whose value is in the pickle's tree until `copy_extra`.
  void keep(std::vector<ExtraField>& fields, std::string_view name, NodeRef value) {
    if (!kept_.insert({&fields, name}).second) {
      input_.fail_at(ErrorCode::corrupt, {}, name, "the field twice", "it once");
    }
    input_.charge(sizeof(ExtraField) + name.size());
    fields.push_back({std::string(name), value});
  }

  // Copies the values of all fields together, because the pickle can refer to one value often.
  void copy_extra() {
    std::vector<NodeRef*> values;
    for (auto* fields : {&metadata_.extra, &metadata_.storage_meta_extra}) {
      for (ExtraField& field : *fields) values.push_back(&field.value);
    }
    if (values.empty()) return;
    pickle::Tree all;
    const NodeRef list = all.make_list();
    for (const NodeRef* value : values) all.append(list, {value, 1});
    metadata_.extra_tree = std::make_shared<pickle::Tree>();
    const std::span<const NodeRef> copies = pickle::copy_into(*metadata_.extra_tree, list).items();
    for (std::size_t i = 0; i < values.size(); ++i) *values[i] = copies[i];
  }

  // Whether `value` is a str or None.
  bool take_string(NodeRef value, std::optional<std::string>& out) {
    if (value.is_none()) return true;
    if (!value.is(Kind::string)) return false;
    input_.charge(value.string().size());
    out = value.string();
    return true;
  }

  void read_planner_data(NodeRef value, StringNumbers& names) {
    if (value.is_none()) return;
    if (!are_paths(value)) return keep(metadata_.extra, MetadataFields::names[MetadataFields::planner_data], value);
    metadata_.paths.emplace(metadata_.entries.size());
    std::unordered_set<std::string_view, TextHash> others;
    std::size_t next = 0;  // the paths are mostly in the order of the entries
    for (const pickle::Pair& pair : value.pairs()) {
      const std::string_view name = pair.key.string();
      const bool is_next = next < metadata_.entries.size() && metadata_.entries[next].name == name;
      const std::uint32_t number = is_next ? static_cast<std::uint32_t>(next) : names.find(pair.key);
      next = std::size_t{number} + 1;
      const bool is_new =
          number == StringNumbers::kNone ? others.insert(name).second : (*metadata_.paths)[number].empty();
      if (!is_new) input_.fail_at(ErrorCode::corrupt, name, "planner_data", "two paths", "one");
      if (number == StringNumbers::kNone) {
        input_.charge(sizeof(UnclaimedPath) + name.size());
        metadata_.unclaimed_paths.push_back({std::string(name), read_path(pair.value)});
      } else {
        (*metadata_.paths)[number] = read_path(pair.value);
      }
    }
  }

  bool are_paths(NodeRef value) {
    if (!value.is(Kind::dict)) return false;
    for (const pickle::Pair& pair : value.pairs()) {
      if (!pair.key.is(Kind::string) || !pair.value.is(Kind::tuple) || pair.value.items().empty()) return false;
      for (const NodeRef item : pair.value.items()) {
        input_.charge(sizeof(Key));
        if (!item.is(Kind::string) && !item.is(Kind::integer)) return false;
      }
    }
    return true;
  }

  Path read_path(NodeRef tuple) {
    Path path;
    path.reserve(tuple.items().size());
    for (const NodeRef item : tuple.items()) {
      if (item.is(Kind::string)) {
        input_.charge(item.string().size());
        path.emplace_back(std::string(item.string()));
      } else {
        path.emplace_back(item.integer());
      }
    }
    return path;
  }

  void read_storage_meta(NodeRef value) {
    using Fields = StorageMetaFields;
    if (value.is_none()) return;
    FieldReader<Fields> reader(input_);
    if (!reader.is_instance(value)) {
      return keep(metadata_.extra, MetadataFields::names[MetadataFields::storage_meta], value);
    }
    const auto keep_field = [&](std::string_view name, NodeRef field) {
      keep(metadata_.storage_meta_extra, name, field);
    };
    const FoundFields<Fields> found = reader.read(value, {}, keep_field);
    StorageMeta& meta = metadata_.storage_meta.emplace();
    const auto known = [&](std::size_t field, bool is_taken) {
      if (!is_taken) keep_field(Fields::names[field], found[field]);
    };
    known(Fields::checkpoint_id, take_checkpoint_id(found[Fields::checkpoint_id], meta));
    known(Fields::save_id, take_string(found[Fields::save_id], meta.save_id));
    known(Fields::load_id, take_string(found[Fields::load_id], meta.load_id));
    known(Fields::modules, !found.has(Fields::modules) || take_modules(found[Fields::modules], meta.modules));
  }

  bool take_modules(NodeRef value, std::vector<std::string>& out) {
    if (!value.is(Kind::list)) return false;
    for (const NodeRef item : value.items()) {
      if (!item.is(Kind::string)) return false;
    }
    for (const NodeRef item : value.items()) {
      input_.charge(sizeof(std::string) + item.string().size());
      out.emplace_back(item.string());
    }
    return true;
  }

  // A str, None, or a pathlib path: its class called with its parts.
  bool take_checkpoint_id(NodeRef value, StorageMeta& meta) {
    using PathKind = StorageMeta::PathKind;
    if (take_string(value, meta.checkpoint_id)) return true;
    if (!value.is(Kind::object) || !value.object().callable.is(Kind::global)) return false;
    const pickle::Object& call = value.object();
    const std::optional<PathKind> kind = path_kind(call.callable.global());
    if (!kind || call.made != pickle::Object::Made::reduce || call.has_state || call.extra_address != 0) return false;
    if (!call.arguments.is(Kind::tuple)) return false;
    const char separator = *kind == PathKind::windows_path ? '\\' : '/';
    std::string path;
    for (const NodeRef part : call.arguments.items()) {
      if (!part.is(Kind::string)) return false;
      input_.charge(part.string().size() + 1);
      if (!path.empty() && path.back() != separator) path += separator;
      path += part.string();
    }
    meta.checkpoint_id = std::move(path);
    meta.checkpoint_id_kind = *kind;
    return true;
  }

  static std::optional<StorageMeta::PathKind> path_kind(const pickle::GlobalName& name) {
    if (name.module != kPathModules[0] && name.module != kPathModules[1]) return std::nullopt;
    if (name.name == "PosixPath" || name.name == "PurePosixPath") return StorageMeta::PathKind::posix_path;
    if (name.name == "WindowsPath" || name.name == "PureWindowsPath") return StorageMeta::PathKind::windows_path;
    return std::nullopt;
  }

  const ByteSource& source_;
  Input input_;
  Records records_;
  Metadata metadata_;
  std::set<std::pair<const void*, std::string_view>> kept_;  // unknown fields: their list and name
};

}  // namespace

Metadata read_records(const ByteSource& source) {
  MetadataReader reader(source);
  return reader.read(pickle::read_taking(source, reader.records()));
}

Metadata read_tree(const ByteSource& source) {
  const Bytes bytes = read_all(source);
  return MetadataReader(source).read(pickle::read(bytes, source.name()));
}

Metadata read(const ByteSource& source) {
  try {
    return read_records(source);
  } catch (const Error&) {
    // Read the complete tree to get the exact error, and if an unknown field contains records.
    return read_tree(source);
  }
}

}  // namespace tessera::dcp

#include <string_view>
#include <unordered_map>

#include "format/dcp/check.h"
#include "format/dcp/names.h"
#include "format/dcp/offsets.h"
#include "tessera/base/function_ref.h"
#include "tessera/base/internal/huge_pages.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/format/pickle_writer.h"

namespace tessera::dcp {

namespace {

using pickle::Writer;

constexpr std::size_t kBatch = 1000;  // items between MARK and SETITEMS or APPENDS, as Python does it
constexpr int kProtocol = 4;
constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

using Sink = FunctionRef<void(ByteView bytes)>;

// An object that is written at its first use and fetched from the memo later.
class Shared {
 public:
  template <typename F>
  void put(Writer& writer, F&& write) {
    if (memo_ != kNotWritten) return writer.get(memo_);
    write();
    memo_ = writer.memoize();
  }

 private:
  static constexpr std::uint32_t kNotWritten = UINT32_MAX;
  std::uint32_t memo_ = kNotWritten;
};

// A string that is memoized only if it is written more than once.
struct SharedString {
  std::uint32_t uses = 0;
  Shared shared;

  void put(Writer& writer, std::string_view text) {
    if (uses < 2) return writer.string(text);
    shared.put(writer, [&] { writer.string(text); });
  }
};

// Writes objects of one class with their field names.
template <typename Fields>
class FieldWriter {
 public:
  void begin(Writer& writer, Dialect dialect) {
    class_.put(writer, [&] {
      const pickle::GlobalName name = class_name(Fields::owner, dialect);
      writer.interned_global(name.module, name.name);
    });
    writer.tuple(0);
    writer.new_object();
    writer.empty_dict();
    writer.mark();
  }
  void field(Writer& writer, std::size_t field) {
    names_[field].put(writer, [&] { writer.string(Fields::names[field]); });
  }
  static void end(Writer& writer) {
    writer.set_items();
    writer.build();
  }

 private:
  Shared class_;
  std::array<Shared, Fields::count> names_;
};

class MetadataWriter {
 public:
  // With a sink, `out` has only what the sink has not got yet.
  MetadataWriter(const Metadata& metadata, Bytes& out, const Sink* sink)
      : metadata_(metadata),
        out_(out),
        sink_(sink),
        writer_(out, kProtocol),
        names_(metadata.entries.size()),
        files_(metadata.files.size()) {
    out.reserve(sink != nullptr ? 2 * kPieceBytes : expected_bytes());
    advise_huge_pages(out.data(), out.capacity());
    count_uses();
  }

  void write() {
    using Fields = MetadataFields;
    FieldWriter<Fields> fields;
    fields.begin(writer_, metadata_.dialect);
    fields.field(writer_, Fields::state_dict_metadata);
    write_entries();
    if (metadata_.paths || !is_extra(metadata_.extra, Fields::names[Fields::planner_data])) {
      fields.field(writer_, Fields::planner_data);
      write_paths();
    }
    fields.field(writer_, Fields::storage_data);
    write_storage_data();
    if (metadata_.storage_meta) {
      fields.field(writer_, Fields::storage_meta);
      write_storage_meta(*metadata_.storage_meta);
    }
    const bool has_version = metadata_.version || !is_extra(metadata_.extra, Fields::names[Fields::version]);
    if (metadata_.dialect == Dialect::torch_2_14 && has_version) {
      fields.field(writer_, Fields::version);
      optional_string(metadata_.version);
    }
    write_extra(metadata_.extra, [&](std::string_view name) {
      return (name == Fields::names[Fields::planner_data] && metadata_.paths) ||
             (name == Fields::names[Fields::storage_meta] && metadata_.storage_meta) ||
             (name == Fields::names[Fields::version] && metadata_.version);
    });
    FieldWriter<Fields>::end(writer_);
    writer_.stop();
    pass_on(0);
  }

 private:
  // Passes on what there is if it has more than so many bytes.
  void pass_on(std::size_t most) {
    if (sink_ == nullptr || out_.size() <= most) return;
    (*sink_)(out_);
    out_.clear();
  }

  std::size_t expected_bytes() const {
    std::size_t bytes = 1024;
    for (const MetadataEntry& entry : metadata_.entries) {
      bytes += 256 + 2 * entry.name.size() + entry.items.size() * (128 + 18 * entry.shape.size());
    }
    return bytes;
  }

  void count_uses() {
    const auto count_item = [&](const StoredItem& item) {
      if (item.file != StoredItem::kNoFile) ++files_[item.file].uses;
    };
    for (std::size_t i = 0; i < metadata_.entries.size(); ++i) {
      names_[i].uses = 1;
      for (const StoredItem& item : metadata_.entries[i].items) {
        count_item(item);
        if (item.file != StoredItem::kNoFile) ++names_[i].uses;
      }
    }
    for (const UnclaimedItem& unclaimed : metadata_.unclaimed) count_item(unclaimed.item);
    if (!metadata_.paths) return;
    for (std::size_t i = 0; i < metadata_.paths->size(); ++i) {
      const Path& path = (*metadata_.paths)[i];
      if (!path.empty()) names_[i].uses += is_name(path, i) ? 2 : 1;
      if (!is_name(path, i)) count_path(path);
    }
    for (const UnclaimedPath& other : metadata_.unclaimed_paths) count_path(other.path);
  }

  void count_path(const Path& path) {
    for (const Key& item : path) {
      if (const auto* text = std::get_if<std::string>(&item)) ++keys_[*text].uses;
    }
  }

  // Whether the path of entry i is its name alone: nothing was nested.
  bool is_name(const Path& path, std::size_t i) const {
    const auto* text = path.size() == 1 ? std::get_if<std::string>(&path[0]) : nullptr;
    return text != nullptr && *text == metadata_.entries[i].name;
  }

  static bool is_extra(const std::vector<ExtraField>& fields, std::string_view name) {
    for (const ExtraField& field : fields) {
      if (field.name == name) return true;
    }
    return false;
  }

  template <typename F>
  void write_extra(const std::vector<ExtraField>& fields, F&& leave_out) {
    for (const ExtraField& field : fields) {
      if (leave_out(field.name)) continue;
      writer_.string(field.name);
      writer_.value(field.value);
    }
  }

  void optional_string(const std::optional<std::string>& text) {
    if (text) {
      writer_.string(*text);
    } else {
      writer_.none();
    }
  }

  // Calls write(i) for i < `count`; it returns whether it wrote anything. Writes `end` after every batch.
  template <typename F>
  void batches(std::size_t count, void (Writer::*end)(), F&& write) {
    std::size_t open = 0;
    for (std::size_t i = 0; i < count; ++i) batch_item(open, end, [&] { write(i); });
    batch_end(open, end);
  }
  template <typename F>
  void batch_item(std::size_t& open, void (Writer::*end)(), F&& write) {
    if (open == 0) writer_.mark();
    write();
    if (++open == kBatch) batch_end(open, end);
    pass_on(kPieceBytes);
  }
  void batch_end(std::size_t& open, void (Writer::*end)()) {
    if (open > 0) (writer_.*end)();
    open = 0;
  }

  void size(std::span<const std::int64_t> numbers) {
    size_class_.put(writer_, [&] { writer_.interned_global(kSize.module, kSize.name); });
    if (numbers.size() > 3) writer_.mark();
    for (const std::int64_t number : numbers) writer_.integer(number);
    if (numbers.size() > 3) {
      writer_.tuple_from_mark();
    } else {
      writer_.tuple(numbers.size());
    }
    writer_.tuple(1);
    writer_.reduce();
  }

  void write_entries() {
    writer_.empty_dict();
    batches(metadata_.entries.size(), &Writer::set_items, [&](std::size_t i) {
      const MetadataEntry& entry = metadata_.entries[i];
      names_[i].put(writer_, entry.name);
      if (entry.is_tensor) return write_tensor(entry);
      object_class_.put(writer_, [&] { global(class_name(Class::object, metadata_.dialect)); });
      writer_.tuple(0);
      writer_.new_object();
    });
  }

  void global(const pickle::GlobalName& name) { writer_.interned_global(name.module, name.name); }

  void write_tensor(const MetadataEntry& entry) {
    using Fields = TensorFields;
    tensor_.begin(writer_, metadata_.dialect);
    tensor_.field(writer_, Fields::properties);
    write_properties(entry.properties);
    tensor_.field(writer_, Fields::size);
    size(entry.shape);
    tensor_.field(writer_, Fields::chunks);
    writer_.empty_list();
    batches(entry.chunks.size(), &Writer::appends, [&](std::size_t i) {
      const BoxView chunk = entry.chunks[i];
      chunk_.begin(writer_, metadata_.dialect);
      chunk_.field(writer_, ChunkFields::offsets);
      size(chunk.offsets);
      chunk_.field(writer_, ChunkFields::sizes);
      size(chunk.sizes);
      chunk_.end(writer_);
    });
    tensor_.end(writer_);
  }

  void write_properties(const TensorProperties& properties) {
    properties_class_.put(writer_, [&] { global(class_name(Class::properties, metadata_.dialect)); });
    writer_.tuple(0);
    writer_.new_object();
    writer_.mark();
    writer_.interned_global("torch", dtype_name(properties.dtype));
    layouts_[properties.layout].put(writer_, [&] {
      global(kLayout);
      writer_.string(properties.layout);
      writer_.tuple(1);
      writer_.reduce();
    });
    writer_.boolean(properties.requires_grad);
    const auto format = static_cast<std::size_t>(properties.memory_format);
    memory_formats_[format].put(writer_, [&] {
      global(class_name(Class::memory_format, metadata_.dialect));
      writer_.integer(static_cast<std::int64_t>(format));
      writer_.tuple(1);
      writer_.reduce();
    });
    writer_.boolean(properties.pin_memory);
    writer_.tuple_from_mark();
    writer_.build();
  }

  void write_paths() {
    if (!metadata_.paths) return writer_.none();
    writer_.empty_dict();
    std::size_t open = 0;
    for (std::size_t i = 0; i < metadata_.paths->size(); ++i) {
      const Path& path = (*metadata_.paths)[i];
      if (path.empty()) continue;
      batch_item(open, &Writer::set_items, [&] {
        names_[i].put(writer_, metadata_.entries[i].name);
        if (!is_name(path, i)) return write_path(path);
        names_[i].put(writer_, metadata_.entries[i].name);
        writer_.tuple(1);
      });
    }
    for (const UnclaimedPath& other : metadata_.unclaimed_paths) {
      batch_item(open, &Writer::set_items, [&] {
        writer_.string(other.name);
        write_path(other.path);
      });
    }
    batch_end(open, &Writer::set_items);
  }

  void write_path(const Path& path) {
    if (path.size() > 3) writer_.mark();
    for (const Key& item : path) {
      if (const auto* text = std::get_if<std::string>(&item)) {
        keys_.find(*text)->second.put(writer_, *text);
      } else {
        writer_.integer(std::get<std::int64_t>(item));
      }
    }
    if (path.size() > 3) {
      writer_.tuple_from_mark();
    } else {
      writer_.tuple(path.size());
    }
  }

  void write_storage_data() {
    writer_.empty_dict();
    std::size_t open = 0;
    std::vector<bool> is_repeated;
    for (std::size_t i = 0; i < metadata_.entries.size(); ++i) {
      const MetadataEntry& entry = metadata_.entries[i];
      const OffsetIndex index(entry.chunks);
      is_repeated.assign(index.has_equal_offsets() ? entry.items.size() : 0, false);
      index.for_each_equal([&](std::size_t, std::size_t other) { is_repeated[other] = true; });
      for (std::size_t k = 0; k < entry.items.size(); ++k) {
        if (entry.items[k].file == StoredItem::kNoFile || (!is_repeated.empty() && is_repeated[k])) continue;
        batch_item(open, &Writer::set_items, [&] {
          begin_index();
          names_[i].put(writer_, entry.name);
          if (entry.is_tensor) {
            end_index(k, entry.chunks[k].offsets);
          } else {
            end_index(std::nullopt, std::nullopt);
          }
          write_item(entry.items[k]);
        });
      }
    }
    for (const UnclaimedItem& unclaimed : metadata_.unclaimed) {
      batch_item(open, &Writer::set_items, [&] {
        begin_index();
        writer_.string(unclaimed.name);
        end_index(std::nullopt, unclaimed.offsets);
        write_item(unclaimed.item);
      });
    }
    batch_end(open, &Writer::set_items);
  }

  // A MetadataIndex; between the two, its name is written. PyTorch stores the index of every chunk as a hint and
  // omits the offset of an object.
  void begin_index() {
    index_.begin(writer_, metadata_.dialect);
    index_.field(writer_, IndexFields::fqn);
  }
  void end_index(std::optional<std::size_t> hint, std::optional<std::span<const std::int64_t>> offsets) {
    index_.field(writer_, IndexFields::index);
    if (hint) {
      writer_.integer(static_cast<std::int64_t>(*hint));
    } else {
      writer_.none();
    }
    if (offsets) {
      index_.field(writer_, IndexFields::offset);
      size(*offsets);
    }
    index_.end(writer_);
  }

  void write_item(const StoredItem& item) {
    using Fields = StorageInfoFields;
    info_.begin(writer_, metadata_.dialect);
    info_.field(writer_, Fields::relative_path);
    files_[item.file].put(writer_, metadata_.files[item.file]);
    info_.field(writer_, Fields::offset);
    writer_.integer(item.offset_bytes);
    info_.field(writer_, Fields::length);
    writer_.integer(item.length_bytes);
    if (item.transforms != 0) {
      info_.field(writer_, Fields::transform_descriptors);
      string_list(metadata_.transforms[item.transforms]);
    }
    info_.end(writer_);
  }

  void string_list(const std::vector<std::string>& texts) {
    writer_.empty_list();
    batches(texts.size(), &Writer::appends, [&](std::size_t i) { writer_.interned_string(texts[i]); });
  }

  void write_storage_meta(const StorageMeta& meta) {
    using Fields = StorageMetaFields;
    const auto is_kept = [&](std::size_t field) {
      return is_extra(metadata_.storage_meta_extra, Fields::names[field]);
    };
    FieldWriter<Fields> fields;
    fields.begin(writer_, metadata_.dialect);
    if (meta.checkpoint_id || !is_kept(Fields::checkpoint_id)) {
      fields.field(writer_, Fields::checkpoint_id);
      write_checkpoint_id(meta);
    }
    if (meta.save_id || !is_kept(Fields::save_id)) {
      fields.field(writer_, Fields::save_id);
      optional_string(meta.save_id);
    }
    if (meta.load_id || !is_kept(Fields::load_id)) {
      fields.field(writer_, Fields::load_id);
      optional_string(meta.load_id);
    }
    if (!meta.modules.empty() || !is_kept(Fields::modules)) {
      fields.field(writer_, Fields::modules);
      string_list(meta.modules);
    }
    write_extra(metadata_.storage_meta_extra, [&](std::string_view name) {
      return (name == Fields::names[Fields::checkpoint_id] && meta.checkpoint_id) ||
             (name == Fields::names[Fields::save_id] && meta.save_id) ||
             (name == Fields::names[Fields::load_id] && meta.load_id) ||
             (name == Fields::names[Fields::modules] && !meta.modules.empty());
    });
    fields.end(writer_);
  }

  // A Windows path is written as the pure kind, which every system can load.
  void write_checkpoint_id(const StorageMeta& meta) {
    if (!meta.checkpoint_id || meta.checkpoint_id_kind == StorageMeta::PathKind::text) {
      return optional_string(meta.checkpoint_id);
    }
    const bool is_windows = meta.checkpoint_id_kind == StorageMeta::PathKind::windows_path;
    writer_.interned_global(kPathModules[0], is_windows ? "PureWindowsPath" : "PosixPath");
    writer_.string(*meta.checkpoint_id);
    writer_.tuple(1);
    writer_.reduce();
  }

  const Metadata& metadata_;
  Bytes& out_;
  const Sink* sink_;
  Writer writer_;
  std::vector<SharedString> names_, files_;                            // of entries, of files
  std::unordered_map<std::string_view, SharedString, TextHash> keys_;  // of paths
  std::unordered_map<std::string_view, Shared, TextHash> layouts_;
  std::array<Shared, kMemoryFormats.size()> memory_formats_;
  Shared size_class_, object_class_, properties_class_;
  FieldWriter<TensorFields> tensor_;
  FieldWriter<ChunkFields> chunk_;
  FieldWriter<IndexFields> index_;
  FieldWriter<StorageInfoFields> info_;
};

}  // namespace

Bytes write(const Metadata& metadata) {
  check_writable(metadata);
  Bytes out;
  MetadataWriter(metadata, out, nullptr).write();
  return out;
}

void write(const Metadata& metadata, FunctionRef<void(ByteView bytes)> sink) {
  check_writable(metadata);
  Bytes out;
  MetadataWriter(metadata, out, &sink).write();
}

}  // namespace tessera::dcp

#include "tessera/checkpoint/save_plan.h"

#include <algorithm>
#include <utility>

#include "checkpoint/save/plan_items.h"
#include "tessera/base/error.h"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kWhat = "save plan";

void encode(Bytes& out, const SavePlan::Entry& entry) {
  append_text(out, entry.name);
  append_little_endian<std::uint32_t>(out, static_cast<std::uint32_t>(entry.path.size()));
  for (const Key& item : entry.path) {
    if (const auto* key = std::get_if<std::string>(&item)) {
      out.push_back(0);
      append_text(out, *key);
    } else {
      out.push_back(1);
      append_little_endian(out, static_cast<std::uint64_t>(std::get<std::int64_t>(item)));
    }
  }
  out.push_back(entry.is_tensor ? 1 : 0);
  if (!entry.is_tensor) return;
  out.push_back(entry.properties ? 1 : 0);
  const TensorProperties properties = entry.properties.value_or(TensorProperties());
  out.push_back(static_cast<std::uint8_t>(properties.dtype));
  append_text(out, properties.layout);
  out.push_back(static_cast<std::uint8_t>(properties.memory_format));
  out.push_back(static_cast<std::uint8_t>((properties.requires_grad ? 1 : 0) | (properties.pin_memory ? 2 : 0)));
  append_little_endian<std::uint32_t>(out, static_cast<std::uint32_t>(entry.shape.size()));
  for (const std::int64_t size : entry.shape) append_little_endian(out, static_cast<std::uint64_t>(size));
}

std::uint8_t below(ByteCursor& cursor, std::size_t limit) {
  const auto value = cursor.number<std::uint8_t>();
  if (value >= limit) fail(ErrorCode::corrupt, "{}: found {}, expected at most {}", kWhat, value, limit - 1);
  return value;
}

SavePlan::Entry decode_entry(ByteCursor& cursor) {
  SavePlan::Entry entry;
  entry.name = cursor.text();
  const auto depth = cursor.number<std::uint32_t>();
  for (std::uint32_t i = 0; i < depth; ++i) {
    if (below(cursor, 2) == 0) {
      entry.path.emplace_back(std::string(cursor.text()));
    } else {
      entry.path.emplace_back(static_cast<std::int64_t>(cursor.number<std::uint64_t>()));
    }
  }
  entry.is_tensor = below(cursor, 2) == 1;
  if (!entry.is_tensor) return entry;
  const bool is_known = below(cursor, 2) == 1;
  TensorProperties properties;
  properties.dtype = static_cast<DType>(below(cursor, kDTypeCount));
  properties.layout = cursor.text();
  properties.memory_format = static_cast<MemoryFormat>(below(cursor, 3));
  const std::uint8_t flags = below(cursor, 4);
  properties.requires_grad = (flags & 1) != 0;
  properties.pin_memory = (flags & 2) != 0;
  entry.properties = is_known ? std::optional(std::move(properties)) : std::nullopt;
  const auto dims = cursor.number<std::uint32_t>();
  for (std::uint32_t d = 0; d < dims; ++d) {
    entry.shape.push_back(static_cast<std::int64_t>(cursor.number<std::uint64_t>()));
  }
  return entry;
}

}  // namespace

std::string to_string(const MetadataIndex& index) {
  std::string text = fmt::format("'{}'", printable(index.fqn));
  if (index.offset) text += " at " + shape_to_string(*index.offset);
  return text;
}

std::uint32_t SavePlan::add_entry(Entry entry) {
  entries_.push_back(std::move(entry));
  return static_cast<std::uint32_t>(entries_.size() - 1);
}

void SavePlan::add_chunk(std::uint32_t entry, BoxView box, Source source) {
  const Entry& of = entries_.at(entry);
  if (!of.is_tensor || box.rank() != of.shape.size()) {
    fail(ErrorCode::invalid_argument, "save plan: '{}': found chunk {}, expected {}", printable(of.name),
         to_string(box), of.is_tensor ? "one within the shape " + shape_to_string(of.shape) : "none of an object");
  }
  items_.push_back({entry, source, coordinates_.size(), 0});
  coordinates_.insert(coordinates_.end(), box.offsets.begin(), box.offsets.end());
  coordinates_.insert(coordinates_.end(), box.sizes.begin(), box.sizes.end());
}

void SavePlan::add_object(std::uint32_t entry, Source source) {
  if (entries_.at(entry).is_tensor) {
    fail(ErrorCode::invalid_argument, "save plan: '{}' is a tensor, expected an object",
         printable(entries_[entry].name));
  }
  items_.push_back({entry, source, coordinates_.size(), 0});
}

SavePlan::WriteItem SavePlan::operator[](std::size_t i) const {
  const Item& item = items_[i];
  WriteItem row{item.entry, item.source, {}, item.stored_bytes};
  const Entry& entry = entries_[item.entry];
  if (entry.is_tensor) {
    const std::int64_t* box = coordinates_.data() + item.box_begin;
    const std::size_t rank = entry.shape.size();
    row.box = {{box, rank}, {box + rank, rank}};
  }
  return row;
}

WriteItemType SavePlan::type(std::size_t i) const {
  const WriteItem item = (*this)[i];
  const Entry& entry = entries_[item.entry];
  if (!entry.is_tensor) return WriteItemType::byte_io;
  return item.box == BoxView(Box::full(entry.shape)) ? WriteItemType::tensor : WriteItemType::shard;
}

MetadataIndex SavePlan::index(std::size_t i) const {
  const WriteItem item = (*this)[i];
  MetadataIndex index{entries_[item.entry].name, std::nullopt, std::nullopt};
  if (entries_[item.entry].is_tensor) index.offset.emplace(item.box.offsets.begin(), item.box.offsets.end());
  return index;
}

Bytes SavePlan::encode_entries() const {
  Bytes out;
  append_little_endian<std::uint64_t>(out, entries_.size());
  for (const Entry& entry : entries_) encode(out, entry);
  return out;
}

Bytes SavePlan::encode_items() const {
  Bytes out;
  out.reserve(8 + items_.size() * 12 + coordinates_.size() * 8);
  append_little_endian<std::uint64_t>(out, items_.size());
  for (const Item& item : items_) append_little_endian(out, item.entry);
  for (const Item& item : items_) append_little_endian(out, item.stored_bytes);
  for (const std::int64_t number : coordinates_) append_little_endian(out, static_cast<std::uint64_t>(number));
  return out;
}

std::vector<SavePlan::Entry> decode_entries(ByteView bytes) {
  ByteCursor cursor(bytes, kWhat);
  const auto count = cursor.number<std::uint64_t>();
  std::vector<SavePlan::Entry> entries;
  for (std::uint64_t i = 0; i < count; ++i) entries.push_back(decode_entry(cursor));
  cursor.expect_end();
  return entries;
}

SavePlan SavePlan::decode(ByteView entries, ByteView items) {
  SavePlan plan;
  plan.entries_ = decode_entries(entries);
  const EncodedItems encoded(items);
  for (std::size_t i = 0; i < encoded.size(); ++i) {
    const std::uint32_t entry = encoded.entry(i);
    if (entry >= plan.entries_.size()) {
      fail(ErrorCode::corrupt, "{}: item {} refers to entry {}, expected less than {}", kWhat, i, entry,
           plan.entries_.size());
    }
    plan.items_.push_back({entry, {}, plan.coordinates_.size(), encoded.stored_bytes(i)});
    if (!plan.entries_[entry].is_tensor) continue;
    const std::size_t count = 2 * plan.entries_[entry].shape.size();
    plan.coordinates_.resize(plan.coordinates_.size() + count);
    encoded.coordinates(plan.coordinates_.size() - count, count,
                        plan.coordinates_.data() + plan.coordinates_.size() - count);
  }
  return plan;
}

}  // namespace tessera::checkpoint

#include "format/dcp_metadata_records.h"

#include "base/huge_pages.h"

namespace tessera::dcp {

using pickle::Kind;
using pickle::RecordCursor;
using pickle::Value;
namespace op = pickle::op;

namespace {

// What a chunk with its index and its storage info takes in a pickle, of two dimensions.
constexpr std::uint64_t kPickledBytes = 150;

template <typename T>
void reserve(std::vector<T>& rows, std::size_t count) {
  rows.reserve(count);
  advise_huge_pages(rows.data(), count * sizeof(T));
}

// Every record is the class called without arguments, and then a dict of its fields.
bool begins(RecordCursor& cursor) {
  return cursor.opcode(op::EMPTY_TUPLE) && cursor.opcode(op::NEWOBJ) && cursor.memoize() &&
         cursor.opcode(op::EMPTY_DICT) && cursor.memoize() && cursor.opcode(op::MARK);
}
bool ends(RecordCursor& cursor) { return cursor.opcode(op::SETITEMS) && cursor.opcode(op::BUILD); }

}  // namespace

Records::Records(Input& input, std::uint64_t pickle_bytes) : input_(input) {
  const std::size_t expected = pickle_bytes / kPickledBytes;
  reserve(counts_, 6 * expected);
  reserve(chunks_, expected);
  reserve(indices_, expected);
  reserve(storage_rows_, expected);
}

std::optional<std::uint64_t> Records::take(Value global, RecordCursor& cursor) {
  if (global.identity() == other_class_) return std::nullopt;
  const std::size_t counts = counts_.size();
  if (chunk_class_.is_class(global)) {
    if (take_chunk(cursor)) return number_of(Table::chunks, chunks_.size() - 1);
  } else if (index_class_.is_class(global)) {
    if (take_index(cursor)) return number_of(Table::indices, indices_.size() - 1);
  } else if (storage_class_.is_class(global)) {
    if (take_storage(cursor)) return number_of(Table::storage, storage_rows_.size() - 1);
  } else {
    other_class_ = global.identity();
  }
  counts_.resize(counts);
  return std::nullopt;
}

bool Records::take_key(RecordCursor& cursor, Known& key) {
  Value value;
  if (!cursor.fetch(value)) return false;
  if (value.identity() == key.identity) return true;
  if (!value.is_string(key.text)) return false;
  key.identity = value.identity();
  return true;
}

bool Records::take_size(RecordCursor& cursor, std::uint32_t& count) {
  Value callable;
  if (!cursor.fetch(callable)) return false;
  if (callable.identity() != size_class_) {
    if (!callable.is_global(kSize.module, kSize.name)) return false;
    size_class_ = callable.identity();
  }
  const std::size_t begin = counts_.size();
  const bool is_long = cursor.opcode(op::MARK);
  for (std::int64_t member = 0; cursor.integer(member);) {
    if (member < 0) return false;
    counts_.push_back(member);
  }
  const std::size_t members = counts_.size() - begin;
  constexpr op::Opcode kTuples[] = {op::EMPTY_TUPLE, op::TUPLE1, op::TUPLE2, op::TUPLE3};
  if (members > 3 ? !is_long : is_long) return false;
  if (!cursor.opcode(is_long ? op::TUPLE : kTuples[members])) return false;
  count = static_cast<std::uint32_t>(members);
  return (members == 0 || cursor.memoize()) && cursor.opcode(op::TUPLE1) && cursor.memoize() &&
         cursor.opcode(op::REDUCE) && cursor.memoize();
}

bool Records::take_chunk(RecordCursor& cursor) {
  ChunkRow row{counts_.size(), 0, 0};
  if (!begins(cursor) || !take_key(cursor, offsets_key_) || !take_size(cursor, row.offsets) ||
      !take_key(cursor, sizes_key_) || !take_size(cursor, row.sizes) || !ends(cursor)) {
    return false;
  }
  chunks_.push_back(row);
  return true;
}

bool Records::take_index(RecordCursor& cursor) {
  IndexRow row{Value(), -1, counts_.size(), 0, true};
  if (!begins(cursor) || !take_key(cursor, fqn_key_) || !cursor.string(row.fqn)) return false;
  if (!take_key(cursor, position_key_)) return false;
  if (!cursor.opcode(op::NONE) && !cursor.integer(row.position)) return false;
  if (!take_key(cursor, offset_key_)) return false;
  row.has_offset = !cursor.opcode(op::NONE);
  if ((row.has_offset && !take_size(cursor, row.offset)) || !ends(cursor)) return false;
  indices_.push_back(row);
  return true;
}

bool Records::take_storage(RecordCursor& cursor) {
  StorageRecord row{};
  if (!begins(cursor) || !take_key(cursor, path_key_) || !cursor.string(row.relative_path) ||
      !take_key(cursor, start_key_) || !cursor.integer(row.offset_bytes) || !take_key(cursor, length_key_) ||
      !cursor.integer(row.length_bytes)) {
    return false;
  }
  if (!ends(cursor)) return false;
  std::int64_t end = 0;
  if (row.offset_bytes < 0 || row.length_bytes < 0 ||
      __builtin_add_overflow(row.offset_bytes, row.length_bytes, &end)) {
    return false;
  }
  storage_rows_.push_back(row);
  return true;
}

std::optional<std::size_t> Records::row_of(Value value, Table table) {
  if (!value.is(Kind::taken) || (value.taken() & 3) != static_cast<std::uint64_t>(table)) return std::nullopt;
  return value.taken() >> 2;
}

ChunkRecord Records::chunk(Value value, std::string_view name) {
  if (const auto row = row_of(value, Table::chunks)) {
    const ChunkRow& chunk = chunks_[*row];
    return {kept(chunk.begin, chunk.offsets), kept(chunk.begin + chunk.offsets, chunk.sizes)};
  }
  const FoundFields<ChunkFields> found = chunk_.read(value, name);
  chunk_.require(found, {ChunkFields::offsets, ChunkFields::sizes}, name);
  offsets_.clear();
  sizes_.clear();
  input_.counts(found[ChunkFields::offsets], name, "offsets of a chunk", offsets_);
  input_.counts(found[ChunkFields::sizes], name, "sizes of a chunk", sizes_);
  return {offsets_, sizes_};
}

IndexRecord Records::index(Value value) {
  using Fields = IndexFields;
  if (const auto row = row_of(value, Table::indices)) {
    const IndexRow& index = indices_[*row];
    return {index.fqn, index.position, index.has_offset, kept(index.begin, index.offset)};
  }
  const FoundFields<Fields> found = index_.read(value, {});
  index_.require(found, {Fields::fqn}, {});
  const std::string_view name = input_.string(found[Fields::fqn], {}, "fqn of a MetadataIndex");
  IndexRecord record{found[Fields::fqn], -1, !found[Fields::offset].is_none(), {}};
  if (const Value position = found[Fields::index]; !position.is_none()) {
    if (!position.is(Kind::integer)) input_.wrong(name, "index of a MetadataIndex", position, "an int or None");
    record.position = position.integer();
  }
  index_offset_.clear();
  if (record.has_offset) input_.counts(found[Fields::offset], name, "offset of a MetadataIndex", index_offset_);
  record.offset = index_offset_;
  return record;
}

StorageRecord Records::storage(Value value, std::string_view name) {
  using Fields = StorageInfoFields;
  if (const auto row = row_of(value, Table::storage)) return storage_rows_[*row];
  if (!storage_.is_instance(value)) {
    input_.fail_at(value.is(Kind::object) ? ErrorCode::unsupported : ErrorCode::corrupt, name, "storage_data",
                   describe(value), "an object of _StorageInfo");
  }
  const FoundFields<Fields> found = storage_.read(value, name);
  storage_.require(found, {Fields::relative_path, Fields::offset, Fields::length}, name);
  input_.string(found[Fields::relative_path], name, "relative_path");
  StorageRecord record{found[Fields::relative_path], 0, 0, found[Fields::transform_descriptors]};
  record.offset_bytes = input_.count(found[Fields::offset], name, "offset in the file");
  record.length_bytes = input_.count(found[Fields::length], name, "length in the file");
  std::int64_t end = 0;
  if (__builtin_add_overflow(record.offset_bytes, record.length_bytes, &end)) {
    input_.fail_at(
        ErrorCode::corrupt, name, "_StorageInfo",
        fmt::format("offset {} and length {}, whose sum overflows", record.offset_bytes, record.length_bytes),
        "less than 2**63 bytes");
  }
  const Value transforms = record.transform_descriptors;
  if (!transforms.is_none() && !transforms.is(Kind::list) && !transforms.is(Kind::tuple)) {
    input_.wrong(name, "transform_descriptors", transforms, "a list or a tuple");
  }
  return record;
}

}  // namespace tessera::dcp

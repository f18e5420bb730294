#include "format/dcp/records.h"

#include <algorithm>

#include "tessera/base/internal/huge_pages.h"

namespace tessera::dcp {

using pickle::Kind;
using pickle::NodeRef;
using pickle::RecordCursor;
namespace op = pickle::op;

namespace {

// A chunk of two dimensions with its index and its storage info.
constexpr std::uint64_t kPickledBytes = 150, kWords = 11;

// An opcode that makes a value which may be put.
bool makes(RecordCursor& cursor, op::Opcode opcode) {
  if (!cursor.opcode(opcode)) return false;
  cursor.memoize();
  return true;
}

// Every record is a call of the class without arguments, then a dict of its fields.
bool begins(RecordCursor& cursor) {
  return cursor.opcode(op::EMPTY_TUPLE) && makes(cursor, op::NEWOBJ) && makes(cursor, op::EMPTY_DICT) &&
         cursor.opcode(op::MARK);
}
bool ends(RecordCursor& cursor) { return cursor.opcode(op::SETITEMS) && cursor.opcode(op::BUILD); }

}  // namespace

Records::Records(Input& input, std::uint64_t pickle_bytes) : input_(input) {
  words_.reserve(pickle_bytes / kPickledBytes * kWords);
  advise_huge_pages(words_.data(), words_.capacity() * sizeof(words_[0]));
}

std::optional<std::uint64_t> Records::take(NodeRef global, RecordCursor& cursor) {
  if (std::ranges::find(other_classes_, global.identity()) != other_classes_.end()) return std::nullopt;
  Row row{words_.size(), Table::chunk, 0};
  bool is_taken = false;
  if (chunk_class_.is_class(global)) {
    is_taken = take_chunk(cursor, row);
  } else if (index_class_.is_class(global)) {
    row.table = Table::index;
    is_taken = take_index(cursor, row);
  } else if (storage_class_.is_class(global)) {
    row.table = Table::storage;
    is_taken = take_storage(cursor);
  } else {
    other_classes_[next_other_++ % other_classes_.size()] = global.identity();
  }
  if (is_taken && row.begin < Row::kMaxBegin) return row.number();
  words_.resize(row.begin);
  return std::nullopt;
}

bool Records::take_key(RecordCursor& cursor, Known& key) {
  NodeRef value;
  if (!cursor.fetch(value)) return false;
  if (value.identity() == key.identity) return true;
  if (!value.is_string(key.text)) return false;
  key.identity = value.identity();
  return true;
}

bool Records::take_string(RecordCursor& cursor) {
  NodeRef value;
  if (!cursor.string(value)) return false;
  words_.push_back(std::bit_cast<std::int64_t>(value));
  return true;
}

bool Records::take_integer(RecordCursor& cursor) {
  std::int64_t value = 0;
  if (!cursor.integer(value)) return false;
  words_.push_back(value);
  return true;
}

bool Records::take_size(RecordCursor& cursor, std::uint64_t& rank) {
  NodeRef callable;
  if (!cursor.fetch(callable)) return false;
  if (callable.identity() != size_class_) {
    if (!callable.is_global(kSize.module, kSize.name)) return false;
    size_class_ = callable.identity();
  }
  const std::size_t begin = words_.size();
  const bool is_long = cursor.opcode(op::MARK);
  for (std::int64_t member = 0; cursor.integer(member);) {
    if (member < 0) return false;
    words_.push_back(member);
  }
  const std::size_t members = words_.size() - begin;
  constexpr op::Opcode kTuples[] = {op::EMPTY_TUPLE, op::TUPLE1, op::TUPLE2, op::TUPLE3};
  if (members > 3 ? !is_long : is_long) return false;
  rank = members;
  return members < Row::kNoOffset && makes(cursor, is_long ? op::TUPLE : kTuples[members]) &&
         makes(cursor, op::TUPLE1) && makes(cursor, op::REDUCE);
}

bool Records::take_chunk(RecordCursor& cursor, Row& row) {
  std::uint64_t rank_of_sizes = 0;
  return begins(cursor) && take_key(cursor, offsets_key_) && take_size(cursor, row.rank) &&
         take_key(cursor, sizes_key_) && take_size(cursor, rank_of_sizes) && row.rank == rank_of_sizes && ends(cursor);
}

bool Records::take_index(RecordCursor& cursor, Row& row) {
  if (!begins(cursor) || !take_key(cursor, fqn_key_) || !take_string(cursor)) return false;
  if (!take_key(cursor, position_key_)) return false;
  if (cursor.opcode(op::NONE)) {
    words_.push_back(-1);
  } else if (!take_integer(cursor)) {
    return false;
  }
  if (!take_key(cursor, offset_key_)) return false;
  if (!cursor.opcode(op::NONE)) return take_size(cursor, row.rank) && ends(cursor);
  row.rank = Row::kNoOffset;
  return ends(cursor);
}

bool Records::take_storage(RecordCursor& cursor) {
  if (!begins(cursor) || !take_key(cursor, path_key_) || !take_string(cursor) || !take_key(cursor, start_key_) ||
      !take_integer(cursor) || !take_key(cursor, length_key_) || !take_integer(cursor) || !ends(cursor)) {
    return false;
  }
  const std::int64_t length_bytes = words_.back(), offset_bytes = words_[words_.size() - 2];
  std::int64_t end = 0;
  return offset_bytes >= 0 && length_bytes >= 0 && !__builtin_add_overflow(offset_bytes, length_bytes, &end);
}

std::optional<Records::Row> Records::row_of(NodeRef value, Table table) {
  if (!value.is(Kind::taken)) return std::nullopt;
  const Row row = Row::of(value.taken());
  return row.table == table ? std::optional(row) : std::nullopt;
}

ChunkRecord Records::chunk(NodeRef value, std::string_view name) {
  if (const auto row = row_of(value, Table::chunk)) {
    return {kept(row->begin, row->rank), kept(row->begin + row->rank, row->rank)};
  }
  const FoundFields<ChunkFields> found = chunk_.read(value, name);
  chunk_.require(found, {ChunkFields::offsets, ChunkFields::sizes}, name);
  offsets_.clear();
  sizes_.clear();
  input_.counts(found[ChunkFields::offsets], name, "offsets of a chunk", offsets_);
  input_.counts(found[ChunkFields::sizes], name, "sizes of a chunk", sizes_);
  return {offsets_, sizes_};
}

IndexRecord Records::index(NodeRef value) {
  using Fields = IndexFields;
  if (const auto row = row_of(value, Table::index)) {
    const bool has_offset = row->rank != Row::kNoOffset;
    return {kept_string(row->begin), words_[row->begin + 1], has_offset,
            has_offset ? kept(row->begin + 2, row->rank) : Counts()};
  }
  const FoundFields<Fields> found = index_.read(value, {});
  index_.require(found, {Fields::fqn}, {});
  const std::string_view name = input_.string(found[Fields::fqn], {}, "fqn of a MetadataIndex");
  IndexRecord record{found[Fields::fqn], -1, !found[Fields::offset].is_none(), {}};
  if (const NodeRef position = found[Fields::index]; !position.is_none()) {
    if (!position.is(Kind::integer)) input_.wrong_value(name, "index of a MetadataIndex", position, "an int or None");
    record.position = position.integer();
  }
  index_offset_.clear();
  if (record.has_offset) input_.counts(found[Fields::offset], name, "offset of a MetadataIndex", index_offset_);
  record.offset = index_offset_;
  return record;
}

StorageRecord Records::storage(NodeRef value, std::string_view name) {
  using Fields = StorageInfoFields;
  if (const auto row = row_of(value, Table::storage)) {
    return {kept_string(row->begin), words_[row->begin + 1], words_[row->begin + 2], NodeRef()};
  }
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
  const NodeRef transforms = record.transform_descriptors;
  if (!transforms.is_none() && !transforms.is(Kind::list) && !transforms.is(Kind::tuple)) {
    input_.wrong_value(name, "transform_descriptors", transforms, "a list or a tuple");
  }
  return record;
}

}  // namespace tessera::dcp

#pragma once
// The three records that a checkpoint has millions of: chunks, indices and storage infos. Records in PyTorch's form are
// decoded from the pickle's bytes into rows of plain numbers; others are read from the tree.

#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "format/dcp/fields.h"
#include "format/dcp/input.h"
#include "format/pickle/read/records.h"

namespace tessera::dcp {

using Counts = std::span<const std::int64_t>;

struct ChunkRecord {
  Counts offsets, sizes;
};

struct IndexRecord {
  pickle::NodeRef fqn;    // a str
  std::int64_t position;  // -1 for None
  bool has_offset;
  Counts offset;
};

struct StorageRecord {
  pickle::NodeRef relative_path;  // a str
  std::int64_t offset_bytes, length_bytes;
  pickle::NodeRef transform_descriptors;
};

class Records final : public pickle::RecordTaker {
 public:
  // `pickle_bytes` is used to estimate the number of records.
  Records(Input& input, std::uint64_t pickle_bytes);

  std::optional<std::uint64_t> take(pickle::NodeRef global, pickle::RecordCursor& cursor) override;

  // Each reads an object, or the placeholder of a taken one. `name` is used in messages. The counts are valid until the
  // next call of the same function.
  ChunkRecord chunk(pickle::NodeRef value, std::string_view name);
  IndexRecord index(pickle::NodeRef value);
  StorageRecord storage(pickle::NodeRef value, std::string_view name);

 private:
  // The location of a taken object, indexed by its number in the tree. Its row begins at `begin` in `words_` and has
  //   chunk    `rank` offsets, `rank` sizes
  //   index    fqn, position, `rank` offsets
  //   storage  relative_path, offset in bytes, length in bytes
  // where a string is stored as the bits of its NodeRef.
  enum class Table : std::uint64_t { chunk, index, storage };
  struct Row {
    std::size_t begin;
    Table table;
    std::uint64_t rank;  // kNoOffset for an index whose offset is None

    static constexpr std::uint64_t kNoOffset = 63;
    static constexpr std::uint64_t kMaxBegin = std::uint64_t{1} << 40;
    static Row of(std::uint64_t number) { return {number >> 8, static_cast<Table>(number & 3), (number >> 2) & 63}; }
    std::uint64_t number() const { return (begin << 8) | (rank << 2) | static_cast<std::uint64_t>(table); }
  };
  // Returns the row of a taken object, which must be in `table`, or nothing for an object that is in the tree.
  static std::optional<Row> row_of(pickle::NodeRef value, Table table);
  // Match the opcodes of each record, after those that fetch its class, and append what they read to `words_`.
  bool take_chunk(pickle::RecordCursor& cursor, Row& row);
  bool take_index(pickle::RecordCursor& cursor, Row& row);
  bool take_storage(pickle::RecordCursor& cursor);
  bool take_size(pickle::RecordCursor& cursor, std::uint64_t& rank);
  bool take_string(pickle::RecordCursor& cursor);
  bool take_integer(pickle::RecordCursor& cursor);

  // The name of a field or class. Once recognized, it is compared by identity.
  struct Known {
    std::string_view text;
    std::uint64_t identity = kNoIdentity;
  };
  static bool take_key(pickle::RecordCursor& cursor, Known& key);

  Counts kept(std::size_t begin, std::size_t count) const { return Counts(words_).subspan(begin, count); }
  pickle::NodeRef kept_string(std::size_t at) const { return std::bit_cast<pickle::NodeRef>(words_[at]); }

  Input& input_;
  FieldReader<ChunkFields> chunk_{input_};
  FieldReader<IndexFields> index_{input_};
  FieldReader<StorageInfoFields> storage_{input_};
  ClassReader chunk_class_{Class::chunk}, index_class_{Class::index}, storage_class_{Class::storage_info};
  std::uint64_t size_class_ = kNoIdentity;           // of a global
  std::array<std::uint64_t, 8> other_classes_ = {};  // identities of the last globals that are none of the classes
  std::size_t next_other_ = 0;
  Known offsets_key_{"offsets"}, sizes_key_{"sizes"};
  Known fqn_key_{"fqn"}, position_key_{"index"}, offset_key_{"offset"};
  Known path_key_{"relative_path"}, start_key_{"offset"}, length_key_{"length"},
      transforms_key_{"transform_descriptors"};
  std::vector<std::int64_t> words_;
  std::vector<std::int64_t> offsets_, sizes_, index_offset_;
};

}  // namespace tessera::dcp

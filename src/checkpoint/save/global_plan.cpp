#include "tessera/checkpoint/global_save_plan.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

#include "checkpoint/save/plan_items.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/huge_pages.h"
#include "tessera/base/internal/text_hash.h"
#include "tessera/layout/coverage.h"

namespace tessera::checkpoint {
namespace {

using Entry = SavePlan::Entry;
using Written = GlobalSavePlan::Written;

// The unique names of all ranks' plans, and a map from each rank's entries to them.
class Names {
 public:
  explicit Names(const GatheredPlans& plans) {
    std::optional<std::uint32_t> of_reference;
    for (std::size_t rank = 0; rank < plans.ranks(); ++rank) {
      const ByteView encoded = plans.entries(rank);
      const bool is_reference = encoded.data() == plans.entries(plans.reference()).data();
      if (is_reference && of_reference) {
        numbers_.push_back(*of_reference);
        continue;
      }
      numbers_.push_back(static_cast<std::uint32_t>(lists_.size()));
      if (is_reference) of_reference = numbers_.back();
      lists_.push_back(unify(decode_entries(encoded), rank));
    }
  }

  const std::vector<std::uint32_t>& of_rank(std::size_t rank) const { return lists_[numbers_[rank]]; }
  const std::vector<Entry>& entries() const { return entries_; }
  Entry take(std::uint32_t number) { return std::move(entries_[number]); }

 private:
  std::vector<std::uint32_t> unify(std::vector<Entry> entries, std::size_t rank) {
    std::vector<std::uint32_t> numbers;
    numbers.reserve(entries.size());
    by_name_.reserve(entries.size());
    for (Entry& entry : entries) {
      const auto found = by_name_.find(entry.name);
      if (found != by_name_.end()) {
        if (first_rank_[found->second] == rank) refuse_twice(entry.name, rank);
        check_same(found->second, entry, rank);
        if (Entry& first = entries_[found->second]; !first.properties && entry.properties) {
          first.properties = std::move(entry.properties);
          first_rank_[found->second] = rank;
        }
        numbers.push_back(found->second);
        continue;
      }
      numbers.push_back(static_cast<std::uint32_t>(entries_.size()));
      by_name_.emplace(entry.name, numbers.back());
      entries_.push_back(std::move(entry));
      first_rank_.push_back(rank);
    }
    check_once(numbers, rank);
    return numbers;
  }

  void check_once(std::vector<std::uint32_t> numbers, std::size_t rank) const {
    std::sort(numbers.begin(), numbers.end());
    const auto twice = std::adjacent_find(numbers.begin(), numbers.end());
    if (twice != numbers.end()) refuse_twice(entries_[*twice].name, rank);
  }

  [[noreturn]] static void refuse_twice(const std::string& name, std::size_t rank) {
    fail(ErrorCode::invalid_argument, "save plan of rank {}: the name '{}' occurs twice, expected unique names", rank,
         printable(name));
  }

  void check_same(std::uint32_t number, const Entry& entry, std::size_t rank) const {
    const Entry& first = entries_[number];
    const auto differ = [&](std::string_view what, const std::string& a, const std::string& b) {
      fail(ErrorCode::invalid_argument, "save plan: '{}': {} is {} on rank {} and {} on rank {}, expected the same",
           printable(entry.name), what, a, first_rank_[number], b, rank);
    };
    if (first.is_tensor != entry.is_tensor) {
      const auto kind = [](const Entry& e) { return std::string(e.is_tensor ? "a tensor" : "an object"); };
      differ("it", kind(first), kind(entry));
    }
    if (first.path != entry.path) differ("its path", path_text(first.path), path_text(entry.path));
    if (!entry.is_tensor) return;
    if (first.shape != entry.shape) differ("its shape", shape_to_string(first.shape), shape_to_string(entry.shape));
    if (!first.properties || !entry.properties) return;
    if (first.properties->dtype != entry.properties->dtype) {
      differ("its dtype", std::string(dtype_name(first.properties->dtype)),
             std::string(dtype_name(entry.properties->dtype)));
    }
  }

  static std::string path_text(const Path& path) {
    std::string text;
    for (const Key& item : path) {
      const auto* key = std::get_if<std::string>(&item);
      text += "[" + (key != nullptr ? "'" + printable(*key) + "'" : std::to_string(std::get<std::int64_t>(item))) + "]";
    }
    return text;
  }

  std::vector<Entry> entries_;
  std::vector<std::size_t> first_rank_;  // that has each entry
  TextMap<std::uint32_t> by_name_;
  std::vector<std::vector<std::uint32_t>> lists_;  // each maps the entries of one or more ranks
  std::vector<std::uint32_t> numbers_;             // index into lists_, by rank
};

// An item of a rank. Rows of one entry are adjacent, ordered by rank.
struct Row {
  static constexpr std::uint32_t kNotWritten = UINT32_MAX;
  std::uint32_t rank, item;
  std::uint32_t chunk = kNotWritten;  // of the entry, if this rank writes it
  std::uint64_t stored_bytes;
};

// A chunk that several ranks have: holders_[first, first + count).
struct Replica {
  std::uint32_t entry, chunk;  // in the metadata
  std::uint64_t bytes;
  std::size_t first, count;
};

// What was read of a rank's items.
struct Cursor {
  std::size_t item = 0, coordinate = 0;
};

// Resizes a vector and keeps none of its elements. Memory that is new is in huge pages.
template <typename T>
void resize_anew(std::vector<T>& vector, std::size_t size) {
  vector.clear();
  if (vector.capacity() < size) {
    vector.reserve(size);
    advise_huge_pages(vector.data(), vector.capacity() * sizeof(T));
  }
  vector.resize(size);
}

// Merges entries in blocks whose rows fit into a cache, so that memory is in proportion to what is returned.
class Merger {
 public:
  Merger(const GatheredPlans& plans, Replicas replicas) : plans_(plans), replicas_(replicas), names_(plans) {}

  GlobalSavePlan merge() {
    count_rows();
    plan_.metadata.paths.emplace();
    plan_.metadata.paths->reserve(names_.entries().size());
    plan_.metadata.entries.reserve(names_.entries().size());
    plan_.written.resize(plans_.ranks());
    cursors_.resize(plans_.ranks());
    loads_.assign(plans_.ranks(), 0);
    const auto entries = static_cast<std::uint32_t>(names_.entries().size());
    for (std::uint32_t begin = 0, end = 0; begin < entries; begin = end) {
      for (std::size_t rows = 0; end < entries && (end == begin || !are_ordered_ || rows < kBlockRows); ++end)
        rows += rows_of_[end];
      fill_rows(begin, end);
      for (std::uint32_t e = begin; e < end; ++e) {
        if (rows_of_[e] > 0 || names_.entries()[e].is_tensor) merge_entry(e);
      }
    }
    place_replicas();
    if (!are_ordered_ || !replicated_.empty()) {
      for (std::vector<Written>& written : plan_.written)
        std::sort(written.begin(), written.end(), [](const Written& a, const Written& b) { return a.item < b.item; });
    }
    return std::move(plan_);
  }

 private:
  static constexpr std::size_t kBlockRows = std::size_t{1} << 18;

  std::size_t dims(std::uint32_t e) const { return names_.entries()[e].shape.size(); }

  void count_rows() {
    rows_of_.assign(names_.entries().size(), 0);
    for (std::size_t rank = 0; rank < plans_.ranks(); ++rank) {
      const EncodedItems items(plans_.items(rank));
      const std::vector<std::uint32_t>& numbers = names_.of_rank(rank);
      std::uint32_t last = 0;
      for (std::size_t i = 0; i < items.size(); ++i) {
        if (items.entry(i) >= numbers.size()) {
          fail(ErrorCode::corrupt, "save plan of rank {}: item {} refers to entry {}, expected less than {}", rank, i,
               items.entry(i), numbers.size());
        }
        const std::uint32_t e = numbers[items.entry(i)];
        are_ordered_ = are_ordered_ && e >= last;
        last = e;
        ++rows_of_[e];
      }
    }
  }

  // Reads the rows of the entries [begin, end).
  void fill_rows(std::uint32_t begin, std::uint32_t end) {
    block_begin_ = begin;
    row_begin_.assign(1, 0);
    coordinate_begin_.assign(1, 0);
    for (std::uint32_t e = begin; e < end; ++e) {
      row_begin_.push_back(row_begin_.back() + rows_of_[e]);
      coordinate_begin_.push_back(coordinate_begin_.back() + rows_of_[e] * 2 * dims(e));
    }
    resize_anew(rows_, row_begin_.back());
    resize_anew(coordinates_, coordinate_begin_.back());
    std::vector<std::size_t> filled(row_begin_.begin(), row_begin_.end() - 1);
    for (std::size_t rank = 0; rank < plans_.ranks(); ++rank) {
      const EncodedItems items(plans_.items(rank));
      const std::vector<std::uint32_t>& numbers = names_.of_rank(rank);
      Cursor& cursor = cursors_[rank];
      for (; cursor.item < items.size(); ++cursor.item) {
        const std::uint32_t e = numbers[items.entry(cursor.item)];
        if (e >= end) break;
        const std::size_t row = filled[e - begin]++;
        rows_[row] = {static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(cursor.item), Row::kNotWritten,
                      items.stored_bytes(cursor.item)};
        if (!names_.entries()[e].is_tensor) continue;
        const std::size_t width = 2 * dims(e);
        items.coordinates(cursor.coordinate, width, box_of(e, row - first_row(e)));
        cursor.coordinate += width;
      }
    }
  }

  std::size_t first_row(std::uint32_t e) const { return row_begin_[e - block_begin_]; }

  std::int64_t* box_of(std::uint32_t e, std::size_t k) {
    return coordinates_.data() + coordinate_begin_[e - block_begin_] + k * 2 * dims(e);
  }

  BoxView view(std::uint32_t e, std::size_t k) {
    const std::int64_t* box = box_of(e, k);
    return {{box, dims(e)}, {box + dims(e), dims(e)}};
  }

  [[noreturn]] void refuse(std::uint32_t e, const std::string& why) const {
    fail(ErrorCode::invalid_argument, "save plan: tensor '{}' of shape {}: {}", printable(names_.entries()[e].name),
         shape_to_string(names_.entries()[e].shape), why);
  }

  // Adds an entry to the metadata, and what ranks write of it to their lists.
  void merge_entry(std::uint32_t e) {
    const auto number = static_cast<std::uint32_t>(plan_.metadata.entries.size());
    dcp::MetadataEntry& made = plan_.metadata.entries.emplace_back();
    made.is_tensor = names_.entries()[e].is_tensor;
    if (made.is_tensor) {
      merge_tensor(e);
    } else {
      made.items.resize(1);
      rows_[first_row(e)].chunk = 0;
    }
    Entry entry = names_.take(e);
    Path path = entry.path.empty() ? Path{entry.name} : std::move(entry.path);
    plan_.metadata.paths->push_back(std::move(path));
    made.name = std::move(entry.name);
    made.properties = std::move(entry.properties).value_or(TensorProperties());
    made.shape = std::move(entry.shape);
    for (std::size_t row = first_row(e); row < first_row(e + 1); ++row) {
      if (rows_[row].chunk != Row::kNotWritten) write(rows_[row], number, rows_[row].chunk);
    }
  }

  void write(const Row& row, std::uint32_t number, std::uint32_t chunk) {
    loads_[row.rank] += row.stored_bytes;
    plan_.written[row.rank].push_back({row.item, number, chunk, row.stored_bytes});
  }

  void merge_tensor(std::uint32_t e) {
    const std::size_t begin = first_row(e), count = rows_of_[e];
    const std::vector<std::int64_t>& shape = names_.entries()[e].shape;
    const bool has_elements = std::find(shape.begin(), shape.end(), 0) == shape.end();
    for (std::size_t k = 0; k < count; ++k) {
      if (is_empty(view(e, k)) || is_valid(view(e, k), shape)) continue;
      refuse(e, fmt::format("chunk {} of rank {} is not within the shape, expected a box within it",
                            to_string(view(e, k)), rows_[begin + k].rank));
    }
    std::vector<std::uint32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    if (has_elements) {
      std::erase_if(order, [&](std::uint32_t k) { return is_empty(view(e, k)); });
      sort_by_box(e, order);
    } else {
      order.resize(std::min<std::size_t>(count, 1));
    }
    BoxList chunks(shape.size());
    chunks.reserve(order.size());
    std::vector<std::uint32_t> rank_of_chunk;
    for (std::size_t i = 0; i < order.size();) {
      std::size_t last = i + 1;
      while (last < order.size() && view(e, order[last]) == view(e, order[i])) ++last;
      const auto chunk = static_cast<std::uint32_t>(chunks.size());
      chunks.push_back(view(e, order[i]));
      Row& first = rows_[begin + order[i]];
      rank_of_chunk.push_back(first.rank);
      if (last - i == 1 || replicas_ == Replicas::lowest_rank) {
        first.chunk = chunk;
      } else {
        add_replica(e, chunk, order, i, last);
      }
      i = last;
    }
    if (has_elements) check_partition(e, chunks, rank_of_chunk);
    dcp::MetadataEntry& made = plan_.metadata.entries.back();
    made.items.resize(chunks.size());
    made.chunks = std::move(chunks);
  }

  // Sorts by box, then by rank. Often the rows are sorted already.
  void sort_by_box(std::uint32_t e, std::vector<std::uint32_t>& order) {
    const std::size_t width = 2 * dims(e);
    const auto before = [&](std::uint32_t a, std::uint32_t b) {
      const std::int64_t *left = box_of(e, a), *right = box_of(e, b);
      const auto [l, r] = std::mismatch(left, left + width, right);
      return l == left + width ? a < b : *l < *r;
    };
    if (!std::is_sorted(order.begin(), order.end(), before)) std::sort(order.begin(), order.end(), before);
  }

  void add_replica(std::uint32_t e, std::uint32_t chunk, const std::vector<std::uint32_t>& order, std::size_t first,
                   std::size_t last) {
    const std::size_t begin = holders_.size();
    std::uint64_t bytes = 0;
    for (std::size_t i = first; i < last; ++i) {
      const Row& row = rows_[first_row(e) + order[i]];
      bytes = std::max(bytes, row.stored_bytes);
      if (i == first || row.rank != holders_.back().rank) holders_.push_back(row);
    }
    const auto number = static_cast<std::uint32_t>(plan_.metadata.entries.size() - 1);
    replicated_.push_back({number, chunk, bytes, begin, holders_.size() - begin});
  }

  // Assigns the largest replicas first, each to the rank with the fewest bytes so far.
  void place_replicas() {
    std::stable_sort(replicated_.begin(), replicated_.end(),
                     [](const Replica& a, const Replica& b) { return a.bytes > b.bytes; });
    for (const Replica& replica : replicated_) {
      const auto begin = holders_.begin() + static_cast<std::ptrdiff_t>(replica.first);
      const auto best = std::min_element(begin, begin + static_cast<std::ptrdiff_t>(replica.count),
                                         [&](const Row& a, const Row& b) { return loads_[a.rank] < loads_[b.rank]; });
      write(*best, replica.entry, replica.chunk);
    }
  }

  void check_partition(std::uint32_t e, const BoxList& chunks, const std::vector<std::uint32_t>& ranks) {
    if (const auto pair = find_overlap(chunks)) {
      refuse(e, fmt::format("chunks {} of rank {} and {} of rank {} overlap, expected disjoint ones",
                            to_string(chunks[pair->first]), ranks[pair->first], to_string(chunks[pair->second]),
                            ranks[pair->second]));
    }
    if (const auto hole = find_hole(names_.entries()[e].shape, chunks)) {
      refuse(e, fmt::format("no rank has {}, expected chunks that cover the shape", to_string(*hole)));
    }
  }

  const GatheredPlans& plans_;
  Replicas replicas_;
  Names names_;
  GlobalSavePlan plan_;
  std::vector<std::size_t> rows_of_;  // how many rows each entry has
  bool are_ordered_ = true;           // whether the items of each rank are in the order of the entries
  std::vector<Cursor> cursors_;       // of each rank
  // The block of entries that is merged.
  std::uint32_t block_begin_ = 0;
  std::vector<std::size_t> row_begin_, coordinate_begin_;  // of each of its entries, then the end
  std::vector<Row> rows_;
  std::vector<std::int64_t> coordinates_;  // offsets, then sizes, of each row of a tensor
  std::vector<Replica> replicated_;
  std::vector<Row> holders_;
  std::vector<std::uint64_t> loads_;  // the bytes that each rank writes
};

}  // namespace

std::uint64_t GatheredPlans::size_bytes() const {
  std::uint64_t sum = 0;
  for (const Encoded& plan : plans_) sum += plan.entries.size() + plan.items.size();
  return sum;
}

GlobalSavePlan make_global_plan(const GatheredPlans& plans, Replicas replicas) {
  return Merger(plans, replicas).merge();
}

}  // namespace tessera::checkpoint

#include "tessera/checkpoint/global_save_plan.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "checkpoint/save/plan_items.h"
#include "tessera/base/error.h"
#include "tessera/base/internal/huge_pages.h"
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

 private:
  std::vector<std::uint32_t> unify(std::vector<Entry> entries, std::size_t rank) {
    std::vector<std::uint32_t> numbers;
    numbers.reserve(entries.size());
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
      fail(ErrorCode::invalid_argument, "save plan: '{}': {} is {} on rank {} and {} on rank {}", printable(entry.name),
           what, a, first_rank_[number], b, rank);
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
  std::unordered_map<std::string, std::uint32_t> by_name_;
  std::vector<std::vector<std::uint32_t>> lists_;  // each maps the entries of one or more ranks
  std::vector<std::uint32_t> numbers_;             // index into lists_, by rank
};

// An item of a rank. Rows of one entry are adjacent, ordered by rank.
struct Row {
  static constexpr std::uint32_t kNotWritten = UINT32_MAX;
  std::uint32_t rank;
  std::uint32_t chunk = kNotWritten;  // of the entry, if this rank writes it
  std::uint64_t stored_bytes;
};

// A chunk that several ranks have: holders_[first, first + count).
struct Replica {
  std::uint32_t chunk;
  std::uint64_t bytes;
  std::size_t first, count;
};

// The amount that a rank writes.
struct Load {
  std::uint64_t bytes = 0;
  std::size_t items = 0;
};

// Resizes an empty vector, using huge pages.
template <typename T>
void resize_new(std::vector<T>& vector, std::size_t size) {
  vector.reserve(size);
  advise_huge_pages(vector.data(), vector.capacity() * sizeof(T));
  vector.resize(size);
}

class Merger {
 public:
  Merger(const GatheredPlans& plans, Replicas replicas) : plans_(plans), replicas_(replicas), names_(plans) {}

  GlobalSavePlan merge() {
    count_rows();
    fill_rows();
    plan_.metadata.paths.emplace();
    loads_.assign(plans_.ranks(), {});
    entry_numbers_.assign(names_.entries().size(), 0);
    for (std::uint32_t e = 0; e < names_.entries().size(); ++e) {
      if (names_.entries()[e].is_tensor) {
        merge_tensor(e);
      } else {
        merge_object(e);
      }
    }
    place_replicas();
    collect_written();
    return std::move(plan_);
  }

 private:
  std::size_t dims(std::uint32_t e) const { return names_.entries()[e].shape.size(); }

  void count_rows() {
    row_begin_.assign(names_.entries().size() + 1, 0);
    for (std::size_t rank = 0; rank < plans_.ranks(); ++rank) {
      const EncodedItems items(plans_.items(rank));
      const std::vector<std::uint32_t>& numbers = names_.of_rank(rank);
      for (std::size_t i = 0; i < items.size(); ++i) {
        if (items.entry(i) >= numbers.size()) {
          fail(ErrorCode::corrupt, "save plan of rank {}: item {} refers to entry {}, expected less than {}", rank, i,
               items.entry(i), numbers.size());
        }
        ++row_begin_[numbers[items.entry(i)] + 1];
      }
    }
    coordinate_begin_.push_back(0);
    for (std::uint32_t e = 0; e < names_.entries().size(); ++e) {
      coordinate_begin_.push_back(coordinate_begin_[e] + row_begin_[e + 1] * 2 * dims(e));
      row_begin_[e + 1] += row_begin_[e];
    }
  }

  void fill_rows() {
    resize_new(rows_, row_begin_.back());
    resize_new(coordinates_, coordinate_begin_.back());
    std::vector<std::size_t> filled(row_begin_.begin(), row_begin_.end() - 1);
    for (std::size_t rank = 0; rank < plans_.ranks(); ++rank) {
      const EncodedItems items(plans_.items(rank));
      const std::vector<std::uint32_t>& numbers = names_.of_rank(rank);
      std::size_t at = 0;
      for (std::size_t i = 0; i < items.size(); ++i) {
        const std::uint32_t e = numbers[items.entry(i)];
        const std::size_t row = filled[e]++;
        rows_[row] = {static_cast<std::uint32_t>(rank), Row::kNotWritten, items.stored_bytes(i)};
        if (!names_.entries()[e].is_tensor) continue;
        const std::size_t width = 2 * dims(e);
        items.coordinates(at, width, box_of(e, row - row_begin_[e]));
        at += width;
      }
    }
  }

  std::int64_t* box_of(std::uint32_t e, std::size_t k) {
    return coordinates_.data() + coordinate_begin_[e] + k * 2 * dims(e);
  }

  BoxView view(std::uint32_t e, std::size_t k) {
    const std::int64_t* box = box_of(e, k);
    return {{box, dims(e)}, {box + dims(e), dims(e)}};
  }

  [[noreturn]] void refuse(std::uint32_t e, const std::string& why) const {
    fail(ErrorCode::invalid_argument, "save plan: tensor '{}' of shape {}: {}", printable(names_.entries()[e].name),
         shape_to_string(names_.entries()[e].shape), why);
  }

  void add_entry(std::uint32_t e) {
    entry_numbers_[e] = static_cast<std::uint32_t>(plan_.metadata.entries.size());
    const Entry& entry = names_.entries()[e];
    dcp::MetadataEntry& made = plan_.metadata.entries.emplace_back();
    made.name = entry.name;
    made.is_tensor = entry.is_tensor;
    made.properties = entry.properties.value_or(TensorProperties());
    made.shape = entry.shape;
    made.chunks = BoxList(entry.shape.size());
    plan_.metadata.paths->push_back(entry.path.empty() ? Path{entry.name} : entry.path);
  }

  void write(Row& row, std::uint32_t chunk) {
    row.chunk = chunk;
    loads_[row.rank].bytes += row.stored_bytes;
    ++loads_[row.rank].items;
  }

  void merge_object(std::uint32_t e) {
    if (row_begin_[e] == row_begin_[e + 1]) return;
    add_entry(e);
    plan_.metadata.entries.back().items.resize(1);
    write(rows_[row_begin_[e]], 0);
  }

  void merge_tensor(std::uint32_t e) {
    const std::size_t begin = row_begin_[e], count = row_begin_[e + 1] - begin;
    add_entry(e);
    const std::vector<std::int64_t>& shape = names_.entries()[e].shape;
    const bool has_elements = std::find(shape.begin(), shape.end(), 0) == shape.end();
    for (std::size_t k = 0; k < count; ++k) {
      if (is_empty(view(e, k)) || is_valid(view(e, k), shape)) continue;
      refuse(e,
             fmt::format("chunk {} of rank {} is not within the shape", to_string(view(e, k)), rows_[begin + k].rank));
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
        write(first, chunk);
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
      const std::size_t row = row_begin_[e] + order[i];
      bytes = std::max(bytes, rows_[row].stored_bytes);
      if (i == first || rows_[row].rank != rows_[holders_.back()].rank) holders_.push_back(row);
    }
    replicated_.push_back({chunk, bytes, begin, holders_.size() - begin});
  }

  // Assigns the largest replicas first, each to the rank with the fewest bytes so far.
  void place_replicas() {
    std::stable_sort(replicated_.begin(), replicated_.end(),
                     [](const Replica& a, const Replica& b) { return a.bytes > b.bytes; });
    for (const Replica& replica : replicated_) {
      const auto begin = holders_.begin() + static_cast<std::ptrdiff_t>(replica.first);
      const auto load = [&](std::size_t row) { return loads_[rows_[row].rank].bytes; };
      const auto best = std::min_element(begin, begin + static_cast<std::ptrdiff_t>(replica.count),
                                         [&](std::size_t a, std::size_t b) { return load(a) < load(b); });
      write(rows_[*best], replica.chunk);
    }
  }

  // Goes through the rows by rank, in the order in which fill_rows() filled them. This is much faster than going by
  // entry and appending to the lists of many ranks.
  void collect_written() {
    plan_.written.resize(plans_.ranks());
    std::vector<std::size_t> seen(row_begin_.begin(), row_begin_.end() - 1);
    for (std::size_t rank = 0; rank < plans_.ranks(); ++rank) {
      const EncodedItems items(plans_.items(rank));
      const std::vector<std::uint32_t>& numbers = names_.of_rank(rank);
      std::vector<Written>& written = plan_.written[rank];
      written.reserve(loads_[rank].items);
      for (std::size_t i = 0; i < items.size(); ++i) {
        const std::uint32_t e = numbers[items.entry(i)];
        const Row& row = rows_[seen[e]++];
        if (row.chunk == Row::kNotWritten) continue;
        written.push_back({static_cast<std::uint32_t>(i), entry_numbers_[e], row.chunk, row.stored_bytes});
      }
    }
  }

  void check_partition(std::uint32_t e, const BoxList& chunks, const std::vector<std::uint32_t>& ranks) {
    if (const auto pair = find_overlap(chunks)) {
      refuse(e, fmt::format("chunks {} of rank {} and {} of rank {} overlap", to_string(chunks[pair->first]),
                            ranks[pair->first], to_string(chunks[pair->second]), ranks[pair->second]));
    }
    if (const auto hole = find_hole(names_.entries()[e].shape, chunks)) {
      refuse(e, fmt::format("no rank has {}", to_string(*hole)));
    }
  }

  const GatheredPlans& plans_;
  Replicas replicas_;
  Names names_;
  GlobalSavePlan plan_;
  std::vector<std::size_t> row_begin_, coordinate_begin_;  // of each entry, then the end
  std::vector<Row> rows_;
  std::vector<std::int64_t> coordinates_;  // offsets, then sizes, of each row of a tensor
  std::vector<Replica> replicated_;
  std::vector<std::size_t> holders_;          // rows
  std::vector<std::uint32_t> entry_numbers_;  // in the metadata
  std::vector<Load> loads_;                   // of each rank
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

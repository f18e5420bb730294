#pragma once
/// \file
/// Boxes: axis-aligned sets of indices. Everything sharded is a set of boxes.
///
/// A box of rank r is the set of index vectors x with offsets[d] <= x[d] < offsets[d] + sizes[d] for all d < r. A box
/// of rank 0 has exactly one element (a scalar). A box with a size of 0 is empty. Its offsets are kept, because they
/// can mean something to the writer of the box.
///
/// Laws: volume(intersect(a, b)) > 0 <=> overlaps(a, b); contains(a, b) <=> b is empty or intersect(a, b) == b. The
/// boxes of subtract(a, b) and intersect(a, b) partition a.
///
/// Plain values. No free function allocates memory, except those that return boxes or text.

#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// A box stored elsewhere (a `Box`, a row of a `BoxList`). `offsets.size() == sizes.size()`, all members >= 0.
struct BoxView {
  std::span<const std::int64_t> offsets;
  std::span<const std::int64_t> sizes;

  std::size_t rank() const { return sizes.size(); }
};

/// A box that owns its offsets and sizes.
struct Box {
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> sizes;

  Box() = default;
  Box(std::vector<std::int64_t> offsets_in, std::vector<std::int64_t> sizes_in)
      : offsets(std::move(offsets_in)), sizes(std::move(sizes_in)) {}
  explicit Box(BoxView view)
      : offsets(view.offsets.begin(), view.offsets.end()), sizes(view.sizes.begin(), view.sizes.end()) {}
  /// Returns the box of all elements of a tensor of this shape.
  static Box full(std::span<const std::int64_t> shape);

  operator BoxView() const { return {offsets, sizes}; }  // NOLINT(google-explicit-constructor)
  std::size_t rank() const { return sizes.size(); }
  bool operator==(const Box&) const = default;
};

bool operator==(BoxView a, BoxView b);

/// Returns the number of elements. The sizes must have passed `checked_numel`: overflow is not checked here.
std::int64_t volume(BoxView box);

/// Returns whether a size is 0.
bool is_empty(BoxView box);

/// Returns whether a and b, of equal rank, share an element.
bool overlaps(BoxView a, BoxView b);

/// Returns the elements that a and b, of equal rank, share; nothing if they share none.
std::optional<Box> intersect(BoxView a, BoxView b);

/// Returns the elements of a that are not in b, of equal rank, as at most two boxes per dimension.
std::vector<Box> subtract(BoxView a, BoxView b);

/// Returns whether every element of `inner` is in `outer`.
bool contains(BoxView outer, BoxView inner);

/// Returns whether `box` has the rank of `shape`, has no negative member and is within the shape, without overflow. An
/// empty box may begin at the end of a dimension. Pass a box to other functions only after this check.
bool is_valid(BoxView box, std::span<const std::int64_t> shape);

/// Returns "[0, 4)x[2, 6)", or "[]" for a scalar.
std::string to_string(BoxView box);
std::ostream& operator<<(std::ostream& out, const Box& box);

/// Returns "[2, 3]".
std::string shape_to_string(std::span<const std::int64_t> shape);

/// A list of boxes of equal rank in one allocation.
class BoxList {
 public:
  explicit BoxList(std::size_t rank = 0) : rank_(rank) {}
  BoxList(std::initializer_list<Box> boxes);

  std::size_t rank() const { return rank_; }
  std::size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  BoxView operator[](std::size_t i) const {
    const std::int64_t* row = coordinates_.data() + i * 2 * rank_;
    return {{row, rank_}, {row + rank_, rank_}};
  }
  /// Appends `box`, which must have the rank of this list.
  void push_back(BoxView box);
  void reserve(std::size_t count) { coordinates_.reserve(count * 2 * rank_); }
  bool operator==(const BoxList&) const = default;

 private:
  std::size_t rank_;
  std::size_t count_ = 0;
  std::vector<std::int64_t> coordinates_;  // per box: offsets, then sizes
};

}  // namespace tessera

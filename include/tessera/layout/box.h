#pragma once
/// \file
/// Boxes: everything that is sharded is a set of these.
///
/// A box of rank r is the set of index vectors x with offsets[d] <= x[d] < offsets[d] + sizes[d] for all d < r. A box
/// of rank 0 holds exactly one element (a scalar). A box with a size of 0 holds none; its offsets still mean something
/// to those who wrote it.
///
/// Laws: volume(intersect(a, b)) > 0 <=> overlaps(a, b); contains(a, b) <=> b is empty or intersect(a, b) == b.
/// The boxes of subtract(a, b) and intersect(a, b) partition a.
/// Plain values; no function here allocates but those that return a `Box` or several.

#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// A box that lives elsewhere (a `Box`, a row of a `BoxList`). `offsets.size() == sizes.size()`, all members >= 0.
struct BoxView {
  std::span<const std::int64_t> offsets;
  std::span<const std::int64_t> sizes;

  std::size_t rank() const { return sizes.size(); }
};

struct Box {
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> sizes;

  Box() = default;
  Box(std::vector<std::int64_t> offsets_in, std::vector<std::int64_t> sizes_in)
      : offsets(std::move(offsets_in)), sizes(std::move(sizes_in)) {}
  explicit Box(BoxView view)
      : offsets(view.offsets.begin(), view.offsets.end()), sizes(view.sizes.begin(), view.sizes.end()) {}
  /// The box that is the whole of a tensor of this shape.
  static Box full(std::span<const std::int64_t> shape);

  operator BoxView() const { return {offsets, sizes}; }  // NOLINT(google-explicit-constructor)
  std::size_t rank() const { return sizes.size(); }
  bool operator==(const Box&) const = default;
};

bool operator==(BoxView a, BoxView b);

/// Number of elements. The sizes must have been checked not to overflow (`checked_numel`).
std::int64_t volume(BoxView box);

bool is_empty(BoxView box);

/// Whether a and b, of one rank, share an element.
bool overlaps(BoxView a, BoxView b);

/// The shared elements of a and b, of one rank; nothing if there are none.
std::optional<Box> intersect(BoxView a, BoxView b);

/// The elements of a that are not in b, both of one rank: at most two boxes for each dimension.
std::vector<Box> subtract(BoxView a, BoxView b);

/// Whether every element of `inner` is in `outer`.
bool contains(BoxView outer, BoxView inner);

/// Whether `box` has the rank of `shape`, no negative member, and lies within it (an empty box may touch the end),
/// without overflow. What has not passed this must not reach any other function.
bool is_valid(BoxView box, std::span<const std::int64_t> shape);

/// "[0, 4)x[2, 6)"; a scalar prints as "[]".
std::string to_string(BoxView box);
std::ostream& operator<<(std::ostream& out, const Box& box);

/// "[2, 3]"
std::string shape_to_string(std::span<const std::int64_t> shape);

/// Many boxes of one rank in one allocation.
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
  /// `box` must have this list's rank.
  void push_back(BoxView box);
  void reserve(std::size_t count) { coordinates_.reserve(count * 2 * rank_); }
  bool operator==(const BoxList&) const = default;

 private:
  std::size_t rank_;
  std::size_t count_ = 0;
  std::vector<std::int64_t> coordinates_;  // per box: offsets, then sizes
};

}  // namespace tessera

#pragma once
/// \file
/// Overlap and coverage of rectangles in a plane, by a sweep along x: O(n log n), whatever the rectangles.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

namespace tessera {

/// begin_x <= x < end_x, begin_y <= y < end_y; not empty. `id` is the caller's.
struct Rectangle {
  std::int64_t begin_x, end_x, begin_y, end_y;
  std::size_t id = 0;
};

/// The ids of two rectangles that share a point, or nothing. Sorts `rectangles`.
std::optional<std::pair<std::size_t, std::size_t>> find_overlap_in_plane(std::span<Rectangle> rectangles);

/// A part of `whole` that none of `rectangles`, which lie in it and may overlap, covers; or nothing. Sorts
/// `rectangles`.
std::optional<Rectangle> find_hole_in_plane(const Rectangle& whole, std::span<Rectangle> rectangles);

}  // namespace tessera

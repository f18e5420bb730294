#pragma once
/// \file
/// Overlap and coverage of rectangles in a plane, by a sweep along x: O(n log n) for all inputs.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

namespace tessera {

/// A non-empty rectangle: begin_x <= x < end_x, begin_y <= y < end_y. The caller chooses `id`.
struct Rectangle {
  std::int64_t begin_x, end_x, begin_y, end_y;
  std::size_t id = 0;
};

/// Returns the ids of two rectangles that share a point, or nothing. Sorts `rectangles`.
std::optional<std::pair<std::size_t, std::size_t>> find_overlap_in_plane(std::span<Rectangle> rectangles);

/// Returns a part of `area` that none of `rectangles` covers, or nothing. The rectangles must be inside `area` and may
/// overlap. Sorts `rectangles`.
std::optional<Rectangle> find_hole_in_plane(const Rectangle& area, std::span<Rectangle> rectangles);

}  // namespace tessera

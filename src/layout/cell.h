#pragma once
/// \file
/// Divide and conquer on boxes: a region of space, the boxes that reach into it, and how to split it.
///
/// Boxes that come from a grid or from nested splits are split at all coordinates where no box is divided, into many
/// cells at once. Otherwise a cell is split at the median of the coordinates at which boxes begin or end, so each split
/// halves these coordinates of one dimension, and splitting ends.

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/layout/box.h"
#include "tessera/layout/interval.h"

namespace tessera {

/// A non-empty box, as half-open intervals, and its members: indices of the boxes of a list that share an element with
/// it.
struct Cell {
  std::vector<std::int64_t> begin, end;
  std::vector<std::size_t> members;
};

/// Returns the part of box `i` that is inside the cell, in dimension `d`.
Interval clipped(const BoxList& boxes, std::size_t i, const Cell& cell, std::size_t d);

/// Returns the smallest cell that contains all members' parts of `cell`. There must be members.
Cell bounds(const BoxList& boxes, const Cell& cell);

struct CellFacts {
  std::vector<std::size_t> uneven;      ///< the dimensions in which some member does not span the cell
  std::optional<std::size_t> spanning;  ///< a member that contains the entire cell
};
CellFacts look_at(const BoxList& boxes, const Cell& cell);

/// Splits a cell in one of the dimensions `uneven`. There must be one, and the cell must be the bounds of its members.
/// The parts partition the cell, are in order, and may have no members.
std::vector<Cell> split(const BoxList& boxes, const Cell& cell, const std::vector<std::size_t>& uneven);

}  // namespace tessera

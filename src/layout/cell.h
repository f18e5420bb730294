#pragma once
/// \file
/// Divide and conquer on boxes: a part of space, the boxes that reach into it, and how to cut it.
///
/// Boxes that stem from a grid, or from nested cuts, are cut where no box is cut, into many cells at once. Others are
/// cut at the median of the coordinates at which boxes begin or end, so each cut halves those of one dimension and
/// cutting ends.

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/layout/box.h"
#include "tessera/layout/interval.h"

namespace tessera {

/// A non-empty box, as half-open intervals, and the boxes of a list (`members`, indices) that share an element with it.
struct Cell {
  std::vector<std::int64_t> begin, end;
  std::vector<std::size_t> members;
};

/// The part of box `i` that is inside of the cell, in dimension `d`.
Interval clipped(const BoxList& boxes, std::size_t i, const Cell& cell, std::size_t d);

/// The smallest cell that holds all members' parts of `cell`. There must be members.
Cell bounds(const BoxList& boxes, const Cell& cell);

struct CellFacts {
  std::vector<std::size_t> uneven;      ///< the dimensions in which some member does not span the cell
  std::optional<std::size_t> spanning;  ///< a member that holds the whole cell
};
CellFacts look_at(const BoxList& boxes, const Cell& cell);

/// Cuts a cell in one of the dimensions `uneven`; there must be one, and the cell must be its members' bounds. The
/// parts partition the cell, are in order, and may have no members.
std::vector<Cell> cut(const BoxList& boxes, const Cell& cell, const std::vector<std::size_t>& uneven);

}  // namespace tessera

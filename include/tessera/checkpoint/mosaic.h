#pragma once
/// \file
/// The mosaic: one self-contained HTML page that shows which rank and file holds which box of which tensor. How a
/// tensor of more than two dimensions is drawn flat: docs/mosaic.md.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/checkpoint/checkpoint.h"

namespace tessera::checkpoint {

/// What every page begins with, by which one is recognised.
inline constexpr std::string_view kMosaicBegin = "<!doctype html>\n<!-- tessera map -->\n";

/// The page, UTF-8, no network needed: inline CSS, script and SVG. Every tensor is a picture of its boxes coloured by
/// rank; totals per rank and per file are bars; thousands of tensors stay usable (search, collapse, drawn when scrolled
/// to). Names are data in it and never markup. Deterministic. Loads the objects, and no tensor; an object that can't be
/// read is shown with the reason.
std::string mosaic_html(const Checkpoint& checkpoint);

/// The rank in a data file's name ("__3_0.distcp" -> 3, "shard-00002-model-..." -> 1); nothing if it has none.
std::optional<std::int64_t> rank_of_file(std::string_view file_name);

}  // namespace tessera::checkpoint

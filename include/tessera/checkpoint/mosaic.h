#pragma once
/// \file
/// The mosaic: a self-contained HTML page that shows which rank and file holds which box of which tensor. See
/// docs/mosaic.md for how a tensor of more than two dimensions is drawn.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/checkpoint/checkpoint.h"

namespace tessera::checkpoint {

/// The first bytes of every page, which identify a file as a mosaic.
inline constexpr std::string_view kMosaicBegin = "<!doctype html>\n<!-- tessera map -->\n";

/// Returns the page as UTF-8 text. CSS, script and SVG are inline, and the page needs no network. Each tensor is a
/// picture of its boxes, coloured by rank; bars show totals per rank and per file. Pages with thousands of tensors stay
/// usable: they can be searched and collapsed, and pictures are drawn when scrolled to. Names are data in the page and
/// never markup. Deterministic. Loads the objects but no tensor data; an object that cannot be read is shown with the
/// reason.
std::string mosaic_html(const Checkpoint& checkpoint);

/// Returns the rank in a data file's name ("__3_0.distcp" -> 3, "shard-00002-model-..." -> 1), or nothing if the name
/// has none.
std::optional<std::int64_t> rank_of_file(std::string_view file_name);

}  // namespace tessera::checkpoint

#pragma once
// The fixed parts of the mosaic page. The script reads its data from the element with the id "data"; mosaic.cpp says
// what is in it.

#include <string_view>

namespace tessera::checkpoint::mosaic {

extern const std::string_view kBody;     // the elements that the script fills
extern const std::string_view kStyle;    // CSS
extern const std::string_view kModel;    // script: data, colours, how boxes become rectangles
extern const std::string_view kDrawing;  // script: pictures, the floor, bars, legend, tooltip
extern const std::string_view kBrowser;  // script: the tree of modules, search, objects; and the start

}  // namespace tessera::checkpoint::mosaic

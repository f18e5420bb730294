#pragma once
// The files in assets/mosaic, which the build embeds. mosaic.cpp assembles the page from them.

#include <string_view>

namespace tessera::checkpoint::mosaic {

extern const std::string_view kPage;     // page.html: the page, with {{placeholders}}
extern const std::string_view kStyle;    // mosaic.css
extern const std::string_view kModel;    // model.js: the data, colours, how boxes become rectangles
extern const std::string_view kDrawing;  // drawing.js: pictures, the floor, bars, legend, tooltip
extern const std::string_view kBrowser;  // browser.js: the tree of modules, search, objects; starts the page

}  // namespace tessera::checkpoint::mosaic

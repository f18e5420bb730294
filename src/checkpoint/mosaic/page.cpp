#include "checkpoint/mosaic/page.h"

namespace tessera::checkpoint::mosaic {

const std::string_view kBody = R"html(<header class="page">
  <p class="brand"><svg class="mark" viewBox="0 0 14 14" aria-hidden="true"></svg>tessera</p>
  <h1 id="title"></h1>
  <p class="kind" id="kind"></p>
  <dl class="totals" id="totals"></dl>
</header>
<main class="page">
  <section aria-labelledby="floor-title">
    <div class="head">
      <h2 id="floor-title">The whole state</h2>
      <div class="choices" id="modes" role="group" aria-label="Colour by"></div>
    </div>
    <div id="floor"></div>
    <p class="note" id="floor-note"></p>
    <ul class="legend" id="legend"></ul>
  </section>
  <div class="columns">
    <section aria-labelledby="ranks-title" id="ranks-section">
      <h2 id="ranks-title">Bytes by rank</h2>
      <div id="ranks"></div>
    </section>
    <section aria-labelledby="files-title">
      <h2 id="files-title">Bytes by file</h2>
      <div id="files"></div>
    </section>
  </div>
  <section aria-labelledby="tensors-title" id="tensors-section">
    <div class="head sticky">
      <h2 id="tensors-title">Tensors</h2>
      <input type="search" id="search" placeholder="Find by name" aria-label="Find tensors by name" autocomplete="off"
        spellcheck="false">
      <span class="note" id="found" role="status"></span>
      <span class="choices"><button type="button" id="expand">Expand</button><button type="button"
        id="collapse">Collapse</button></span>
    </div>
    <div id="tensors"></div>
  </section>
  <section aria-labelledby="objects-title" id="objects-section">
    <h2 id="objects-title">Objects</h2>
    <div id="objects"></div>
  </section>
</main>
<div id="tip" role="tooltip" hidden></div>
)html";

}  // namespace tessera::checkpoint::mosaic

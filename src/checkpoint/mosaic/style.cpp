#include "checkpoint/mosaic/page.h"

namespace tessera::checkpoint::mosaic {

const std::string_view kStyle = R"css(:root {
  color-scheme: light dark;
  --ground: #f3f0e9; --ink: #2a2722; --soft: #6d675c; --line: #ddd6c8; --card: #faf8f3; --empty: #e7e1d5;
  --serif: "Iowan Old Style", "Palatino Linotype", Palatino, "Book Antiqua", Georgia, serif;
  --sans: ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #17181b; --ink: #e8e4db; --soft: #9f998d; --line: #303136; --card: #1e1f23; --empty: #2a2b30;
  }
}
* { box-sizing: border-box; }
[hidden] { display: none !important; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.45 var(--sans); }
.page { max-width: 1200px; margin: 0 auto; padding: 0 24px; }
header.page { padding-top: 40px; }
noscript p { margin: 24px; }
h1, h2, p, dl, dd, ul, figure { margin: 0; padding: 0; }
.brand { display: flex; align-items: center; gap: 9px; font: italic 16px/1 var(--serif); color: var(--soft); }
.mark { width: 16px; height: 16px; }
h1 { margin-top: 14px; font: 400 clamp(28px, 4.4vw, 46px)/1.12 var(--serif); letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font: 400 21px/1.2 var(--serif); }
.kind { margin-top: 6px; color: var(--soft); }
.totals { display: flex; flex-wrap: wrap; gap: 14px 36px; margin-top: 26px; padding: 16px 0; border: solid var(--line); border-width: 1px 0; }
.totals div { display: flex; flex-direction: column-reverse; }
.totals dt { color: var(--soft); font-size: 13px; }
.totals dd { font: 22px/1.25 var(--serif); font-variant-numeric: tabular-nums lining-nums; }
section { margin-top: 40px; }
.head { display: flex; flex-wrap: wrap; align-items: center; gap: 10px 16px; margin-bottom: 14px; }
.head h2 { margin-right: auto; }
.columns { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 0 48px; }
.columns h2 { margin-bottom: 12px; }
.note { color: var(--soft); font-size: 13px; }
#floor { line-height: 0; background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 6px; }
#floor svg { display: block; width: 100%; }
#floor .tile { cursor: pointer; }
#floor-note { margin-top: 8px; }
.tile:hover, .tile.on { stroke: var(--ink); stroke-width: 1.5; }
.empty { fill: var(--empty); stroke: var(--soft); stroke-dasharray: 2 3; stroke-opacity: .7; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 6px; margin-top: 12px; list-style: none; }
button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
:focus-visible { outline: 2px solid #4d83b8; outline-offset: 2px; border-radius: 3px; }
.legend button { display: flex; align-items: center; gap: 7px; max-width: 260px; padding: 3px 9px 3px 5px; border-radius: 5px; font-size: 13px; }
.legend button:hover, .legend [aria-pressed=true] { background: var(--empty); }
.legend span:last-child { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.legend .note { padding: 3px 5px; }
.chip { flex: none; width: 12px; height: 12px; border-radius: 2px; }
.choices { display: inline-flex; align-items: center; gap: 2px; }
.choices button, .more { padding: 4px 10px; border-radius: 5px; font-size: 13px; color: var(--soft); }
.choices button:hover, .choices [aria-pressed=true], .more:hover { background: var(--empty); color: var(--ink); }
.bar { display: grid; grid-template-columns: minmax(56px, auto) minmax(40px, 1fr) 76px; align-items: center; gap: 12px; padding: 3px 0; font-size: 13px; }
#files .bar { grid-template-columns: minmax(0, 15em) minmax(40px, 1fr) 76px; }
.bar .label { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
#files .label { font: 12px var(--mono); }
.bar .track { height: 12px; }
.bar .track i { display: block; height: 100%; min-width: 2px; border-radius: 2px; }
.bar .value { text-align: right; color: var(--soft); font-variant-numeric: tabular-nums; white-space: nowrap; }
.sticky { position: sticky; top: 0; z-index: 1; padding: 10px 0; margin-bottom: 4px; background: var(--ground); border-bottom: 1px solid var(--line); }
#search { flex: 0 1 300px; min-width: 0; padding: 7px 11px; font: inherit; font-size: 14px; color: inherit; background: var(--card); border: 1px solid var(--line); border-radius: 6px; }
.group > button { display: flex; align-items: center; gap: 10px; width: 100%; padding: 9px 4px 8px 0; text-align: left; border-radius: 4px; }
.group > button:hover .path { text-decoration: underline; text-decoration-color: var(--soft); text-underline-offset: 3px; }
.group .turn { flex: none; width: 9px; height: 9px; fill: none; stroke: var(--soft); stroke-width: 1.5; }
.group [aria-expanded=true] .turn { transform: rotate(90deg); }
.group .path { min-width: 0; overflow-wrap: anywhere; font: 14px var(--mono); }
.group .sum { flex: none; color: var(--soft); font-size: 13px; font-variant-numeric: tabular-nums; }
.group .shares { flex: 1 1 auto; display: flex; gap: 1px; max-width: 180px; min-width: 20px; height: 7px; margin-left: auto; }
.shares i { flex: 1 1 0; min-width: 0; border-radius: 1px; }
.inside { margin-left: 4px; padding: 2px 0 8px 17px; border-left: 1px solid var(--line); }
.inside .inside .inside .inside .inside .inside { margin-left: 0; padding-left: 0 !important; border-left: 0; }
.card .name, .group .path, #tip b, #tip dd { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 5; overflow: hidden; unicode-bidi: isolate; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(184px, 1fr)); gap: 10px; }
.gallery + .group, .gallery + .more { margin-top: 6px; }
.card { min-width: 0; padding: 12px 12px 10px; background: var(--card); border-radius: 6px; }
.frame { display: flex; align-items: center; justify-content: center; height: 96px; margin-bottom: 10px; }
.frame svg { display: block; overflow: visible; }
.card figcaption { font-size: 12.5px; color: var(--soft); }
.card .name { margin-bottom: 2px; color: var(--ink); font: 12.5px/1.35 var(--mono); overflow-wrap: anywhere; }
.card .line { display: block; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.object { display: grid; grid-template-columns: minmax(0, 18em) minmax(0, 8em) minmax(0, 1fr); gap: 4px 20px; padding: 8px 0; border-top: 1px solid var(--line); font-size: 13px; }
.object > * { min-width: 0; overflow-wrap: anywhere; }
.object .name, .object .value { font: 12.5px/1.45 var(--mono); }
.object .value { max-height: 9em; overflow-y: auto; white-space: pre-wrap; }
.object .type { color: var(--soft); }
#objects { margin-top: 12px; }
#tip { position: fixed; z-index: 2; left: 0; top: 0; max-width: min(420px, calc(100vw - 16px)); padding: 9px 12px; pointer-events: none; background: var(--ink); color: var(--ground); border-radius: 5px; font-size: 12.5px; line-height: 1.4; }
#tip b { margin-bottom: 4px; font: 12.5px/1.35 var(--mono); overflow-wrap: anywhere; }
#tip dl { display: grid; grid-template-columns: auto minmax(0, 1fr); gap: 0 12px; }
#tip dt { opacity: .65; }
#tip dd { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
main.page { padding-bottom: 80px; }
@media (max-width: 720px) {
  .page { padding: 0 16px; }
  header.page { padding-top: 24px; }
  .columns { grid-template-columns: minmax(0, 1fr); }
  .totals { gap: 12px 26px; }
  .totals dd { font-size: 19px; }
  .gallery { grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 8px; }
  #files .bar { grid-template-columns: minmax(0, 9em) minmax(40px, 1fr) 76px; }
  .inside { padding-left: 9px; }
  .group .sum { font-size: 12px; }
  .group .shares { max-width: 60px; }
  #search { flex: 1 1 100%; order: 3; font-size: 16px; }
  .object { grid-template-columns: minmax(0, 1fr) auto; }
  .object .value { grid-column: 1 / -1; }
}
)css";

}  // namespace tessera::checkpoint::mosaic

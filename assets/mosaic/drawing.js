// Drawing. Text from the data is added to the page as text and never as markup.
const byId = (id) => document.getElementById(id);
function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
function svgElement(tag, attributes) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const name in attributes) made.setAttribute(name, attributes[name]);
  return made;
}
const px = (n) => Math.round(n * 100) / 100;
// Tiles of one colour differ slightly in tone. The tone is a hash of the tile's position.
const tone = (a, b) => 0.84 + 0.16 * ((Math.imul(a * 31 + b + 1, 2654435761) >>> 8) % 997) / 997;

function drawTile(svg, x, y, w, h, key, seed, data) {
  const gap = Math.min(1.2, 0.16 * Math.min(w, h));
  svg.append(svgElement('rect', {
    class: 'tile', ...data, 'data-k': key, x: px(x + gap / 2), y: px(y + gap / 2), width: px(Math.max(w - gap, 0.2)),
    height: px(Math.max(h - gap, 0.2)), rx: px(Math.min(1.5, gap)), fill: keyColour(key), 'fill-opacity': seed.toFixed(3),
  }));
}

// Draws every box that holds elements: a part of a tensor must not look like all of it. Callers that cannot afford a
// tile for each box call drawShares.
function drawBoxes(svg, t, x, y, w, h) {
  const { rect } = projection(t);
  for (let i = 0; i < t.count; ++i) {
    if (t.boxBytes(i) === 0) continue;
    const [u, v, du, dv] = rect(i);
    drawTile(svg, x + u * w, y + v * h, du * w, dv * h, keyOf(t, i), tone(t.index, i), { 'data-t': t.index, 'data-c': i });
  }
}

// Draws bands in proportion to each key's bytes, for a part with too many boxes to draw. If the bands would be too thin,
// draws a sample of the keys. Each picture has a different sample (spread by the golden ratio), so that the full floor
// keeps every key's share. Leaves empty the share of the elements without a box.
function drawShares(svg, what, x, y, w, h, index, data) {
  const total = (some) => some.reduce((sum, [, bytes]) => sum + bytes, 0);
  const held = sumsOf(what);
  const sums = evenly(held, Math.max(1, Math.floor(Math.max(w, h) / thinnestBand)), index * 0.618034 % 1);
  const all = total(sums) * Math.max(1, what.bytes / total(held));
  let at = 0;
  for (const [key, bytes] of sums) {
    const part = bytes / all;
    const [tx, ty, tw, th] = w > h ? [x + at * w, y, part * w, h] : [x, y + at * h, w, part * h];
    drawTile(svg, tx, ty, tw, th, key, tone(Math.round(x + y), key), data);
    at += part;
  }
}

function describe(t) {
  const holders = new Set();
  for (let i = 0; i < t.count; ++i) holders.add(modes[0].key(t, t.file(i)));
  holders.delete(-1);
  return `${t.name}: ${data.dtypes[t.dtype][0]} [${t.shape.join(', ')}], ${counted(t.count, 'box')}` +
    (holders.size > 0 ? ` on ${counted(holders.size, 'rank')}` : '');
}

// A picture is too small for more tiles than this.
const tilesOfPicture = 4096;
const isBanded = (t) => t.count > tilesOfPicture;
function drawPicture(frame, t) {
  const room = { width: Math.max(frame.clientWidth - 4, 40), height: frame.clientHeight };
  const [w, h] = pictureSize(t, room).map(Math.round);
  const svg = svgElement('svg', { width: w, height: h, viewBox: `0 0 ${w} ${h}`, role: 'img', 'aria-label': describe(t) });
  let covered = 0;
  for (let i = 0; i < t.count; ++i) covered += t.boxBytes(i);
  // Elements without a box, and tensors without elements, show as an empty frame.
  if (t.bytes === 0 || covered < t.bytes) {
    svg.append(svgElement('rect', { class: 'empty', x: .5, y: .5, width: w - 1, height: h - 1, rx: 2 }));
  }
  if (isBanded(t)) drawShares(svg, t, 0, 0, w, h, t.index, { 'data-t': t.index });
  else drawBoxes(svg, t, 0, 0, w, h);
  frame.replaceChildren(svg);
}

// The floor: the full state by bytes. A treemap of tensors, each tiled with its boxes, or of modules if there are too many
// tensors. `floorParts` is indexed by the tiles' data-p.
const areaOfPart = 140, thinnestBox = 2, thinnestBand = 4;
let floorParts = [];
// Returns whether each box gets a tile that can be seen. So the floor's area also limits the number of its tiles.
function fitsBoxByBox(t, w, h) {
  if (t.count > w * h / (thinnestBox * thinnestBox)) return false;
  const { rect } = projection(t);
  for (let i = 0; i < t.count; ++i) {
    if (t.boxBytes(i) === 0) continue;
    const [, , du, dv] = rect(i);
    if (du * w < thinnestBox || dv * h < thinnestBox) return t.count === 1;
  }
  return true;
}
function drawFloor() {
  const floor = byId('floor');
  const width = Math.max(floor.clientWidth - 12, 100);
  const height = Math.round(Math.min(Math.max(width * 0.34, 240), 400));
  floorParts = splitTree(Math.floor(width * height / areaOfPart));
  const items = floorParts.map((part, index) => ({ part, index, weight: part.bytes }));
  const svg = svgElement('svg', { height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-labelledby': 'floor-title' });
  let coarse = false;
  for (const { item, x, y, w, h } of treemap(items, { x: 0, y: 0, w: width, h: height })) {
    const joint = Math.min(2.4, 0.12 * Math.min(w, h));
    const place = [x + joint / 2, y + joint / 2, w - joint, h - joint];
    if (item.part instanceof Tensor && fitsBoxByBox(item.part, place[2], place[3])) {
      drawBoxes(svg, item.part, ...place);
    } else {
      coarse = true;
      drawShares(svg, item.part, ...place, item.index, { 'data-p': item.index });
    }
  }
  floor.replaceChildren(svg);
  byId('floor-note').textContent = items.length === 0 ? 'No tensor has elements.'
    : `Each tile is a box of a tensor. Area shows bytes, colour shows the ${mode.name}${mode.name === 'dtype' ? '' : ' that holds it'}.` +
      (coarse ? ' Boxes that are too small to see are drawn as bands in proportion.' : '');
}

// The key whose tiles keep their full colour while others fade; -2 for all.
let spotlit = -2;
const spotlightStyle = document.head.appendChild(element('style'));
function spotlight(key) {
  spotlightStyle.textContent = key === -2 ? '' : `.tile:not([data-k="${Number(key)}"]) { opacity: .13 }`;
}

const legendEntries = 24;
function drawLegend() {
  const legend = byId('legend');
  legend.replaceChildren();
  spotlit = -2;
  spotlight(-2);
  const keys = mode.labels.map((_, key) => key);
  if (mode !== modes[2] && tensors.some((t) => { for (let i = 0; i < t.count; ++i) if (keyOf(t, i) < 0) return true; return false; })) keys.push(-1);
  for (const key of [...evenly(keys.slice(0, -1), legendEntries - 1, 0), ...keys.slice(-1)]) {
    const button = element('button');
    button.type = 'button';
    button.setAttribute('aria-pressed', 'false');
    const chip = element('span', 'chip');
    chip.style.background = keyColour(key);
    button.append(chip, element('span', '', key < 0 ? `no ${mode.name}` : mode.labels[key]));
    button.addEventListener('pointerenter', () => spotlight(key));
    button.addEventListener('pointerleave', () => spotlight(spotlit));
    button.addEventListener('click', () => {
      spotlit = spotlit === key ? -2 : key;
      spotlight(spotlit);
      for (const other of legend.querySelectorAll('button')) other.setAttribute('aria-pressed', String(other === button && spotlit === key));
    });
    const entry = element('li');
    entry.append(button);
    legend.append(entry);
  }
  if (keys.length > legendEntries) {
    legend.append(element('li', 'note', `and ${thousands(keys.length - legendEntries)} more in between`));
  }
}

const barsAtFirst = 12;
function drawBars(into, rows) {
  into.replaceChildren();
  const longest = rows.reduce((most, row) => Math.max(most, row.bytes || 0), 1);
  const add = (some) => {
    for (const { label, bytes, fill } of some) {
      const bar = element('div', 'bar'), track = element('span', 'track'), length = element('i');
      length.style.width = `${100 * (bytes || 0) / longest}%`;
      length.style.background = fill;
      track.append(length);
      const name = element('span', 'label', label);
      name.title = label;
      bar.append(name, track, element('span', 'value', bytes === null ? 'missing' : byteText(bytes)));
      into.append(bar);
    }
  };
  add(rows.slice(0, barsAtFirst));
  if (rows.length <= barsAtFirst) return;
  const more = element('button', 'more', `Show all ${thousands(rows.length)}`);
  more.type = 'button';
  more.addEventListener('click', () => { more.remove(); add(rows.slice(barsAtFirst)); });
  into.append(more);
}

function drawAllBars() {
  const sums = new Map();
  for (const t of tensors) {
    for (let i = 0; i < t.count; ++i) {
      const key = modes[0].key(t, t.file(i));
      sums.set(key, (sums.get(key) || 0) + t.boxBytes(i));
    }
  }
  const rows = ranks.map((rank, key) => ({ label: `rank ${rank}`, bytes: sums.get(key) || 0, fill: colour(key, ranks.length) }));
  if (sums.has(-1)) rows.push({ label: 'no rank', bytes: sums.get(-1), fill: neutral });
  drawBars(byId('ranks'), rows);
  byId('ranks-section').hidden = ranks.length === 0;
  const sorted = files.map((file, index) => ({ file, index })).sort((a, b) => byName(a.file, b.file));
  drawBars(byId('files'), sorted.map(({ file, index }) => ({
    label: file.name, bytes: file.bytes,
    fill: ranks.length > 0 ? colour(rankKeyOfFile[index], ranks.length) : colour(index, files.length),
  })));
}

// The tooltip of a box, next to the pointer or next to the tile that the keyboard selects.
const tip = byId('tip');
function showTip(title, facts, near) {
  const list = element('dl');
  for (const [label, value] of facts) list.append(element('dt', '', label), element('dd', '', value));
  tip.replaceChildren(element('b', '', title), list);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = near.right + 12 + width < innerWidth ? near.right + 12 : Math.max(8, Math.min(near.left, innerWidth - width - 8));
  const top = near.bottom + 12 + height < innerHeight ? near.bottom + 12 : Math.max(8, near.top - height - 12);
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}
function showBoxTip(t, i, near) {
  const box = t.box(i), file = files[box.file];
  const facts = [['offsets', `[${box.offsets.join(', ')}]`], ['sizes', `[${box.sizes.join(', ')}]`],
    ['bytes', `${byteText(t.boxBytes(i))} of ${byteText(t.bytes)}, ${data.dtypes[t.dtype][0]}`]];
  if (file && file.rank !== null) facts.push(['rank', String(file.rank)]);
  facts.push(['file', file ? file.name : 'not recorded']);
  if (file) facts.push(['at byte', thousands(box.at)]);
  if (t.count > 1) facts.push(['box', `${thousands(i + 1)} of ${thousands(t.count)}`]);
  showTip(t.name, facts, near);
}
function showPartTip(part, key, near) {
  const share = sumsOf(part).find(([k]) => k === key);
  const isTensor = part instanceof Tensor;
  showTip(isTensor ? part.name : `${part.path}*`, [
    ['bytes', byteText(part.bytes)], ['holds', counted(part.count, isTensor ? 'box' : 'tensor')],
    [key < 0 ? `no ${mode.name}` : mode.labels[key], share ? byteText(share[1]) : ''],
  ], near);
}
// A tile is box c of tensor t, or a band of tensor t (in a picture) or of part p (in the floor) with key k.
function showTileTip({ dataset: { t, c, p, k } }, near) {
  if (c !== undefined) showBoxTip(tensors[t], Number(c), near);
  else showPartTip(t !== undefined ? tensors[t] : floorParts[p], Number(k), near);
}
const hideTip = () => { tip.hidden = true; };

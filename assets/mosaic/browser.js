// Browsing: the tree of modules, search and objects. Starts the page.
const galleryTensors = 24, openTensors = 160, batch = 120;

// Pictures are drawn, and long lists extended, when they come near the window.
const toDraw = new Map();
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    watcher.unobserve(entry.target);
    const draw = toDraw.get(entry.target);
    toDraw.delete(entry.target);
    if (draw) draw();
  }
}, { rootMargin: '400px' });
function whenSeen(target, draw) {
  toDraw.set(target, draw);
  watcher.observe(target);
}
// Forgets what was to be drawn within an element whose contents are replaced. Other lists still wait for their turn.
function forgetWithin(replaced) {
  for (const target of toDraw.keys()) {
    if (!replaced.contains(target)) continue;
    watcher.unobserve(target);
    toDraw.delete(target);
  }
}

function card(t, name) {
  const figure = element('figure', 'card'), frame = element('div', 'frame'), caption = element('figcaption');
  figure.tabIndex = 0;
  figure.dataset.tensor = t.index;
  const label = element('b', 'name', name || '(empty name)');
  label.title = t.name;
  caption.append(label, element('span', 'line', `${data.dtypes[t.dtype][0]} [${t.shape.join(', ')}]`),
    element('span', 'line', `${byteText(t.bytes)} · ${t.sharding()}`));
  if (isBanded(t)) caption.append(element('span', 'line', `bands show the share of each ${mode.name}`));
  figure.append(frame, caption);
  whenSeen(frame, () => drawPicture(frame, t));
  return figure;
}

// Appends make(item) for each item, in batches.
function appendInBatches(into, items, make, begin = 0) {
  for (const item of items.slice(begin, begin + batch)) into.append(make(item));
  if (begin + batch >= items.length) return;
  const end = element('div', 'note', '…');
  into.append(end);
  whenSeen(end, () => { end.remove(); appendInBatches(into, items, make, begin + batch); });
}

function gallery(list, prefix) {
  const made = element('div', 'gallery');
  appendInBatches(made, list, (t) => card(t, t.name.slice(prefix.length) || t.name));
  return made;
}

// Returns a thin bar with the bytes of a module by key.
function sharesBar(node) {
  const bar = element('span', 'shares');
  const sums = evenly(sumsOf(node), 48, 0.5), all = sums.reduce((sum, [, bytes]) => sum + bytes, 0);
  for (const [key, bytes] of sums) {
    const part = element('i');
    part.style.flexGrow = bytes / all;
    part.style.background = keyColour(key);
    bar.append(part);
  }
  return bar;
}

// `state.room`: number of tensors that may still be expanded initially; `state.open`: true or false to force.
function contents(node, state) {
  const made = document.createDocumentFragment();
  if (node.count <= galleryTensors) {
    made.append(gallery(tensorsWithin(node).sort(byName), node.path));
    return made;
  }
  const single = [], groups = [];
  for (let child of node.children.values()) {
    while (child.tensors.length === 0 && child.children.size === 1) child = child.children.values().next().value;
    if (child.count === 1) single.push(...tensorsWithin(child)); else groups.push(child);
  }
  const direct = [...node.tensors, ...single].sort(byName);
  if (direct.length > 0) made.append(gallery(direct, node.path));
  const rest = element('div');
  appendInBatches(rest, groups, (child) => group(child, node.path, state));
  made.append(rest);
  return made;
}

let groupNumber = 0;
function group(node, prefix, state) {
  const made = element('div', 'group'), button = element('button'), inside = element('div', 'inside');
  const turn = svgElement('svg', { class: 'turn', viewBox: '0 0 9 9', 'aria-hidden': 'true' });
  turn.append(svgElement('path', { d: 'M2.5 1 6.5 4.5 2.5 8' }));
  inside.id = `group-${++groupNumber}`;
  button.type = 'button';
  button.setAttribute('aria-controls', inside.id);
  button.append(turn, element('span', 'path', node.path.slice(prefix.length, -1)),
    element('span', 'sum', `${counted(node.count, 'tensor')} · ${byteText(node.bytes)}`), sharesBar(node));
  made.append(button, inside);
  const leaf = node.count <= galleryTensors;
  let open = state.open !== undefined ? state.open : !leaf || node.count <= state.room;
  if (open && leaf && state.open === undefined) state.room -= node.count;
  const show = () => {
    button.setAttribute('aria-expanded', String(open));
    inside.hidden = !open;
    if (open && !inside.firstChild) inside.append(contents(node, state));
  };
  button.addEventListener('click', () => { open = !open; show(); });
  show();
  return made;
}

let forced;
function drawTensors() {
  const words = byId('search').value.toLowerCase().split(/\s+/).filter(Boolean);
  const into = byId('tensors');
  forgetWithin(into);
  hideTip();
  if (words.length === 0) {
    into.replaceChildren(contents(tree, { room: openTensors, open: forced }));
    byId('found').textContent = '';
    return;
  }
  const found = tensors.filter((t) => { const name = t.name.toLowerCase(); return words.every((word) => name.includes(word)); })
    .sort(byName);
  into.replaceChildren(gallery(found, ''));
  byId('found').textContent = `${thousands(found.length)} of ${thousands(tensors.length)}`;
}

function drawObjects() {
  byId('objects-section').hidden = data.objects.length === 0;
  appendInBatches(byId('objects'), data.objects, ([name, type, repr]) => {
    const row = element('div', 'object');
    row.append(element('span', 'name', name), element('span', 'type', type), element('span', 'value', repr));
    return row;
  });
}

function drawHeader() {
  byId('title').textContent = data.name;
  byId('kind').textContent = data.version.startsWith(data.kind) ? data.version : `${data.kind} · ${data.version}`;
  const add = (value, label) => {
    const pair = element('div');
    pair.append(element('dt', '', label), element('dd', '', value));
    byId('totals').append(pair);
  };
  const plural = (n, noun) => counted(n, noun).slice(thousands(n).length + 1);
  const boxes = tensors.reduce((sum, t) => sum + t.count, 0);
  add(byteText(tensors.reduce((sum, t) => sum + t.bytes, 0)), 'of elements');
  for (const [n, noun] of [[tensors.length, 'tensor'], [boxes, 'box'], [data.objects.length, 'object'], [ranks.length, 'rank'], [files.length, 'file']]) {
    if (n > 0 || noun === 'tensor') add(thousands(n), plural(n, noun));
  }
  const mark = document.querySelector('.mark');
  for (let i = 0; i < 9; ++i) {
    mark.append(svgElement('rect', { x: 5 * (i % 3), y: 5 * Math.floor(i / 3), width: 4, height: 4, rx: .6, fill: palette[[0, 1, 0, 2, 5, 2, 0, 1, 0][i]] }));
  }
  const choices = modes.filter((one) => one.labels.length > 1 || one === mode);
  for (const one of choices.length > 1 ? choices : []) {
    const button = element('button', '', one.name);
    button.type = 'button';
    button.addEventListener('click', () => { mode = one; draw(); });
    one.button = byId('modes').appendChild(button);
  }
}

function draw() {
  for (const one of modes) if (one.button) one.button.setAttribute('aria-pressed', String(one === mode));
  drawFloor();
  drawLegend();
  drawTensors();
}

// The pointer selects any tile. The keyboard selects a card, and the arrow keys its boxes.
document.addEventListener('pointerover', (event) => {
  const tile = event.target.closest && event.target.closest('.tile');
  if (!tile) { hideTip(); return; }
  showTileTip(tile, { left: event.clientX, right: event.clientX, top: event.clientY, bottom: event.clientY });
});
document.addEventListener('pointerleave', hideTip);
addEventListener('scroll', hideTip, { passive: true });
byId('floor').addEventListener('click', (event) => {
  const tile = event.target.closest('.tile');
  if (!tile) return;
  byId('search').value = tile.dataset.t === undefined ? floorParts[tile.dataset.p].name || floorParts[tile.dataset.p].path : tensors[tile.dataset.t].name;
  drawTensors();
  byId('tensors-section').scrollIntoView();
});
function leaveTile(figure) {
  for (const tile of figure.querySelectorAll('.tile.on')) tile.classList.remove('on');
  hideTip();
}
byId('tensors').addEventListener('focusout', (event) => {
  const figure = event.target.closest('.card');
  if (figure) leaveTile(figure);
});
byId('tensors').addEventListener('keydown', (event) => {
  const figure = event.target.closest('.card');
  if (!figure) return;
  if (event.key === 'Escape') { leaveTile(figure); return; }
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const tiles = [...figure.querySelectorAll('.tile')];
  if (!step || tiles.length === 0) return;
  event.preventDefault();
  const now = tiles.findIndex((tile) => tile.classList.contains('on'));
  leaveTile(figure);
  const next = tiles[now < 0 ? (step > 0 ? 0 : tiles.length - 1) : (now + step + tiles.length) % tiles.length];
  next.classList.add('on');
  showTileTip(next, next.getBoundingClientRect());
});
let waiting;
byId('search').addEventListener('input', () => { clearTimeout(waiting); waiting = setTimeout(drawTensors, 120); });
byId('expand').addEventListener('click', () => { byId('search').value = ''; forced = true; drawTensors(); });
byId('collapse').addEventListener('click', () => { byId('search').value = ''; forced = false; drawTensors(); });
let floorWidth = 0;
new ResizeObserver(([entry]) => {
  const width = Math.round(entry.contentRect.width);
  if (width !== floorWidth) drawFloor();
  floorWidth = width;
}).observe(byId('floor'));

drawHeader();
drawAllBars();
draw();
drawObjects();

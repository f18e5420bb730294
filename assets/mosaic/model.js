// The data and pure functions on it.
const data = JSON.parse(document.getElementById('data').textContent);
const files = data.files.map(([name, bytes, rank]) => ({ name, bytes, rank }));
const product = (sizes) => sizes.reduce((a, b) => a * b, 1);

class Tensor {
  constructor([name, dtype, shape, numbers], index) {
    Object.assign(this, { name, dtype, shape, numbers, index });
    this.rank = shape.length;
    this.stride = 2 * this.rank + 2;
    this.count = numbers.length / this.stride;
    this.elementBytes = data.dtypes[dtype][1];
    this.bytes = product(shape) * this.elementBytes;
  }
  file(i) { return this.numbers[i * this.stride + 2 * this.rank]; }
  boxBytes(i) {
    let bytes = this.elementBytes;
    for (let d = 0; d < this.rank; ++d) bytes *= this.numbers[i * this.stride + this.rank + d];
    return bytes;
  }
  box(i) {
    const at = i * this.stride;
    return {
      offsets: this.numbers.slice(at, at + this.rank), sizes: this.numbers.slice(at + this.rank, at + 2 * this.rank),
      file: this.file(i), at: this.numbers[at + this.stride - 1],
    };
  }
  // Describes the sizes of the boxes: "4 × [2, 16]".
  sharding() {
    const groups = new Map();
    for (let i = 0; i < this.count && groups.size < 4; ++i) {
      const sizes = `[${this.box(i).sizes.join(', ')}]`;
      groups.set(sizes, (groups.get(sizes) || 0) + 1);
    }
    if (this.count === 1 && groups.has(`[${this.shape.join(', ')}]`)) return 'unsharded';
    if (groups.size > 2) return `${this.count} boxes`;
    return [...groups].map(([sizes, n]) => `${n} × ${sizes}`).join(' + ') || 'no boxes';
  }
}
const tensors = data.tensors.map((row, index) => new Tensor(row, index));

const thousands = (n) => n.toLocaleString('en');
function byteText(n) {
  if (n < 1024) return `${n} B`;
  const units = ['KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB'];
  let unit = -1;
  do { n /= 1024; ++unit; } while (n >= 1023.95 && unit < 5);
  return `${n.toFixed(1)} ${units[unit]}`;
}
// Returns at most `limit` of the items, spread evenly: one from each stretch, at `place` (from 0 to 1) within it.
const evenly = (items, limit, place) => items.length <= limit ? items
  : Array.from({ length: limit }, (_, i) => items[Math.min(Math.floor((i + place) * items.length / limit), items.length - 1)]);
const counted = (n, noun) => `${thousands(n)} ${noun}${n === 1 ? '' : noun.endsWith('x') ? 'es' : 's'}`;

// Colours. A mode gives each box a key, which is an index into the mode's `labels`, or -1.
const palette = ['#4479ad', '#c9663f', '#d8ab45', '#7e9150', '#8a5578', '#429a8e', '#d8938a', '#76838f',
  '#a34a38', '#87b6d6', '#c3ad7e', '#527f5e', '#9587c6', '#e0904f', '#9dc4a4', '#6069a8'];
const neutral = '#8d887e';
// With more keys than the palette has, the hue follows the order of the keys, and neighbours differ in lightness.
const colour = (key, of) => key < 0 ? neutral : of <= palette.length ? palette[key]
  : `hsl(${((208 + 310 * key / of) % 360).toFixed(1)} 44% ${[55, 47, 62][key % 3]}%)`;
const ranks = [...new Set(files.map((file) => file.rank).filter((rank) => rank !== null))].sort((a, b) => a - b);
const keyOfRank = new Map(ranks.map((rank, key) => [rank, key]));
const rankKeyOfFile = files.map((file) => file.rank === null ? -1 : keyOfRank.get(file.rank));
const modes = [
  { name: 'rank', labels: ranks.map((rank) => `rank ${rank}`), key: (t, file) => file < 0 ? -1 : rankKeyOfFile[file] },
  { name: 'file', labels: files.map((file) => file.name), key: (t, file) => file },
  { name: 'dtype', labels: data.dtypes.map(([name]) => name), key: (t) => t.dtype },
];
let mode = modes.find((one) => one.labels.length > 1) || modes[1];
const keyOf = (t, i) => mode.key(t, t.file(i));
const keyColour = (key) => colour(key, mode.labels.length);

// Returns the bytes of a tensor or a module by key, in the order of the keys.
function sumsOf(what) {
  if (what.sums && what.sums.mode === mode) return what.sums.list;
  const sums = new Map();
  const add = (key, bytes) => sums.set(key, (sums.get(key) || 0) + bytes);
  if (what instanceof Tensor) {
    for (let i = 0; i < what.count; ++i) add(keyOf(what, i), what.boxBytes(i));
  } else {
    for (const part of [...what.tensors, ...what.children.values()]) for (const [key, bytes] of sumsOf(part)) add(key, bytes);
  }
  const list = [...sums].filter(([, bytes]) => bytes > 0).sort((a, b) => a[0] - b[0]);
  what.sums = { mode, list };
  return list;
}

// The tensors as a tree of modules: names are split at dots.
const order = new Intl.Collator('en', { numeric: true }).compare;
const byName = (a, b) => order(a.name, b.name);
const deepest = 32;
const makeModule = (path) => ({ path, children: new Map(), tensors: [], count: 0, bytes: 0 });
function buildTree() {
  const root = makeModule('');
  for (const t of [...tensors].sort(byName)) {
    const parts = t.name.split('.');
    let node = root;
    for (let i = 0; ; ++i) {
      node.count += 1;
      node.bytes += t.bytes;
      if (i + 1 >= parts.length || i >= deepest) break;
      if (!node.children.has(parts[i])) node.children.set(parts[i], makeModule(`${node.path}${parts[i]}.`));
      node = node.children.get(parts[i]);
    }
    node.tensors.push(t);
  }
  return root;
}
const tree = buildTree();
function tensorsWithin(node, into = []) {
  for (const t of node.tensors) into.push(t);
  for (const child of node.children.values()) tensorsWithin(child, into);
  return into;
}

// Splits the tree into at most `limit` tensors and modules: expands the largest module as long as there is room.
function splitTree(limit) {
  const closed = [tree], parts = [];
  while (closed.length > 0) {
    const node = closed.splice(closed.reduce((most, part, i) => part.bytes > closed[most].bytes ? i : most, 0), 1)[0];
    if (parts.length + closed.length + node.tensors.length + node.children.size > limit) {
      parts.push(node);
    } else {
      parts.push(...node.tensors);
      closed.push(...node.children.values());
    }
  }
  return parts.filter((part) => part.bytes > 0).sort((a, b) => b.bytes - a.bytes);
}

// Projects a tensor onto two axes; see docs/mosaic.md. The axes show the sharded dimensions (in which some box is shorter
// than the tensor), nested if there are several on one axis. Other dimensions only lengthen an axis.
function projection(t) {
  if (t.flat) return t.flat;
  const { rank, shape, numbers, stride } = t;
  const sharded = [];
  for (let d = 0; d < rank; ++d) {
    for (let i = 0; i < t.count; ++i) {
      if (numbers[i * stride + rank + d] !== shape[d]) { sharded.push(d); break; }
    }
  }
  let down = [], across = [], split = 1;
  if (rank === 2) {
    down = [0]; across = [1];
  } else if (sharded.length === 1) {
    split = Math.max(sharded[0], 1);
    (sharded[0] === 0 && rank > 1 ? down : across).push(sharded[0]);
  } else if (sharded.length > 1) {
    split = sharded[1];
    sharded.forEach((d, i) => (i % 2 === 0 ? down : across).push(d));
  }
  if (rank < 2) split = 0;
  const axis = (dims, i) => {
    let start = 0, length = 1;
    for (const d of dims) {
      const size = shape[d] || 1;
      start += length * numbers[i * stride + d] / size;
      length *= numbers[i * stride + rank + d] / size;
    }
    return [start, length];
  };
  return t.flat = {
    height: product(shape.slice(0, split)), width: product(shape.slice(split)),
    rect(i) {
      const [y, h] = axis(down, i), [x, w] = axis(across, i);
      return [x, y, w, h];
    },
  };
}

// Returns a picture's size in pixels: the tensor's proportions, within limits. Tensors with more elements get more room.
const mostElements = tensors.reduce((most, t) => Math.max(most, product(t.shape)), 1);
function pictureSize(t, room) {
  const { width, height } = projection(t);
  const scale = 0.4 + 0.6 * Math.log2(width * height + 1) / Math.log2(mostElements + 1);
  if (t.rank === 0) return [16, 16];
  if (t.rank === 1) return [Math.max(24, room.width * scale), 16];
  if (!(width * height > 0)) return [64, 40];
  const ratio = Math.min(12, Math.max(1 / 7, width / height));
  const long = Math.min(room.width, room.height * ratio) * scale;
  return [Math.max(long, 12), Math.max(long / ratio, 12)];
}

// Squarified treemap (Bruls, Huizing, van Wijk). `items` are sorted by decreasing weight; each gets {x, y, w, h} in the
// area.
function treemap(items, area) {
  const placed = [];
  let { x, y, w, h } = area;
  let rest = items.reduce((sum, item) => sum + item.weight, 0);
  for (let begin = 0; begin < items.length && rest > 0;) {
    const side = Math.min(w, h), unit = w * h / rest;
    let sum = 0, worst = Infinity, end = begin;
    for (; end < items.length; ++end) {
      const next = sum + items[end].weight * unit, thick = next / side;
      const longest = items[begin].weight * unit / thick, shortest = items[end].weight * unit / thick;
      const ratio = Math.max(longest / thick, thick / longest, thick / shortest, shortest / thick);
      if (ratio > worst) break;
      worst = ratio;
      sum = next;
    }
    const thick = sum / side;
    let along = 0;
    for (let i = begin; i < end; ++i) {
      const length = items[i].weight * unit / thick;
      placed.push(w >= h ? { item: items[i], x, y: y + along, w: thick, h: length }
        : { item: items[i], x: x + along, y, w: length, h: thick });
      along += length;
      rest -= items[i].weight;
    }
    if (w >= h) { x += thick; w -= thick; } else { y += thick; h -= thick; }
    begin = end;
  }
  return placed;
}

#!/usr/bin/env python3
"""Opens the page of `tessera map` in a real browser and checks it: every box has its tile; pointer, keys and search work; no
script fails; no request is sent; nothing is wider than the window; hostile names stay text; thousands of tensors and of
boxes stay usable, and none is left out; and the picture has the colours of a mosaic.

    map_screenshot_test.py TESSERA CHECKPOINTS

Needs chromium. Without it the test fails if CI=true, and otherwise prints a warning and exits with 77 (skipped).
"""

import json
import os
import struct
import subprocess
import sys
import tempfile
import time
import zlib

from browser import Browser, find_browser

SIZES = [(1280, 6000), (390, 9000)]
CHECKPOINTS = ["2.6-dtensor", "2.14-hf", "1.13-sharded"]

# The contents of the page with every module open.
FACTS = """
(() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  return {
    names: all('#tensors .card .name').map((name) => name.title),
    tiles: all('#tensors .tile').length,
    floor: all('#floor .tile').length,
    objects: all('#objects .object .name').map((name) => name.textContent),
    overflow: Math.max(document.documentElement.scrollWidth - innerWidth, 0),
  };
})()
"""

# Focuses the first card with several tiles and returns the name of its tensor.
FOCUS = """
(() => {
  const card = [...document.querySelectorAll('#tensors .card')].find((one) => one.querySelectorAll('.tile').length > 1);
  if (card) card.focus();
  return card ? card.querySelector('.name').title : null;
})()
"""

# The share of the width and of the height of a picture that its tiles extend to, given the picture's selector.
EXTENT = """
((selector) => {
  const edges = (one) => { const { right, bottom } = one.getBoundingClientRect(); return [right, bottom]; };
  const svg = document.querySelector(selector), { left, top, width, height } = svg.getBoundingClientRect();
  const tiles = [...svg.querySelectorAll('.tile')].map(edges);
  return [(Math.max(...tiles.map((tile) => tile[0])) - left) / width, (Math.max(...tiles.map((tile) => tile[1])) - top) / height];
})
"""

# The targets that the page still waits for although they are no longer in it.
STALE = "[...toDraw.keys()].filter((target) => !target.isConnected).length"

TIP = "document.getElementById('tip').hidden ? null : document.getElementById('tip').innerText"
FLOOR_TILE = "(({ x, y, width, height }) => [x + width / 2, y + height / 2])(document.querySelector('#floor .tile').getBoundingClientRect())"
HOSTILE = [
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", "]]>--><svg onload=alert(3)>", "\"'`${alert(4)}&lt;",
    "a\x01\x1b[2J\x7f\r\n\tb", "\u202eback\u202c", "\u2028x\u2029", "n" * 10_000, "", ".", "a..b", "__proto__", "constructor.x",
]  # fmt: skip


def map_page(tessera, checkpoint, page):
    subprocess.run([tessera, "map", checkpoint, "-o", page], check=True, capture_output=True)


def show(browser, page, width, height, dark=False):
    browser.show(page, width, height, dark)
    browser.evaluate("document.getElementById('expand').click()")
    browser.settle()


def check_quiet(browser, page, label):
    assert not browser.problems, f"{label}: the page reports: {browser.problems}"
    strangers = [url for url in browser.requests if url != f"file://{page}" and not url.startswith("data:")]
    assert not strangers, f"{label}: the page requests {strangers}"


def volume(sizes):
    product = 1
    for size in sizes:
        product *= size
    return product


def search(browser, words):
    browser.evaluate(
        "{ const box = document.getElementById('search');"
        f"box.value = {json.dumps(words)}; box.dispatchEvent(new Event('input')); }}"
    )
    time.sleep(0.2)
    browser.settle()
    return browser.evaluate("[...document.querySelectorAll('#tensors .card .name')].map((name) => name.title)")


def check_page(browser, shown, label):
    def same(what, found, wanted):
        assert found == wanted, f"{label}: {what}: found {found}, wanted {wanted}"

    def shows(what, text, *parts):
        for part in parts:
            assert text and part in text, f"{label}: {what} shows {text!r}, wanted {part}"

    tensors = shown["tensors"]
    holding = {name: sum(volume(chunk["sizes"]) > 0 for chunk in tensor["chunks"]) for name, tensor in tensors.items()}
    facts = browser.evaluate(FACTS)
    same("cards", sorted(facts["names"]), sorted(tensors))
    same("tiles", facts["tiles"], sum(holding.values()))
    assert 0 < facts["floor"] <= sum(holding.values()), f"{label}: {facts['floor']} tiles on the floor"
    same("objects", sorted(facts["objects"]), sorted(shown["objects"]))
    same("pixels beyond the window", facts["overflow"], 0)

    same("tip at first", browser.evaluate(TIP), None)
    browser.point(*browser.evaluate(FLOOR_TILE))
    browser.settle()
    shows("the pointer", browser.evaluate(TIP), "bytes")
    browser.point(1, 1)

    name = browser.evaluate(FOCUS)
    if name is not None:
        for number in range(2):
            browser.press("ArrowRight")
            chunk = [chunk for chunk in tensors[name]["chunks"] if volume(chunk["sizes"]) > 0][number]
            shows("an arrow key", browser.evaluate(TIP), name, chunk["file"], str(chunk["offsets"]), str(chunk["sizes"]))
        browser.press("Escape")
        same("tip after Escape", browser.evaluate(TIP), None)
    found = search(browser, "WEIGHT layers.1")
    same("search", sorted(found), sorted(n for n in tensors if "weight" in n and "layers.1" in n))


def decode_png(data):
    """Returns width, height, channels and rows of a PNG as a browser writes it (8 bits, RGB or RGBA, not interlaced)."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n", "not a PNG"
    at, packed = 8, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + body) == struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0], "damaged PNG"
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlace = struct.unpack(">IIBBBBB", body)
            assert depth == 8 and colour in (2, 6) and interlace == 0, "an unsupported kind of PNG"
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    channels = 3 if colour == 2 else 4
    raw, stride = zlib.decompress(packed), width * channels
    rows, before = [], bytearray(stride)
    for y in range(height):
        method, row = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1 : (y + 1) * (stride + 1)])
        if method == 1:
            for i in range(channels, stride):
                row[i] = (row[i] + row[i - channels]) & 255
        elif method == 2:
            row = bytearray((a + b) & 255 for a, b in zip(row, before))
        elif method == 3:
            for i in range(stride):
                left = row[i - channels] if i >= channels else 0
                row[i] = (row[i] + (left + before[i]) // 2) & 255
        elif method == 4:
            for i in range(stride):
                left, corner = (row[i - channels], before[i - channels]) if i >= channels else (0, 0)
                guess = left + before[i] - corner
                a, b, c = abs(guess - left), abs(guess - before[i]), abs(guess - corner)
                row[i] = (row[i] + (left if a <= b and a <= c else before[i] if b <= c else corner)) & 255
        rows.append(bytes(row))
        before = row
    return width, height, channels, rows


def check_picture(path, size, dark, label):
    with open(path, "rb") as file:
        width, height, channels, rows = decode_png(file.read())
    assert (width, height) == size, f"{label}: found a picture of {width} x {height}, expected {size}"
    colours = {row[x : x + 3] for row in rows for x in range(0, width * channels, channels)}
    assert len(colours) > 200, f"{label}: found {len(colours)} colours, expected more than 200"
    ground = rows[5][:3]
    assert max(ground) < 60 if dark else min(ground) > 200, f"{label}: the ground is {tuple(ground)}"


def check_fixture(browser, tessera, folder, name, checkpoint):
    page, picture = f"{folder}/{name}.html", f"{folder}/{name}.png"
    map_page(tessera, checkpoint, page)
    shown = json.loads(subprocess.run([tessera, "inspect", "--json", checkpoint], check=True, capture_output=True).stdout)
    for width, height in SIZES:
        show(browser, page, width, height)
        check_page(browser, shown, f"{name} at {width}")
        check_quiet(browser, page, f"{name} at {width}")
    for dark in (False, True):
        browser.show(page, 1280, 1600, dark)
        browser.screenshot(picture)
        check_picture(picture, (1280, 1600), dark, f"{name}, {'dark' if dark else 'light'}")
    print(f"{name}: {len(shown['tensors'])} cards, a tile for every box")


def write_safetensors(path, tensors, metadata, data_bytes):
    header = json.dumps({"__metadata__": metadata, **tensors}).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + bytes(data_bytes))


def write_tensors(path, names, objects=None):
    tensors = {name: {"dtype": "U8", "shape": [2, 2], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    write_safetensors(path, tensors, {"tessera.objects": json.dumps(objects or {})}, 4 * len(names))


def write_mesh(folder, rows, columns, first_row):
    """Writes a matrix, of which each of rows * columns ranks has one element, without the rows before `first_row`."""
    os.mkdir(folder)
    tensors = {"weight": {"dtype": "U8", "shape": [1, 1], "data_offsets": [0, 1]}}
    for rank in range(first_row * columns, rows * columns):
        sharding = {"weight": {"saved_offsets": divmod(rank, columns)}}
        metadata = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)}
        write_safetensors(f"{folder}/shard-{rank + 1:05}-model-00001-of-00001.safetensors", tensors, metadata, 1)


def check_hostile_names(browser, tessera, folder):
    page, source = f"{folder}/hostile.html", f"{folder}/<b onclick=alert(5)>&amp;.safetensors"
    write_tensors(source, HOSTILE)
    map_page(tessera, source, page)
    for width, height in SIZES:
        show(browser, page, width, height)
        browser.point(*browser.evaluate(FLOOR_TILE))
        browser.settle()
        facts = browser.evaluate(FACTS)
        assert sorted(facts["names"]) == sorted(HOSTILE), f"hostile names: found {facts['names']}"
        assert facts["overflow"] == 0, f"hostile names: {facts['overflow']} pixels beyond the window"
        strangers = browser.evaluate("document.querySelectorAll('img, [onload], [onerror], [onclick]').length")
        assert strangers == 0, f"hostile names: {strangers} elements made of names"
        tallest = browser.evaluate("Math.max(...[...document.querySelectorAll('.card')].map((card) => card.offsetHeight))")
        assert tallest < 400, f"hostile names: a card {tallest} pixels high"
        assert browser.evaluate("document.querySelectorAll('script').length") == 2
        check_quiet(browser, page, "hostile names")
    print(f"hostile names: {len(HOSTILE)} stay text")


def scroll_to_end(browser, selector, wanted):
    """Scrolls, while lists grow, until there are `wanted` elements. Returns how many there are."""
    for _ in range(100):
        found = browser.evaluate(
            f"scrollTo(0, document.documentElement.scrollHeight), document.querySelectorAll({json.dumps(selector)}).length"
        )
        if found == wanted:
            break
        browser.settle()
    return found


def check_thousands(browser, tessera, folder):
    page, source, count = f"{folder}/many.html", f"{folder}/many.safetensors", 3000
    deep = ["a." * depth + "w" for depth in range(100)]
    write_tensors(source, [f"model.layers.{i // 10}.part{i % 10}.weight" for i in range(count - len(deep))] + deep)
    begin = time.monotonic()
    map_page(tessera, source, page)
    size = os.path.getsize(page)
    assert size < 1 << 20, f"{count} tensors make a page of {size} bytes"
    for width in (390, 1280):
        browser.show(page, width, 900)
        elements = browser.evaluate("document.querySelectorAll('*').length")
        assert elements < 20_000, f"{count} tensors at {width}: {elements} elements at first"
        overflow = browser.evaluate(FACTS)["overflow"]
        assert overflow == 0, f"{count} tensors at {width}: {overflow} pixels beyond the window"
        found = search(browser, "layers.123. part4")
        assert found == ["model.layers.123.part4.weight"], f"{count} tensors at {width}: search found {found}"
        check_quiet(browser, page, f"{count} tensors at {width}")
        if width == 390:
            continue
        search(browser, "weight")
        cards = scroll_to_end(browser, ".card", count - len(deep))
        assert cards == count - len(deep), f"{count} tensors at {width}: {cards} cards by the end"
    print(f"{count} tensors: {size} bytes, {time.monotonic() - begin:.1f} s in all")


def check_all_objects(browser, tessera, folder):
    """Drawing the tensors again does not end the list of the objects."""
    page, source, count = f"{folder}/objects.html", f"{folder}/objects.safetensors", 300
    write_tensors(source, [f"model.{i}.weight" for i in range(200)], {f"optim.{i}.lr": i / 8 for i in range(count)})
    map_page(tessera, source, page)
    show(browser, page, 1280, 900)
    at_first = browser.evaluate("document.querySelectorAll('.object').length")
    assert 0 < at_first < count, f"objects: found {at_first} rows at first, expected some of {count}"
    search(browser, "no such tensor")
    search(browser, "")
    stale = browser.evaluate(STALE)
    assert stale == 0, f"objects: the page waits for {stale} elements that it no longer has"
    rows = scroll_to_end(browser, ".object", count)
    assert rows == count, f"objects: found {rows} rows by the end, expected {count}"
    check_quiet(browser, page, "objects")
    print(f"objects: {count} rows after a search")


def check_many_boxes(browser, tessera, folder, rows, columns, first_row):
    """With more boxes than a picture has tiles, the treemap still has a tile for each, and the picture bands for all."""
    count, share = (rows - first_row) * columns, 1 - first_row / rows
    name = f"{count} boxes in rows {first_row} to {rows}"
    page, source = f"{folder}/mesh-{first_row}.html", f"{folder}/mesh-{first_row}"
    write_mesh(source, rows, columns, first_row)
    map_page(tessera, source, page)
    for width, height in SIZES:
        label = f"{name} at {width}"
        show(browser, page, width, height)
        tiles = browser.evaluate(FACTS)
        assert tiles["floor"] == count, f"{label}: found {tiles['floor']} tiles in the treemap, expected {count}"
        assert 1 < tiles["tiles"] < 100, f"{label}: found {tiles['tiles']} bands in the picture, expected 2 to 99"
        extent = browser.evaluate(f"{EXTENT}('#floor svg')")
        assert min(extent) > 0.98, f"{label}: the treemap's tiles extend to {extent} of it, expected 1"
        # The bands follow one another across, and elements without a box leave the rest empty.
        across, down = browser.evaluate(f"{EXTENT}('#tensors .frame svg')")
        assert abs(across - share) < 0.05 and down > 0.95, f"{label}: bands extend to {across}, {down}, expected {share}, 1"
        holes = browser.evaluate("document.querySelectorAll('#tensors .empty').length")
        assert holes == (first_row > 0), f"{label}: found {holes} dashed areas"
        caption = browser.evaluate("document.querySelector('#tensors figcaption').innerText")
        assert "bands show the share of each rank" in caption, f"{label}: the caption is {caption!r}"
        browser.evaluate(FOCUS)
        browser.press("ArrowRight")
        tip = browser.evaluate(TIP)
        for part in ("weight", f"{count:,} boxes", "rank "):
            assert tip and part in tip, f"{label}: a band's tip is {tip!r}, expected {part}"
        check_quiet(browser, page, label)
    print(f"{name}: all drawn")


def main():
    tessera, checkpoints = sys.argv[1:]
    program = find_browser()
    if program is None:
        print("!!! chromium is missing: the page of `tessera map` was NOT tested", file=sys.stderr)
        sys.exit(1 if os.environ.get("CI") == "true" else 77)
    with tempfile.TemporaryDirectory() as folder, Browser(program) as browser:
        for name in CHECKPOINTS:
            check_fixture(browser, tessera, folder, name, f"{checkpoints}/{name}/ck")
        check_hostile_names(browser, tessera, folder)
        check_thousands(browser, tessera, folder)
        check_all_objects(browser, tessera, folder)
        check_many_boxes(browser, tessera, folder, 36, 144, 0)
        check_many_boxes(browser, tessera, folder, 72, 144, 36)


if __name__ == "__main__":
    main()

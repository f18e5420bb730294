"""Writes safetensors files, the sources of rows."""

import json
import math

ELEMENT_BYTES = {"F32": 4, "BF16": 2}


def size_bytes(dtype, shapes):
    """The bytes of all elements of tensors, of which `shapes` are by name."""
    return ELEMENT_BYTES[dtype] * sum(math.prod(shape) for shape in shapes.values())


def write_safetensors(path, dtype, shapes, block):
    """Writes a file of tensors whose bytes are `block`, over and over."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + size_bytes(dtype, {name: shape})
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, offset, len(block)):
            file.write(block[: offset - begin])

"""Writes values.json beside this file: Python values, pickled by the Python and PyTorch that run this.

    python3 generate.py FOLDER

writes FOLDER/values.json: {"python", "torch", "values": [{"name", "repr", "understood", "pickles": [protocol 0's bytes in
base64, ..., protocol 5's]}]}. Of a value that isn't understood, "repr" is the text that tessera should show.
"""

import argparse
import base64
import collections
import json
import math
import pathlib
import pickle
import platform
import sys

import torch


class Keywords:
    """Pickled by NEWOBJ_EX from protocol 4 on."""

    def __new__(cls, *arguments, **keywords):
        return super().__new__(cls)

    def __getnewargs_ex__(self):
        return (1, "two"), {"three": 3}


class Elements(list):
    """Has arguments, appended items and a state."""


class Mapping(dict):
    """Has set items and a state."""


class Outer:
    class Inner:
        pass


def ints():
    yield from (0, 1, -1, 127, 128, 255, 256, -128, -129, 65535, 65536, 10**9, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1)
    yield from (2**54 - 1, 2**54, -(2**54), -(2**54) - 1)
    for size in (1, 2, 3, 4, 7, 8, 9, 16, 127, 255, 256, 300):
        for limit in (2 ** (8 * size - 1), 2 ** (8 * size)):
            yield from (limit - 1, limit, -limit, -limit - 1)


def floats():
    yield from (0.0, -0.0, 1.0, -1.5, 0.1, 1 / 3, 100.0, 123456.789, math.pi, 1e15, 9999999999999998.0, 1e16, 1.5e16, 1e22)
    yield from (1e-4, 0.00012345, 1e-5, 1.25e-7, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 2.0**53, 1e100)
    yield from (math.inf, -math.inf, math.nan)


def strings():
    yield from ("", "a", "it's", 'say "hi"', "both ' and \"", "back\\slash", "\\u0041", "\\\\u0041\\", "tab\t nl\n cr\r nul\0")
    yield from ("\x1b\x7f\x80\xa0\xad\xff", "\u0100\u0378\u200b\u2028\u3042\ufeff\uffff", "\U0001f600\U000e0001\U0010ffff")
    yield from ("\ud800", "\udfffx", "x" * 255, "x" * 256, "\u00e9" * 200)


def shared():
    inner = [1]
    key = (1, 2)
    return [inner, inner, (inner, key), {key: inner, "text": "text"}, key]


def recursive_list():
    value = [1]
    value += [value, (value,), {"me": value}, (1, 2, 3, value)]
    return value


def recursive_dict():
    value = {}
    value["me"] = value
    value["list"] = [value]
    return value


def recursive_tuple():
    value = ([],)
    value[0].append(value)
    return value


def ordered_with_fields():
    value = collections.OrderedDict([("weight", 1)])
    value._metadata = collections.OrderedDict([("", {"version": 1})])
    return value


def plain():
    yield "none", None
    yield "booleans", [True, False]
    yield "ints", list(ints())
    yield "floats", list(floats())
    yield "strings", list(strings())
    yield "bytes", [b"", b"a", bytes(range(256)), b"it's", b'"', b"both ' and \"", b"\\\t\n\r"]
    yield "bytearrays", [bytearray(), bytearray(b"a\0\xff"), bytearray(b"it's"), bytearray(b'"'), bytearray(b"'\"")]
    yield "complex", [complex(1, 2), 2j, complex(-0.0, 2), complex(1.5, -math.inf), complex(math.nan, math.nan), -0j]
    yield "tuples", [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((),), ((1,), (2,))]
    yield "long tuple", tuple(range(300))
    yield "lists", [[], [1], [[], [[]]], [None] * 3]
    yield "long list", [None] * 2001
    yield "dicts", [{}, {"a": 1}, {1: 2, None: 3, (1, "x"): [4], 1.5: {}, b"k": True, frozenset([1]): 0}]
    yield "long dict", {i: None for i in range(1001)}
    yield "sets", [set(), {1}, {"a"}, frozenset(), frozenset([(1, 2)]), frozenset([frozenset()])]
    yield "ordered dicts", [collections.OrderedDict(), collections.OrderedDict([("b", 1), ("a", [2])])]
    yield "ordered dict with fields", ordered_with_fields()
    yield "shared", shared()
    yield "recursive list", recursive_list()
    yield "recursive dict", recursive_dict()
    yield "recursive tuple", recursive_tuple()
    yield "sizes", [torch.Size([]), torch.Size([2, 3]), torch.Size([2**40])]
    yield "dtypes", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
    yield "devices", [torch.device("cpu"), torch.device("cuda", 1)]
    yield "nested", {"state": {0: {"step": 10.0, "shape": torch.Size([4]), "dtype": torch.float16}}, "lr": (1e-3, [])}


def opaque():
    yield "namespace", argparse.Namespace(a=1), None
    yield "keywords", Keywords(), "<generate.Keywords(...)>"
    elements = Elements([1, 2])
    elements.name = "x"
    yield "elements", elements, None
    mapping = Mapping(a=1)
    mapping.name = "x"
    yield "mapping", mapping, None
    yield "nested class", [Outer.Inner()], None
    yield "functions", [len, print], "[<builtins.len>, <builtins.print>]"
    yield "nested class itself", Outer.Inner, None


def pickles(value):
    return [base64.b64encode(pickle.dumps(value, protocol)).decode() for protocol in range(6)]


def main():
    # The module's name in the pickles, whatever this file is run as.
    for made in (Keywords, Elements, Mapping, Outer, Outer.Inner):
        made.__module__ = "generate"
    sys.modules["generate"] = sys.modules["__main__"]
    values = [
        {"name": name, "repr": repr(value), "understood": not name.startswith("recursive"), "pickles": pickles(value)}
        for name, value in plain()
    ]
    values += [
        {"name": name, "repr": text, "understood": False, "pickles": pickles(value)} for name, value, text in opaque()
    ]
    document = {"python": platform.python_version(), "torch": torch.__version__, "values": values}
    text = json.dumps(document, indent=1, ensure_ascii=True) + "\n"
    pathlib.Path(sys.argv[1], "values.json").write_text(text)


if __name__ == "__main__":
    main()

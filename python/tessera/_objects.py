"""Values of objects from the lossless JSON of docs/formats/objects.md."""

import collections

Opaque = collections.namedtuple("Opaque", ["type", "reason", "text"])
Opaque.__doc__ = """An object of which a part could be made by executing its pickle alone, which tessera never does.

type      the name of its type, or of the function that would make it
reason    why it is not understood
text      its parts, as far as they are understood, like a `repr`
"""
Opaque.__repr__ = lambda self: f"<opaque {self.text}>"

Named = collections.namedtuple("Named", ["type", "name"])
Named.__doc__ = """A dtype or a device of PyTorch, by name: ("torch.dtype", "torch.float32")."""
Named.__str__ = lambda self: self.name


def _device(value):
    return value["type"] + (f":{value['index']}" if "index" in value else "")


class _Decoder:
    """Makes values of the JSON. With `torch`, sizes, dtypes and devices are PyTorch's."""

    def __init__(self, torch=None):
        self._torch = torch

    def value(self, json):
        if isinstance(json, list):
            return [self.value(item) for item in json]
        if isinstance(json, dict):
            tag = json.get("__tessera__")
            if tag is None:
                return {key: self.value(item) for key, item in json.items()}
            return getattr(self, "_" + tag.replace(".", "_"))(json)
        return json

    def _items(self, json):
        return [self.value(item) for item in json["items"]]

    def _pairs(self, json):
        return [(self.value(key), self.value(item)) for key, item in json["items"]]

    def _tuple(self, json):
        return tuple(self._items(json))

    def _set(self, json):
        return set(self._items(json))

    def _frozenset(self, json):
        return frozenset(self._items(json))

    def _dict(self, json):
        return dict(self._pairs(json))

    def _OrderedDict(self, json):  # noqa: N802, a tag
        ordered = collections.OrderedDict(self._pairs(json))
        if "state" in json:
            ordered.__dict__.update(self.value(json["state"]))
        return ordered

    def _int(self, json):
        return int(json["value"], 16 if json["value"].lstrip("-").startswith("0x") else 10)

    def _float(self, json):
        import struct

        if "bits" in json:
            return struct.unpack("<d", struct.pack("<Q", json["bits"]))[0]
        return float(json["value"])

    def _complex(self, json):
        return complex(self.value(json["real"]), self.value(json["imag"]))

    def _bytes(self, json):
        import base64

        return base64.b64decode(json["base64"])

    def _bytearray(self, json):
        return bytearray(self._bytes(json))

    def _str(self, json):
        return self._bytes(json).decode("utf-8", "surrogatepass")

    def _torch_Size(self, json):  # noqa: N802, a tag
        return tuple(self._items(json)) if self._torch is None else self._torch.Size(self._items(json))

    def _dtype(self, json):
        if self._torch is None:
            return Named("torch.dtype", json["name"])
        return getattr(self._torch, json["name"].removeprefix("torch."))

    def _device(self, json):
        return Named("torch.device", _device(json)) if self._torch is None else self._torch.device(_device(json))


def value_of(text, torch=None):
    """The value of what tessera_read_object returns; see _Decoder."""
    import json

    found = json.loads(text)
    if "opaque" in found:
        return Opaque(found["type"], found["opaque"], found["repr"])
    return _Decoder(torch).value(found["value"])

"""Nested values as JSON, which has too few kinds for them. tests/state/golden_values.h reads it.

None, bool, int and str are themselves; {"float": repr}, {"bytes": Latin-1}, {"list": [...]}, {"tuple": [...]},
{"dict": [[key, value], ...]} and {"tensor": [dtype, sizes, elements]} are the others.
"""

import torch


def encode(value):
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, list):
        return {"list": [encode(v) for v in value]}
    if isinstance(value, tuple):
        return {"tuple": [encode(v) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[k, encode(v)] for k, v in value.items()]}
    if isinstance(value, torch.Tensor):
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), value.double().flatten().tolist()]}
    raise TypeError(type(value))

#!/usr/bin/env python3
"""Writes what PyTorch makes of floating-point numbers in `tensor.to(dtype)`, beside this script. Deterministic.

float32.inputs, float64.inputs  numbers that are hard to convert: special ones, those of every other type, the middles
                                between two of these, and their neighbours
expected.bin                    the results
expected.txt                    a line for each pair of types: FROM TO INPUTS OFFSET LENGTH, OFFSET and LENGTH in bytes of
                                expected.bin. INPUTS is
                                  file   the elements of FROM.inputs; expected.bin holds the results
                                  all    all 256 bit patterns; the same
                                  pages  all 65536 bit patterns; expected.bin holds the CRC-32 of each 256 results
                                  every-1021st  bit patterns 0, 1021, 2042, ...; the CRC-32 of all results
All numbers are little-endian. PyTorch's portable kernels are used: the others choose the bits of a NaN by position.
"""

import os
import pathlib
import struct
import zlib

os.environ["ATEN_CPU_CAPABILITY"] = "default"
import torch  # noqa: E402

NAMES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
TYPES = {name: getattr(torch, name) for name in NAMES}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_bytes(tensor):
    return tensor.view(torch.uint8).numpy().tobytes()


def patterns(integers, dtype):
    """The elements of `dtype` with these bits."""
    bits = 8 * dtype.itemsize
    if bits < 64:
        integers = [i - (1 << bits) if bits > 8 and i >> (bits - 1) & 1 else i for i in integers]
    return torch.tensor(integers, dtype=INTEGERS[dtype.itemsize]).view(dtype)


def finite(tensor):
    return tensor[tensor.to(torch.float64).isfinite()]


def with_middles(values):
    """Neighbouring values, what is half way between them, and what is next to that, as float64."""
    values = values.to(torch.float64).sort().values.unique()
    return values, (values[:-1] + values[1:]) / 2


def hard_inputs(dtype, count, generator):
    """`count` elements of float32 or float64: middles of the narrower types and their neighbours in `dtype`."""
    exponent_bits = {torch.float32: 8, torch.float64: 11}[dtype]
    size = 8 * dtype.itemsize
    infinity = ((1 << exponent_bits) - 1) << (size - 1 - exponent_bits)
    sign = 1 << (size - 1)
    special = [0, 1, 2, infinity - 1, infinity, infinity + 1, infinity + 12345, infinity | infinity >> 1 & ~infinity,
               sign - 1, sign - 77, 1 << (size - 1 - exponent_bits), (1 << (size - 1 - exponent_bits)) - 1]
    special += [s | sign for s in special]
    special = [s - (1 << size) if s >> (size - 1) else s for s in special]
    parts = [torch.tensor(special, dtype=INTEGERS[dtype.itemsize]).view(dtype)]
    for name in NAMES[1:]:
        target = TYPES[name]
        if target == dtype:
            continue
        if target.itemsize == 1:
            values, middles = with_middles(finite(patterns(range(256), target)))
        else:
            bits = torch.randint(0, 1 << 8 * target.itemsize, (100,), generator=generator).tolist()
            bits = [max(0, b - 1) for b in bits] + bits
            values, middles = with_middles(finite(patterns(bits, target)))
            neighbours = finite(patterns(sorted(set(bits)), target)).to(torch.float64)
            values = torch.cat([values, neighbours])
        edge = values.abs().max() * torch.tensor([1.0, 1.03, 1.0312, 1.0313, 1.04, 1.07, 1.08, 1.13, 2.0])
        middles = middles[torch.randperm(len(middles), generator=generator)[:110]]
        for part in (values[torch.randperm(len(values), generator=generator)[:40]], middles, edge):
            exact = part.to(dtype)
            parts.append(exact)
            if part is middles:
                parts.append(torch.nextafter(exact, torch.full_like(exact, float("inf"))))
                parts.append(torch.nextafter(exact, torch.full_like(exact, float("-inf"))))
    rest = count - sum(len(part) for part in parts)
    random = torch.randint(-(1 << (size - 1)), (1 << (size - 1)) - 1, (rest,), generator=generator, dtype=torch.int64)
    parts.append(random.to(INTEGERS[dtype.itemsize]).view(dtype))
    return torch.cat(parts)


def main():
    folder = pathlib.Path(__file__).resolve().parent
    generator = torch.Generator().manual_seed(20)
    expected, lines = b"", [f"# PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()} kernels"]
    sources = {}
    for name, count in (("float64", 3072), ("float32", 3072)):
        inputs = hard_inputs(TYPES[name], count, generator)
        (folder / f"{name}.inputs").write_bytes(to_bytes(inputs))
        sources[name] = [("file", inputs)]
    every = torch.arange(0, 1 << 32, 1021, dtype=torch.int64).to(torch.int32).view(torch.float32)
    sources["float32"].append(("every-1021st", every))
    for name in NAMES[2:4]:
        sources[name] = [("pages", torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(TYPES[name]))]
    for name in NAMES[4:]:
        sources[name] = [("all", patterns(range(256), TYPES[name]))]
    for source in NAMES:
        for kind, inputs in sources[source]:
            for target in NAMES:
                if target == source:
                    continue
                result = to_bytes(inputs.to(TYPES[target]))
                if kind == "pages":
                    page = len(result) // 256
                    result = b"".join(struct.pack("<I", zlib.crc32(result[i:i + page]))
                                      for i in range(0, len(result), page))
                elif kind.startswith("every"):
                    result = struct.pack("<I", zlib.crc32(result))
                lines.append(f"{source} {target} {kind} {len(expected)} {len(result)}")
                expected += result
    (folder / "expected.bin").write_bytes(expected)
    (folder / "expected.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""Writes a safetensors file of float32 tensors of normal random numbers: make_safetensors.py PATH BYTES TENSOR_BYTES"""

import array
import json
import random
import sys


def main() -> None:
    path, total, each = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    count = total // each
    header = {f"tensor_{i:05}": {"dtype": "F32", "shape": [each // 4], "data_offsets": [i * each, (i + 1) * each]} for i in range(count)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = random.Random(7)
    block = array.array("f", (numbers.gauss(0, 0.02) for _ in range(each // 4))).tobytes()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(count):
            file.write(block)


main()

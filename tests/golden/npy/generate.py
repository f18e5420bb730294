"""Writes what numpy.save writes, with NumPy 1.24.2: generate.py FOLDER"""

import sys
from pathlib import Path

import numpy as np

ARRAYS = {
    "float32": np.array([[0, 1.5, -2], [3, 4, 5]], dtype="<f4"),
    "scalar": np.array(7, dtype="<i8"),
    "bool": np.array([True, False, True]),
    "complex64": np.array([[1 + 2j]], dtype="<c8"),
    "empty": np.zeros((0, 3), dtype="<f2"),
    "uint8": np.arange(3, dtype="u1"),
}

for name, array in ARRAYS.items():
    np.save(Path(sys.argv[1]) / f"{name}.npy", array)

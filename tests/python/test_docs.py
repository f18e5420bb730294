"""Runs the code of docs/python.md, in a folder that has the checkpoint `step-1000`."""

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import shutil
import tempfile
import unittest
import warnings

TOP = pathlib.Path(__file__).resolve().parents[2]
PAGE = TOP / "docs" / "python.md"


class Page(unittest.TestCase):
    def test_its_code_runs(self):
        before = os.getcwd()
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PyTorch's, of one process without a group
            shutil.copytree(TOP / "tests/golden/demo/ck", pathlib.Path(folder) / "step-1000")
            os.chdir(folder)
            try:
                self.run_blocks()
            finally:
                os.chdir(before)

    def run_blocks(self):
        names = {}
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
            needed = re.match(r"# needs (\w+)\n", block)
            if needed and importlib.util.find_spec(needed[1]) is None:
                continue
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block, str(PAGE), "exec"), names)


if __name__ == "__main__":
    unittest.main()

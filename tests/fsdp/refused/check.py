#!/usr/bin/env python3
"""Compiles programs.cpp as another source is compiled, and compares the errors with the comments in it.

  check.py COMPILE_COMMANDS SOURCE
"""
import json
import pathlib
import re
import shlex
import subprocess
import sys

# What clang adds after an error in a base class.
CONSEQUENCE = "only virtual member functions can be marked 'override'"

programs = pathlib.Path(__file__).with_name("programs.cpp")
entries = json.loads(pathlib.Path(sys.argv[1]).read_text())
entry = next(entry for entry in entries if entry["file"] == sys.argv[2])
words = shlex.split(entry["command"])
words = words[: words.index("-o")] + ["-fsyntax-only", str(programs)]
run = subprocess.run(words, cwd=entry["directory"], capture_output=True, text=True)

found = [error for error in re.findall(r"error: (.*)", run.stderr) if error != CONSEQUENCE]
missing = re.findall(r"// error: (.*)", programs.read_text())
for error in list(found):
    expected = next((text for text in missing if text in error), None)
    if expected is not None:
        found.remove(error)
        missing.remove(expected)
for error in found:
    print("not expected:", error)
for text in missing:
    print("expected, not found:", text)
if found or missing or run.returncode == 0:
    print(run.stderr)
    sys.exit(1)

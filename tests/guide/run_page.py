#!/usr/bin/env python3
"""Runs a page of the guide: run_page.py PAGE SOURCE_DIR BIN_DIR [PROGRAM].

All of it runs in a new directory, which holds a copy of tests/golden/demo/ck named `checkpoint` and a link `build/bin`:
  1. PROGRAM, the page's C++, once for each number in `<!-- ranks: N ... -->`;
  2. blocks fenced with ```sh, which must succeed;
  3. blocks fenced with ```console: each `$ command` must have exit status 0, or N if it ends in `# exit status N`. The
     lines shown after it must be in its output, in this order; `…` stands for any text, and several blanks for one.
Blocks fenced with ```python are only compiled. A heading that is a message in backquotes must be a message of the
source code.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

LIMIT_SECONDS = 300


class Failure(Exception):
    pass


def run(command, directory, environment):
    done = subprocess.run(command, cwd=directory, env=environment, timeout=LIMIT_SECONDS, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    return done.returncode, done.stdout


def pattern(line):
    parts = [r"\s+".join(map(re.escape, part.split())) for part in line.split("…")]
    return re.compile(r"\s*" + r".*".join(rf"\s*{part}\s*" if part else "" for part in parts) + r"\s*")


def check_output(command, expected, output):
    found = iter(output.splitlines())
    for line in filter(str.strip, expected):
        if not any(pattern(line).fullmatch(each) for each in found):
            raise Failure(f"$ {command}\nexpected the line '{line}' in:\n{output}")


def run_console(block, directory, environment):
    steps = []
    for line in block.splitlines():
        if line.startswith("$ "):
            steps.append((line[2:], []))
        else:
            steps[-1][1].append(line)
    for command, expected in steps:
        wanted = re.search(r"# exit status (\d+)$", command)
        status, output = run(["bash", "-c", command], directory, environment)
        if status != int(wanted[1] if wanted else 0):
            raise Failure(f"$ {command}\nexit status {status}:\n{output}")
        check_output(command, expected, output)


def messages_in(source):
    """The string literals of the source code, adjacent ones joined."""
    literal = r'"(?:[^"\\\n]|\\.)*"'
    joined = []
    for root in ("src", "include"):
        for path in sorted((source / root).rglob("*")):
            if path.suffix not in (".h", ".cpp"):
                continue
            for found in re.finditer(rf"{literal}(?:\s+{literal})*", path.read_text(encoding="utf-8")):
                joined.append("".join(each[1:-1] for each in re.findall(literal, found[0])))
    return joined


def check_headings(text, source):
    headings = re.findall(r"^### `(.*)`$", text, re.M)
    if not headings:
        return
    known = messages_in(source)
    unknown = []
    for heading in headings:
        wanted = re.compile(".*".join(map(re.escape, heading.split("…"))))
        if not any(wanted.search(message) for message in known):
            unknown.append(heading)
    if unknown:
        raise Failure("not a message of the source code:\n" + "\n".join(unknown))


def main():
    page, source, binaries = map(pathlib.Path, sys.argv[1:4])
    text = page.read_text(encoding="utf-8")
    check_headings(text, source)
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
        compile(code, str(page), "exec")
    environment = dict(os.environ, PATH=f"{binaries}:{os.environ['PATH']}", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        shutil.copytree(source / "tests/golden/demo/ck", directory / "checkpoint")
        (directory / "build").mkdir()
        (directory / "build/bin").symlink_to(binaries)
        if len(sys.argv) > 4:
            ranks = re.search(r"^<!-- ranks: ([\d ]+) -->$", text, re.M)
            for count in ranks[1].split() if ranks else ["2"]:
                status, output = run(["tessera", "run", "-n", count, "--", sys.argv[4]], directory, environment)
                if status != 0:
                    raise Failure(f"the C++ of {page.name} on {count} ranks: exit status {status}:\n{output}")
        for kind, block in re.findall(r"^```(sh|console)\n(.*?)^```$", text, re.M | re.S):
            if kind == "console":
                run_console(block, directory, environment)
                continue
            status, output = run(["bash", "-e", "-c", block], directory, environment)
            if status != 0:
                raise Failure(f"{block}\nexit status {status}:\n{output}")


try:
    main()
except Failure as failure:
    sys.exit(f"{sys.argv[1]}: {failure}")

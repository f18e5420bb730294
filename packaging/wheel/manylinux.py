#!/usr/bin/env python3
"""Whether ELF files run on every Linux with glibc 2.28 and later, which is what the tag manylinux_2_28 of a wheel promises.

    manylinux.py FILE...      FILEs may need each other, and are where they are in the wheel

Prints each symbol and library that such a Linux may lack. Exit status 1 if there is any.
"""

import os
import pathlib
import re
import sys

from elf import Elf

# PEP 600 and the policy of manylinux_2_28: what each system has, and the newest versions of their symbols. libstdc++.so.6 belongs to it as
# well, but is older there than the compiler here: the wheel has what it needs of it.
LIBRARIES = {
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
    "libgcc_s.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}
NEWEST = {"GLIBC": (2, 28), "GCC": (7, 0, 0)}
# Symbols that are in these libraries with glibc 2.28 and in libc.so.6 from 2.34 on. A file that is linked with the newer one does not need
# the library, although it has the symbol in the old version as well.
LIBRARY_OF = {
    r"pthread_|sem_": "libpthread.so.0",
    r"dl(open|sym|vsym|close|error|addr|info)$": "libdl.so.2",
    r"timer_|mq_|aio_|lio_|shm_": "librt.so.1",
}


def newest(family):
    return f"{family}_{'.'.join(map(str, NEWEST[family]))}"


def version_problem(version):
    """Why a system may lack a version of symbols, or None."""
    family, _, numbers = version.partition("_")
    if family not in NEWEST or not re.fullmatch(r"\d+(\.\d+)*", numbers):
        return f"expected one of {', '.join(newest(known) for known in NEWEST)} or older"
    if tuple(map(int, numbers.split("."))) > NEWEST[family]:
        return f"expected {newest(family)} or older"
    return None


def _is_found(file, library):
    """Whether the loader finds a library of the wheel."""
    folders = [path.replace("$ORIGIN", os.fspath(file.path.parent)) for path in file.search_paths]
    return any((pathlib.Path(folder) / library).exists() for folder in folders)


def problems(paths):
    """A line for each reason for which the files at `paths` may fail on a system."""
    files = [Elf(path) for path in paths]
    bundled = {file.path.name: file for file in files}
    found = []
    for file in files:
        name = file.path.name
        if file.machine != files[0].machine:
            found.append(f"{name}: is for {file.machine}, expected {files[0].machine} as {files[0].path.name}")
        for path in file.search_paths:
            if path.split("/")[0] != "$ORIGIN":
                found.append(f"{name}: looks for libraries in '{path}', expected folders relative to $ORIGIN")
        strange = [library for library in file.needed if library not in LIBRARIES and library not in bundled]
        found += [f"{name}: needs {library}, expected it in the wheel or no need of it" for library in strange]
        defined = set()
        for library in set(file.needed) & set(bundled):
            defined |= {symbol.name for symbol in bundled[library].symbols if symbol.defined}
            if not _is_found(file, library):
                found.append(f"{name}: does not find {library} in {file.search_paths}")
        for symbol in sorted(file.symbols, key=str):
            if symbol.defined or symbol.library in strange:
                continue
            if symbol.version is not None:
                problem = _symbol_problem(file, symbol)
            elif symbol.weak or symbol.name in defined or strange:
                continue
            else:
                problem = "expected a library of the wheel that has it"
            if problem is not None:
                origin = "" if symbol.library is None else f" of {symbol.library}"
                found.append(f"{name}: needs the symbol {symbol}{origin}, {problem}")
    return found


def _symbol_problem(file, symbol):
    problem = version_problem(symbol.version)
    if problem is not None:
        return problem
    for pattern, library in LIBRARY_OF.items():
        if re.match(pattern, symbol.name) and library not in file.needed:
            return f"expected that it needs {library}, which may have it with glibc 2.28"
    return None


def main():
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    found = problems(sys.argv[1:])
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""What an ELF file of 64 bits needs of other libraries, and copies of libraries under another name.

    elf.py LIBRARY COPY      copies LIBRARY to COPY, whose file name it is given as its name (DT_SONAME)
"""

import dataclasses
import pathlib
import struct
import sys

PT_LOAD, PT_DYNAMIC = 1, 2
SHT_DYNSYM = 11
DT_NEEDED, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SONAME, DT_RPATH, DT_RUNPATH = 1, 5, 6, 10, 14, 15, 29
DT_VERSYM, DT_VERNEED, DT_VERNEEDNUM = 0x6FFFFFF0, 0x6FFFFFFE, 0x6FFFFFFF
STB_WEAK = 2
MACHINES = {62: "x86_64", 183: "aarch64"}


class Malformed(ValueError):
    """A file that is no ELF file of the kinds that are read here."""


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A symbol of the dynamic table. An undefined one with a version has the name of the library from which it is."""

    name: str
    defined: bool
    weak: bool
    version: str | None = None
    library: str | None = None

    def __str__(self):
        return self.name if self.version is None else f"{self.name}@{self.version}"


class Elf:
    """The dynamic section of an ELF file: `machine`, `soname`, `needed`, `search_paths` and `symbols`."""

    def __init__(self, path):
        self.path = pathlib.Path(path)
        self._bytes = self.path.read_bytes()
        try:
            self._read()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise Malformed(f"{self.path}: not a complete ELF file: {error}") from error

    def _read(self):
        if self._bytes[:6] != b"\x7fELF\x02\x01":
            raise Malformed(f"{self.path}: begins with {self._bytes[:6]!r}, expected an ELF file of 64 bits, little-endian")
        (machine,) = self._numbers("H", 18)
        self.machine = MACHINES.get(machine, f"machine {machine}")
        segments = self._table(*self._numbers("Q", 32), *self._numbers("HH", 54), "IIQQQQQQ")
        self._loads = [(s[3], s[2], s[5]) for s in segments if s[0] == PT_LOAD]
        entries = []
        for segment in segments:
            if segment[0] == PT_DYNAMIC:
                for at in range(segment[2], segment[2] + segment[5], 16):
                    entries.append(self._numbers("QQ", at))
        if not entries:
            raise Malformed(f"{self.path}: has no dynamic section, expected one")
        self._dynamic = dict(reversed(entries))
        self._strings = self._offset(self._dynamic[DT_STRTAB])
        self.needed = [self._text(value) for tag, value in entries if tag == DT_NEEDED]
        self.soname = self._text(self._dynamic[DT_SONAME]) if DT_SONAME in self._dynamic else None
        self.search_paths = [
            path for tag, value in entries if tag in (DT_RPATH, DT_RUNPATH) for path in self._text(value).split(":")
        ]
        self.symbols = self._read_symbols()

    def _numbers(self, kinds, at):
        return struct.unpack_from("<" + kinds, self._bytes, at)

    def _table(self, at, size, count, kinds):
        return [self._numbers(kinds, at + i * size) for i in range(count)]

    def _offset(self, address):
        for begin, offset, size in self._loads:
            if begin <= address < begin + size:
                return address - begin + offset
        raise Malformed(f"{self.path}: address {address:#x} is in no segment of the file")

    def _text(self, offset):
        begin = self._strings + offset
        return self._bytes[begin : self._bytes.index(b"\0", begin)].decode()

    def _versions(self):
        """By number: the version and the library."""
        found = {}
        if DT_VERNEED not in self._dynamic:
            return found
        at = self._offset(self._dynamic[DT_VERNEED])
        for _ in range(self._dynamic[DT_VERNEEDNUM]):
            _, count, library, first, next_library = self._numbers("HHIII", at)
            version_at = at + first
            for _ in range(count):
                _, _, number, name, next_version = self._numbers("IHHII", version_at)
                found[number] = (self._text(name), self._text(library))
                version_at += next_version
            at += next_library
        return found

    def _read_symbols(self):
        count = 0
        for section in self._table(*self._numbers("Q", 40), *self._numbers("HH", 58), "IIQQQQIIQQ"):
            if section[1] == SHT_DYNSYM:
                count = section[5] // 24
        versions = self._versions()
        table, numbers = self._offset(self._dynamic[DT_SYMTAB]), self._dynamic.get(DT_VERSYM)
        found = []
        for i in range(1, count):
            name, info, _, section, _, _ = self._numbers("IBBHQQ", table + 24 * i)
            number = self._numbers("H", self._offset(numbers) + 2 * i)[0] & 0x7FFF if numbers is not None else 0
            version, library = versions.get(number, (None, None)) if section == 0 else (None, None)
            found.append(Symbol(self._text(name), section != 0, info >> 4 == STB_WEAK, version, library))
        return found

    def with_soname(self, name):
        """The bytes of the file with another name of the library, which is at most as long."""
        if self.soname is None or len(name) > len(self.soname):
            raise Malformed(f"{self.path}: the library's name is {self.soname}, expected one at least as long as {name}")
        begin = self._strings + self._dynamic[DT_SONAME]
        size = len(self.soname)
        return self._bytes[:begin] + name.encode().ljust(size, b"\0") + self._bytes[begin + size :]


def main():
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    copy = pathlib.Path(sys.argv[2])
    data = Elf(sys.argv[1]).with_soname(copy.name)
    if not copy.exists() or copy.read_bytes() != data:  # what is linked with it is not linked again
        copy.write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())

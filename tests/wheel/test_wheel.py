"""The writer of wheels, and the check of what their files need. COMPILER makes small libraries; LIBRARY is one of a plain build."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest
import zipfile

import elf
import manylinux
import wheel


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)


class WheelTest(Folder):
    def write(self, name="wheels", version="1.2"):
        folder = self.folder / name
        folder.mkdir()
        built = wheel.Wheel(folder, "thing", version, "py3-none-any")
        built.add("thing/__init__.py", b"answer = 42\n")
        built.add("thing/bin/thing", b"\x7fELF", executable=True)
        built.add_script("thing", b"#!python\nprint(42)\n")
        built.add_licence("LICENSE", b"free")
        built.finish(metadata=[("Summary", "A thing")], description="It has an answer.\n")
        return built.path

    def test_an_archive_has_what_its_record_lists(self):
        path = self.write()
        self.assertEqual(path.name, "thing-1.2-py3-none-any.whl")
        self.assertEqual([found.name for found in path.parent.iterdir()], [path.name])
        with zipfile.ZipFile(path) as archive:
            record = archive.read("thing-1.2.dist-info/RECORD").decode().splitlines()
            self.assertEqual([line.split(",")[0] for line in record], archive.namelist())
            # printf 'answer = 42\n' | openssl dgst -sha256 -binary | basenc --base64url
            self.assertEqual(record[0], "thing/__init__.py,sha256=CndQInRPZMNShj8WXy4SWJhBmZm8V8gyBHcgNtDvay4,12")
            self.assertEqual(record[-1], "thing-1.2.dist-info/RECORD,,")
            self.assertEqual(
                archive.read("thing-1.2.dist-info/METADATA").decode(),
                "Metadata-Version: 2.4\nName: thing\nVersion: 1.2\nSummary: A thing\nLicense-File: LICENSE\n\nIt has an answer.\n",
            )
            self.assertIn(b"\nTag: py3-none-any\n", archive.read("thing-1.2.dist-info/WHEEL"))

    def test_the_same_contents_give_the_same_bytes(self):
        self.assertEqual(self.write("a").read_bytes(), self.write("b").read_bytes())

    def test_unpacked_files_are_where_an_installer_has_them(self):
        wheel.unpack(self.write(), self.folder / "there")
        there = self.folder / "there"
        self.assertEqual((there / "lib/thing/__init__.py").read_bytes(), b"answer = 42\n")
        self.assertEqual((there / "bin/thing").read_bytes(), b"#!/usr/bin/env python3\nprint(42)\n")
        for name, executable in [("bin/thing", True), ("lib/thing/bin/thing", True), ("lib/thing/__init__.py", False)]:
            self.assertEqual(os.access(there / name, os.X_OK), executable, name)

    def test_damage_is_found(self):
        path = self.write()
        copy = self.folder / path.name
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(copy, "w") as target:
            for info in source.infolist():
                data = source.read(info)
                target.writestr(info, data.replace(b"42", b"43") if info.filename == "thing/__init__.py" else data)
        with self.assertRaisesRegex(ValueError, r"thing/__init__.py is not as RECORD has it"):
            wheel.unpack(copy, self.folder / "there")

    def test_names_that_leave_the_folder_or_occur_twice_are_refused(self):
        built = wheel.Wheel(self.folder, "thing", "1", "py3-none-any")
        built.add("a", b"")
        for name in ("a", "", "/etc/x", "../x", "a/../x", "a//x", "./x"):
            with self.assertRaisesRegex(ValueError, f"add '{name}' to a wheel"):
                built.add(name, b"")
        with self.assertRaisesRegex(ValueError, "expected one line"):
            built.finish(metadata=[("Summary", "two\nlines")], description="")
        self.assertEqual(list(self.folder.iterdir()), [])


class ElfTest(Folder):
    def library(self, name, source, *options, soname=None, versions=None, folder="."):
        """Compiles a library that needs no other than those of `options`."""
        path = self.folder / folder / name
        path.parent.mkdir(exist_ok=True)
        options = [f"-Wl,-soname,{soname or name}", *map(str, options)]
        if versions is not None:
            (self.folder / "versions").write_text(versions)
            options.append(f"-Wl,--version-script={self.folder / 'versions'}")
        command = [os.environ["COMPILER"], "-x", "c", "-", "-x", "none", "-shared", "-fPIC", "-nostdlib", "-o", path, *options]
        subprocess.run(command, input=source, text=True, check=True)
        return path

    def needs(self, symbol, version, library="libc.so.6"):
        """A library that needs a symbol of a version of a system's library."""
        system = self.library(
            "system.so", f"void {symbol}() {{}}", soname=library, versions=f"{version} {{ global: {symbol}; local: *; }};", folder=version
        )
        return self.library(f"needs-{version}.so", f"void {symbol}(); void f() {{ {symbol}(); }}", system)

    def test_a_newer_symbol_is_named_with_its_library(self):
        self.assertEqual(manylinux.problems([self.needs("f228", "GLIBC_2.28")]), [])
        self.assertEqual(manylinux.problems([self.needs("f2", "GLIBC_2.2.5")]), [])
        for version in ("GLIBC_2.29", "GLIBC_3.0", "GLIBC_PRIVATE", "GLIBC_ABI_DT_RELR", "GLIBCXX_3.4"):
            found = manylinux.problems([self.needs("f229", version)])
            self.assertEqual(len(found), 1)
            self.assertIn(f"needs-{version}.so: needs the symbol f229@{version} of libc.so.6, expected", found[0])
        found = manylinux.problems([self.needs("_Unwind_new", "GCC_12.0.0", "libgcc_s.so.1")])
        self.assertRegex(found[0], "_Unwind_new@GCC_12.0.0 of libgcc_s.so.1, expected GCC_7.0.0 or older")

    def test_a_library_that_systems_lack_is_named_once(self):
        found = manylinux.problems([self.needs("XML_Parse", "EXPAT_1", "libexpat.so.1")])
        self.assertEqual(found, ["needs-EXPAT_1.so: needs libexpat.so.1, expected it in the wheel or no need of it"])

    def test_threads_are_in_a_library_of_their_own(self):
        found = manylinux.problems([self.needs("pthread_once", "GLIBC_2.2.5")])
        self.assertRegex(found[0], "pthread_once@GLIBC_2.2.5 of libc.so.6, expected that it needs libpthread.so.0")
        self.assertEqual(manylinux.problems([self.needs("pthread_once", "GLIBC_2.2.6", "libpthread.so.0")]), [])

    def test_libraries_of_the_wheel_are_found_from_where_they_are(self):
        other = self.library("libother.so", "void g() {}")
        source = "void g(); void f() { g(); }"
        self.assertEqual(manylinux.problems([self.library("a.so", source, other, "-Wl,-rpath,$ORIGIN"), other]), [])
        below = self.library("b.so", source, other, "-Wl,-rpath,$ORIGIN/..", folder="bin")
        self.assertEqual(manylinux.problems([below, other]), [])
        for path, text in [
            ("$ORIGIN/..", "does not find libother.so"),
            (self.folder, "looks for libraries in '/.*', expected folders relative to \\$ORIGIN"),
            ("$ORIGIN:", "looks for libraries in '', expected"),  # the folder that a program is started in
            (".", "looks for libraries in '.', expected"),
        ]:
            user = self.library("c.so", source, other, f"-Wl,-rpath,{path}")
            self.assertRegex("\n".join(manylinux.problems([user, other])), f"c.so: {text}")
        self.assertEqual(len(manylinux.problems([self.library("d.so", source, "-Wl,-rpath,$ORIGIN"), other])), 1)

    def test_a_symbol_that_no_library_has_is_named(self):
        strong = self.library("strong.so", "void g(); void f() { g(); }")
        self.assertEqual(
            manylinux.problems([strong]), ["strong.so: needs the symbol g, expected a library of the wheel that has it"]
        )
        weak = self.library("weak.so", "void g() __attribute__((weak)); void f() { g(); }")
        self.assertEqual(manylinux.problems([weak]), [])

    def test_the_library_of_a_plain_build_is_refused(self):
        found = manylinux.problems([os.environ["LIBRARY"]])
        self.assertRegex("\n".join(found), r"libtessera.so\S*: needs libstdc\+\+.so.6, expected it in the wheel")

    def test_a_copy_has_the_name_that_programs_need(self):
        long = self.library("liblong.so.2", "void g() {}")
        copy = self.folder / "lib-t.so"
        copy.write_bytes(elf.Elf(long).with_soname(copy.name))
        user = elf.Elf(self.library("user.so", "void g(); void f() { g(); }", copy))
        self.assertEqual((elf.Elf(copy).soname, user.needed), ("lib-t.so", ["lib-t.so"]))
        with self.assertRaisesRegex(elf.Malformed, "the library's name is liblong.so.2, expected one at least as long as"):
            elf.Elf(long).with_soname("libmuchlonger.so.2")

    def test_files_that_are_no_elf_files_are_refused(self):
        data = self.library("good.so", "void g() {}").read_bytes()
        path = self.folder / "bad.so"
        for size in (*range(0, 1000, 7), *range(1000, len(data), 499)):
            path.write_bytes(data[:size])
            with self.assertRaisesRegex(elf.Malformed, "bad.so: "):
                elf.Elf(path)
        path.write_bytes(b"#!/bin/sh\n" * 10)
        with self.assertRaisesRegex(elf.Malformed, "expected an ELF file of 64 bits"):
            elf.Elf(path)


if __name__ == "__main__":
    unittest.main()

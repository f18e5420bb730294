"""Wrong use of the package is an exception with its text, and never a crash or a hang. And what describes the package: types, texts."""

import copy
import ctypes
import functools
import inspect
import os
import pickle
import pydoc
import shutil
import subprocess
import sys
import threading
import typing
import unittest
import warnings

import tessera
import tessera.typing
from test_tessera import GOLDEN, HALF, NAME, SHARDED, Folder, write_safetensors

WIDE = "model.layers.11.scale"  # float64, 2 x 7


def in_fork(call):
    """Whether `call` returns True in a process that is forked here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, if there are threads
        pid = os.fork()
    if pid == 0:
        good = False
        try:
            good = call() is True
        finally:
            os._exit(0 if good else 1)
    return os.waitpid(pid, 0)[1] == 0


@functools.cache  # a view does not keep its format
def bytes_of(form):
    return form.encode()


def view_of(memory, form, itemsize, shape, strides):
    """A memoryview of a bytearray with any format and strides, as other packages have them. Strides are in bytes."""
    numbers = ctypes.c_ssize_t * len(shape)
    sizes, steps = numbers(*shape), numbers(*strides)
    buffer = tessera._memory._Buffer(
        buf=ctypes.addressof(ctypes.c_char.from_buffer(memory)),
        len=len(memory),
        itemsize=itemsize,
        ndim=len(shape),
        format=bytes_of(form),
        shape=ctypes.addressof(sizes),
        strides=ctypes.addressof(steps),
    )
    make = ctypes.pythonapi.PyMemoryView_FromBuffer
    make.restype = ctypes.py_object
    return make(ctypes.byref(buffer))


def array_of(memory, form, itemsize, shape):
    """Such a view of row-major elements."""
    strides = [itemsize]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return view_of(memory, form, itemsize, shape, strides)


class WrongUse(Folder):
    def setUp(self):
        super().setUp()
        self.checkpoint = tessera.open(SHARDED)
        self.addCleanup(self.checkpoint.close)

    def test_arguments_of_wrong_types_are_named(self):
        there = self.folder / "x.pt"
        for options, text in [
            ({"select": 5}, "select is 5, expected a list of globs"),
            ({"exclude": [NAME, 5]}, "exclude[1] is 5 of type int, expected a str"),
            ({"select": ["a\0b"]}, "select[0] is 'a\\x00b', expected text without a zero byte"),
            ({"select": "a\0b"}, "select is 'a\\x00b', expected text without a zero byte"),
            ({"select": ["\ud800"]}, "select[0] is '\\ud800', expected text without surrogates"),
            ({"to": 7}, "to is 7 of type int, expected a str"),
            ({"dtype": "\ud800"}, "dtype is '\\ud800', expected text without surrogates"),
            ({"jobs": 1.5}, "jobs is 1.5, expected an integer from 0 to 2^63 - 1"),
            ({"jobs": True}, "jobs is True, expected an integer from 0 to 2^63 - 1"),
            ({"jobs": "2"}, "jobs is '2', expected an integer from 0 to 2^63 - 1"),
            ({"max_shard_bytes": None}, "max_shard_bytes is None, expected an integer from 0 to 2^63 - 1"),
        ]:
            self.expect(tessera.InvalidArgumentError, text, tessera.convert, SHARDED, there, **options)
        for options, text in [
            ({"dim": "x"}, "dim is 'x', expected a dimension"),
            ({"dim": False}, "dim is False, expected a dimension"),
            ({"ranks": 2.0}, "ranks is 2.0, expected an integer from 0 to 2^63 - 1"),
            ({"ranks": True}, "ranks is True, expected an integer from 0 to 2^63 - 1"),
        ]:
            self.expect(tessera.InvalidArgumentError, text, tessera.reshard, SHARDED, there, **{"ranks": 2, **options})
        self.expect(tessera.InvalidArgumentError, "does not end in .safetensors, .pt", tessera.convert, SHARDED, b"x")
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_numbers_that_c_lacks_are_refused_and_not_truncated(self):
        there = self.folder / "x"
        for options in ({"jobs": (1 << 64) + 1}, {"max_shard_bytes": 1 << 64}, {"ranks": (1 << 64) + 2}, {"dim": 1 << 64}):
            (name, value), *_ = options.items()
            self.expect(tessera.InvalidArgumentError, f"{name} is {value}", tessera.reshard, SHARDED, there, **{"ranks": 2, **options})

    def test_an_empty_list_may_exclude_nothing_but_not_select_nothing(self):
        for call in (
            lambda **selection: tessera.convert(SHARDED, self.folder / "x.pt", **selection),
            lambda **selection: tessera.reshard(SHARDED, self.folder / "x", 2, **selection),
            lambda **selection: tessera.diff(SHARDED, SHARDED, **selection),
        ):
            for select in ([], (), iter([])):
                text = "select is an empty list, expected globs, or None for all names"
                self.expect(tessera.InvalidArgumentError, text, call, select=select)
            self.assertEqual(call(exclude=[]).tensors, len(self.checkpoint))

    def test_any_integer_is_a_number(self):
        class Two:
            def __index__(self):
                return 2

        tessera.reshard(SHARDED, self.folder / "x", Two(), jobs=Two())
        with tessera.open(self.folder / "x") as resharded:
            self.assertEqual(len(resharded.files), 2)

    def test_a_released_buffer_is_refused(self):
        out = memoryview(bytearray(156))
        out.release()
        self.expect(tessera.InvalidArgumentError, "out is of type memoryview", self.checkpoint.read, NAME, out=out)

    def test_an_array_of_a_dtype_without_a_format_is_of_that_dtype(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("there is no NumPy")
        dates = numpy.zeros((3, 13), "M8[s]")
        self.expect(tessera.InvalidArgumentError, "has memory of dtype 'datetime64[s]'", self.checkpoint.read, NAME, out=dates)
        self.expect(tessera.InvalidArgumentError, "out has shape [13, 3]", self.checkpoint.read, NAME, out=dates.T)
        for dtype, shown in (">M8[s]", ">M8[s]"), ([("a", "O"), ("b", "M8[s]")], "[('a', 'O'), ('b', '<M8[s]')]"):
            text = f"out has dtype {shown!r}, expected that of int32 in native byte order, or void of 4 bytes"
            self.expect(tessera.InvalidArgumentError, text, self.checkpoint.read, NAME, out=numpy.empty((3, 13), dtype))

    def test_memory_of_another_format_is_refused_and_not_touched(self):
        swapped = ">" if sys.byteorder == "little" else "<"
        for name, dtype, shape, itemsize, forms in [
            (NAME, "int32", (3, 13), 4, [f"{swapped}i", f"{swapped}l", "u", "4s", "2h", "T{i:x:}"]),
            (WIDE, "float64", (2, 7), 8, ["O", "P", f"{swapped}d", "8s", "T{d:x:}"]),
            (WIDE, "float64", (2, 7), 16, ["g", "16x", "Zg"]),
            (HALF, "bfloat16", (5, 8), 2, [f"{swapped}e", "2s"]),
        ]:
            for form in forms:
                memory = bytearray(itemsize * shape[0] * shape[1])
                of_dtype = self.checkpoint[name].size_bytes // (shape[0] * shape[1])
                text = f"out has format '{form}', expected that of {dtype} in native byte order, or void of {of_dtype} bytes"
                out = array_of(memory, form, itemsize, shape)
                self.expect(tessera.InvalidArgumentError, text, self.checkpoint.read, name, out=out)
                self.assertEqual(memory, bytearray(len(memory)))

    def test_memory_of_a_native_format_or_void_is_filled(self):
        native = "<" if sys.byteorder == "little" else ">"
        for golden, name, itemsize, forms in [
            ("2.6-sharded", NAME, 4, ["i", "@i", "=i", f"{native}i", f"{native}l", "4x"]),
            ("2.6-sharded", "model.layers.1.weight", 8, ["q", "l", "n", f"{native}q", "8x"]),
            ("2.6-sharded", "model.layers.9.bias", 8, ["Q", "L", "N", "8x"]),
            ("2.6-sharded", "model.layers.12.bias", 2, ["e", "2x"]),
            ("2.6-sharded", "model.layers.2.weight", 1, ["?", "x", "1x"]),
            ("2.6-sharded", WIDE, 8, ["d", "8x"]),
            ("2.6-sharded", HALF, 2, ["2x"]),
            ("2.6-dtensor", "model.layers.4.scale", 8, ["Zf", "F", "8x"]),
            ("2.6-dtensor", "model.layers.22.bias", 16, ["Zd", "D", "16x"]),
        ]:
            with tessera.open(GOLDEN / "checkpoints" / golden / "ck") as checkpoint:
                expected = bytearray(checkpoint[name].size_bytes)
                checkpoint.read(name, out=expected)
                for form in forms:
                    memory = bytearray(len(expected))
                    checkpoint.read(name, out=array_of(memory, form, itemsize, checkpoint[name].shape))
                    self.assertEqual(memory, expected, form)

    def test_memory_that_elements_share_is_refused_and_not_touched(self):
        for strides in ((0, 4), (52, 0), (4, 4), (48, 4), (4, 8)):
            memory = bytearray(156)
            text = f"out has shape [3, 13] and strides {[stride // 4 for stride in strides]} in elements, expected separate memory for each element"
            out = view_of(memory, "i", 4, (3, 13), strides)
            self.expect(tessera.InvalidArgumentError, text, self.checkpoint.read, NAME, out=out)
            self.assertEqual(memory, bytearray(156))
        memory, row = bytearray(52), bytearray(self.checkpoint.read(NAME, 2))
        self.checkpoint.read(NAME, slice(2, 3), view_of(memory, "i", 4, (1, 13), (0, 4)))
        self.assertEqual(memory, row)
        memory = bytearray(156)
        self.checkpoint.read(NAME, out=view_of(memory, "i", 4, (3, 13), (4, 12)))
        self.assertEqual(memory[8::12] + memory[9::12], row[::4] + row[1::4])

    def test_memory_cannot_be_resized_while_it_is_filled(self):
        out = bytearray(156)
        self.expect(BufferError, "", self.checkpoint.read, NAME, out=out, progress=lambda done, total: out.extend(b"x"))
        out.extend(b"x")

    def test_progress_cannot_close_the_checkpoint_that_it_shows(self):
        self.expect(
            tessera.InvalidArgumentError,
            "this thread is in a call of it, expected close() after the call",
            self.checkpoint.read,
            NAME,
            progress=lambda done, total: self.checkpoint.close(),
        )
        self.assertEqual(self.checkpoint.read(NAME).nbytes, 156)

    def test_a_checkpoint_is_not_copied(self):
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            self.expect(TypeError, "cannot be pickled: pass its path", make, self.checkpoint)

    def test_a_forked_process_uses_threads_of_its_own(self):
        def work():
            seen = []
            self.checkpoint.read(NAME, progress=lambda done, total: seen.append(done))
            return bool(tessera.verify(SHARDED)) and bool(seen)

        self.assertTrue(work())
        self.assertTrue(in_fork(work))
        self.assertTrue(work())

    def test_a_forked_process_does_not_wait_for_threads_that_it_lacks(self):
        reads, forked = threading.Event(), threading.Event()

        def progress(done, total):
            reads.set()
            forked.wait(30)

        thread = threading.Thread(target=self.checkpoint.read, args=(NAME,), kwargs={"progress": progress})
        thread.start()
        self.assertTrue(reads.wait(30))
        try:
            self.assertTrue(in_fork(lambda: self.checkpoint.close() is None))
        finally:
            forked.set()
            thread.join()
        self.assertEqual(self.checkpoint.read(NAME).nbytes, 156)

    def test_the_interpreter_exits_while_a_thread_works(self):
        write_safetensors(self.folder / "big.safetensors", 1 << 28)
        for call in ("tessera.convert(sys.argv[1], sys.argv[2], progress=show)", "tessera.open(sys.argv[1]).read('x', progress=show)"):
            program = (
                "import sys, tessera, threading\n"
                "working = threading.Event()\n"
                "def show(done, total): working.set()\n"
                f"threading.Thread(target=lambda: {call}, daemon=True).start()\n"
                "assert working.wait(60)\n"
            )
            arguments = [sys.executable, "-c", program, self.folder / "big.safetensors", self.folder / "big.pt"]
            result = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
            self.assertEqual((result.returncode, result.stderr), (0, ""))


class Command(Folder):
    """`python -m tessera`, of a package that has no command itself."""

    def run_module(self, *arguments, path):
        module = self.folder / "__main__.py"
        shutil.copyfile(os.path.join(os.path.dirname(tessera.__file__), "__main__.py"), module)
        environment = {**os.environ, "PATH": os.fspath(path)}
        return subprocess.run([sys.executable, module, *arguments], env=environment, capture_output=True, text=True)

    def test_it_is_the_installed_command(self):
        command = self.folder / "bin" / "somewhere" / "tessera"
        command.parent.mkdir(parents=True)
        command.write_text('#!/bin/sh\necho "$@"\nexit 7\n')
        command.chmod(0o755)
        result = self.run_module("verify", "a b", path=command.parent)
        self.assertEqual((result.returncode, result.stdout, result.stderr), (7, "verify a b\n", ""))

    def test_a_missing_command_is_named(self):
        result = self.run_module("--version", path=self.folder)
        self.assertEqual(result.returncode, 3)
        self.assertRegex(result.stderr, r"^tessera: the command is neither at /.*/bin/tessera nor installed, expected one of")


class Description(unittest.TestCase):
    def functions(self):
        for name in tessera.__all__:
            value = getattr(tessera, name)
            members = vars(value).values() if inspect.isclass(value) else [value]
            yield from (member for member in members if inspect.isfunction(member))

    def test_every_annotation_is_a_type(self):
        found = 0
        for function in self.functions():
            found += len(typing.get_type_hints(function, localns=vars(tessera.typing)))
        self.assertGreater(found, 60)

    def test_every_argument_of_a_function_has_a_type(self):
        for name in ("convert", "diff", "inspect", "open", "reshard", "verify"):
            function = getattr(tessera, name)
            self.assertEqual(set(function.__annotations__), {*inspect.signature(function).parameters, "return"}, name)

    def test_help_describes_every_argument_and_attribute(self):
        text = pydoc.render_doc(tessera, renderer=pydoc.plaintext)
        self.assertIn("with tessera.open(", text)
        for name in ("convert", "diff", "open", "verify"):
            function = getattr(tessera, name)
            self.assertIn(function.__doc__.splitlines()[0], text)
            for parameter in inspect.signature(function).parameters.values():
                if parameter.kind is parameter.KEYWORD_ONLY:
                    self.assertRegex(function.__doc__, rf"\b{parameter.name}\b", name)
        for name in ("Checkpoint", "Tensor", "VerifyReport", "DiffReport", "ConvertReport"):
            kind = getattr(tessera, name)
            for attribute in kind.__annotations__:
                self.assertRegex(kind.__doc__, rf"\b{attribute}\b", name)


if __name__ == "__main__":
    unittest.main()

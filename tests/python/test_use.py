"""Wrong use of the package is an exception with its text, and never a crash or a hang. And what describes the package: types, texts."""

import copy
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
from test_tessera import NAME, SHARDED, Folder, write_safetensors


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


class WrongUse(Folder):
    def setUp(self):
        super().setUp()
        self.checkpoint = tessera.open(SHARDED)
        self.addCleanup(self.checkpoint.close)

    def test_arguments_of_wrong_types_are_named(self):
        there = self.folder / "x.pt"
        for options, text in [
            ({"select": 5}, "select is 5, expected a list of globs"),
            ({"exclude": [NAME, 5]}, "5 is of type int, expected text"),
            ({"select": ["a\0b"]}, "has a zero byte"),
            ({"select": ["\ud800"]}, "has a surrogate, which is no character"),
            ({"to": 7}, "7 is of type int, expected text"),
            ({"dtype": "\ud800"}, "has a surrogate"),
            ({"jobs": 1.5}, "jobs is 1.5, expected a number of at least 0"),
            ({"jobs": "2"}, "jobs is '2', expected a number"),
            ({"max_shard_bytes": None}, "max_shard_bytes is None, expected a number"),
        ]:
            self.expect(tessera.InvalidArgumentError, text, tessera.convert, SHARDED, there, **options)
        for options, text in [({"dim": "x"}, "dim is 'x', expected a dimension"), ({"ranks": 2.0}, "ranks is 2.0, expected a number")]:
            self.expect(tessera.InvalidArgumentError, text, tessera.reshard, SHARDED, there, **{"ranks": 2, **options})
        self.expect(tessera.InvalidArgumentError, "does not end in .safetensors, .pt", tessera.convert, SHARDED, b"x")
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_numbers_that_c_lacks_are_refused_and_not_truncated(self):
        there = self.folder / "x"
        for options in ({"jobs": (1 << 64) + 1}, {"max_shard_bytes": 1 << 64}, {"ranks": (1 << 64) + 2}, {"dim": 1 << 64}):
            (name, value), *_ = options.items()
            self.expect(tessera.InvalidArgumentError, f"{name} is {value}", tessera.reshard, SHARDED, there, **{"ranks": 2, **options})

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
        self.assertRegex(result.stderr, r"^tessera: the command is neither at /.*/bin/tessera nor installed")


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

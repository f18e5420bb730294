"""The package tessera, on checkpoints that PyTorch wrote."""

import array
import ctypes
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import zlib
from unittest import mock

import tessera

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
CHECKPOINTS = sorted(folder.name for folder in (GOLDEN / "checkpoints").iterdir() if (folder / "manifest.json").exists())
SHARDED = GOLDEN / "checkpoints" / "2.6-sharded" / "ck"
NAME = "model.layers.0.bias"  # int32, 3 x 13
HALF = "model.layers.13.scale"  # bfloat16, 5 x 8


def manifest(name):
    return json.loads((GOLDEN / "checkpoints" / name / "manifest.json").read_text())


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def expect(self, error, text, call, *arguments, **options):
        with self.assertRaises(error) as caught:
            call(*arguments, **options)
        self.assertIn(text, str(caught.exception))


class Checkpoints(Folder):
    def test_every_tensor_has_the_bytes_that_pytorch_saved(self):
        for name in CHECKPOINTS:
            expected = manifest(name)["tensors"]
            with self.subTest(name), tessera.open(GOLDEN / "checkpoints" / name / "ck") as checkpoint:
                self.assertEqual(set(checkpoint), set(expected))
                for tensor in checkpoint.values():
                    self.assertEqual((tensor.dtype, list(tensor.shape)), (expected[tensor.name]["dtype"], expected[tensor.name]["shape"]))
                    self.assertEqual(zlib.crc32(bytes(tensor.read())), expected[tensor.name]["crc32"], tensor.name)
                    out = bytearray(tensor.size_bytes)
                    self.assertIs(checkpoint.read(tensor.name, out=out), out)
                    self.assertEqual(zlib.crc32(out), expected[tensor.name]["crc32"])

    def test_every_object_has_its_value(self):
        for name in CHECKPOINTS:
            plain = manifest(name).get("plain", {})
            with self.subTest(name), tessera.open(GOLDEN / "checkpoints" / name / "ck") as checkpoint:
                for object_name, value in checkpoint.objects.items():
                    if object_name in plain and "torch" not in plain[object_name]:
                        self.assertEqual(repr(value), plain[object_name])

    def test_chunks_say_where_the_elements_are(self):
        with tessera.open(SHARDED) as checkpoint:
            for tensor in checkpoint.values():
                count = 0
                for chunk in tensor.chunks:
                    elements = 1
                    for size in chunk.sizes:
                        elements *= size
                    count += elements
                    self.assertIn(chunk.file, checkpoint.files)
                    self.assertLessEqual(
                        chunk.offset_bytes + chunk.length_bytes, os.path.getsize(SHARDED / chunk.file)
                    )
                expected = 1
                for size in tensor.shape:
                    expected *= size
                self.assertEqual(count, expected)

    def test_inspect_is_plain_values(self):
        found = tessera.inspect(SHARDED)
        self.assertEqual(json.loads(json.dumps(found["tensors"]))[NAME]["shape"], [3, 13])
        self.assertEqual(found["total_bytes"], sum(tensor["bytes"] for tensor in found["tensors"].values()))

    def test_bytes_are_not_truncated_to_an_int(self):
        memory = ctypes.create_string_buffer(b"abc")
        for size in (0, 3, 1 << 62):  # of which the last has 0 in its lower half, and is more than there is memory
            calls = {"bytes_data": ctypes.addressof(memory), "bytes_size": size, "bytes_free": None}
            calls = {name: mock.Mock(return_value=result) for name, result in calls.items()}
            with mock.patch.multiple(tessera._library.functions, **calls):
                if size <= 3:
                    self.assertEqual(tessera._library.take(None), b"abc"[:size])
                else:
                    self.assertRaises((MemoryError, OverflowError), tessera._library.take, None)
            calls["bytes_free"].assert_called_once()

    def test_it_is_a_mapping_that_says_what_it_is(self):
        checkpoint = tessera.open(str(SHARDED))
        self.assertIn(NAME, checkpoint)
        self.assertNotIn("nope", checkpoint)
        with self.assertRaises(KeyError):
            checkpoint["nope"]
        self.assertEqual(repr(checkpoint[NAME]), f"<tessera.Tensor '{NAME}': int32 [3, 13]>")
        self.assertIn("dcp", repr(checkpoint))
        checkpoint.close()
        self.assertTrue(repr(checkpoint).startswith("<closed"))

    def test_open_errors_name_the_path(self):
        self.expect(tessera.NotFoundError, "/nowhere/at-all", tessera.open, "/nowhere/at-all")
        self.expect(tessera.InvalidArgumentError, "the path 'a\\x00b' has a zero byte, expected none", tessera.open, "a\0b")
        with self.assertRaises(LookupError):
            tessera.open(self.folder)

    def test_a_missing_object_is_named(self):
        with tessera.open(GOLDEN / "checkpoints" / "2.14-optim" / "ck") as checkpoint:
            text = f"has no object 'nope', expected one of its {len(checkpoint.objects)} names"
            for read in (checkpoint.objects.value, checkpoint.objects.archive):
                self.expect(tessera.NotFoundError, text, read, "nope")
            with self.assertRaises(KeyError):
                checkpoint.objects["nope"]
            self.assertIsNone(checkpoint.objects.get("nope"))

    def test_a_closed_checkpoint_is_refused(self):
        with tessera.open(GOLDEN / "checkpoints" / "2.14-optim" / "ck") as checkpoint:
            tensor = next(iter(checkpoint.values()))
            objects = list(checkpoint.objects)
        for call in (
            tensor.read,
            lambda: tensor.chunks,
            lambda: checkpoint.objects[objects[0]],
            lambda: checkpoint.read(tensor.name),
        ):
            self.expect(tessera.InvalidArgumentError, "is closed, expected an open one", call)
        self.expect(
            tessera.InvalidArgumentError, "is closed", tessera.convert, checkpoint, self.folder / "x", to="safetensors"
        )
        checkpoint.close()
        self.assertIn(objects[0], checkpoint.objects)  # names are looked up, values are not read
        self.assertNotIn("nope", checkpoint.objects)

    def test_close_waits_for_the_calls_of_other_threads(self):
        checkpoint = tessera.open(SHARDED)
        failures = []

        def read():
            try:
                while True:
                    checkpoint.read(NAME)
            except tessera.InvalidArgumentError as error:
                if "is closed" not in str(error):
                    failures.append(error)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        checkpoint.close()
        for thread in threads:
            thread.join(10)
            self.assertFalse(thread.is_alive())
        self.assertEqual(failures, [])


class Reads(Folder):
    def setUp(self):
        super().setUp()
        self.checkpoint = tessera.open(SHARDED)
        self.addCleanup(self.checkpoint.close)
        self.full = memoryview(bytes(self.checkpoint.read(NAME))).cast("i", shape=[3, 13])

    def test_a_new_memoryview_has_format_and_shape(self):
        view = self.checkpoint.read(NAME)
        self.assertEqual((view.format, view.shape), ("i", (3, 13)))
        self.assertEqual(self.checkpoint.read(HALF).nbytes, 80)

    def test_boxes_are_slices_and_indices(self):
        for box, expected in [
            ((slice(1, 3), slice(5, 7)), [[self.full[r, c] for c in (5, 6)] for r in (1, 2)]),
            (slice(2, None), [[self.full[2, c] for c in range(13)]]),
            ((1,), [self.full[1, c] for c in range(13)]),
            (-1, [self.full[2, c] for c in range(13)]),
            ((slice(None), 12), [self.full[r, 12] for r in range(3)]),
            ((slice(-2, -1), slice(0, 1)), [[self.full[1, 0]]]),
        ]:
            with self.subTest(box):
                self.assertEqual(self.checkpoint.read(NAME, box).tolist(), expected)
        self.assertEqual(self.checkpoint.read(NAME, (2, 3)).tolist(), self.full[2, 3])
        self.assertEqual(self.checkpoint.read(NAME, slice(5, 5)).nbytes, 0)

    def test_wrong_boxes_are_named(self):
        for box, text in [
            ((slice(0, 3, 2),), "step 2 in dimension 0, expected 1"),
            ((0, 13), "index 13 in dimension 1, expected -13 to 12"),
            ((0, 0, 0), "has 3 dimensions, expected at most 2"),
            ("rows", "'rows' in dimension 0, expected a slice or an index"),
            (True, "True in dimension 0, expected a slice or an index"),
            ((0, False), "False in dimension 1, expected a slice or an index"),
            (slice("a"), "slice(None, 'a', None) in dimension 0, expected integers and step 1"),
            (slice(0, 3, 0), "slice(0, 3, 0) in dimension 0, expected integers and step 1"),
        ]:
            self.expect(tessera.InvalidArgumentError, text, self.checkpoint.read, NAME, box)
        with tessera.open(GOLDEN / "checkpoints" / "2.6-dtensor" / "ck") as checkpoint:
            text = "index 0 in dimension 0, expected a slice, since it has no elements"
            self.expect(tessera.InvalidArgumentError, text, checkpoint.read, "model.layers.19.scale", 0)
        text = f"has no tensor 'nope', expected one of its {len(self.checkpoint)} names"
        self.expect(tessera.NotFoundError, text, self.checkpoint.read, "nope")

    def test_out_is_any_writable_buffer(self):
        flat = array.array("i", [0] * 39)
        self.assertIs(self.checkpoint.read(NAME, out=memoryview(flat).cast("B")).obj, flat)
        self.assertEqual(flat.tolist(), [x for row in self.full.tolist() for x in row])
        rows = array.array("i", [7] * 26)
        view = memoryview(rows).cast("B").cast("i", shape=[2, 13])
        self.checkpoint.read(NAME, slice(0, 2), view)
        self.assertEqual(view.tolist(), self.full.tolist()[:2])
        column = array.array("i", [7] * 6)
        self.checkpoint.read(NAME, (slice(None), 4), memoryview(column)[::2])  # strided
        self.assertEqual(column.tolist(), [self.full[0, 4], 7, self.full[1, 4], 7, self.full[2, 4], 7])

    def test_wrong_memory_is_named_and_not_touched(self):
        for out, error, text in [
            (bytes(156), tessera.InvalidArgumentError, "out is read-only"),
            ([0] * 39, tessera.InvalidArgumentError, "out is of type list, expected a writable buffer"),
            (bytearray(155), tessera.InvalidArgumentError, "out has 155 bytes, expected 156"),
            (array.array("i", [5] * 39), tessera.InvalidArgumentError, "out has shape [39], expected [3, 13]"),
            (
                memoryview(array.array("q", [5] * 39)).cast("B").cast("q", shape=[3, 13]),
                tessera.InvalidArgumentError,
                "has dtype int32, expected int64",
            ),
            (memoryview(bytearray(156)).cast("i", shape=[13, 3]), tessera.InvalidArgumentError, "expected [3, 13]"),
        ]:
            before = bytes(memoryview(out).cast("B")) if not isinstance(out, list) else None
            self.expect(error, text, self.checkpoint.read, NAME, out=out)
            if before is not None:
                self.assertEqual(bytes(memoryview(out).cast("B")), before)
        reverse = memoryview(array.array("i", [5] * 13))[::-1]
        self.expect(tessera.InvalidArgumentError, "not negative", self.checkpoint.read, NAME, 0, reverse)

    def test_floats_are_cast_if_asked(self):
        out = memoryview(bytearray(160)).cast("f", shape=[5, 8])
        self.expect(tessera.InvalidArgumentError, "has dtype bfloat16, expected float32", self.checkpoint.read, HALF, out=out)
        self.checkpoint.read(HALF, out=out, cast=True)
        stored = struct.unpack("<40H", bytes(self.checkpoint.read(HALF)))
        self.assertEqual(bytes(out), struct.pack("<40I", *(half << 16 for half in stored)))

    def test_numpy_and_torch_are_optional(self):
        for library, read in (("numpy", self.checkpoint[NAME].numpy), ("torch", self.checkpoint[NAME].torch)):
            try:
                __import__(library)
            except ImportError:
                self.expect(tessera.UnsupportedError, f"{library}() needs", read)
            else:
                self.assertEqual(read((slice(1, 3),)).tolist(), self.full.tolist()[1:3])

    def test_threads_read_at_once(self):
        failures = []

        def read():
            for _ in range(200):
                if self.checkpoint.read(NAME).tolist() != self.full.tolist():
                    failures.append("differs")

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def test_a_forked_process_reads_on(self):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if self.checkpoint.read(NAME).tolist() == self.full.tolist() else 1)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)


class Operations(Folder):
    def test_convert_reshard_diff_and_verify_agree(self):
        for name in CHECKPOINTS:
            source = GOLDEN / "checkpoints" / name / "ck"
            with self.subTest(name):
                report = tessera.verify(source)
                self.assertTrue(report.good and report)
                self.assertEqual(report.tensors, len(manifest(name)["tensors"]))
                converted, resharded = self.folder / f"{name}.pt", self.folder / name
                self.assertEqual(tessera.convert(source, converted).tensors, report.tensors)
                tessera.reshard(source, resharded, 3)
                for other in (converted, resharded):
                    self.assertTrue(tessera.diff(source, other).same)
                again = self.folder / f"{name}-again"
                tessera.reshard(converted, again, like=resharded)
                with tessera.open(again) as a, tessera.open(resharded) as b:
                    for tensor in a:
                        self.assertEqual([c.offsets for c in a[tensor].chunks], [c.offsets for c in b[tensor].chunks])

    def test_differences_are_listed(self):
        tessera.convert(SHARDED, self.folder / "a.safetensors", select=["model.layers.1?.*"], dtype="bfloat16")
        report = tessera.diff(SHARDED, self.folder / "a.safetensors")
        self.assertFalse(report)
        self.assertEqual({d["kind"] for d in report.differences} & {"only_in_a", "dtype"}, {"only_in_a", "dtype"})

    def test_damage_is_a_report(self):
        copy = self.folder / "copy"
        shutil.copytree(SHARDED, copy)
        with open(copy / "__0_0.distcp", "r+b") as file:
            file.truncate(1000)
        report = tessera.verify(copy)
        self.assertFalse(report)
        self.assertEqual(report.problems[0]["file"], "__0_0.distcp")
        with tessera.open(copy) as checkpoint:
            with self.assertRaises(tessera.CorruptError):
                for tensor in checkpoint.values():
                    tensor.read()

    def test_what_is_read_with_gaps_is_compared_too(self):
        header = json.dumps({"w": {"dtype": "F32", "shape": [4, 32768], "data_offsets": [0, 4 * 131072]}}).encode()
        header += b" " * (-len(header) % 8)
        source, path = self.folder / "a.safetensors", self.folder / "b.safetensors"
        source.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<f", 1) * (4 * 32768))
        tessera.convert(source, path)  # with checksums
        column = (slice(None), 7)
        with tessera.open(path) as checkpoint:
            self.assertEqual(checkpoint.read("w", column).tolist(), [1] * 4)
            chunk = checkpoint["w"].chunks[0]
        with open(path, "r+b") as file:
            file.seek(chunk.offset_bytes + 131072 + 7 * 4)
            file.write(b"\x55")
        with tessera.open(path) as checkpoint:
            self.expect(tessera.CorruptError, "as in the sidecar", checkpoint.read, "w", column)
            self.assertEqual(checkpoint.read("w", (0, 7)).tolist(), 1)
        with tessera.open(path, checksums=False) as checkpoint:
            self.assertNotEqual(checkpoint.read("w", column).tolist(), [1] * 4)

    def test_a_file_that_is_one_block_is_compared_where_control_c_can_end_it(self):
        path = self.folder / "a.safetensors"
        write_safetensors(path, 4 << 20)
        tessera.convert(path, self.folder / "b.safetensors")  # with blocks of 128 KiB
        facts = {"bytes": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}"}

        def read(name):
            with tessera.open(self.folder / name) as checkpoint:
                return bytes(checkpoint.read("x", slice(5, 9)))

        in_thread = mock.patch.object(tessera._library, "run", wraps=tessera._library.run)
        with mock.patch.object(tessera._checkpoint, "_LARGE_READ_BYTES", 1 << 20), in_thread as run:
            for name in ("a.safetensors", "b.safetensors"):
                self.assertEqual(read(name), bytes(4))
            run.assert_not_called()
            sidecar = self.folder / "a.safetensors.tessera.json"
            sidecar.write_text(json.dumps({"version": 1, "files": {"a.safetensors": facts}}))
            self.assertEqual(read("a.safetensors"), bytes(4))
            run.assert_called_once()
            sidecar.write_text(json.dumps({"version": 1, "files": {"a.safetensors": {**facts, "crc32": "00000000"}}}))
            self.expect(tessera.CorruptError, "as in the sidecar", read, "a.safetensors")

    def test_wrong_arguments_are_named_and_nothing_is_left(self):
        self.expect(tessera.InvalidArgumentError, "expected a format", tessera.convert, SHARDED, self.folder / "x")
        for options, text in [
            ({"to": "gguf"}, "the format is 'gguf', expected dcp, safetensors, torch or torch_checkpointing"),
            ({"dtype": "bf17"}, "the dtype is 'bf17'"),
            ({"select": ["modle.*"]}, "no name matches 'modle.*'"),
            ({"exclude": ["*"]}, "leave nothing"),
            ({"jobs": -1}, "jobs is -1, expected an integer from 0 to 2^63 - 1"),
            ({"progress": 7}, "progress is 7, expected an object with update()"),
        ]:
            self.expect(tessera.InvalidArgumentError, text, tessera.convert, SHARDED, self.folder / "x.pt", **options)
        for options, text in [
            ({}, "reshard: ranks is None and like is None, expected exactly one of them"),
            ({"ranks": 2, "like": "x"}, "reshard: ranks is 2 and like is 'x', expected exactly one of them"),
        ]:
            self.expect(tessera.InvalidArgumentError, text, tessera.reshard, SHARDED, self.folder / "x", **options)
        self.expect(tessera.InvalidArgumentError, "0 ranks, expected 1 to", tessera.reshard, SHARDED, self.folder / "x", 0)
        self.expect(tessera.NotFoundError, "/nowhere", tessera.verify, "/nowhere")
        self.assertEqual(list(self.folder.iterdir()), [])
        (self.folder / "there").mkdir()
        self.expect(tessera.InvalidArgumentError, "there", tessera.convert, SHARDED, self.folder / "there", to="dcp")

    def test_progress_reaches_the_end(self):
        class Bar:
            total, n = None, 0

            def update(self, bytes):
                self.n += bytes

        bar, seen = Bar(), []
        tessera.convert(SHARDED, self.folder / "a.pt", progress=bar)
        self.assertEqual(bar.n, bar.total)
        tessera.verify(SHARDED, progress=lambda done, total: seen.append((done, total)))
        self.assertEqual(seen[-1][0], seen[-1][1])

    def test_an_error_of_progress_ends_the_operation(self):
        def fail(done, total):
            raise RuntimeError("no terminal")

        self.expect(RuntimeError, "no terminal", tessera.verify, SHARDED, progress=fail)

    def test_control_c_ends_a_long_operation_and_leaves_nothing(self):
        big = self.folder / "big.pt"
        write_safetensors(self.folder / "big.safetensors", 1 << 30)
        program = (
            "import sys, tessera\n"
            "print('ready', flush=True)\n"
            "try: tessera.convert(sys.argv[1], sys.argv[2], jobs=1)\n"
            "except KeyboardInterrupt: sys.exit(42)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program, self.folder / "big.safetensors", big], stdout=subprocess.PIPE
        )
        process.stdout.readline()
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        self.assertEqual(process.wait(20), 42)
        process.stdout.close()
        self.assertLess(time.monotonic() - begin, 15)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["big.safetensors"])


def write_safetensors(path, size):
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)  # a hole


class Package(unittest.TestCase):
    def test_it_imports_quickly_and_without_numpy_or_torch(self):
        program = "import sys, tessera; print(*(m for m in ('numpy', 'torch') if m in sys.modules))"
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        self.assertEqual(result.stdout.strip(), "")

    def test_a_missing_library_is_an_import_error_that_names_it(self):
        for library, text in [
            ("/nowhere/libtessera.so", "TESSERA_LIBRARY is '/nowhere/libtessera.so', expected the path of libtessera.so: "),
            ("libc.so.6", "the library libc.so.6 has no function tessera_version, expected libtessera.so of the package's"),
        ]:
            environment = {**os.environ, "TESSERA_LIBRARY": library}
            result = subprocess.run([sys.executable, "-c", "import tessera"], capture_output=True, text=True, env=environment)
            self.assertNotEqual(result.returncode, 0)
            self.assertIn(f"ImportError: tessera: {text}", result.stderr)

    def test_every_name_is_documented(self):
        for name in tessera.__all__:
            self.assertTrue(getattr(tessera, name).__doc__, name)


if __name__ == "__main__":
    unittest.main()

"""tessera.torch names counts that are none, and tensors that cannot be loaded to. Without PyTorch, a stand-in has what the tests need."""

import ctypes
import functools
import importlib
import importlib.util
import sys
import types
import unittest
import warnings
from unittest import mock

import tessera
from test_tessera import GOLDEN, NAME, SHARDED, Folder

DTENSORS = GOLDEN / "checkpoints" / "2.6-dtensor" / "ck"
COMPLEX = "model.layers.4.scale"  # complex64, 13 x 2 x 5
# The bytes with the signs of the parts of a complex64 that a view has with the opposite sign.
SIGNS = {"conjugate": (7,), "negative": (3, 7)}
MODULES = ["torch", "_snapshot", "_staging", "_torch_state"]  # of the package, which import PyTorch


class Tensor:
    """A tensor of the stand-in. Its elements are in a bytearray."""

    def __init__(self, memory, shape, strides, dtype, device, layout, kind="plain"):
        self.memory, self.shape, self.strides, self.dtype, self.layout = memory, shape, strides, dtype, layout
        self.device, self.is_meta, self.kind = types.SimpleNamespace(type=device), device == "meta", kind

    def like(self, shape, strides, kind):
        return Tensor(self.memory, shape, strides, self.dtype, self.device.type, self.layout, kind)

    def expand(self, *shape):
        return self.like(shape, (0,) * (len(shape) - len(self.shape)) + self.strides, self.kind)

    def conj(self):
        return self.like(self.shape, self.strides, "conjugate")

    def detach(self):
        return self

    def dim(self):
        return len(self.shape)

    def stride(self):
        return self.strides

    def is_conj(self):
        return self.kind == "conjugate"

    def is_neg(self):
        return self.kind == "negative"

    def is_contiguous(self):
        return self.strides == row_major(self.shape)

    def numel(self):
        return tessera._memory.product(self.shape)

    def element_size(self):
        return 8 if self.dtype == "torch.complex64" else 4

    def data_ptr(self):
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def copy_(self, other):
        self.memory[:] = opposite(other.memory, SIGNS.get(self.kind, ()))


def row_major(shape):
    return tuple(tessera._memory.product(shape[d + 1 :]) for d in range(len(shape)))


def opposite(memory, signs):
    """The bytes of complex64 elements with these signs changed."""
    changed = bytearray(memory)
    for sign in signs:
        changed[sign::8] = bytes(byte ^ 0x80 for byte in changed[sign::8])
    return changed


def zeros(shape, dtype="torch.float32", device="cpu", layout="torch.strided"):
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    made = Tensor(None, shape, row_major(shape), dtype, device, layout)
    made.memory = bytearray(made.numel() * made.element_size())
    return made


class Planner:
    def __init__(self, **options):
        vars(self).update(options)


class Storage:
    pass


class CheckpointException(BaseException):
    def __init__(self, message, failures):
        super().__init__(message)
        self.failures = failures


def stand_in():
    """The modules of PyTorch that tessera.torch imports, by name."""
    torch = mock.MagicMock()
    torch.Tensor, torch.zeros, torch.empty = Tensor, zeros, zeros
    torch._neg_view = lambda tensor: tensor.like(tensor.shape, tensor.strides, "negative")
    for name in ("int32", "complex64", "strided", "sparse_coo"):
        setattr(torch, name, f"torch.{name}")
    torch.distributed._shard.sharded_tensor.ShardedTensor = type("ShardedTensor", (), {})
    checkpoint = torch.distributed.checkpoint
    checkpoint.DefaultLoadPlanner = checkpoint.DefaultSavePlanner = Planner
    checkpoint.StorageReader = checkpoint.StorageWriter = Storage
    checkpoint.api.CheckpointException = CheckpointException
    names = ["", ".futures", ".distributed", ".distributed._shard", ".distributed._shard.sharded_tensor"]
    names += [".distributed.checkpoint" + name for name in ("", ".metadata", ".planner", ".storage")]
    return {f"torch{name}": functools.reduce(getattr, name.split(".")[1:], torch) for name in names}


def remove(modules):
    for name in (*modules, *(f"tessera.{name}" for name in MODULES)):
        sys.modules.pop(name, None)
    for name in MODULES:
        vars(tessera).pop(name, None)


class Torch(Folder):
    @classmethod
    def setUpClass(cls):
        if importlib.util.find_spec("torch") is None:
            modules = stand_in()
            sys.modules.update(modules)
            cls.addClassCleanup(remove, modules)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch
            importlib.import_module("tessera.torch")
        cls.torch = sys.modules["torch"]

    def load(self, state, path, **options):
        """Loads a state that is flat, as one rank."""
        planner = tessera.torch.LoadPlanner(**options)
        planner.state_dict = state
        tessera.torch.Reader(path).read_data(None, planner)

    def fail_to_save(self, failures, commit=None, **options):
        """Saves by a PyTorch that ends with `failures` of ranks, after `commit` if this rank is the coordinator. Returns how many
        saves were tried, and of how many the files were removed."""

        def save(state, storage_writer, **_):
            storage_writer.set_up_storage_writer(commit is not None)
            if commit is not None:
                storage_writer._save = object.__new__(tessera.torch._Save)
                storage_writer._save._handle = None
                with mock.patch.object(tessera.torch.functions, "save_commit", commit):
                    try:
                        storage_writer._save.commit([])
                    except BaseException as error:
                        failures[0] = (error, [])
            raise dcp.api.CheckpointException("write", failures)

        dcp = tessera.torch.dcp
        with (
            mock.patch.object(dcp, "save", side_effect=save) as tried,
            mock.patch.object(tessera.torch.Writer, "abandon") as removed,
        ):
            try:
                tessera.torch.save({}, self.folder / "x", **options)
            except dcp.api.CheckpointException as error:
                self.assertEqual(error.failures, failures)
        return tried.call_count, removed.call_count

    def views(self):
        """Complex zeros, and a view of them, by its kind."""
        for kind, make in (("conjugate", lambda tensor: tensor.conj()), ("negative", self.torch._neg_view)):
            elements = self.torch.zeros((13, 2, 5), dtype=self.torch.complex64)
            yield kind, elements, make(elements)

    def test_counts_that_are_none_are_named(self):
        for value in (-1, 1.5, "2", None, True, 1 << 64):
            for name in ("files_per_rank", "threads"):
                text = f"{name} is {value!r}, expected an integer from 0 to 2^63 - 1"
                writer = tessera.torch.Writer(self.folder / "x", **{name: value})
                self.expect(tessera.InvalidArgumentError, text, writer.set_up_storage_writer, True)
            text = f"retries is {value!r}, expected an integer from 0 to 2^63 - 1"
            self.expect(tessera.InvalidArgumentError, text, tessera.torch.save, {}, self.folder / "x", retries=value)
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_files_that_may_belong_to_a_checkpoint_are_kept(self):
        unknown = tessera.OutcomeUnknownError("unknown")
        interrupted, late, ours = KeyboardInterrupt(), TimeoutError("late"), tessera.StorageError("disk full")
        for failures, removed in [
            ({0: interrupted}, 0),
            ({0: late}, 0),
            ({0: unknown}, 0),
            ({0: ours}, 1),
            ({1: late}, 1),
            ({0: interrupted, 1: interrupted}, 1),
        ]:
            with self.subTest(failures):
                self.assertEqual(self.fail_to_save({rank: (error, []) for rank, error in failures.items()}), (1, removed))

    def test_the_coordinator_keeps_its_files_from_the_commit_on(self):
        def interrupted(*_):
            raise KeyboardInterrupt

        def refused(*_):
            return tessera.torch.functions.open(None, None, None)

        def unknown(*arguments):
            arguments[-1]._obj.value = 1
            return refused()

        for commit, removed in [(interrupted, 0), (lambda *_: 0, 0), (unknown, 0), (refused, 1)]:
            with self.subTest(commit):
                self.assertEqual(self.fail_to_save({}, commit), (1, removed))
        self.assertEqual(self.fail_to_save({0: (TypeError("cannot be pickled"), [])}, lambda *_: 0), (1, 0))

    def test_an_interruption_is_neither_a_warning_nor_tried_again(self):
        for interruption in (KeyboardInterrupt(), SystemExit(1)):
            failures = {0: (tessera.StorageError("disk full"), []), 1: (interruption, [])}
            self.assertEqual(self.fail_to_save(failures, on_error="warn", retries=3), (1, 1))
        with self.assertWarnsRegex(RuntimeWarning, "failed"):
            tried = self.fail_to_save({1: (tessera.StorageError("disk full"), [])}, on_error="warn", retries=3)
        self.assertEqual(tried, (4, 4))

    def test_new_tensors_are_on_the_cpu_whatever_the_default_device_is(self):
        elsewhere = functools.partial(self.torch.empty, device="meta")
        with mock.patch.object(self.torch, "empty", elsewhere), tessera.open(SHARDED) as checkpoint:
            tensor = checkpoint[NAME].torch()
            self.assertEqual(tensor.device.type, "cpu")
            self.assertEqual(ctypes.string_at(tensor.data_ptr(), 156), bytes(checkpoint.read(NAME)))
        lane = object.__new__(tessera._staging.Lane)
        with mock.patch.object(self.torch, "empty") as made:
            lane.pinned(8)
        self.assertEqual(made.call_args.kwargs["device"], "cpu")

    def test_tensors_without_memory_of_each_element_are_not_loaded_to(self):
        torch = self.torch
        row = torch.zeros(13, dtype=torch.int32)
        for tensor, error, text in [
            (
                row.expand(3, 13),
                tessera.InvalidArgumentError,
                "the tensor has shape [3, 13] and strides [0, 1], expected separate memory for each element",
            ),
            (
                torch.zeros((3, 13), dtype=torch.int32, device="meta"),
                tessera.UnsupportedError,
                "the tensor is on the meta device, expected one that has elements",
            ),
            (
                torch.zeros((3, 13), dtype=torch.int32, layout=torch.sparse_coo),
                tessera.UnsupportedError,
                "the tensor's layout is torch.sparse_coo, expected torch.strided",
            ),
        ]:
            self.expect(error, f"load '{NAME}': {text}", self.load, {NAME: tensor}, SHARDED)
        self.assertEqual(ctypes.string_at(row.data_ptr(), 52), bytes(52))

    def test_a_tensor_that_the_checkpoint_lacks_needs_no_memory(self):
        torch = self.torch
        state = {NAME: torch.zeros((3, 13), dtype=torch.int32), "nope": torch.zeros(3, device="meta")}
        text = "the checkpoint has no 'nope', expected every name of the state; with allow_partial_load=True, these keep their values"
        self.expect(tessera.NotFoundError, text, self.load, state, SHARDED)
        self.load(state, SHARDED, allow_partial_load=True)
        with tessera.open(SHARDED) as checkpoint:
            self.assertEqual(ctypes.string_at(state[NAME].data_ptr(), 156), bytes(checkpoint.read(NAME)))

    def test_conjugate_and_negative_views_are_loaded(self):
        with tessera.open(DTENSORS) as checkpoint:
            stored = bytes(checkpoint.read(COMPLEX))
        for kind, elements, view in self.views():
            self.load({COMPLEX: view}, DTENSORS)
            self.assertEqual(ctypes.string_at(elements.data_ptr(), len(stored)), opposite(stored, SIGNS[kind]), kind)

    def test_out_is_a_tensor_whose_memory_has_each_value(self):
        torch = self.torch
        with tessera.open(SHARDED) as checkpoint:
            out = torch.zeros((3, 13), dtype=torch.int32)
            self.assertIs(checkpoint.read(NAME, out=out), out)
            self.assertEqual(ctypes.string_at(out.data_ptr(), 156), bytes(checkpoint.read(NAME)))
            row = torch.zeros(13, dtype=torch.int32)
            text = "out has shape [3, 13] and strides [0, 1] in elements, expected separate memory for each element"
            self.expect(tessera.InvalidArgumentError, text, checkpoint.read, NAME, out=row.expand(3, 13))
            self.assertEqual(ctypes.string_at(row.data_ptr(), 52), bytes(52))
        with tessera.open(DTENSORS) as checkpoint:
            for kind, elements, view in self.views():
                text = f"out is a {kind} view, expected a tensor whose memory has its values; read to a new tensor and copy it"
                self.expect(tessera.InvalidArgumentError, text, checkpoint.read, COMPLEX, out=view)
                self.assertEqual(ctypes.string_at(elements.data_ptr(), 1040), bytes(1040))


if __name__ == "__main__":
    unittest.main()

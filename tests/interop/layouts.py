"""The states that are saved as distributed checkpoints, each sharded differently.

A layout is a function of a `Bench` (rank, world, seed) that returns the state that this rank saves and the full
state of all ranks together.
"""

import argparse
import collections
import pathlib

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, empty as empty_sharded
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from strangers import Stranger
from values import SAVABLE, SAVABLE_NEW, Maker


class Bench:
    def __init__(self, rank, world, seed):
        self.rank, self.world = rank, world
        self.make = Maker(seed)
        self.seed = seed
        self._meshes = {}

    def mesh(self, *shape):
        if shape not in self._meshes:
            self._meshes[shape] = init_device_mesh("cpu", shape)
        return self._meshes[shape]

    def dtensor(self, full, mesh, *placements):
        sizes, offsets = compute_local_shape_and_global_offset(full.shape, mesh, placements)
        local = full
        for dim, (offset, size) in enumerate(zip(offsets, sizes)):
            local = local.narrow(dim, min(offset, full.shape[dim]), size)
        return DTensor.from_local(
            local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )

    def chunked(self, full, dim):
        spec = ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in range(self.world)])
        sharded = empty_sharded(spec, list(full.shape), dtype=full.dtype)
        for shard in sharded.local_shards():
            shard.tensor.copy_(part_of(full, shard.metadata.shard_offsets, shard.metadata.shard_sizes))
        return sharded

    def enumerated(self, full, boxes):
        """boxes: (offsets, sizes) of each shard; box i is on rank i % world."""
        place = f"rank:{self.rank}/cpu"
        shards = [
            LocalShard(part_of(full, offsets, sizes).clone(), ShardMetadata(list(offsets), list(sizes), place))
            for i, (offsets, sizes) in enumerate(boxes)
            if i % self.world == self.rank
        ]
        return ShardedTensor._init_from_local_shards(shards, list(full.shape))


def part_of(full, offsets, sizes):
    for dim, (offset, size) in enumerate(zip(offsets, sizes)):
        full = full.narrow(dim, offset, size)
    return full


def both(pairs):
    """Splits a nested state of (saved, full) leaves, written as `Pair`s, into its two halves."""

    def half(value, i):
        if isinstance(value, Pair):
            return (value.saved, value.full)[i]
        if isinstance(value, dict):
            return {key: half(item, i) for key, item in value.items()}
        if type(value) is list:
            return [half(item, i) for item in value]
        return value

    return half(pairs, 0), half(pairs, 1)


class Pair:
    def __init__(self, saved, full):
        self.saved, self.full = saved, full


def training_config(seed):
    return {"lr": 0.1 + 0.2, "betas": (0.9, 0.95), "eps": 1e-08, "amsgrad": False, "foreach": None, "seed": seed}


def fsdp(bench):
    """Dimension 0 over all ranks: uneven, with empty ranks, and an optimizer's int keys."""
    mesh = bench.mesh(bench.world)

    def sharded(name, shape, dtype="float32"):
        full = bench.make.numbers(name, shape, dtype)
        return Pair(bench.dtensor(full, mesh, Shard(0)), full)

    shapes = [(7, 5), (3, 4), (2, 6), (1, 3), (5,), (4,), (9, 2, 3), (8, 1, 2, 2), (0, 4)]
    dtypes = ["float32", "bfloat16", "float16", "float64"]
    model = {f"layers.{i}.weight": sharded(f"w{i}", shape, dtypes[i % 4]) for i, shape in enumerate(shapes)}
    model["rotary.inv_freq"] = bench.make.numbers("rotary", (6,))
    state = {
        i: {
            "step": torch.tensor(float(17 + i)),
            "exp_avg": sharded(f"m{i}", shape),
            "exp_avg_sq": sharded(f"v{i}", shape),
        }
        for i, shape in enumerate(shapes[:5])
    }
    return both(
        {
            "model": model,
            "optim": {"state": state, "param_groups": [{**training_config(bench.seed), "params": [0, 1, 2, 3, 4]}]},
            "list": [sharded("l0", (6, 2)), sharded("l1", (5, 2), "int64"), {"deep": sharded("l2", (4,))}, "end"],
            "step": 12,
            "history": [1, 2.5, "three", None, True],
        }
    )


def mesh2d(bench):
    """A 2 by 2 mesh: two dimensions sharded, one sharded and one replicated, one dimension sharded twice."""
    mesh = bench.mesh(2, bench.world // 2)
    placements = {
        "grid": (Shard(0), Shard(1)),
        "turned": (Shard(1), Shard(0)),
        "hybrid": (Replicate(), Shard(0)),
        "columns": (Shard(1), Replicate()),
        "last": (Replicate(), Shard(-1)),
        "twice": (Shard(0), Shard(0)),
        "copies": (Replicate(), Replicate()),
    }
    state = {}
    for kind, where in placements.items():
        for shape, dtype in [((5, 7), "float32"), ((3, 2), "bfloat16"), ((4, 6, 3), "int32"), ((1, 1), "float64")]:
            name = f"{kind}.{'x'.join(map(str, shape))}"
            full = bench.make.bits(name, shape, dtype)
            where = tuple(Shard(p.dim % len(shape)) if isinstance(p, Shard) else p for p in where)
            state[name] = Pair(bench.dtensor(full, mesh, *where), full)
    return both({"net": state, "epoch": 3})


def sharded(bench):
    """ShardedTensors: chunked in dimension 0 and 1 unevenly, and by an enumeration of boxes."""
    state = {}
    chunked = [
        (0, (7, 3), "float32"),
        (0, (2, 5), "float64"),
        (1, (4, 10), "bfloat16"),
        (1, (3, 2), "int64"),
        (0, (11,), "uint8"),
    ]
    for dim, shape, dtype in chunked:
        name = f"chunk{dim}.{'x'.join(map(str, shape))}"
        full = bench.make.bits(name, shape, dtype)
        state[name] = Pair(bench.chunked(full, dim), full)
    grid = bench.make.bits("grid", (6, 8), "float32")
    boxes = [([r, c], [rows, cols]) for r, rows in ((0, 1), (1, 3), (4, 2)) for c, cols in ((0, 5), (5, 3))]
    state["grid"] = Pair(bench.enumerated(grid, boxes), grid)
    # Boxes that do not form a grid: a pinwheel around the middle.
    pinwheel = bench.make.bits("pinwheel", (5, 5), "float16")
    boxes = [([0, 0], [2, 3]), ([0, 3], [3, 2]), ([3, 2], [2, 3]), ([2, 0], [3, 2]), ([2, 2], [1, 1])]
    state["pinwheel"] = Pair(bench.enumerated(pinwheel, boxes), pinwheel)
    return both({"st": state, "plain": bench.make.bits("plain", (3,)), "note": "sharded"})


def dtypes(bench, names=None):
    """Every dtype that PyTorch can save: unsharded, 0-dim, without elements, and sharded."""
    mesh = bench.mesh(bench.world)
    state = {}
    for dtype in names or SAVABLE:
        full = bench.make.bits(f"{dtype}.sharded", (5, 3), dtype)
        state[dtype] = {
            "full": bench.make.bits(f"{dtype}.full", (3, 4), dtype),
            "zero_dim": bench.make.bits(f"{dtype}.zero_dim", (), dtype),
            "empty": bench.make.bits(f"{dtype}.empty", (2, 0, 3), dtype),
            "sharded": Pair(bench.dtensor(full, mesh, Shard(0)), full),
        }
    return both({"dtypes": state})


def new_dtypes(bench):
    return dtypes(bench, SAVABLE_NEW)


def plain_objects(seed):
    return {
        "none": None,
        "yes": True,
        "no": False,
        "zero": 0,
        "negative": -1,
        "byte": 255,
        "wide": 65536,
        "int64": -(2**63),
        "beyond": 2**63,
        "huge": -(7 ** (400 + seed % 7)),
        "float": 1e-05,
        "tiny": 5e-324,
        "large": 1.7976931348623157e308,
        "third": 1 / 3,
        "integral": 1e16,
        "minus_zero": -0.0,
        "nan": float("nan"),
        "inf": float("inf"),
        "minus_inf": float("-inf"),
        "complex": complex(1.5, -0.0),
        "empty_text": "",
        "text": "naïve 🙂 \t\n\\ '",
        "quotes": "\"both\" '",
        "control": "\x00\x1f\x7f\x85\xad\u2028\ue000\U0010ffff",
        "surrogate": "lone \ud800 one",
        "long_text": "x" * 300,
        "bytes": bytes(range(256)),
        "empty_bytes": b"",
        "bytearray": bytearray(b"ab\xff"),
        "long_bytes": b"\x80" * 300,
        "empty_tuple": (),
        "one": (1,),
        "two": (1, "b"),
        "three": (1, 2, 3),
        "four": (1, (2, (3, ())), [4], None),
        "empty_list": [],
        "list": [1, [2, [3, []]], "x"],
        "long_list": list(range(1500)),
        "set": {1, 2, 3},
        "empty_set": set(),
        "frozen": frozenset({7}),
        "ordered": collections.OrderedDict([("z", 1), ("a", [1.5])]),
        "empty_ordered": collections.OrderedDict(),
        "size": torch.Size([3, 0, 2**40]),
        "empty_size": torch.Size([]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "shared": [[1, 2]] * 3,
        "pair_keys": ({(1, 2): "t", 3: "i", None: "n", 2.5: "f", True: "b", "s": {}},),
    }


def strange_objects(seed):
    return {
        "stranger": Stranger(seed),
        "namespace": argparse.Namespace(lr=0.1, layers=[1, 2]),
        "path": pathlib.PurePosixPath("a/b"),
        "counter": collections.Counter("hello"),
        "tensor_in_tuple": (torch.arange(4), "beside"),
        "sparse": torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse(),
    }


def objects(bench):
    """Python values of every kind, understood or not, and one tensor."""
    state = {"plain": plain_objects(bench.seed), "strange": strange_objects(bench.seed)}
    state["strange"].pop("sparse")  # the distributed checkpoint can't save one
    state["w"] = bench.make.bits("w", (3, 2))
    # Wrapped so that the traversal does not descend: otherwise the exact type of a dict or list is lost.
    state["mapping"] = ({"a": {"b": [1, {"c": 2}]}}, collections.OrderedDict(k=(1,)))
    state["dotted.key"] = {"a.b": 1, "": 2, 5: "int key"}
    state["list_of_dicts"] = [{"x": 1}, {"y": [2]}]
    state["gaps"] = {}
    return state, state


def optimizer(bench):
    """A small model's real AdamW state after two steps."""
    torch.manual_seed(bench.seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 2))
    optim = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(2):
        optim.zero_grad()
        model(torch.randn(4, 5)).square().mean().backward()
        optim.step()
    state = {"model": model.state_dict(), "optim": optim.state_dict(), "scheduler": {"last_epoch": 2, "_lr": [3e-4]}}
    return state, state


def small_model():
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3, bias=False))


def refilled(bench, state):
    """Returns the state with sharded tensors filled by name, and the full state."""
    full = {}
    saved, mapping = flatten_state_dict(state)
    for name, value in saved.items():
        full[name] = value
        if isinstance(value, DTensor):
            full[name] = bench.make.numbers(name, value.shape)
            value.to_local().detach().copy_(bench.dtensor(full[name], value.device_mesh, *value.placements).to_local())
        elif isinstance(value, ShardedTensor):
            full[name] = bench.make.numbers(name, value.size())
            for shard in value.local_shards():
                part = part_of(full[name], shard.metadata.shard_offsets, shard.metadata.shard_sizes)
                shard.tensor.detach().copy_(part)
    return unflatten_state_dict(saved, mapping), unflatten_state_dict(full, mapping)


def fsdp2(bench):
    """A model under fully_shard with its optimizer, as returned by get_state_dict: real names and nesting."""
    torch.manual_seed(bench.seed)
    model = small_model()
    fully_shard(model, mesh=bench.mesh(bench.world))
    model_state, optim_state = get_state_dict(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return refilled(bench, {"model": model_state, "optim": optim_state, "step": 0})


def fsdp1(bench):
    """A model under FullyShardedDataParallel with SHARDED_STATE_DICT: ShardedTensors that are slices of flat parameters."""
    torch.manual_seed(bench.seed)
    model = FullyShardedDataParallel(small_model(), device_id=torch.device("cpu"), use_orig_params=True)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model_state, optim_state = get_state_dict(model, optim)
    return refilled(bench, {"model": model_state, "optim": optim_state, "step": 0})


def strided_tensors(make):
    base = make.bits("base", (6, 4))
    tied = make.bits("tied", (3, 4))
    return {
        "base": base,
        "transposed": base.t(),
        "row": base[2],
        "column": base[:, 1],
        "stepped": base[1::2, ::3],
        "block": base[1:4, 1:3],
        "no_rows": base[3:3],
        "one_element": base[5:6, 3:4],
        "flipped": base.flip(0),
        "expanded": make.bits("narrow", (3, 1), "int16").expand(3, 5),
        "scalar_expanded": torch.tensor(2.5).expand(2, 3),
        "permuted": make.bits("cube", (2, 3, 4), "bfloat16").permute(2, 0, 1),
        "image": make.bits("image", (2, 3, 4, 5)).to(memory_format=torch.channels_last),
        "volume": make.bits("volume", (1, 2, 2, 3, 2), "float16").to(memory_format=torch.channels_last_3d),
        "diagonal": make.bits("square", (4, 4)).diagonal(),
        "windows": make.bits("line", (7,)).unfold(0, 3, 2),
        "embedding": tied,
        "head": tied,
        "head_view": tied.view(4, 3),
    }


def strided(bench):
    """Views, shared storages, expanded and channels-last tensors."""
    state = {"t": strided_tensors(bench.make), "p": torch.nn.Parameter(bench.make.numbers("p", (2, 2)))}
    return state, state


def unflattened(bench):
    """Saved without flattening: nested dictionaries are objects, the top level's tensors are tensors."""
    state = {
        "weight": bench.make.bits("weight", (4, 2)),
        "optim": {"state": {0: {"exp_avg": bench.make.bits("m", (2, 2))}}, "lr": 0.5},
        "args": {"layers": 2, "name": "x", "dims": (1, 2)},
        "tags": ["a", "b"],
    }
    return state, state


def stages(bench):
    """Ranks with different names, as in pipeline stages, and common ones."""
    full = {}
    for rank in range(bench.world):
        full[f"stage{rank}"] = {"w": bench.make.bits(f"stage{rank}", (3, 2 + rank)), "rank": rank}
    common = {"common": bench.make.bits("common", (4,)), "step": 7}
    return {**common, f"stage{bench.rank}": full[f"stage{bench.rank}"]}, {**common, **full}


def for_safetensors(bench, kinds=("float32", "bfloat16", "float16", "int64", "uint8", "bool", "float8_e4m3fn")):
    """A state that the HuggingFace writer can save: only tensors, of dtypes that safetensors has."""
    mesh = bench.mesh(bench.world)
    state = {}
    for i, dtype in enumerate(kinds):
        full = bench.make.bits(f"hf{i}", (4 + i, 3), dtype)
        state[f"model.layers.{i}.weight"] = Pair(bench.dtensor(full, mesh, Shard(i % 2)), full)
    state["model.norm.weight"] = bench.make.bits("norm", (5,))
    return both(state)


def for_safetensors_unsharded(bench):
    full = for_safetensors(bench)[1]
    return full, full


def for_consolidation(bench):
    return for_safetensors(bench, ("float32", "bfloat16", "float16"))

"""Records results of PyTorch's DTensor: `make_dtensor_values.py OUT SEED LENGTH...` writes cases to OUT, for a mesh of
these lengths, and a checkpoint of DTensors to OUT.checkpoint. Prints a line of JSON: how many cases it made in all and of each op,
and how many this PyTorch refused, by op and error: {"cases": COUNT, "made": {OP: COUNT}, "refused": {OP: {ERROR: COUNT}}}.

The output is TorchScript's pickle of (JSON, tensors), as from make_sharded_values.py. Lists of tensors have one
for each rank. Placements are ["R"], ["S", dim], ["_S", dim, split_factor] or ["P", op].
"""

import collections
import itertools
import json
import math
import random
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_shape
from torch.distributed.tensor.placement_types import _StridedShard

from pytorch_ranks import run_ranks

SIZES = [[8, 4], [5, 7], [2, 3]]
RISING = torch.arange(24, dtype=torch.float64).view(6, 4) * 1e-3  # no two elements are equal
ROWS = torch.tensor([3, 0, 1, 1, 2, 0])
DIAGONAL = 20 * torch.eye(4, dtype=torch.float64)
TARGETS = torch.tensor([3, 0, -100, 1, 2, 0])
SLOW = {"group_norm", "householder"}  # ops of which PyTorch 2.14 runs the decomposition with all placements
UNSUPPORTED = (RuntimeError, AssertionError, NotImplementedError, ValueError, IndexError)
SHOWN_ERROR = 200  # characters
PAIRS = 120  # of placements, at most, on a mesh of several dimensions
# Earlier versions reorder elements when they redistribute strided shards, and sum a partial maximum when they shard it.
IS_LATE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


def placement_of(text):
    kind, *rest = text
    if kind == "_S":
        return _StridedShard(rest[0], split_factor=rest[1])
    return {"R": Replicate, "S": Shard, "P": Partial}[kind](*rest)


class OfAll:
    """The values of all ranks, by their number in Cases.values."""

    def __init__(self, number):
        self.number = number


class Cases:
    def __init__(self, mesh, seed):
        self.mesh, self.cases = mesh, []
        self.refused = collections.defaultdict(collections.Counter)
        self.values = []  # of this rank, for rank 0: to gather each by itself takes minutes
        self.random = random.Random(seed)  # the same on all ranks
        self.generator = torch.Generator().manual_seed(seed * 100 + dist.get_rank())

    def of_all(self, value):
        self.values.append(value)
        return OfAll(len(self.values) - 1)

    def refuse(self, name, error):
        """Counts a case that this PyTorch does not support, or that is wrong for it. The counts tell what was compared."""
        self.refused[name][f"{type(error).__name__}: {error}"[:SHOWN_ERROR]] += 1

    def counts(self):
        made = collections.Counter(f"op {case['name']}" if "name" in case else case["op"] for case in self.cases)
        made["gradient of redistribute"] = sum("gradient" in case for case in self.cases)
        return {"cases": len(self.cases), "made": made, "refused": self.refused}

    def integer_values(self, size):
        """Returns values whose sums are exact in any order."""
        return torch.randint(-8, 8, tuple(size), generator=self.generator).double()

    def from_local(self, size, placements, leaf=None):
        of = [placement_of(p) for p in placements]
        if leaf is None:
            leaf = self.integer_values(local_shape(tuple(size), self.mesh, of)[0])
            for i, placement in enumerate(of):  # replicated values are equal on all ranks
                if isinstance(placement, Replicate):
                    dist.broadcast(leaf, group=self.mesh.get_group(i), group_src=0)
            leaf.requires_grad_()
        stride = torch.empty(tuple(size)).stride()
        return leaf, DTensor.from_local(leaf, self.mesh, of, run_check=False, shape=torch.Size(size), stride=stride)

    def redistribute(self):
        choices = [["R"], ["S", 0], ["S", 1], ["P", "sum"]]
        if self.mesh.ndim == 1:
            choices.append(["P", "max"])
        all_placements = list(itertools.product(choices, repeat=self.mesh.ndim))
        pairs = [(s, t) for s in all_placements for t in all_placements]
        if len(pairs) > PAIRS:
            pairs = self.random.sample(pairs, PAIRS)
        for size, (source, target) in itertools.product(SIZES, pairs):
            self.redistribute_one(size, source, target)
        if self.mesh.ndim == 2:  # tensor parallel, then fully sharded
            strided = [["_S", 0, self.mesh.size(1)], ["S", 0]]
            even = [4 * self.mesh.size(), 3]
            for other in [[["R"], ["R"]], [["R"], ["S", 0]], [["S", 1], ["R"]], [["S", 0], ["S", 1]]]:
                self.redistribute_one(even, strided, other)

    def redistribute_one(self, size, source, target):
        kinds = {tuple(p) for p in source}
        if not IS_LATE and (any(k[0] == "_S" for k in kinds) or (("P", "max") in kinds and target[0][0] == "S")):
            return
        leaf, tensor = self.from_local(size, source)
        try:
            result = tensor.redistribute(self.mesh, [placement_of(p) for p in target]).to_local()
        except UNSUPPORTED as error:
            return self.refuse("redistribute", error)
        weight = self.integer_values(result.shape)
        case = {"op": "redistribute", "size": size, "source": source, "target": target,
                "input": self.of_all(leaf.detach()), "expected": self.of_all(result.detach()), "weight": self.of_all(weight)}
        try:
            (result * weight).sum().backward()
            case["gradient"] = self.of_all(leaf.grad)
        except UNSUPPORTED as error:
            self.refuse("gradient of redistribute", error)
        self.cases.append(case)

    def chunks(self):
        for size in SIZES + [[1, 1], [3, 16]]:
            for placements in itertools.product([["R"], ["S", 0], ["S", 1]], repeat=self.mesh.ndim):
                _, tensor = self.from_local(size, placements)
                chunks = [[list(c.offsets), list(c.sizes)] for c in tensor.__create_chunk_list__()]
                self.cases.append({"op": "chunks", "size": size, "source": placements, "expected": self.of_all(chunks)})

    def ops(self):
        table = [
            ("linear", [[6, 4], [8, 4], [8]], F.linear),
            ("matmul", [[6, 4], [4, 5]], torch.matmul),
            ("add", [[6, 4], [6, 4]], torch.add),
            ("mul", [[6, 4], [4]], torch.mul),
            ("relu", [[6, 4]], torch.relu),
            ("softmax", [[6, 4]], lambda x: torch.softmax(x, -1)),
            ("layer_norm", [[6, 4], [4], [4]], lambda x, w, b: F.layer_norm(x, [4], w, b)),
            ("sum", [[6, 4]], lambda x: x.sum(0)),
            ("mean", [[6, 4]], torch.mean),
            ("sub_scalar", [[6, 4]], lambda x: (x - 2) * 3 / 7),
            ("clamp", [[6, 4]], lambda x: torch.clamp(x, -3.5, 4.5)),
            ("where", [[6, 4], [6, 4]], lambda x, y: torch.where(x > y, x, y)),
            ("addmm", [[5], [6, 4], [4, 5]], lambda x, a, b: torch.addmm(x, a, b, beta=0.5, alpha=2)),
            ("bmm", [[4, 6, 3], [4, 3, 5]], torch.bmm),
            ("log_softmax", [[6, 4]], lambda x: torch.log_softmax(x, -1)),
            ("var", [[6, 4]], lambda x: x.var(0)),
            ("norm", [[6, 4]], lambda x: torch.linalg.vector_norm(x, 2, dim=1)),
            ("cumsum", [[6, 4]], lambda x: x.cumsum(0)),
            ("topk", [[6, 4]], lambda x: torch.topk(x + self.replicated(RISING), 2, dim=0).values),
            ("view", [[12, 4]], lambda x: x.reshape(4, 3, 4)),
            ("flatten", [[6, 4]], torch.flatten),
            ("permute", [[6, 4, 2]], lambda x: x.permute(2, 0, 1)),
            ("unsqueeze", [[6, 4]], lambda x: x.unsqueeze(1)),
            ("cat", [[6, 4], [2, 4]], lambda x, y: torch.cat([x, y])),
            ("stack", [[6, 4], [6, 4]], lambda x, y: torch.stack([x, y], 1)),
            # Of a part that has no gradient, PyTorch makes a tensor of zeros that is no DTensor.
            ("split", [[6, 4]], lambda x: torch.cat(torch.split(x, [2, 4])[::-1])),
            ("slice", [[6, 4]], lambda x: x[1:5:2]),
            ("select", [[6, 4]], lambda x: x.select(0, -2)),
            ("gather", [[6, 4]], lambda x: torch.gather(x, 1, self.replicated(ROWS.view(6, 1)))),
            ("index_select", [[6, 4]], lambda x: torch.index_select(x, 1, self.replicated(ROWS))),
            ("cross_entropy", [[6, 4]], lambda x: F.cross_entropy(x, self.replicated(TARGETS))),
            ("smooth", [[6, 4]], lambda x: F.cross_entropy(x, self.replicated(TARGETS), label_smoothing=0.1)),
            ("frexp", [[6, 4]], lambda x: torch.frexp(x).mantissa),
            ("group_norm", [[8, 4, 3], [4], [4]], lambda x, w, b: F.group_norm(x, 2, w, b)),
            ("batch_norm", [[8, 4, 3], [4], [4]], lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)),
            ("grid_sample", [[8, 4, 5, 4], [8, 4, 3, 2]], lambda x, g: F.grid_sample(x, g / 8, align_corners=False)),
            ("nearest_exact", [[8, 4, 5]], lambda x: F.interpolate(x, 7, mode="nearest-exact")),
            ("antialias", [[8, 4, 6, 5]], lambda x: F.interpolate(x, (3, 3), mode="bicubic", antialias=True)),
            ("max_unpool", [[8, 4, 6, 4]], lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
            ("householder", [[8, 4, 3], [8, 3]], torch.linalg.householder_product),
            ("lu", [[8, 4, 4]], lambda x: torch.add(*torch.linalg.lu(x + self.replicated(DIAGONAL))[1:])),
            ("cholesky_inverse", [[8, 4, 4]], lambda x: torch.cholesky_inverse(x + self.replicated(DIAGONAL))),
        ]
        for name, sizes, f in table:
            choices = [
                list(itertools.product([["R"], ["S", 0], ["S", 1]] if len(size) > 1 else [["R"], ["S", 0]], repeat=self.mesh.ndim))
                for size in sizes
            ]
            every = list(itertools.product(*choices))
            # On a mesh of two dimensions, PyTorch 2.14 takes up to a second to find the strategy of an op.
            limit = (8 if name in SLOW else 24) // self.mesh.ndim
            # The first, everything replicated, is among them: if PyTorch refuses that, it does not have the op.
            for placements in every if len(every) <= limit else [every[0], *self.random.sample(every[1:], limit - 1)]:
                self.op(name, sizes, placements, f)

    def replicated(self, tensor):
        return DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)

    def op(self, name, sizes, placements, f):
        if not IS_LATE and name == "gather" and ["S", 1] in placements[0]:
            return  # a rank without columns raises, and the others wait for it
        leaves, tensors = zip(*(self.from_local(size, p) for size, p in zip(sizes, placements)))
        try:
            result = f(*tensors)
            full = result.full_tensor()
            weight = torch.cos(torch.arange(full.numel(), dtype=torch.float64)).view(full.shape)
            (full * weight).sum().backward()
        except UNSUPPORTED as error:
            return self.refuse(f"op {name}", error)
        gradients = [DTensor.from_local(leaf.grad, self.mesh, [placement_of(p) for p in of], run_check=False,
                                        shape=torch.Size(size), stride=torch.empty(tuple(size)).stride()).full_tensor()
                     for leaf, of, size in zip(leaves, placements, sizes)]
        self.cases.append({"op": "op", "name": name, "sizes": sizes, "placements": placements,
                           "inputs": [self.of_all(leaf.detach()) for leaf in leaves], "expected": full.detach(),
                           "weight": weight, "gradients": gradients})

    def checkpoint(self, path):
        state, described = {}, {}
        for placements in itertools.product([["R"], ["S", 0], ["S", 1]], repeat=self.mesh.ndim):
            full = torch.arange(35, dtype=torch.float64).view(5, 7) + len(state)
            of = [placement_of(p) for p in placements]
            sizes, offsets = local_shape((5, 7), self.mesh, of)
            local = full[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))] if math.prod(sizes) else torch.empty(sizes, dtype=torch.float64)
            name = f"w{len(state)}"
            state[name] = self.from_local([5, 7], placements, local.contiguous())[1]
            described[name] = [placements, full]
        dcp.save(state, checkpoint_id=path)
        self.cases.append({"op": "checkpoint", "tensors": described})
        self.cases += [{"op": "load", "mesh": mesh, "tensors": described} for mesh in ([1], [2], [3, 2])]


def run(rank, out, seed, lengths):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=math.prod(lengths))
    cases = Cases(init_device_mesh("cpu", tuple(lengths)), seed)
    cases.redistribute()
    cases.chunks()
    cases.ops()
    cases.checkpoint(out + ".checkpoint")
    everyone = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(cases.values, everyone)
    if rank == 0:
        tensors = []

        def written(value):
            if isinstance(value, OfAll):
                return [values[value.number] for values in everyone]
            tensors.append(value.contiguous())
            return {"tensor": len(tensors) - 1}

        for case in cases.cases:
            case.setdefault("mesh", lengths)
        text = json.dumps(cases.cases, default=written)
        with open(out, "wb") as file:
            file.write(torch._C._pickle_save((text, tensors)))
        print(json.dumps(cases.counts()), flush=True)
    dist.barrier()


def main():
    out, seed, lengths = sys.argv[1], int(sys.argv[2]), [int(n) for n in sys.argv[3:]]
    ranks = math.prod(lengths)
    run_ranks(lambda rank: run(rank, out, seed, lengths), ranks)


if __name__ == "__main__":
    main()

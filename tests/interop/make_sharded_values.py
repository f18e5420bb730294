"""Records results of PyTorch's ShardedTensor: `make_sharded_values.py OUT WORLD SEED` writes cases to OUT. Prints a line of JSON: how
many in all and of each op, {"cases": COUNT, "made": {OP: COUNT}, "refused": {}}.

The output is TorchScript's pickle of (JSON, tensors): a list of dicts for sharded_values.cpp with "op", the inputs and
the results, where {"tensor": i} is a tensor. Ranks are processes over Gloo. Ops that this PyTorch no longer has for
ShardedTensor are applied to the full tensor.
"""

import collections
import json
import random
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distributed_functional
import torch.nn.functional as F
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard, TensorProperties
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed._shard.sharding_spec import _infer_sharding_spec_from_shards_metadata as infer
from torch.distributed._shard.sharding_spec.chunk_sharding_spec_ops import embedding as embedding_op
from torch.distributed._shard.sharding_spec.chunk_sharding_spec_ops import embedding_bag as embedding_bag_op

from pytorch_ranks import run_ranks

SIZES = [[7], [8, 4], [5, 3], [12, 12], [3, 2, 5], [2, 3, 2, 3], [4, 3, 12, 4]]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def reduce_scatter(output, inputs, op=dist.ReduceOp.SUM, group=dist.group.WORLD):
    """Replaces the reduce-scatter that Gloo lacks: reduces everything and takes this rank's part."""
    return distributed_functional.all_reduce(torch.stack(inputs), op=op, group=group)[dist.get_rank(group)]


embedding_op.reduce_scatter = reduce_scatter
embedding_bag_op.reduce_scatter = reduce_scatter


def chunk_spec(dim, ranks):
    return ChunkShardingSpec(dim=dim, placements=[f"rank:{r}/cpu" for r in ranks])


def described(shards):
    return [[list(s.shard_offsets), list(s.shard_sizes), str(s.placement)] for s in shards]


def describe_spec(spec):
    if isinstance(spec, ChunkShardingSpec):
        return {"dim": spec.dim, "placements": [str(p) for p in spec.placements]}
    return {"shards": described(spec.shards)}


def grid(size, cell, ranks):
    """Cells of a tensor, assigned to ranks in turn."""
    offsets = [[]]
    for n, step in zip(size, cell):
        offsets = [o + [begin] for o in offsets for begin in range(0, n, step)]
    return [
        ShardMetadata(o, [min(c, n - b) for b, c, n in zip(o, cell, size)], f"rank:{ranks[i % len(ranks)]}/cpu")
        for i, o in enumerate(offsets)
    ]


def values(size, dtype):
    count = torch.Size(size).numel()
    return (torch.arange(count) % 120).reshape(size).to(dtype)


def part(full, metadata):
    index = tuple(slice(o, o + s) for o, s in zip(metadata.shard_offsets, metadata.shard_sizes))
    return full[index].contiguous()


def from_shards(full, shards, requires_grad=False):
    mine = [s for s in shards if s.placement.rank() == dist.get_rank()]
    local = [Shard(part(full, s).clone().requires_grad_(requires_grad), s) for s in mine]
    return sharded_tensor.init_from_local_shards(local, list(full.shape))


def from_chunk(full, spec, requires_grad=False):
    shards = spec.build_metadata(full.shape, TensorProperties()).shards_metadata
    (mine,) = [s for s in shards if s.placement.rank() == dist.get_rank()]
    local = part(full, mine).clone().requires_grad_(requires_grad)
    tensor = sharded_tensor.ShardedTensor._init_from_local_tensor(local, spec, list(full.shape))
    return tensor, described(shards)


def collected(value):
    """Gathers each rank's value on rank 0."""
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, value)
    return everything


def fits(size, dim, world):
    """Whether no chunk is empty: PyTorch refuses some that are, and hangs gathering others."""
    step = -(-size[dim] // world)
    return step * (world - 1) < size[dim]


def is_ordered(spec):
    return all(placement.rank() == rank for rank, placement in enumerate(spec.placements))


def is_even(size, spec, world):
    return size[spec.dim] % world == 0


class Cases:
    def __init__(self, world, seed):
        self.world = world
        self.random = random.Random(seed)
        self.cases = []

    def add(self, op, **content):
        self.cases.append({"op": op, "world": self.world, **content})

    def permutations(self):
        ranks = list(range(self.world))
        shuffled = self.random.sample(ranks, len(ranks))
        return [ranks, shuffled]

    def chunk_specs(self, size):
        return [
            chunk_spec(d, ranks)
            for d in range(len(size))
            for ranks in self.permutations()
            if fits(size, d, self.world)
        ]

    def metadata(self):
        for size in SIZES:
            for dim in range(-len(size), len(size)):
                for ranks in self.permutations():
                    spec = chunk_spec(dim, ranks)
                    shards = spec.build_metadata(torch.Size(size), TensorProperties()).shards_metadata
                    self.add("build", spec=describe_spec(spec), size=size, shards=described(shards))
                    if fits(size, dim, self.world):
                        self.add("infer", shards=described(shards), spec=describe_spec(infer(shards)))
            shards = grid(size, [(n + 1) // 2 for n in size], list(range(self.world)))
            spec = EnumerableShardingSpec(shards)
            built = spec.build_metadata(torch.Size(size), TensorProperties()).shards_metadata
            self.add("build", spec=describe_spec(spec), size=size, shards=described(built))
            self.add("infer", shards=described(shards), spec=describe_spec(infer(shards)))

    def gather(self):
        for number, size in enumerate(SIZES):
            specs = [spec.build_metadata(torch.Size(size), TensorProperties()) for spec in self.chunk_specs(size)]
            cells = grid(size, [(n + 1) // 2 for n in size], range(self.world))
            boxes = [m.shards_metadata for m in specs]
            if len(cells) >= self.world:  # PyTorch fails if a rank is empty
                boxes.append(cells)
            for i, shards in enumerate(boxes):
                dtype = DTYPES[(number + i) % len(DTYPES)]
                tensor = from_shards(values(size, dtype), shards)
                dst = self.random.randrange(self.world)
                out = torch.zeros(size, dtype=dtype) if dist.get_rank() == dst else None
                tensor.gather(dst, out)
                self.add("gather", shards=described(shards), dst=dst, full=values(size, dtype), expected=collected(out)[dst],
                         spec=describe_spec(tensor.sharding_spec()))

    def reshard(self):
        for number, size in enumerate(SIZES):
            for i, before in enumerate(self.chunk_specs(size)):
                for after in self.chunk_specs(size):
                    if not all(is_even(size, spec, self.world) for spec in (before, after)):
                        continue  # PyTorch's reshard fails for some uneven chunks
                    if self.world > 2 and not (is_ordered(before) and is_ordered(after)):
                        continue  # and confuses ranks if their order is not its own inverse
                    dtype = DTYPES[(number + i) % len(DTYPES)]
                    tensor, _ = from_chunk(values(size, dtype), before)
                    tensor.reshard(after)
                    self.add("reshard", before=describe_spec(before), spec=describe_spec(after),
                             full=values(size, dtype), expected=collected(tensor.local_tensor()),
                             metadata=described(tensor.metadata().shards_metadata))

    def tensor_ops(self):
        full = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for spec in self.chunk_specs([5, 3]):
            tensor, _ = from_chunk(full, spec, requires_grad=True)
            cases = {"clone": tensor.clone(), "detach": tensor.detach(),
                     "to_float32": tensor.type_as(torch.zeros(1, dtype=torch.float32))}
            for name, result in cases.items():
                self.add("tensor_op", name=name, spec=describe_spec(spec), full=full,
                         requires_grad=result.metadata().tensor_properties.requires_grad,
                         expected=collected(result.local_tensor().detach()))

    def embeddings(self):
        generator = torch.Generator().manual_seed(2)
        weight = torch.randn(11, 6, dtype=torch.float64, generator=generator)
        options = [{}, {"padding_idx": 4}, {"max_norm": 1.5}, {"padding_idx": 2, "max_norm": 1.0, "norm_type": 1.0}]
        for dim in (0, 1):
            if not fits([11, 6], dim, self.world):
                continue
            for ranks in self.permutations():
                for chosen in options:
                    if self.world == 1 and dim == 0 and "max_norm" in chosen:
                        continue  # PyTorch drops the last looked-up row if no rank has others
                    for size in ([4], [4, 3]):
                        self.embedding(weight, chunk_spec(dim, ranks), size, chosen, generator)
                for mode in ("sum", "mean", "max"):
                    for padding in (None, 4):
                        for flat in (False, True):
                            if padding is not None and flat and mode == "mean" and dim == 0:
                                continue  # PyTorch includes the padding in the divisor
                            self.embedding_bag(weight, chunk_spec(dim, ranks), mode, padding, flat, generator)

    def embedding(self, weight, spec, size, options, generator):
        inputs = torch.randint(0, 11, (self.world, *size), generator=generator)
        factors = torch.randn(self.world, *size, 6, dtype=torch.float64, generator=generator)
        tensor, _ = from_chunk(weight, spec, requires_grad=True)
        leaf = tensor.local_tensor()
        result = F.embedding(inputs[dist.get_rank()], tensor, **options)
        (result * factors[dist.get_rank()]).sum().backward()
        # max_norm replaces a column-wise shard by its result, which gets no gradient.
        gradients = [] if options.get("max_norm") and spec.dim == 1 else collected(leaf.grad)
        self.add("embedding", weight=weight, spec=describe_spec(spec), inputs=inputs, factors=factors,
                 padding_idx=options.get("padding_idx", -1), max_norm=options.get("max_norm", 0.0),
                 norm_type=options.get("norm_type", 2.0), expected=collected(result.detach()), gradients=gradients)

    def embedding_bag(self, weight, spec, mode, padding, flat, generator):
        size = [8] if flat else [3, 4]
        bags = 3
        inputs = torch.randint(0, 11, (self.world, *size), generator=generator)
        factors = torch.randn(self.world, bags, 6, dtype=torch.float64, generator=generator)
        tensor, _ = from_chunk(weight, spec, requires_grad=True)
        offsets = torch.tensor([0, 2, 5]) if flat else None
        result = F.embedding_bag(inputs[dist.get_rank()], tensor, offsets=offsets, mode=mode, padding_idx=padding)
        (result * factors[dist.get_rank()]).sum().backward()
        # PyTorch gives every rank the gradient of a maximum, not only the rank that has it.
        gradients = [] if mode == "max" and spec.dim == 0 else collected(tensor.local_tensor().grad)
        self.add("embedding_bag", weight=weight, spec=describe_spec(spec), inputs=inputs,
                 factors=factors, mode=mode, padding_idx=-1 if padding is None else padding,
                 offsets=offsets if flat else torch.zeros(0, dtype=torch.int64),
                 expected=collected(result.detach()), gradients=gradients)

    def whole_tensor_ops(self):
        generator = torch.Generator().manual_seed(3)

        def randn(*size):
            return torch.randn(*size, dtype=torch.float64, generator=generator)

        x = randn(5, 3, 4)
        unary = ["abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "isfinite", "isinf", "isnan", "log", "log1p",
                 "nan_to_num", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "tanh"]
        for name in unary:
            self.add("unary", name=name, input=x, expected=getattr(torch, name)(x))
        for name in ("gelu", "relu", "silu"):
            self.add("unary", name=name, input=x, expected=getattr(F, name)(x))
        y = randn(5, 3, 4)
        for name in ("add", "sub", "mul", "div"):
            f = getattr(torch, name)
            self.add("binary", name=name, input=x, other=y, expected=f(x, y), with_number=f(x, 2.5))
        for dim in range(-3, 3):
            self.add("softmax", input=x, dim=dim, expected=F.softmax(x, dim))
        for shape in ([4], [3, 4], [5, 3, 4]):
            weight, bias = randn(*shape), randn(*shape)
            self.add("layer_norm", input=x, shape=shape, weight=weight, bias=bias,
                     expected=F.layer_norm(x, shape, weight, bias))
        self.add("bmm", input=x, other=randn(5, 4, 2), expected=None)
        self.cases[-1]["expected"] = torch.bmm(x, self.cases[-1]["other"])
        inputs, weight, bias = randn(2 * self.world, 7), randn(5, 7), randn(5)
        self.add("linear", input=inputs, weight=weight, bias=bias, expected=F.linear(inputs, weight, bias))


def run(rank, out, world, seed):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    cases = Cases(world, seed)
    for make in (cases.metadata, cases.gather, cases.reshard, cases.tensor_ops, cases.embeddings, cases.whole_tensor_ops):
        make()
    if rank == 0:
        tensors = []
        text = json.dumps(cases.cases, default=lambda tensor: tensors.append(tensor) or {"tensor": len(tensors) - 1})
        with open(out, "wb") as file:
            file.write(torch._C._pickle_save((text, tensors)))
        made = collections.Counter(case["op"] for case in cases.cases)
        print(json.dumps({"cases": len(cases.cases), "made": made, "refused": {}}), flush=True)
    dist.barrier()


def main():
    out, world, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    run_ranks(lambda rank: run(rank, out, world, seed), world)


if __name__ == "__main__":
    main()

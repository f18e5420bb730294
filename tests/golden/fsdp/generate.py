#!/usr/bin/env python3
"""Writes what PyTorch's FlatParamHandle makes of parameters to cases.json, beside this script. Deterministic; written by PyTorch 2.6.

Usage: generate.py [SEED CASES FILE]

A list of cases: {"params": [[name, shape, strides, identity], ...] in the order of the walk over the module, where names of one
identity are one parameter; "world_size", "aligned_numel"; "numels_with_padding", "is_padding", "unpadded", "sharded", "fqns",
"shared": [[name, its primary's], ...]; "ranks": [{"padded", "infos": [null or [offset in shard, numel, first, last], ...],
"metadata": [names, shapes, strides, contiguities, numels, offsets], "shard": its elements}, ...]}. Element i, in row-major order, of
the parameter of identity p is 1000 p + i + 100; 42 is padding for alignment, 0 behind the end.
"""

import json
import pathlib
import random
import sys

import torch
from torch import nn
from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleShardingStrategy
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore

DTYPES = [torch.float32, torch.float64, torch.bfloat16]  # by which alignment differs


def parameter(random_, number):
    shape = [random_.choice([0, 1, 1, 2, 3, 4, 5, 7]) if random_.random() < 0.15 else random_.randint(1, 6)
             for _ in range(random_.randint(1, 4))]
    value = (torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + 1000 * number + 100).reshape(shape)
    if random_.random() < 0.3:  # dense, in another order
        order = list(range(len(shape)))
        random_.shuffle(order)
        value = value.permute(order).contiguous().permute([order.index(d) for d in range(len(shape))])
    return value


def build(random_, dtype):
    """A tree of modules, some of whose parameters have several names."""
    root = nn.Module()
    modules = [root]
    for number in range(random_.randint(0, 3)):
        module = nn.Module()
        parent = random_.choice(modules)
        parent.add_module(f"m{number}", module)
        modules.append(module)
    made = []
    for number in range(random_.randint(1, 7)):
        module = random_.choice(modules)
        if made and random_.random() < 0.2:
            module.register_parameter(f"p{number}", random_.choice(made))
            continue
        value = parameter(random_, len(made))
        # bfloat16 can't tell the elements apart, so that they are kept as float64 and only aligned as bfloat16 is.
        made.append(nn.Parameter(value.to(dtype) if dtype != torch.bfloat16 else value))
        module.register_parameter(f"p{number}", made[-1])
    if all(p.numel() == 0 for p in made):  # which PyTorch can't shard
        made.append(nn.Parameter(torch.full((1,), 1000.0 * len(made) + 100, dtype=made[0].dtype)))
        root.register_parameter("last", made[-1])
    return root, made


def case(random_):
    dtype = random_.choice(DTYPES)
    world_size = random_.randint(1, 8)
    use_orig_params = random_.random() < 0.5
    mixed = torch.bfloat16 if dtype == torch.bfloat16 else None
    seed = random_.random()
    result, ranks = None, []
    for rank in range(world_size):
        root, made = build(random.Random(seed), dtype)
        identities = {id(p): i for i, p in enumerate(made)}
        walk = [[f"{prefix}.{name}" if prefix else name, list(p.shape), list(p.stride()), identities[id(p)]]
                for prefix, module in root.named_modules(remove_duplicate=False)
                for name, p in module._parameters.items()]
        handle = FlatParamHandle(made, root, torch.device("cpu"), HandleShardingStrategy.FULL_SHARD, False, mixed, None, False,
                                 FakeProcessGroup(rank, world_size), use_orig_params)
        flat = handle.flat_param
        aligned = handle._aligned_numel
        unpadded = list(flat._unpadded_unsharded_size)[0]
        handle.shard()
        result = {
            "params": walk, "world_size": world_size, "aligned_numel": aligned,
            "numels_with_padding": list(flat._numels_with_padding), "is_padding": list(flat._is_padding_mask),
            "unpadded": unpadded, "sharded": flat._sharded_size[0], "fqns": list(flat._fqns),
            "shared": [[f"{s.module_name}.{s.param_name}" if s.module_name else s.param_name,
                        f"{s.prim_module_name}.{s.prim_param_name}" if s.prim_module_name else s.prim_param_name]
                       for s in flat._shared_param_infos],
        }
        metadata = handle.shard_metadata()
        ranks.append({
            "padded": flat._shard_numel_padded,
            "infos": [list(i[1:]) if i.in_shard else None for i in flat._shard_param_infos],
            "metadata": [list(metadata.param_names), [list(s) for s in metadata.param_shapes],
                         [list(s) for s in metadata.param_strides], list(metadata.param_contiguities),
                         list(metadata.param_numels), [list(o) for o in metadata.param_offsets]],
            "shard": [int(x) for x in flat.detach().tolist()],
        })
    return {**result, "ranks": ranks}


def main():
    seed, count, path = sys.argv[1:] if len(sys.argv) > 1 else (5, 40, pathlib.Path(__file__).with_name("cases.json"))
    random_ = random.Random(int(seed))
    cases = [case(random_) for _ in range(int(count))]
    pathlib.Path(path).write_text("[\n" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "\n]\n")


if __name__ == "__main__":
    main()

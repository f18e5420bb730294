#!/usr/bin/env python3
"""Writes what PyTorch's GradScaler does to grad_scaler.json, beside this script. Deterministic; written by PyTorch 2.6 on CPU.

Usage: grad_scaler.py

{"sequences": [{"init_scale", "growth_factor", "backoff_factor", "growth_interval", "steps": [{"found_inf": whether a gradient was
inf or nan, "new_interval": what set_growth_interval() was given before update() or null, "new_scale": what update() was given or
null, "stepped", "state": state_dict() after update()}, ...]}, ...],
"unscaled": [{"dtype", "scale", "gradient", "result", "found_inf"}, ...]}. All but integers are strings as float.hex() writes them,
"inf", "-inf" and "nan".
"""

import json
import pathlib
import random

import torch
from torch.amp import GradScaler


def exact(value):
    return value if isinstance(value, (bool, int)) else value.hex()


def sequence(random_, number):
    options = {"init_scale": random_.choice([65536.0, 4.0, 3.3, 0.7]), "growth_factor": random_.choice([2.0, 1.1, 3.7]),
               "backoff_factor": random_.choice([0.5, 0.9, 0.3]), "growth_interval": random_.choice([1, 2, 3, 5])}
    if number % 4 == 0:
        options.update(init_scale=1e38, growth_factor=3.7)  # beyond float32
    scaler = GradScaler("cpu", **options)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    steps = []
    for _ in range(random_.randint(5, 40)):
        found_inf = random_.random() < 0.25
        new_scale = random_.choice([8.0, 1000.1]) if random_.random() < 0.05 else None
        scaler.scale(torch.ones(()))
        parameter.grad = torch.tensor([1.0, random_.choice([float("inf"), float("-inf"), float("nan")]) if found_inf else 2.0])
        stepped = []
        hook = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        scaler.step(optimizer)
        new_interval = random_.choice([1, 2, 4]) if random_.random() < 0.1 else None
        if new_interval:
            scaler.set_growth_interval(new_interval)
        hook.remove()
        scaler.update(new_scale)
        steps.append({"found_inf": found_inf, "new_interval": new_interval,
                      "new_scale": new_scale and exact(new_scale), "stepped": bool(stepped),
                      "state": {key: exact(value) for key, value in scaler.state_dict().items()}})
    return {**{key: exact(value) for key, value in options.items()}, "steps": steps}


def unscaled(random_, dtype):
    scale = random_.choice([1.0, 65536.0, 3.3, 2.0 ** 30, 0.1])
    numel = random_.randint(1, 9)
    gradient = torch.tensor([random_.choice([0.0, -0.0, random_.uniform(-1, 1) * 10.0 ** random_.randint(-8, 4), 1.0, 65504.0])
                             for _ in range(numel)], dtype=torch.float64).to(dtype)
    if random_.random() < 0.3:
        gradient[random_.randrange(numel)] = random_.choice([float("inf"), float("-inf"), float("nan")])
    parameter = torch.nn.Parameter(torch.zeros(numel, dtype=dtype))
    parameter.grad = gradient.clone()
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    inverse = scaler._scale.double().reciprocal().float()
    found = scaler._unscale_grads_(optimizer, inverse, torch.zeros(()), True)
    return {"dtype": str(dtype).removeprefix("torch."), "scale": exact(scale), "gradient": [exact(x) for x in gradient.tolist()],
            "result": [exact(x) for x in parameter.grad.tolist()], "found_inf": bool(sum(x.item() for x in found.values()))}


def main():
    random_ = random.Random(7)
    sequences = [sequence(random_, number) for number in range(12)]
    gradients = [unscaled(random_, dtype) for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16) for _ in range(12)]
    lines = lambda items: ",\n".join(json.dumps(item, separators=(",", ":")) for item in items)
    text = f'{{"sequences":[\n{lines(sequences)}\n],\n"unscaled":[\n{lines(gradients)}\n]}}\n'
    pathlib.Path(__file__).with_name("grad_scaler.json").write_text(text)


if __name__ == "__main__":
    main()

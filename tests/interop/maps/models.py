#!/usr/bin/env python3
"""Small language models that follow the layouts of other projects, to compare what they compute before and after a map.

    models.py make FOLDER       writes a checkpoint of each, as its project saves it, and the logits of its model
    models.py check FOLDER      loads what tessera converted, in the other layout, and prints a line of JSON for each

The models are written for this test, from the names, shapes and formulas of the projects: torchtitan's Llama 3 (pairs of
neighbours are rotated), Hugging Face's Llama (two halves of a head are rotated) and GPT-2 (Conv1D, inputs first), Megatron
Core's GPTModel (queries, keys and values fused by groups of heads; gate and up fused) and nanoGPT. They compute in float64.
"""

import json
import pathlib
import sys

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.nn import functional

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB, LENGTH = 2, 4, 2, 8, 32, 48, 50, 12
TOLERANCE = 1e-10
TOKENS = torch.tensor([[(7 * i + 3 * row) % VOCAB for i in range(LENGTH)] for row in range(2)])


def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def angles():
    frequencies = 1 / 10000 ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    return torch.outer(torch.arange(LENGTH, dtype=torch.float64), frequencies)


def rotate_neighbours(x):
    """x: batch, length, heads, head_dim. Elements 2i and 2i+1 are a complex number."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turns = torch.polar(torch.ones_like(angles()), angles())
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(-2)


def rotate_halves(x):
    """Elements i and i + head_dim/2 are a complex number."""
    first, second = x.chunk(2, -1)
    cosine, sine = angles().cos()[None, :, None], angles().sin()[None, :, None]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def attention(q, k, v):
    """Causal, with as many queries for each key as there are; q, k, v: batch, length, heads, head_dim."""
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def heads(x):
    return x.unflatten(-1, (-1, HEAD_DIM))


def llama(weight, names, project, gate_up, rotate):
    """`weight(name)` is a tensor, `names` those of the layers' norms and projections, `project` gives q, k and v."""
    x = functional.embedding(TOKENS, weight(names["embedding"]))
    for layer in range(LAYERS):
        at = lambda name: weight(names[name].format(layer))
        q, k, v = project(rms_norm(x, at("input_norm")), at)
        x = x + attention(rotate(q), rotate(k), v) @ at("o").T
        gate, up = gate_up(rms_norm(x, at("inner_norm")), at)
        x = x + (functional.silu(gate) * up) @ at("down").T
    return rms_norm(x, weight(names["norm"])) @ weight(names["output"]).T


SEPARATE = (
    lambda x, at: (heads(x @ at("q").T), heads(x @ at("k").T), heads(x @ at("v").T)),
    lambda x, at: (x @ at("gate").T, x @ at("up").T),
)
TORCHTITAN = {
    "embedding": "tok_embeddings.weight", "norm": "norm.weight", "output": "output.weight",
    "input_norm": "layers.{}.attention_norm.weight", "inner_norm": "layers.{}.ffn_norm.weight",
    "q": "layers.{}.attention.wq.weight", "k": "layers.{}.attention.wk.weight", "v": "layers.{}.attention.wv.weight",
    "o": "layers.{}.attention.wo.weight", "gate": "layers.{}.feed_forward.w1.weight",
    "down": "layers.{}.feed_forward.w2.weight", "up": "layers.{}.feed_forward.w3.weight",
}
HUGGINGFACE = {
    "embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "output": "lm_head.weight",
    "input_norm": "model.layers.{}.input_layernorm.weight", "inner_norm": "model.layers.{}.post_attention_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight", "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight", "o": "model.layers.{}.self_attn.o_proj.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight", "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
MEGATRON = {
    "embedding": "embedding.word_embeddings.weight", "norm": "decoder.final_layernorm.weight", "output": "output_layer.weight",
    "input_norm": "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight",
    "inner_norm": "decoder.layers.{}.mlp.linear_fc1.layer_norm_weight",
    "qkv": "decoder.layers.{}.self_attention.linear_qkv.weight", "o": "decoder.layers.{}.self_attention.linear_proj.weight",
    "gate_up": "decoder.layers.{}.mlp.linear_fc1.weight", "down": "decoder.layers.{}.mlp.linear_fc2.weight",
}


def fused_by_groups(x, at):
    groups = (x @ at("qkv").T).unflatten(-1, (KV_HEADS, HEADS // KV_HEADS + 2, HEAD_DIM))
    q, k, v = groups.split([HEADS // KV_HEADS, 1, 1], dim=-2)
    return q.flatten(-3, -2), k.flatten(-3, -2), v.flatten(-3, -2)


def gpt2(weight, linear):
    """`linear(x, name)` applies a layer."""
    norm = lambda x, name: functional.layer_norm(x, (HIDDEN,), weight(name + ".weight"), weight(name + ".bias"))
    x = weight("transformer.wte.weight")[TOKENS] + weight("transformer.wpe.weight")[:LENGTH]
    for layer in range(LAYERS):
        at = f"transformer.h.{layer}."
        q, k, v = (heads(y) for y in linear(norm(x, at + "ln_1"), at + "attn.c_attn").split(HIDDEN, -1))
        x = x + linear(attention(q, k, v), at + "attn.c_proj")
        x = x + linear(functional.gelu(linear(norm(x, at + "ln_2"), at + "mlp.c_fc")), at + "mlp.c_proj")
    return norm(x, "transformer.ln_f") @ weight("transformer.wte.weight").T


def logits(layout, state):
    weight = lambda name: state[name].double()
    if layout == "torchtitan":
        return llama(weight, TORCHTITAN, *SEPARATE, rotate_neighbours)
    if layout == "hf-llama":
        return llama(weight, HUGGINGFACE, *SEPARATE, rotate_halves)
    if layout == "megatron":
        gate_up = lambda x, at: (x @ at("gate_up").T).chunk(2, -1)
        return llama(weight, MEGATRON, fused_by_groups, gate_up, rotate_halves)
    if layout == "nanogpt":
        return gpt2(weight, lambda x, name: x @ weight(name + ".weight").T + weight(name + ".bias"))
    if layout == "hf-gpt2":
        return gpt2(weight, lambda x, name: x @ weight(name + ".weight") + weight(name + ".bias"))
    raise ValueError(layout)


def shapes(layout):
    if layout in ("nanogpt", "hf-gpt2"):
        result = {"transformer.wte.weight": (VOCAB, HIDDEN), "transformer.wpe.weight": (LENGTH, HIDDEN)}
        norms = ["transformer.ln_f"] + [f"transformer.h.{layer}.ln_{i}" for layer in range(LAYERS) for i in (1, 2)]
        for name in norms:
            result[name + ".weight"] = result[name + ".bias"] = (HIDDEN,)
        for layer in range(LAYERS):
            for name, (inputs, outputs) in {
                "attn.c_attn": (HIDDEN, 3 * HIDDEN), "attn.c_proj": (HIDDEN, HIDDEN),
                "mlp.c_fc": (HIDDEN, 4 * HIDDEN), "mlp.c_proj": (4 * HIDDEN, HIDDEN),
            }.items():
                full = f"transformer.h.{layer}.{name}"
                result[full + ".weight"] = (inputs, outputs) if layout == "hf-gpt2" else (outputs, inputs)
                result[full + ".bias"] = (outputs,)
        return result
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    sizes = {
        "embedding": (VOCAB, HIDDEN), "norm": (HIDDEN,), "output": (VOCAB, HIDDEN), "input_norm": (HIDDEN,), "inner_norm": (HIDDEN,),
        "q": (q, HIDDEN), "k": (kv, HIDDEN), "v": (kv, HIDDEN), "qkv": (q + 2 * kv, HIDDEN), "o": (HIDDEN, q),
        "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER),
    }
    names = {"torchtitan": TORCHTITAN, "hf-llama": HUGGINGFACE, "megatron": MEGATRON}[layout]
    return {name.format(layer): sizes[key] for key, name in names.items() for layer in range(LAYERS)}


def random_state(layout):
    return {name: torch.randn(shape) * (0.5 if len(shape) > 1 else 1) for name, shape in shapes(layout).items()}


def stacked(state):
    """As Megatron's distributed checkpoints have equal layers: one tensor with a first dimension of layers."""
    layers = {name: value for name, value in state.items() if name.startswith("decoder.layers.")}
    result = {name: value for name, value in state.items() if name not in layers}
    for name in (name for name in layers if name.startswith("decoder.layers.0.")):
        key = name.replace("decoder.layers.0.", "decoder.layers.")
        result[key] = torch.stack([state[name.replace("layers.0.", f"layers.{layer}.")] for layer in range(LAYERS)])
    return result


def make(folder):
    torch.manual_seed(5)
    expected = {}
    for layout in ("torchtitan", "hf-llama", "megatron", "nanogpt", "hf-gpt2"):
        state = random_state(layout)
        expected[layout] = logits(layout, state)
        if layout == "torchtitan":
            saved = {**state, "train_state": {"step": torch.tensor(3)}, "lr_scheduler": {"last_epoch": 3}}
            dcp.save(saved, checkpoint_id=folder / layout)
        elif layout == "megatron":
            dcp.save({**stacked(state), "iteration": 3}, checkpoint_id=folder / layout)
            torch.save({"model": state, "iteration": 3, "args": {"hidden_size": HIDDEN}}, folder / "megatron.pt")
        elif layout == "nanogpt":
            state["lm_head.weight"] = state["transformer.wte.weight"]
            model = {"_orig_mod." + name: value for name, value in state.items()}
            torch.save({"model": model, "iter_num": 3, "model_args": {"n_layer": LAYERS}, "config": {"bias": True}}, folder / "nanogpt.pt")
        else:
            (folder / layout).mkdir()
            save_file(state, folder / layout / "model.safetensors", metadata={"format": "pt"})
            config = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_size": HIDDEN}
            (folder / layout / "config.json").write_text(json.dumps(config))
            (folder / layout / "tokenizer.json").write_text("{}")
    # A model with a tied output, which is not stored.
    tied = random_state("hf-llama")
    tied["lm_head.weight"] = tied["model.embed_tokens.weight"]
    expected["tied"] = logits("hf-llama", tied)
    (folder / "tied").mkdir()
    del tied["lm_head.weight"]
    save_file(tied, folder / "tied" / "model.safetensors")
    torch.save(expected, folder / "expected.pt")


def load(path, layout):
    if path.is_dir() and (path / ".metadata").exists():
        state = {name: torch.zeros(shape) for name, shape in shapes(layout).items()}
        dcp.load(state, checkpoint_id=path)
        return state
    if path.is_dir():
        return load_file(path / "model.safetensors")
    return torch.load(path, weights_only=True)


def check(folder):
    expected = torch.load(folder / "expected.pt", weights_only=True)
    for job in json.loads((folder / "jobs.json").read_text()):
        try:
            state = load(folder / job["path"], job["layout"])
            names = set(state) - {"lm_head.weight"} if job["layout"] == "nanogpt" else set(state)
            if names != set(shapes(job["layout"])):
                raise ValueError(f"other names: {sorted(names ^ set(shapes(job['layout'])))[:5]}")
            worst = (logits(job["layout"], state) - expected[job["of"]]).abs().max().item()
            # The rows of the queries in another order must not pass.
            queries = ("wq.", "q_proj.", "linear_qkv.weight", "c_attn.weight")
            changed = {n: w.flip(0) if any(q in n for q in queries) else w for n, w in state.items()}
            other = (logits(job["layout"], changed) - expected[job["of"]]).abs().max().item()
            ok = worst < TOLERANCE and other > 1e-3
            why = f"logits differ by up to {worst}, those of reversed queries by {other}"
        except Exception as error:
            ok, why = False, f"{type(error).__name__}: {error}"
        print(json.dumps({"what": job["what"], "ok": ok, "why": why}), flush=True)


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](pathlib.Path(sys.argv[2]))

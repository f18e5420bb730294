"""Rows of conversions through a map: against the same conversion without one, in turn."""

import os

from harness import COMMAND, REPEATS, WORK, Table, median, remove, run, settle
from safetensors_file import size_bytes, write_safetensors

MIB = 2**20
MAP_BYTES = int(float(os.environ.get("TESSERA_BENCH_GIB", "2")) * 2**29)
MAP_MEMORY_LIMIT = 128 * MIB
HIDDEN, HEADS, KV_HEADS, INNER, VOCAB = 2048, 32, 8, 5632, 8192


def torchtitan_shapes(layers):
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"tok_embeddings.weight": [VOCAB, HIDDEN], "norm.weight": [HIDDEN], "output.weight": [VOCAB, HIDDEN]}
    for i in range(layers):
        sizes = {"attention.wq": [HIDDEN, HIDDEN], "attention.wk": [kv, HIDDEN], "attention.wv": [kv, HIDDEN],
                 "attention.wo": [HIDDEN, HIDDEN], "feed_forward.w1": [INNER, HIDDEN], "feed_forward.w2": [HIDDEN, INNER],
                 "feed_forward.w3": [INNER, HIDDEN], "attention_norm": [HIDDEN], "ffn_norm": [HIDDEN]}
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in sizes.items()}
    return shapes


def megatron_shapes(layers):
    shapes = {"embedding.word_embeddings.weight": [VOCAB, HIDDEN], "decoder.final_layernorm.weight": [HIDDEN],
              "output_layer.weight": [VOCAB, HIDDEN]}
    sizes = {"self_attention.linear_qkv.weight": [HIDDEN // HEADS * (HEADS + 2 * KV_HEADS), HIDDEN],
             "self_attention.linear_qkv.layer_norm_weight": [HIDDEN], "self_attention.linear_proj.weight": [HIDDEN, HIDDEN],
             "mlp.linear_fc1.weight": [2 * INNER, HIDDEN], "mlp.linear_fc1.layer_norm_weight": [HIDDEN],
             "mlp.linear_fc2.weight": [HIDDEN, INNER]}
    return shapes | {f"decoder.layers.{name}": [layers, *shape] for name, shape in sizes.items()}


def nanogpt_shapes(layers):
    shapes = {"transformer.wte.weight": [VOCAB, HIDDEN], "transformer.wpe.weight": [1024, HIDDEN],
              "transformer.ln_f.weight": [HIDDEN]}
    for i in range(layers):
        sizes = {"attn.c_attn": [3 * HIDDEN, HIDDEN], "attn.c_proj": [HIDDEN, HIDDEN], "mlp.c_fc": [4 * HIDDEN, HIDDEN],
                 "mlp.c_proj": [HIDDEN, 4 * HIDDEN]}
        shapes |= {f"transformer.h.{i}.{name}.weight": shape for name, shape in sizes.items()}
    return shapes


CASES = {"llama-torchtitan-to-hf": torchtitan_shapes, "llama-megatron-to-hf": megatron_shapes, "gpt2-nanogpt-to-hf": nanogpt_shapes}


def map_rows(table: Table, wanted) -> None:
    if "convert_map" not in wanted:
        return
    WORK.mkdir(parents=True, exist_ok=True)
    source, destination = WORK / "map.safetensors", WORK / "out-map"
    for name, shapes in CASES.items():
        one, two = (size_bytes("BF16", shapes(layers)) for layers in (1, 2))
        write_safetensors(source, "BF16", shapes(max(1, (MAP_BYTES - one) // (two - one))), os.urandom(MIB))
        parameters = ["--set", f"heads={HEADS}", "--set", f"kv_heads={KV_HEADS}"] if name.startswith("llama") else []
        sides = {"plain": [], "mapped": ["--map", name, *parameters]}
        times, peak = {side: [] for side in sides}, 0
        for _ in range(REPEATS):
            for side, arguments in sides.items():
                remove(destination)
                settle()
                seconds, memory, _ = run(COMMAND, "convert", source, destination, "--to", "safetensors", *arguments)
                times[side].append(seconds)
                peak = max(peak, memory if side == "mapped" else 0)
        table.add("convert_map", 0.5, f"without a map ({name})", median(times["mapped"]), median(times["plain"]))
        table.add("convert_map_memory", 1, "128 MiB", peak / MIB, MAP_MEMORY_LIMIT / MIB, "MiB")
    remove(destination)
    source.unlink()

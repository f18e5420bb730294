"""Each map that tessera has keeps what a model computes: logits in PyTorch before and after, in both directions."""

import json
import subprocess

LIMIT_SECONDS = 300
SET = ["--set", "heads=4", "--set", "kv_heads=2"]
# Source, destination, map, further arguments, layout of the destination, whose logits it has.
JOBS = [
    ("torchtitan", "hf-from-torchtitan", "llama-torchtitan-to-hf", ["--to", "safetensors", *SET], "hf-llama", "torchtitan"),
    ("hf-llama", "torchtitan-from-hf", "llama-hf-to-torchtitan", ["--to", "dcp"], "torchtitan", "hf-llama"),
    ("tied", "torchtitan-from-tied", "llama-hf-to-torchtitan", ["--to", "dcp", *SET], "torchtitan", "tied"),
    ("hf-from-torchtitan", "torchtitan-again", "llama-hf-to-torchtitan", ["--to", "dcp", *SET], "torchtitan", "torchtitan"),
    ("megatron", "hf-from-megatron", "llama-megatron-to-hf", ["--to", "safetensors", "--hf-config", "hf-llama"], "hf-llama", "megatron"),
    ("megatron.pt", "hf-from-megatron-pt", "llama-megatron-to-hf", ["--to", "safetensors", *SET], "hf-llama", "megatron"),
    ("hf-llama", "megatron-from-hf.pt", "llama-hf-to-megatron", [], "megatron", "hf-llama"),
    ("hf-from-megatron", "megatron-again", "llama-hf-to-megatron", ["--to", "dcp"], "megatron", "megatron"),
    ("nanogpt.pt", "hf-from-nanogpt", "gpt2-nanogpt-to-hf", ["--to", "safetensors"], "hf-gpt2", "nanogpt"),
    ("hf-gpt2", "nanogpt-from-hf.pt", "gpt2-hf-to-nanogpt", [], "nanogpt", "hf-gpt2"),
]


def check_maps(roots, work, tessera, report):
    """`roots` are PyTorchs in which scripts run (the class Root of run)."""
    for root in roots:
        folder = work / f"maps-{root.version}"
        folder.mkdir()
        root.script(work, "maps/models.py", "make", root.inside(folder), timeout=LIMIT_SECONDS)
        jobs = []
        for source, destination, name, arguments, layout, of in JOBS:
            command = [tessera, "convert", source, destination, "--map", name, *arguments]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
            what = f"{name} of {source}"
            report.add("maps", "convert", what, done.returncode == 0, done.stderr)
            if done.returncode != 0:
                continue
            verified = subprocess.run([tessera, "verify", destination], cwd=folder, capture_output=True, text=True, check=False)
            report.add("maps", "verify", what, verified.returncode == 0, verified.stdout + verified.stderr)
            jobs.append({"what": what, "path": destination, "layout": layout, "of": of})
        (folder / "jobs.json").write_text(json.dumps(jobs))
        done = root.script(work, "maps/models.py", "check", root.inside(folder), timeout=LIMIT_SECONDS)
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        report.add("maps", f"torch {root.version}", "each has an answer", len(answers) == len(jobs), f"{len(answers)} answers")
        for answer in answers:
            report.add("maps", f"torch {root.version}", answer["what"], answer["ok"], answer["why"])

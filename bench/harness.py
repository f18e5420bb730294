"""Starts the programs of both sides, describes the sides, and collects the rows of bench/run.

A row compares seconds (or bytes) of tessera with those of a reference. Where LibTorch computes, both sides must have the
same LibTorch, the same BLAS, the same number of threads and the same rate in a matrix product: Table.add checks this and
reports an error in place of a ratio if they differ.
"""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("TESSERA_BUILD", TOP / "build"))
COMMAND = Path(os.environ.get("TESSERA", BUILD / "bin" / "tessera"))
ROOTS = Path(os.environ.get("TESSERA_PYTORCH_ROOTS", BUILD / "pytorch"))
WORK = ROOTS / "bench"  # /mnt/bench in the folders with PyTorch
REPEATS = int(os.environ.get("TESSERA_BENCH_REPEATS", "3"))
RATE_TOLERANCE = 1.2
PLAIN = {"library": "tessera without LibTorch"}
SYSTEM_CALLS = {"library": "system calls"}

# One thread per rank: otherwise the ranks compete for the processors. OpenBLAS reads it when it is loaded.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the same network for both sides

# glibc keeps freed memory in the process. By default it returns large blocks to the kernel, and a program that frees and
# allocates its gradients in each step pays for the page faults.
KEEP_MEMORY = "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"

median = statistics.median


class Unavailable(Exception):
    """A side cannot run here. The text is the reason."""


class BuildError(Unavailable):
    """A side does not build, which is an error."""


def run(*arguments: object) -> tuple[float, int, str]:
    """Returns the seconds, the peak resident bytes and the output."""
    # Errors go to a file: a pipe that nothing reads until the output ends is full after 64 KiB.
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        process = subprocess.Popen([str(a) for a in arguments], stdout=subprocess.PIPE, stderr=errors, text=True)
        with process.stdout:
            output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip()
            raise RuntimeError(f"{' '.join(map(str, arguments))}: exit status {process.returncode}: {text[-500:]}")
        return seconds, usage.ru_maxrss * 1024, output


def json_of(output: str) -> dict:
    """The last line, which is the result of a program of the benchmark."""
    return json.loads(output.strip().splitlines()[-1]) if output.strip() else {}


def ours(program: str, *arguments: object, ranks: int | None = None, libtorch: str | None = None, environment=()) -> dict:
    """Runs a program of this folder and returns the JSON that it prints. With `libtorch`, the program is the one that
    need_libtorch built in the folder of that version, and runs there."""
    launch = ["env", *environment] + ([COMMAND, "run", "-n", ranks, "--no-prefix", "--"] if ranks else [])
    if libtorch:
        arguments = tuple(inside(a) for a in arguments)
        launch += ["chroot", ROOTS / libtorch, inside(WORK / f"libtorch-{libtorch}" / program)]
    else:
        launch += [BUILD / "bin" / program]
    return json_of(run(*launch, *arguments)[2])


def inside(argument: object) -> str:
    """A path below ROOTS as the folders with PyTorch see it."""
    return str(argument).replace(str(ROOTS), "/mnt")


def pytorch(script: str, *arguments: object, version: str = "2.14", environment=()) -> dict:
    """Runs a script of bench/pytorch in the folder of a PyTorch and returns the JSON that it prints."""
    shutil.copytree(TOP / "bench" / "pytorch", WORK / "scripts", dirs_exist_ok=True)
    script = inside(WORK / "scripts" / script)
    return json_of(run("env", *environment, "chroot", ROOTS / version, "python3", "-B", script, *map(inside, arguments))[2])


def need_pytorch(version: str = "2.14") -> dict:
    """Makes and mounts the folder of a PyTorch. Returns the side of a program there that does not compute."""
    if os.geteuid() != 0:
        raise Unavailable(f"needs root, to enter a folder with PyTorch {version}")
    environment = dict(os.environ, TESSERA_PYTORCH_ROOTS=str(ROOTS))
    made = subprocess.run([TOP / "tools" / "pytorch-root", version], env=environment, capture_output=True, text=True)
    if made.returncode != 0:
        raise Unavailable(f"no PyTorch {version}: {made.stderr.strip().splitlines()[-1:]}")
    WORK.mkdir(exist_ok=True)
    return {"library": made.stdout.rsplit(" in ", 1)[0].strip()}


built: dict[tuple[str, str], BuildError | None] = {}


def need_libtorch(version: str, program: str) -> None:
    """Builds a program of this folder on the LibTorch of the folder with PyTorch `version`."""
    need_pytorch(version)
    if (version, program) in built:
        if error := built[version, program]:
            raise error
        return
    folder = f"/tessera/build-bench-{version}"
    script = (f"/tessera/tools/setup build torch bench && cmake -S /tessera --preset release -B {folder} -DTESSERA_TESTS=OFF -DTESSERA_BENCH=ON "
              "-DTESSERA_WERROR=OFF && "
              f"cmake --build {folder} --parallel {os.environ.get('JOBS', os.cpu_count())} --target {program}")
    environment = dict(os.environ, TESSERA_PYTORCH_ROOTS=str(ROOTS))
    print(f"building {program} on LibTorch {version}", flush=True)
    made = subprocess.run([TOP / "tools" / "in-pytorch-root", version, "bash", "-euc", script], env=environment,
                          capture_output=True, text=True)
    if made.returncode != 0:
        log = WORK / f"{program}-{version}.log"
        log.write_text(made.stdout + made.stderr)
        lines = log.read_text().splitlines() or [f"exit status {made.returncode}"]
        first = next((line for line in lines if "error:" in line or "CMake Error" in line), lines[-1])
        built[version, program] = BuildError(f"{program} does not build on LibTorch {version}: {first.strip()}; see {log}")
        raise built[version, program]
    destination = WORK / f"libtorch-{version}"
    destination.mkdir(exist_ok=True)
    shutil.copy2(TOP / f"build-bench-{version}" / "bin" / program, destination / program)
    built[version, program] = None


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def settle() -> None:
    """Waits until earlier writes are on the disk, so that they do not slow the next side."""
    os.sync()


def side_of(results: list[dict]) -> dict:
    """The side that several runs describe, with the median of its rates."""
    sides = [result["side"] for result in results]
    return {**sides[0], "matmul_gflops": round(median(side["matmul_gflops"] for side in sides), 1)}


def difference(first: dict, second: dict) -> str | None:
    """Why two sides that compute cannot be compared."""
    for field in ("libtorch", "blas", "threads"):
        if first[field] != second[field]:
            return f"the sides differ in {field}: ours {first[field]}, reference {second[field]}"
    rates = sorted((first["matmul_gflops"], second["matmul_gflops"]))
    if rates[1] > RATE_TOLERANCE * rates[0]:
        return f"the sides differ in matmul rate: ours {first['matmul_gflops']}, reference {second['matmul_gflops']} GFLOP/s"
    return None


def text_of(side: dict, compute: bool) -> str:
    parts = [side["library"]]
    if compute:
        parts += [side["blas"], f"{side['threads']} thread(s)", f"{side['matmul_gflops']:.0f} GFLOP/s in matmul"]
    parts += [side[key] for key in ("malloc", "way") if key in side]
    return ", ".join(parts)


class Table:
    def __init__(self) -> None:
        self.rows = []
        self.errors = 0

    def fail(self, rows, error) -> None:
        """Notes that some rows could not be measured."""
        self.errors += 1
        reason = f"ERROR: {type(error).__name__}: {error}"
        self.rows.append({"row": rows, "reason": reason})
        print(f"{rows}: {reason}", flush=True)

    def add(self, row, target, against, ours=None, reference=None, unit="s", reason=None, sides=None, compute=False):
        """`ours` and `reference`: less is better; the ratio is how many times better we are. `sides`: what computed
        each. With `compute`, LibTorch does the work, and sides that differ are an error. `reason`: why there is no ratio."""
        if isinstance(reason, BuildError):
            self.errors += 1
            reason = f"ERROR: {reason}"
        sides = {"ours": sides[0], "reference": sides[1]} if sides else None
        if compute and not reason and (reason := difference(sides["ours"], sides["reference"])):
            reason, ours, reference = f"ERROR: {reason}", None, None
            self.errors += 1
        ratio = reference / ours if ours and reference else None
        entry = {"row": row, "ratio": ratio, "target": target, "ours": ours, "reference": reference, "unit": unit,
                 "against": against, "sides": sides}
        if reason:
            entry["reason"] = reason = str(reason)
        self.rows.append(entry)
        shown = [f"{v:.3g}" if v is not None else "-" for v in (ratio, target, ours, reference)]
        verdict = reason or ("" if ratio is None or not target else "reached" if ratio >= target else "MISSED")
        print(f"{row:<28}{shown[0]:>8}{shown[1]:>8}{shown[2]:>10}{shown[3]:>10}  {unit:<4} {against:<38} {verdict}")
        if sides and sides["ours"] != sides["reference"]:
            print(f"    ours: {text_of(sides['ours'], compute)}; reference: {text_of(sides['reference'], compute)}")
        elif sides:
            print(f"    both: {text_of(sides['ours'], compute)}")
        print(end="", flush=True)

"""FullyShardedDataParallel: the same training under PyTorch's and under tessera's, and each going on from the other's checkpoint."""

import concurrent.futures
import dataclasses
import itertools
import json
import os
import subprocess

ROW = "fsdp_train"
TIMEOUT = 300  # seconds, many times what it takes
SHOWN_ERROR = 1000  # characters
STEPS, HALF = 6, 3


@dataclasses.dataclass(frozen=True)
class Allowed:
    """How far apart two trainings may be: losses and norms relative to themselves, tensors to their largest element."""

    first_loss: float
    losses: float
    states: dict


# Sums in another order. What an optimizer remembers of one element is what remains of a sum in which most cancels.
FLOAT32 = Allowed(1e-5, 1e-5, {"model": 1e-5, "optim": 1e-4})
# One bfloat16 that is rounded the other way is 0.4 % off, and of little gradients AdamW makes steps like of great ones.
# Nothing has added up in the first loss, which in float32 is 0.26 % greater: so it tells whether parameters, buffers and
# inputs were cast where they should be.
BFLOAT16 = Allowed(1e-3, 2e-2, {"model": 0.1})

BF16 = ["--mixed", "bf16"]
FLAT, SGD = ["--orig-params", "0"], ["--optimizer", "sgd"]
TP, FULLY_SHARD = ["--network", "mlp", "--tp"], ["--engine", "fully_shard"]
LOCAL = ["--orig-params", "0", "--state", "local"]
ACCUMULATED = ["--accumulate", "3", "--clip", "0.5"]
CASES = {
    "full_shard": ["--ranks", "4"],
    "full_shard, flat": ["--ranks", "3", *FLAT],
    "full_shard, sgd": ["--ranks", "2", *SGD],
    "full_shard, flat, sgd": ["--ranks", "2", *FLAT, *SGD],
    "shard_grad_op": ["--ranks", "3", "--strategy", "shard_grad_op"],
    "shard_grad_op, flat, sgd": ["--ranks", "2", "--strategy", "shard_grad_op", *FLAT, *SGD],
    "no_shard": ["--ranks", "3", "--strategy", "no_shard"],
    "no_shard, flat, sgd": ["--ranks", "2", "--strategy", "no_shard", *FLAT, *SGD],
    "one rank": ["--ranks", "1"],
    "one parameter frozen": ["--ranks", "3", "--freeze", "1"],
    "clipped": ["--ranks", "2", "--clip", "0.5"],
    "accumulated in no_sync": ["--ranks", "3", *ACCUMULATED],
    "accumulated in no_sync, flat": ["--ranks", "2", *ACCUMULATED, *FLAT],
    "accumulated sharded": ["--ranks", "3", *ACCUMULATED, "--sync-each", "1"],
    "accumulated sharded, flat": ["--ranks", "2", *ACCUMULATED, "--sync-each", "1", *FLAT],
    "accumulated, no_shard": ["--ranks", "2", *ACCUMULATED, "--strategy", "no_shard"],
    "bfloat16": ["--ranks", "4", *BF16],
    "bfloat16, flat, sgd": ["--ranks", "2", *BF16, *FLAT, *SGD],
    "bfloat16, reduced in float32": ["--ranks", "3", *BF16, "--reduce-float32", "1"],
    "bfloat16, gradients too": ["--ranks", "2", *BF16, "--keep-low-precision", "1", *SGD],
    "bfloat16, accumulated": ["--ranks", "2", *BF16, *ACCUMULATED, "--strategy", "shard_grad_op"],
    "bfloat16, no_shard": ["--ranks", "2", *BF16, "--strategy", "no_shard"],
    "tensor parallel": ["--ranks", "2", *TP, "2"],
    "tensor parallel, 4 ranks, sgd": ["--ranks", "4", *TP, "4", *SGD],
    "two dimensions": ["--ranks", "4", *TP, "2"],
    "two dimensions, sgd": ["--ranks", "4", *TP, "2", *SGD],
    "two dimensions, 4 x 2": ["--ranks", "8", *TP, "2"],
    "two dimensions, shard_grad_op": ["--ranks", "4", *TP, "2", "--strategy", "shard_grad_op"],
    "two dimensions, accumulated": ["--ranks", "4", *TP, "2", "--accumulate", "3", "--sync-each", "1"],
    "two dimensions, fully_shard": ["--ranks", "4", *TP, "2", *FULLY_SHARD],
    "two dimensions, fully_shard, sgd": ["--ranks", "8", *TP, "4", *FULLY_SHARD, *SGD],
}

# The runs that save half-way on 4 ranks, and the runs that resume them.
SAVED = {
    "adamw": ["--optimizer", "adamw"],
    "flat, sgd": ["--optimizer", "sgd", "--orig-params", "0"],
    "local": ["--optimizer", "stateless", *LOCAL],
    "two dimensions": ["--optimizer", "adamw", *TP, "2"],
    "two dimensions, fully_shard": ["--optimizer", "adamw", *TP, "2", *FULLY_SHARD],
}
RESUMED = [
    ["--ranks", "1", "--orig-params", "1"],
    ["--ranks", "2", "--strategy", "shard_grad_op", "--orig-params", "0"],
    ["--ranks", "3", "--orig-params", "1"],
    ["--ranks", "2", "--strategy", "no_shard", "--orig-params", "1"],
    ["--ranks", "8", "--orig-params", "0"],
]
# The same for local states, which PyTorch loads only on as many ranks.
RESUMED_LOCAL = [["--ranks", ranks, *LOCAL] for ranks in ("4", "2", "3")]
# The same for tensor parallel runs. If both dimensions of a mesh shard the same dimension of a parameter, PyTorch's
# FullyShardedDataParallel cannot restore the optimizer's state, not even its own; its fully_shard can.
RESUMED_TP = [
    ["--ranks", "1", *TP, "1"],
    ["--ranks", "3", *TP, "1", "--orig-params", "0"],
    ["--ranks", "3", *TP, "1", *FULLY_SHARD],
    ["--ranks", "2", *TP, "2"],
    ["--ranks", "4", *TP, "4"],
    ["--ranks", "4", *TP, "2", *FULLY_SHARD],
    ["--ranks", "8", *TP, "4", *FULLY_SHARD],
]


def is_bfloat16(arguments):
    return "bf16" in arguments


def allowed_of(arguments):
    return BFLOAT16 if is_bfloat16(arguments) else FLOAT32


def can_run(root, arguments):
    """PyTorch 2.14's Gloo carries no bfloat16, and 2.6's fully_shard doesn't run on CPU."""
    if "fully_shard" in arguments:
        return root.version != "2.6"
    if "local" in arguments and "--ranks" in arguments:
        return arguments[arguments.index("--ranks") + 1] == "4"
    return not is_bfloat16(arguments) or root.version == "2.6"


def resumed_as(arguments):
    if "local" in arguments:
        return RESUMED_LOCAL
    return RESUMED_TP if "--tp" in arguments else RESUMED


def for_us(arguments):
    """Removes the arguments that are for PyTorch only."""
    return [word for i, word in enumerate(arguments) if "--engine" not in arguments[max(i - 1, 0) : i + 1]]


def optimizer_of(arguments):
    """The optimizer arguments of SAVED, for runs that resume and may shard the parameters differently."""
    return arguments[:2]


def network_of(arguments):
    return ["--network", "mlp"] if "mlp" in arguments else []


def goes_on_plain(arguments):
    """Whether one process with nothing sharded can load the state."""
    return "local" not in arguments


class Folder:
    """Trainings of one writer: of each NAME its losses in NAME.json, and in NAME the checkpoint that it saved."""

    def __init__(self, path):
        self.path = path
        path.mkdir()
        self.errors = {}

    def losses(self, name):
        if name in self.errors:
            raise RuntimeError(self.errors[name])
        return json.loads((self.path / f"{name}.json").read_text())

    def arguments(self, name, arguments, steps, inside=str, source=None):
        files = ["--losses", inside(self.path / f"{name}.json"), "--save", inside(self.path / name)]
        if source is not None:
            files += ["--load", inside(source)]
        return [*arguments, "--steps", str(steps[0]), str(steps[1]), *files]


def run_ours(program, folder, runs):
    """Runs: name, arguments, steps and what is loaded, if anything. In as many processes as there are processors, since to
    load LibTorch takes as long as a run."""

    def several(mine):
        lines = [
            json.dumps(folder.arguments(name, for_us(arguments), steps, source=source)) for name, arguments, steps, source in mine
        ]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        try:
            done = subprocess.run([str(program)], input="\n".join(lines), env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT)
            output, why = done.stdout, done.stderr[-SHOWN_ERROR:] or f"exit status {done.returncode}"
        except subprocess.TimeoutExpired as expired:
            output, why = (expired.stdout or b"").decode(), "hangs"
        record_errors(folder, mine, output, why)

    processes = os.cpu_count()
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        list(pool.map(several, [runs[i::processes] for i in range(processes)]))


def run_theirs(root, work, folder, runs):
    """All in one process, since to start PyTorch takes seconds."""
    lines = [
        json.dumps(folder.arguments(name, arguments, steps, root.inside, source)) for name, arguments, steps, source in runs
    ]
    done = root.script(work, "train_fsdp.py", "--runs", input="\n".join(lines), timeout=TIMEOUT)
    record_errors(folder, runs, done.stdout, "no answer")


def record_errors(folder, runs, output, why_unanswered):
    """Of runs, of which the output has a line for each that has ended."""
    answers = [json.loads(line)["why"] for line in output.splitlines() if line.startswith("{")]
    for (name, *_), why in itertools.zip_longest(runs, answers[: len(runs)], fillvalue=why_unanswered):
        if why:
            folder.errors[name] = why[-SHOWN_ERROR:]


def all_close(found, expected, limits):
    """Whether the difference of each number, relative to the expected one, is at most its limit. Compares each, since max() of Python
    loses a NaN."""
    apart = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    return all(one <= limit for one, limit in zip(apart, limits))


def difference(found, expected, allowed):
    """Of the losses and norms of the same steps; nothing if there is none."""
    for key in ("losses", "norms"):
        limits = itertools.chain([allowed.first_loss if key == "losses" else allowed.losses], itertools.repeat(allowed.losses))
        if not all_close(found[key], expected[key], limits):
            return f"{key} {found[key]} and {expected[key]}"
    return ""


class Comparison:
    """Pairs of trainings; their checkpoints are looked at together at the end, by one process of each PyTorch."""

    def __init__(self, work, report):
        self.work, self.report = work, report
        self.jobs = []

    def add(self, step, what, found, expected, allowed, root, last_only=False):
        """Found and expected: folder and name. If `last_only`, the expected training has earlier steps, too."""
        try:
            losses, wanted = found[0].losses(found[1]), expected[0].losses(expected[1])
            if last_only:
                wanted = {key: values[-len(losses["losses"]) :] for key, values in wanted.items()}
            why = difference(losses, wanted, allowed)
        except (RuntimeError, ValueError, OSError) as error:
            why = str(error)
        self.report.add(ROW, step, what, not why, why)
        if not why:
            paths = [folder.path / name for folder, name in (found, expected)]
            self.jobs.append((root, step, f"{what}: the state", *paths, allowed.states))

    def states(self, roots):
        def check(root):
            mine = [job for job in self.jobs if job[0] is root]
            lines = [
                json.dumps({"id": i, "found": root.inside(found), "expected": root.inside(expected), "allowed": allowed})
                for i, (_, _, _, found, expected, allowed) in enumerate(mine)
            ]
            done = root.script(self.work, "check_fsdp_states.py", input="\n".join(lines), timeout=TIMEOUT)
            why = {answer["id"]: answer["why"] for answer in map(json.loads, done.stdout.splitlines())}
            return [(step, what, why.get(i, "no answer")) for i, (_, step, what, *_) in enumerate(mine)]

        with concurrent.futures.ThreadPoolExecutor(len(roots)) as pool:
            for answers in pool.map(check, roots):
                for step, what, why in answers:
                    self.report.add(ROW, step, what, not why, why)


def check_fsdp_training(roots, work, program, report):
    """Losses and final states are the same, and resumed runs match uninterrupted ones, in either language on any ranks."""
    place = work / "fsdp_train"
    place.mkdir()
    ours, resumed_ours = Folder(place / "ours"), Folder(place / "ours-on")
    theirs = {root: Folder(place / root.version) for root in roots}
    resumed_theirs = {root: Folder(place / f"{root.version}-on") for root in roots}

    halves = [(f"half {name}", ["--ranks", "4", *arguments], (0, HALF), None) for name, arguments in SAVED.items()]
    full_runs = [(f"full {name}", ["--ranks", "4", *arguments], (0, STEPS), None) for name, arguments in SAVED.items()]
    cases = [(name, arguments, (0, STEPS), None) for name, arguments in CASES.items()]

    def resumed_runs(folder, name, arguments):
        for others in resumed_as(arguments):
            how = " ".join(word.removeprefix("--") for word in others)
            yield f"{name} {how}", [*optimizer_of(arguments), *others], (HALF, STEPS), folder.path / f"half {name}"

    def first(root):
        run_theirs(root, work, theirs[root], [run for run in [*halves, *cases] if can_run(root, run[1])])

    def second(root):
        runs = [run for name, arguments in SAVED.items() for run in resumed_runs(ours, name, arguments) if can_run(root, run[1])]
        plain = [
            (f"{name} plain", [*optimizer_of(arguments), *network_of(arguments), "--plain"], (HALF, STEPS), ours.path / f"half {name}")
            for name, arguments in SAVED.items()
            if goes_on_plain(arguments)
        ]
        run_theirs(root, work, resumed_theirs[root], [*runs, *plain])

    with concurrent.futures.ThreadPoolExecutor(len(roots)) as pool:
        list(pool.map(first, roots))
    run_ours(program, ours, [*halves, *full_runs, *cases])
    with concurrent.futures.ThreadPoolExecutor(len(roots)) as pool:
        list(pool.map(second, roots))
    runs = [run for name, arguments in SAVED.items() for run in resumed_runs(ours, name, arguments)]
    for root in roots:
        for name, arguments in SAVED.items():
            if not can_run(root, arguments):
                continue
            for run, *rest in resumed_runs(theirs[root], name, arguments):
                runs.append((f"{root.version} {run}", *rest))
    run_ours(program, resumed_ours, runs)

    compare = Comparison(work, report)
    for root in roots:
        step = f"torch {root.version}"
        for name, arguments in CASES.items():
            if can_run(root, arguments):
                compare.add(step, name, (ours, name), (theirs[root], name), allowed_of(arguments), root)
        for name, arguments in SAVED.items():
            full = (ours, f"full {name}")
            plain = [(f"{name} plain", [])] if goes_on_plain(arguments) else []
            for run, how, *_ in [*resumed_runs(ours, name, arguments), *plain]:
                if not can_run(root, how):
                    continue
                compare.add(step, f"Python resumes: {run}", (resumed_theirs[root], run), full, FLOAT32, root, True)
            if not can_run(root, arguments):
                continue
            for run, *_ in resumed_runs(theirs[root], name, arguments):
                found = (resumed_ours, f"{root.version} {run}")
                compare.add(step, f"C++ resumes: {run}", found, full, FLOAT32, root, True)
    for name, arguments in SAVED.items():
        for run, *_ in resumed_runs(ours, name, arguments):
            compare.add("reshard", f"C++ resumes from C++: {run}", (resumed_ours, run), (ours, f"full {name}"), FLOAT32, roots[0], True)
    compare.states(roots)
